"""Training steps on the device: the same numbers as on the CPU, twice the same bits, and what each
way to save memory or time changes.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpu.attention import relative
from benchmarks.gpu.record import Asked, Record
from benchmarks.gpu.steps import TINY_SIZES, emulating
from ingot.base.environment import Ranks
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.config.sections.layout import Offload
from ingot.models.device import backend, deterministic_kernels
from ingot.models.parameters import local_tensor
from ingot.parallel.mesh import Mesh
from ingot.train.micro_batch.memory import forget_peak
from ingot.train.micro_batch.trial import let_go, made_up_setup, open_trial
from ingot.train.optim.optimizers import Noise, round_to_bf16
from tests import tolerances

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "model.source": "preset:llama-6m",
    "tokenizer.source": "train",
    "tokenizer.vocab_size": 512,
    "data.train": [{"source": "builtin:stdlib"}],
    "data.seq_len": 96,
    "data.pack": "none",
    "train.steps": 100,
    "train.global_batch": 4,
    "train.micro_batch": 2,
    "train.optimizer.lr": 1e-3,
    "precision.compute": "fp32",
}
TINY_DECODER = {name: size for name, size in TINY_SIZES.items() if name != "vocab_size"}
TINY_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2}
TINY_BERT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SGD = {"train.optimizer": {"kind": "sgd", "lr": 0.1}}
FAR = {"kind": "sgd", "lr": 1000.0}
"""A step so long that of the difference of the weights before and after, the gradient is left, and
not how float32 rounds a weight.
"""
BF16 = {"precision.compute": "bf16"}
BESIDE_CPU: dict[str, dict[str, Any]] = {
    "full": SGD,
    "packed": {**SGD, "data.pack": "best_fit"},
    "LoRA": {**SGD, "model.lora": {"rank": 4}},
    "adamw": {},
    "muon": {"train.optimizer": {"kind": "muon"}},
    "T5": {
        **SGD,
        "model.source": "preset:t5-mini",
        "model.config": {"dropout_rate": 0.0},
        "objective.kind": "seq2seq",
    },
    "BERT": {
        **SGD,
        "model.source": "preset:bert-mini",
        "model.config": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "objective": {"kind": "classify", "labels": ["a", "b"]},
    },
    "DPO": {**SGD, "objective.kind": "dpo"},
}
"""Float32 on the device against the CPU; without dropout, whose draws are a device's own."""
TINY = {"preset:t5-mini": TINY_T5, "preset:bert-mini": TINY_BERT}
SAME_BITS: dict[str, dict[str, Any]] = {
    "twice the same": {},
    "full recomputation": {"memory.recompute.kind": "full"},
    "selective recomputation": {"memory.recompute.kind": "selective"},
    "activations offloaded": {"memory.offload.activations": True},
    "half of the optimizer offloaded": {"memory.offload.optimizer": 0.5},
    "the optimizer offloaded": {"memory.offload.optimizer": 1.0},
}
"""Against the plain step of the same device, in float32 and in bf16. What the host's optimizer
updates has the same bits on a CPU alone: a device's fused kernels round otherwise.
"""


@dataclass(frozen=True)
class Trained:
    """Losses of the steps; trained weights after them and before, on the CPU."""

    losses: list[float]
    weights: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    step_s: float
    peak_bytes: int

    def moved_from(self, other: Trained) -> float:
        """The difference of the updates, relative, in norm over all weights."""
        moved = [self.weights[name] - self.before[name] for name in sorted(self.weights)]
        wanted = [other.weights[name] - other.before[name] for name in sorted(other.weights)]
        return relative(flat(moved), flat(wanted))


