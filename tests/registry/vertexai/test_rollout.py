"""Deployments behind an endpoint: no moment without a serving version, and nothing half-deployed,
whatever goes wrong and whenever.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.lease import lease
from ingot.cloud.vertex import endpoints
from ingot.registry import deploy as deploying
from ingot.registry.deploy import DeployRequest, deploy, render_deploy
from ingot.registry.vertexai import probe as verification
from tests import golden
from tests.exhaustive import some_calls
from tests.fakes.google import Refused
from tests.lazy import lazy
from tests.registry.vertex_place import Place, killed_at

types = lazy("google.cloud.aiplatform_v1")

T4: dict[str, Any] = {
    "serve": {
        "machine": {
            "type": "n1-standard-4",
            "accelerator": "nvidia-tesla-t4",
            "accelerators": 1,
            "spot": True,
        },
        "replicas": [1, 3],
    }
}
CHANGES = (
    "EndpointService.DeployModel",
    "EndpointService.UpdateEndpoint",
    "EndpointService.UndeployModel",
)


def two(place: Place) -> None:
    """v1 serves, v2 is registered and better."""
    place.registered("one", "a", 2.5)
    place.deploy()
    place.registered("two", "b", 2.4)


def shares(place: Place) -> list[dict[int, int]]:
    """What served, each state once."""
    found: list[dict[int, int]] = []
    for _, turn in place.state.served[place.state.endpoint.name]:
        if not found or found[-1] != turn:
            found.append(turn)
    return found


def test_the_first_version_makes_the_endpoint(place: Place) -> None:
    place.registered("one", "a")
    recipe = place.recipe(
        **T4,
        cloud={
            "service_account": "server@proj.iam.gserviceaccount.com",
            "labels": {"team": "Words"},
        },
    )
    assert place.deploy(recipe=recipe) == 1
    place.is_whole(1)
    (created,) = place.google.requests("EndpointService.CreateEndpoint")
    assert created.endpoint_id == "ingot-words"
    assert created.endpoint.display_name == "words"
    assert created.endpoint.labels["ingot-verb"] == "deploy"
    assert created.endpoint.labels["ingot-run"] == "run"
    assert created.endpoint.labels["team"].startswith("words-")
    (asked,) = place.google.requests("EndpointService.DeployModel")
    deployed = asked.deployed_model
    assert asked.endpoint == "projects/proj/locations/us-central1/endpoints/ingot-words"
    assert deployed.model == "projects/proj/locations/us-central1/models/ingot-words@1"
    assert deployed.display_name == "words-v1"
    assert deployed.service_account == "server@proj.iam.gserviceaccount.com"
    resources, machine = deployed.dedicated_resources, deployed.dedicated_resources.machine_spec
    assert (machine.machine_type, machine.accelerator_type.name, machine.accelerator_count) == (
        "n1-standard-4",
        "NVIDIA_TESLA_T4",
        1,
    )
    assert (resources.min_replica_count, resources.max_replica_count, resources.spot) == (
        1,
        3,
        True,
    )
    assert not asked.traffic_split


def test_the_second_version_comes_beside_the_first_and_takes_over(place: Place) -> None:
    two(place)
    assert place.deploy() == 2
    place.is_whole(2)
    assert shares(place) == [{}, {1: 100}, {2: 100}]
    assert [turn.reason for turn in place.registry().history("words")] == ["by hand", "by hand"]
    assert all(
        request.endpoint.etag for request in place.google.requests("EndpointService.UpdateEndpoint")
    ), "never over somebody else's change"
    kinds = [call.method for call in place.google.calls if call.method in CHANGES]
    assert kinds[2:] == list(CHANGES), "beside it first, then the traffic, then the old one goes"


@pytest.mark.drawn("a deployment on Vertex AI", keep=2)
def test_a_canary_gets_its_share_and_is_asked_before_it_gets_all(place: Place) -> None:
    two(place)
    place.deploy(canary=20)
    place.is_whole(2)
    assert shares(place) == [{}, {1: 100}, {1: 80, 2: 20}, {2: 100}]
    asked = place.google.requests("PredictionService.Predict")
    assert asked
    assert asked[0].instances[0] == place.recipe().first_prompt


def _by_second(answers: list[Any], deployed: Any, *_: Any) -> list[Any]:
    return answers if deployed.model_version_id == "2" else ["fine"]


@pytest.mark.drawn("a deployment on Vertex AI", keep=2)
def test_a_version_that_answers_nonsense_is_taken_away_again(place: Place) -> None:
    two(place)
    for answers in ([], [None], [7], ["a", "b"]):
        place.state.answer = functools.partial(_by_second, answers)
        with pytest.raises(
            Failed,
            match=(
                r"words v2 is not deployed, the version before serves on: the new version answers"
                r" .* not one text"
            ),
        ):
            place.deploy(canary=10)
        place.is_whole(1)


@pytest.mark.drawn("a deployment on Vertex AI", keep=2)
def test_verify_compares_with_what_the_folder_says(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    two(place)
    asked: list[Any] = []

    def says(folder: Path, prompt: str, classifies: bool) -> str:
        asked.append((folder.parent.name, prompt, classifies))
        return "what the folder says"

    monkeypatch.setattr(deploying, "local_answer", says)
    recipe = place.recipe("two", serve={"prompt": "once"})
    with pytest.raises(
        Failed,
        match=r"the new version answers 'once from v2', its folder here 'what the folder says'",
    ):
        deploy(recipe, "words", DeployRequest(verify=True), is_run=True)
    place.is_whole(1)
    assert asked == [("two", "once", False)]
    monkeypatch.setattr(deploying, "local_answer", lambda *_: "once from v2")
    deploy(recipe, "words", DeployRequest(verify=True), is_run=True)
    place.is_whole(2)
    assert shares(place)[-2:] == [{1: 90, 2: 10}, {2: 100}]
    request = place.google.requests("PredictionService.Predict")[-1]
    assert dict(request.parameters) == {"max_tokens": verification.TOKENS, "temperature": 0}


def test_without_a_copy_here_only_the_form_is_compared_and_that_is_said(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    two(place)
    place.deploy(verify=True)
    assert "no copy of words v2 lies here" in capsys.readouterr().err
    place.is_whole(2)


def test_a_first_version_that_fails_leaves_no_endpoint(place: Place) -> None:
    place.registered("one", "a")
    place.state.answer = lambda *_: [{"not": "text"}]
    with pytest.raises(
        Failed, match="words v1 is not deployed, nothing is deployed: the new version answers"
    ):
        place.deploy(verify=True)
    assert not place.state.endpoints
    assert place.live() is None
    place.is_quiet(served=False)


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            Refused(
                429,
                "The following quotas are exceeded: CustomModelServingT4GPUsPerProjectPerRegion",
            ),
            "a quota is used up",
        ),
        (Refused(400, "Image us-central1-docker.pkg.dev/proj/repo/x not found"), "not found"),
        (
            Refused(500, "Model server exited unexpectedly: it never answered its health check"),
            "health check",
        ),
    ],
)
def test_a_deployment_that_fails_leaves_the_old_one_alone(
    place: Place, error: Refused, says: str
) -> None:
    two(place)
    place.state.deploy_errors = [error]
    with pytest.raises(IngotError, match=says) as caught:
        place.deploy()
    assert "\n" not in str(caught.value)
    place.is_whole(1)
    assert shares(place) == [{}, {1: 100}]


@pytest.mark.drawn("a deployment on Vertex AI", keep=2)
def test_whatever_call_fails_for_good_the_old_one_serves_and_nothing_is_left(place: Place) -> None:
    two(place)
    methods = [
        "EndpointService.DeployModel",
        "EndpointService.UpdateEndpoint",
        "PredictionService.Predict",
        "EndpointService.GetEndpoint",
    ]
    for method in methods:
        place.google.fault(method, 403, times=1, message="Permission denied.")
        with pytest.raises(WrongInput, match=r"words v2 is not deployed, .*Permission denied"):
            place.deploy(canary=10)
        place.is_whole(1)


def test_an_answer_that_is_lost_changes_nothing(place: Place) -> None:
    place.registered("one", "a")
    methods = [
        "EndpointService.CreateEndpoint",
        *CHANGES,
        "EndpointService.ListOperations",
        "PredictionService.Predict",
        "EndpointService.GetEndpoint",
    ]
    for method in methods:
        place.google.fault(method, 503, lose=True)
    place.deploy(canary=10)
    place.registered("two", "b", 2.4)
    for method in methods:
        place.google.fault(method, 503, lose=True)
    place.deploy(canary=10)
    place.is_whole(2)
    assert len(place.google.requests("EndpointService.DeployModel")) == 2


@pytest.mark.drawn("a kill in deploying")
def test_killed_after_any_call_the_next_one_finishes(place: Place) -> None:
    two(place)
    for number in some_calls("deploy"):
        wish = number % 2 + 1  # in turn from 1 to 2 and back
        if place.live() == wish:
            place.deploy(3 - wish)
        died = killed_at(place, number, functools.partial(place.deploy, wish, canary=30))
        assert not place.state.gaps()
        place.deploy(wish, canary=30)
        place.is_whole(wish)
        if not died:
            break
    assert 12 < number < 60


@pytest.mark.slow
def test_killed_after_any_call_the_next_one_undoes(place: Place) -> None:
    """What comes next is another version."""
    two(place)
    place.registered("three", "c", 2.3)
    for number in range(1, 100):
        place.deploy(1)
        died = killed_at(place, number, lambda: place.deploy(2, canary=30))
        place.deploy(3)
        place.is_whole(3)
        if not died:
            break
    assert 12 < number < 60


@pytest.mark.drawn("a kill in deploying")
def test_a_first_deployment_killed_after_any_call_is_finished(place: Place) -> None:
    place.registered("one", "a")
    for number in some_calls("deploy first"):
        died = killed_at(place, number, lambda: place.deploy(verify=True))
        place.deploy(verify=True)
        place.is_whole(1)
        if not died:
            break
        place.state.endpoints.clear()
        place.state.served.clear()
        del place.storage.objects["ingot/models/words/live.json"]
    assert 8 < number < 60


@pytest.mark.drawn("a deployment on Vertex AI", keep=2)
def test_of_two_deployments_at_once_the_second_is_refused(place: Place) -> None:
    two(place)
    held = lease(open_bucket("gs://bucket/ingot/endpoints/words"), "ingot deploy words", life_s=3.0)
    with held, pytest.raises(Failed, match=r"in use by ingot deploy words .*stop it"):
        place.deploy()
    place.is_whole(1)
    place.deploy()
    place.is_whole(2)


@pytest.mark.drawn("a deployment on Vertex AI", keep=2)
def test_two_deployments_side_by_side_end_with_one_version_that_serves(place: Place) -> None:
    two(place)
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            place.deploy(number, canary=50)
        except IngotError as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("is in use by" in str(error) for error in errors)
    place.is_whole(place.live() or 0)


def test_a_deployment_that_is_interrupted_is_undone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    two(place)
    wait = endpoints.await_deploy

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(endpoints, "await_deploy", stopped)
    place.state.polls = 10**6
    with pytest.raises(KeyboardInterrupt):
        place.deploy()  # would take for ever; it must be given up rather than waited for
    monkeypatch.setattr(endpoints, "await_deploy", wait)
    assert place.google.requests("EndpointService.CancelOperation")
    place.state.polls = 1
    place.is_whole(1)


def test_rollback_brings_the_version_before_back_without_a_gap(place: Place) -> None:
    two(place)
    place.deploy()
    assert place.deploy(back=True, canary=10) == 1
    place.is_whole(1)
    assert shares(place) == [{}, {1: 100}, {2: 100}, {2: 90, 1: 10}, {1: 100}]
    assert place.registry().history("words")[-1].reason == "rolled back by hand"
    with pytest.raises(
        WrongInput,
        match="nothing was live before words v1; `ingot deploy words --version 2 registry",
    ):
        place.deploy(back=True)


def test_the_same_version_on_other_machines_is_deployed_beside_itself(place: Place) -> None:
    place.registered("one", "a")
    place.deploy()
    place.deploy(recipe=place.recipe(**T4))
    place.is_whole(1)
    assert len(place.google.requests("EndpointService.DeployModel")) == 2
    place.deploy(recipe=place.recipe(**T4))
    assert len(place.google.requests("EndpointService.DeployModel")) == 2, "nothing to do"


def test_two_endpoints_of_the_name_are_an_error(place: Place) -> None:
    place.registered("one", "a")
    for number in (1, 2):
        name = f"{place.state.parent}/endpoints/{number}"
        place.state.endpoints[name] = types.Endpoint(name=name, display_name="words")
        place.state.served[name] = []
    with pytest.raises(
        WrongInput, match=r"two endpoints are called words: .*/1 and .*/2; delete or rename"
    ):
        place.deploy()


def test_machines_that_bring_their_accelerators_name_them_all_the_same(place: Place) -> None:
    """Vertex AI wants them spelt out."""
    place.registered("one", "a")
    place.deploy(recipe=place.recipe(serve={"machine": {"type": "g2-standard-24"}}))
    machine = place.google.requests("EndpointService.DeployModel")[
        0
    ].deployed_model.dedicated_resources.machine_spec
    assert (machine.accelerator_type.name, machine.accelerator_count) == ("NVIDIA_L4", 2)


def test_a_live_version_that_lost_its_traffic_gets_it_back_first(place: Place) -> None:
    two(place)
    place.state.endpoint.traffic_split = {}
    place.state.deploy_errors = [Refused(429, "no T4 left")]
    with pytest.raises(Failed, match="the version before serves on"):
        place.deploy()
    place.is_whole(1)


def test_an_endpoint_of_somebody_elses_making_is_used_and_never_deleted_while_it_serves(
    place: Place,
) -> None:
    place.registered("one", "a")
    name = f"{place.state.parent}/endpoints/77"
    place.state.endpoints[name] = types.Endpoint(name=name, display_name="words")
    place.state.served[name] = []
    place.deploy()
    assert list(place.state.endpoints) == [name]
    place.is_whole(1)


@pytest.mark.drawn("a deployment on Vertex AI", keep=2)
def test_a_run_deploys_its_own_version_and_only_if_the_gate_says_so(place: Place) -> None:
    one, _ = place.registered("one", "a", 2.5)
    two, _ = place.registered("two", "b", 2.4)
    assert deploy(one, "words", DeployRequest(), is_run=True).number == 1
    place.is_whole(1)
    worse, _ = place.registered("three", "c", 2.6)
    with pytest.raises(
        WrongInput, match=r"the gate says keep \(loss/bits_per_byte .*`--version V` deploys"
    ):
        deploy(worse, "words", DeployRequest(), is_run=True)
    with pytest.raises(
        WrongInput,
        match=(
            "words v1 went live since the gate compared the new model with nothing; run `ingot"
            " gate` again"
        ),
    ):
        deploy(two, "words", DeployRequest(), is_run=True)
    place.is_whole(1)
    (two.folder.reports / "gate.json").unlink()
    with pytest.raises(WrongInput, match="run `ingot gate` first"):
        deploy(two, "words", DeployRequest(), is_run=True)
    place.is_whole(1)


@pytest.mark.parametrize(
    ("sections", "wish", "says"),
    [
        (
            {"serve": {"machine": {"type": "n1-standard-4", "accelerator": "nvidia-tesla-t5"}}},
            DeployRequest(),
            r"nearest is nvidia-tesla-t4 \(serve\.machine",
        ),
        (
            {"serve": {"machine": {"type": "n1-standart-4"}}},
            DeployRequest(),
            r"n1-standart-4 is not known; the nearest is n1-standard-4 \(serve\.machine\.type\)",
        ),
        ({"serve": {"machine": {"type": "ct5lp-hightpu-1t"}}}, DeployRequest(), "has TPUs"),
        ({"serve": {"machine": {"flex_start": True}}}, DeployRequest(), "flex_start"),
        ({"serve": {"replicas": [3, 1]}}, DeployRequest(), "swap them"),
        ({"serve": {"machine": {"reservation": "mine"}}}, DeployRequest(), "set cloud.zone"),
        ({}, DeployRequest(canary=0), "--canary 0 is no share"),
        ({}, DeployRequest(canary=100), "--canary 100 is no share"),
        ({}, DeployRequest(7), "words has no version 7 in the Model Registry of .* it has 1"),
        ({}, DeployRequest(1, back=True), "exclude each other"),
        ({"registry": {"name": "other", "kind": "vertex"}}, DeployRequest(), "nothing"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    place: Place, sections: Any, wish: DeployRequest, says: str
) -> None:
    place.registered("one", "a")
    name = "other" if "registry" in sections else "words"
    with pytest.raises(WrongInput, match=says):
        deploy(place.recipe(**sections), name, wish)
    assert not place.state.endpoints
    assert not [name for name in place.storage.objects if "endpoints" in name]


def test_damaged_files_are_not_deployed(place: Place) -> None:
    place.registered("one", "a")
    del place.storage.objects["ingot/models/words/a-tokenizer/model.safetensors"]
    with pytest.raises(
        WrongInput,
        match=(
            r"words v1 is damaged: gs://bucket/.*model\.safetensors is missing or changed; register"
            r" it again"
        ),
    ):
        place.deploy()
    assert not place.state.endpoints


def test_what_would_be_sent(place: Place) -> None:
    two(place)
    recipe = place.recipe(**T4, cloud={"service_account": "server@proj.iam.gserviceaccount.com"})
    before = len(place.google.calls)
    text = render_deploy(recipe, "words", DeployRequest(canary=10, verify=True))
    assert not [
        call.method
        for call in place.google.calls[before:]
        if not call.method.rpartition(".")[2].startswith(("Get", "List"))
    ]
    (old,) = place.state.endpoint.deployed_models
    golden.check("deploy_beside.txt", text.replace(old.id, "OLD"))
    place.state.endpoints.clear()
    golden.check("deploy_first.txt", render_deploy(recipe, "words", DeployRequest()))
