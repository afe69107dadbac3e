"""The Model Registry of Vertex AI as our registry: versions, exact numbers, and a live pointer of
which two writers cannot both win.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.lease import lease
from ingot.base.reports import EvaluationReport, Metric
from ingot.cloud import clients
from ingot.registry.local import LocalRegistry
from ingot.registry.verbs import gate, register
from ingot.registry.versions import unchanged_since_now
from ingot.registry.vertexai import objects
from ingot.registry.vertexai import resources as labels
from ingot.registry.vertexai.registry import VertexRegistry
from ingot.registry.vertexai.resources import (
    container_of,
    label_number,
    model_key,
    resource_id,
    version_labels,
)
from tests.exhaustive import some_calls
from tests.fakes import vertex_models
from tests.registry.models import a_model, a_report, registered_folder, trained
from tests.registry.vertex_place import IMAGE, Place, killed_at

FOLDER = "ingot/models/words"
ACCOUNT = {"service_account": "server@proj.iam.gserviceaccount.com"}


def add(place: Place, model: str, value: float = 2.5) -> int:
    folder = a_model(place.root / "models" / model, model)
    return (
        place.registry()
        .add("words", folder, a_report(model, value), {"run": "r", "from": "näive"})
        .number
    )


def record(place: Place, key: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(place.storage.objects[f"{FOLDER}/{key}.json"].data)
    return value


def test_a_version_is_uploaded_with_its_files_its_container_and_its_numbers(place: Place) -> None:
    recipe, outcome = place.registered("one", "a", 0.8123)
    assert outcome.result == "words v1, nothing is live until `ingot deploy`"
    assert outcome.where == f"gs://bucket/{FOLDER}/a-tokenizer"
    assert outcome.files == {
        "reports/registered.json": (recipe.folder.reports / "registered.json").stat().st_size
    }
    (request,) = place.google.requests("ModelService.UploadModel")
    assert (request.parent, request.model_id, request.parent_model) == (
        "projects/proj/locations/us-central1",
        "ingot-words",
        "",
    )
    model, spec = request.model, request.model.container_spec
    assert (model.display_name, model.artifact_uri) == (
        "words",
        f"gs://bucket/{FOLDER}/a-tokenizer",
    )
    assert (spec.image_uri, list(spec.args), spec.ports[0].container_port) == (
        IMAGE,
        ["serve.engine=native"],
        8080,
    )
    assert (spec.health_route, spec.predict_route) == ("/health", "/predict")
    kept_labels = dict(model.labels)
    assert re.fullmatch("[0-9a-f]{16}", kept_labels.pop("ingot-container"))
    assert kept_labels == {
        "ingot-key": "a-tokenizer",
        "ingot-engine": "native",
        "ingot-run": "one",
        "ingot-verb": "register",
        "loss_bits_per_byte": "0_8123",
    }
    assert "loss/bits_per_byte 0.8123" in model.version_description
    names = [name for name in place.storage.written if name.startswith(f"{FOLDER}/a-tokenizer/")]
    assert names[-1].endswith("/VERSION.json"), "the marker comes last"
    assert place.storage.objects[f"{FOLDER}/a-tokenizer/model.safetensors"].data == b"weights of a"
    marked = json.loads(place.storage.objects[names[-1]].data)["files"]
    assert sorted(file["path"] for file in marked) == [
        "config.json",
        "ingot.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    kept = record(place, "a-tokenizer")
    assert kept["report"] == json.loads(json.dumps(asdict(a_report("a", 0.8123))))
    assert kept["lineage"]["run"] == "r"
    place.is_quiet()


def test_versions_of_one_name_lie_under_one_model(place: Place) -> None:
    assert [add(place, model) for model in "abcde"] == [1, 2, 3, 4, 5]
    assert list(place.state.models) == ["ingot-words"]
    _, *others = place.google.requests("ModelService.UploadModel")
    assert {request.parent_model for request in others} == {
        "projects/proj/locations/us-central1/models/ingot-words"
    }
    registry = place.registry()
    assert [(version.number, version.model_hash) for version in registry.versions("words")] == list(
        enumerate("abcde", 1)
    )
    assert registry.names() == ["words"]
    found = registry.find("words", a_report("c"))
    assert found is not None
    assert (found.number, found.lineage) == (3, {"run": "r", "from": "näive"})
    assert registry.find("words", a_report("x")) is None


def test_the_gate_compares_with_the_version_that_serves(place: Place) -> None:
    place.registered("one", "a", 2.5)
    place.deploy()
    recipe = trained(place.recipe("two"), "b", 2.45)
    assert (
        gate(recipe).result
        == "deploy: loss/bits_per_byte 2.45, live 2.5, lower is better: better by 0.05"
    )
    assert register(recipe).result == "words v2, v1 stays live until `ingot deploy`"
    worse = trained(place.recipe("three"), "c", 2.6)
    assert gate(worse).exit_code == 3
    assert register(worse).result == "words v3, v1 stays live"
    assert register(recipe).result == "words v2, v1 stays live until `ingot deploy`", (
        "again makes no new version"
    )
    assert len(place.google.requests("ModelService.UploadModel")) == 3
    with pytest.raises(WrongInput, match="run `ingot gate` first"):
        register(trained(place.recipe("four"), "d"))


def test_the_same_model_measured_anew_keeps_its_version(place: Place) -> None:
    add(place, "a", 2.5)
    before = dict(place.storage.objects)
    assert add(place, "a", 2.25) == 1
    assert record(place, "a-tokenizer")["report"]["metrics"]["loss/bits_per_byte"]["value"] == 2.25
    assert place.state.models["ingot-words"][1].labels["loss_bits_per_byte"] == "2_25"
    changed = {
        name
        for name in place.storage.objects
        if place.storage.objects[name] is not before.get(name)
    }
    assert changed == {f"{FOLDER}/a-tokenizer.json"}, "no file is sent again"


@pytest.mark.drawn("a registration, killed")
def test_killed_after_any_call_the_next_registration_finishes(place: Place) -> None:
    place.state.page = 100
    for turn, number in enumerate(some_calls("register"), 1):
        model = f"m{turn}"
        died = killed_at(place, number, functools.partial(add, place, model))
        assert add(place, model) == turn
        version = place.registry().version("words", turn)
        place.registry().check(version)
        assert version.model_hash == model
        if not died:
            break
    assert 6 < number < 40
    assert len(place.state.models["ingot-words"]) == turn, "no version twice"
    place.is_quiet()


@pytest.mark.drawn("a registration, killed")
def test_the_first_registration_of_a_name_survives_a_kill_too(place: Place) -> None:
    for number in some_calls("register first"):
        died = killed_at(place, number, lambda: add(place, "a"))
        assert add(place, "a") == 1
        assert len(place.state.models["ingot-words"]) == 1
        if not died:
            break
        place.state.models.clear()
        place.storage.objects.clear()
    assert 6 < number < 40


def test_what_another_run_exports_meanwhile_is_no_version(place: Place) -> None:
    folder = a_model(place.root / "models/a", "a")
    unchanged = unchanged_since_now(folder)
    a_model(folder, "b")
    with pytest.raises(Failed, match="was changed while it was registered"):
        place.registry().add("words", folder, a_report("a"), {}, unchanged)
    assert place.registry().versions("words") == []
    assert add(place, "a") == 1


def test_an_upload_whose_answer_is_lost_makes_no_second_version(place: Place) -> None:
    place.google.fault("ModelService.UploadModel", 503, lose=True)
    with pytest.raises(Failed, match="could not register words"):
        add(place, "a")
    assert add(place, "a") == 1
    assert len(place.state.models["ingot-words"]) == 1


def test_an_upload_that_another_made_first_becomes_the_second_version(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our look and our upload somebody else made the first version of the name."""
    upload = place.google.handlers["ModelService.UploadModel"]

    def beaten(request: Any) -> Any:
        place.google.handlers["ModelService.UploadModel"] = upload
        other = type(request)(request)
        other.model.labels = {**request.model.labels, "ingot-key": "other"}
        place.google.operations[upload(other).name].finish()
        return upload(request)

    place.google.handlers["ModelService.UploadModel"] = beaten
    assert add(place, "a") == 2


