"""What a container of an endpoint runs: what `config/serving.py` says for `serve.engine`, with an
image that Vertex AI can take. Only text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.reports import EvaluationReport
from ingot.cloud.clients import GoogleClients
from ingot.cloud.images import image_of
from ingot.cloud.machines import accelerators_of, check_machine, vertex_accelerator
from ingot.cloud.vertex.endpoints import EndpointResources
from ingot.cloud.vertex.models import ServingContainer
from ingot.config import serving
from ingot.config.recipe import Recipe

_REGISTRY = re.compile(r"(?:([a-z]+-[a-z]+\d+)|[a-z]+)-docker\.pkg\.dev/")


@dataclass(frozen=True)
class Wanted:
    """What a recipe asks to be served with. `files` lie beside the model; `mark` tells both from
    what else the model is served with.
    """

    container: ServingContainer
    files: dict[str, str]
    mark: str


def container_of(recipe: Recipe) -> ServingContainer:
    """Raises WrongInput: no image is named, it lies outside Artifact Registry or in another region,
    or the engine cannot use the machine.
    """
    engine, wanted = recipe.serve.engine, serving.container_of(recipe)
    image = recipe.serve.image or (
        image_of(recipe.cloud, "serve") if wanted.image is None else wanted.image
    )
    found = _REGISTRY.match(image)
    if found is None:
        raise WrongInput(
            f"the image {image} of serve.engine {engine} is not in Artifact Registry, where"
            " endpoints take theirs from; copy it there and set serve.image"
        )
    if found[1] is not None and found[1] != recipe.cloud.region:
        raise WrongInput(
            f"the image {image} lies in {found[1]}, cloud.region is {recipe.cloud.region}; build it"
            " there, or set serve.image"
        )
    return ServingContainer(
        image,
        wanted.args,
        wanted.command,
        dict(wanted.env),
        wanted.ports[0],
        wanted.health_route,
        wanted.predict_route,
        shared_memory_mb=wanted.shared_memory_mb,
    )


def wanted_by(recipe: Recipe, model: str) -> Wanted:
    """What the recipe asks for the model that lies at `model` (gs://). Raises as `container_of`
    does.
    """
    container, files = container_of(recipe), serving.artifact_of(recipe, model)
    return Wanted(container, files, fingerprint({"container": asdict(container), "files": files}))


def resources_of(recipe: Recipe) -> EndpointResources:
    """The machines behind an endpoint.

    Raises:
        WrongInput: there is no such machine (names the nearest), or it is none for an endpoint.
    """
    machine, (least, most) = recipe.serve.machine, recipe.serve.replicas
    if machine.flex_start:
        raise WrongInput(
            "serve.machine.flex_start is for jobs that may wait; an endpoint cannot: remove it, or"
            " set serve.machine.spot"
        )
    if least > most:
        raise WrongInput(
            f"serve.replicas [{least}, {most}]: the least is above the most; turn them round"
        )
    if reasons := check_machine(machine):
        raise WrongInput("; ".join(reasons).replace("launch.machine", "serve.machine"))
    accelerator, count = accelerators_of(machine)
    if accelerator is not None and accelerator.startswith("tpu"):
        raise WrongInput(
            f"serve.machine.type {machine.type} has TPUs, which ingot's servers do not run on; take"
            " a machine with GPUs or none"
        )
    spelt = vertex_accelerator(accelerator) if accelerator else None
    return EndpointResources(
        machine.type, spelt, count, least, most, machine.spot, _reservation(recipe)
    )


def _reservation(recipe: Recipe) -> str | None:
    name, cloud = recipe.serve.machine.reservation, recipe.cloud
    if name is None or "/" in name:
        return name
    if cloud.zone is None:
        raise WrongInput(
            f"serve.machine.reservation {name} lies in a zone; set cloud.zone, or write"
            f" projects/PROJECT/zones/ZONE/reservations/{name}"
        )
    return f"projects/{GoogleClients(cloud).project}/zones/{cloud.zone}/reservations/{name}"


MOST_LABELS, MOST_CHARACTERS = 64, 63
KEY = "ingot-key"
"""The label of a version that says which model it is, by `key_of`."""
CONTAINER, ENGINE = "ingot-container", "ingot-engine"
"""The labels of a version that say in which container it is, by `container.Wanted.mark`, and what
answers there.
"""
_ID_CHARACTERS = 45


def label(text: str) -> str:
    """`text` as the value of a label; where that loses something it ends in a hash of the whole."""
    plain = re.sub(r"[^a-z0-9_-]", "-", text.lower())
    return (
        plain
        if plain == text and len(plain) <= MOST_CHARACTERS
        else f"{plain[:_ID_CHARACTERS]}-{fingerprint(text)[:8]}"
    )


def resource_id(name: str) -> str:
    """The id of the model and the endpoint of a registered name. No two names have the same."""
    plain = re.sub(r"[^a-z0-9-]", "-", name.lower())
    same = plain == name and len(plain) <= _ID_CHARACTERS and not plain.endswith("-")
    return (
        f"ingot-{plain}"
        if same
        else f"ingot-{plain[:_ID_CHARACTERS].rstrip('-')}-{fingerprint(name)[:8]}"
    )


def key_of(model_hash: str, tokenizer_hash: str) -> str:
    """Which model it is, with which tokenizer: a folder in the bucket, and a label."""
    return label(f"{model_hash}-{tokenizer_hash}")


def labels_of(
    report: EvaluationReport, ours: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """Labels of a version: `ours`, then those of the recipe, then as many metrics as there is room
    for, to look at: `loss_bits_per_byte: 0_8123`.
    """
    labels = {**{label(key): label(value) for key, value in given.items()}, **ours}
    for key, metric in sorted(report.metrics.items()):
        name = _metric(key)
        if len(labels) < MOST_LABELS and name not in labels:
            labels[name] = number(metric.value)
    return labels


def number(value: float) -> str:
    """Six digits of a number, its point an underscore."""
    return f"{value:.6g}".replace(".", "_").replace("+", "")


def _metric(key: str) -> str:
    plain = re.sub(r"[^a-z0-9_-]", "_", key.lower())
    plain = plain if plain[:1].isalpha() else f"m_{plain}"
    return (
        plain
        if len(plain) <= MOST_CHARACTERS
        else f"{plain[:_ID_CHARACTERS]}_{fingerprint(key)[:8]}"
    )
