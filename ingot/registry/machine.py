"""`serve.machine` as Vertex AI spells it, and what an endpoint cannot have of it."""

from __future__ import annotations

from ingot.base.errors import WrongInput
from ingot.cloud.clients import Google
from ingot.cloud.endpoints import Resources
from ingot.cloud.machines import accelerators_of, check_machine, vertex_accelerator
from ingot.config.recipe import Recipe


def resources_of(recipe: Recipe) -> Resources:
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
    return Resources(machine.type, spelt, count, least, most, machine.spot, _reservation(recipe))


def _reservation(recipe: Recipe) -> str | None:
    name, cloud = recipe.serve.machine.reservation, recipe.cloud
    if name is None or "/" in name:
        return name
    if cloud.zone is None:
        raise WrongInput(
            f"serve.machine.reservation {name} lies in a zone; set cloud.zone, or write"
            f" projects/PROJECT/zones/ZONE/reservations/{name}"
        )
    return f"projects/{Google(cloud).project}/zones/{cloud.zone}/reservations/{name}"
