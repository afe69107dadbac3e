"""Side effects of training: metrics and progress, evaluation with early stopping, checkpoints. Each is handed a StepInfo, never the loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ingot.base.progress import Progress
from ingot.base.runfolder import RunFolder
from ingot.base.sinks import Guarded, JsonLines
from ingot.checkpoints.store import retain, save_checkpoint
from ingot.models.device import Compute, gpu_usage, measured_peak, peak_memory_bytes
from ingot.parallel.mesh import Mesh
from ingot.train.build import Trainee
from ingot.train.loop import StepInfo
from ingot.train.plan import Plan
from ingot.train.watch import Measured, Tracker


class Tell(Protocol):
    """Records an event of this run, on rank 0."""

    def __call__(self, kind: str, *, step: int, seconds: float | None = None, cause: str | None = None) -> None: ...


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

    def __init__(self, sinks: Sequence[JsonLines | Guarded], progress: Progress, every: int, last: int, work: Workload, mesh: Mesh, *, gpu: bool) -> None:
        self.sinks, self.progress, self.every, self.last, self.work, self.mesh, self.gpu = sinks, progress, every, last, work, mesh, gpu
        self._seconds, self._tokens, self._samples, self._skipped = 0.0, 0, 0, torch.zeros(())
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
            "train/loss": loss, "train/lr": info.lr, "train/grad_norm": float(info.outcome.grad_norm),
            "train/tokens_per_s": rate, "train/examples_per_s": self._samples / seconds, "train/skipped_steps": float(self._skipped), **usage,
            **{f"train/{name}": float(value) for name, value in info.outcome.metrics.items()},
        }
        if self.work.flops_per_token is not None:
            values["train/mfu"] = rate * self.work.flops_per_token / (self._peak() * self.mesh.world)
        for sink in self.sinks:
            sink.write(info.step, values)
        self._notes = {"loss": f"{loss:.3f}", "tokens/s": f"{rate:,.0f}"}
        self._seconds, self._samples, self._tokens = 0.0, 0, 0

    def _peak(self) -> float:
        """The maker's figure, or the best that a large product has reached so far: a machine that is shared is slow now and then."""
        if self.work.stated_peak is not None:
            return self.work.stated_peak
        self._best_peak = max(self._best_peak, measured_peak(self.mesh.device, self.work.compute))
        return self._best_peak

    def _usage(self) -> dict[str, float]:
        """Memory and GPU use of every rank, `memory/rank0_gb` and so on; collective."""
        here = gpu_usage(self.mesh.device) if self.gpu else {}
        mine = [peak_memory_bytes(self.mesh.device) / 1e9, here.get("util", math.nan), here.get("memory", math.nan)]
        ranks = self.mesh.gather(mine)
        names = ("memory/rank{}_gb", "gpu/rank{}_util", "gpu/rank{}_memory")
        return {name.format(rank): value for rank, row in enumerate(ranks) for name, value in zip(names, row, strict=True) if not math.isnan(value)}

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


class EvaluateHook:
    """Measures on held-out data every `every` steps, and ends training when `stopping` has seen no improvement for `patience` times."""

    def __init__(
        self, measure: Callable[[], Mapping[str, Measured]], every: int | None, stopping: Tracker | None, patience: int, best: Tracker | None,
        sinks: Sequence[JsonLines | Guarded],
    ) -> None:
        self.measure, self.every, self.stopping, self.patience, self.best, self.sinks = measure, every, stopping, patience, best, sinks

    def after_step(self, info: StepInfo) -> bool:
        if self.every is None or info.step % self.every:
            return False
        started = time.monotonic()
        measured = self.measure()
        for sink in self.sinks:
            numbers: dict[str, float | str] = {f"validation/{key}": found.value for key, found in measured.items()}
            sink.write(info.step, {**numbers, "validation/seconds": time.monotonic() - started})
        for tracker in (self.stopping, self.best):
            if tracker is not None:
                tracker.see(info.step, measured)
        return self.is_over

    @property
    def is_over(self) -> bool:
        return self.stopping is not None and self.stopping.worse_in_row >= self.patience

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation so far, where the best checkpoint is asked for."""
        return None if self.best is None else self.best.best_step

    def state(self) -> dict[str, Any]:
        """What a resumed run must know to stop at the same step and to keep the same checkpoint."""
        return {name: tracker.state() for name, tracker in (("early_stop", self.stopping), ("best", self.best)) if tracker is not None}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, tracker in (("early_stop", self.stopping), ("best", self.best)):
            if tracker is not None and name in state and state[name]["metric"] == tracker.metric:
                tracker.restore(state[name])

    def close(self) -> None:
        pass


class SampleHook:
    """Writes what the model makes of the recipe's prompts, as text, every `every` steps.

    `complete` is called on rank 0 alone, but where the model is spread over ranks: there on all of them, in lockstep.
    """

    def __init__(
        self, complete: Callable[[], list[dict[str, str]]], every: int | None, sinks: Sequence[JsonLines | Guarded], mesh: Mesh, *, spread: bool = False
    ) -> None:
        self.complete, self.every, self.sinks, self.mesh, self.spread = complete, every, sinks, mesh, spread

    def after_step(self, info: StepInfo) -> bool:
        if self.every is not None and info.step % self.every == 0:
            samples = self.complete() if self.spread else self.mesh.from_main(self.complete)
            for sink in self.sinks:
                sink.write(info.step, {f"samples/{number}": f"{one['prompt']} -> {one['completion']}" for number, one in enumerate(samples)})
        return False

    def close(self) -> None:
        pass


class CheckpointHook:
    """Saves every `every` steps and at each best evaluation, at most `keep` of them kept beside the best; `save` is also called after the loop."""

    def __init__(self, trainee: Trainee, plan: Plan, run: RunFolder, stopper: EvaluateHook, tell: Tell, mesh: Mesh, first: int) -> None:
        self.trainee, self.plan, self.run, self.stopper, self.tell, self.mesh = trainee, plan, run, stopper, tell, mesh
        self.saved = first

    def after_step(self, info: StepInfo) -> bool:
        if info.step % self.plan.recipe.checkpoint.every == 0 or self.stopper.best_step == info.step:
            self.save(info.step)
        return False

    def save(self, step: int) -> None:
        """Commit the state after `step` steps, unless that is what was committed last."""
        if step == self.saved:
            return
        began = time.monotonic()
        payload = {
            "samples": step * self.plan.batch.global_batch, "finished": step >= self.plan.last or self.stopper.is_over,
            "identity": self.plan.identity, "watched": self.stopper.state(),
        }
        save_checkpoint(self.run.checkpoints, step, self.trainee.masters, self.trainee.optimizer, payload, self.mesh)
        self.saved = step
        if self.mesh.is_main:
            retain(self.run.checkpoints, self.plan.recipe.checkpoint.keep, self.stopper.best_step)
        self.tell("save", step=step, seconds=time.monotonic() - began)

    def close(self) -> None:
        pass
