"""Where the wall time of a training went, and what each loss cost: counted from its events, and
from the heartbeat of one that runs.

The clock of an account starts when the first process of the training is made, and ends with the
last event (or beat). It stands from a finish
or a stop until the process of the next start is made: nobody wanted to train. After a death it
runs. Events count in the order of the file: an attempt's own by its monotonic clock, others by the
wall clock, and where that was set back by the seconds that they tell. What no event accounts for
is, of an attempt that ended well, its last step and last checkpoint; of one that died, it is lost.
An attempt that dies before its first step counts as down.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from ingot.base.heartbeat import TIME_USES, Heartbeat, TimeUse
from ingot.report.incidents import (
    FAILURE_EVENTS,
    Event,
    FailureDetails,
    Incident,
    IncidentKind,
    number,
    record_failure,
    record_skip,
    seconds,
    whole,
)

TimePart = Literal["productive", "waiting", "evaluating", "saving", "starting", "lost", "down"]
TIME_PARTS: tuple[TimePart, ...] = (*TIME_USES, "starting", "lost", "down")
"""What wall time goes to: that of TIME_USES; loading and compiling; what was done again or broken
off; dead until started again.
"""
End = Literal["finished", "stopped", "running"] | IncidentKind
_KINDS = {"start", "save", "stop", "finish", "straggler", "skip", "changed", *FAILURE_EVENTS}
_OWN = {"save", "skip", "roll_back", "stop", "finish"}
"""Events that rank 0 of an attempt records once it turns: their monotonic clock is that of its
start.
"""


@dataclass(frozen=True)
class AttemptSpan:
    """One attempt, on the clock of the account: its process was made, its first step began, it
    ended.
    """

    number: int
    made: float
    began: float
    ended: float
    end: End
    first: int
    last: int | None
    """Steps done when it began, and when it ended as far as that is known."""
    cause: str
    """Why it ended, in words; empty where it ended well."""


@dataclass(frozen=True)
class Goodput:
    """The account of the last training in a run folder."""

    seconds: dict[TimePart, float]
    """Their sum is the wall time."""
    attempts: list[AttemptSpan]
    losses: list[Incident]
    """In the order of time."""
    running: bool
    earlier: int
    """How many trainings in the same folder came before this one; they are not counted."""

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    def share(self, part: TimePart = "productive") -> float:
        """Of the wall time; 0 where there is none."""
        return self.seconds[part] / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def dearest(self) -> list[Incident]:
        """The losses, the largest first."""
        return sorted(self.losses, key=lambda loss: (-loss.cost_s, loss.at))


def goodput(
    events: Iterable[Event], beat: Heartbeat | None = None, *, alive: bool = True
) -> Goodput | None:
    """The account of the last training among `events`, None where none has begun. Never raises,
    whatever stands in them.

    `beat` is what rank 0 said last. Where the training is not `alive`, what it had spent since the
    last commit is lost.
    """
    ledger: _Account | None = None
    for event in events:
        kind = event.get("kind")
        # Other verbs fail, too.
        if (
            not isinstance(kind, str)
            or kind not in _KINDS
            or (kind == "failure" and not str(event.get("cause")).startswith("train:"))
        ):
            continue
        if kind == "start" and (ledger is None or ledger.is_another(event)):
            ledger = _Account(0 if ledger is None else ledger.earlier + 1)
        if ledger is not None:
            ledger.take(kind, event)
    return None if ledger is None else ledger.close(beat, alive=alive)


@dataclass
class _Attempt:
    """An attempt whose first step has begun."""

    number: int
    made: float
    began: float
    first: int
    zero: float | None
    """What its monotonic clock showed when the account's began."""
    wall: float | None
    """What the wall clock showed when its first step began."""
    last: int
    heard: float
    """Its last own event."""
    spent: dict[TimeUse, float] = field(default_factory=lambda: dict.fromkeys(TIME_USES, 0.0))
    """What its checkpoints keep."""
    newest: tuple[int | None, float] = (None, 0.0)
    """Its last checkpoint: the step, and the seconds that it took as a whole."""

    @property
    def kept(self) -> float:
        """How far its time is kept."""
        return self.began + sum(self.spent.values())


