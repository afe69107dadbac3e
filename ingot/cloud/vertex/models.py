"""Model versions in Vertex AI's Model Registry. Plain values in and out; the registry room decides
what a version means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.cloud.clients import (
    AIPLATFORM,
    DENIED,
    NOT_FOUND,
    GoogleClients,
    call_api,
    http_status_of,
    list_all,
    message_types,
)
from ingot.cloud.vertex.jobs import running_operations, wait_for_operation
from ingot.config.serving import ServingContainer

_PAGE = 100


@dataclass(frozen=True)
class ModelVersion:
    """One version of a model; `model` is the resource name without the version."""

    model: str
    number: int
    display_name: str
    aliases: tuple[str, ...]
    labels: dict[str, str]
    created: float


def model_name(google: GoogleClients, model_id: str) -> str:
    return f"{google.parent}/models/{model_id}"


def upload_request(
    google: GoogleClients,
    model_id: str,
    *,
    first: bool,
    display_name: str,
    artifacts: str,
    container: ServingContainer,
    labels: Mapping[str, str],
    description: str,
) -> Any:
    """The request that creates a version of a model; with `first`, of a new model."""
    types = message_types(AIPLATFORM)
    spec = types.ModelContainerSpec(
        image_uri=container.image,
        command=container.command,
        args=container.args,
        ports=[types.Port(container_port=container.port)],
        env=[
            types.EnvVar(name=name, value=value)
            for name, value in sorted(container.environment.items())
        ],
        health_route=container.health,
        predict_route=container.predict,
        deployment_timeout={"seconds": container.timeout_s},
        shared_memory_size_mb=container.shared_memory_mb,
    )
    model = types.Model(
        display_name=display_name,
        version_description=description,
        artifact_uri=artifacts,
        container_spec=spec,
        labels=dict(labels),
    )
    which = {"model_id": model_id} if first else {"parent_model": model_name(google, model_id)}
    return types.UploadModelRequest(
        parent=google.parent,
        model=model,
        service_account=google.cloud.service_account or "",
        **which,
    )


def upload(google: GoogleClients, request: Any) -> int:
    """Create the version of `upload_request` and wait for it; returns its number."""
    what = f"register {request.model.display_name}"
    begun = call_api(
        google.client("models").upload_model,
        what,
        again=False,
        request=request,
        denied=DENIED,
    )
    made = wait_for_operation(google, "models", begun.operation.name, what, "UploadModelResponse")
    return int(made.model_version_id)


def running_uploads(google: GoogleClients, model_id: str) -> list[str]:
    """Unfinished operations on a model: an upload by another process."""
    return running_operations(google, "models", model_name(google, model_id))


def await_upload(google: GoogleClients, operation: str) -> None:
    """Wait until an upload by another process has ended, with success or not."""
    with _errors_ignored():
        wait_for_operation(google, "models", operation, "wait for another upload")


def versions(google: GoogleClients, model_id: str) -> list[ModelVersion]:
    """All versions of a model, oldest first; none if there is no such model."""
    name = model_name(google, model_id)
    try:
        found = list_all(
            google.client("models").list_model_versions,
            f"list the versions of {name}",
            request={"name": name, "page_size": _PAGE},
        )
    except WrongInput as error:
        if http_status_of(error) == NOT_FOUND:
            return []
        raise
    return sorted(map(_version, found), key=lambda version: version.number)


def models(google: GoogleClients) -> list[ModelVersion]:
    """The models of project and region, each with its default version."""
    found = list_all(
        google.client("models").list_models,
        f"list the models of {google.parent}",
        request={"parent": google.parent, "page_size": _PAGE},
    )
    return list(map(_version, found))


def change_aliases(
    google: GoogleClients,
    version: ModelVersion,
    *,
    add: Sequence[str] = (),
    remove: Sequence[str] = (),
) -> None:
    """Add and remove aliases of one version, by which it can be requested."""
    request = {
        "name": f"{version.model}@{version.number}",
        "version_aliases": [*add, *(f"-{alias}" for alias in remove)],
    }
    call_api(
        google.client("models").merge_version_aliases, f"name {request['name']}", request=request
    )


def update_labels(google: GoogleClients, version: ModelVersion, labels: Mapping[str, str]) -> None:
    """Replace the labels of one version."""
    types, name = message_types(AIPLATFORM), f"{version.model}@{version.number}"
    call_api(
        google.client("models").update_model,
        f"label {name}",
        request=types.UpdateModelRequest(
            model=types.Model(name=name, labels=dict(labels)), update_mask={"paths": ["labels"]}
        ),
    )


def _version(model: Any) -> ModelVersion:
    name, _, _ = model.name.partition("@")
    created = model.version_create_time.timestamp() if model.version_create_time else 0.0
    return ModelVersion(
        name,
        int(model.version_id),
        model.display_name,
        tuple(model.version_aliases),
        dict(model.labels),
        created,
    )


@contextmanager
def _errors_ignored() -> Iterator[None]:
    """Ignore errors: the outcome of another process's operation does not matter."""
    try:
        yield
    except (Failed, WrongInput):
        return
