"""Detects, from heartbeats alone, the rank that hangs and the rank that slows the others down.

Ranks of one training wait for each other, so only the one furthest behind is judged: the others are
waiting for it. A rank that saves beats while it waits, and is judged by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ingot.base.errors import some_of
from ingot.base.heartbeat import Heartbeat, Phase
from ingot.base.progress import duration
from ingot.config.sections.launch import Launch

AUTO_S, AUTO_STEPS = 30.0, 3.0
"""`launch.hang_s: auto` is this many seconds plus this many usual step durations."""
LONGEST_CHECK_S = 1.0
"""A longer time between two checks means that this process itself was suspended (a suspended
machine, a stopped container), and does not count as silence of a rank.
"""

NAMED = 8
"""How many ranks of a hang messages and events name."""


@dataclass(frozen=True)
class Hang:
    """Ranks that are behind all others and send no heartbeat. `step`: steps they have done, None
    for ranks that never sent a heartbeat.
    """

    ranks: tuple[int, ...]
    step: int | None
    phase: Phase
    quiet_s: float
    limit_s: float

    def describe(self) -> str:
        who = f"{name_ranks(self.ranks)} {'hangs' if len(self.ranks) == 1 else 'hang'}"
        where = (
            f"in step {self.step + 1:,}"
            if self.phase == "step" and self.step is not None
            else f"in phase `{self.phase}`"
        )
        return (
            f"{who} {where}: no heartbeat for {duration(self.quiet_s)}, {duration(self.limit_s)}"
            " are allowed"
        )


def name_ranks(ranks: Sequence[int]) -> str:
    """Names the ranks in a message, of many the first ones: all of a training may hang."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {some_of(ranks, NAMED)}"


class HangDetector:
    """To be called several times a second. Silence is measured in time during which this process
    ran, so that clock changes do not look like a hang. `delay_s`: how old a heartbeat may be on
    arrival.
    """

    def __init__(self, knobs: Launch, now: float, *, delay_s: float = 0.0) -> None:
        self._knobs, self._last_check, self._delay_s = knobs, now, delay_s
        self._quiet_s: dict[int, float] = {}
        self._last_beat: dict[int, float] = {}

    def check(
        self, running: Collection[int], beats: Mapping[int, Heartbeat], now: float
    ) -> Hang | None:
        """The ranks that hang at monotonic time `now`, or None; `beats` are the last heartbeats of
        the ranks.
        """
        passed, self._last_check = min(now - self._last_check, LONGEST_CHECK_S), now
        for rank in running:
            beat_at = beats[rank].mono if rank in beats else 0.0
            is_silent = self._last_beat.get(rank, 0.0) == beat_at
            self._quiet_s[rank] = self._quiet_s.get(rank, 0.0) + passed if is_silent else 0.0
            self._last_beat[rank] = beat_at
        if (silent := self._silent_while_saving(running, beats)) is not None:
            return silent
        behind = _furthest_behind({rank: beats.get(rank) for rank in running})
        if not behind:
            return None
        limit_s = max(self._limit_s(beats.get(rank)) for rank in behind) + self._delay_s
        quiet_s = min(self._quiet_s[rank] for rank in behind)
        if quiet_s <= limit_s:
            return None
        culprits = _outliers(behind, beats)
        beat = beats.get(culprits[0])
        if beat is None:
            return Hang(culprits, None, "loading", quiet_s, limit_s)
        return Hang(culprits, beat.step, beat.phase, quiet_s, limit_s)

    def _silent_while_saving(
        self, running: Collection[int], beats: Mapping[int, Heartbeat]
    ) -> Hang | None:
        """Those that save and hang. The others, at the same position, beat on while they wait for
        them, so that the silence of the furthest behind tells nothing.
        """
        limit_s = self._knobs.start_s + self._delay_s
        culprits = [
            rank
            for rank in running
            if rank in beats and beats[rank].phase == "saving" and self._quiet_s[rank] > limit_s
        ]
        if not culprits:
            return None
        quiet_s = min(self._quiet_s[rank] for rank in culprits)
        return Hang(tuple(culprits), beats[culprits[0]].step, "saving", quiet_s, limit_s)

    def _limit_s(self, beat: Heartbeat | None) -> float:
        if beat is None or beat.phase != "step":
            return self._knobs.start_s
        if self._knobs.hang_s != "auto":
            return self._knobs.hang_s
        return AUTO_S + AUTO_STEPS * beat.usual_s if beat.usual_s else self._knobs.start_s