class _Account:
    """One training, while its events are read. All seconds of its clock up to `_entered` stand in
    one part or another.
    """

    def __init__(self, earlier: int) -> None:
        self.earlier = earlier
        self._seconds: dict[TimePart, float] = dict.fromkeys(TIME_PARTS, 0.0)
        self._spans: list[AttemptSpan] = []
        self._losses: list[Incident] = []
        self._deaths: list[FailureDetails] = []
        """Since the last start."""
        self._turning: _Attempt | None = None
        self._now, self._entered = 0.0, 0.0
        self._wall: float | None = None
        self._stands, self._finished, self._saved = True, False, False

    def is_another(self, start: Event) -> bool:
        """Whether a start begins another training: at the first step, and not because this one died
        or was stopped before it had saved anything.
        """
        again = any({"restart", "lost"} & death.words.keys() for death in self._deaths)
        return start.get("cause") == "first step" and (
            self._finished or (self._saved and not again)
        )

    def take(self, kind: str, event: Event) -> None:
        attempt = self._turning
        own = attempt is not None and kind in _OWN and whole(event.get("attempt")) == attempt.number
        if not self._stands:
            self._now += self._since(event, attempt if own else None)
        self._wall = (
            number(event.get("t_wall")) if number(event.get("t_wall")) is not None else self._wall
        )
        if attempt is not None and own:
            attempt.heard = self._now
            attempt.last = max(whole(event.get("step")) or 0, attempt.last)
        if kind == "start":
            self._start(event)
        elif kind in ("finish", "stop"):
            self._over(event, "finished" if kind == "finish" else "stopped", own=own)
        elif kind == "save" and attempt is not None and own:
            self._save(event, attempt)
        elif kind == "skip":
            record_skip(self._losses, event, self._now)
        elif kind in FAILURE_EVENTS:
            record_failure(self._deaths, kind, event, self._now)

    def close(self, beat: Heartbeat | None, *, alive: bool) -> Goodput:
        attempt, mono = self._turning, None if beat is None else number(beat.mono)
        running = alive and not self._stands
        later = (
            running and attempt is not None and beat is not None and beat.attempt > attempt.number
        )
        own = attempt is not None and beat is not None and beat.attempt == attempt.number
        if attempt is not None and beat is not None and own:
            if attempt.zero is not None and mono is not None:
                self._now = max(self._now, mono - attempt.zero)
            attempt.last = max(attempt.last, beat.step)
            if not alive and not self._deaths:
                self._deaths.append(
                    FailureDetails(
                        self._now,
                        number(beat.wall),
                        step=beat.step,
                        words={"lost": f"ended in phase {beat.phase}"},
                    )
                )
        if attempt is not None and alive and not later and not self._deaths:
            self._runs_on(attempt, beat if own else None)
        elif not self._stands:
            self._settle(self._now)
        if later and beat is not None:
            self._enter("starting", self._entered + self._since({"t_wall": beat.wall}, None))
        return Goodput(self._seconds, self._spans, self._losses, running, self.earlier)

    def _since(self, event: Event, owner: _Attempt | None) -> float:
        """Seconds from now to an event, by the monotonic clock of its owner. Below 0 where others,
        by the wall clock, had come too far.
        """
        wall, mono = number(event.get("t_wall")), number(event.get("t_mono"))
        if owner is not None and owner.zero is not None and mono is not None:
            return max(mono - owner.zero, owner.heard) - self._now
        if wall is None or self._wall is None:
            return 0.0
        if wall >= self._wall:
            return wall - self._wall
        if event.get("kind") == "lost" and self._turning is not None:
            return max(self._turning.kept + seconds(event) - self._now, 0.0)
        return seconds(event) if event.get("kind") in ("start", "restart") else 0.0

    def _enter(self, part: TimePart, until: float) -> float:
        """All up to `until` goes to `part`."""
        amount = max(until - self._entered, 0.0)
        self._seconds[part] += amount
        self._entered = max(self._entered, until)
        return amount

    def _start(self, event: Event) -> None:
        took = seconds(event)
        if self._stands:
            self._now = self._entered + took
        made = self._settle(self._now - took)
        starting = self._enter("starting", self._now)
        if self._deaths:
            self._losses[-1] = replace(self._losses[-1], starting_s=starting)
        mono, step = number(event.get("t_mono")), whole(event.get("step")) or 0
        zero = None if mono is None else mono - self._now
        self._turning = _Attempt(
            whole(event.get("attempt")) or 0,
            made,
            self._now,
            step,
            zero,
            self._wall,
            step,
            self._now,
        )
        self._deaths, self._stands, self._finished = [], False, False

    def _save(self, event: Event, attempt: _Attempt) -> None:
        self._saved = True
        for what, amount in _spent(event.get("spent")).items():
            attempt.spent[what] += amount
        attempt.newest = (
            whole(event.get("step")),
            max(number(event.get("total_s")) or 0.0, seconds(event)),
        )

    def _over(self, event: Event, end: End, *, own: bool) -> None:
        """A finish or a stop; a stop may be that of an attempt that had not come to its first
        step.
        """
        attempt = self._turning
        if attempt is not None and own:
            step, took = attempt.newest
            saving = took if step == whole(event.get("step")) else 0.0
            self._end(
                attempt,
                self._now,
                end,
                {"productive": max(self._now - attempt.kept - saving, 0.0), "saving": saving},
            )
        elif not self._stands:
            self._settle(self._now)
            self._deaths = []
        self._stands, self._finished = True, end == "finished"

    def _runs_on(self, attempt: _Attempt, beat: Heartbeat | None) -> None:
        """What a living attempt has spent since its last commit, and is spending now."""
        spent = _spent(None if beat is None else beat.spent)
        now: TimeUse = (
            beat.phase
            if beat is not None and (beat.phase == "evaluating" or beat.phase == "saving")
            else "productive"
        )
        spent[now] += max(self._now - attempt.kept - sum(spent.values()), 0.0)
        self._end(attempt, self._now, "running", spent)

    def _settle(self, until: float) -> float:
        """Close what has died: the attempt that turned, if one did, and those after it that did not
        come to turn. Gives when that is: at `until`, or later where something is known from later.
        """
        attempt = self._turning
        until = max(until, self._entered if attempt is None else attempt.heard)
        if attempt is not None and not self._deaths:
            self._deaths.append(FailureDetails())
        lost, wall = 0.0, None
        for index, death in enumerate(self._deaths):
            at = self._entered
            if index == 0 and attempt is not None:
                at = min(max(attempt.heard, attempt.kept + death.spent_s, death.at or 0.0), until)
                attempt.last = max(attempt.last, death.step or 0)
                lost = self._end(attempt, at, death.kind, {}, death.cause)
                wall = None if attempt.wall is None else attempt.wall + at - attempt.began
            following = self._deaths[index + 1].at if index + 1 < len(self._deaths) else until
            down = self._enter(
                "down", min(self._entered if following is None else following, until)
            )
            self._losses.append(death.loss(lost if index == 0 else 0.0, down, at, wall))
        return until

    def _end(
        self, attempt: _Attempt, at: float, end: End, more: dict[TimeUse, float], cause: str = ""
    ) -> float:
        """The attempt ends: what it kept and `more`, shortened where that is longer than it turned;
        what is left is lost.
        """
        spent = {what: attempt.spent[what] + more.get(what, 0.0) for what in TIME_USES}
        whole_s = max(at - attempt.began, 0.0)
        scale = min(whole_s / total, 1.0) if (total := sum(spent.values())) > 0 else 0.0
        for what in TIME_USES:
            self._enter(what, min(self._entered + scale * spent[what], at))
        if end in ("finished", "stopped", "running"):
            self._enter("productive", at)  # but for rounding, nothing
        lost = self._enter("lost", at)
        self._spans.append(
            AttemptSpan(
                attempt.number,
                attempt.made,
                attempt.began,
                at,
                end,
                attempt.first,
                attempt.last,
                cause,
            )
        )
        self._turning = None
        return lost


def _spent(told: object) -> dict[TimeUse, float]:
    """Seconds by what they went to, from an event or a beat; 0 for whatever is not told."""
    found = told if isinstance(told, dict) else {}
    return {what: max(number(found.get(what)) or 0.0, 0.0) for what in TIME_USES}
