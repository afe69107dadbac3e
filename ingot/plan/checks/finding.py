"""What a judgement is, and how sizes are told in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FindingKind = Literal["warning", "known", "not checked"]


@dataclass(frozen=True)
class PlanFinding:
    """One judgement; `about` is the knob or thing that it concerns."""

    kind: FindingKind
    about: str
    message: str


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f}" if size >= 1e8 else f"{size / 1e9:,.3f}"


def figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
