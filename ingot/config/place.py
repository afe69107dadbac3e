"""The knobs that say what happens to the result: gate, registry, serving; and failures on
purpose.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ingot.config.launch import Machine
from ingot.config.section import Positive, Section

GATED = "loss/bits_per_byte"
"""What the gate compares unless the kind of documents or the recipe says otherwise."""


Victim = Literal["rank", "group", "supervisor"]


class Gate(Section):
    """Decides whether a new model replaces the live one."""

    metric: str | Annotated[list[str], Field(min_length=1)] | None = None
    """Metric key of the evaluation report, or its tail where that is unique; of a list, all must be
    better. Empty: `loss/bits_per_byte`, for preferences `loss/accuracy`, for classifiers
    `classification/accuracy`.
    """
    direction: Literal["lower", "higher"] | None = None
    """Which way is better; the metric's own direction when empty."""
    margin: Annotated[float, Field(ge=0)] = 0.0
    """How much better than the live model at least, in the metric's units; a tie never deploys."""
    override: Literal["deploy", "keep"] | None = None
    """Decide this way whatever the numbers say; written down in the decision."""


class Registry(Section):
    """Where model versions are kept."""

    kind: Literal["local", "vertex"] = "local"
    """`local`: a file and folders on this disk. `vertex`: the Model Registry of Vertex AI, in
    `cloud.project` and `cloud.region`.
    """
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] | None = (
        None
    )
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
    max_body_bytes: Positive = 1_500_000
    """Largest request body; larger ones get 413."""
    max_tokens: Positive = 1024
    """Most tokens that one request may generate."""
    max_queue: Positive = 64
    """Requests that may wait; more get 429."""
    max_batch: Positive = 8
    """Requests that are decoded together."""
    any_template: bool = False
    """Serve a model although its chat template is not the one that it was trained with."""
    prompt: str = "def "
    """The prompt that `ingot run` sends at the end, to see the served model answer."""
    prompt_tokens: Positive = 64
    """Tokens that `ingot run` asks for."""

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
