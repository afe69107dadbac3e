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
_LOGIN = re.compile(r"(?P<scheme>\w://)[^\s/@]+@")


def masked(recipe: str) -> str:
    """The YAML of a recipe without what looks like a secret: values of keys with such a name, and
    logins in addresses. References to secrets (`env:`, `secret:`) stay.
    """
    return _LOGIN.sub(rf"\g<scheme>{MASK}@", _SECRET.sub(rf"\g<key>'{MASK}'", recipe))
