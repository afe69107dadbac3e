"""`ingot train` itself: its loader, its step, its hooks and sinks. One hook more waits for
turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.contenders.turnstile import Turnstile, read_task
from ingot.config.load import load_recipe
from ingot.train import trainer as run
from ingot.train.step import Hook, LoopEnd, StepInfo, Work, run_loop


class Turns:
    """The hook that comes last: what the others do belongs to the step."""

    def __init__(self, turnstile: Turnstile) -> None:
        self.turnstile = turnstile

    def after_step(self, info: StepInfo) -> bool:
        self.turnstile.step(float(info.outcome.loss))
        return False

    def close(self) -> None:
        pass


def main() -> None:
    task = read_task()
    turnstile = Turnstile(task["steps"])

    def in_turns(
        first: int,
        last: int,
        fetch: Callable[[int], Work],
        do_step: Callable[[int, Work], StepInfo],
        hooks: Sequence[Hook],
        **more: Any,
    ) -> LoopEnd:
        turnstile.wait()
        return run_loop(first, last, fetch, do_step, [*hooks, Turns(turnstile)], **more)

    run.run_loop = in_turns  # type: ignore[attr-defined]
    run.train(load_recipe((), [*task["knobs"]], environ={}, dotenv=None), fresh=True)


if __name__ == "__main__":
    main()
