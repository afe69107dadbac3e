"""Takes what looks like a secret out of a recipe that others will read."""

from __future__ import annotations

import re

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
    [^&\s,}\]\#]+""",
    re.IGNORECASE | re.VERBOSE,
)
_LOGIN = re.compile(r"(?P<scheme>\w://)[^\s/@]+@")


def masked(recipe: str) -> str:
    """The YAML of a recipe without what looks like a secret: values of keys with such a name, in
    addresses too, and their logins. References to secrets (`env:`, `secret:`) stay.
    """
    text = _LOGIN.sub(rf"\g<scheme>{MASK}@", _SECRET.sub(rf"\g<key>'{MASK}'", recipe))
    return _ADDRESS.sub(lambda found: _QUERY.sub(rf"\g<key>{MASK}", found[0]), text)
