"""`ingot images build` as it is typed, against `tests/fakes/builds.py`."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.base.remote.replica import push, replica_url
from ingot.base.reports import BEGUN
from ingot.base.runfolder import RunFolder
from ingot.cli.app import app
from ingot.cloud import builds, clients
from tests import gcs
from tests.cloud.checkout import committed, running_from
from tests.fakes import builds as fake
from tests.fakes.google import Server

HERE = "us-central1-docker.pkg.dev/proj/ingot"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake.State]:
    running_from(monkeypatch, committed(tmp_path / "checkout"))
    monkeypatch.setattr(builds, "POLL_S", 0.01)
    monkeypatch.setattr(clients, "FIRST_WAIT_S", 0.01)
    monkeypatch.chdir(tmp_path)
    server = Server()
    with gcs.serving(monkeypatch) as storage:
        yield fake.install(server, storage)
    server.server_close()


@pytest.fixture
def build(service: fake.State, tmp_path: Path) -> Callable[..., int]:
    cloud = {
        "project": "proj",
        "bucket": "bucket",
        "repository": "ingot",
        "endpoint": service.server.address,
    }
    (tmp_path / "recipe.yaml").write_text(
        json.dumps({"name": "docs", "data": {"train": [{"source": "raw"}]}, "cloud": cloud})
    )
    return lambda *arguments: (
        app(["images", "build", *arguments, "recipe.yaml"], standalone_mode=False) or 0
    )


def a_run(root: Path) -> Path:
    for name in (
        "model/config.json",
        "model/model.safetensors",
        "data/columns/manifest.json",
        "data/tokenizer/tokenizer.json",
        "data/raw/big.parquet",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"content of {name}")
    return root


def baked(service: fake.State, kind: str) -> dict[str, str]:
    """Files that go into an image, by the archive that its build fetches."""
    fetch = next(step for step in service.build.steps if step.id == f"fetch-{kind}")
    name = fetch.args[-1].split("gs://bucket/")[1].split('"')[0]
    with tarfile.open(fileobj=io.BytesIO(service.storage.objects[name].data)) as tar:
        return {item.name: tar.extractfile(item).read().decode() for item in tar}  # type: ignore[union-attr]


def test_images_are_built_and_told_on_stdout(
    service: fake.State, build: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert build("train", "spark", "--tag", "v1") == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert lines == service.pushed
    assert {name.rpartition("/")[2].partition(":")[0] for name in lines} == {
        "ingot-train",
        "ingot-spark",
    }
    assert sum(name.endswith((":latest", ":v1")) for name in lines) == 4
    assert "TORCH_BUILD=cu126" in service.build.steps[0].args
    assert not any("TORCH" in word for word in service.build.steps[1].args)


def test_the_same_source_is_sent_once(service: fake.State, build: Callable[..., int]) -> None:
    build("train")
    build("spark")
    assert len([name for name in service.storage.written if "source-" in name]) == 1


def test_a_dry_run_sends_nothing(
    service: fake.State,
    build: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    a_run(tmp_path / "runs" / "docs")
    assert build("serve", "--with", "model", "--dry-run") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [step["id"] for step in shown["steps"]] == ["serve", "fetch-serve", "bake-serve"]
    assert service.server.calls == []
    assert service.storage.written == []


def test_what_is_not_committed_is_told(
    build: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkout" / "ingot" / "new.py").write_text("")
    build("train", "--dry-run")
    assert "warning: 1 changed or new files are not in the images" in capsys.readouterr().err


def test_model_and_data_of_a_run_go_where_the_image_looks_for_them(
    service: fake.State, build: Callable[..., int], tmp_path: Path
) -> None:
    a_run(tmp_path / "runs" / "docs")
    build("train", "serve", "--with", "model,data")
    assert set(baked(service, "train")) == {
        "runs/docs/model/config.json",
        "runs/docs/model/model.safetensors",
        "runs/docs/data/columns/manifest.json",
        "runs/docs/data/tokenizer/tokenizer.json",
    }
    assert baked(service, "serve") == {
        name: f"content of {name}" for name in ("model/config.json", "model/model.safetensors")
    }
    assert f"{HERE}/ingot-train:run-docs" in service.pushed


def test_the_model_of_an_earlier_training_is_told_before_it_goes_into_an_image(
    build: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = a_run(tmp_path / "runs" / "docs")
    (root / "model" / "ingot.json").write_text('{"step": 4}')
    steps = RunFolder(root).steps
    steps.mkdir(parents=True)
    (steps / "train.json").write_text(BEGUN)
    build("train", "--with", "data", "--dry-run")
    told = "`train` was begun in runs/docs and has not ended, so runs/docs/model (step 4) may be an"
    assert told not in capsys.readouterr().err
    build("serve", "--with", "model", "--dry-run")
    assert f"note: {told} earlier training's" in capsys.readouterr().err


@pytest.mark.parametrize("registry", ["vertex", "local"])
def test_a_new_image_for_serving_is_not_yet_what_serves(
    build: Callable[..., int], capsys: pytest.CaptureFixture[str], registry: str
) -> None:
    build("serve", f"registry.kind={registry}")
    told = "registered versions keep the image that they were registered with"
    assert (told in capsys.readouterr().err) == (registry == "vertex")


def test_what_is_not_here_comes_from_the_replica(
    service: fake.State, build: Callable[..., int], tmp_path: Path
) -> None:
    root = a_run(tmp_path / "runs" / "docs")
    push(root, replica_url("bucket", "docs"))
    shutil.rmtree(root)
    build("serve", "--with", "model")
    assert baked(service, "serve") == {
        name: f"content of {name}" for name in ("model/config.json", "model/model.safetensors")
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["train", "triton"],
            "triton is no image of ours; give one or more of train, spark, serve",
        ),
        (
            ["serve", "--with", "model"],
            (
                r"runs/docs/model is not there, nor in gs://bucket/ingot/runs/docs; run `ingot"
                r" train` first"
            ),
        ),
        (
            ["train", "--with", "data", "--dry-run"],
            (
                r"data/columns is not there, and a dry run fetches nothing .*; run `ingot prepare`"
                r" first"
            ),
        ),
        (
            ["train", "--with", "weights"],
            "--with weights is nothing that an image can carry; it is data or model",
        ),
        (["spark", "--with", "data"], "an image for spark carries no data"),
        (["serve", "--with", "model,data"], "no image of serve carries data; build train too"),
        (["train", "--tag", "a b"], "--tag 'a b' cannot be a tag"),
        (
            ["train", "cloud.repository=null"],
            "no repository for container images; set cloud.repository",
        ),
        (["train", "cloud.bucket=null"], "set cloud.bucket"),
        (
            ["train", "--with", "data", "output=/elsewhere"],
            "/elsewhere/docs/data/columns is not there",
        ),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_built(
    service: fake.State, build: Callable[..., int], arguments: list[str], says: str
) -> None:
    with pytest.raises(WrongInput, match=says):
        build(*arguments)
    assert service.builds == {}
    assert not any("source-" in name for name in service.storage.written) or "--with" in arguments


def test_no_name_is_told(service: fake.State, build: Callable[..., int]) -> None:
    with pytest.raises(
        WrongInput, match="no image is named; give one or more of train, spark, serve"
    ):
        build()


def test_an_output_that_a_container_would_not_find_is_refused(
    build: Callable[..., int], tmp_path: Path
) -> None:
    a_run(tmp_path / "elsewhere" / "docs")
    with pytest.raises(
        WrongInput,
        match="is no folder below the working folder, where a container would look for it",
    ):
        build("train", "--with", "data", f"output={tmp_path}/elsewhere")


@pytest.mark.parametrize(
    ("knobs", "torch"),
    [
        ([], "cpu"),
        (["serve.machine={type: g2-standard-8}"], "cu126"),
        (
            ["serve.machine={type: n1-standard-8, accelerator: nvidia-tesla-t4, accelerators: 1}"],
            "cu126",
        ),
        (["--torch", "cu130"], "cu130"),
    ],
)
def test_the_serving_image_has_cuda_where_a_gpu_answers(
    build: Callable[..., int], knobs: list[str], torch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    build("serve", "--dry-run", *knobs)
    assert f"TORCH_BUILD={torch}" in json.loads(capsys.readouterr().out)["steps"][0]["args"]
