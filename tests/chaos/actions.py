"""What is killed: each action with the state that it starts from, what may stand after a kill, and
what must stand in the end.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.base.environment import Ranks
from ingot.base.markers import read_marker
from ingot.base.runlog import JsonLines, Resumed, read_lines, record_event
from ingot.base.storage import sha256_file
from ingot.checkpoints.export import export_model
from ingot.checkpoints.reader import load_checkpoint
from ingot.checkpoints.state import training_tensors
from ingot.checkpoints.store import committed, newest_valid
from ingot.config.models.lineage import read_lineage
from ingot.config.models.weights import hash_model
from ingot.config.sections.training import AdamW
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.registry.local import LocalRegistry
from ingot.train.optim.optimizers import make_optimizer
from tests.chaos.saving import save_up_to
from tests.registry.models import a_model, a_report
from tests.tokenizers.small import chatty

CONFIG = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
KEEP = 2
CLOCKS = {"time", "t_wall", "t_mono", "seconds", "created", "checksum"}


@dataclass(frozen=True)
class Action:
    """One thing that a verb does to the disk. All functions are of a module, so that a fork of the
    zygote can be asked for them.
    """

    name: str
    begin: Callable[[Path], None]
    """Fills an empty folder with what an earlier run left: the old state."""
    ready: Callable[[Path], Callable[[], Any]]
    """In a process of its own: builds what is needed, and returns what does it."""
    state: Callable[[Path], str]
    """`old` or `new`, after a kill; raises AssertionError for anything else, where a reader would
    find something torn.
    """
    result: Callable[[Path], Mapping[str, Any]]
    """What must be equal in the end, whatever happened on the way: contents without clocks and
    process numbers.
    """
    lasts: bool = True
    """Whether what was done must survive a crash of the machine right after."""


def everything(folder: Path) -> dict[str, str]:
    """Checksums of all files, hidden ones too, but not the lock."""
    return {
        str(path.relative_to(folder)): sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def leftovers(folder: Path) -> list[str]:
    marks = (".partial-", ".replaced-", ".incoming-")
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if any(mark in path.name for mark in marks)
    ]


# --- a save, with an old checkpoint that goes


def training_state(seed: int) -> tuple[Masters, torch.optim.Optimizer, Mesh]:
    """A small model whose optimizer has state; all of it follows from the seed."""
    model, mesh = Decoder(DecoderConfig.from_hf(CONFIG)), Mesh(Ranks(), torch.device("cpu"))
    init_weights(model, seed)
    masters = Masters(model, mesh)
    optimizer = make_optimizer(AdamW(lr=1e-2), masters)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return masters, optimizer, mesh


def begin_save(folder: Path) -> None:
    for step in (1, 2):
        save(folder, step, asynchronous=False)()


def save(folder: Path, step: int, *, asynchronous: bool) -> Callable[[], None]:
    masters, optimizer, mesh = training_state(step)
    return lambda: save_up_to(
        folder / "checkpoints", step, masters, optimizer, mesh, KEEP, asynchronous=asynchronous
    )


def ready_save(folder: Path) -> Callable[[], None]:
    return save(folder, 3, asynchronous=False)


def ready_save_behind(folder: Path) -> Callable[[], None]:
    return save(folder, 3, asynchronous=True)


def loaded(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    found = newest_valid(folder / "checkpoints")
    assert found is not None, "no checkpoint stands any more"
    masters, optimizer, mesh = training_state(99)
    load_checkpoint(found, masters, optimizer, mesh)
    assert found.commit["samples"] == found.step
    return found.step, training_tensors(masters, optimizer)


def state_save(folder: Path) -> str:
    step, tensors = loaded(folder)
    assert step in (2, 3), f"checkpoint {step} was found"
    masters, optimizer, _ = training_state(step)
    wanted = training_tensors(masters, optimizer)
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensors[name], tensor), f"{name} of checkpoint {step} is another"
    return "old" if step == 2 else "new"


def result_save(folder: Path) -> Mapping[str, Any]:
    step, tensors = loaded(folder)
    found = committed(folder / "checkpoints")
    return {
        "tensors": {
            name: (str(tensor.dtype), tensor.numpy().tobytes()) for name, tensor in tensors.items()
        },
        "step": step,
        "kept": [item.step for item in found],
        "about": [without_clocks(item.commit) for item in found],
    }


def without_clocks(value: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: inner for key, inner in value.items() if key not in CLOCKS}
    # torch's own table of contents differs from save to save; its size and checksum are no result.
    return (
        kept | {"files": [entry["path"] for entry in value["files"]]} if "files" in value else kept
    )


# --- an export over an older model


def export(folder: Path, seed: int) -> Callable[[], Any]:
    tokenizer = chatty()
    model = Decoder(DecoderConfig.from_hf({**CONFIG, "vocab_size": tokenizer.vocab_size}))
    init_weights(model, seed)
    return lambda: export_model(
        model, tokenizer, folder / "model", export_type="bf16", lineage={"seed": seed}
    )


def begin_export(folder: Path) -> None:
    export(folder, 1)()


def ready_export(folder: Path) -> Callable[[], Any]:
    return export(folder, 2)


def state_export(folder: Path) -> str:
    model = folder / "model"
    assert model.is_dir(), "no model stands any more"
    lineage = read_lineage(model)
    assert lineage is not None, f"the model has no lineage; it holds {sorted(everything(model))}"
    assert hash_model(model) == lineage["model_hash"], "weights and lineage are of different models"
    names = {path.name for path in model.iterdir()}
    wanted = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "ingot.json",
    }
    assert names == wanted, f"the model holds {sorted(names)}"
    return {1: "old", 2: "new"}[lineage["seed"]]


def result_export(folder: Path) -> Mapping[str, Any]:
    return everything(folder)


# --- a model registered and made live


def begin_register(folder: Path) -> None:
    registry = LocalRegistry(folder / "registry.sqlite")
    registry.add("words", a_model(folder / "one", "hash1"), a_report("hash1"), {"run": "one"})
    registry.point("words", 1, "first")
    a_model(folder / "two", "hash2")
    shutil.copytree(
        registry.home / "words" / "v1", registry.home / "words" / "v2"
    )  # of a writer that died before its row was written


def ready_register(folder: Path) -> Callable[[], None]:
    registry = LocalRegistry(folder / "registry.sqlite")
    numbers = itertools.count()
    uuid.uuid4 = lambda: uuid.UUID(
        hex=f"{next(numbers):016d}{os.getpid():016d}"
    )  # known names, so that strace finds them

    def act() -> None:
        version = registry.add("words", folder / "two", a_report("hash2"), {"run": "two"})
        registry.point("words", version.number, "better")

    return act


def state_register(folder: Path) -> str:
    registry = LocalRegistry(folder / "registry.sqlite")
    versions, live = registry.versions("words"), registry.live("words")
    for version in versions:
        registry.check(version, checksums=True)
    numbers = [version.number for version in versions]
    assert numbers in ([1], [1, 2]), f"versions {numbers} are there"
    assert live is not None, "nothing is live any more"
    assert live.number in numbers
    return "new" if live.number == 2 else "old"


def result_register(folder: Path) -> Mapping[str, Any]:
    registry = LocalRegistry(folder / "registry.sqlite")
    versions = registry.versions("words")
    return {
        "versions": [
            (
                item.number,
                item.model_hash,
                item.folder.name,
                item.report,
                item.lineage,
                everything(item.folder),
            )
            for item in versions
        ],
        "turns": [(turn.version, turn.reason) for turn in registry.history("words")],
        "folders": sorted(str(path.relative_to(folder)) for path in registry.home.glob("*/*")),
        "marked": [
            without_clocks(read_marker(item.folder, "VERSION.json") or {}) for item in versions
        ],
    }


# --- lines of metrics and events, of a run that went on after step 2


def begin_lines(folder: Path) -> None:
    lines = JsonLines(folder / "metrics.jsonl")
    for step in (1, 2, 3, 4):
        lines.write(step, {"train/loss": 1 / step, "note": "für 金"})


def ready_lines(folder: Path) -> Callable[[], None]:
    def act() -> None:
        lines = JsonLines(folder / "metrics.jsonl", Resumed(2))
        for step in (3, 4, 5):
            lines.write(step, {"train/loss": 1 / step, "note": "für 金"})
            record_event(folder / "events.jsonl", "save", step=step)

    return act


def state_lines(folder: Path) -> str:
    """Always a beginning of what is to be logged, never less than what the checkpoint stands
    for.
    """
    steps = [line["step"] for line in read_lines(folder / "metrics.jsonl")]
    assert steps[:2] == [1, 2], f"steps {steps} are left"
    assert steps == [1, 2, 3, 4, 5][: len(steps)]
    return "new" if 5 in steps else "old"


def result_lines(folder: Path) -> Mapping[str, Any]:
    events = list(read_lines(folder / "events.jsonl"))
    assert [event["step"] for event in events][-3:] == [3, 4, 5]
    return {
        "metrics": [
            json.dumps(without_clocks(line)) for line in read_lines(folder / "metrics.jsonl")
        ]
    }


SAVE = Action("save", begin_save, ready_save, state_save, result_save)
SAVE_BEHIND = Action(
    "save by a thread behind training", begin_save, ready_save_behind, state_save, result_save
)
EXPORT = Action("export", begin_export, ready_export, state_export, result_export)
REGISTER = Action("register", begin_register, ready_register, state_register, result_register)
LINES = Action("lines", begin_lines, ready_lines, state_lines, result_lines, lasts=False)
