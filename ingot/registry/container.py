"""What a container of an endpoint runs: what `config/serving.py` says for `serve.engine`, with an
image that Vertex AI can take. Only text.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from ingot.base.errors import WrongInput
from ingot.base.fingerprint import fingerprint
from ingot.cloud.images import image_of
from ingot.cloud.models import Container
from ingot.config import serving
from ingot.config.recipe import Recipe

_REGISTRY = re.compile(r"(?:([a-z]+-[a-z]+\d+)|[a-z]+)-docker\.pkg\.dev/")


@dataclass(frozen=True)
class Wanted:
    """What a recipe asks to be served with. `files` lie beside the model; `mark` tells both from
    what else the model is served with.
    """

    container: Container
    files: dict[str, str]
    mark: str


def container_of(recipe: Recipe) -> Container:
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
    return Container(
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