@pytest.mark.drawn("a registry on Vertex AI")
def test_two_processes_that_register_the_same_model_do_it_once(place: Place) -> None:
    held = lease(
        open_bucket(f"gs://bucket/{FOLDER}"),
        "ingot register words",
        name="locks/a-tokenizer",
    )
    with held, pytest.raises(Failed, match="in use by ingot register words"):
        add(place, "a")
    assert add(place, "a") == 1


def test_of_two_writers_of_the_live_pointer_one_is_refused(place: Place) -> None:
    bucket = open_bucket("gs://bucket/somewhere")
    seen = objects.read_pointer(bucket)
    objects.move_pointer(bucket, seen, 1, "the first")
    with pytest.raises(Failed, match="another version went live at the same time"):
        objects.move_pointer(bucket, seen, 2, "the second")
    assert [turn.reason for turn in objects.read_pointer(bucket).history] == ["the first"]
    place.storage.fault("insert", code=503, lose=True)
    objects.move_pointer(bucket, objects.read_pointer(bucket), 3, "an answer that is lost")
    assert objects.read_pointer(bucket).now == 3
    assert len(objects.read_pointer(bucket).turns) == 2


@pytest.mark.drawn("a registry on Vertex AI")
def test_both_kinds_of_registry_tell_the_same_story(place: Place, tmp_path: Path) -> None:
    local, cloud = LocalRegistry(tmp_path / "registry.sqlite"), place.registry()
    told = []
    kinds: list[Any] = [local, cloud]
    for registry in kinds:
        for model in "abc":
            registry.add("words", a_model(tmp_path / model, model), a_report(model), {})
        lines: list[Any] = []
        acts: list[Callable[[Any], Any]] = [
            lambda r: r.rollback("words", "x"),
            lambda r: r.point("words", 1, "first"),
            lambda r: r.rollback("words", "x"),
            lambda r: r.point("words", 2, "second", instead_of=1),
            lambda r: r.point("words", 3, "third", instead_of=1),
            lambda r: r.point("words", 3, "third"),
            lambda r: r.rollback("words", "x"),
            lambda r: r.rollback("words", "x"),
            lambda r: r.rollback("words", "x"),
            lambda r: r.point("words", 1, "the same"),
            lambda r: r.point("words", 9, "none"),
        ]
        for act in acts:
            try:
                act(registry)
            except IngotError as error:
                told_of = re.sub(r"registry\.(path|kind)=[^\s`]+", "KNOB", str(error))
                lines.append((type(error).__name__, told_of.replace(registry.place, "PLACE")))
            live = registry.live("words")
            lines.append(
                (
                    None if live is None else live.number,
                    [(turn.version, turn.reason) for turn in registry.history("words")],
                )
            )
        told.append(lines)
    assert told[0] == told[1]


