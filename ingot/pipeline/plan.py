"""Plans the compiled pipeline: for each step its image, its machine and the overrides of its
command line. Computed from the recipe alone; no service is called.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.remote.replica import replica_url
from ingot.cloud.clients import GoogleClients
from ingot.cloud.images import image_of
from ingot.cloud.machines import accelerators_of, check_machine, machine_type, vertex_accelerator
from ingot.cloud.prices import time_limit_s
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.config.sections.deployment import StepPlace, Verb
from ingot.config.sections.launch import Machine
from ingot.launch.local_inputs import local_folders, local_inputs
from ingot.launch.places.node_commands import accelerators_in_vain
from ingot.launch.staging import recipe_for_nodes
from ingot.pipeline.steps import STEPS

VERBS: tuple[Verb, ...] = ("ingest", "prepare", "train", "evaluate", "gate", "register", "deploy")
GATED: tuple[Verb, ...] = ("register", "deploy")
"""Steps that run only if the gate decides to deploy."""
DEPLOYS, KEEPS = "deploy", "keep"
"""The two decisions of the gate, as the pipeline's condition reads them."""
REACHABLE = ("gce", "vertex", "tpu", "dataproc", "dataflow")
"""Places on which a container of the pipeline can launch a step."""
MACHINES = ("local", "gce", "vertex")
"""Places whose machines are described by `launch.machine`."""
BOUNDED = ("gce", "vertex", "tpu")
"""Places whose cost `cloud.max_cost` limits, by a table of prices."""
OUTPUT = "runs"
"""The folder for run folders inside a container."""


@dataclass(frozen=True)
class ContainerResources:
    """The resources a container requests; `accelerator` is Vertex AI's name for it."""

    cpus: int
    memory_gb: float
    accelerator: str | None = None
    accelerators: int = 0


@dataclass(frozen=True)
class PlannedStep:
    """One step: `place` holds the overrides that send it to another service, () where it runs in
    its own container with `resources` (None: the service's default).
    """

    verb: Verb
    image: str
    place: tuple[str, ...] = ()
    resources: ContainerResources | None = None


@dataclass(frozen=True)
class PipelinePlan:
    """Everything the compiled pipeline contains. `recipe` is the text the steps read from the URL
    `address`; `root` is the folder of the pipeline's own files. `project` is the user's own.
    """

    name: str
    project: str
    recipe: str
    address: str
    replica: str
    root: str
    retries: int
    steps: tuple[PlannedStep, ...]


def plan(recipe: Recipe) -> PipelinePlan:
    """The plan of a recipe.

    Raises:
        WrongInput: no project, bucket or image is set, or a step's place cannot be reached from a
            container.
    """
    google = GoogleClients(recipe.cloud)
    bucket, project = google.bucket, google.project
    root = (recipe.pipeline.root or f"{bucket}/ingot/pipelines").rstrip("/")
    replica = replica_url(bucket, recipe.name)
    text = dump_recipe(recipe_for_nodes(recipe.model_copy(update={"output": OUTPUT}), replica))
    steps = tuple(_planned(recipe, verb) for verb in VERBS)
    return PipelinePlan(
        recipe.name,
        project,
        text,
        f"{root}/recipes/{fingerprint(text)}.yaml",
        replica,
        root,
        recipe.pipeline.retries,
        steps,
    )


def submission_problems(recipe: Recipe) -> list[str]:
    """Why the recipe cannot become a pipeline: one sentence per reason, naming the knob. No service
    is called.
    """
    found = []
    if recipe.registry.kind == "local":
        found.append("registry.kind local is a file of one machine; set registry.kind to vertex")
    if recipe.launch.secrets:
        found.append(
            f"launch.secrets {recipe.launch.secrets[0]} is known to this machine alone; put it into"
            f" Secret Manager and name it in cloud.secrets: {{{recipe.launch.secrets[0]}:"
            " secret:NAME}"
        )
    found += [
        f"{each.what} {each.named} lies on this machine; {each.instead}"
        for each in local_inputs(recipe, "run")
    ]
    found += [
        f"{knob} {value} cannot be read by the pipeline's containers, which fetch models from the"
        " hub alone; give hf:ORGANIZATION/NAME"
        for knob, value in local_folders(recipe).items()
    ]
    if _kind(recipe, "deploy") != "local":
        found.append(
            "pipeline.steps.deploy.launch: a deployment is asked for by the pipeline's own"
            " container; remove it"
        )
    for verb in VERBS:
        found += [f"{verb}: {reason}" for reason in _placement_problems(recipe, verb)]
    cost_limited = [
        verb for verb in VERBS if _is_distributed(verb) and _kind(recipe, verb) in BOUNDED
    ]
    checks: tuple[Callable[[], object], ...] = (
        lambda: GoogleClients(recipe.cloud).project,
        lambda: plan(recipe),
        lambda: [time_limit_s(recipe.at(verb)) for verb in cost_limited],
    )
    for check in checks:
        try:
            check()
        except WrongInput as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def _placement_problems(recipe: Recipe, verb: Verb) -> list[str]:
    """Why a step cannot run where the recipe places it."""
    kind, machine = _kind(recipe, verb), _machine(recipe, verb)
    found = check_machine(machine) if machine is not None else []
    if _is_distributed(verb) and machine is not None and kind in MACHINES:
        processes, accelerators = recipe.at(verb).launch.processes, accelerators_of(machine)[1]
        if 0 < accelerators < processes:
            found.append(
                f"{processes} processes share {accelerators} accelerators on each machine; set"
                f" pipeline.steps.{verb}.processes to {accelerators}, or take larger machines"
            )
        if kind == "local" and accelerators and recipe.cloud.max_cost is not None:
            found.append(
                "what runs in a container of the pipeline is not bounded by cloud.max_cost; set"
                f" pipeline.steps.{verb}.launch to vertex"
            )
    if kind in ("gce", "vertex"):
        found += accelerators_in_vain(recipe, verb)
    return found if kind != "local" else [*found, *_container_problems(recipe, verb)]


