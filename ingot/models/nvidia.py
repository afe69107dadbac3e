"""What NVIDIA says of its GPUs: by their names what they compute at most, and by NVML, its library
for watching them, what they are doing.

NVML knows all of a GPU, a part, or nothing, as where the library is missing. Whoever asks does
without, and is told once what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator

from ingot.base.environment import ranks
from ingot.base.lazy import lazy_import
from ingot.base.progress import say

pynvml = lazy_import("pynvml")

_PEAKS = {
    "A100": 312e12,
    "A10G": 70e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
}
"""Dense bf16 matrix products in FLOP/s, by the words of a name that tell it from others."""


def stated_peak(name: str) -> float | None:
    """FLOP/s of bf16 matrix products on a GPU of this name; None if unknown, as for a part of a GPU
    (MIG), whose name is that of the whole and more.
    """
    words = set(re.split(r"[\s-]+", name))
    fitting = [known for known in _PEAKS if words.issuperset(known.split())]
    return None if "MIG" in words or not fitting else _PEAKS[max(fitting, key=len)]


def usage_of(name: str) -> dict[str, float]:
    """`util` and `memory` (shares of 1) of the GPU of this name, those that are known. A part of a
    GPU (MIG) has another name than its whole.
    """
    found: dict[str, float] = {}
    with _as_far_as_known("the GPU"):
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            with _as_far_as_known("how busy the GPU is"):
                found["util"] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            with _as_far_as_known("the GPU's memory"):
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                found["memory"] = float(memory.used) / float(memory.total)
        finally:
            pynvml.nvmlShutdown()
    return found


@contextlib.contextmanager
def _as_far_as_known(what: str) -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as error:
        _tell_missing(what, str(error))


@functools.cache
def _tell_missing(what: str, reason: str) -> None:
    if ranks().local_rank == 0:
        say(f"NVML tells nothing of {what} ({reason}); metrics are without it")
