"""The paths in a run folder. The folder is the interface between the verbs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """`OUTPUT/NAME/`: everything that one recipe produced."""

    root: Path

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def data(self) -> Path:
        """Everything that `ingest` and `prepare` produce."""
        return self.root / "data"

    @property
    def raw(self) -> Path:
        """Ingested documents as Parquet."""
        return self.root / "data" / "raw"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that `prepare` trained or fetched, as a Hugging Face folder."""
        return self.root / "data" / "tokenizer"

    @property
    def columns(self) -> Path:
        """Prepared token columns with their `manifest.json`."""
        return self.root / "data" / "columns"

    @property
    def megatron(self) -> Path:
        """The token columns under the names that Megatron's tools expect."""
        return self.root / "data" / "megatron"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """The exported Hugging Face folder: what evaluate, register and serve use."""
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """The adapter of a LoRA run in PEFT's layout; `model` then is the base with it merged."""
        return self.root / "adapter"

    @property
    def reference(self) -> Path:
        """Log-probabilities of preferences under the reference model, beside the columns."""
        return self.root / "data" / "reference"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    @property
    def steps(self) -> Path:
        """One JSON record per finished step, by which `run` knows what is unchanged."""
        return self.reports / "steps"

    @property
    def plan(self) -> Path:
        """What `ingot plan --keep` said before, to be held against what came."""
        return self.reports / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def heartbeats(self) -> Path:
        """One small file per node with its ranks' heartbeats."""
        return self.root / "heartbeats"

    @property
    def logs(self) -> Path:
        return self.root / "logs"


def model_folder(folder: Path) -> Path:
    """The folder itself or, for a run folder, the model that the run exported, so that
    `model.source=runs/pre` continues from the run `pre`.
    """
    own = RunFolder(folder).model
    is_run = not (folder / "config.json").exists() and (own / "config.json").exists()
    return own if is_run else folder
