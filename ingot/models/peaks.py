"""What vendors say that GPUs compute at most, by the names that they give them."""

from __future__ import annotations

import re

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
