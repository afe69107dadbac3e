"""`ingot train` itself: its loader, its step, its hooks and sinks. One hook more waits for
turns.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.contenders.profiled import Profiled
from benchmarks.contenders.turnstile import Turnstile, read_task
from ingot.config.load import load_recipe
from ingot.train import trainer as run
from ingot.train.step import LoopEnd, StepContext, StepInfo, run_steps


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

    def in_turns(context: StepContext, first: int, last: int) -> LoopEnd:
        turnstile.wait()
        last_hook = Profiled(turnstile, task["profile"]) if "profile" in task else Turns(turnstile)
        return run_steps(replace(context, hooks=[*context.hooks, last_hook]), first, last)

    run.run_steps = in_turns  # type: ignore[attr-defined]
    run.train(load_recipe((), [*task["knobs"]], environ={}, dotenv=None), fresh=True)


if __name__ == "__main__":
    main()