def _furthest_behind(ranks: Mapping[int, Heartbeat | None]) -> list[int]:
    """The ranks at the earliest position; a rank without a heartbeat is behind any other."""
    places = {rank: _position(beat) for rank, beat in ranks.items()}
    earliest = min(places.values(), default=None)
    return [rank for rank, place in places.items() if place == earliest]


def _position(beat: Heartbeat | None) -> tuple[int, int]:
    """Whoever loads is behind all that have begun, also after it left a later step to go back to a
    checkpoint.
    """
    if beat is None:
        return -2, 0
    return (-1, 0) if beat.phase == "loading" else (beat.step, beat.place)


def _outliers(ranks: Collection[int], beats: Mapping[int, Heartbeat]) -> tuple[int, ...]:
    """Of ranks at the same position, those whose phase differs from the majority's; all of them if
    no phase has a majority.
    """
    phases = Counter(beats[rank].phase for rank in ranks if rank in beats)
    (common, count), *others = phases.most_common() or [("loading", 0)]
    if not others or others[0][1] == count:
        return tuple(sorted(ranks))
    return tuple(sorted(rank for rank in ranks if rank not in beats or beats[rank].phase != common))


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for, about `seconds` in each step. `share`: the share of steps
    with ranks at different positions in which it was the last.
    """

    rank: int
    step: int
    seconds: float
    share: float

    def describe(self) -> str:
        return (
            f"rank {self.rank} holds the others up: they wait for it about {self.seconds:.2g} s a"
            f" step (it is the last in {self.share:.0%} of those in which they were seen apart)"
        )


class StragglerDetector:
    """Reports after each window of steps whether one rank slows the others down.

    A window has at least `steps` steps and `checks` checks (about a minute at four checks a
    second). One rank must have been the last in `last` of the steps in which ranks were at
    different positions (at least `apart` steps), and alone behind in `lost` of all checks, which is
    the share of time that the others lost. Ranks that merely share a busy machine take turns at
    being last: of 50 steps, more than 40 fall to one of two ranks by chance once in 100,000
    windows. A rank with additional work (rank 0 logs) is always the last, but not for a third of a
    step.
    """

    def __init__(
        self,
        *,
        steps: int = 50,
        checks: int = 240,
        apart: int = 20,
        last: float = 0.8,
        lost: float = 1 / 3,
    ) -> None:
        self._min_steps, self._min_checks, self._min_apart = steps, checks, apart
        self._min_last, self._min_lost = last, lost
        self._last_check = 0.0
        self._begin_window(0)

    def _begin_window(self, step: int) -> None:
        self._first_step, self._checks, self._passed_s = step, 0, 0.0
        self._alone_behind: Counter[int] = Counter()
        self._last_of_step: dict[int, int] = {}

    def check(
        self, running: Collection[int], beats: Mapping[int, Heartbeat], now: float
    ) -> Straggler | None:
        """The straggler of the window that ends at monotonic time `now`, or None."""
        passed, self._last_check = min(now - self._last_check, LONGEST_CHECK_S), now
        if len(running) < 2 or any(
            rank not in beats or beats[rank].phase != "step" for rank in running
        ):
            return None  # during evaluation or saving, one rank may do more than the others
        behind = _furthest_behind({rank: beats[rank] for rank in running})
        step = beats[behind[0]].step
        if not self._checks or step < self._first_step:
            self._begin_window(step)
        self._checks += 1
        self._passed_s += passed
        if len(behind) == 1:
            self._alone_behind[behind[0]] += 1
            self._last_of_step[step] = behind[0]
        if step - self._first_step < self._min_steps or self._checks < self._min_checks:
            return None
        found = self._judge_window(step)
        self._begin_window(step)
        return found

    def _judge_window(self, step: int) -> Straggler | None:
        (rank, times), *_ = Counter(self._last_of_step.values()).most_common(1) or [(0, 0)]
        share = times / max(1, len(self._last_of_step))
        lost = self._alone_behind[rank] / self._checks
        if len(self._last_of_step) < self._min_apart:
            return None
        if share < self._min_last or lost < self._min_lost:
            return None
        return Straggler(rank, step, self._passed_s * lost / (step - self._first_step), share)
