"""Vertex AI's Model Registry, endpoints and predictions, with their state: `install(server)`
answers on a `tests.fakes.google.Server`.

Uploads and deployments take time and may fail; labels, ids and the sharing of traffic are checked
as Google documents them. `served` is what served an endpoint over time. A deployed model answers by
`answer`, which a test may replace by a real server.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

from tests.fakes.google import Call, Refused, Server
from tests.fakes.google import _Handler as Plain
from tests.lazy import lazy

types = lazy("google.cloud.aiplatform_v1")
operations_pb2 = lazy("google.longrunning.operations_pb2")
json_format = lazy("google.protobuf.json_format")
struct_pb2 = lazy("google.protobuf.struct_pb2")
status_pb2 = lazy("google.rpc.status_pb2")

MACHINES = re.compile(
    r"(n1|n2|e2|c2|c3|a2|a3|g2)-(standard|highmem|highcpu|highgpu|megagpu|ultragpu)-\d+g?"
)
BRING_THEIRS = {"a2": "NVIDIA_TESLA_A100", "g2": "NVIDIA_L4"}


@dataclass
class State:
    """`models` by id: versions by number. `endpoints` by full name. Both are the client's own
    messages.
    """

    server: Server
    project: str = "proj"
    region: str = "us-central1"
    objects: Callable[[], list[str]] | None = None
    """Names `BUCKET/OBJECT` that there are; what a model's artifacts are looked for in. None: not
    looked.
    """
    models: dict[str, dict[int, types.Model]] = field(default_factory=dict)
    endpoints: dict[str, types.Endpoint] = field(default_factory=dict)
    served: dict[str, list[tuple[float, dict[int, int]]]] = field(default_factory=dict)
    deploy_errors: list[Refused] = field(default_factory=list)
    polls: int = 1
    page: int = 2
    asked: int = 0
    answer: Callable[[types.DeployedModel, list[Any], dict[str, Any]], list[Any]] = (
        lambda deployed, instances, parameters: [
            f"{instance} from v{deployed.model_version_id}" for instance in instances
        ]
    )

    raw: Callable[[types.DeployedModel, dict[str, Any]], tuple[int, Any]] | None = None
    """What a deployed model's container says to a raw prediction: status and JSON."""
    says_who: bool = True
    """Whether a raw answer names the deployed model in its headers."""
    misses: int = 0
    """So many predictions go on by the traffic of before, as while a new share spreads: to whatever
    was deployed first.
    """

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.region}"

    @property
    def endpoint(self) -> types.Endpoint:
        """The only one."""
        (found,) = self.endpoints.values()
        return found

    def versions_serving(self) -> dict[int, int]:
        """Percent by version, of the only endpoint."""
        return self.served[self.endpoint.name][-1][1]

    def gaps(self, name: str | None = None) -> list[dict[int, int]]:
        """Moments since something served in which not all of the traffic was served. [] when there
        was none.
        """
        turns = [shares for _, shares in self.served[name or self.endpoint.name]]
        first = next((number for number, shares in enumerate(turns) if shares), len(turns))
        return [shares for shares in turns[first:] if sum(shares.values()) != 100]

    def alias(self, model: str, alias: str) -> int | None:
        return next(
            (
                number
                for number, version in self.models[model].items()
                if alias in version.version_aliases
            ),
            None,
        )


def install(server: Server) -> State:
    state = State(server)
    for name in (
        "upload_model",
        "list_model_versions",
        "list_models",
        "merge_version_aliases",
        "update_model",
    ):
        server.on(f"ModelService.{_camel(name)}", _bound(state, name))
    for name in (
        "create_endpoint",
        "get_endpoint",
        "list_endpoints",
        "update_endpoint",
        "deploy_model",
        "undeploy_model",
        "delete_endpoint",
        "list_operations",
        "cancel_operation",
    ):
        server.on(f"EndpointService.{_camel(name)}", _bound(state, name))
    server.on("ModelService.ListOperations", _bound(state, "list_operations"))
    server.on("PredictionService.Predict", _bound(state, "predict"))
    server.RequestHandlerClass = _raw_handler(state)
    return state


