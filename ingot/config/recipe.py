"""The recipe: all sections in one frozen object."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, model_validator

from ingot.base.runfolder import RunFolder
from ingot.base.storage import is_remote
from ingot.config.data import Data, Pack
from ingot.config.place import Gate, Launch, Registry, Serve
from ingot.config.section import Section
from ingot.config.work import Checkpoint, Evaluate, Model, Objective, Parallel, Precision, Pretrain, Tokenizer, Track, Train


class Recipe(Section):
    """What `ingot VERB recipe.yaml` reads."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Name of the run; its folder is OUTPUT/NAME."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds initial weights, data order and sampling."""
    output: str = "runs"
    """Folder that run folders are made in."""
    model: Model = Model()
    """Which model is trained, and what it starts from."""
    tokenizer: Tokenizer = Tokenizer()
    """How text becomes ids."""
    data: Data
    """Documents in, rows of tokens out."""
    objective: Objective = Pretrain()
    """The way of training."""
    train: Train = Train()
    """The loop: how long, how large a batch, which optimizer."""
    parallel: Parallel = Parallel()
    """Degrees of the device mesh."""
    precision: Precision = Precision()
    """Number formats."""
    checkpoint: Checkpoint = Checkpoint()
    """What is kept so that nothing is lost."""
    evaluate: Evaluate = Evaluate()
    """How good the model is."""
    track: Track = Track()
    """Where metrics go."""
    gate: Gate = Gate()
    """Whether a new model replaces the live one."""
    registry: Registry = Registry()
    """Where model versions are kept."""
    serve: Serve = Serve()
    """The HTTP server."""
    launch: Launch = Launch()
    """Where verbs run."""

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Recipe:
        if is_remote(self.output):
            raise ValueError(f"output {self.output} is not a local folder, and this version keeps runs on a disk; give a path")
        names = [task.name for task in self.evaluate.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"evaluate.tasks: two tasks share a name among {names}; give each its own `name`")
        if "vocab_size" in self.tokenizer.model_fields_set and not self.trains_tokenizer:
            raise ValueError("tokenizer.vocab_size is for `tokenizer.source: train`; remove it, or train a tokenizer")
        if self.objective.kind != "pretrain" and self.data.pack == "cut":
            raise ValueError("data.pack cut would cut chats apart; set it to best_fit or none")
        return self

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.output) / self.name)

    @property
    def trains_tokenizer(self) -> bool:
        """True when `prepare` learns a vocabulary rather than taking one."""
        if self.tokenizer.source is None:
            return self.model.source.startswith("preset:")
        return self.tokenizer.source == "train"

    @property
    def pack(self) -> Pack:
        """How documents become rows: `data.pack` with `auto` resolved."""
        if self.data.pack != "auto":
            return self.data.pack
        return "cut" if self.objective.kind == "pretrain" else "best_fit"

    @property
    def pack_held_out(self) -> Pack:
        """How held-out documents become rows: for pretraining always the stream cut, so that each token is measured once."""
        return "cut" if self.objective.kind == "pretrain" else self.pack

    @property
    def registry_name(self) -> str:
        return self.registry.name or self.name

    @property
    def registry_path(self) -> Path:
        return Path(self.registry.path) if self.registry.path else Path(self.output) / "registry.sqlite"

    def select(self, prefixes: tuple[str, ...]) -> dict[str, Any]:
        """The knobs under dotted `prefixes` with their values: `select(("seed", "train.optimizer"))`."""
        values = self.model_dump(mode="json")
        chosen: dict[str, Any] = {}
        for prefix in prefixes:
            value: Any = values
            for part in prefix.split("."):
                value = value[part]
            chosen[prefix] = value
        return chosen
