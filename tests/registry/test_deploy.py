"""What may be deployed, instead of what, in which container, and beside whom: decisions that went
stale, and endpoints that others use too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.cloud.vertex import endpoints, models
from ingot.config.recipe import Recipe
from ingot.registry import deploy as deploying
from ingot.registry.deploy import DeployRequest, deploy, render_deploy
from ingot.registry.verbs import gate, register
from ingot.registry.vertexai import objects
from ingot.registry.vertexai import probe as verification
from tests.fakes.google import Refused
from tests.lazy import lazy
from tests.registry.models import trained
from tests.registry.vertex_place import IMAGE, Place
from tests.registry.vertexai.test_rollout import shares, two

types = lazy("google.cloud.aiplatform_v1")

CHANGES = (
    "EndpointService.CreateEndpoint",
    "EndpointService.DeployModel",
    "EndpointService.UpdateEndpoint",
    "EndpointService.UndeployModel",
    "EndpointService.DeleteEndpoint",
    "PredictionService.Predict",
)


def own(recipe: Recipe, **wishes: Any) -> int:
    """Deploy the version of a run, as `ingot deploy RECIPE.yaml` does."""
    return deploy(recipe, "words", DeployRequest(**wishes), is_run=True).number


@contextmanager
def nothing_changes(place: Place) -> Iterator[None]:
    before = [call.method for call in place.google.calls if call.method in CHANGES]
    there = {name: types.Endpoint(endpoint) for name, endpoint in place.state.endpoints.items()}
    yield
    assert [call.method for call in place.google.calls if call.method in CHANGES] == before
    assert place.state.endpoints == there


def test_a_decision_that_went_stale_moves_no_traffic(place: Place) -> None:
    one, _ = place.registered("one", "a", 2.5)
    two, _ = place.registered("two", "b", 2.4)
    own(one)
    says = (
        "words v1 went live since the gate compared the new model with nothing; run `ingot"
        " gate` again"
    )
    with nothing_changes(place), pytest.raises(WrongInput, match=says):
        own(two)
    place.is_whole(1)


def _as_the_lease_is_taken(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """`act` comes between the choice of a version and the lease."""
    roll_out = deploying.roll_out

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(deploying, "roll_out", roll_out)
        act()
        roll_out(*arguments)

    monkeypatch.setattr(deploying, "roll_out", late)


def test_a_decision_that_goes_stale_while_the_lease_is_waited_for_moves_no_traffic(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    two(place)
    recipe = place.registered("three", "c", 2.3)[0]
    _as_the_lease_is_taken(monkeypatch, lambda: place.registry().point("words", 2, "somebody else"))
    with (
        nothing_changes(place),
        pytest.raises(
            WrongInput,
            match="words v2 went live since the gate compared the new model with words v1",
        ),
    ):
        own(recipe)


def test_a_rollback_goes_nowhere_else_than_it_was_said(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    two(place)
    place.deploy()
    place.registered("three", "c", 2.3)
    _as_the_lease_is_taken(monkeypatch, lambda: place.registry().point("words", 3, "somebody else"))
    with (
        nothing_changes(place),
        pytest.raises(
            Failed, match="another version of words went live meanwhile; run the same command again"
        ),
    ):
        place.deploy(back=True)


def test_a_version_that_was_rolled_back_does_not_come_back_by_itself(place: Place) -> None:
    one, _ = place.registered("one", "a", 2.5)
    own(one)
    recipe, _ = place.registered("two", "b", 2.4)
    assert own(recipe) == 2
    assert own(recipe) == 2, "again is nothing new"
    place.deploy(back=True)
    says = (
        r"words v2 was live and was replaced or rolled back since; --version 2 deploys it all the"
        r" same"
    )
    with nothing_changes(place), pytest.raises(WrongInput, match=says):
        own(recipe)
    place.is_whole(1)
    assert place.deploy(2) == 2


def test_what_its_gate_refused_moves_no_traffic_without_its_number(place: Place) -> None:
    place.registered("one", "a", 2.5)
    assert place.deploy() == 1
    two, _ = place.registered("two", "b", 2.9)
    says = "words v2 is the newest version, and no gate let it replace v1; `--version 2` makes it"
    with nothing_changes(place):
        for way in (deploy, render_deploy):
            with pytest.raises(WrongInput, match=says):
                way(place.recipe(), "words", DeployRequest())
    register(trained(two, "b", 2.8))  # measured again, and its gate was not asked
    with nothing_changes(place), pytest.raises(WrongInput, match=says):
        place.deploy()
    gate(forced := place.recipe("two", gate={"override": "deploy"}))
    register(forced)
    assert place.deploy() == 2, "its gate decided anew"
    assert place.deploy(1) == 1
    gate(two)
    register(two)
    assert place.deploy() == 2, "it was live since"
    place.is_whole(2)


def test_what_its_gate_refused_is_no_first_version_without_its_number(place: Place) -> None:
    place.registered("one", "a", 2.5, gate={"metric": "loss/bits_per_byte", "floor": 2.0})
    with nothing_changes(place), pytest.raises(WrongInput, match="no gate let it go live"):
        place.deploy()
    assert place.deploy(1) == 1


def test_another_container_of_the_live_model_is_deployed(place: Place) -> None:
    recipe, _ = place.registered("one", "a")
    own(recipe)
    changed = place.recipe("one", serve={"max_tokens": 7})
    with (
        nothing_changes(place),
        pytest.raises(
            WrongInput,
            match=(
                r"words v1 has another container than the recipe now asks for .*; run `ingot"
                r" register` first"
            ),
        ),
    ):
        own(changed)
    assert register(changed).result == "words v2, v1 stays live until `ingot deploy`"
    assert own(changed) == 2
    place.is_whole(2)
    assert [
        request.deployed_model.model[-2:]
        for request in place.google.requests("EndpointService.DeployModel")
    ] == ["@1", "@2"]
    assert list(place.state.models["ingot-words"][2].container_spec.args) == [
        "serve.engine=native",
        "serve.max_tokens=7",
    ]


def _theirs(place: Place, *traffic: int, labels: dict[str, str] | None = None) -> str:
    """An endpoint of another team that happens to be called as ours, with models of theirs."""
    name = f"{place.state.parent}/endpoints/77"
    deployed = [
        types.DeployedModel(
            id=str(number), model=f"{place.state.parent}/models/theirs", model_version_id="1"
        )
        for number in range(1, len(traffic) + 1)
    ]
    place.state.endpoints[name] = types.Endpoint(
        name=name,
        display_name="words",
        deployed_models=deployed,
        traffic_split={str(number): share for number, share in enumerate(traffic, 1)},
        etag="e",
        labels=labels or {},
    )
    place.state.served[name] = []
    return name


def test_an_endpoint_with_models_of_others_is_left_alone(place: Place) -> None:
    place.registered("one", "a")
    name = _theirs(place, 60, 40)
    says = (
        r"not deployed, nothing was changed: the endpoint .*/endpoints/77 serves .*/models/theirs"
        r" too, which is no version of words; take it away there"
    )
    with nothing_changes(place), pytest.raises(WrongInput, match=says):
        place.deploy()
    assert list(place.state.endpoints) == [name]
    with pytest.raises(WrongInput, match="no version of words"):
        render_deploy(place.recipe(), "words", DeployRequest())
    place.is_quiet(served=False)


def test_a_model_of_others_that_comes_meanwhile_keeps_its_traffic(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.registered("one", "a")
    name = _theirs(place)
    await_deploy = endpoints.await_deploy

    def beaten(*arguments: Any) -> None:
        await_deploy(*arguments)
        there = place.state.endpoints[name]
        there.deployed_models = [
            *there.deployed_models,
            types.DeployedModel(
                id="5", model=f"{place.state.parent}/models/theirs", model_version_id="1"
            ),
        ]
        there.traffic_split = {"5": 100}

    monkeypatch.setattr(endpoints, "await_deploy", beaten)
    with pytest.raises(WrongInput, match="no version of words"):
        place.deploy()
    assert dict(place.state.endpoints[name].traffic_split) == {"5": 100}


def test_an_empty_endpoint_of_others_outlives_a_deployment_that_fails(place: Place) -> None:
    place.registered("one", "a")
    name = _theirs(place)
    place.state.deploy_errors = [Refused(429, "no T4 left")]
    with pytest.raises(Failed, match=r"nothing is deployed: .*no T4 left"):
        place.deploy()
    assert list(place.state.endpoints) == [name]
    assert not place.state.endpoint.deployed_models
    place.deploy()
    assert list(place.state.endpoints) == [name]
    place.is_whole(1)


def test_a_stop_once_the_pointer_moved_goes_forward(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    two(place)
    change = models.change_aliases

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "change_aliases", stopped)
    with pytest.raises(KeyboardInterrupt):
        place.deploy()
    assert place.state.versions_serving() == {2: 100}
    monkeypatch.setattr(models, "change_aliases", change)
    assert place.live() == 2
    place.deploy()
    place.is_whole(2)
    assert shares(place) == [{}, {1: 100}, {2: 100}]


def test_an_error_once_the_pointer_moved_goes_forward_and_one_before_goes_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    two(place)
    move = objects.move_pointer

    def lost(*arguments: Any, **more: Any) -> None:
        move(*arguments, **more)
        raise Failed("the answer was lost")

    monkeypatch.setattr(objects, "move_pointer", lost)
    with pytest.raises(
        Failed,
        match=(
            "words v2 serves all of the traffic, but the answer was lost; `ingot deploy words"
            " --version 2` finishes it"
        ),
    ):
        place.deploy()
    assert place.state.versions_serving() == {2: 100}

    def refused(*_: Any, **__: Any) -> None:
        raise Failed("no")

    monkeypatch.setattr(objects, "move_pointer", refused)
    with pytest.raises(Failed, match="words v1 is not deployed, the version before serves on: no"):
        place.deploy(1)
    monkeypatch.setattr(objects, "move_pointer", move)
    place.is_whole(2)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (409, "The etag is that of an older state."),
        (412, "The endpoint changed."),
        (400, "There are other operations running on the Endpoint."),
    ],
)
def test_an_endpoint_that_changed_meanwhile_is_tried_again(
    place: Place, code: int, message: str
) -> None:
    two(place)
    for method in ("EndpointService.UpdateEndpoint", "EndpointService.UndeployModel"):
        place.google.fault(method, code, message=message)
    place.deploy()
    place.is_whole(2)


def test_what_is_plainly_refused_is_not_tried_again(place: Place) -> None:
    two(place)
    before = len(place.google.requests("EndpointService.UpdateEndpoint"))
    place.google.fault("EndpointService.UpdateEndpoint", 400, message="Traffic does not add up.")
    with pytest.raises(WrongInput, match="does not add up"):
        place.deploy()
    assert len(place.google.requests("EndpointService.UpdateEndpoint")) == before + 1
    place.is_whole(1)


ENGINES: dict[str, Any] = {
    "vllm": lambda text: {"choices": [{"text": text}]},
    "triton": lambda text: {"model_name": "words", "text_output": text},
}


def _words(place: Place, engine: str) -> Recipe:
    """v1 serves, v2 is registered and better, both answered by `engine`."""
    serve = {
        "engine": engine,
        "image": IMAGE,
        "machine": {"type": "g2-standard-12"},
        "prompt": "once",
    }
    cloud = {"service_account": "server@proj.iam.gserviceaccount.com"}
    own(place.registered("one", "a", 2.5, serve=serve, cloud=cloud)[0])
    return place.registered("two", "b", 2.4, serve=serve, cloud=cloud)[0]


@pytest.mark.drawn
@pytest.mark.parametrize("engine", ["vllm", "triton"])
def test_an_engine_is_asked_in_its_own_words(
    place: Place, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploying, "local_answer", lambda *_: "said by 2")
    recipe = _words(place, engine)
    place.state.raw = lambda deployed, body: (
        200,
        ENGINES[engine](f"said by {deployed.model_version_id}"),
    )
    assert own(recipe, verify=True, canary=20) == 2
    place.is_whole(2)
    assert shares(place) == [{}, {1: 100}, {1: 80, 2: 20}, {2: 100}]
    asked = place.google.requests("PredictionService.RawPredict")[-1]
    assert asked.get("prompt", asked.get("text_input")) == "once"
    assert asked.get("model", "words") == "words"
    assert not place.google.requests("PredictionService.Predict")
    assert "RawPredict: 'once'" in render_deploy(recipe, "words", DeployRequest(2, verify=True))


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (
            lambda deployed, body: (200, ENGINES["vllm"]("else")),
            "the new version answers 'else', its folder here 'said'",
        ),
        (
            lambda deployed, body: (
                200 if deployed.model_version_id == "1" else 500,
                {"error": "no"},
            ),
            "what answered is no vllm server",
        ),
    ],
)
def test_an_engine_that_answers_wrongly_is_taken_away_again(
    place: Place, raw: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploying, "local_answer", lambda *_: "said")
    recipe = _words(place, "vllm")
    place.state.raw = raw
    with pytest.raises(Failed, match=f"the version before serves on: {says}"):
        own(recipe, verify=True)
    place.is_whole(1)


def test_an_endpoint_that_does_not_say_who_answered_moves_no_more_traffic(place: Place) -> None:
    recipe = _words(place, "vllm")
    place.state.raw, place.state.says_who = (
        lambda deployed, body: (200, ENGINES["vllm"]("said")),
        False,
    )
    with pytest.raises(
        Failed,
        match=(
            r"the endpoint does not say which of its models answered; deploy without --canary and"
            r" --verify"
        ),
    ):
        own(recipe, canary=10)
    place.is_whole(1)
    place.state.raw = lambda deployed, body: (403, {"error": {"message": "Permission denied."}})
    with pytest.raises(WrongInput, match=r"could not get a prediction from .*Permission denied\."):
        own(recipe, canary=10)
    place.is_whole(1)


def test_the_versions_engine_is_asked_and_not_the_recipes(place: Place) -> None:
    _words(place, "vllm")
    place.state.raw = lambda deployed, body: (200, ENGINES["vllm"]("said"))
    assert (
        deploy(
            place.recipe(serve={"machine": {"type": "g2-standard-12"}}),
            "words",
            DeployRequest(2, canary=10),
        ).number
        == 2
    )
    place.is_whole(2)


def test_a_new_share_is_given_time_to_spread(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    two(place)
    monkeypatch.setattr(verification, "SPREAD_S", 60.0)
    place.state.misses = 40  # more than the questions that a share of 50 % needs by chance
    place.deploy(canary=50)
    place.is_whole(2)
    monkeypatch.setattr(verification, "SPREAD_S", 0.0)
    place.state.misses = 10**6
    place.registered("three", "c", 2.3)
    with pytest.raises(
        Failed,
        match=r"of 20 predictions none came from the new version, which has 50 % of the traffic",
    ):
        place.deploy(3, canary=50)
    place.is_whole(2)
