"""Small training states for the tests of checkpoints: made, saved, loaded, compared, damaged."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from ingot.base.environment import Ranks
from ingot.checkpoints import writer
from ingot.checkpoints.reader import load_checkpoint
from ingot.checkpoints.state import training_tensors
from ingot.checkpoints.store import newest_valid
from ingot.config.sections.training import SGD, AdamW
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.train.optim.optimizers import make_optimizer
from tests.saving import save_checkpoint

CONFIG = {
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ALONE = Mesh(Ranks(), torch.device("cpu"))
State = dict[str, Tensor]


def trained(seed: int, kind: str = "adamw", tied: bool = False) -> tuple[Masters, Optimizer]:
    """A model whose optimizer has state, as after a few steps; gradients are made up."""
    model = Decoder(DecoderConfig.from_hf({**CONFIG, "tie_word_embeddings": tied}))
    init_weights(model, seed)
    masters = Masters(model, ALONE)
    optimizer = make_optimizer(
        AdamW(lr=1e-2) if kind == "adamw" else SGD(kind="sgd", lr=0.1, momentum=0.9), masters
    )
    for step in range(3):
        train(masters, optimizer, seed + step)
    return masters, optimizer


def train(masters: Masters, optimizer: Optimizer, seed: int = 0) -> None:
    """One step: weights and all of the optimizer's state change, in place."""
    generator = torch.Generator().manual_seed(seed)
    for master in masters:
        master.tensor.grad = torch.randn(master.tensor.shape, generator=generator)
    optimizer.step()


def state_of(masters: Masters, optimizer: Optimizer) -> State:
    """A copy."""
    return {name: tensor.clone() for name, tensor in training_tensors(masters, optimizer).items()}


def save(folder: Path, step: int, seed: int = 0, **kinds: Any) -> State:
    with running_mesh() as mesh:
        masters, optimizer = trained(seed, **kinds)
        save_checkpoint(folder, step, masters, optimizer, {"samples": step}, mesh)
        return state_of(masters, optimizer)


def load(folder: Path, **kinds: Any) -> State:
    """The newest whole checkpoint into a fresh model with other weights and an optimizer without
    state.
    """
    with running_mesh() as mesh:
        masters, _ = trained(99, **kinds)
        optimizer = make_optimizer(
            (
                AdamW(lr=1e-2)
                if kinds.get("kind", "adamw") == "adamw"
                else SGD(kind="sgd", lr=0.1, momentum=0.9)
            ),
            masters,
        )
        found = newest_valid(folder)
        assert found is not None
        load_checkpoint(found, masters, optimizer, mesh)
        return training_tensors(masters, optimizer)


def assert_equal(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
        assert one[name].dtype == other[name].dtype


def differ(one: State, other: State) -> bool:
    return any(not torch.equal(one[name], other[name]) for name in one)


@contextlib.contextmanager
def gate() -> Iterator[threading.Event]:
    """Whatever is saved within is written only when the gate is set, as on a slow disk."""
    gate, write = threading.Event(), writer.write_tensors

    def held(*arguments: Any) -> Any:
        assert gate.wait(30), "nobody opened the gate"
        return write(*arguments)

    with mock.patch.object(writer, "write_tensors", held):
        try:
            yield gate
        finally:
            gate.set()


def flip_bit(file: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1 << bit
    file.write_bytes(content)


@contextlib.contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Path]:
    """A disk of its own that is soon full."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        assert not os.environ.get("CI"), f"CI must be able to mount a small disk: {mounted.stderr}"
        pytest.skip("mounting a small disk needs root")
    try:
        yield place
    finally:
        subprocess.run(
            ["umount", "-l", str(place)], check=True
        )  # lazily: what was raised may keep files of it open
