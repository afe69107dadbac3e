"""The names of ingot's container images in Artifact Registry; `builds.py` builds them."""

from __future__ import annotations

import re
from typing import Literal, get_args

from ingot.base.errors import WrongInput
from ingot.cloud.clients import GoogleClients
from ingot.config.sections.deployment import Cloud

ImageKind = Literal["train", "spark", "serve"]
KINDS: tuple[ImageKind, ...] = get_args(ImageKind)
_REPOSITORY = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


def image_of(cloud: Cloud, kind: ImageKind) -> str:
    """The image that jobs of a kind run: `cloud.images.KIND`, or the newest one built into
    `cloud.repository`.

    Raises:
        WrongInput: neither is set, or no project is known.
    """
    given: str | None = getattr(cloud.images, kind)
    if given is None and cloud.repository is None:
        raise WrongInput(
            f"no container image for {kind}; set cloud.images.{kind}, or cloud.repository and run"
            f" `ingot images build {kind}`"
        )
    return given or f"{untagged_name(cloud, kind)}:latest"


def untagged_name(cloud: Cloud, kind: ImageKind) -> str:
    """The image name without a tag: `REGION-docker.pkg.dev/PROJECT/REPOSITORY/ingot-KIND`.

    Raises:
        WrongInput: there is no repository or no project, or the repository's name is invalid.
    """
    repository = cloud.repository
    if repository is None:
        raise WrongInput(
            "no repository for container images; set cloud.repository to one of Artifact Registry"
        )
    if not _REPOSITORY.fullmatch(repository):
        raise WrongInput(
            f"cloud.repository {repository!r} is no name of a repository (lower case letters,"
            " digits, hyphens); give its name alone"
        )
    # A domain-scoped project is `example.com:name` as an id, and `example.com/name` in image names.
    project = GoogleClients(cloud).project.replace(":", "/")
    return f"{cloud.region}-docker.pkg.dev/{project}/{repository}/ingot-{kind}"
