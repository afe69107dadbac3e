"""Traces a few steps with torch's profiler into `profile/`, one file per rank; other steps have no
overhead.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch.profiler import profile, record_function, supported_activities

from ingot.base.errors import IngotError, WrongInput
from ingot.base.progress import say
from ingot.base.storage import disk_errors
from ingot.config.sections.loop import Profile
from ingot.parallel.mesh import Mesh
from ingot.train.setup import TrainSetup
from ingot.train.step import StepInfo

VIEWER = "https://ui.perfetto.dev"


class ProfileHook:
    """Traces steps `begin` to `end` (from 1) on host and device, including data loading, hooks and
    checkpoints.

    Create it right before the loop starts, since a trace that begins with the first step starts
    here. It must be the last hook, so that the other hooks' work after step `begin - 1` is not
    traced. A training resumed within the range traces the remaining steps.

    Args:
        knobs: which steps.
        folder: where traces go, `profile/` in the run folder; created on the first write.
        done: steps that are already done.
        last: the last step of this training.

    Raises:
        WrongInput: training ends before the first of these steps.
    """

    def __init__(self, knobs: Profile, folder: Path, mesh: Mesh, *, done: int, last: int) -> None:
        if knobs.begin > last:
            raise WrongInput(
                f"train.profile begins with step {knobs.begin:,}, training ends with step {last:,};"
                " lower train.profile.begin, or set it to null"
            )
        self.knobs, self.folder, self.mesh = knobs, folder, mesh
        self._trace: profile | None = None
        self._mark: record_function | None = None
        self._first, self._reached = 0, done
        self._before(done + 1)

    def after_step(self, info: StepInfo) -> bool:
        self._reached = info.step
        self._unmark()
        if info.step >= self.knobs.end:
            self._finish()
        self._before(info.step + 1)
        return False

    def close(self) -> None:
        """Write what was traced if training ended before the last of these steps."""
        self._unmark()
        self._finish()
        if self._reached < self.knobs.begin and self.mesh.is_main:
            say(
                f"train: no trace, training ended after step {self._reached:,} and train.profile"
                f" begins with step {self.knobs.begin:,}"
            )

    def _before(self, step: int) -> None:
        """Called before step `step`."""
        if not self.knobs.begin <= step <= self.knobs.end:
            return
        if self._trace is None:
            self._first = step
            self._trace = profile(activities=supported_activities(), record_shapes=True)
            self._trace.start()
        self._mark = record_function(f"step {step}")
        self._mark.__enter__()

    def _unmark(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def _finish(self) -> None:
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        trace.stop()
        if self._reached < self._first:
            return  # no step was completed
        path = self.folder / f"steps{self._first}-{self._reached}-rank{self.mesh.rank}.json.gz"
        try:
            _write(trace, path)
        except (IngotError, OSError) as error:
            # Training continues without the trace.
            say(
                f"warning: the trace of steps {self._first:,} to {self._reached:,} is lost: {error}"
            )
            return
        if self.mesh.is_main:
            say(
                f"train: the trace of steps {self._first:,} to {self._reached:,} is in {path}; open"
                f" it at {VIEWER}"
            )


def profile_hooks(setup: TrainSetup, mesh: Mesh, first: int) -> list[ProfileHook]:
    """The profiler hook if the recipe asks for one; `first` steps are already done."""
    knobs = setup.recipe.train.profile
    if knobs is None:
        return []
    folder = setup.recipe.folder.root / "profile"
    return [ProfileHook(knobs, folder, mesh, done=first, last=setup.last)]


def _write(trace: profile, path: Path) -> None:
    partial = path.with_name(
        f".{path.name}.partial-{os.getpid()}.gz"
    )  # the suffix .gz makes torch compress it
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            trace.export_chrome_trace(str(partial))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
