"""Accounts for the wall time of a training run and the cost of each incident, from its events and,
of a running one, from its heartbeat.

Each training has an account of its own, on which it goes on where it is brought back after another.
The account's clock starts when the first process is created and ends with the last event or
heartbeat. It pauses from a finish or stop until the next start, but not after a failure. Events
count in file
order: those of an attempt by its monotonic clock, others by the wall clock, or by their stated
seconds where the wall clock was set back. Time that no event accounts for is training of an attempt
that ended well, and lost of one that failed. An attempt that fails before its first step counts as
down.
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
"""Events that rank 0 records after its first step began, with the monotonic clock of its start."""


@dataclass(frozen=True)
class AttemptSpan:
    """One attempt on the account's clock: when its process was created, its first step began, it
    ended.
    """

    number: int
    created: float
    began: float
    ended: float
    end: End
    first: int
    last: int | None
    """Steps done when it began, and when it ended as far as known."""
    cause: str
    """Why it failed; empty where it ended well."""


@dataclass(frozen=True)
class Goodput:
    """The account of the last training run in a run folder."""

    seconds: dict[TimePart, float]
    """Seconds by part; their sum is the wall time."""
    attempts: list[AttemptSpan]
    incidents: list[Incident]
    """In chronological order."""
    running: bool
    earlier: int
    """How many other training runs the folder had; they are not counted."""

    @property
    def wall_s(self) -> float:
        """Total wall time in seconds."""
        return sum(self.seconds.values())

    def share(self, part: TimePart = "productive") -> float:
        """The share of one part in the wall time; 0 where there is none."""
        return self.seconds[part] / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def costliest(self) -> list[Incident]:
        """The incidents, the most expensive first."""
        return sorted(self.incidents, key=lambda incident: (-incident.cost_s, incident.at))


def goodput(
    events: Iterable[Event], beat: Heartbeat | None = None, *, alive: bool = True
) -> Goodput | None:
    """The account of the last training run among `events`, None where none has begun. Malformed
    events are tolerated.

    `beat`: the last heartbeat of rank 0. If the run is not `alive`, its time since the last
    checkpoint is lost.
    """
    account: _Account | None = None
    accounts = list[_Account]()
    known: dict[str, _Account] = {}
    for event in events:
        kind = event.get("kind")
        # Failures of other verbs are left out.
        if (
            not isinstance(kind, str)
            or kind not in _KINDS
            or (kind == "failure" and not str(event.get("cause")).startswith("train:"))
        ):
            continue
        if kind == "start":
            before, training = account, str(event.get("training"))
            if account is None or account.begins_another(event):
                account = _Account()
                accounts.append(account)
            elif event.get("cause") == "resumed":  # perhaps one that was brought back
                account = known.get(training, account)
            if before is not None and before is not account:
                before.leave()
            known[training] = account
        if account is not None:
            account.add(kind, event)
    return None if account is None else account.close(beat, len(accounts) - 1, alive=alive)


@dataclass
class _Attempt:
    """An attempt whose first step has begun."""

    number: int
    created: float
    began: float
    first: int
    zero: float | None
    """Its monotonic clock at the account's zero."""
    wall: float | None
    """The wall clock when its first step began."""
    last: int
    last_event: float
    """The time of its last own event."""
    spent: dict[TimeUse, float] = field(default_factory=lambda: dict.fromkeys(TIME_USES, 0.0))
    """Seconds that its checkpoints preserve, by what they were spent on."""
    newest: tuple[int | None, float] = (None, 0.0)
    """Its last checkpoint: the step, and the seconds the save took in all."""

    @property
    def preserved_until(self) -> float:
        """Until when its time is preserved by a checkpoint."""
        return self.began + sum(self.spent.values())