@pytest.mark.drawn("a registry on Vertex AI")
def test_the_alias_follows_the_pointer_and_is_repaired_by_the_next_command(place: Place) -> None:
    for model in "ab":
        add(place, model)
    registry = place.registry()
    registry.point("words", 1, "first")
    assert place.state.alias("ingot-words", "live") == 1
    place.google.fault("ModelService.MergeVersionAliases", 403, message="no right")
    registry.point("words", 2, "second")
    assert place.state.alias("ingot-words", "live") == 1, "the pointer alone decides"
    live = registry.live("words")
    assert live is not None
    assert live.number == place.state.alias("ingot-words", "live") == 2
    for turn in range(1, 20):
        other = 3 - live.number
        died = killed_at(
            place, turn, functools.partial(place.registry().point, "words", other, "again")
        )
        live = place.registry().live("words")
        assert live is not None
        assert place.state.alias("ingot-words", "live") == live.number
        if not died:
            break
    assert turn > 4


def test_files_that_are_missing_or_changed_are_named(place: Place) -> None:
    add(place, "a")
    registry = place.registry()
    version = registry.version("words", 1)
    registry.check(version)
    place.storage.objects[f"{FOLDER}/a-tokenizer/config.json"].crc32c = "AAAAAA=="
    with pytest.raises(
        WrongInput, match=r"words v1 is damaged: gs://bucket/.*config\.json is missing or changed"
    ):
        registry.check(version)
    marker, files = f"{FOLDER}/a-tokenizer/VERSION.json", open_bucket("gs://bucket")
    files.put(marker, files.get(marker).replace(b'"config.json"', b'"../config.json"'))
    with pytest.raises(WrongInput, match=r"lists \.\./config\.json, which lies outside"):
        registry.fetch(version)
    del place.storage.objects[f"{FOLDER}/a-tokenizer/VERSION.json"]
    with pytest.raises(
        WrongInput, match=r"VERSION\.json is missing or damaged; register the model again"
    ):
        registry.check(version)
    del place.storage.objects[f"{FOLDER}/a-tokenizer.json"]
    with pytest.raises(
        WrongInput, match=r"a-tokenizer\.json, the record of words v1, is missing or damaged"
    ):
        registry.version("words", 1)


