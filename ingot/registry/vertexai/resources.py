"""What a recipe asks of Vertex AI for serving: the container, the machines, and resource names and
labels. Pure functions of the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.reports import EvaluationReport
from ingot.cloud.clients import GoogleClients
from ingot.cloud.images import image_of
from ingot.cloud.instances import label
from ingot.cloud.machines import accelerators_of, check_machine, vertex_accelerator
from ingot.cloud.vertex.endpoints import EndpointResources
from ingot.config import serving
from ingot.config.recipe import Recipe
from ingot.config.serving import ServingContainer

_REGISTRY = re.compile(r"(?:([a-z]+-[a-z]+\d+)|[a-z]+)-docker\.pkg\.dev/")


@dataclass(frozen=True)
class ServingSpec:
    """How a recipe serves a model: the container, and the files beside the model that it reads.
    `mark` is a fingerprint of both.
    """

    container: ServingContainer
    files: dict[str, str]
    mark: str


def container_of(recipe: Recipe) -> ServingContainer:
    """The container of `serve.engine`, whose image an endpoint can take.

    Raises:
        WrongInput: no image is set, it is outside Artifact Registry or in another region, or the
            engine cannot use the machine or read the model.
    """
    engine, container = recipe.serve.engine, serving.container_of(recipe)
    image = container.image or image_of(recipe.cloud, "serve")
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
    # Google's own account may read the artifact alone, which holds Triton's repository; weights lie
    # beside it.
    if engine == "triton" and not recipe.cloud.service_account:
        raise WrongInput(
            "serve.engine triton reads the model's weights from cloud.bucket, and an endpoint's"
            " default account may not; set cloud.service_account to one that may"
        )
    return replace(container, image=image)


def serving_spec(recipe: Recipe, model: str) -> ServingSpec:
    """How the recipe serves the model at the URL `model`. Raises as `container_of` does."""
    container, files = container_of(recipe), serving.artifact_of(recipe, model)
    return ServingSpec(
        container, files, fingerprint({"container": asdict(container), "files": files})
    )


def kept_image(name: str, number: int, image: str) -> str | None:
    """That a version which is there already may not serve with what a tag names now, in words: the
    service copies the image when a version is made. None for an image by its digest.
    """
    if "@" in image:
        return None
    return (
        f"{name} v{number} was registered before and serves with what {image} was then; to serve"
        " with one that was built since, set serve.image to NAME@sha256:... (`ingot images build`"
        " prints it), and register again"
    )


def machine_resources(recipe: Recipe) -> EndpointResources:
    """The machines of an endpoint.

    Raises:
        WrongInput: there is no such machine type (names the nearest), or endpoints cannot use it.
    """
    machine, (least, most) = recipe.serve.machine, recipe.serve.replicas
    if machine.flex_start:
        raise WrongInput(
            "serve.machine.flex_start is for jobs that may wait; an endpoint cannot: remove it, or"
            " set serve.machine.spot"
        )
    if least > most:
        raise WrongInput(
            f"serve.replicas [{least}, {most}]: the least is above the most; swap them"
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


MAX_LABELS, MAX_CHARACTERS = 64, 63
KEY = "ingot-key"
"""The label of a version with its model's key, from `model_key`."""
CONTAINER, ENGINE = "ingot-container", "ingot-engine"
"""The labels of a version with the mark of its container (`ServingSpec.mark`) and its engine."""
_ID_CHARACTERS = 45


def resource_id(name: str) -> str:
    """The id of model and endpoint of a registered name, unique per name."""
    plain = re.sub(r"[^a-z0-9-]", "-", name.lower())
    same = plain == name and len(plain) <= _ID_CHARACTERS and not plain.endswith("-")
    return (
        f"ingot-{plain}"
        if same
        else f"ingot-{plain[:_ID_CHARACTERS].rstrip('-')}-{fingerprint(name)[:8]}"
    )


def model_key(model_hash: str, tokenizer_hash: str) -> str:
    """The key of a model with its tokenizer: the name of its folder in the bucket, and a label."""
    return label(f"{model_hash}-{tokenizer_hash}")


def version_labels(
    report: EvaluationReport, ours: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """Labels of a version: `ours`, those of the recipe, and as many metrics as fit, such as
    `loss_bits_per_byte: 0_8123`.
    """
    labels = {**{label(key): label(value) for key, value in given.items()}, **ours}
    for key, metric in sorted(report.metrics.items()):
        name = _metric_label(key)
        if len(labels) < MAX_LABELS and name not in labels:
            labels[name] = label_number(metric.value)
    return labels


def version_description(report: EvaluationReport) -> str:
    """A version in one line, for the cloud console."""
    metrics = ", ".join(
        f"{key} {metric.value:.6g}" for key, metric in sorted(report.metrics.items())[:5]
    )
    return f"model {report.model_hash}, tokenizer {report.tokenizer_hash}; {metrics}"


def label_number(value: float) -> str:
    """A number with six significant digits, its decimal point an underscore."""
    return f"{value:.6g}".replace(".", "_").replace("+", "")


def _metric_label(key: str) -> str:
    plain = re.sub(r"[^a-z0-9_-]", "_", key.lower())
    plain = plain if plain[:1].isalpha() else f"m_{plain}"
    return (
        plain
        if len(plain) <= MAX_CHARACTERS
        else f"{plain[:_ID_CHARACTERS]}_{fingerprint(key)[:8]}"
    )
