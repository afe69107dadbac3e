"""The hook that decides when the training state is saved, and keeps the time account of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ingot.base.runlog import flush_lines
from ingot.checkpoints.saver import Saved, Saver
from ingot.checkpoints.state import training_tensors
from ingot.checkpoints.store import CommittedCheckpoint, retain
from ingot.config.recipe import Recipe
from ingot.train.build import TrainState
from ingot.train.evaluation import EvaluateHook
from ingot.train.goodput import TimeAccount
from ingot.train.optim.schedules import Recurrence
from ingot.train.step import StepInfo


class CheckpointHook:
    """Saves at the recurrence `every` and at each best evaluation, keeping as many checkpoints as
    the recipe says, the best one, and the newest that were due of which an average is made;
    `finish` is called after the loop, which starts after step `first` and ends with step `last`.

    `payload` supplies further fields that a resumed run needs, `decided` those of them that change
    without a step; `start` is the checkpoint that training goes on from.
    """

    def __init__(
        self,
        saver: Saver,
        train_state: TrainState,
        recipe: Recipe,
        every: Recurrence,
        stopper: EvaluateHook,
        payload: Callable[[int], Mapping[str, Any]],
        decided: Callable[[int], Mapping[str, Any]],
        judge: Callable[[], None],
        account: TimeAccount,
        first: int,
        last: int,
        *,
        start: CommittedCheckpoint | None = None,
        is_main: bool,
    ) -> None:
        self.saver, self.train_state = saver, train_state
        self.run, self.knobs = recipe.folder, recipe.checkpoint
        self.stopper, self.payload, self.account = stopper, payload, account
        self._decided, self._judge, self._start = decided, judge, start
        self.every, self.is_main = every, is_main
        self.saved = first
        """The step of the newest checkpoint whose save has started."""
        average = recipe.train.average
        self._last, self._averaged = last, 0 if average is None else average.needs_kept
        self._due = self._waits = start is not None and bool(start.commit["waiting"])
        self._is_saving, self._has_begun = False, False
        # Only saves beside training copy the state, and want room for that.
        self._copies = self.knobs.best is not None or every.may_be_due(first, last)

    def after_step(self, info: StepInfo) -> bool:
        if not self._has_begun:
            self._has_begun = True
            masters, optimizer = self.train_state.masters, self.train_state.optimizer
            # The optimizer has its state now. What no checkpoint can keep is refused before more
            # steps are paid for.
            training_tensors(masters, optimizer)
            if self._copies:
                self.saver.prepare(masters, optimizer)
        self._due = self._due or self.every.is_due(info.step)
        # While steps are being skipped no checkpoint is made: training may have to roll back to the
        # state before them. Evaluations wait for the same reason.
        self._waits = self._due and bool(info.outcome.skipped)
        if self.stopper.refused is not None:
            self._judge()  # no checkpoint may pass over steps that are too many to skip
            self.finish(info.step)
            raise self.stopper.refused
        is_best = self.knobs.best is not None and self.stopper.best_step == info.step
        due = is_best or (self._due and not self._waits)
        if due and info.step < self._last:  # `finish` saves the last one
            self.save(info.step)
        if self._is_saving:
            self._record(self.saver.done())
        return False

    def save(self, step: int, *, last: bool = False) -> None:
        """Start saving the state after `step` steps, unless that is already saved; the last one is
        committed when this returns. A checkpoint made for a signal does not replace the periodic
        one: if that one still waits, the next attempt makes it.
        """
        due, self._due = self._due and not self._waits, self._waits
        self.every.restart()
        if step == self.saved:
            return
        self._flush()
        self.account.snapshot(step)
        with self.account.spending("saving", "saving"):
            self.saver.save(
                step,
                self.train_state.masters,
                self.train_state.optimizer,
                {**self.payload(step), "due": due, "waiting": self._waits},
                keep=self.knobs.keep,
                best=self.stopper.best_step,
                due=self._averaged,
                last=last,
            )
        self.saved, self._is_saving = step, True
        self._record(self.saver.done())

    def _flush(self) -> None:
        """What is logged must not be younger than the checkpoint, should the whole machine go."""
        if self.is_main:
            for lines in (self.run.metrics, self.run.events):
                flush_lines(lines)

    def finish(self, step: int) -> None:
        """Save the state after `step` steps, and wait until it is committed and older checkpoints
        are deleted.
        """
        done_before = step == self.saved
        self.save(step, last=True)
        self.wait()
        if done_before:
            self._recommit(step)
            if self.is_main:
                retain(
                    self.run.checkpoints, self.knobs.keep, self._best_step, self._averaged
                )  # an attempt may have died before it came to that

    @property
    def _best_step(self) -> int | None:
        """The best step; where this recipe has none, that of a training that was over before: the
        recipe that asks for it again exports it again.
        """
        best, start = self.stopper.best_step, self._start
        if best is None and start is not None and start.commit["finished"]:
            best = start.commit["watched"].get("best", {}).get("best_step")
        return best

    def _recommit(self, step: int) -> None:
        """Have the checkpoint that training went on from say what was decided since, where no step
        was made: an evaluation that was owed may have ended training, or rows that are left out its
        last pass.
        """
        if self._start is None or self._has_begun:
            return
        before, now = self._start.commit, self._decided(step)
        if now["owed"] != before["owed"] or (now["finished"] and not before["finished"]):
            self._flush()
            with self.account.spending("saving", "saving"):
                self.saver.recommit(self._start, now)

    def wait(self) -> None:
        """Wait for the save in progress. Raises Failed on every rank if a checkpoint could not be
        written.
        """
        with self.account.spending("saving", "saving"):
            committed = self.saver.wait()
        self._record(committed)

    @property
    def has_failed(self) -> bool:
        """Whether a save of this rank has failed; `wait` then raises on every rank."""
        return self._is_saving and self.saver.failed

    def _record(self, committed: Sequence[Saved]) -> None:
        for saved in committed:
            self.account.committed(saved)
            self._is_saving = self._is_saving and saved.step != self.saved

    def close(self) -> None:
        self.saver.close()
