"""Events of made-up trainings, as `events.jsonl` holds them."""

from __future__ import annotations

from typing import Any

from ingot.base.heartbeat import TIME_USES, Heartbeat, Phase


class Told:
    """What is recorded at which second after BEGAN."""

    BEGAN = 1_750_000_000.0
    UPTIME = 4_000.0

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._attempt, self.began = 0, 0.0

    def event(
        self,
        at: float,
        kind: str,
        *,
        attempt: int = 0,
        rank: int | None = 0,
        step: int | None = None,
        seconds: float | None = None,
        cause: str | None = None,
        **more: Any,
    ) -> None:
        self.events.append(
            {
                "t_wall": self.BEGAN + at,
                "t_mono": self.UPTIME + at,
                "attempt": attempt,
                "rank": rank,
                "kind": kind,
                "step": step,
                "seconds": seconds,
                "cause": cause,
                **more,
            }
        )

    def start(
        self, at: float, *, attempt: int, seconds: float, step: int = 0, cause: str = "first step"
    ) -> None:
        self._attempt, self.began = attempt, at
        self.event(at, "start", attempt=attempt, seconds=seconds, step=step, cause=cause)

    def own(
        self,
        at: float,
        kind: str,
        *,
        step: int,
        seconds: float | None = None,
        cause: str | None = None,
        **more: Any,
    ) -> None:
        """Of the attempt that started last."""
        self.event(at, kind, attempt=self._attempt, step=step, seconds=seconds, cause=cause, **more)

    def save(self, at: float, *, step: int, spent: dict[str, float], total_s: float) -> None:
        self.own(
            at,
            "save",
            step=step,
            seconds=total_s / 2,
            total_s=total_s,
            bytes=1,
            spent={**dict.fromkeys(TIME_USES, 0.0), **spent},
        )


def a_beat(
    at: float, *, attempt: int, step: int, phase: Phase, spent: dict[str, float] | None = None
) -> Heartbeat:
    told = {what: (spent or {}).get(what, 0.0) for what in TIME_USES}
    return Heartbeat(1, 0, attempt, step, 0, phase, Told.UPTIME + at, Told.BEGAN + at, 1.0, told)
