"""Endpoints of Vertex AI and the models deployed to them. Plain values in and out; the registry
decides the order of operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import IngotError, WrongInput
from ingot.cloud.clients import (
    AIPLATFORM,
    DENIED,
    EXISTS,
    GoogleClients,
    call_api,
    google_packages,
    http_status_of,
    list_all,
    message_types,
)
from ingot.cloud.vertex.jobs import running_operations, wait_for_operation

_BY = "X-Vertex-AI-Deployed-Model-Id"
"""Header of a raw answer that names the deployed model that gave it."""


@dataclass(frozen=True)
class EndpointResources:
    """The machines behind a deployed model. `accelerator` under Vertex AI's name; `reservation` is
    a full name; `least` and `most` are replica counts.
    """

    machine: str
    accelerator: str | None = None
    accelerators: int = 0
    least: int = 1
    most: int = 1
    spot: bool = False
    reservation: str | None = None


@dataclass(frozen=True)
class DeployedModel:
    """A model deployed to an endpoint; `model` is the resource name without the version."""

    id: str
    model: str
    number: int
    resources: EndpointResources


@dataclass(frozen=True)
class VertexEndpoint:
    """`traffic` is in percent by deployed model id; one without traffic may be missing in it."""

    name: str
    display_name: str
    deployed: tuple[DeployedModel, ...]
    traffic: dict[str, int]
    etag: str
    labels: dict[str, str]


def find(google: GoogleClients, display_name: str) -> list[VertexEndpoint]:
    """The endpoints with this display name."""
    found = list_all(
        google.client("endpoints").list_endpoints,
        f"look for the endpoint {display_name}",
        denied=DENIED,
        request={"parent": google.parent, "filter": f'display_name="{display_name}"'},
    )
    return list(map(_endpoint, found))


def get(google: GoogleClients, name: str) -> VertexEndpoint:
    return _endpoint(
        call_api(google.client("endpoints").get_endpoint, f"look at {name}", request={"name": name})
    )


def create_request(
    google: GoogleClients, endpoint_id: str, display_name: str, labels: Mapping[str, str]
) -> Any:
    types = message_types(AIPLATFORM)
    endpoint = types.Endpoint(display_name=display_name, labels=dict(labels))
    return types.CreateEndpointRequest(
        parent=google.parent, endpoint_id=endpoint_id, endpoint=endpoint
    )


def create(google: GoogleClients, request: Any) -> str:
    """Create an endpoint and wait for it; returns its name. An existing one with this id is ours:
    an earlier answer was lost.
    """
    what = f"create the endpoint {request.endpoint_id}"
    name = f"{request.parent}/endpoints/{request.endpoint_id}"
    try:
        begun = call_api(
            google.client("endpoints").create_endpoint,
            what,
            request=request,
            denied=DENIED,
        )
        wait_for_operation(google, "endpoints", begun.operation.name, what, "Endpoint")
    except WrongInput as error:
        if http_status_of(error) != EXISTS:
            raise
        wait_until_idle(google, name)
    return name


def deploy_request(
    google: GoogleClients,
    endpoint: str,
    *,
    own_id: str,
    model: str,
    display_name: str,
    resources: EndpointResources,
) -> Any:
    """The request that deploys `model` (a version's full name) to an endpoint, without traffic."""
    types = message_types(AIPLATFORM)
    machine: dict[str, Any] = {"machine_type": resources.machine}
    if resources.accelerator:
        machine |= {
            "accelerator_type": types.AcceleratorType[resources.accelerator],
            "accelerator_count": resources.accelerators,
        }
    if resources.reservation:
        machine["reservation_affinity"] = types.ReservationAffinity(
            reservation_affinity_type=types.ReservationAffinity.Type.SPECIFIC_RESERVATION,
            key="compute.googleapis.com/reservation-name",
            values=[resources.reservation],
        )
    dedicated = types.DedicatedResources(
        machine_spec=types.MachineSpec(**machine),
        min_replica_count=resources.least,
        max_replica_count=resources.most,
        spot=resources.spot,
    )
    deployed = types.DeployedModel(
        id=own_id,
        model=model,
        display_name=display_name,
        dedicated_resources=dedicated,
        service_account=google.cloud.service_account or "",
    )
    return types.DeployModelRequest(endpoint=endpoint, deployed_model=deployed)


def begin_deploy(google: GoogleClients, request: Any) -> str:
    """Send the request of `deploy_request`; returns the name of the operation."""
    call = google.client("endpoints").deploy_model
    begun = call_api(
        call,
        _deploying(request),
        again=False,
        request=request,
        denied="ask for the roles Vertex AI User and Service Account User",
    )
    return str(begun.operation.name)


def await_deploy(google: GoogleClients, request: Any, operation: str) -> None:
    """Wait until the deployed model serves. Raises WrongInput or Failed with the service's message:
    quota, an image that cannot be pulled, an unhealthy container.
    """
    wait_for_operation(google, "endpoints", operation, _deploying(request), "DeployModelResponse")


def cancel_deploy(google: GoogleClients, operation: str) -> None:
    """Request cancellation of a deployment, which may complete all the same."""
    cancel = google.client("endpoints").cancel_operation
    call_api(cancel, f"give up {operation}", request={"name": operation})


def set_traffic(
    google: GoogleClients, endpoint: VertexEndpoint, traffic: Mapping[str, int]
) -> None:
    """Set the traffic split, on condition that the endpoint has not changed since it was
    read (etag).
    """
    types = message_types(AIPLATFORM)
    changed = types.Endpoint(name=endpoint.name, traffic_split=dict(traffic), etag=endpoint.etag)
    request = types.UpdateEndpointRequest(
        endpoint=changed, update_mask={"paths": ["traffic_split"]}
    )
    call_api(
        google.client("endpoints").update_endpoint,
        f"move the traffic of {endpoint.name}",
        again=False,
        request=request,
    )


def undeploy(google: GoogleClients, endpoint: str, deployed: str) -> None:
    """Undeploy a model that gets no traffic, and wait until it is gone."""
    what = f"undeploy {deployed} from {endpoint}"
    begun = call_api(
        google.client("endpoints").undeploy_model,
        what,
        again=False,
        request={"endpoint": endpoint, "deployed_model_id": deployed},
    )
    wait_for_operation(google, "endpoints", begun.operation.name, what)


def delete(google: GoogleClients, name: str) -> None:
    """Delete an endpoint without deployed models."""
    begun = call_api(
        google.client("endpoints").delete_endpoint, f"delete {name}", request={"name": name}
    )
    wait_for_operation(google, "endpoints", begun.operation.name, f"delete {name}")


def wait_until_idle(google: GoogleClients, name: str) -> None:
    """Wait until no operation is running on an endpoint: those started by a command that died
    continue without it.
    """
    for operation in running_operations(google, "endpoints", name):
        try:
            wait_for_operation(
                google,
                "endpoints",
                operation,
                f"wait for what is being done to {name}",
            )
        except IngotError:
            continue  # its outcome shows in the endpoint


def predict(
    google: GoogleClients, endpoint: str, texts: Sequence[str], parameters: Mapping[str, Any]
) -> tuple[list[Any], str]:
    """Predictions as plain values, and the id of the deployed model that made them, which depends
    on the traffic split.
    """
    types, value = message_types(AIPLATFORM), message_types("google.protobuf.struct_pb2").Value
    request = types.PredictRequest(endpoint=endpoint, parameters=dict(parameters))
    request.instances.extend(
        value(string_value=text) for text in texts
    )  # protobuf would take a list of values in the constructor for one value
    answer = call_api(
        google.client("predictions").predict, f"get a prediction from {endpoint}", request=request
    )
    plain = types.PredictResponse.to_dict(answer)
    return list(plain["predictions"]), answer.deployed_model_id


def raw_predict(
    google: GoogleClients, endpoint: str, body: Mapping[str, Any]
) -> tuple[Any, str | None]:
    """The same for a container with its own request format: the answer to `body`, and the id of the
    deployed model that gave it (None if the service does not say).

    A deployed model other than the intended one may answer such a body with an error, which counts
    as an answer.
    """
    url = f"{google.address(google.host('predictions'))}/v1/{endpoint}:rawPredict"

    def once(timeout: float) -> tuple[Any, str | None]:
        with google.session() as session:
            answer = session.post(url, json=dict(body), timeout=timeout)
            by = answer.headers.get(_BY)
            if by is None and not answer.ok:
                raise google_packages()["exceptions"].from_http_response(answer)
            try:
                return answer.json(), by
            except ValueError:
                return answer.text, by

    def call(retry: Any, timeout: float) -> tuple[Any, str | None]:
        found: tuple[Any, str | None] = (retry(once) if retry else once)(timeout)
        return found

    asked: tuple[Any, str | None] = call_api(call, f"get a prediction from {endpoint}")
    return asked


def _deploying(request: Any) -> str:
    return (
        f"deploy {request.deployed_model.display_name} on"
        f" {request.deployed_model.dedicated_resources.machine_spec.machine_type}"
    )


def _endpoint(endpoint: Any) -> VertexEndpoint:
    deployed = tuple(map(_deployed, endpoint.deployed_models))
    return VertexEndpoint(
        endpoint.name,
        endpoint.display_name,
        deployed,
        dict(endpoint.traffic_split),
        endpoint.etag,
        dict(endpoint.labels),
    )


def _deployed(deployed: Any) -> DeployedModel:
    model, _, number = deployed.model.partition("@")
    dedicated, machine = deployed.dedicated_resources, deployed.dedicated_resources.machine_spec
    reserved = machine.reservation_affinity.values
    resources = EndpointResources(
        machine.machine_type,
        machine.accelerator_type.name if machine.accelerator_type else None,
        machine.accelerator_count,
        dedicated.min_replica_count,
        dedicated.max_replica_count,
        dedicated.spot,
        reserved[0] if reserved else None,
    )
    return DeployedModel(
        deployed.id, model, int(deployed.model_version_id or number or 0), resources
    )
