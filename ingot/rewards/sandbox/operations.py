"""What the judge may ask of an object of the answer's, by name, and how a change of plain data that
one side made is made by the other, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

BETWEEN: dict[str, Callable[[Any, Any], Any]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "divmod": divmod,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}
"""Between two objects, by the names of the methods without their underscores."""
COMPARISONS = ("lt", "le", "gt", "ge")
IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    f"i{name}": getattr(operator, f"i{name}")
    for name in BETWEEN
    if name not in COMPARISONS and name != "divmod"
}
ALONE: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "invert": operator.invert,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "str": str,
    "repr": repr,
    "len": len,
    "bool": bool,
    "iter": iter,
    "next": next,
    "reversed": reversed,
    "enter": lambda value: value.__enter__(),
    "exit": lambda value: value.__exit__(None, None, None),
}
"""Of one object."""
PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)
"""What passes between the two sandboxes as a copy, and so loses a class that is derived of it."""
OPERATIONS: dict[str, Callable[..., Any]] = {
    **BETWEEN,
    **IN_PLACE,
    **ALONE,
    "hash": hash,
    "round": round,
    "format": format,
    "attribute": getattr,
    "set attribute": setattr,
    "delete attribute": delattr,
    "item": operator.getitem,
    "set item": operator.setitem,
    "delete item": operator.delitem,
    "contains": operator.contains,
    "equal": operator.eq,
    "instance": lambda value, kind: isinstance(value, kind),
    "subclass": lambda value, kind: issubclass(value, kind),
    "is plain": lambda kind: issubclass(kind, PLAIN),
    "has": lambda value, name: getattr(type(value), name, None) is not getattr(object, name, None),
}


def become(mine: Any, other: Any) -> None:
    """Change a list, a set or a dict as the other side has changed its copy."""
    if isinstance(mine, list) and isinstance(other, list):
        mine[:] = other
    elif isinstance(mine, dict | set) and isinstance(other, dict | set):
        mine.clear()
        mine.update(other)
