"""`ingot doctor --cloud`: what a recipe needs of Google Cloud (derived from its knobs), and running
the checks whether it exists. The checks change nothing.

They are independent of each other: one that is denied or fails is reported in a line of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ingot.base.errors import IngotError
from ingot.cloud.clients import GoogleClients, call_api
from ingot.cloud.doctor.finding import DoctorFinding
from ingot.cloud.images import ImageKind
from ingot.config.recipe import Recipe
from ingot.config.sections.launch import Machine

Use = Literal[
    "storage", "compute", "vertex", "dataproc", "dataflow", "tpu", "bigquery", "images", "secrets"
]
APIS: dict[str, tuple[str, tuple[Use, ...]]] = {
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
"""The services by the names with which gcloud enables them, and their uses."""
_PLACES: dict[str, tuple[Use, ...]] = {
    "gce": ("compute",),
    "vertex": ("vertex",),
    "tpu": ("tpu",),
    "dataproc": ("dataproc",),
    "dataflow": ("dataflow",),
}


@dataclass(frozen=True)
class MachineDemand:
    """Machines that the recipe will request: `why` is the knob, `place` the service that provides
    them.
    """

    why: str
    machine: Machine
    count: int
    place: Literal["gce", "vertex"]


@dataclass(frozen=True)
class CloudNeeds:
    """`uses`: each required use, with the knob that requires it. `images`: those that must be in
    the repository.
    """

    uses: dict[Use, str]
    images: dict[ImageKind, str]
    machines: tuple[MachineDemand, ...]

    def why(self, uses: tuple[Use, ...]) -> str | None:
        """The knob that requires one of these uses; None if none does."""
        return next((self.uses[use] for use in uses if use in self.uses), None)


def needs_of(recipe: Recipe) -> CloudNeeds:
    """The needs of all verbs that the recipe may be used with."""
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
    return CloudNeeds(uses, own, tuple(_machines(recipe)))


def _places(recipe: Recipe) -> dict[str, str]:
    """The cloud launch kinds that the recipe uses, each with the knob that chose it."""
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


def _machines(recipe: Recipe) -> list[MachineDemand]:
    launch, found = recipe.launch, []
    if launch.kind in ("gce", "vertex"):
        found.append(
            MachineDemand(
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
                MachineDemand(
                    f"pipeline.steps.{verb}.machine",
                    step.machine,
                    step.nodes or 1,
                    "gce" if kind == "gce" else "vertex",
                )
            )
    if recipe.registry.kind == "vertex":
        found.append(
            MachineDemand("serve.machine", recipe.serve.machine, recipe.serve.replicas[1], "vertex")
        )
    return found


PARALLEL_CHECKS = 8
CALLER = '"user:$(gcloud config get-value account)"'
"""The caller, as a shell expression: credentials do not contain their name. (A service account
would be `serviceAccount:...`.)
"""


@dataclass(frozen=True)
class CheckContext:
    """The inputs of the checks."""

    recipe: Recipe
    google: GoogleClients
    needs: CloudNeeds

    @property
    def project(self) -> str:
        return self.google.project

    @property
    def region(self) -> str:
        return self.google.cloud.region

    @cached_property
    def number(self) -> str:
        """The project's number. Raises as `call_api` does."""
        found = call_api(
            self.google.client("projects").get_project,
            "look at the project",
            name=f"projects/{self.project}",
        )
        return str(found.name).removeprefix("projects/")

    @property
    def account(self) -> str:
        """The service account that jobs run as. If none is set, custom jobs of Vertex AI run as its
        service agent, everything else as Compute Engine's default account.
        """
        if given := self.google.cloud.service_account:
            return given
        kinds = {
            self.recipe.launch.kind,
            *(step.launch for step in self.recipe.pipeline.steps.values()),
        }
        if "vertex" in kinds and self.needs.why(("compute", "dataproc", "dataflow", "tpu")) is None:
            return f"service-{self.number}@gcp-sa-aiplatform-cc.iam.gserviceaccount.com"
        return f"{self.number}-compute@developer.gserviceaccount.com"


Check = Callable[[CheckContext], Iterable[DoctorFinding]]


def check_context(recipe: Recipe) -> CheckContext:
    """The inputs of the checks. Raises WrongInput if there is no project or no credentials."""
    google = GoogleClients(recipe.cloud)
    _ = google.project
    google.client("projects")
    return CheckContext(recipe, google, needs_of(recipe))


def run_checks(site: CheckContext, checks: Iterable[tuple[str, Check]]) -> list[DoctorFinding]:
    """The findings of all checks, in order; each check has a name for the line shown if it cannot
    run.
    """
    with ThreadPoolExecutor(PARALLEL_CHECKS) as pool:
        return [
            finding
            for findings in pool.map(lambda check: _run_check(site, *check), list(checks))
            for finding in findings
        ]


def _run_check(site: CheckContext, name: str, check: Check) -> list[DoctorFinding]:
    found: list[DoctorFinding] = []
    try:
        for finding in check(site):
            found.append(finding)
    except IngotError as error:
        found.append(unknown_finding(site, name, error))
    return found


def unknown_finding(site: CheckContext, what: str, error: IngotError) -> DoctorFinding:
    """The line of a check that could not run."""
    text = str(error).split(": ", 1)[-1].rpartition(";")[0] or str(error)
    denied = "ermission" in text or "denied" in text
    get = (
        f"gcloud projects add-iam-policy-binding {site.project} --member={CALLER}"
        " --role=roles/viewer"
        if denied
        else ""
    )
    return DoctorFinding(what, None, f"not known: {text}", get)
