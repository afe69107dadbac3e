"""The knobs of what comes after training (gate, registry, server), of Google Cloud with the steps
as a pipeline there, and of failures on purpose.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    field_validator,
)

from ingot.config.doors import GATES
from ingot.config.section import ByKind, FileName, KindSettings, Positive, Section
from ingot.config.sections.launch import Duration, Machine, Place
from ingot.config.sections.objective import Judged

GATED: dict[Judged, str] = {
    "preference": "loss/accuracy",
    "rated": "loss/accuracy",
    "labelled": "classification/accuracy",
    "masked": "loss/loss",
    "answers": "reward/mean",
    "scores": "preference/accuracy",
}
"""What the gate compares unless the recipe says so; bits per byte for all others."""


Victim = Literal["rank", "group", "supervisor"]


class GateSettings(KindSettings):
    """What every gate says of itself beside its knobs.

    `implementation(candidate, live, rule)` compares two `ingot.base.reports.EvaluationReport` (live
    is None where nothing is live yet) by these settings and returns an
    `ingot.registry.gate.GateDecision`. Reads and writes nothing.
    """

    kind: str
    """Which gate."""
    override: Literal["deploy", "keep"] | None = None
    """Decide this way whatever the numbers say; written down in the decision."""

    def metrics(self, documents: Judged) -> list[str]:
        """The metrics of the evaluation report that the gate cannot do without."""
        return []

    def resolved(self, documents: Judged) -> GateSettings:
        """The same gate with what stands for knobs that were left empty."""
        return self


class MetricGate(GateSettings):
    """A new model replaces the live one where all of some metrics are better by a margin."""

    implementation = "ingot.registry.gate:compare_metrics"

    kind: Literal["metric"] = "metric"
    """Which gate."""
    metric: str | Annotated[list[str], Field(min_length=1)] | None = None
    """Metric key of the evaluation report, or its tail where that is unique; of a list, all must be
    better. Empty: `loss/bits_per_byte`, for preferences and rated answers `loss/accuracy`, for
    classifiers `classification/accuracy`, for masked language models `loss/loss`, for training on
    rewards `reward/mean`, for reward models `preference/accuracy`.
    """
    direction: Literal["lower", "higher"] | None = None
    """Which way is better; the metric's own direction when empty."""
    margin: Annotated[float, Field(ge=0)] = 0.0
    """How much better than the live model at least, in the metric's units; a tie never deploys."""
    floor: float | Annotated[str, Field(min_length=1)] | None = None
    """What a model must reach in each metric even where nothing is live yet: a figure in the
    metric's units, or the name of a baseline of the evaluation (`bigram`, `gzip`, `first_line`),
    which it must beat.
    """

    def metrics(self, documents: Judged) -> list[str]:
        metric = self.metric or GATED.get(documents, "loss/bits_per_byte")
        return [metric] if isinstance(metric, str) else metric

    def resolved(self, documents: Judged) -> MetricGate:
        return self.model_copy(update={"metric": self.metric or self.metrics(documents)[0]})


Gate = Annotated[GateSettings, ByKind(GATES, "metric")]


class RegistrySettings(Section):
    """Where model versions are kept."""

    kind: Literal["local", "vertex"] = "local"
    """`local`: a file and folders on this disk. `vertex`: the Model Registry of Vertex AI, in
    `cloud.project` and `cloud.region`.
    """
    name: FileName | None = None
    """Name that versions are registered under; the recipe's name when empty."""
    path: str | None = None
    """SQLite file; `OUTPUT/registry.sqlite` when empty."""