def _container_problems(recipe: Recipe, verb: Verb) -> list[str]:
    """What a step requests that a container of the pipeline cannot provide."""
    given, machine = recipe.pipeline.steps.get(verb, StepPlace()), _machine(recipe, verb)
    # A step that is placed here by name does not use the machines `launch` requests for others.
    nodes = given.nodes or (
        recipe.launch.nodes if _is_distributed(verb) and given.launch is None else 1
    )
    asked = [f"launch.nodes {nodes}"] if nodes > 1 else []
    asked += [
        f"launch.machine.{way}"
        for way in ("spot", "flex_start", "reservation")
        if machine is not None and getattr(machine, way)
    ]
    asked += (
        ["launch.machine.disk_gb"]
        if machine is not None and machine.disk_gb != Machine().disk_gb
        else []
    )
    return [
        f"{what} cannot be had in a container of the pipeline; set pipeline.steps.{verb}.launch to"
        " vertex"
        for what in asked
    ]


def _planned(recipe: Recipe, verb: Verb) -> PlannedStep:
    given = recipe.pipeline.steps.get(verb, StepPlace())
    kind, machine = _kind(recipe, verb), _machine(recipe, verb)
    shared = _is_distributed(verb)
    image = given.image or (recipe.launch.image if shared else None)
    if kind == "local":
        return PlannedStep(
            verb, image or image_of(recipe.cloud, "train"), (), _resources(machine, verb)
        )
    if kind not in REACHABLE:
        raise WrongInput(
            f"{verb} cannot run with launch.kind {kind} from a container of the pipeline; set"
            f" pipeline.steps.{verb}.launch to vertex or gce"
        )
    place = [
        f"launch.kind={kind}",
        f"launch.nodes={given.nodes or (recipe.at(verb).launch.nodes if shared else 1)}",
    ]
    if given.processes is not None:
        place.append(f"launch.processes={given.processes}")
    if machine is not None:
        values = machine.model_dump(mode="json", exclude_defaults=True)
        place.append(f"launch.machine={json.dumps(values, sort_keys=True)}")
    if image is not None:
        place.append(f"launch.image={image}")
    # The container that submits and waits runs ingot, too.
    return PlannedStep(verb, image_of(recipe.cloud, "train"), tuple(place))


def _kind(recipe: Recipe, verb: Verb) -> str:
    """The launch kind of a step. `local` is its own container on a machine of Vertex AI, whose time
    and cost are not limited.
    """
    given = recipe.pipeline.steps.get(verb, StepPlace())
    return given.launch or (recipe.launch.kind if _is_distributed(verb) else "local")


def _is_distributed(verb: Verb) -> bool:
    return any(step.verb == verb and step.distributed for step in STEPS)


def _machine(recipe: Recipe, verb: Verb) -> Machine | None:
    """The machine of a step; None for the place's default."""
    given = recipe.pipeline.steps.get(verb, StepPlace()).machine
    return given or (recipe.launch.machine if _is_distributed(verb) else None)


def _resources(machine: Machine | None, verb: Verb) -> ContainerResources | None:
    known = machine_type(machine.type) if machine is not None else None
    if machine is None or known is None:
        return None
    name, count = accelerators_of(machine)
    try:
        return ContainerResources(
            known.vcpus, known.memory_gb, vertex_accelerator(name) if name else None, count
        )
    except KeyError:
        raise WrongInput(
            f"{verb}: accelerator {name} cannot be had in a container of the pipeline; set"
            f" pipeline.steps.{verb}.launch to vertex"
        ) from None
