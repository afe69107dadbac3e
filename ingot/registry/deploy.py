"""`ingot deploy`: a registered version becomes the live one; in Vertex AI's registry that is the
one that an endpoint serves.

The local registry only moves its pointer. Nothing here knows how an endpoint is changed without an
outage: `endpoint.py` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import say
from ingot.cloud.clients import GoogleClients
from ingot.config.recipe import Recipe
from ingot.registry.verbs import approved, compared_with, lies_in, newest, registry_of
from ingot.registry.versions import Registered, VertexVersion
from ingot.registry.vertexai import objects as pointer
from ingot.registry.vertexai.endpoint import Plan, find, render
from ingot.registry.vertexai.probe import SHARE, Check, answer_of
from ingot.registry.vertexai.registry import VertexRegistry
from ingot.registry.vertexai.resources import label, resources_of
from ingot.registry.vertexai.rollout import roll_out

BY_HAND = "by hand"


@dataclass(frozen=True)
class Wish:
    """What `ingot deploy` was asked for. `canary`: percent of the traffic that the new version gets
    first; `verify`: compare its answer.
    """

    number: int | None = None
    canary: int | None = None
    verify: bool = False
    back: bool = False


def deploy(recipe: Recipe, name: str, wish: Wish, *, is_run: bool = False) -> Registered:
    """Make a version live and return it: of a number, the one before (`wish.back`), or the newest.

    `is_run`: the recipe is that of the run whose model this is; with Vertex AI then its own version
    is deployed, if the gate said so.

    Raises:
        WrongInput: no such version, its files are damaged, the gate did not say so, or the place
            cannot do what is asked.
        Failed: the new version does not come up, or another command deploys this name; the old one
            then serves on.
    """
    _check(recipe, wish)
    registry = registry_of(recipe)
    if isinstance(registry, VertexRegistry):
        version, reason, instead_of = _chosen(recipe, registry, name, wish, is_run)
        registry.check(version)
        plan = _planned(recipe, version, wish, registry)

        def allow(live: int | None) -> None:
            if wish.back and registry.previous(name).number != version.number:
                raise Failed(
                    f"another version of {name} went live meanwhile; run the same command again"
                )
            if live != version.number:
                pointer.check(name, live, instead_of)

        def commit() -> None:
            if wish.back:
                registry.rollback(name, reason, to=version.number)
            else:
                registry.point(name, version.number, reason, instead_of=instead_of)

        roll_out(GoogleClients(recipe.cloud), plan, lambda: _live(registry, name), allow, commit)
        return version
    if wish.back:
        before: Registered = registry.rollback(name, "rolled back by hand")
        return before
    chosen: Registered = (
        newest(registry, name) if wish.number is None else registry.version(name, wish.number)
    )
    registry.check(chosen)
    registry.point(name, chosen.number, BY_HAND)
    return chosen


def rehearse(recipe: Recipe, name: str, wish: Wish, *, is_run: bool = False) -> str:
    """What `deploy` would do, as text; nothing is changed."""
    _check(recipe, wish)
    registry = registry_of(recipe)
    if isinstance(registry, VertexRegistry):
        version, _, _ = _chosen(recipe, registry, name, wish, is_run)
        return render(GoogleClients(recipe.cloud), _planned(recipe, version, wish, None))
    if wish.back:
        return f"{name} back to the version that was live before\n"
    chosen = newest(registry, name) if wish.number is None else registry.version(name, wish.number)
    return f"{name} v{chosen.number} live, in {registry.place}\n"


def address(recipe: Recipe, name: str) -> str | None:
    """The endpoint that serves a name; None where the registry has none."""
    there = find(GoogleClients(recipe.cloud), name) if recipe.registry.kind == "vertex" else None
    return there.name if there else None


def _check(recipe: Recipe, wish: Wish) -> None:
    """What is wished for and cannot be had, before anything is asked of anybody."""
    if wish.back and wish.number is not None:
        raise WrongInput(f"--rollback and --version {wish.number} are two wishes; give one of them")
    if wish.canary is not None and not 1 <= wish.canary <= 99:
        raise WrongInput(
            f"--canary {wish.canary} is no share of the traffic; give 1 to 99 percent, or leave"
            " it out"
        )
    if recipe.registry.kind == "local" and (wish.canary is not None or wish.verify):
        raise WrongInput(
            "--canary and --verify are for an endpoint, and the local registry has none; leave them"
            " out, or set registry.kind=vertex"
        )


def _chosen(
    recipe: Recipe, registry: VertexRegistry, name: str, wish: Wish, is_run: bool
) -> tuple[VertexVersion, str, int | None]:
    """The version, why, and which one must be live until then (-1: any)."""
    if wish.back:
        return registry.previous(name), "rolled back by hand", -1
    if wish.number is not None:
        return registry.version(name, wish.number), BY_HAND, -1
    if not is_run:
        version: VertexVersion = newest(registry, name)
        return version, BY_HAND, -1
    report, decided = approved(recipe)
    found = registry.find(name, report)
    if found is None:
        raise WrongInput(
            f"the model of {recipe.folder.root} is not registered as {name} in {registry.place};"
            " run `ingot register` first"
        )
    if not registry.is_served_so(found):
        raise WrongInput(
            f"{name} v{found.number} has another container than the recipe now asks for (serve,"
            " cloud.images); run `ingot register` first"
        )
    live = registry.live(name)
    is_live = live is not None and live.number == found.number
    if not is_live and any(turn.version == found.number for turn in registry.history(name)):
        raise WrongInput(
            f"{name} v{found.number} was live and was replaced or rolled back since; --version"
            f" {found.number} deploys it all the same"
        )
    # The same model in another container: the decision that made it live still stands.
    stands = live is not None and (live.model_hash, live.tokenizer_hash) == (
        found.model_hash,
        found.tokenizer_hash,
    )
    return (
        found,
        f"gate: {decided['reason']}",
        live.number if live is not None and stands else compared_with(registry, name, decided),
    )


def _planned(
    recipe: Recipe, version: VertexVersion, wish: Wish, registry: VertexRegistry | None
) -> Plan:
    """`registry` None: for looking only, so that nothing is computed."""
    asks = wish.verify or wish.canary is not None
    expected = None
    folder = lies_in(recipe, version.model_hash)
    if wish.verify and registry is not None:
        if folder is None:
            say(
                f"no copy of {version.name} v{version.number} lies here, so only the form of its"
                " answer is compared"
            )
        else:
            expected = answer_of(folder, recipe.serve.prompt)
    check = (
        Check(recipe.serve.prompt, version.classifies, expected, version.engine, version.name)
        if asks
        else None
    )
    labels = {
        **{label(key): label(value) for key, value in recipe.cloud.labels.items()},
        "ingot-run": label(recipe.name),
    }
    return Plan(
        version,
        resources_of(recipe),
        wish.canary or (SHARE if wish.verify else None),
        check,
        labels,
    )


def _live(registry: VertexRegistry, name: str) -> int | None:
    turns = registry.history(name)
    return turns[-1].version if turns else None