class Serve(Section):
    """The HTTP server."""

    engine: Literal["native", "transformers", "vllm", "triton"] = "native"
    """What answers: ingot's own decoder where it knows the model and transformers otherwise
    (`native`), transformers always, vLLM, or NVIDIA's Triton. The last two run in environments or
    images of their own.
    """
    python: str | None = None
    """Interpreter of the environment that vLLM, or Triton's Python backend, lives in; this one when
    empty.
    """
    image: str | None = None
    """Container image that an endpoint of the cloud serves with; the engine's own when empty."""
    machine: Machine = Machine()
    """The machine behind an endpoint of the cloud."""
    replicas: Annotated[tuple[Positive, Positive], Field()] = (1, 1)
    """The least and the most machines behind an endpoint of the cloud."""
    canary: Annotated[int, Field(ge=1, le=99)] | None = None
    """Percent of an endpoint's traffic that a new version gets first, as `ingot deploy --canary`;
    empty: all at once, 10 where it is verified.
    """
    verify: bool = False
    """Ask a new version behind an endpoint, and compare its answer with the model folder's, before
    it gets all of the traffic, as `ingot deploy --verify`.
    """
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """Port to listen on; 0 takes a free one. `$AIP_HTTP_PORT` wins where it is set."""
    api_key: str | None = None
    """Reference (`env:NAME`) to a key that clients must send as `Authorization: Bearer KEY`; nobody
    is asked when empty.
    """
    cors: tuple[str, ...] = ()
    """Origins whose pages may call the server from a browser, such as `https://app.example.com`;
    `"*"` lets every page.
    """
    max_body_bytes: Positive = 1_500_000
    """Largest request body; larger ones get 413."""
    max_tokens: Positive = 1024
    """Most tokens that one request may generate."""
    max_queue: Positive = 64
    """Requests that may wait; more get 429."""
    max_batch: Positive = 64
    """Requests that are decoded together: more of them share the reading of the weights, and each
    takes the memory of its keys and values.
    """
    finish_s: Annotated[float, Field(ge=0)] = 10.0
    """Seconds that running requests get to finish when ingot's own server is stopped by SIGTERM or
    Ctrl-C; it takes no new ones meanwhile, and those that are not done then get 503. What stops it
    must wait longer than that: `docker stop` kills after 10 seconds, Kubernetes after 30.
    """
    compute: Literal["auto", "fp32", "bf16"] = "auto"
    """What answers are computed in. `auto`: bf16 where an accelerator has it, and on a CPU with AMX
    for ingot's own decoders of 20 million weights and more that are stored in bf16; else float32,
    whose answers hardly depend on the processor.
    """
    pack: bool = True
    """On an x86 CPU, keep a decoder's weights packed where that changes none of them, as for models
    that were exported in bf16: half the memory and half the time for a token. On an NVIDIA GPU,
    join matrices and kernels of its layers, which changes no weight.
    """
    eager: bool = False
    """On an NVIDIA GPU, launch the kernels of each token one by one. Otherwise those of a step are
    recorded once for each size (CUDA graphs) and launched together, which few requests at a time
    are several times faster with; ingot's own decoders (those with experts in bf16), and vLLM.
    """
    prefix_cache_mb: Annotated[int, Field(ge=0)] = 512
    """Memory (10^6 bytes) in which ingot's own decoders keep what they computed of prompts. One
    that begins as an earlier or running one does is computed from where they part, with the same
    answer. It is given back while memory is short. By the time of an answer a client can find
    out whether others sent such a beginning: `cache_salt` in a request keeps callers apart, and 0
    keeps nothing, and switches vLLM's off, too.
    """
    any_template: bool = False
    """Serve a model although its chat template is not the one that it was trained with."""
    tool_call_parser: Literal["hermes", "llama3_json", "mistral"] | None = None
    """How the model writes calls of the tools that a chat request offers, by vLLM's names; empty:
    what its chat template shows (vLLM itself reads no calls then).
    """
    prompt: str | None = None
    """The prompt that `ingot run` sends at the end, to see the served model answer. Null for the
    first of `evaluate.prompts`, or where there is none, words that suit what the model learns.
    """
    prompt_tokens: Positive = 64
    """Tokens that `ingot run` asks for."""
    prompt_temperature: Annotated[float, Field(ge=0)] = 0.0
    """Temperature that `ingot run` asks a decoder for, with the recipe's `seed`; 0 always takes the
    likeliest token.
    """

    @field_validator("cors")
    @classmethod
    def _are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """One with a path would be compared with origins, and never match."""
        for origin in value:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s?#]+", origin):
                raise ValueError(
                    f"{origin!r} is not an origin; write it as https://HOST or http://HOST:PORT,"
                    " without a path"
                )
        return value

    @field_validator("api_key")
    @classmethod
    def _only_a_reference(cls, value: str | None) -> str | None:
        """A key that stood in a recipe would be written into the run folder."""
        if value is not None and not value.startswith("env:"):
            raise ValueError("must be a reference such as env:NAME, not the key itself")
        return value