def _camel(name: str) -> str:
    return "".join(part.title() for part in name.split("_"))


def _bound(state: State, name: str) -> Callable[[Any], Any]:
    return lambda request: _HANDLERS[name](state, request)


def _place(state: State, name: str) -> None:
    """Project and region of a resource's name."""
    found = re.match(r"projects/([^/]+)/locations/([^/]+)", name)
    if found is None:
        raise Refused(400, f"Invalid resource name {name}")
    if found[1] != state.project:
        raise Refused(
            403, f"Permission denied on resource project {found[1]} (or it may not exist)."
        )
    if found[2] != state.region:
        raise Refused(400, f"The request is for {found[2]}, this is {state.region}.")


def _check_labels(labels: dict[str, str]) -> None:
    if len(labels) > 64:
        raise Refused(400, "More than 64 labels.")
    for key, value in labels.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key) or not re.fullmatch(
            r"[a-z0-9_-]{0,63}", value
        ):
            raise Refused(400, f"Invalid label {key}={value}.")


def _idle(state: State, thing: str) -> None:
    if any(
        name.startswith(f"{thing}/operations/") and not one.message.done
        for name, one in state.server.operations.items()
    ):
        raise Refused(
            400, f"{thing} is being operated on by another operation. Please try again later."
        )


def upload_model(state: State, request: Any) -> Any:
    _place(state, request.parent)
    model, spec = request.model, request.model.container_spec
    if bool(request.model_id) == bool(request.parent_model):
        raise Refused(400, "Exactly one of model_id and parent_model must be given.")
    if request.model_id and not re.fullmatch(r"[a-z_][a-z0-9_-]{0,62}", request.model_id):
        raise Refused(400, f"Invalid model_id {request.model_id}.")
    model_id = request.model_id or request.parent_model.rpartition("/")[2]
    if request.model_id and model_id in state.models:
        raise Refused(409, f"Model {model_id} already exists.")
    if request.parent_model and (
        request.parent_model != f"{state.parent}/models/{model_id}" or model_id not in state.models
    ):
        raise Refused(404, f"Model {request.parent_model} not found.")
    if not model.display_name or len(model.display_name) > 128:
        raise Refused(400, "display_name is required, of at most 128 characters.")
    _check_labels(dict(model.labels))
    if not re.match(r"([a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io)/.+/.+", spec.image_uri):
        raise Refused(
            400, f"Image {spec.image_uri} is not in Artifact Registry or Container Registry."
        )
    if any(not route.startswith("/") for route in (spec.predict_route, spec.health_route) if route):
        raise Refused(400, "Routes begin with a slash.")
    if not re.fullmatch(r"gs://[^/]+/.+", model.artifact_uri):
        raise Refused(400, f"Invalid artifact_uri {model.artifact_uri}.")
    if state.objects is not None and not any(
        name.startswith(model.artifact_uri.removeprefix("gs://") + "/") for name in state.objects()
    ):
        raise Refused(400, f"There are no files under {model.artifact_uri}.")

    def done() -> Any:
        known = state.models.setdefault(model_id, {})
        number = max(known, default=0) + 1
        made = types.Model(model)
        made.name, made.version_id = f"{state.parent}/models/{model_id}@{number}", str(number)
        made.version_aliases = [] if known else ["default"]
        made.version_create_time = {"seconds": int(time.time())}
        known[number] = made
        return types.UploadModelResponse(
            model=f"{state.parent}/models/{model_id}", model_version_id=str(number)
        )

    return state.server.operation(f"{state.parent}/models/{model_id}", done, polls=state.polls)


def _paged(state: State, found: list[Any], request: Any) -> tuple[list[Any], str]:
    begin = int(request.page_token or 0)
    size = min(request.page_size or state.page, state.page)
    return found[begin : begin + size], str(begin + size) if begin + size < len(found) else ""


def list_model_versions(state: State, request: Any) -> Any:
    _place(state, request.name)
    known = state.models.get(request.name.rpartition("/")[2])
    if known is None:
        raise Refused(404, f"The Model {request.name} does not exist.")
    page, token = _paged(state, [known[number] for number in sorted(known, reverse=True)], request)
    return types.ListModelVersionsResponse(models=page, next_page_token=token)


