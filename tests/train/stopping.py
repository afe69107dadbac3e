"""A training that ends in the middle, as if it were killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from ingot.base.errors import Stopped
from ingot.config.recipe import Recipe
from ingot.train import step as loop
from ingot.train.trainer import train


def train_until(step: int, recipe: Recipe) -> None:
    """Train as if killed once `step` steps are done; a checkpoint may be older."""
    original = loop.run_steps

    def stop(context: loop.StepContext, first: int, last: int) -> loop.LoopEnd:
        original(context, first, step)
        raise Stopped("as if killed", signum=9, committed=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ingot.train.trainer.run_steps", stop)
        with pytest.raises(Stopped):
            train(recipe)


def asked_to_stop_in(last: int, patch: pytest.MonkeyPatch) -> None:
    """A signal comes in step `last` (from 1)."""
    accumulate = loop.accumulate_gradients

    def stopping(context: Any, number: int, batches: Any) -> Any:
        if number + 1 == last:
            os.kill(os.getpid(), signal.SIGTERM)
        return accumulate(context, number, batches)

    patch.setattr(loop, "accumulate_gradients", stopping)
