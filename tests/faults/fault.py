"""What one planted fault is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in `file`, becomes `new`. `about` is the silent fault of the trade
    that this is; `by` a test file that is expected to catch it, tried first.
    """

    id: str
    file: str
    old: str
    new: str
    about: str
    by: str = ""
