"""`ingot deploy`: makes a registered version live. In the local registry that moves the live
pointer; with Vertex AI the version is rolled out to an endpoint first (`vertexai/rollout.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.cloud.clients import GoogleClients
from ingot.cloud.instances import label, user_labels
from ingot.config.recipe import Recipe
from ingot.registry.verbs import (
    approved_report,
    expected_live_version,
    local_model_folder,
    registry_of,
)
from ingot.registry.versions import (
    LocalVersion,
    ModelRegistry,
    RegisteredVersion,
    VertexVersion,
    another_live,
    newest_version,
)
from ingot.registry.vertexai import objects
from ingot.registry.vertexai.endpoint import RolloutPlan, find_endpoint, render_rollout
from ingot.registry.vertexai.probe import SHARE, AnswerCheck, local_answer
from ingot.registry.vertexai.registry import VertexRegistry
from ingot.registry.vertexai.resources import machine_resources
from ingot.registry.vertexai.rollout import roll_out

BY_HAND = "by hand"
"""The reason in the history where no gate decided."""
ROLLED_BACK = "rolled back by hand"


@dataclass(frozen=True)
class DeployRequest:
    """The options of `ingot deploy`. `canary`: percent of the traffic that the new version gets
    first; `verify`: compare its answer with the local model's; `back`: roll back.
    """

    number: int | None = None
    canary: int | None = None
    verify: bool = False
    back: bool = False


def deploy(
    recipe: Recipe, name: str, request: DeployRequest, *, is_run: bool = False
) -> RegisteredVersion:
    """Make a version live and return it: the version of a given number, the previous one
    (`request.back`), or the newest, unless its gate refused it.

    `is_run`: the recipe belongs to a run; with Vertex AI that run's own version is deployed then,
    if the gate approved it.

    Raises:
        WrongInput: no such version, its files are damaged, the gate did not approve it, or the
            registry does not support an option.
        Failed: the new version does not start, or another command deploys this name; the old
            version then keeps serving.
    """
    _check_request(recipe, request)
    registry = registry_of(recipe)
    if isinstance(registry, VertexRegistry):
        version, reason, instead_of = _choose_version(recipe, registry, name, request, is_run)
        registry.check(version)
        plan = _plan_rollout(recipe, version, request, registry)

        def allow(live: int | None) -> None:
            if request.back and registry.previous(name).number != version.number:
                raise another_live(name)
            if live != version.number:
                objects.check_expected_live(name, live, instead_of)

        def commit() -> None:
            if request.back:
                registry.rollback(name, reason, to=version.number)
            else:
                registry.point(name, version.number, reason, instead_of=instead_of)

        roll_out(
            GoogleClients(recipe.cloud), plan, lambda: _live_number(registry, name), allow, commit
        )
        return version
    if request.back:
        before: RegisteredVersion = registry.rollback(name, ROLLED_BACK)
        return before
    chosen = _choose_local(registry, name, request)
    registry.check(chosen, checksums=True)
    registry.point(name, chosen.number, BY_HAND)
    return chosen


def render_deploy(
    recipe: Recipe, name: str, request: DeployRequest, *, is_run: bool = False
) -> str:
    """What `deploy` would do, as text; changes nothing."""
    _check_request(recipe, request)
    registry = registry_of(recipe)
    if isinstance(registry, VertexRegistry):
        version, _, _ = _choose_version(recipe, registry, name, request, is_run)
        return render_rollout(
            GoogleClients(recipe.cloud), _plan_rollout(recipe, version, request, None)
        )
    chosen = _choose_local(registry, name, request)
    return f"{name} v{chosen.number} live, in {registry.place}\n"


def address(recipe: Recipe, name: str) -> str | None:
    """The endpoint that serves a name; None for the local registry or where there is none yet."""
    endpoint = (
        find_endpoint(GoogleClients(recipe.cloud), name)
        if recipe.registry.kind == "vertex"
        else None
    )
    return endpoint.name if endpoint else None


def _check_request(recipe: Recipe, request: DeployRequest) -> None:
    """Refuse options that contradict each other or the registry, before any service is called."""
    if request.back and request.number is not None:
        raise WrongInput(
            f"--rollback and --version {request.number} exclude each other; give one of them"
        )
    if request.canary is not None and not 1 <= request.canary <= 99:
        raise WrongInput(
            f"--canary {request.canary} is no share of the traffic; give 1 to 99 percent, or leave"
            " it out"
        )
    if recipe.registry.kind == "local" and (request.canary is not None or request.verify):
        raise WrongInput(
            "--canary and --verify are for an endpoint, and the local registry has none; leave them"
            " out, or set registry.kind=vertex"
        )


def _choose_version(
    recipe: Recipe, registry: VertexRegistry, name: str, request: DeployRequest, is_run: bool
) -> tuple[VertexVersion, str, int | None]:
    """The version, the reason, and which version must be live until then (-1: any)."""
    if request.back:
        return registry.previous(name), ROLLED_BACK, -1
    if request.number is not None:
        return registry.version(name, request.number), BY_HAND, -1
    if not is_run:
        version: VertexVersion = _newest_allowed(registry, name)
        return version, BY_HAND, -1
    report, decided = approved_report(recipe)
    found = registry.find(name, report)
    if found is None:
        raise WrongInput(
            f"the model of {recipe.folder.root} is not registered as {name} in {registry.place};"
            " run `ingot register` first"
        )
    if not registry.has_container(found):
        raise WrongInput(
            f"{name} v{found.number} has another container than the recipe now asks for (serve,"
            " cloud.images); run `ingot register` first"
        )
    live = registry.live(name)
    is_live = live is not None and live.number == found.number
    if not is_live and any(change.version == found.number for change in registry.history(name)):
        raise WrongInput(
            f"{name} v{found.number} was live and was replaced or rolled back since; --version"
            f" {found.number} deploys it all the same"
        )
    # The same model in another container: the decision that made it live still holds.
    stands = live is not None and (live.model_hash, live.tokenizer_hash) == (
        found.model_hash,
        found.tokenizer_hash,
    )
    return (
        found,
        f"gate: {decided['reason']}",
        live.number
        if live is not None and stands
        else expected_live_version(registry, name, decided),
    )


def _choose_local(
    registry: ModelRegistry[LocalVersion], name: str, request: DeployRequest
) -> LocalVersion:
    """The version of the local registry that a request is about."""
    if request.back:
        return registry.previous(name)
    if request.number is not None:
        return registry.version(name, request.number)
    newest: LocalVersion = _newest_allowed(registry, name)
    return newest


def _newest_allowed(registry: ModelRegistry[Any], name: str) -> Any:
    """The newest version of a name.

    Raises:
        WrongInput: its gate refused it, and nobody made it live since; also where nothing is live
            yet, as below a floor.
    """
    newest = newest_version(registry, name)
    # In the local registry a version goes live as it is registered, so that one which never was has
    # been refused.
    refused = newest.refused if isinstance(newest, VertexVersion) else True
    if refused and all(change.version != newest.number for change in registry.history(name)):
        live = registry.live(name)
        denied = "go live" if live is None else f"replace v{live.number}"
        raise WrongInput(
            f"{name} v{newest.number} is the newest version, and no gate let it {denied};"
            f" `--version {newest.number}` makes it live all the same"
        )
    return newest


def _plan_rollout(
    recipe: Recipe, version: VertexVersion, request: DeployRequest, registry: VertexRegistry | None
) -> RolloutPlan:
    """The rollout's plan. `registry` None: for a dry run, so that no answer is computed."""
    probes = request.verify or request.canary is not None
    expected = None
    folder = local_model_folder(recipe, version.model_hash)
    if request.verify and registry is not None:
        if folder is None:
            say(
                f"no copy of {version.name} v{version.number} lies here, so only the form of its"
                " answer is compared"
            )
        else:
            expected = local_answer(folder, recipe.first_prompt, version.classifies)
    check = (
        AnswerCheck(recipe.first_prompt, version.classifies, expected, version.engine, version.name)
        if probes
        else None
    )
    labels = {**user_labels(recipe.cloud), "ingot-run": label(recipe.name)}
    return RolloutPlan(
        version,
        machine_resources(recipe),
        request.canary or (SHARE if request.verify else None),
        check,
        labels,
    )


def _live_number(registry: VertexRegistry, name: str) -> int | None:
    changes = registry.history(name)
    return changes[-1].version if changes else None
