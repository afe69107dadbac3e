"""The recipe: all sections in one frozen object."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, model_validator

from ingot.base.runfolder import RunFolder
from ingot.base.storage import is_remote
from ingot.config.section import FileName, Section
from ingot.config.sections.checkpoint import Checkpoint, Resume, Track
from ingot.config.sections.data import Data, Pack, truncations
from ingot.config.sections.deployment import (
    Chaos,
    Cloud,
    Gate,
    MetricGate,
    PipelineSettings,
    RegistrySettings,
    Serve,
    StepPlace,
)
from ingot.config.sections.evaluation import Evaluate, Task
from ingot.config.sections.launch import Launch
from ingot.config.sections.layout import MemorySettings, Parallel, Precision
from ingot.config.sections.measured import check_prompts, check_tracked, default_tasks
from ingot.config.sections.objective import CHAT_TEMPLATED, Documents, Objective, PretrainSettings
from ingot.config.sections.training import ModelSettings, TokenizerSettings, Train

PACKS: dict[Documents, tuple[Pack, ...]] = {
    "text": ("cut", "best_fit", "none"),
    "chat": ("best_fit", "none"),
    "preference": ("none",),
    "rated": ("none",),
    "pair": ("none",),
    "labelled": ("none",),
    "masked": ("none", "best_fit"),
}
"""How each kind of document may become rows; the first is what `auto` means."""
MADE_ANEW = ("gce", "vertex")
"""Places that create machines for each step, billed by machine and hour."""

NO_SOURCE = "data.train has no source; add one, such as `data: {train: [{source: texts.jsonl}]}`"


class Recipe(Section):
    """What `ingot VERB recipe.yaml` reads."""

    name: FileName
    """Name of the run; its folder is OUTPUT/NAME."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds initial weights, data order and sampling."""
    output: str = "runs"
    """Folder that run folders are made in."""
    model: ModelSettings = ModelSettings()
    """Which model is trained, and what it starts from."""
    tokenizer: TokenizerSettings = TokenizerSettings()
    """How text becomes ids."""
    data: Data
    """Documents in, rows of tokens out."""
    objective: Objective = PretrainSettings()
    """The way of training."""
    train: Train = Train()
    """The loop: how long, how large a batch, which optimizer."""
    parallel: Parallel = Parallel()
    """Degrees of the device mesh."""
    memory: MemorySettings = MemorySettings()
    """Ways to make a model fit."""
    precision: Precision = Precision()
    """Number formats."""
    checkpoint: Checkpoint = Checkpoint()
    """What is kept so that nothing is lost."""
    resume: Resume = Resume()
    """What may differ from the training that is gone on with."""
    evaluate: Evaluate = Evaluate()
    """How good the model is."""
    track: Track = Track()
    """Where metrics go."""
    gate: Gate = MetricGate()
    """Whether a new model replaces the live one."""
    registry: RegistrySettings = RegistrySettings()
    """Where model versions are kept."""
    serve: Serve = Serve()
    """The HTTP server."""
    launch: Launch = Launch()
    """Where verbs run."""
    cloud: Cloud = Cloud()
    """Google Cloud."""
    pipeline: PipelineSettings = PipelineSettings()
    """The steps as a pipeline of the managed service."""
    chaos: Chaos = Chaos()
    """Failures on purpose."""

    @model_validator(mode="before")
    @classmethod
    def _no_documents(cls, given: Any) -> Any:
        """Without `data`, a recipe that evaluates a model or tasks gets empty sources: tasks may
        have items of their own.
        """
        asked = given.get("evaluate") if isinstance(given, dict) else None
        measures = isinstance(asked, dict) and (asked.get("tasks") or asked.get("model"))
        if measures and "data" not in given:
            return given | {"data": {"train": [], "validation": []}}
        return given

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Recipe:
        if is_remote(self.output):
            raise ValueError(
                f"output {self.output} is not a local folder, and this version keeps runs on a"
                " disk; give a path"
            )
        for knob, path in (("output", self.output), ("registry.path", self.registry.path)):
            if path and path.startswith("~"):
                raise ValueError(f"{knob} {path} would be a folder called ~; write the whole path")
        if not self.data.train and not (self.evaluate.tasks or self.evaluate.model):
            raise ValueError(NO_SOURCE)
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(
                f"evaluate.tasks: two tasks share a name among {names}; give each its own `name`"
            )
        if unknown := [name for name in self.train.evaluate_tasks if name not in names]:
            raise ValueError(
                f"train.evaluate_tasks: {unknown[0]} is not among evaluate.tasks"
                f" ({', '.join(names)}); give its name there"
            )
        check_tracked(self.train, self.checkpoint, self.objective, self.tasks)
        check_prompts(self.objective, self.train, self.evaluate)
        if "vocab_size" in self.tokenizer.model_fields_set and not self.trains_tokenizer:
            raise ValueError(
                "tokenizer.vocab_size is for `tokenizer.source: train`; remove it, or train a"
                " tokenizer"
            )
        if self.data.pack not in ("auto", *self._packs):
            raise ValueError(
                f"data.pack {self.data.pack} is not for objective.kind {self.objective.kind}; set"
                f" it to {' or '.join(self._packs)}"
            )
        if self.data.truncate not in truncations(self.documents):
            raise ValueError(
                f"data.truncate {self.data.truncate} is not for objective.kind"
                f" {self.objective.kind}; set it to {' or '.join(truncations(self.documents))}"
            )
        if self.data.megatron_prefix is not None and self.documents != "text":
            raise ValueError(
                f"data.megatron_prefix {self.data.megatron_prefix} is for texts, which Megatron's"
                f" tools read; remove it for objective.kind {self.objective.kind}"
            )
        self.check_parallel()
        self._check_update()
        self.objective.check_recipe(self)
        return self

    def _check_update(self) -> None:
        """Refuse optimizers and averages that do not fit what is trained and kept."""
        average = self.train.average
        if average is not None and average.kind == "last":
            if self.checkpoint.keep < average.checkpoints:
                raise ValueError(
                    f"train.average needs the newest {average.checkpoints} checkpoints, and"
                    f" checkpoint.keep keeps {self.checkpoint.keep}; raise checkpoint.keep"
                )
            if self.checkpoint.best is not None:
                raise ValueError(
                    "train.average.kind last exports the mean of the newest checkpoints, and"
                    " checkpoint.best another one; remove one of them, or set kind to ema"
                )

    def check_parallel(self) -> None:
        """Raises ValueError for a mesh that is impossible whatever the model's sizes."""
        parallel = self.parallel
        self.model.check_recipe(self)
        beyond = {
            name: getattr(parallel, name)
            for name in ("tensor", "pipeline", "context", "expert")
            if getattr(parallel, name) > 1
        }
        shared = ", ".join(f"parallel.{name}={degree}" for name, degree in beyond.items())
        if beyond and not self.objective.native:
            raise ValueError(
                f"{shared}: the models of objective.kind {self.objective.kind} are shared by"
                " replicate and shard only; set parallel.shard instead"
            )
        if parallel.pipeline > 1 and not self.objective.pipeline_parallel:
            raise ValueError(
                f"parallel.pipeline: the loss of objective.kind {self.objective.kind} needs all of"
                " a row at once and cannot be staged; use shard or tensor instead"
            )
        whole_rows = ("sample_every", "evaluate_tasks")
        odd = next((f"train.{knob}" for knob in whole_rows if getattr(self.train, knob)), None)
        if odd and parallel.pipeline > 1:
            raise ValueError(
                f"{odd} is not possible with parallel.pipeline, whose ranks hold a part of the"
                " model each; remove it and use `ingot evaluate`"
            )
        if odd and parallel.context > 1:
            raise ValueError(
                f"{odd} is not possible with parallel.context, whose ranks hold a part of each row;"
                " remove it and use `ingot evaluate`"
            )
        if odd and parallel.tensor > 1 and parallel.sequence:
            raise ValueError(
                f"{odd} reads rows of any length, which parallel.sequence cannot cut evenly; set"
                " parallel.sequence to false, or remove it"
            )
        if self.memory.offload.weights and (parallel.degrees, parallel.shard) == ("given", 1):
            raise ValueError(
                "memory.offload.weights is done by sharding; set parallel.shard above 1, or"
                " memory.offload.optimizer instead"
            )
        if self.precision.float8 != "none" and not self.objective.native:
            raise ValueError(
                "precision.float8 is for decoders, not for the models of objective.kind"
                f" {self.objective.kind}; set it to none"
            )

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.output) / self.name)

    @property
    def trains_tokenizer(self) -> bool:
        """Whether `prepare` trains a tokenizer rather than loading one."""
        if self.tokenizer.source is None:
            return self.model.source.startswith("preset:")
        return self.tokenizer.source == "train"

    @property
    def documents(self) -> Documents:
        """The kind of document for training."""
        return self.objective.training_documents

    @property
    def labels(self) -> list[str]:
        """The class names of a classifier; empty for other models."""
        return self.objective.class_names

    @property
    def first_prompt(self) -> str:
        """What the served model is asked first."""
        suits = "What can you do?" if self.documents in CHAT_TEMPLATED else "The"
        if self.documents in ("pair", "labelled"):
            suits = "The council met on Monday and decided to repair the old bridge."
        if self.documents == "masked":
            hidden = "[MASK]" if self.objective.spans is None else "<extra_id_0>"
            suits = f"The council met on {hidden} and decided to repair the old bridge."
        chosen = (self.serve.prompt, *self.evaluate.prompts, suits)
        return next(prompt for prompt in chosen if prompt is not None)

    @property
    def sources(self) -> list[str]:
        """The sources that `ingest` reads."""
        held_out = self.data.validation
        return [
            source.source
            for source in (*self.data.train, *(held_out if isinstance(held_out, list) else ()))
        ]

    @property
    def tasks(self) -> list[Task]:
        """The evaluations: `evaluate.tasks`, or the defaults if it is empty."""
        defaults = default_tasks(self.objective) if self.data.holds_out else []
        return [task.resolved(self.objective) for task in self.evaluate.tasks or defaults]

    def missing_held_out(self, verb: str) -> list[tuple[str, str]]:
        """The uses of held-out documents by `verb` when none are held out: a message and its knob
        for each.
        """
        if self.data.holds_out:
            return []
        needs = "needs held-out documents, and data.validation holds none out; hold some out"
        train, stop = self.train, self.train.early_stop
        knobs: list[tuple[str, bool]] = []
        if verb == "prepare":
            clean = self.data.clean
            knobs = [("data.clean.contamination", bool(clean.contamination and not clean.against))]
        elif verb == "train":
            alone = train.evaluate_every is not None and not train.evaluate_tasks
            knobs = [
                ("train.early_stop", stop is not None and stop.metric == "loss"),
                ("checkpoint.best", self.checkpoint.best == "loss"),
                ("train.evaluate_every", alone),
            ]
        found = [(f"{knob} {needs}, or remove it", knob) for knob, used in knobs if used]
        measured = {"evaluate": [task.name for task in self.tasks], "train": train.evaluate_tasks}
        for number, task in enumerate(self.tasks):
            if task.needs_held_out and task.name in measured.get(verb, ()):
                message = f"evaluate.tasks, {task.name}: {task.kind} {needs}, or remove the task"
                found.append((message, f"evaluate.tasks.{number}"))
        if verb == "evaluate" and not self.tasks:
            message = f"evaluate.tasks is empty, and the loss {needs}, or give tasks with items"
            found.append((f"{message} of their own, such as hellaswag", "evaluate.tasks"))
        return found

    @property
    def pack(self) -> Pack:
        """How documents become rows: `data.pack` with `auto` resolved."""
        return self._packs[0] if self.data.pack == "auto" else self.data.pack

    @property
    def _packs(self) -> tuple[Pack, ...]:
        alone = self.objective.samples_answers or self.objective.spans
        return ("none",) if alone else PACKS[self.documents]

    @property
    def row_plan(self) -> str:
        """What tables of rows are named after: `pack`, and what else decides about them."""
        if (spans := self.objective.spans) is not None:
            return f"{self.pack}-{spans.plan}"
        return self.pack + ("" if self.data.truncate == "right" else f"-{self.data.truncate}")

    @property
    def target_len(self) -> int:
        """Tokens of a target: `data.target_len`, or what hidden spans of `data.seq_len` lead to."""
        spans = self.objective.spans
        return self.data.target_len if spans is None else spans.target_len(self.data.seq_len)

    @property
    def held_out_row_plan(self) -> str:
        """The same of held-out documents, of which each token is measured once and apart."""
        fixed = {"text": "cut", "masked": self.row_plan.replace("best_fit", "none")}
        return fixed.get(self.documents, self.row_plan)

    def at(self, verb: str) -> Recipe:
        """The recipe with `launch` overridden by `pipeline.steps` for one step."""
        places = {str(name): place for name, place in self.pipeline.steps.items()}
        place = places.get(verb, StepPlace())
        # A step placed at `local` leaves the machines of `launch` to the other steps. Each rank of
        # an evaluation holds the whole model and needs no other rank, so machines created for it
        # are one node.
        one = place.launch == "local" or (
            verb == "evaluate" and (place.launch or self.launch.kind) in MADE_ANEW
        )
        given = {
            "kind": place.launch,
            "image": place.image,
            "machine": place.machine,
            "nodes": place.nodes or (1 if one else None),
            "processes": place.processes,
        }
        return self.model_copy(
            update={
                "launch": self.launch.model_copy(
                    update={knob: value for knob, value in given.items() if value is not None}
                )
            }
        )

    @property
    def registry_name(self) -> str:
        return self.registry.name or self.name

    @property
    def registry_path(self) -> Path:
        given = self.registry.path
        return Path(given) if given else Path(self.output) / "registry.sqlite"

    def select(self, prefixes: tuple[str, ...]) -> dict[str, Any]:
        """The knobs under dotted `prefixes` with their values: `select(("seed",
        "train.optimizer"))`.
        """
        values = self.model_dump(mode="json")
        chosen: dict[str, Any] = {}
        for prefix in prefixes:
            value: Any = values
            for part in prefix.split("."):
                value = value[part]
            chosen[prefix] = value
        return chosen
