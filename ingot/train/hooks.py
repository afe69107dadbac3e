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
from ingot.config.work import EarlyStop
from ingot.models.device import Compute, gpu_usage, measured_peak, peak_memory_bytes
from ingot.parallel.mesh import Mesh
from ingot.train.build import Plan, Trainee
from ingot.train.loop import StepInfo


class Tell(Protocol):
    """Records an event of this run, on rank 0."""

    def __call__(self, kind: str, *, step: int, seconds: float | None = None, cause: str | None = None) -> None: ...


@dataclass(frozen=True)
class Workload:
    """What a token costs and what one device could do at best; both for MFU."""

    flops_per_token: float
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
        }
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
    """Measures the validation loss every `every` steps, and ends training when it no longer falls."""

    def __init__(self, measure: Callable[[], float], every: int | None, early_stop: EarlyStop | None, sinks: Sequence[JsonLines | Guarded]) -> None:
        self.measure, self.every, self.early_stop, self.sinks = measure, every, early_stop, sinks
        self.best, self.worse_in_row = math.inf, 0

    def after_step(self, info: StepInfo) -> bool:
        if self.every is None or info.step % self.every:
            return False
        started = time.monotonic()
        loss = self.measure()
        for sink in self.sinks:
            sink.write(info.step, {"validation/loss": loss, "validation/seconds": time.monotonic() - started})
        margin = self.early_stop.min_delta if self.early_stop else 0.0
        improved = loss < self.best - margin
        self.worse_in_row = 0 if improved else self.worse_in_row + 1
        self.best = min(self.best, loss)
        return self.is_over

    @property
    def is_over(self) -> bool:
        return self.early_stop is not None and self.worse_in_row >= self.early_stop.patience

    def state(self) -> dict[str, Any]:
        """What a resumed run must know to stop at the same step."""
        return {"best": self.best if math.isfinite(self.best) else None, "worse_in_row": self.worse_in_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best = math.inf if state["best"] is None else state["best"]
        self.worse_in_row = state["worse_in_row"]

    def close(self) -> None:
        pass


class CheckpointHook:
    """Saves every `every` steps, at most `keep` of them kept; `save` is also called once after the loop."""

    def __init__(self, trainee: Trainee, plan: Plan, run: RunFolder, stopper: EvaluateHook, tell: Tell, mesh: Mesh, first: int) -> None:
        self.trainee, self.plan, self.run, self.stopper, self.tell, self.mesh = trainee, plan, run, stopper, tell, mesh
        self.saved = first

    def after_step(self, info: StepInfo) -> bool:
        if info.step % self.plan.recipe.checkpoint.every == 0:
            self.save(info.step)
        return False

    def save(self, step: int) -> None:
        """Commit the state after `step` steps, unless that is what was committed last."""
        if step == self.saved:
            return
        began = time.monotonic()
        payload = {
            "samples": step * self.plan.batch.global_batch, "finished": step >= self.plan.last or self.stopper.is_over,
            "identity": self.plan.identity, "early_stop": self.stopper.state(),
        }
        save_checkpoint(self.run.checkpoints, step, self.trainee.model, self.trainee.optimizer, payload, self.mesh)
        self.saved = step
        if self.mesh.is_main:
            retain(self.run.checkpoints, self.plan.recipe.checkpoint.keep)
        self.tell("save", step=step, seconds=time.monotonic() - began)

    def close(self) -> None:
        pass
