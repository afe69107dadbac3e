"""What a proof found: a line for each thing that was checked. How it is shown is the command line's
business.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One thing that was checked. `passed` is None where it does not apply; `detail` then says
    why.
    """

    what: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class Proof:
    """All checks of one verb `verify`. It holds when none failed."""

    title: str
    checks: list[Check]

    @property
    def holds(self) -> bool:
        return all(check.passed is not False for check in self.checks)
