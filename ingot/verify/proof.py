"""The result of a proof: one line per check. The command line decides how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NAMED = 3
"""The number of faults that a check's detail names."""


@dataclass(frozen=True)
class Check:
    """One check. `passed` is None if it does not apply; `detail` then says why."""

    what: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class Proof:
    """All checks of one proof. It holds if none failed."""

    title: str
    checks: list[Check]

    @property
    def holds(self) -> bool:
        return all(check.passed is not False for check in self.checks)


def check_of_faults(
    what: str, found: Sequence[str], right: str, again: str = "ingot prepare"
) -> Check:
    """A check that fails if there are faults, and names the first of them."""
    more = f"; and {len(found) - NAMED:,} more" if len(found) > NAMED else ""
    return Check(
        what,
        not found,
        "; ".join(found[:NAMED]) + f"{more}; run `{again} --again`" if found else right,
    )
