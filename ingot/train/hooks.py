"""Side effects of training: metrics and progress, evaluation with early stopping, checkpoints. Each
is handed a StepInfo, never the loop.

What a request to stop breaks off (an evaluation, samples) is owed: the checkpoint says so, and the
next attempt does it first.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ingot.base.progress import Progress
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import FailSafeSink, JsonLines, flush_lines
from ingot.checkpoints.saver import Saved, Saver
from ingot.checkpoints.store import retain
from ingot.config.sections.training import Checkpoint
from ingot.models.device import Compute, gpu_usage, measured_peak, peak_memory_bytes
from ingot.parallel.mesh import Mesh
from ingot.train.build import Trainee
from ingot.train.evaluation import Measured, Tracker
from ingot.train.goodput import Account
from ingot.train.step import StepInfo


@dataclass(frozen=True)
class Workload:
    """What a token costs and what one device could do at best; both for MFU."""

    flops_per_token: float | None
    """None where there is no formula for this kind of model; then no MFU is told."""
    stated_peak: float | None
    """FLOP/s as the maker says; None where that is not known and must be measured."""
    compute: Compute


class LogHook:
    """Writes metrics to the sinks and shows progress, every `every` steps and at the last one."""

    def __init__(
        self,
        sinks: Sequence[JsonLines | FailSafeSink],
        progress: Progress,
        every: int,
        last: int,
        work: Workload,
        mesh: Mesh,
        *,
        gpu: bool,
        skipped: float = 0.0,
    ) -> None:
        """`skipped` steps were not taken by earlier attempts."""
        self.sinks, self.progress, self.every, self.last, self.work, self.mesh, self.gpu = (
            sinks,
            progress,
            every,
            last,
            work,
            mesh,
            gpu,
        )
        self._seconds, self._tokens, self._samples, self._skipped = 0.0, 0, 0, torch.tensor(skipped)
        self._notes: dict[str, str] = {}
        self._best_peak = 0.0

    def after_step(self, info: StepInfo) -> bool:
        self._seconds += info.seconds
        self._samples += info.samples
        self._tokens += info.tokens
        self._skipped = self._skipped + info.outcome.skipped.to(self._skipped.device)
        if info.step % self.every == 0 or info.step in (1, self.last):
            self._write(info)
        self.progress.update(info.step, **self._notes)
        return False

    def _write(self, info: StepInfo) -> None:
        usage = self._usage()
        loss = float(info.outcome.loss)  # waits for the device: from here on `seconds` is honest
        seconds = max(self._seconds, 1e-9)
        rate = self._tokens / seconds
        values: dict[str, float | str] = {
            "train/loss": loss,
            "train/lr": info.lr,
            "train/grad_norm": float(info.outcome.grad_norm),
            "train/tokens_per_s": rate,
            "train/examples_per_s": self._samples / seconds,
            "train/skipped_steps": float(self._skipped),
            **usage,
            **{f"train/{name}": float(value) for name, value in info.outcome.metrics.items()},
        }
        if self.work.flops_per_token is not None:
            values["train/mfu"] = (
                rate * self.work.flops_per_token / (self._peak() * self.mesh.world)
            )
        for sink in self.sinks:
            sink.write(info.step, values)
        self._notes = {"loss": f"{loss:.3f}", "tokens/s": f"{rate:,.0f}"}
        self._seconds, self._samples, self._tokens = 0.0, 0, 0

    @property
    def skipped(self) -> float:
        """Steps that were not taken, from the first on. Waits for the device."""
        return float(self._skipped)

    def _peak(self) -> float:
        """The maker's figure, or the best that a large product has reached so far: a machine that
        is shared is slow now and then.
        """
        if self.work.stated_peak is not None:
            return self.work.stated_peak
        self._best_peak = max(self._best_peak, measured_peak(self.mesh.device, self.work.compute))
        return self._best_peak

    def _usage(self) -> dict[str, float]:
        """Memory and GPU use of every rank, `memory/rank0_gb` and so on; collective."""
        here = gpu_usage(self.mesh.device) if self.gpu else {}
        mine = [
            peak_memory_bytes(self.mesh.device) / 1e9,
            here.get("util", math.nan),
            here.get("memory", math.nan),
        ]
        ranks = self.mesh.gather(mine)
        names = ("memory/rank{}_gb", "gpu/rank{}_util", "gpu/rank{}_memory")
        return {
            name.format(rank): value
            for rank, row in enumerate(ranks)
            for name, value in zip(names, row, strict=True)
            if not math.isnan(value)
        }

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


class EvaluateHook:
    """Measures on held-out data every `every` steps, and ends training when `stopping` has seen no
    improvement for `patience` times.

    `measure` gives None where it was broken off.
    """

    def __init__(
        self,
        measure: Callable[[], Mapping[str, Measured] | None],
        every: int | None,
        stopping: Tracker | None,
        patience: int,
        best: Tracker | None,
        sinks: Sequence[JsonLines | FailSafeSink],
        account: Account,
    ) -> None:
        (
            self.measure,
            self.every,
            self.stopping,
            self.patience,
            self.best,
            self.sinks,
            self.account,
        ) = (measure, every, stopping, patience, best, sinks, account)
        self.owes = False

    def after_step(self, info: StepInfo) -> bool:
        if self.every is None or info.step % self.every:
            return False
        self.at(info.step)
        return self.is_over

    def at(self, step: int) -> None:
        """Measure the model as it is after `step`."""
        started = time.monotonic()
        with self.account.spending("evaluating", "evaluating"):
            measured = self.measure()
        self.owes = measured is None
        if measured is None:
            return
        for sink in self.sinks:
            numbers: dict[str, float | str] = {
                f"validation/{key}": found.value for key, found in measured.items()
            }
            sink.write(step, {**numbers, "validation/seconds": time.monotonic() - started})
        for tracker in (self.stopping, self.best):
            if tracker is not None:
                tracker.see(step, measured)

    @property
    def is_over(self) -> bool:
        return self.stopping is not None and self.stopping.worse_in_row >= self.patience

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation so far, where the best checkpoint is asked for."""
        return None if self.best is None else self.best.best_step

    def state(self) -> dict[str, Any]:
        """What a resumed run must know to stop at the same step and to keep the same checkpoint."""
        return {
            name: tracker.state()
            for name, tracker in (("early_stop", self.stopping), ("best", self.best))
            if tracker is not None
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, tracker in (("early_stop", self.stopping), ("best", self.best)):
            if tracker is not None and name in state and state[name]["metric"] == tracker.metric:
                tracker.restore(state[name])

    def close(self) -> None:
        pass


class SampleHook:
    """Writes what the model makes of the recipe's prompts, as text, every `every` steps.

    `complete` is called on rank 0 alone, but where the model is spread over ranks: there on all of
    them, in lockstep. It is not begun where `asked` says that training is to stop.
    """

    def __init__(
        self,
        complete: Callable[[], list[dict[str, str]]],
        every: int | None,
        sinks: Sequence[JsonLines | FailSafeSink],
        mesh: Mesh,
        account: Account,
        asked: Callable[[], bool],
        *,
        spread: bool = False,
    ) -> None:
        self.complete, self.every, self.sinks, self.mesh, self.account, self.asked, self.spread = (
            complete,
            every,
            sinks,
            mesh,
            account,
            asked,
            spread,
        )
        self.owes = False

    def after_step(self, info: StepInfo) -> bool:
        if self.every is not None and info.step % self.every == 0:
            self.at(info.step)
        return False

    def at(self, step: int) -> None:
        """Write what the model makes of the prompts as it is after `step`."""
        self.owes = self.asked()
        if self.owes:
            return
        with self.account.spending("evaluating", "evaluating"):
            samples = self.complete() if self.spread else self.mesh.from_main(self.complete)
        for sink in self.sinks:
            sink.write(
                step,
                {
                    f"samples/{number}": f"{one['prompt']} -> {one['completion']}"
                    for number, one in enumerate(samples)
                },
            )

    def close(self) -> None:
        pass


class CheckpointHook:
    """Saves every `every` steps and at each best evaluation, at most `keep` of them kept beside the
    best; `finish` is called after the loop.

    `payload` is what else a resumed run must know.
    """

    def __init__(
        self,
        saver: Saver,
        trainee: Trainee,
        run: RunFolder,
        knobs: Checkpoint,
        stopper: EvaluateHook,
        payload: Callable[[int], Mapping[str, Any]],
        account: Account,
        first: int,
        *,
        is_main: bool,
    ) -> None:
        self.saver, self.trainee, self.run, self.knobs, self.stopper, self.payload, self.account = (
            saver,
            trainee,
            run,
            knobs,
            stopper,
            payload,
            account,
        )
        self.is_main = is_main
        self.saved = first
        """The step of the newest checkpoint that was begun."""
        self._due, self._prepared = False, False

    def after_step(self, info: StepInfo) -> bool:
        if not self._prepared:
            self.saver.prepare(
                self.trainee.masters, self.trainee.optimizer
            )  # the optimizer has its state now
            self._prepared = True
        self._due = self._due or info.step % self.knobs.every == 0
        # Where steps are not taken for a while, what training may have to go back to is the state
        # before them.
        if self.stopper.best_step == info.step or (self._due and not float(info.outcome.skipped)):
            self.save(info.step)
        self._tell(self.saver.done())
        return False

    def save(self, step: int) -> None:
        """Begin to save the state after `step` steps, unless that was saved last."""
        self._due = False
        if step == self.saved:
            return
        if self.is_main:
            for lines in (self.run.metrics, self.run.events):
                flush_lines(
                    lines
                    # what is logged must not be younger than the checkpoint, should the whole
                    # machine go
                )
        self.account.snapshot(step)
        with self.account.spending("saving", "saving"):
            self.saver.save(
                step,
                self.trainee.masters,
                self.trainee.optimizer,
                self.payload(step),
                keep=self.knobs.keep,
                best=self.stopper.best_step,
            )
        self.saved = step
        self._tell(self.saver.done())

    def finish(self, step: int) -> None:
        """Save the state after `step` steps, and wait until it is committed and what need not be
        kept is gone.
        """
        done_before = step == self.saved
        self.save(step)
        self.wait()
        if done_before and self.is_main:
            retain(
                self.run.checkpoints, self.knobs.keep, self.stopper.best_step
            )  # an attempt may have died before it came to that

    def wait(self) -> None:
        """Raises Failed on every rank when a checkpoint could not be written."""
        with self.account.spending("saving", "saving"):
            committed = self.saver.wait()
        self._tell(committed)

    def _tell(self, committed: Sequence[Saved]) -> None:
        for saved in committed:
            self.account.committed(saved)

    def close(self) -> None:
        self.saver.close()


class KillHook:
    """Kills this process once `step` steps are done, as by `kill -9`: for proofs that nothing is
    lost.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, info: StepInfo) -> bool:
        if info.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    def close(self) -> None:
        pass
