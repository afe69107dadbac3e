"""Incidents of a training run: failures, each assembled from the several events that report it, and
steps that were skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Event = Mapping[str, Any]
IncidentKind = Literal["died", "killed", "hung", "rolled back", "skipped"]
FAILURE_EVENTS = ("killed", "hang", "failure", "roll_back", "restart", "lost", "give_up")
"""Kinds of events that report a failure, the best source of its cause first. `restart` and `lost`
are written afterwards, by the supervisor and by the next attempt.
"""
_STARTS_NEXT = {
    "killed": {"killed", "restart", "lost"},
    "restart": {"restart", "lost"},
    "lost": {"lost"},
    "give_up": set[str](),
}
_STARTS_NEXT |= {kind: {"restart", "lost"} for kind in ("hang", "failure", "roll_back")}
"""Event kind -> kinds already seen of a failure after which this event belongs to the next one."""
_KINDS: dict[str, IncidentKind] = {"killed": "killed", "hang": "hung", "roll_back": "rolled back"}
_MAX_VALUE = 1e11
_FIRST_RANK = re.compile(r"^(?:.*; the last failure: )?rank (\d+) ")
"""How the supervisor begins the cause of a failure where one rank ended first: that rank alone
failed, all others were ended after it.
"""


@dataclass(frozen=True)
class Incident:
    """A failure and what it cost, or consecutive skipped steps, which cost nothing else."""

    kind: IncidentKind
    at: float
    """Seconds on the clock of the goodput account."""
    wall: float | None
    """Wall clock, seconds since the epoch; None where no event has it."""
    ranks: tuple[int, ...]
    """The ranks that failed, of many the first; empty for all of them, or where unknown."""
    step: int | None
    """Optimizer steps done by then; of skipped steps the first one."""
    steps: int
    """How many steps were repeated, or skipped."""
    lost_s: float
    down_s: float
    starting_s: float
    """Duration of the start that followed."""
    cause: str
    more_ranks: int = 0
    """How many more ranks failed than `ranks` names."""

    @property
    def cost_s(self) -> float:
        return self.lost_s + self.down_s + self.starting_s


@dataclass
class FailureDetails:
    """What the events so far say about one failure."""

    at: float | None = None
    """When it was noticed, on the clock of the goodput account."""
    wall: float | None = None
    kind: IncidentKind = "died"
    ranks: set[int] = field(default_factory=set)
    more_ranks: int = 0
    step: int | None = None
    steps: int = 0
    spent_s: float = 0.0
    """Seconds the failed attempt had run since its last checkpoint."""
    causes: dict[str, str] = field(default_factory=dict)
    """The cause as given by each kind of event."""

    @property
    def cause(self) -> str:
        causes = {kind: self.causes[kind] for kind in FAILURE_EVENTS if self.causes.get(kind)}
        given_up = causes.pop("give_up", "").partition("; the last failure:")[0]
        if self.kind == "died" and "restart" in causes and "failure" in causes:
            best = f"{causes['restart']} ({causes['failure']})"
        else:
            best = next(iter(causes.values()), "ended without a message")
        return f"{best}; given up: {given_up}" if given_up else best

    def add_event(self, kind: str, event: Event, now: float) -> None:
        cause = " ".join(str(event.get("cause") or "").split())
        noticed = now - seconds(event) if kind == "restart" else now
        if kind not in ("lost", "give_up"):
            self.at = noticed if self.at is None else min(self.at, noticed)
            wall = number(event.get("t_wall"))
            self.wall = (
                wall - (now - noticed) if self.wall is None and wall is not None else self.wall
            )
        self.kind = _KINDS.get(kind, self.kind)
        if kind in ("killed", "hang"):
            # Older runs have an event for each rank of a hang.
            listed = event.get("ranks")
            named = listed if isinstance(listed, list) else [event.get("rank")]
            self.ranks.update(rank for each in named if (rank := whole(each)) is not None)
            self.more_ranks = max(0, (whole(event.get("count")) or 0) - len(named))
        elif (
            kind in ("restart", "give_up")
            and not {"killed", "hang"} & self.causes.keys()
            and (found := _FIRST_RANK.search(cause))
        ):
            self.ranks.add(int(found[1]))
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
        self.causes.setdefault(kind, cause)

    def incident(self, lost_s: float, down_s: float, at: float, wall: float | None) -> Incident:
        """The finished incident. `wall` is used where no event has the time."""
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
            self.more_ranks,
        )


def record_failure(failures: list[FailureDetails], kind: str, event: Event, now: float) -> None:
    """Add an event of FAILURE_EVENTS to the last of `failures`, or begin the next one. `now`: the
    time of the event on the account's clock.
    """
    if not failures or _STARTS_NEXT[kind] & failures[-1].causes.keys():
        failures.append(FailureDetails())
    failures[-1].add_event(kind, event, now)


def record_skip(incidents: list[Incident], event: Event, now: float) -> None:
    """Add a skipped step; consecutive steps skipped for the same reason become one incident."""
    cause, step = " ".join(str(event.get("cause") or "").split()), whole(event.get("step"))
    last = incidents[-1] if incidents else None
    if (
        last
        and last.kind == "skipped"
        and step is not None
        and last.step is not None
        and step == last.step + last.steps
        and _same_cause(last.cause, cause)
    ):
        incidents[-1] = replace(last, steps=last.steps + 1)
    else:
        incidents.append(
            Incident(
                "skipped",
                now,
                number(event.get("t_wall")),
                ranks=(),
                step=step,
                steps=1,
                lost_s=0.0,
                down_s=0.0,
                starting_s=0.0,
                cause=cause,
            )
        )


def number(value: Any) -> float | None:
    """`value` as a number of a sensible size, else None."""
    is_figure = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -_MAX_VALUE <= value <= _MAX_VALUE
    )
    return float(value) if is_figure and math.isfinite(value) else None


def whole(value: Any) -> int | None:
    """`value` as an integer, else None."""
    found = number(value)
    return None if found is None else int(found)


def seconds(event: Event) -> float:
    """The duration an event states; 0 where it has none."""
    return max(number(event.get("seconds")) or 0.0, 0.0)


def _victims(event: Event) -> str:
    rank, what = whole(event.get("rank")), event.get("what")
    if rank is not None:
        return f": rank {rank}"
    return ": all ranks and the supervisor" if what == "supervisor" else ": all ranks"


def _same_cause(one: str, other: str) -> bool:
    """Whether two causes agree up to the first comma, after which the figures stand."""
    return one.partition(",")[0] == other.partition(",")[0]


def incident_steps(incident: Incident) -> str:
    """The step of an incident and how many were repeated, `58, 18 again`; of skipped steps the
    range.
    """
    if incident.step is None:
        return ""
    if incident.kind == "skipped":
        return (
            f"{incident.step:,}"
            if incident.steps == 1
            else f"{incident.step:,} to {incident.step + incident.steps - 1:,}"
        )
    return (
        f"{incident.step:,}, {incident.steps:,} again" if incident.steps else f"{incident.step:,}"
    )


def incident_ranks(incident: Incident) -> str:
    """The failed ranks, separated by commas, of many the first and how many more."""
    named = ", ".join(str(rank) for rank in incident.ranks)
    return f"{named} and {incident.more_ranks:,} more" if incident.more_ranks else named
