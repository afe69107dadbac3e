"""What of Google Cloud a recipe needs, and why: arithmetic over its knobs, nothing is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ingot.cloud.images import ImageKind
from ingot.config.recipe import Recipe
from ingot.config.sections.launch import Machine

Use = Literal[
    "storage", "compute", "vertex", "dataproc", "dataflow", "tpu", "bigquery", "images", "secrets"
]
SERVICES: dict[str, tuple[str, tuple[Use, ...]]] = {
    "cloudbuild.googleapis.com": ("Cloud Build", ("images",)),
    "artifactregistry.googleapis.com": ("Artifact Registry", ("images",)),
    "bigquery.googleapis.com": ("BigQuery", ("bigquery",)),
    "storage.googleapis.com": ("Cloud Storage", ("storage",)),
    "secretmanager.googleapis.com": ("Secret Manager", ("secrets",)),
    "compute.googleapis.com": ("Compute Engine", ("compute", "dataproc", "dataflow")),
    "dataproc.googleapis.com": ("Dataproc (Managed Service for Apache Spark)", ("dataproc",)),
    "aiplatform.googleapis.com": ("Vertex AI (Gemini Enterprise Agent Platform)", ("vertex",)),
    "dataflow.googleapis.com": ("Dataflow", ("dataflow",)),
    "tpu.googleapis.com": ("Cloud TPU", ("tpu",)),
    "iam.googleapis.com": ("IAM", ("storage",)),
    "cloudresourcemanager.googleapis.com": ("Resource Manager", ("storage",)),
    "logging.googleapis.com": (
        "Cloud Logging",
        ("compute", "vertex", "dataproc", "dataflow", "tpu"),
    ),
}
"""The services by the names that gcloud enables them with, and what needs them."""
_PLACES: dict[str, tuple[Use, ...]] = {
    "gce": ("compute",),
    "vertex": ("vertex",),
    "tpu": ("tpu",),
    "dataproc": ("dataproc",),
    "dataflow": ("dataflow",),
}


@dataclass(frozen=True)
class Demand:
    """Machines that the recipe will ask for: `why` is the knob, `place` who lends them."""

    why: str
    machine: Machine
    count: int
    place: Literal["gce", "vertex"]


@dataclass(frozen=True)
class Needs:
    """`uses`: each thing that is needed, with the knob that needs it. `images`: those that must be
    in the repository.
    """

    uses: dict[Use, str]
    images: dict[ImageKind, str]
    machines: tuple[Demand, ...]

    def why(self, uses: tuple[Use, ...]) -> str | None:
        """The knob that needs one of these; None when nothing does."""
        return next((self.uses[use] for use in uses if use in self.uses), None)


def needs_of(recipe: Recipe) -> Needs:
    """The needs of every verb that the recipe may be given to."""
    places = _places(recipe)
    uses: dict[Use, str] = {}
    images: dict[ImageKind, str] = {}
    for place, why in places.items():
        for use in _PLACES.get(place, ()):
            uses.setdefault(use, why)
        images.setdefault("spark" if place == "dataproc" else "train", why)
    if recipe.registry.kind == "vertex":
        uses.setdefault("vertex", "registry.kind vertex")
        images |= (
            {"serve": "registry.kind vertex"}
            if recipe.serve.engine in ("native", "transformers") and not recipe.serve.image
            else {}
        )
    if recipe.cloud.tensorboard:
        uses.setdefault("vertex", "cloud.tensorboard")
    if bigquery := next(
        (source for source in recipe.sources if source.startswith("bigquery:")), None
    ):
        uses["bigquery"] = f"data source {bigquery[:40]}"
    if recipe.cloud.secrets:
        uses["secrets"] = "cloud.secrets"
    own = {
        kind: why
        for kind, why in images.items()
        if getattr(recipe.cloud.images, kind) is None
        and not (kind == "train" and recipe.launch.image)
    }
    if own:
        uses["images"] = next(iter(own.values()))
    if set(uses) - {"bigquery", "secrets"} or recipe.cloud.bucket:
        uses["storage"] = next(iter(uses.values()), "cloud.bucket")
    return Needs(uses, own, tuple(_machines(recipe)))


def _places(recipe: Recipe) -> dict[str, str]:
    """Kinds of places in the cloud, each with the knob that chose it."""
    found: dict[str, str] = (
        {recipe.launch.kind: f"launch.kind {recipe.launch.kind}"}
        if recipe.launch.kind in _PLACES
        else {}
    )
    for verb, step in recipe.pipeline.steps.items():
        if step.launch is not None and step.launch in _PLACES:
            found.setdefault(step.launch, f"pipeline.steps.{verb}.launch {step.launch}")
    if "pipeline" in recipe.model_fields_set:
        found.setdefault("vertex", "pipeline")
    return found


def _machines(recipe: Recipe) -> list[Demand]:
    launch, found = recipe.launch, []
    if launch.kind in ("gce", "vertex"):
        found.append(
            Demand(
                "launch.machine",
                launch.machine,
                launch.nodes,
                "gce" if launch.kind == "gce" else "vertex",
            )
        )
    for verb, step in recipe.pipeline.steps.items():
        kind = step.launch or launch.kind
        if step.machine is not None and kind in ("gce", "vertex", "local"):
            found.append(
                Demand(
                    f"pipeline.steps.{verb}.machine",
                    step.machine,
                    step.nodes or 1,
                    "gce" if kind == "gce" else "vertex",
                )
            )
    if recipe.registry.kind == "vertex":
        found.append(
            Demand("serve.machine", recipe.serve.machine, recipe.serve.replicas[1], "vertex")
        )
    return found
