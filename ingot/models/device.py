"""The only file that knows which device this is: nothing else asks for CUDA."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist

from ingot.base.environment import processor_name, threads_asked_for, usable_cores
from ingot.base.errors import WrongInput
from ingot.models.nvidia import stated_peak, usage_of

Compute = Literal["fp32", "bf16"]

_planned: str | None = None
"""The device type that is planned for. A plain global, since compiled code reads it."""


@contextlib.contextmanager
def planning_for(kind: str) -> Iterator[None]:
    """Inside the block tensors have no contents, and kernels are chosen as on a device of type
    `kind`.
    """
    global _planned
    before, _planned = _planned, kind
    try:
        yield
    finally:
        _planned = before


def is_planned() -> bool:
    """Whether tensors have no contents now, so that nothing may depend on them."""
    return _planned is not None


def kernel_type(device: torch.device) -> str:
    """The device type whose kernels are used: the device's own, or that for which is planned."""
    return _planned or device.type


# What torch copies to MPS without waiting it may read when its memory is someone else's already.
UNUSED = {"mps": "Apple's GPU is not used, on which torch has no float64 and no collectives"}
"""Types of accelerator that torch offers and nothing is computed on, and what is said of each."""


def accelerator() -> str | None:
    """The type of this machine's accelerators; None if there is none that is computed on."""
    kind = _offered()
    return None if kind in UNUSED else kind


def unused_accelerator() -> str | None:
    """What is said where this machine has an accelerator that is not computed on."""
    return UNUSED.get(_offered() or "")


def _offered() -> str | None:
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    return None if kind is None else kind.type


def accelerator_count() -> int:
    """How many of them this machine has."""
    return torch.accelerator.device_count() if accelerator() else 0


def pick_device(local_rank: int = 0) -> torch.device:
    """This rank's accelerator, or the CPU if there is none."""
    if kind := accelerator():
        torch.accelerator.set_device_index(local_rank % accelerator_count())
        return torch.device(kind, torch.accelerator.current_device_index())
    return torch.device("cpu")


def resolve_compute(asked: Literal["auto", "fp32", "bf16"], device: torch.device) -> Compute:
    """What `precision.compute: auto` means on this device."""
    if asked != "auto":
        return asked
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "fp32" if device.type == "cpu" else "bf16"


def fast_compute(asked: Literal["auto", "fp32", "bf16"], device: torch.device) -> Compute:
    """What `auto` means where bf16 is precise enough: bf16 if the device is fast in it."""
    if asked != "auto":
        return asked
    kind = kernel_type(device)
    if kind != "cpu":
        # A device for which is planned is not here to be asked.
        return "bf16" if kind != device.type else resolve_compute("auto", device)
    return "bf16" if has_bf16_instructions() else "fp32"


def has_bf16_instructions() -> bool:
    """Whether this processor is known to have instructions for products of bf16 numbers (AVX-512
    BF16, AMX).
    """
    can = torch.cpu.get_capabilities()
    return bool(can.get("avx512_bf16") or can.get("amx_bf16"))


def is_slow_in_bf16(device: torch.device) -> bool:
    """Whether products in bf16 are many times slower on this device than in float32, up to ninety
    times: x86 processors without instructions for them. Of others nothing is known.
    """
    return (
        device.type == "cpu"
        and torch.cpu.get_capabilities().get("architecture") == "x86_64"
        and not has_bf16_instructions()
    )


def is_fast_in_bf16(device: torch.device) -> bool:
    """Whether products in bf16 take a fraction of float32's time on this CPU: it multiplies blocks
    (AMX).
    """
    return device.type == "cpu" and bool(torch.cpu.get_capabilities().get("amx_bf16"))


@contextlib.contextmanager
def computing_in(
    compute: Compute, device: torch.device, *, keeps_casts: bool = True
) -> Iterator[None]:
    """Matrix products in `compute`; weights, norms, softmax and losses stay float32. `keeps_casts`:
    a float32 weight is cast once within the block, and its copy kept until the end.
    """
    if compute == "fp32":
        yield
    elif compute == "bf16":
        with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=keeps_casts):
            yield
    else:
        raise ValueError(f"precision.compute {compute!r} is not fp32 or bf16")


def peak_flops(device: torch.device, compute: Compute) -> float | None:
    """The vendor's figure for bf16 matrix products in FLOP/s; None if unknown, in which case no
    share of peak is reported.
    """
    if device.type != "cuda" or compute != "bf16":
        return None
    return stated_peak(torch.cuda.get_device_name(device))


PEAK_SIZE = {"cpu": 1024}
"""Rows and columns of the matrices of `measured_peak`; 8,192 on other types of device."""
LONG_S = 0.5
"""So long a product is not repeated: what disturbs it weighs little."""


def measured_peak(device: torch.device, compute: Compute) -> float:
    """FLOP/s of one large matrix product measured now, the best of three, or one alone that takes
    long, as in a format that the processor has no instructions for; for devices without a vendor's
    figure.
    """
    size = PEAK_SIZE.get(device.type, 8192)
    dtype = torch.bfloat16 if compute == "bf16" else torch.float32
    # Random as real data: constant numbers take less power, and a GPU clocks higher on them. Drawn
    # on the host, which every device has, without moving torch's generators.
    side = min(size, 1024)
    tile = torch.randn(2, side, side, generator=torch.Generator().manual_seed(0))
    a, b = tile.to(device, dtype).repeat(1, size // side, size // side)
    best = math.inf
    for _ in range(3):
        started = time.perf_counter()
        a @ b
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - started)
        if best > LONG_S:
            break
    return 2 * size**3 / best