def test_a_version_is_fetched_once(place: Place) -> None:
    add(place, "a")
    with pytest.raises(
        WrongInput,
        match=r"nothing is live as words in the Model Registry .*--version 1 registry\.kind=vertex`",
    ):
        registered_folder(place.registry(), "words")
    folder = registered_folder(place.registry(), "words", 1)
    assert (folder / "model.safetensors").read_bytes() == b"weights of a"
    before = place.storage.counts["media"]
    (folder / "config.json").unlink()
    assert registered_folder(place.registry(), "words", 1) == folder
    assert (folder / "config.json").exists(), "a folder that lost a file is fetched anew"
    again = place.storage.counts["media"]
    assert again > before + 2
    registered_folder(place.registry(), "words", 1)
    assert place.storage.counts["media"] == again + 2, "the record and the marker alone"


def test_a_file_that_is_not_the_registered_one_is_not_fetched(place: Place) -> None:
    add(place, "a")
    registry = place.registry()
    place.storage.write(f"{FOLDER}/a-tokenizer/model.safetensors", b"weights of b", {}, {})
    with pytest.raises(Failed, match=r"model\.safetensors has 12 bytes, .* not what was sent"):
        registered_folder(registry, "words", 1)
    assert not list(Path(place.recipe().output).glob("registry-vertex/*/*/model.safetensors"))


@pytest.mark.parametrize(
    ("cloud", "says"),
    [
        ({"project": "wrong"}, r"Permission denied on resource project wrong .*; ask for the role"),
        ({"bucket": None}, r"set cloud\.bucket"),
        (
            {"bucket": "elsewhere"},
            r"could not look at the bucket gs://elsewhere: .*; create it, or mend cloud\.bucket",
        ),
        ({"images": {}}, r"no container image for serve; set cloud\.images\.serve"),
        (
            {"images": {"serve": "europe-west4-docker.pkg.dev/p/r/i"}},
            r"lies in europe-west4, cloud\.region is us-central1; build it there",
        ),
    ],
)
def test_what_is_missing_or_elsewhere_is_one_line_and_nothing_is_registered(
    place: Place, cloud: dict[str, Any], says: str
) -> None:
    with pytest.raises(WrongInput, match=says) as caught:
        VertexRegistry(place.recipe(cloud=cloud)).add(
            "words", a_model(place.root / "a", "a"), a_report("a"), {}
        )
    assert "\n" not in str(caught.value)
    assert not place.state.models
    place.is_quiet()