class Chaos(Section):
    """Failures on purpose, to see that nothing is lost: for `ingot launch`, and for proofs."""

    kill_every_s: Annotated[float, Field(gt=0)] | None = None
    """Mean seconds between kills (SIGKILL, at random moments); null for none."""
    what: Annotated[tuple[Victim, ...], Field(min_length=1)] = ("rank",)
    """What is killed, one of these at a time: a rank, all ranks, or the supervisor with all ranks,
    which somebody must then start again.
    """
    seed: int = 0
    """Seeds the choice of moments and victims."""
    kill_at: Positive | None = None
    """The training process kills itself whenever so many steps are done, also when it comes to them
    again; null for never.
    """


# ruff: noqa: RUF012 (pydantic copies a mutable default for each section)


Verb = Literal["ingest", "prepare", "train", "evaluate", "gate", "register", "deploy"]


def bucket_name(value: Any) -> Any:
    """The name in `gs://NAME` or `gs://NAME/`; folders in it are not understood."""
    if isinstance(value, str) and value.startswith("gs://"):
        return value.removeprefix("gs://").removesuffix("/")
    return value


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
    bucket: (
        Annotated[str, BeforeValidator(bucket_name), Field(pattern=r"^[a-z0-9][a-z0-9._-]+$")]
        | None
    ) = None
    """Bucket where runs, pipelines and models lie: its name, or `gs://NAME`."""
    service_account: str | None = None
    """Account that jobs and endpoints run as; the project's default when empty, with which
    `serve.engine: triton` could not read its model.
    """
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
    """Labels on everything that is made, beside ours. A key begins with a letter; what else Google
    does not take in keys and values becomes a hyphen.
    """
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

    @field_validator("labels")
    @classmethod
    def _keys_begin_with_a_letter(cls, value: dict[str, str]) -> dict[str, str]:
        if wrong := [key for key in value if not re.match("[A-Za-z]", key)]:
            raise ValueError(f"key {wrong[0]!r} must begin with a letter from a to z; rename it")
        return value


class StepPlace(Section):
    """The place of one step of the pipeline; what is empty is as `launch` says."""

    launch: Place | None = None
    """Where it runs, as `launch.kind` says it. Empty: train and evaluate where `launch.kind` says,
    everything else `local`: on this machine, and in a pipeline in the step's own container, which
    neither `cloud.max_run` nor `cloud.max_cost` bounds. `vertex` is a custom job of its own.
    """
    image: str | None = None
    """Container image."""
    machine: Machine | None = None
    """Machine that it runs on, or each of them."""
    nodes: Positive | None = None
    """Machines that share it. Empty: `launch.nodes`, but one for an evaluation on machines that are
    made for it (gce, vertex).
    """
    processes: Positive | None = None
    """Processes on each machine."""


class Spark(Section):
    """Managed Service for Apache Spark (Dataproc Serverless), for `dataproc`."""

    version: str = "2.3"
    """Runtime version."""
    properties: dict[str, str] = {}
    """Spark's properties, such as `{spark.executor.instances: "20"}`."""


class PipelineSettings(Section):
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
