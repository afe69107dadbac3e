"""Training commands with a fault that breaks a resumed run alone: an uninterrupted one is as it
should be. Each fault patches the class or function that it is about.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ingot.base.environment import RESOLVED_VARIABLE
from tests import forks
from tests.cli.commands import ingot

Runner = Callable[[Sequence[str]], tuple[int, str]]


def shift_position() -> None:
    """The data position after a resume is one step off."""
    from ingot.data.batches.loader import Loader

    original, fetched = Loader.step, list[int]()

    def step(self: Loader, i: int, *more: Any) -> Any:
        fetched.append(i)
        return original(self, i + 1 if fetched[0] else i, *more)

    Loader.step = step  # type: ignore[method-assign]


def forget_generator() -> None:
    """Dropout is seeded once for a process instead of for each micro-batch."""
    import torch

    from ingot.train.step import DropoutSeeds

    seeded: list[bool] = []

    def begin_micro_batch(self: DropoutSeeds, step: int, index: int, batch: Any) -> None:
        if not seeded:
            torch.manual_seed(5)
            seeded.append(True)

    DropoutSeeds.begin_micro_batch = begin_micro_batch  # type: ignore[method-assign]


def forget_optimizer() -> None:
    """The optimizer's state is not restored."""
    from ingot.train import build

    original = build.load_checkpoint
    build.load_checkpoint = lambda found, masters, optimizer, mesh: original(  # type: ignore[attr-defined]
        found, masters, None, mesh
    )


def restart_schedule() -> None:
    """The learning rate's schedule begins anew after a resume."""
    from ingot.train.optim.schedules import LearningRate

    original, asked = LearningRate.__call__, list[int]()

    def call(self: LearningRate, step: int) -> float:
        asked.append(step)
        return original(self, step - asked[0])

    LearningRate.__call__ = call  # type: ignore[method-assign]


def _run(fault: Callable[[], None] | None, arguments: Sequence[str], messages: str) -> None:
    with Path(messages).open("w") as stream, Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    if fault is not None:
        fault()
    from ingot.cli.app import main

    sys.argv = ["ingot", *arguments]
    main()


def run_with(fault: Callable[[], None]) -> Runner:
    """Runs `ingot ARGUMENTS` with a fault in a forked process: (exit code, what it said)."""

    def run(arguments: Sequence[str]) -> tuple[int, str]:
        with tempfile.NamedTemporaryFile("r") as messages:
            process = forks.start_call(_run, fault, list(arguments), messages.name)
            code = process.wait(300)
            return code, messages.read()

    return run


def run_forked(arguments: Sequence[str]) -> tuple[int, str]:
    """Runs `ingot ARGUMENTS` as `run_ingot`, in a forked process, with the `INGOT_` variables of
    this one.
    """
    knobs = {name: value for name, value in os.environ.items() if name.startswith("INGOT_")}
    done = ingot(*arguments, timeout_s=300, **knobs, **{RESOLVED_VARIABLE: "1"})
    return done.returncode, done.stderr
