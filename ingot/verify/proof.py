"""What a proof found: a line for each thing that was checked. How it is shown is the command line's
business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NAMED = 3
"""Faults of one check that its detail names."""


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


def check_of_faults(
    what: str, found: Sequence[str], right: str, again: str = "ingot prepare"
) -> Check:
    """The check of what may have any number of faults; the first of them are named."""
    more = f"; and {len(found) - NAMED:,} more" if len(found) > NAMED else ""
    return Check(
        what,
        not found,
        "; ".join(found[:NAMED]) + f"{more}; run `{again}` again" if found else right,
    )