def list_models(state: State, request: Any) -> Any:
    _place(state, request.parent)
    defaults = []
    for known in state.models.values():
        model = types.Model(
            next(version for version in known.values() if "default" in version.version_aliases)
        )
        model.name = model.name.partition("@")[0]
        defaults.append(model)
    page, token = _paged(state, defaults, request)
    return types.ListModelsResponse(models=page, next_page_token=token)


def _model(state: State, name: str) -> tuple[dict[int, types.Model], int]:
    """The versions of a model, and the number that the name asks for."""
    _place(state, name)
    found = re.fullmatch(r".+/models/([^/@]+)@(\d+)", name)
    if found is None or int(found[2]) not in state.models.get(found[1], {}):
        raise Refused(404, f"Model version {name} not found.")
    return state.models[found[1]], int(found[2])


def merge_version_aliases(state: State, request: Any) -> Any:
    known, number = _model(state, request.name)
    for alias in request.version_aliases:
        if not re.fullmatch(r"-?[a-z][a-zA-Z0-9-]{0,126}[a-z0-9]", alias):
            raise Refused(400, f"Invalid alias {alias}.")
        holder = next(
            (
                other
                for other, version in known.items()
                if alias.removeprefix("-") in version.version_aliases
            ),
            None,
        )
        if alias.startswith("-") and holder == number:
            known[number].version_aliases = [
                one for one in known[number].version_aliases if one != alias[1:]
            ]
        elif not alias.startswith("-") and holder not in (None, number):
            raise Refused(400, f"Alias {alias} is that of version {holder}.")
        elif not alias.startswith("-") and holder is None:
            known[number].version_aliases = [*known[number].version_aliases, alias]
    return known[number]


def update_model(state: State, request: Any) -> Any:
    known, number = _model(state, request.model.name)
    if list(request.update_mask.paths) != ["labels"]:
        raise Refused(400, f"Cannot update {request.update_mask.paths}.")
    _check_labels(dict(request.model.labels))
    known[number].labels = dict(request.model.labels)
    return known[number]


def create_endpoint(state: State, request: Any) -> Any:
    _place(state, request.parent)
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?|[1-9]\d{0,8}", request.endpoint_id):
        raise Refused(400, f"Invalid endpoint_id {request.endpoint_id}.")
    name = f"{request.parent}/endpoints/{request.endpoint_id}"
    if name in state.endpoints or any(
        one.startswith(f"{name}/") and not it.message.done
        for one, it in state.server.operations.items()
    ):
        raise Refused(409, f"Endpoint {name} already exists.")
    if not request.endpoint.display_name:
        raise Refused(400, "display_name is required.")
    _check_labels(dict(request.endpoint.labels))

    def done() -> Any:
        made = types.Endpoint(request.endpoint)
        made.name, made.etag = name, str(state.server.number())
        state.endpoints[name] = made
        state.served.setdefault(name, [])
        return made

    return state.server.operation(name, done, polls=state.polls)


def _endpoint(state: State, name: str) -> types.Endpoint:
    _place(state, name)
    if name not in state.endpoints:
        raise Refused(404, f"Endpoint {name} not found.")
    return state.endpoints[name]


def get_endpoint(state: State, request: Any) -> Any:
    return _endpoint(state, request.name)


def list_endpoints(state: State, request: Any) -> Any:
    _place(state, request.parent)
    wanted = re.fullmatch(r'display_name="([^"]*)"', request.filter)
    if wanted is None:
        raise Refused(400, f"Invalid filter {request.filter}.")
    page, token = _paged(
        state,
        [endpoint for endpoint in state.endpoints.values() if endpoint.display_name == wanted[1]],
        request,
    )
    return types.ListEndpointsResponse(endpoints=page, next_page_token=token)


