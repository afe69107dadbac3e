"""What went wrong in a training: deaths, put together from the events that tell of one, and steps
that were not taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Event = Mapping[str, Any]
IncidentKind = Literal["died", "killed", "hung", "rolled back", "skipped"]
FAILURE_EVENTS = ("killed", "hang", "failure", "roll_back", "restart", "lost", "give_up")
"""Events that tell of a death, the best word for its cause first. `restart` and `lost` come when it
is over, from the supervisor and the next attempt.
"""
_AFTER = {
    "killed": {"killed", "restart", "lost"},
    "restart": {"restart", "lost"},
    "lost": {"lost"},
    "give_up": set[str](),
}
_AFTER |= {kind: {"restart", "lost"} for kind in ("hang", "failure", "roll_back")}
"""What an event of a kind cannot come after within one death: it tells of the next one."""
_KINDS: dict[str, IncidentKind] = {"killed": "killed", "hang": "hung", "roll_back": "rolled back"}
_MOST = 1e11


@dataclass(frozen=True)
class Incident:
    """A death and what it cost, or steps in a row that were not taken, which cost nothing but
    themselves.
    """

    kind: IncidentKind
    at: float
    """On the clock of the account."""
    wall: float | None
    """By the wall clock, seconds since the epoch; None where no event tells."""
    ranks: tuple[int, ...]
    """Empty where all are meant, or none is known."""
    step: int | None
    """The steps that were done; the first of those that were not taken."""
    steps: int
    """How many were done again, or not taken."""
    lost_s: float
    down_s: float
    starting_s: float
    """Of the start that followed."""
    cause: str

    @property
    def cost_s(self) -> float:
        return self.lost_s + self.down_s + self.starting_s


@dataclass
class FailureDetails:
    """What is known of one death so far."""

    at: float | None = None
    """When it was noticed, on the clock of the account."""
    wall: float | None = None
    kind: IncidentKind = "died"
    ranks: set[int] = field(default_factory=set)
    step: int | None = None
    steps: int = 0
    spent_s: float = 0.0
    """What the dead one had spent since its last commit."""
    words: dict[str, str] = field(default_factory=dict)
    """The cause, by the kind of the event that tells it."""

    @property
    def cause(self) -> str:
        told = {kind: self.words[kind] for kind in FAILURE_EVENTS if self.words.get(kind)}
        given_up = told.pop("give_up", "").partition("; the last failure:")[0]
        if self.kind == "died" and "restart" in told and "failure" in told:
            best = f"{told['restart']} ({told['failure']})"
        else:
            best = next(iter(told.values()), "ended without a word")
        return f"{best}; given up: {given_up}" if given_up else best

    def hear(self, kind: str, event: Event, now: float) -> None:
        cause = " ".join(str(event.get("cause") or "").split())
        noticed = now - seconds(event) if kind == "restart" else now
        if kind not in ("lost", "give_up"):
            self.at = noticed if self.at is None else min(self.at, noticed)
            wall = number(event.get("t_wall"))
            self.wall = (
                wall - (now - noticed) if self.wall is None and wall is not None else self.wall
            )
        self.kind = _KINDS.get(kind, self.kind)
        if kind in ("killed", "hang") and (rank := whole(event.get("rank"))) is not None:
            self.ranks.add(rank)
        if kind == "killed":
            cause = f"killed by {cause or 'someone'}{_victims(event)}"
        elif kind == "failure":
            cause = cause.removeprefix("train:").strip()
        elif kind == "lost":
            self.spent_s, self.steps = seconds(event), max(whole(event.get("steps")) or 0, 0)
        step = whole(event.get("step"))
        if step is not None and kind == "lost":
            step += self.steps
        self.step = step if self.step is None else self.step
        self.words.setdefault(kind, cause)

    def loss(self, lost_s: float, down_s: float, at: float, wall: float | None) -> Incident:
        """`wall` is when it must have been, where no event tells."""
        return Incident(
            self.kind,
            at,
            wall if self.wall is None else self.wall,
            tuple(sorted(self.ranks)),
            self.step,
            self.steps,
            lost_s,
            down_s,
            0.0,
            self.cause,
        )


def record_failure(deaths: list[FailureDetails], kind: str, event: Event, now: float) -> None:
    """Add what an event of a kind of FAILURE_EVENTS tells to the last of `deaths`, or begin
    another. `now`: when it was recorded, by the account's clock.
    """
    if not deaths or _AFTER[kind] & deaths[-1].words.keys():
        deaths.append(FailureDetails())
    deaths[-1].hear(kind, event, now)


def record_skip(losses: list[Incident], event: Event, now: float) -> None:
    """Add a step that was not taken, to those before it where it comes next for the same reason."""
    cause, step = " ".join(str(event.get("cause") or "").split()), whole(event.get("step"))
    last = losses[-1] if losses else None
    if (
        last
        and last.kind == "skipped"
        and step is not None
        and last.step is not None
        and step == last.step + last.steps
        and _same(last.cause, cause)
    ):
        losses[-1] = replace(last, steps=last.steps + 1)
    else:
        losses.append(
            Incident("skipped", now, number(event.get("t_wall")), (), step, 1, 0.0, 0.0, 0.0, cause)
        )


def number(value: Any) -> float | None:
    """A figure that can be reckoned with, or None."""
    is_figure = (
        isinstance(value, int | float) and not isinstance(value, bool) and -_MOST <= value <= _MOST
    )
    return float(value) if is_figure and math.isfinite(value) else None


def whole(value: Any) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def seconds(event: Event) -> float:
    """How long an event says that it took; 0 where it does not."""
    return max(number(event.get("seconds")) or 0.0, 0.0)


def _victims(event: Event) -> str:
    rank, what = whole(event.get("rank")), event.get("what")
    if rank is not None:
        return f": rank {rank}"
    return ": all ranks and the supervisor" if what == "supervisor" else ": all ranks"


def _same(one: str, other: str) -> bool:
    """Apart from figures, which stand after a comma."""
    return one.partition(",")[0] == other.partition(",")[0]


def incident_steps(loss: Incident) -> str:
    """Where it happened, and what was done again: `58, 18 again`; of steps that were not taken,
    which.
    """
    if loss.step is None:
        return ""
    if loss.kind == "skipped":
        return (
            f"{loss.step:,}"
            if loss.steps == 1
            else f"{loss.step:,} to {loss.step + loss.steps - 1:,}"
        )
    return f"{loss.step:,}, {loss.steps:,} again" if loss.steps else f"{loss.step:,}"


def incident_ranks(loss: Incident) -> str:
    return ", ".join(str(rank) for rank in loss.ranks)
