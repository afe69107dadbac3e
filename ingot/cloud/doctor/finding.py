"""One line of what `ingot doctor` finds, on this machine or in Google Cloud."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DoctorFinding:
    """What was looked for. `ok` None means unknown. `needed`: nothing works, or the recipe cannot
    run, without it. `get`: a command that helps, and of what is optional what it is for.
    """

    what: str
    ok: bool | None
    found: str
    get: str = ""
    needed: bool = False
