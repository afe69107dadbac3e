"""The knobs of Google Cloud: whose project pays, where things lie, what they may cost; and where
each step of the pipeline runs.
"""

# ruff: noqa: RUF012 (pydantic copies a mutable default for each section)

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ingot.config.launch import Duration, Kind, Machine
from ingot.config.section import Positive, Section

Verb = Literal["ingest", "prepare", "train", "evaluate", "gate", "register", "deploy"]


class Images(Section):
    """Container images by what they are for;
    `REGION-docker.pkg.dev/PROJECT/REPOSITORY/ingot-NAME:latest` when empty.
    """

    train: str | None = None
    """Training: CUDA, torch, ingot."""
    spark: str | None = None
    """Preparing data on Spark."""
    serve: str | None = None
    """Serving with ingot's own server."""


class Cloud(Section):
    """Google Cloud: the resources that runs use. Nothing of it is asked before a verb needs it."""

    project: str | None = None
    """Project id; the one of the credentials when empty."""
    region: str = "us-central1"
    """Region of everything that has one."""
    zone: str | None = None
    """Zone of virtual machines; the region's `-a`, `-b`, `-c`, `-d`, `-f` are tried in order when
    empty.
    """
    bucket: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]+$")] | None = None
    """Bucket (its name alone) where runs, pipelines and models lie."""
    service_account: str | None = None
    """Account that jobs run as; the project's default when empty."""
    repository: str | None = None
    """Docker repository of Artifact Registry where images lie."""
    network: str | None = None
    """VPC network of jobs; the project's default when empty."""
    subnetwork: str | None = None
    """Subnetwork of virtual machines and Spark."""
    tensorboard: str | None = None
    """Id, or whole name, of a managed TensorBoard that the metrics of a training also go to, live.
    """
    secrets: dict[str, str] = {}
    """Variables whose values lie in Secret Manager: `{HF_TOKEN: "secret:hf-token"}`, the newest
    version, or `secret:hf-token/3`. Read where the verb runs, into its environment, unless they are
    set there; never written down.
    """
    max_run: Duration = 7 * 86_400.0
    """How long a job may take at the most (`24h`), all its launches together, after which the place
    itself ends it and its machines, whatever became of us. For gce, vertex, tpu, dataproc and
    dataflow.
    """
    max_cost: Annotated[float, Field(gt=0)] | None = None
    """US dollars that a job may spend on machines at the most, by the table of prices: all its
    launches together, until it is done or begun anew by --fresh. Stops like `max_run`; for gce,
    vertex and tpu. No bound when empty.
    """
    prices: dict[str, Annotated[float, Field(ge=0)]] = {}
    """US dollars an hour by machine type or accelerator, in place of the table's
    (`ingot/cloud/prices.yaml`, which says of what day it is).
    """
    labels: dict[str, str] = {}
    """Labels on everything that is made, beside ours."""
    images: Images = Images()
    """Container images."""
    endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Address where all of Google's services but storage are asked, such as an emulator's; over
    plain http no credentials are sent. Google's own when empty.
    """

    @field_validator("secrets")
    @classmethod
    def _only_references(cls, value: dict[str, str]) -> dict[str, str]:
        if wrong := [
            name for name, reference in value.items() if not reference.startswith("secret:")
        ]:
            raise ValueError(
                f"{wrong[0]} must be a reference such as secret:NAME, not the secret itself"
            )
        return value


class StepPlace(Section):
    """The place of one step of the pipeline; what is empty is as `launch` says."""

    launch: Kind | None = None
    """Where it runs, as `launch.kind` says it. Empty: train and evaluate where `launch.kind` says,
    everything else `local`: on this machine, and in a pipeline in the step's own container, which
    neither `cloud.max_run` nor `cloud.max_cost` bounds. `vertex` is a custom job of its own.
    """
    image: str | None = None
    """Container image."""
    machine: Machine | None = None
    """Machine that it runs on, or each of them."""
    nodes: Positive | None = None
    """Machines that share it."""
    processes: Positive | None = None
    """Processes on each machine."""


class Spark(Section):
    """Managed Service for Apache Spark (Dataproc Serverless), for `dataproc`."""

    version: str = "2.3"
    """Runtime version."""
    properties: dict[str, str] = {}
    """Spark's properties, such as `{spark.executor.instances: "20"}`."""


class Pipeline(Section):
    """The steps as a pipeline of the managed service (Kubeflow Pipelines)."""

    steps: dict[Verb, StepPlace] = {}
    """Steps by verb that do not run where `launch` says: `{prepare: {launch: dataproc}}`."""
    root: Annotated[str, Field(pattern=r"^gs://[^/]+")] | None = None
    """Where compiled pipelines and what passes between steps lie; `gs://BUCKET/ingot/pipelines`
    when empty.
    """
    retries: Annotated[int, Field(ge=0)] = 2
    """How often a failed step is tried again."""
    cache: bool = True
    """Skip steps of which nothing changed, by their fingerprints; false does all of them again."""
    spark: Spark = Spark()
    """Spark as a service."""
