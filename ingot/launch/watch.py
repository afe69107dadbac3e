"""Which rank hangs, and which one holds the others up: told from the ranks' signs of life alone.

Ranks of one training wait for each other, so only the one that is behind is judged: whoever is
ahead waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ingot.base.heartbeat import Heartbeat, Phase
from ingot.base.progress import duration
from ingot.config.sections.launch import Launch

AUTO_S, AUTO_STEPS = 30.0, 3.0
"""`launch.hang_s: auto` is so many seconds and so many usual steps."""
LONGEST_LOOK_S = 1.0
"""More between two looks, and we were asleep ourselves (a suspended machine, a stopped container):
that is no rank's silence.
"""


@dataclass(frozen=True)
class Hang:
    """Ranks that are behind all others and give no sign of life."""

    ranks: tuple[int, ...]
    step: int | None
    """Steps that they have done; None for ranks that never said anything."""
    phase: Phase
    quiet_s: float
    bound_s: float

    def told(self) -> str:
        who = (
            f"rank {self.ranks[0]} hangs"
            if len(self.ranks) == 1
            else f"ranks {', '.join(map(str, self.ranks))} hang"
        )
        where = (
            f"in step {self.step + 1:,}"
            if self.phase == "step" and self.step is not None
            else f"in phase `{self.phase}`"
        )
        return (
            f"{who} {where}: no sign of life for {duration(self.quiet_s)}, {duration(self.bound_s)}"
            " are allowed"
        )


class HangWatch:
    """Looked through several times a second. Silence is counted in our own waking time, so that no
    clock can betray it. `late_s`: how old a sign of life may be when it is seen here.
    """

    def __init__(self, knobs: Launch, now: float, *, late_s: float = 0.0) -> None:
        self._knobs, self._last, self._late_s = knobs, now, late_s
        self._quiet: dict[int, float] = {}
        self._heard: dict[int, float] = {}

    def look(
        self, running: Collection[int], beats: Mapping[int, Heartbeat], now: float
    ) -> Hang | None:
        """The ranks that hang at monotonic time `now`, or None; `beats` are the last ones of each
        rank.
        """
        passed, self._last = min(now - self._last, LONGEST_LOOK_S), now
        for rank in running:
            heard = beats[rank].mono if rank in beats else 0.0
            self._quiet[rank] = (
                self._quiet.get(rank, 0.0) + passed if self._heard.get(rank, 0.0) == heard else 0.0
            )
            self._heard[rank] = heard
        behind = _behind({rank: beats.get(rank) for rank in running})
        if not behind:
            return None
        bound = max(self._bound(beats.get(rank)) for rank in behind) + self._late_s
        quiet = min(self._quiet[rank] for rank in behind)
        if quiet <= bound:
            return None
        named = _odd_ones(behind, beats)
        beat = beats.get(named[0])
        return Hang(
            named, beat.step if beat else None, beat.phase if beat else "loading", quiet, bound
        )

    def _bound(self, beat: Heartbeat | None) -> float:
        if beat is None or beat.phase != "step":
            return self._knobs.start_s
        if self._knobs.hang_s != "auto":
            return self._knobs.hang_s
        return AUTO_S + AUTO_STEPS * beat.usual_s if beat.usual_s else self._knobs.start_s


def _behind(ranks: Mapping[int, Heartbeat | None]) -> list[int]:
    """Those that are least far; one that has said nothing yet is behind any other."""
    places = {rank: (beat.step, beat.place) if beat else (-1, -1) for rank, beat in ranks.items()}
    return [rank for rank, place in places.items() if place == min(places.values())]


def _odd_ones(ranks: Collection[int], beats: Mapping[int, Heartbeat]) -> tuple[int, ...]:
    """Of ranks that are equally far, those that do not do what most of them do; all where there is
    no such difference.
    """
    phases = Counter(beats[rank].phase for rank in ranks if rank in beats)
    (most, count), *others = phases.most_common() or [("loading", 0)]
    if not others or others[0][1] == count:
        return tuple(sorted(ranks))
    return tuple(sorted(rank for rank in ranks if rank not in beats or beats[rank].phase != most))


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for; `seconds` is how long in each step, about."""

    rank: int
    step: int
    seconds: float
    share: float
    """Of the steps in which ranks were seen apart, those in which it was the last."""

    def told(self) -> str:
        often = f"it is the last in {self.share:.0%} of those in which they were seen apart"
        return (
            f"rank {self.rank} holds the others up: they wait for it about {self.seconds:.2g} s a"
            f" step ({often})"
        )


class StragglerWatch:
    """Looks at where ranks stand, and tells once a window of steps when one of them holds the
    others up.

    A window has at least `steps` steps and `looks` looks (about a minute at four looks a second).
    In it one rank must have been the last in four of five steps in which ranks were seen apart (and
    that in 20 at least), and alone behind in a third of all looks, which is the share
    of time that the others lost. Ranks that merely share a busy machine are last in turns, however
    uneven their steps: of 50, more than 40 fall to one of two by chance once in 100,000 windows.
    What one rank has to do besides (rank 0 logs) makes it the last always, but lasts no third of a
    step.
    """

    def __init__(
        self,
        *,
        steps: int = 50,
        looks: int = 240,
        apart: int = 20,
        last: float = 0.8,
        lost: float = 1 / 3,
    ) -> None:
        self._steps, self._looks, self._apart, self._last, self._lost = (
            steps,
            looks,
            apart,
            last,
            lost,
        )
        self._now = 0.0
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._first, self._seen, self._passed = step, 0, 0.0
        self._alone: Counter[int] = Counter()
        self._last_of: dict[int, int] = {}

    def look(
        self, running: Collection[int], beats: Mapping[int, Heartbeat], now: float
    ) -> Straggler | None:
        passed, self._now = min(now - self._now, LONGEST_LOOK_S), now
        if len(running) < 2 or any(
            rank not in beats or beats[rank].phase != "step" for rank in running
        ):
            return None  # while measuring or saving, one rank may well do more than the others
        behind = _behind({rank: beats[rank] for rank in running})
        step = beats[behind[0]].step
        if not self._seen or step < self._first:
            self._begin(step)
        self._seen += 1
        self._passed += passed
        if len(behind) == 1:
            self._alone[behind[0]] += 1
            self._last_of[step] = behind[0]
        if step - self._first < self._steps or self._seen < self._looks:
            return None
        found = self._judge(step)
        self._begin(step)
        return found

    def _judge(self, step: int) -> Straggler | None:
        (rank, times), *_ = Counter(self._last_of.values()).most_common(1) or [(0, 0)]
        share, lost = times / max(1, len(self._last_of)), self._alone[rank] / self._seen
        if len(self._last_of) < self._apart or share < self._last or lost < self._lost:
            return None
        return Straggler(rank, step, self._passed * lost / (step - self._first), share)