class MeasuredPeak:
    """The best `measured_peak` so far, since a machine that is shared is slow now and then, and
    never less than the training itself has reached. It is measured again only when that would take
    at most a hundredth of the time since the last one.
    """

    def __init__(self, device: torch.device, compute: Compute) -> None:
        self._device, self._compute = device, compute
        self._best, self._again_at = 0.0, -math.inf

    def flops(self, reached: float) -> float:
        """FLOP/s. `reached`: those of the steps before."""
        started = time.perf_counter()
        if started >= self._again_at:
            self._best = max(self._best, measured_peak(self._device, self._compute))
            ended = time.perf_counter()
            self._again_at = ended + 100 * (ended - started)
        self._best = max(self._best, reached)
        return self._best


def backend(device: torch.device) -> str:
    """The process group backend: an accelerator's own for its tensors, and gloo for the few numbers
    on which the hosts agree.
    """
    return (
        "gloo"
        if device.type == "cpu"
        else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    )


def has_float8(device: torch.device) -> bool:
    """Whether the device has float8 matrix products: Ada, Hopper and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def prefers_cudnn_attention(device: torch.device) -> bool:
    """Whether torch takes cuDNN's attention before its own kernels on this device (NVIDIA's from
    Hopper on).
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


class _KernelsForAnyLength(contextlib.ContextDecorator):
    """Inside the block, or the decorated function, attention is not cuDNN's, which makes a plan for
    each new shape first: on an H200 some 50 ms for each length that a text happens to have.

    The switch is torch's, for all threads: those that are inside at once share it.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


kernels_for_any_length = _KernelsForAnyLength()


def adds_in_any_order() -> bool:
    """Whether this machine trains on a device some of whose kernels add up in another order each
    time, unless `deterministic_kernels` are asked for.
    """
    return torch.cuda.is_available()


@contextlib.contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Inside the block a GPU adds up in a fixed order, so that the same inputs give the same bits:
    attention, for one, is that of `make_flex_attn_fns`. A CPU does so anyway.

    Raises:
        WrongInput: there is no such kernel for something that is computed.
    """
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product
    filling: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False  # for those who read what they have not written
    try:
        yield
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        name = str(error).split(" ", 1)[0]
        raise WrongInput(
            f"train.deterministic: {name} has no kernel for GPUs that adds up in a fixed order; set"
            " train.deterministic=false"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        filling.fill_uninitialized_memory = before[1]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type


def device_record(device: torch.device) -> dict[str, str | int]:
    """What a run's events say of a rank's device: its type, its name, threads of a CPU."""
    if device.type == "cpu":
        return {"type": "cpu", "name": processor_name(), "threads": torch.get_num_threads()}
    return {"type": device.type, "name": device_name(device), "threads": 0}


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process in bytes: on the device, or of the process itself on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * (1 if sys.platform == "darwin" else 1024)


def gpu_usage(device: torch.device) -> dict[str, float]:
    """`util` and `memory` (shares of 1) of this rank's GPU, as far as NVML knows them; empty
    without a GPU.
    """
    if device.type != "cuda":
        return {}
    return usage_of(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def use_all_cores(local_world: int) -> None:
    """Divide the cores among the processes of this machine, unless OMP_NUM_THREADS does."""
    if threads_asked_for() is None:
        cores = usable_cores()
        torch.set_num_threads(max(1, cores // local_world))


def graph_recorder(device: torch.device) -> GraphRecorder | None:
    """What records work on this device; None where that is not possible."""
    return GraphRecorder() if device.type == "cuda" and torch.version.hip is None else None


class GraphRecorder:
    """Records what some work launches on this CUDA device, so that a call launches all of it at
    once (a CUDA graph), which a GPU finishes sooner than Python launches it kernel by kernel.

    What is recorded shares memory: the result of one call is to be used before any other call. The
    work must have run before, so that its kernels are loaded; it computes on the same tensors each
    time, and must not wait for the device.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Memory that recordings share. It can be shared no more once none of them is left."""
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None

    def __call__(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        # A recording that fails leaves its own stream as the current one.
        with torch.cuda.stream(torch.cuda.current_stream()):
            try:
                if self._first is None:
                    self._first, _ = _recorded(_one_number, self._pool)
                graph, result = _recorded(work, self._pool)
            except RuntimeError:
                self._clean_up()
                raise

        def play() -> torch.Tensor:
            graph.replay()
            return result

        return play

    def _clean_up(self) -> None:
        """After a recording that failed: memory would be taken for it, and random numbers of the
        device be put off to its end, for ever.
        """
        with contextlib.suppress(RuntimeError, AttributeError):
            ended: Any = torch._C._cuda_endAllocateToPool
            ended(torch.cuda.current_device(), self._pool)
        self._begin()
        with contextlib.suppress(RuntimeError):
            _recorded(_one_number, torch.cuda.graph_pool_handle())


def _recorded(
    work: Callable[[], torch.Tensor], pool: Any
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate and ask the device meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = work()
    return graph, result


def _one_number() -> torch.Tensor:
    return torch.zeros(1, device="cuda")
