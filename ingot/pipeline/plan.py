"""The pipeline's steps with their places: which image, which machine, what is told to the command
line. A table over knobs, nothing is asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.remote.replica import replica_url
from ingot.base.storage import is_remote
from ingot.cloud.clients import GoogleClients
from ingot.cloud.images import image_of
from ingot.cloud.machines import accelerators_of, check_machine, machine_type, vertex_accelerator
from ingot.cloud.prices import time_limit_s
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.config.sections.deployment import StepPlace, Verb
from ingot.config.sections.launch import Machine
from ingot.launch.staging import local_folders, recipe_for_nodes
from ingot.pipeline.steps import STEPS

VERBS: tuple[Verb, ...] = ("ingest", "prepare", "train", "evaluate", "gate", "register", "deploy")
GATED: tuple[Verb, ...] = ("register", "deploy")
"""Done only when the gate says so."""
DEPLOYS, KEEPS = "deploy", "keep"
"""What the gate says to the steps after it."""
REACHED = ("gce", "vertex", "tpu", "dataproc", "dataflow")
"""Places that a container of the pipeline reaches."""
MACHINES = ("local", "gce", "vertex")
"""Places whose machines `launch.machine` describes."""
BOUNDED = ("gce", "vertex", "tpu")
"""Places that `cloud.max_cost` bounds, by a table of prices."""
OUTPUT = "runs"
"""The folder that run folders are made in, in a container."""


@dataclass(frozen=True)
class Resources:
    """What a container asks for; `accelerator` as Vertex AI names it."""

    cpus: int
    memory_gb: float
    accelerator: str | None = None
    accelerators: int = 0


@dataclass(frozen=True)
class Planned:
    """One step: `place` are overrides that say where else it runs, () where it runs in its own
    container, with `resources` or what is the usual.
    """

    verb: Verb
    image: str
    place: tuple[str, ...] = ()
    resources: Resources | None = None


@dataclass(frozen=True)
class Plan:
    """All that the compiled pipeline is made of. `recipe` is the text that the steps read, at
    `address`; `root` is where the pipeline's things lie.
    """

    name: str
    recipe: str
    address: str
    replica: str
    root: str
    retries: int
    steps: tuple[Planned, ...]


def plan(recipe: Recipe) -> Plan:
    """Raises WrongInput where there is no bucket, no image, or a place that the pipeline cannot
    reach.
    """
    bucket = GoogleClients(recipe.cloud).bucket
    root = (recipe.pipeline.root or f"{bucket}/ingot/pipelines").rstrip("/")
    replica = replica_url(bucket, recipe.name)
    text = dump_recipe(recipe_for_nodes(recipe.model_copy(update={"output": OUTPUT}), replica))
    steps = tuple(_planned(recipe, verb) for verb in VERBS)
    return Plan(
        recipe.name,
        text,
        f"{root}/recipes/{fingerprint(text)}.yaml",
        replica,
        root,
        recipe.pipeline.retries,
        steps,
    )


def reasons(recipe: Recipe) -> list[str]:
    """Why the recipe cannot become a pipeline, one reason each that names the knob; nothing is
    asked of anybody.
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
    named = [("data source", source) for source in recipe.sources]
    named += [
        (f"the {knob} of task {task.name}", value)
        for task in recipe.tasks
        for knob in ("source", "include")
        if isinstance(value := getattr(task, knob, None), str)
    ]
    found += [
        f"{what} {value} lies on this machine; put it into the bucket and give gs://..."
        for what, value in named
        if _is_here(value)
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
        found += [f"{verb}: {reason}" for reason in _misplaced(recipe, verb)]
    bounded = [verb for verb in VERBS if _is_shared(verb) and _kind(recipe, verb) in BOUNDED]
    looks: tuple[Callable[[], object], ...] = (
        lambda: GoogleClients(recipe.cloud).project,
        lambda: plan(recipe),
        lambda: [time_limit_s(recipe.at(verb)) for verb in bounded],
    )
    for look in looks:
        try:
            look()
        except WrongInput as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def _misplaced(recipe: Recipe, verb: Verb) -> list[str]:
    """Why a step cannot be done where the recipe puts it."""
    kind, machine = _kind(recipe, verb), _machine(recipe, verb)
    found = check_machine(machine) if machine is not None else []
    if _is_shared(verb) and machine is not None and kind in MACHINES:
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
    return found if kind != "local" else [*found, *_beyond(recipe, verb)]


def _beyond(recipe: Recipe, verb: Verb) -> list[str]:
    """What a step asks for that its own container cannot have."""
    given, machine = recipe.pipeline.steps.get(verb, StepPlace()), _machine(recipe, verb)
    # Where it is moved here by name, it leaves the machines that `launch` asks for to the others.
    nodes = given.nodes or (recipe.launch.nodes if _is_shared(verb) and given.launch is None else 1)
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


def _is_here(source: str) -> bool:
    return source.startswith("megatron:") or (not is_remote(source) and ":" not in source)


def _planned(recipe: Recipe, verb: Verb) -> Planned:
    given = recipe.pipeline.steps.get(verb, StepPlace())
    kind, machine = _kind(recipe, verb), _machine(recipe, verb)
    image = given.image or (recipe.launch.image if _is_shared(verb) else None)
    if kind == "local":
        return Planned(
            verb, image or image_of(recipe.cloud, "train"), (), _resources(machine, verb)
        )
    if kind not in REACHED:
        raise WrongInput(
            f"{verb} cannot run with launch.kind {kind} from a container of the pipeline; set"
            f" pipeline.steps.{verb}.launch to vertex or gce"
        )
    place = [
        f"launch.kind={kind}",
        f"launch.nodes={given.nodes or (recipe.launch.nodes if _is_shared(verb) else 1)}",
    ]
    if given.processes is not None:
        place.append(f"launch.processes={given.processes}")
    if machine is not None:
        values = machine.model_dump(mode="json", exclude_defaults=True)
        place.append(f"launch.machine={json.dumps(values, sort_keys=True)}")
    if image is not None:
        place.append(f"launch.image={image}")
    # What submits and waits is ingot as well.
    return Planned(verb, image_of(recipe.cloud, "train"), tuple(place))


def _kind(recipe: Recipe, verb: Verb) -> str:
    """Where a step runs. `local` is its own container, a machine of Vertex AI that nothing shares
    and whose time nobody bounds.
    """
    given = recipe.pipeline.steps.get(verb, StepPlace())
    return given.launch or (recipe.launch.kind if _is_shared(verb) else "local")


def _is_shared(verb: Verb) -> bool:
    return any(step.verb == verb and step.distributed for step in STEPS)


def _machine(recipe: Recipe, verb: Verb) -> Machine | None:
    """None: what the place gives of itself."""
    given = recipe.pipeline.steps.get(verb, StepPlace()).machine
    return given or (recipe.launch.machine if _is_shared(verb) else None)


def _resources(machine: Machine | None, verb: Verb) -> Resources | None:
    known = machine_type(machine.type) if machine is not None else None
    if machine is None or known is None:
        return None
    name, count = accelerators_of(machine)
    try:
        return Resources(
            known.vcpus, known.memory_gb, vertex_accelerator(name) if name else None, count
        )
    except KeyError:
        raise WrongInput(
            f"{verb}: accelerator {name} cannot be had in a container of the pipeline; set"
            f" pipeline.steps.{verb}.launch to vertex"
        ) from None
