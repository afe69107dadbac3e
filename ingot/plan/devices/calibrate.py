"""Measures what this device needs for the kernels and collectives of a training step.

Steps of small models are trained on made-up rows, and every kernel in them is timed: the kernels
that training uses, on operands that lie where they lie in training. What a step takes beyond its
kernels, divided by their number, is the cost of calling one. On an accelerator the host waits for
each kernel, so that one's time is not another's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ingot.base.environment import Ranks
from ingot.base.progress import say
from ingot.config.recipe import Recipe
from ingot.models.device import Compute, device_name, measured_peak
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.plan.devices.coefficients import (
    UNMEASURED,
    WAITING,
    Coefficients,
    Curve,
    cpu_name,
    file_name,
)
from ingot.plan.devices.timed import (
    KernelTimer,
    TimedStep,
    draw_curves,
    host_curves,
    loading_curves,
    now,
    rising,
    spread,
    timed_step,
)
from ingot.plan.devices.types import device_types
from ingot.plan.seconds import sent_bytes
from ingot.train.micro_batch.trial import let_go, made_up_setup, open_trial

TIME_LIMIT_S = 70.0
"""No further shape is begun after that."""
MUCH_SLOWER = 4.0
"""A number format that takes so many times as long as float32 is not timed with larger shapes."""
WARM_UP, COUNTED = 2, 5
"""Steps before, and in, each measurement."""


class ModelShape(NamedTuple):
    """A small decoder and its micro-batch."""

    hidden: int
    layers: int
    vocab: int
    seq_len: int
    rows: int


CPU_SHAPES = (
    ModelShape(64, 2, 1024, 128, 1),
    ModelShape(128, 2, 2048, 256, 2),
    ModelShape(320, 2, 4096, 512, 2),
    ModelShape(128, 1, 2048, 2048, 1),
    ModelShape(768, 2, 8192, 512, 2),
)
ACCELERATOR_SHAPES = (
    ModelShape(512, 2, 8192, 512, 2),
    ModelShape(1024, 4, 32_768, 2048, 4),
    ModelShape(2048, 4, 32_768, 4096, 2),
    ModelShape(4096, 2, 65_536, 4096, 2),
)
HEAD, RANK = 64, 8
DTYPES: dict[Compute, str] = {"fp32": "float32", "bf16": "bfloat16"}


def calibrate(
    shapes: Sequence[ModelShape] | None = None, *, limit_s: float = TIME_LIMIT_S
) -> Coefficients:
    """Measure this device, in about a minute; every process that was started takes part, and
    collectives between them are measured too. Collective: rank 0's result counts.
    """
    with running_mesh() as mesh:
        began = time.monotonic()
        shapes = shapes or (CPU_SHAPES if mesh.device.type == "cpu" else ACCELERATOR_SHAPES)
        steps: list[TimedStep] = []
        pieces: list[TimedStep] = []
        computes = list(DTYPES)
        for shape in shapes:
            if steps and _slowest(mesh, time.monotonic() - began) > limit_s:
                break
            took = dict[str, float]()
            for compute in computes:
                at = time.monotonic()
                steps.append(_timed(shape, compute, mesh))
                pieces.append(_timed_pieces(shape, DTYPES[compute], mesh.device))
                took[compute] = _slowest(mesh, time.monotonic() - at)
            # A processor without instructions for bf16 would take minutes for the next shape; the
            # curves go on as they grew up to here.
            computes = [one for one in computes if took[one] < MUCH_SLOWER * took["fp32"]]
        found = draw_curves([*steps, *pieces], min(step.call_s for step in steps))
        found |= loading_curves(COUNTED)
        if mesh.device.type == "cpu":
            found |= host_curves(mesh, COUNTED)
        if mesh.world > 1:
            found |= _collectives(mesh)
            if mesh.device.type == "cpu" and mesh.ranks.local_world == mesh.world:
                found[WAITING] = _waiting(mesh, found["within reduce"])
        return _named(mesh, found)


def _slowest(mesh: Mesh, seconds: float) -> float:
    """So that all ranks go on, or none. Collective."""
    return max(taken for [taken] in mesh.gather([seconds]))


def _named(mesh: Mesh, curves: Mapping[str, Curve]) -> Coefficients:
    threads = torch.get_num_threads() if mesh.device.type == "cpu" else 0
    title = device_name(mesh.device)
    name = file_name(title)
    if mesh.device.type == "cpu":
        name, title = cpu_name(threads, mesh.ranks.local_world)
    else:
        known = (one.name for one in device_types().values() if title in one.cuda_names)
        name = next(known, name)
    return Coefficients(
        name,
        title,
        curves,
        **UNMEASURED,
        origin="measured",
        date=time.strftime("%Y-%m-%d"),
        torch=torch.__version__,
        threads=threads,
        ranks=mesh.world,
        peak_flops={
            dtype: max(measured_peak(mesh.device, compute), _best_rate(curves, dtype))
            for compute, dtype in DTYPES.items()
        },
    )


def _best_rate(curves: Mapping[str, Curve], dtype: str) -> float:
    """FLOP/s of the fastest products that were timed."""
    curve = curves.get(f"matmul {dtype}")
    points = () if curve is None else curve.points
    return max((work / likely for work, (_, likely, _) in points if likely), default=0.0)


def _recipe(shape: ModelShape, compute: Compute) -> Recipe:
    head = min(HEAD, shape.hidden // 2)
    heads = shape.hidden // head
    config = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2) if heads % 2 == 0 else heads,
        "head_dim": head,
        "intermediate_size": shape.hidden * 11 // 4,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.seq_len,
    }
    return Recipe.model_validate(
        {
            "name": "calibrate",
            "model": {"source": "preset:llama-3m", "config": config},
            "tokenizer": {"source": "train", "vocab_size": shape.vocab},
            "data": {
                "train": [{"source": "builtin:stdlib"}],
                "seq_len": shape.seq_len,
                "pack": "none",
            },
            "train": {"steps": 2, "global_batch": shape.rows, "micro_batch": shape.rows},
            "precision": {"compute": compute},
        }
    )


def _timed(shape: ModelShape, compute: Compute, mesh: Mesh) -> TimedStep:
    """A step of this shape; each rank trains alone."""
    device, alone = mesh.device, Mesh(Ranks(), mesh.device)
    recipe = _recipe(shape, compute)
    setup = made_up_setup(recipe, alone)
    with open_trial(setup, alone) as trial, trial.step_function(setup.batch) as take:
        step = iter(range(WARM_UP + 2 * COUNTED))
        for _ in range(WARM_UP):
            take(next(step))
        whole, recorded = [], []
        for _ in range(COUNTED):
            began = now(device)
            take(next(step))
            whole.append(now(device) - began)
            with KernelTimer(device) as timer:
                take(next(step))
            recorded.append(timer.calls)
    let_go(compiled=False)
    if mesh.is_main:
        say(
            f"calibrate: {compute}, width {shape.hidden}, {shape.rows} x {shape.seq_len} tokens:"
            f" {statistics.median(whole):.3f} s a step"
        )
    return timed_step(recorded, whole, device)


def _timed_pieces(shape: ModelShape, dtype: str, device: torch.device) -> TimedStep:
    """Kernels that other models, dropout and LoRA use, forward and backward."""
    tokens, heads = shape.rows * shape.seq_len, max(1, shape.hidden // HEAD)
    kind: torch.dtype = getattr(torch, dtype)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(kind).requires_grad_()

    wide, scores = drawn(tokens, shape.hidden), drawn(shape.rows, heads, *[shape.seq_len] * 2)
    down, up = drawn(shape.hidden, RANK), drawn(RANK, shape.hidden)
    q, k, v = (drawn(shape.rows * heads, shape.seq_len, HEAD) for _ in range(3))

    def run() -> None:
        products = torch.bmm(torch.bmm(q, k.transpose(1, 2)), v)
        for result in (
            functional.dropout(wide, 0.1),
            torch.ops.aten._safe_softmax(scores, -1),
            functional.gelu(wide),
            functional.silu(wide),
            torch.tanh(wide),
            wide @ down @ up,
            products,
        ):
            result.backward(torch.ones_like(result))

    recorded = []
    for turn in range(WARM_UP + COUNTED):
        with KernelTimer(device) as timer:
            run()
        if turn >= WARM_UP:
            recorded.append(timer.calls)
    return timed_step(recorded, [0.0], device)


SIZES = tuple(2**power for power in range(12, 27, 2))
"""Bytes of the largest tensor of a collective."""


def _collectives(mesh: Mesh) -> dict[str, Curve]:
    """Between all ranks: within a node, or between nodes where there are several."""
    where = "within" if mesh.ranks.local_world == mesh.world else "between"
    curves = {}
    for kind, call in _CALLS.items():
        times = [spread(_collective_times(call, size, mesh)) for size in SIZES]
        low, likely, high = (
            rising([one[at] for one in times], [1.0] * len(SIZES)) for at in range(3)
        )
        sent = [sent_bytes(kind, size, mesh.world) for size in SIZES]
        points = list(zip(sent, zip(low, likely, high, strict=True), strict=True))
        curves[f"{where} {kind}"] = Curve(((0.0, points[0][1]), *points), "measured")
    return curves


def _collective_times(call: Callable[[Tensor, Mesh], None], size: int, mesh: Mesh) -> list[float]:
    times = []
    tensor = torch.zeros(size // 4, device=mesh.device)
    for turn in range(COUNTED + 2):
        mesh.barrier()
        began = time.perf_counter()
        call(tensor, mesh)
        if mesh.device.type != "cpu":
            torch.accelerator.synchronize(mesh.device)
        if turn >= 2:
            times.append(time.perf_counter() - began)
    return times


APART_S = (0.0003, 0.002, 0.012)
"""Seconds of computing between two collectives, as tensor parallelism has them and sharding."""
MEETINGS = 30


def _waiting(mesh: Mesh, alone: Curve) -> Curve:
    """What a rank waits for others at a collective, beyond what that takes where all have just
    met: they share memory, caches and the processor's power with each other and with the threads
    of gloo, so that now one and now the other is late.
    """
    small, points = torch.zeros(1024, device=mesh.device), []
    own = alone.seconds(sent_bytes("reduce", 4 * len(small), mesh.world)).likely
    work = torch.randn(256, 256)
    product_s = statistics.median(_products(work, 1) for _ in range(MEETINGS))
    for apart in APART_S:
        count = max(1, round(apart / product_s))
        waits, computing = [], []
        for _ in range(COUNTED):
            mesh.barrier()
            computed, began = 0.0, time.perf_counter()
            for _ in range(MEETINGS):
                computed += _products(work, count)
                dist.all_reduce(small)
            took = time.perf_counter() - began
            waits.append(max(0.0, (took - computed) / MEETINGS - own))
            computing.append(computed / MEETINGS)
        points.append((statistics.median(computing), spread(waits)))
    low, likely, high = (rising([one[at] for _, one in points], [1.0] * 3) for at in range(3))
    seconds = list(zip(low, likely, high, strict=True))
    works = [at for at, _ in points]
    return Curve(((0.0, seconds[0]), *zip(works, seconds, strict=True)), "measured")


def _products(matrix: Tensor, count: int) -> float:
    """Seconds of the processor for so many products."""
    began = time.thread_time()
    for _ in range(count):
        matrix @ matrix
    return time.thread_time() - began


def _reduce(tensor: Tensor, mesh: Mesh) -> None:
    dist.all_reduce(tensor)


def _gather(tensor: Tensor, mesh: Mesh) -> None:
    part = tensor[: len(tensor) // mesh.world].clone()
    # Newer torch has a new name for it, and warns of the old one.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(tensor[: len(part) * mesh.world], part)


def _send(tensor: Tensor, mesh: Mesh) -> None:
    here, other = mesh.rank, mesh.rank ^ 1
    if other >= mesh.world:
        return
    if here < other:
        dist.send(tensor, other)
    else:
        dist.recv(tensor, other)


_CALLS: dict[str, Callable[[Tensor, Mesh], None]] = {
    "reduce": _reduce,
    "gather": _gather,
    "send": _send,
}
