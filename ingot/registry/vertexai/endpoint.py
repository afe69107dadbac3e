"""What is deployed to an endpoint: the plan of a rollout, the requests it sends, and their text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput
from ingot.cloud.clients import GoogleClients
from ingot.cloud.instances import label
from ingot.cloud.vertex import endpoints
from ingot.cloud.vertex.endpoints import DeployedModel, EndpointResources, VertexEndpoint
from ingot.config.serving import RAW
from ingot.registry.versions import VertexVersion
from ingot.registry.vertexai.probe import AnswerCheck
from ingot.registry.vertexai.resources import resource_id


@dataclass(frozen=True)
class RolloutPlan:
    """What a rollout does: the version, its machines, and the way there. `share`: percent of the
    traffic it gets first, None for all at once; `check`: the prediction it must answer then.
    """

    version: VertexVersion
    resources: EndpointResources
    share: int | None
    check: AnswerCheck | None
    labels: dict[str, str]

    @property
    def name(self) -> str:
        return self.version.name

    @property
    def called(self) -> str:
        return f"{self.name} v{self.version.number}"

    def check_only_ours(self, endpoint: VertexEndpoint) -> None:
        """Raises WrongInput where the endpoint also serves a model that is not a version of this
        name, whose traffic must not be taken away.
        """
        ours = _in_project(self.version.resource)
        for deployed in endpoint.deployed:
            if _in_project(deployed.model) != ours:
                raise WrongInput(
                    f"the endpoint {endpoint.name} serves {deployed.model} too, which is no"
                    f" version of {self.name}; take it away there, rename the endpoint, or set"
                    " registry.name to another name"
                )

    def runs(self, deployed: DeployedModel) -> bool:
        """Whether a deployed model is this version on these machines."""
        return (
            f"{deployed.model}@{deployed.number}" == self.version.resource
            and deployed.resources == self.resources
        )


def find_endpoint(google: GoogleClients, name: str) -> VertexEndpoint | None:
    """The endpoint that serves a registered name, or None. Raises WrongInput where there are
    two.
    """
    found = endpoints.find(google, name)
    if len(found) > 1:
        names = " and ".join(endpoint.name for endpoint in found)
        raise WrongInput(
            f"two endpoints are called {name}: {names}; delete or rename the one that is not"
            " ingot's"
        )
    return found[0] if found else None


def render_rollout(google: GoogleClients, plan: RolloutPlan) -> str:
    """The requests of a rollout as text. Reads the endpoint and changes nothing."""
    endpoint, parts = find_endpoint(google, plan.name), list[str]()
    if endpoint is not None:
        plan.check_only_ours(endpoint)
    else:
        parts += ["CreateEndpoint", _text(create_request(google, plan))]
    name = endpoint.name if endpoint else f"{google.parent}/endpoints/{resource_id(plan.name)}"
    old = (
        [deployed for deployed in endpoint.deployed if not plan.runs(deployed)] if endpoint else []
    )
    if endpoint is None or len(old) == len(endpoint.deployed):
        parts += ["DeployModel", _text(deploy_request(google, plan, name, own_id="0"))]
    if old and plan.share is not None:
        parts.append(f"UpdateEndpoint: {plan.share} % of the traffic to {plan.called}")
    if plan.check is not None:
        parts.append(
            f"{'RawPredict' if plan.check.engine in RAW else 'Predict'}: {plan.check.prompt!r}"
        )
    parts.append(f"UpdateEndpoint: 100 % of the traffic to {plan.called}")
    parts += [f"UndeployModel: {deployed.id} (v{deployed.number})" for deployed in old]
    return "\n".join(parts) + "\n"


def _in_project(model: str) -> str:
    """A model's resource name without version and project, which the service writes sometimes by
    name and sometimes by number.
    """
    return model.partition("@")[0].partition("/locations/")[2]


def create_request(google: GoogleClients, plan: RolloutPlan) -> Any:
    return endpoints.create_request(
        google, resource_id(plan.name), plan.name, {**plan.labels, "ingot-verb": "deploy"}
    )


def deploy_request(google: GoogleClients, plan: RolloutPlan, endpoint: str, own_id: str) -> Any:
    return endpoints.deploy_request(
        google,
        endpoint,
        own_id=own_id,
        model=plan.version.resource,
        display_name=label(f"{plan.name}-v{plan.version.number}"),
        resources=plan.resources,
    )


def _text(request: Any) -> str:
    return str(
        type(request).to_json(
            request,
            use_integers_for_enums=False,
            always_print_fields_with_no_presence=False,
            sort_keys=True,
            indent=1,
        )
    )