def _share(state: State, endpoint: types.Endpoint, traffic: dict[str, int]) -> None:
    known = {deployed.id: int(deployed.model_version_id) for deployed in endpoint.deployed_models}
    if unknown := set(traffic) - set(known):
        raise Refused(400, f"Traffic for {unknown}, which is not deployed.")
    if traffic and (
        sum(traffic.values()) != 100 or any(not 0 <= share <= 100 for share in traffic.values())
    ):
        raise Refused(400, f"Traffic {traffic} does not add up to 100.")
    endpoint.traffic_split = traffic
    _changed(state, endpoint)


def _changed(state: State, endpoint: types.Endpoint) -> None:
    """A new etag, and what serves now into the record."""
    endpoint.etag = str(state.server.number())
    known = {deployed.id: int(deployed.model_version_id) for deployed in endpoint.deployed_models}
    shares: dict[int, int] = {}
    for deployed, share in endpoint.traffic_split.items():
        if share and deployed in known:
            shares[known[deployed]] = shares.get(known[deployed], 0) + share
    state.served[endpoint.name].append((time.monotonic(), shares))


def update_endpoint(state: State, request: Any) -> Any:
    endpoint = _endpoint(state, request.endpoint.name)
    if list(request.update_mask.paths) != ["traffic_split"]:
        raise Refused(400, f"Cannot update {request.update_mask.paths}.")
    if request.endpoint.etag and request.endpoint.etag != endpoint.etag:
        raise Refused(409, "The etag is that of an older state.")
    _share(state, endpoint, dict(request.endpoint.traffic_split))
    return endpoint


def deploy_model(state: State, request: Any) -> Any:
    endpoint, deployed = (
        _endpoint(state, request.endpoint),
        types.DeployedModel(request.deployed_model),
    )
    _idle(state, endpoint.name)
    _, number = _model(state, deployed.model)
    if deployed.id and (
        not re.fullmatch(r"[0-9]{1,10}", deployed.id)
        or deployed.id in {one.id for one in endpoint.deployed_models}
    ):
        raise Refused(400, f"Invalid id {deployed.id} of a deployed model.")
    _check_machine(deployed.dedicated_resources)
    error = state.deploy_errors.pop(0) if state.deploy_errors else None

    def done() -> Any:
        deployed.id = deployed.id or str(state.server.number())
        deployed.model_version_id = str(number)
        deployed.model = deployed.model.partition("@")[0]
        endpoint.deployed_models = [*endpoint.deployed_models, deployed]
        if request.traffic_split:
            _share(
                state,
                endpoint,
                {
                    deployed.id if key == "0" else key: share
                    for key, share in request.traffic_split.items()
                },
            )
        else:
            _changed(state, endpoint)
        return types.DeployModelResponse(deployed_model=deployed)

    return state.server.operation(endpoint.name, done, polls=state.polls, error=error)


def _check_machine(dedicated: Any) -> None:
    machine = dedicated.machine_spec
    if not MACHINES.fullmatch(machine.machine_type):
        raise Refused(400, f"Machine type {machine.machine_type} is not supported.")
    if not 1 <= dedicated.min_replica_count <= dedicated.max_replica_count:
        raise Refused(400, "min_replica_count must be at least 1, and not above max_replica_count.")
    if bool(machine.accelerator_type) != bool(machine.accelerator_count):
        raise Refused(400, "accelerator_type and accelerator_count go together.")
    wanted = BRING_THEIRS.get(machine.machine_type.partition("-")[0])
    if wanted and machine.accelerator_type.name != wanted:
        raise Refused(400, f"Machine type {machine.machine_type} needs accelerator_type {wanted}.")


def undeploy_model(state: State, request: Any) -> Any:
    endpoint = _endpoint(state, request.endpoint)
    _idle(state, endpoint.name)
    if request.deployed_model_id not in {one.id for one in endpoint.deployed_models}:
        raise Refused(404, f"DeployedModel {request.deployed_model_id} not found.")
    is_last = len(endpoint.deployed_models) == 1
    if endpoint.traffic_split.get(request.deployed_model_id) and not is_last:
        raise Refused(400, f"DeployedModel {request.deployed_model_id} has traffic.")

    def done() -> Any:
        endpoint.deployed_models = [
            one for one in endpoint.deployed_models if one.id != request.deployed_model_id
        ]
        _share(
            state,
            endpoint,
            (
                {}
                if is_last
                else {
                    key: share
                    for key, share in endpoint.traffic_split.items()
                    if key != request.deployed_model_id
                }
            ),
        )
        return types.UndeployModelResponse()

    return state.server.operation(endpoint.name, done, polls=state.polls)