def apart(one: Trained, other: Trained) -> float:
    """The largest difference of their losses."""
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def sized(knobs: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """Knobs of `SMALL`, in miniature with a smaller model and shorter rows."""
    given = {**SMALL, **knobs}
    if not asked.tiny:
        return given
    sizes = TINY.get(given["model.source"], TINY_DECODER)
    config = {**given.get("model.config", {}), **sizes}
    return {**given, "model.config": config, "data.seq_len": 32}


def recipe_of(folder: Path, knobs: Mapping[str, Any]) -> Recipe:
    given = {"name": "gpu", "output": str(folder), **knobs}
    lines = [f"{name}={json.dumps(value)}" for name, value in given.items()]
    return load_recipe((), lines, environ={}, dotenv=None).at("train")


def train(
    knobs: Mapping[str, Any],
    device: torch.device,
    steps: int,
    mesh: Mesh | None = None,
    offload: Offload | None = None,
) -> Trained:
    """So many steps of real training on random rows, the same on every device. `offload`: what
    `load_recipe` refuses to one rank.
    """
    mesh = mesh or Mesh(Ranks(), device)
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(Path(folder), knobs)
        if offload is not None:
            memory = recipe.memory.model_copy(update={"offload": offload})
            recipe = recipe.model_copy(update={"memory": memory})
        losses, times = [], []
        setup = made_up_setup(recipe, mesh)
        with open_trial(setup, mesh) as trial, trial.step_function(setup.batch) as take:
            before = weights_of(trial.train_state.masters)
            for step in range(steps):
                if step == steps // 2:
                    forget_peak(device)
                began = time.perf_counter()
                losses.append(float(take(step).loss))
                times.append(time.perf_counter() - began)
            after = weights_of(trial.train_state.masters)
            cuda = device.type == "cuda"
            peak = torch.cuda.max_memory_allocated(device) if cuda else 0
        del trial, take
    gc.collect()
    let_go(compiled=recipe.train.compile)
    return Trained(losses, after, before, min(times), peak)


def weights_of(masters: Any) -> dict[str, Tensor]:
    return {
        master.name: local_tensor(master.tensor).detach().float().cpu().clone()
        for master in masters
    }


def run(asked: Asked, record: Record, *, part: str) -> None:
    steps = 2 if asked.tiny else 4
    PARTS[part](steps, asked, record)


def beside_cpu(steps: int, asked: Asked, record: Record) -> None:
    for what, knobs in BESIDE_CPU.items():
        with record.trying(what):
            one_beside_cpu(what, sized(knobs, asked), steps, asked, record)


def one_beside_cpu(
    what: str, knobs: Mapping[str, Any], steps: int, asked: Asked, record: Record
) -> None:
    here, there = train(knobs, CPU, steps), train(knobs, asked.device, steps)
    record.within(f"{what} beside the CPU: losses", apart(here, there), tolerances.SPLIT_LOSS)
    if knobs.get("train.optimizer") == SGD["train.optimizer"]:
        # Optimizers that divide by a gradient's size turn rounding of almost none into a step.
        once = {**knobs, "train.optimizer": FAR}
        here, there = train(once, CPU, 1), train(once, asked.device, 1)
        record.within(
            f"{what} beside the CPU: gradients", there.moved_from(here), tolerances.GRADIENTS_FP32
        )


def bits(steps: int, asked: Asked, record: Record) -> None:
    for form, knobs in {"float32": {}, "bf16": BF16}.items():
        with record.trying(form):
            same_bits(form, knobs, steps, asked, record)


def long_rows(steps: int, asked: Asked, record: Record) -> None:
    """Whether bits come again where gradients of attention are sums over many blocks of keys, as
    those of short rows are not; and what it costs that they do.
    """
    length = 4096
    knobs = sized(
        {**BF16, "data.seq_len": length, "model.config": {"max_position_embeddings": length}}, asked
    )
    took = {}
    for what in ("as torch chooses", "train.deterministic"):
        with record.trying(what), ExitStack() as kernels:
            if what == "train.deterministic":
                kernels.enter_context(deterministic_kernels(asked.device))
            one, other = (train(knobs, asked.device, steps) for _ in range(2))
            same = one.losses == other.losses and all(
                torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items()
            )
            told = f"updates by {other.moved_from(one):.1e}"
            took[f"{what}, s a step"] = min(one.step_s, other.step_s)
            if what == "train.deterministic":
                record.holds(f"rows of 4,096, {what}: twice the same bits", same, told)
            else:
                took["differs by, relative"] = 0.0 if same else other.moved_from(one)
    record.figures(**took)


def rounded(steps: int, asked: Asked, record: Record) -> None:
    with record.trying("nearly the same"):
        nearly(steps, asked, record)
    with record.trying("stochastic rounding in the mean"):
        rounding(asked, record)


def same_bits(
    form: str, knobs: Mapping[str, Any], steps: int, asked: Asked, record: Record
) -> None:
    knobs = sized(knobs, asked)
    plain = train(knobs, asked.device, steps)
    for what, more in SAME_BITS.items():
        with record.trying(f"{form}, {what}"):
            other = train({**knobs, **more}, asked.device, steps)
            if asked.cuda and "memory.offload.optimizer" in more:
                bound = tolerances.SPLIT_LOSS if form == "float32" else tolerances.BF16_LOSS
                record.within(f"{form}, {what}: losses", apart(other, plain), bound)
                continue
            differ = [
                name
                for name, tensor in plain.weights.items()
                if not torch.equal(tensor, other.weights[name])
            ]
            told = f"losses equal: {plain.losses == other.losses}"
            if differ:
                told += f"; {len(differ)} of {len(plain.weights)} weights differ, {differ[0]};"
                told += f" updates by {other.moved_from(plain):.1e}"
            same = not differ and plain.losses == other.losses
            record.holds(f"{form}, {what}: bits", same, told)


def nearly(steps: int, asked: Asked, record: Record) -> None:
    """What rounds otherwise: compiled steps, stochastic rounding, float8."""
    exact, half = (train(sized(knobs, asked), asked.device, steps) for knobs in ({}, BF16))
    pairs: dict[str, tuple[Trained, dict[str, Any], float]] = {
        "compiled, float32": (exact, {"train.compile": True}, tolerances.SPLIT_LOSS),
        "compiled, bf16": (half, {**BF16, "train.compile": True}, tolerances.BF16_LOSS),
        "stochastic rounding": (
            half,
            {**BF16, "precision.master": "stochastic"},
            tolerances.BF16_LOSS,
        ),
        "float8 tensorwise": (
            half,
            {**BF16, "precision.float8": "tensorwise"},
            tolerances.FLOAT8_LOSS * exact.losses[0],
        ),
        "float8 rowwise": (
            half,
            {**BF16, "precision.float8": "rowwise"},
            tolerances.FLOAT8_LOSS * exact.losses[0],
        ),
    }
    record.within("bf16 beside float32: losses", apart(exact, half), tolerances.BF16_LOSS)
    for what, (plain, more, bound) in pairs.items():
        knobs = sized(more, asked)
        with record.trying(what), emulating(asked):
            other = train(knobs, asked.device, steps)
            record.within(f"{what}: losses", apart(plain, other), bound)
            if "precision.master" in more:
                again = train(knobs, asked.device, steps)
                same = all(
                    torch.equal(tensor, again.weights[name])
                    for name, tensor in other.weights.items()
                )
                record.holds(f"{what}: twice the same bits", same)


def rounding(asked: Asked, record: Record) -> None:
    """Float32 numbers rounded to bf16 at random: always a neighbour, and right in the mean."""
    device, times = asked.device, 2**16
    values = torch.tensor([1.0, 1.001, -1.003, 3.14159, 1e-30, -2.7e20], device=device)
    noise = Noise(7).bits(torch.tensor(1.0, device=device), slice(0, times), len(values))
    many = round_to_bf16(values.repeat(times, 1), noise).double()
    down = (values.view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    up = ((values.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32).double()
    record.holds("stochastic rounding: neighbours", bool(((many == down) | (many == up)).all()))
    # Five standard errors, of which one is at most half the distance by the root of the count.
    errors = (many.mean(0) - values.double()).abs() / ((up - down).abs() / 2 / times**0.5)
    record.within("stochastic rounding: mean, in standard errors", float(errors.max()), 5.0)


def offloaded_weights(steps: int, asked: Asked, record: Record) -> None:
    """Weights, gradients and optimizer on the host. Offloaded weights are shards, here the only
    one of each, in bf16, where weights are gathered in another type.
    """
    knobs = sized({**BF16, **SGD}, asked)
    once, away = {**knobs, "train.optimizer": FAR}, Offload(weights=True)
    with shards_of_one(asked.device) as mesh:
        plain = train(knobs, asked.device, steps, mesh)
        other = train(knobs, asked.device, steps, mesh, away)
        first = train(once, asked.device, 1, mesh)
        other_first = train(once, asked.device, 1, mesh, away)
    what = "bf16, weights offloaded"
    # The host's optimizer rounds otherwise than a device's, so do bf16 weights then, and whatever
    # is computed with them from the second step on.
    record.within(f"{what}: losses", apart(plain, other), tolerances.BF16_LOSS)
    record.within(f"{what}: gradients", other_first.moved_from(first), tolerances.GRADIENTS_FP32)
    if asked.cuda:
        freed = 1 - other.peak_bytes / plain.peak_bytes
        record.holds(f"{what}: frees memory", freed > 0.05, f"{freed:.0%} of the plain peak")
    else:
        record.not_run(f"{what}: memory")


@contextmanager
def shards_of_one(device: torch.device) -> Iterator[Mesh]:
    """A mesh of one rank whose weights are sharded all the same."""
    dist.init_process_group(backend(device), store=dist.HashStore(), rank=0, world_size=1)
    try:
        axes = ("pipeline", "replicate", "shard", "tensor")
        weights = init_device_mesh(device.type, (1,) * len(axes), mesh_dim_names=axes)
        yield Mesh(Ranks(), device, weights=weights)
    finally:
        dist.destroy_process_group()


PARTS = {
    "beside the CPU": beside_cpu,
    "bits": bits,
    "bits of long rows": long_rows,
    "rounded": rounded,
    "weights offloaded": offloaded_weights,
}