def test_a_missing_role_is_named(place: Place) -> None:
    place.google.fault(
        "ModelService.UploadModel", 403, message="Permission 'aiplatform.models.upload' denied."
    )
    with pytest.raises(
        WrongInput,
        match=(
            r"could not register words: .*aiplatform\.models\.upload.*; ask for the role Vertex AI"
            r" User"
        ),
    ):
        add(place, "a")
    place.is_quiet()


def test_without_credentials_the_next_command_is_named(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(place.root))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    clients._credentials.cache_clear()
    recipe = trained(place.recipe(cloud={"endpoint": None}), "a")
    with pytest.raises(
        WrongInput,
        match=r"no credentials for Google Cloud .*run `gcloud auth application-default login`",
    ):
        gate(recipe)
    clients._credentials.cache_clear()


@pytest.mark.parametrize("location", ["EUROPE-WEST4", "EU", "EUR4"])
def test_a_bucket_of_another_region_is_refused(place: Place, location: str) -> None:
    place.storage.location = location
    with pytest.raises(
        WrongInput,
        match=(
            rf"the bucket gs://bucket lies in {location.lower()}, and cloud\.region is us-central1;"
            r" take a bucket in us-central1"
        ),
    ):
        add(place, "a")
    assert not place.state.models


def test_a_bucket_of_several_regions_will_do(place: Place) -> None:
    place.storage.location = "US"
    assert add(place, "a") == 1


@pytest.mark.parametrize(
    ("serve", "image", "args", "health", "predict"),
    [
        (
            {"max_tokens": 7, "any_template": True, "port": 9, "api_key": "env:KEY"},
            IMAGE,
            ["serve.engine=native", "serve.any_template=true", "serve.max_tokens=7"],
            "/health",
            "/predict",
        ),
        (
            {"engine": "transformers", "image": "us-docker.pkg.dev/p/r/own"},
            "us-docker.pkg.dev/p/r/own",
            ["serve.engine=transformers"],
            "/health",
            "/predict",
        ),
        (
            {
                "engine": "vllm",
                "image": "us-docker.pkg.dev/p/r/vllm",
                "machine": {"type": "g2-standard-12"},
            },
            "us-docker.pkg.dev/p/r/vllm",
            [
                "--model",
                "$(AIP_STORAGE_URI)",
                "--served-model-name",
                "words",
                "--host",
                "0.0.0.0",
                "--port",
                "8080",
            ],
            "/health",
            "/invocations",
        ),
        (
            {
                "engine": "triton",
                "image": "us-docker.pkg.dev/p/r/t",
                "machine": {"type": "g2-standard-12"},
            },
            "us-docker.pkg.dev/p/r/t",
            ["--model-repository=$(AIP_STORAGE_URI)", "--http-address=0.0.0.0", "--http-port=8080"],
            "/v2/health/ready",
            "/v2/models/words/generate",
        ),
    ],
)
def test_each_engine_has_its_container(
    place: Place, serve: Any, image: str, args: list[str], health: str, predict: str
) -> None:
    container = container_of(place.recipe(serve=serve, cloud=ACCOUNT))
    assert (
        container.image,
        list(container.args[: len(args)]),
        container.health,
        container.predict,
        container.port,
    ) == (image, args, health, predict, 8080)
    assert (container.shared_memory_mb > 0) == (serve.get("engine") in ("vllm", "triton"))


@pytest.mark.parametrize("engine", ["vllm", "triton"])
def test_an_engine_of_others_needs_its_image_where_endpoints_look(
    place: Place, engine: str
) -> None:
    with pytest.raises(
        WrongInput,
        match=rf"serve\.engine {engine} is not in Artifact Registry.*set serve\.image",
    ):
        container_of(place.recipe(serve={"engine": engine, "machine": {"type": "g2-standard-12"}}))


