"""What the answers of a served model are computed in."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Literal

import torch

from ingot.config.models.family import is_native
from ingot.config.models.source import model_config
from ingot.models.adapters.peft_config import is_adapter
from ingot.models.device import Compute, resolve_compute
from ingot.models.hf.folder import holds_bf16, stored_shapes
from ingot.models.native.onednn import multiplies_bfloat16

ONE_THREAD_WEIGHTS = 20_000_000
"""Matrix products of models with fewer weights finish before a second thread wakes up; on a shared
machine, waiting for that thread takes many times longer than the product.
"""


class OneThread:
    """While entered, torch computes with one thread; afterwards with as many as before, in every
    thread that was inside: the process has other work than answers.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, 1

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.get_num_threads()
            self._inside += 1
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            torch.set_num_threads(self._before)


ONE_THREAD = OneThread()
"""One for all models of a process, as the number is."""


def serving_compute(
    asked: Compute | Literal["auto"], folder: Path, device: torch.device, *, pack: bool
) -> Compute:
    """What the answers of the model in `folder` are computed in on this device; `asked` and `pack`
    as in `serve.compute` and `serve.pack`.
    """
    if asked != "auto" or device.type != "cpu":
        return resolve_compute(asked, device)
    sooner = (
        pack
        and not is_adapter(folder)
        and is_native(model_config(folder).get("model_type"))
        and sum(map(math.prod, stored_shapes(folder).values())) >= ONE_THREAD_WEIGHTS
        and holds_bf16(folder)
        and multiplies_bfloat16()
    )
    return "bf16" if sooner else "fp32"
