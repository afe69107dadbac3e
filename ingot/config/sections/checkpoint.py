"""The knobs that say what is kept of a training: checkpoints, what may differ when it is resumed,
and where metrics go.
"""

# ruff: noqa: RUF012 (pydantic copies a mutable default for each section)

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ingot.config.section import Positive, Section
from ingot.config.sections.loop import Every


class Checkpoint(Section):
    """What is kept so that nothing is lost."""

    every: Every = 500
    """Steps between checkpoints; `epoch`: one after each pass over the training rows; `30m` (or
    `90s`, `2h`): one after so much time. One more is always made at the end and when a signal stops
    the run.
    """
    keep: Positive = 2
    """How many of the newest checkpoints are kept. The newest complete one is never deleted."""
    best: str | None = None
    """Metric whose best checkpoint is kept beside the newest and exported in the end: `loss`, or
    one of `train.evaluate_tasks`, such as `rouge/rougeL`. One is saved at each evaluation that is
    the best so far; evaluations before a change of what is measured do not count. Empty exports
    the last one.
    """
    asynchronous: bool = True
    """Write checkpoints while training goes on, from a copy of the state in the host's memory (12
    bytes a trained parameter with Adam). The last one is written from the state itself, without a
    copy. If false, training waits for the disk each time.
    """
    upload: Annotated[str, Field(pattern=r"^gs://[^/]+/.+")] | None = None
    """`gs://BUCKET/FOLDER` that each checkpoint is copied to once it is committed here, and fetched
    from where this machine has none.
    """
    grace_s: Positive = 300
    """Seconds that a signal to stop gives for the step at hand and its checkpoint; a process that
    is not done then is ended.
    """
    notice: str | None = None
    """What says that this machine will be taken away, which stops training as a signal does: `gce`
    asks the metadata server, anything else is the path of a file that appears.
    """


Changeable = Literal[
    "train.steps",
    "train.epochs",
    "train.tokens",
    "train.optimizer",
    "train.schedule",
    "train.clip_norm",
    "train.skip",
    "train.early_stop",
    "train.average",
    "objective.rewards",
    "package",
]


class Resume(Section):
    """What may differ from the training that is gone on with."""

    allow: list[Changeable] = []
    """Knobs whose change is meant, such as `train.steps` or `train.optimizer`; `objective.rewards`
    where a file or a model that a reward names is another one; `package` where a package of yours
    that brings an objective, an optimizer or a schedule has another version or other code. Any
    other change refuses to go on. Of a training that is over they are meant for further steps, as
    more `train.steps` make them; where none is left, another learning rate is another training.
    """


class WandB(Section):
    """Weights & Biases."""

    project: str = "ingot"
    """Project that the run appears in."""
    entity: str | None = None
    """User or team that the project belongs to; your default one when empty."""
    name: str | None = None
    """Name of the run there; empty: the recipe's."""
    tags: list[str] = []
    """Tags of the run."""
    id: Annotated[str, Field(pattern=r"^[\w-]{1,64}$")] | None = None
    """Id of the run there, to go on in one that exists. Empty: one is made, and every restart of
    this training goes on in it.
    """


class MLflowRun(Section):
    """A run of MLflow. Every restart of this training goes on in it; steps that were logged there
    before a crash stay as they are.
    """

    uri: str | None = None
    """Server (`https://...`), `sqlite:///FILE` or `file:FOLDER`; empty: `MLFLOW_TRACKING_URI`, else
    MLflow's own default.
    """
    experiment: str = "ingot"
    """Experiment that the run appears in; made if it is not there."""
    name: str | None = None
    """Name of the run there; empty: the recipe's."""
    tags: dict[str, str] = {}
    """Tags of the run."""


class TrackioRun(Section):
    """A run of Trackio. Every restart of this training goes on in it; steps that were logged there
    before a crash stay as they are.
    """

    project: str = "ingot"
    """Project that the run appears in."""
    space: str | None = None
    """Space of the hub (`ORG/NAME`) that metrics are sent to; empty: kept on this machine, in
    `TRACKIO_DIR`.
    """
    group: str | None = None
    """Group of runs that it belongs to."""
    name: str | None = None
    """Name of the run there, before eight letters that tell trainings apart; empty: the recipe's.
    """
    tags: list[str] = []
    """Tags of the run, in its configuration, since Trackio has none."""


class Track(Section):
    """Where metrics go beside `metrics.jsonl`, which is always written."""

    every: Positive = 10
    """Steps between logged lines."""
    tensorboard: bool = True
    """Write event files to `tensorboard/` in the run folder."""
    wandb: WandB | None = None
    """Log to Weights & Biases from rank 0; needs `ingot[track]`. Off unless given."""
    mlflow: MLflowRun | None = None
    """Log to MLflow from rank 0; needs `ingot[mlflow]`. Off unless given."""
    trackio: TrackioRun | None = None
    """Log to Trackio from rank 0; needs `ingot[trackio]`. Off unless given."""
    gpu: bool = True
    """Log utilisation and memory of each rank's GPU, where there is one."""