def test_a_triton_without_an_account_of_its_own_could_not_read_the_weights(place: Place) -> None:
    serve = {
        "engine": "triton",
        "image": "us-docker.pkg.dev/p/r/t",
        "machine": {"type": "g2-standard-12"},
    }
    with pytest.raises(
        WrongInput, match=r"endpoint's default account may not; set cloud\.service_"
    ):
        container_of(place.recipe(serve=serve))
    container_of(place.recipe(serve=serve, cloud=ACCOUNT))


def test_a_triton_is_given_a_repository_and_not_the_bare_model(place: Place) -> None:
    serve = {
        "engine": "triton",
        "image": "us-docker.pkg.dev/p/r/t",
        "machine": {"type": "g2-standard-12"},
    }
    folder = a_model(place.root / "models" / "a", "a")
    recipe = place.recipe(serve=serve, cloud=ACCOUNT)
    VertexRegistry(recipe).add("words", folder, a_report("a", 2.5), {})
    (uploaded,) = place.google.requests("ModelService.UploadModel")
    root = uploaded.model.artifact_uri.removeprefix(f"gs://{place.storage.bucket}/")
    files = {
        name.removeprefix(f"{root}/"): stored.data
        for name, stored in place.storage.objects.items()
        if name.startswith(f"{root}/")
    }
    assert files.keys() == {"words/config.pbtxt", "words/1/model.json"}
    engine = json.loads(files["words/1/model.json"])
    container = uploaded.model.labels["ingot-container"]
    assert (
        f"gs://{place.storage.bucket}/{root}".removesuffix(f"-{container}-repository")
        == engine["model"]
    )


def test_another_container_of_the_same_files_is_a_new_version(place: Place) -> None:
    add(place, "a")
    before = dict(place.storage.objects)
    recipe = place.recipe(serve={"max_tokens": 7})
    assert (
        VertexRegistry(recipe)
        .add("words", a_model(place.root / "models" / "a", "a"), a_report("a"), {})
        .number
        == 2
    )
    assert {
        name
        for name in place.storage.objects
        if place.storage.objects[name] is not before.get(name)
    } == {f"{FOLDER}/a-tokenizer.json"}
    versions = place.state.models["ingot-words"]
    assert [list(versions[which].container_spec.args) for which in (1, 2)] == [
        ["serve.engine=native"],
        ["serve.engine=native", "serve.max_tokens=7"],
    ]
    assert versions[1].artifact_uri == versions[2].artifact_uri
    for asked, which in (
        (place.recipe(), 1),
        (recipe, 2),
        (place.recipe(serve={"max_tokens": 8}), 2),
    ):
        found = VertexRegistry(asked).find("words", a_report("a"))
        assert found is not None
        assert found.number == which
    assert add(place, "a") == 1, "the first container again is the first version again"
    assert len(versions) == 2


