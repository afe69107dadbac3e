"""What the answers of a served model are computed in."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


_SETTING = threading.Lock()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """While entered, torch computes with one thread for the thread that entered, and as before for
    all others: the process has other work than answers.
    """
    with _SETTING:  # a thread that has not computed yet would begin with what is set for another
        before = torch.get_num_threads()
    if before == 1:
        yield
        return
    try:
        _set_own_threads(1)
        yield
    finally:
        _set_own_threads(before)


def _set_own_threads(count: int) -> None:
    """How many threads torch computes with for this thread alone. torch's own function also sets
    what every thread begins with that computes for the first time, and keeps. A thread that has
    not computed knows what that was, and sets it again: at once, and not after an answer.
    """
    with _SETTING, ThreadPoolExecutor(1) as fresh:
        beginning = fresh.submit(torch.get_num_threads).result()
        torch.set_num_threads(count)
        fresh.submit(torch.set_num_threads, beginning).result()


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