class _Account:
    """The account of one training run while its events are read. All time up to `_booked_until` is
    assigned to a part.
    """

    def __init__(self) -> None:
        self._seconds: dict[TimePart, float] = dict.fromkeys(TIME_PARTS, 0.0)
        self._spans: list[AttemptSpan] = []
        self._incidents: list[Incident] = []
        self._failures: list[FailureDetails] = []
        """Failures since the last start."""
        self._attempt: _Attempt | None = None
        self._now, self._booked_until = 0.0, 0.0
        self._wall: float | None = None
        self._paused, self._finished, self._saved = True, False, False

    def begins_another(self, start: Event) -> bool:
        """Whether a start begins another training run: it starts at step 0, and not because this
        one failed or was stopped before its first checkpoint.
        """
        again = any({"restart", "lost"} & failure.causes.keys() for failure in self._failures)
        return start.get("cause") == "first step" and (
            self._finished or (self._saved and not again)
        )

    def add(self, kind: str, event: Event) -> None:
        attempt = self._attempt
        own = attempt is not None and kind in _OWN and whole(event.get("attempt")) == attempt.number
        if not self._paused:
            self._now += self._since(event, attempt if own else None)
        self._wall = (
            number(event.get("t_wall")) if number(event.get("t_wall")) is not None else self._wall
        )
        if attempt is not None and own:
            attempt.last_event = self._now
            attempt.last = max(whole(event.get("step")) or 0, attempt.last)
        if kind == "start":
            self._start(event)
        elif kind in ("finish", "stop"):
            self._over(event, "finished" if kind == "finish" else "stopped", own=own)
        elif kind == "save" and attempt is not None and own:
            self._save(event, attempt)
        elif kind == "skip":
            record_skip(self._incidents, event, self._now)
        elif kind in FAILURE_EVENTS:
            record_failure(self._failures, kind, event, self._now)

    def leave(self) -> None:
        """Another training takes this one's place, which may be brought back later: the time until
        then is none of its own.
        """
        if not self._paused:
            self._book_failures(self._now)
            self._failures, self._paused = [], True

    def close(self, beat: Heartbeat | None, earlier: int, *, alive: bool) -> Goodput:
        attempt, mono = self._attempt, None if beat is None else number(beat.mono)
        running = alive and not self._paused
        later = (
            running and attempt is not None and beat is not None and beat.attempt > attempt.number
        )
        own = attempt is not None and beat is not None and beat.attempt == attempt.number
        if attempt is not None and beat is not None and own:
            if attempt.zero is not None and mono is not None:
                self._now = max(self._now, mono - attempt.zero)
            attempt.last = max(attempt.last, beat.step)
            if not alive and not self._failures:
                self._failures.append(
                    FailureDetails(
                        self._now,
                        number(beat.wall),
                        step=beat.step,
                        causes={"lost": f"ended in phase {beat.phase}"},
                    )
                )
        if attempt is not None and alive and not later and not self._failures:
            self._book_running(attempt, beat if own else None)
        elif not self._paused:
            self._book_failures(self._now)
        if later and beat is not None:
            self._book("starting", self._booked_until + self._since({"t_wall": beat.wall}, None))
        return Goodput(self._seconds, self._spans, self._incidents, running, earlier)

    def _since(self, event: Event, owner: _Attempt | None) -> float:
        """Seconds from now to an event, by the monotonic clock of its owner. Negative where events
        timed by the wall clock had advanced the account too far.
        """
        wall, mono = number(event.get("t_wall")), number(event.get("t_mono"))
        if owner is not None and owner.zero is not None and mono is not None:
            return max(mono - owner.zero, owner.last_event) - self._now
        if wall is None or self._wall is None:
            return 0.0
        if wall >= self._wall:
            return wall - self._wall
        if event.get("kind") == "lost" and self._attempt is not None:
            return max(self._attempt.preserved_until + seconds(event) - self._now, 0.0)
        return seconds(event) if event.get("kind") in ("start", "restart") else 0.0

    def _book(self, part: TimePart, until: float) -> float:
        """Assign all time up to `until` to `part`; returns its seconds."""
        amount = max(until - self._booked_until, 0.0)
        self._seconds[part] += amount
        self._booked_until = max(self._booked_until, until)
        return amount

    def _start(self, event: Event) -> None:
        took = seconds(event)
        if self._paused:
            self._now = self._booked_until + took
        made = self._book_failures(self._now - took)
        starting = self._book("starting", self._now)
        if self._failures:
            self._incidents[-1] = replace(self._incidents[-1], starting_s=starting)
        mono, step = number(event.get("t_mono")), whole(event.get("step")) or 0
        zero = None if mono is None else mono - self._now
        self._attempt = _Attempt(
            whole(event.get("attempt")) or 0,
            made,
            self._now,
            step,
            zero,
            self._wall,
            step,
            self._now,
        )
        self._failures, self._paused, self._finished = [], False, False

    def _save(self, event: Event, attempt: _Attempt) -> None:
        self._saved = True
        for what, amount in _spent(event.get("spent")).items():
            attempt.spent[what] += amount
        attempt.newest = (
            whole(event.get("step")),
            max(number(event.get("total_s")) or 0.0, seconds(event)),
        )

    def _over(self, event: Event, end: End, *, own: bool) -> None:
        """Handle a finish or a stop; the stopped attempt may not have reached its first step."""
        attempt = self._attempt
        if attempt is not None and own:
            step, took = attempt.newest
            saving = took if step == whole(event.get("step")) else 0.0
            self._end(
                attempt,
                self._now,
                end,
                {
                    "productive": max(self._now - attempt.preserved_until - saving, 0.0),
                    "saving": saving,
                },
            )
        elif not self._paused:
            self._book_failures(self._now)
            self._failures = []
        self._paused, self._finished = True, end == "finished"

    def _book_running(self, attempt: _Attempt, beat: Heartbeat | None) -> None:
        """Assign the time of a running attempt since its last checkpoint."""
        spent = _spent(None if beat is None else beat.spent)
        now: TimeUse = (
            beat.phase
            if beat is not None and (beat.phase == "evaluating" or beat.phase == "saving")
            else "productive"
        )
        spent[now] += max(self._now - attempt.preserved_until - sum(spent.values()), 0.0)
        self._end(attempt, self._now, "running", spent)

    def _book_failures(self, until: float) -> float:
        """Close failed attempts: the one that was training, if any, and those after it that never
        reached a step. Returns `until`, or a later time if an event is known from later.
        """
        attempt = self._attempt
        until = max(until, self._booked_until if attempt is None else attempt.last_event)
        if attempt is not None and not self._failures:
            self._failures.append(FailureDetails())
        lost, wall = 0.0, None
        for index, failure in enumerate(self._failures):
            at = self._booked_until
            if index == 0 and attempt is not None:
                at = min(
                    max(
                        attempt.last_event,
                        attempt.preserved_until + failure.spent_s,
                        failure.at or 0.0,
                    ),
                    until,
                )
                attempt.last = max(attempt.last, failure.step or 0)
                lost = self._end(attempt, at, failure.kind, {}, failure.cause)
                wall = None if attempt.wall is None else attempt.wall + at - attempt.began
            following = self._failures[index + 1].at if index + 1 < len(self._failures) else until
            down = self._book(
                "down", min(self._booked_until if following is None else following, until)
            )
            self._incidents.append(failure.incident(lost if index == 0 else 0.0, down, at, wall))
        return until

    def _end(
        self, attempt: _Attempt, at: float, end: End, more: dict[TimeUse, float], cause: str = ""
    ) -> float:
        """Close an attempt: assign what it preserved plus `more`, scaled down if that exceeds its
        duration; the rest is lost. Returns the lost seconds.
        """
        spent = {what: attempt.spent[what] + more.get(what, 0.0) for what in TIME_USES}
        whole_s = max(at - attempt.began, 0.0)
        scale = min(whole_s / total, 1.0) if (total := sum(spent.values())) > 0 else 0.0
        for what in TIME_USES:
            self._book(what, min(self._booked_until + scale * spent[what], at))
        if end in ("finished", "stopped", "running"):
            self._book("productive", at)  # nothing but rounding errors
        lost = self._book("lost", at)
        self._spans.append(
            AttemptSpan(
                attempt.number,
                attempt.created,
                attempt.began,
                at,
                end,
                attempt.first,
                attempt.last,
                cause,
            )
        )
        self._attempt = None
        return lost


def _spent(value: object) -> dict[TimeUse, float]:
    """Seconds by part from an event or heartbeat; 0 for missing parts."""
    found = value if isinstance(value, dict) else {}
    return {what: max(number(found.get(what)) or 0.0, 0.0) for what in TIME_USES}