def test_a_version_keeps_its_image_and_that_is_told(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tag may name another one by now, which neither registering nor deploying would serve."""
    pinned = f"{IMAGE.removesuffix(':latest')}@sha256:{'1' * 64}"
    folder = a_model(place.root / "models" / "a", "a")
    for image, number, told in (
        (IMAGE, 1, False),
        (IMAGE, 1, True),
        (pinned, 2, False),
        (pinned, 2, False),
    ):
        registry = VertexRegistry(place.recipe(serve={"image": image}))
        assert registry.add("words", folder, a_report("a"), {}).number == number
        said = f"words v{number} was registered before and serves with what {image} was then"
        assert (said in capsys.readouterr().err) == told


def test_a_tritons_knobs_are_in_its_repository_and_so_in_its_version(place: Place) -> None:
    """Its arguments are the same whatever the knobs; each version must have a repository of its
    own.
    """
    folder, uris = a_model(place.root / "models" / "a", "a"), []
    for which, batch in ((1, 4), (2, 8), (1, 4)):
        serve = {
            "engine": "triton",
            "image": "us-docker.pkg.dev/p/r/t",
            "machine": {"type": "g2-standard-12"},
            "max_batch": batch,
        }
        recipe = place.recipe(serve=serve, cloud=ACCOUNT)
        made = VertexRegistry(recipe).add("words", folder, a_report("a"), {})
        assert (made.number, made.engine) == (which, "triton")
        uris.append(place.state.models["ingot-words"][made.number].artifact_uri)
    assert uris[0] == uris[2] != uris[1]
    engines = [
        json.loads(
            place.storage.objects[f"{uri.removeprefix('gs://bucket/')}/words/1/model.json"].data
        )
        for uri in uris
    ]
    assert [engine["max_num_seqs"] for engine in engines] == [4, 8, 4]


def test_a_damaged_version_is_mended_by_registering_it_again(place: Place) -> None:
    recipe, _ = place.registered("one", "a")
    registry = place.registry()
    files = {
        name: place.storage.objects[f"{FOLDER}/a-tokenizer/{name}"]
        for name in ("config.json", "model.safetensors", "VERSION.json")
    }

    def is_mended(*changed: str) -> None:
        before = {name: place.storage.objects.get(f"{FOLDER}/a-tokenizer/{name}") for name in files}
        assert register(recipe).result.startswith("words v1")
        registry.check(registry.version("words", 1))
        after = {name: place.storage.objects[f"{FOLDER}/a-tokenizer/{name}"] for name in files}
        assert {name for name in files if after[name] is not before[name]} >= set(changed)
        assert after["model.safetensors"].data == b"weights of a"
        if "model.safetensors" not in changed:
            assert after["model.safetensors"] is before["model.safetensors"], (
                "only what differs is sent"
            )

    place.storage.objects[f"{FOLDER}/a-tokenizer/config.json"].crc32c = "AAAAAA=="
    is_mended("config.json")
    del place.storage.objects[f"{FOLDER}/a-tokenizer/model.safetensors"]
    is_mended("model.safetensors")
    del place.storage.objects[f"{FOLDER}/a-tokenizer/VERSION.json"]
    is_mended("VERSION.json")
    del place.storage.objects[f"{FOLDER}/a-tokenizer.json"]
    is_mended()
    assert len(place.google.requests("ModelService.UploadModel")) == 1


def test_labels_keep_to_their_alphabet_and_their_number() -> None:
    metric = Metric(-1.5e-7, 0, 0, "lower", 1, "s")
    keys = [
        f"{kind}/{'x' * length}{index}"
        for kind in ("Loss", "7b", "ä")
        for length in (1, 80)
        for index in range(15)
    ]
    report = EvaluationReport("m", "t", dict.fromkeys(keys, metric))
    made = version_labels(report, {"ingot-key": "k"}, {"Team": "Größe XXL"})
    assert len(made) == labels.MAX_LABELS
    assert made["ingot-key"] == "k"
    vertex_models._check_labels(made)
    assert [label_number(value) for value in (0.8123, 12345678.0, -0.5, 1e20)] == [
        "0_8123",
        "1_23457e07",
        "-0_5",
        "1e20",
    ]


def test_ids_are_such_as_google_takes_and_no_two_names_share_one() -> None:
    names = [
        "words",
        "Words",
        "wörds.v1",
        "words.v1",
        "words_v1",
        "w" * 100,
        "w" * 99,
        "words-",
        "0.5b",
    ]
    found = {resource_id(name) for name in names}
    assert len(found) == len(names)
    assert all(
        len(one) <= 63
        and one[0] == "i"
        and one[-1] != "-"
        and set(one) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        for one in found
    )
    assert model_key("a" * 16, "b" * 16) == f"{'a' * 16}-{'b' * 16}"
    assert len(model_key("a" * 64, "b" * 64)) <= 63