def delete_endpoint(state: State, request: Any) -> Any:
    endpoint = _endpoint(state, request.name)
    _idle(state, endpoint.name)
    if endpoint.deployed_models:
        raise Refused(400, f"Endpoint {request.name} has deployed models.")

    def done() -> Any:
        del state.endpoints[request.name]
        return types.DeleteOperationMetadata()

    return state.server.operation(endpoint.name, done, polls=state.polls)


def list_operations(state: State, request: Any) -> Any:
    _place(state, request.name)
    operations = [
        one.message
        for name, one in state.server.operations.items()
        if name.startswith(f"{request.name}/operations/")
    ]
    model = re.search(r"/models/([^/]+)$", request.name)
    if (
        not operations
        and request.name not in state.endpoints
        and not (model and model[1] in state.models)
    ):
        raise Refused(404, f"{request.name} not found.")
    return operations_pb2.ListOperationsResponse(operations=operations)


def cancel_operation(state: State, request: Any) -> None:
    operation = state.server.operations[request.name].message
    if not operation.done:
        operation.error.CopyFrom(status_pb2.Status(code=1, message="CANCELLED"))
        operation.done = True


def _by_traffic(state: State, name: str) -> types.DeployedModel:
    """Who answers the next prediction."""
    endpoint = _endpoint(state, name)
    if state.misses and endpoint.deployed_models:
        state.misses -= 1
        return endpoint.deployed_models[0]
    state.asked += 37
    at, chosen = state.asked % 100, None
    for deployed, share in sorted(endpoint.traffic_split.items()):
        chosen = chosen or (deployed if at < share else None)
        at -= share
    if chosen is None:
        raise Refused(400, f"Endpoint {name} has no deployed model with traffic.")
    return next(one for one in endpoint.deployed_models if one.id == chosen)


def _raw_handler(state: State) -> type[BaseHTTPRequestHandler]:
    """Raw predictions are the container's own answers, with who gave them in the headers, which no
    client's message has.
    """

    class Handler(Plain):
        def do_POST(self) -> None:
            raw = re.fullmatch(r"/v1/(projects/.+/endpoints/[^/:]+):rawPredict", unquote(self.path))
            if raw is None or state.raw is None:
                self._answer()
                return
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.server.lock:
                state.server.calls.append(Call("PredictionService.RawPredict", body))
                deployed = _by_traffic(state, raw[1])
            code, answer = state.raw(deployed, body)
            content = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            if state.says_who:
                self.send_header("X-Vertex-AI-Endpoint-Id", raw[1].rpartition("/")[2])
                self.send_header("X-Vertex-AI-Deployed-Model-Id", deployed.id)
            self.end_headers()
            self.wfile.write(content)

    return Handler


def predict(state: State, request: Any) -> Any:
    if not request.instances:
        raise Refused(400, "There is no instance.")
    deployed = _by_traffic(state, request.endpoint)
    plain = json_format.MessageToDict(types.PredictRequest.pb(request))
    answers = state.answer(deployed, plain["instances"], plain.get("parameters") or {})
    response = types.PredictResponse(
        deployed_model_id=deployed.id,
        model=deployed.model,
        model_version_id=deployed.model_version_id,
    )
    response.predictions.extend(
        json_format.ParseDict(answer, struct_pb2.Value()) for answer in answers
    )
    return response


_HANDLERS: dict[str, Callable[[State, Any], Any]] = {
    handler.__name__: handler
    for handler in (
        upload_model,
        list_model_versions,
        list_models,
        merge_version_aliases,
        update_model,
        create_endpoint,
        get_endpoint,
        list_endpoints,
        update_endpoint,
        deploy_model,
        undeploy_model,
        delete_endpoint,
        list_operations,
        cancel_operation,
        predict,
    )
}
