"""Takes what looks like a secret out of what others will read: a recipe, and the records of a
run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ingot.base.environment import holds_secret
from ingot.base.markers import fingerprint

MASK = "(hidden)"
REFERENCES = ("env:", "secret:")
"""How a value begins that names a secret rather than being one."""
_ADDRESS = re.compile(r"\w://\S+")
_QUERY = re.compile(
    r"""(?P<key>[?&;\#][^=&\s]*(?:passw|passphrase|secret|credential|key|token|sig|auth
    |(?<![a-z])(?:pass|pwd|pw|jwt|sas)(?![a-z]))[^=&\s]*=)(?P<value>[^&\s\#]+)""",
    re.IGNORECASE | re.VERBOSE,
)
# A password may hold an @, and clients take what stands before the last one.
_LOGIN = re.compile(r"(?P<key>\w://)(?P<value>[^\s/?\#]+)(?=@)")


def masked(value: Any) -> Any:
    """A recipe, or a part of it, as others may read it: without the values under names of secrets,
    and without the logins and keys in addresses. References to secrets (`env:`, `secret:`) stay.

    It takes the values, not the text: YAML writes one value in many ways.
    """
    if isinstance(value, str):
        text = _LOGIN.sub(rf"\g<key>{MASK}", value)
        return _ADDRESS.sub(lambda found: _QUERY.sub(rf"\g<key>{MASK}", found[0]), text)
    if isinstance(value, dict):
        return {
            masked(key): (_hidden if holds_secret(str(key)) else masked)(item)
            for key, item in value.items()
        }
    return [masked(item) for item in value] if isinstance(value, list | tuple) else value


def _hidden(value: Any, mark: Callable[[Any], str] = lambda _: MASK) -> Any:
    if isinstance(value, dict):
        return {key: _hidden(item, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item, mark) for item in value]
    is_secret = value not in ("", None, False, True) and not str(value).startswith(REFERENCES)
    return mark(value) if is_secret else value


def knobs_hidden(value: Any) -> Any:
    """Knobs as a record keeps them, that others may read: values under names of secrets, such as an
    argument of a reward, leave a mark too, as `keys_hidden` does of keys in addresses.
    """
    if isinstance(value, dict):
        return {
            keys_hidden(key): _hidden(one, _mark) if holds_secret(str(key)) else knobs_hidden(one)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [knobs_hidden(one) for one in value]
    return keys_hidden(value)


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
    return f"{found['key']}{_mark(found['value'])}"


def _mark(secret: Any) -> str:
    if str(secret).startswith(MASK[:-1]):
        return str(secret)
    return f"{MASK[:-1]}:{fingerprint(secret)[:4]})"
