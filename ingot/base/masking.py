"""Takes what looks like a secret out of what others will read: a recipe, and the records of a
run.
"""

from __future__ import annotations

import re
from typing import Any

from ingot.base.markers import fingerprint

MASK = "(hidden)"
_SECRET = re.compile(
    r"""(?P<key>(?<![\w.-])["']?[\w.-]*(?:passw(?:or)?d|secret|credentials?|api_?key|access_?key
    |private_?key|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)token)["']?:[ ]+)
    (?!(?:env|secret):|null|true|false|~|[|>\[{])(?P<value>"(?:[^"\\]|\\.)*"|'[^']*'|[^\s,}][^,}\n]*)""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_ADDRESS = re.compile(r"\w://[^\s'\"]+")
_QUERY = re.compile(
    r"""(?P<key>[?&;\#][^=&\s]*(?:passw|secret|credential|key|token|sig|auth)[^=&\s]*=)
    (?P<value>[^&\s,}\]\#]+)""",
    re.IGNORECASE | re.VERBOSE,
)
_LOGIN = re.compile(r"(?P<key>\w://)(?P<value>[^\s/@]+)(?=@)")


def masked(recipe: str) -> str:
    """The YAML of a recipe without what looks like a secret: values of keys with such a name, in
    addresses too, and their logins. References to secrets (`env:`, `secret:`) stay.
    """
    text = _LOGIN.sub(rf"\g<key>{MASK}", _SECRET.sub(rf"\g<key>'{MASK}'", recipe))
    return _ADDRESS.sub(lambda found: _QUERY.sub(rf"\g<key>{MASK}", found[0]), text)


def keys_hidden(value: Any) -> Any:
    """A record without the keys and logins in its addresses: a text, or what JSON can hold. Each
    leaves a mark by which another one differs, so that records compare as they did before; four
    digits of a hash, too few to find the key by. What was hidden before stays.
    """
    if isinstance(value, str):
        return _in_text(value) if "://" in value else value
    if isinstance(value, dict):
        return {keys_hidden(key): keys_hidden(one) for key, one in value.items()}
    return [keys_hidden(one) for one in value] if isinstance(value, list | tuple) else value


def _in_text(text: str) -> str:
    return _ADDRESS.sub(lambda found: _QUERY.sub(_marked, found[0]), _LOGIN.sub(_marked, text))


def _marked(found: re.Match[str]) -> str:
    secret = found["value"]
    if secret.startswith(MASK[:-1]):
        return found[0]
    return f"{found['key']}{MASK[:-1]}:{fingerprint(secret)[:4]})"
