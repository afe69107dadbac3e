"""One step of the compiled pipeline in its container: what it fetches, starts and sends. The bucket
and the services are servers of the tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.replica import pull, push
from ingot.base.reports import PipelineStepRecord, read_record, write_record
from ingot.cloud.bigquery import EMULATOR
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.launch.places.local import JobExit
from ingot.pipeline import container
from ingot.pipeline.plan import plan
from tests import gcs
from tests.cloud import bigquery_server
from tests.fakes import google, vertex_jobs
from tests.small import small_recipe, write_documents

REPLICA = "gs://bucket/ingot/runs/small"


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[gcs.Server]:
    monkeypatch.chdir(tmp_path)
    with gcs.serving(monkeypatch) as server:
        yield server


@pytest.fixture
def service(tmp_path: Path) -> Iterator[vertex_jobs.State]:
    server = google.Server()
    state = vertex_jobs.install(server)
    state.workers = tmp_path / "workers"
    try:
        yield state
    finally:
        state.close()
        server.server_close()


def sent(root: Path, **knobs: Any) -> Recipe:
    """A recipe whose object lies in the bucket."""
    if not (root / "text").exists():
        write_documents(root / "text")
    recipe = small_recipe(
        root,
        **{
            "cloud.project": "proj",
            "cloud.bucket": "bucket",
            "cloud.images.train": "us-docker.pkg.dev/proj/ingot/ingot-train:latest",
            **knobs,
        },
    )
    wanted = plan(recipe)
    folder, _, name = wanted.address.rpartition("/")
    open_bucket(folder).put(name, wanted.recipe.encode())
    return recipe


def done(
    recipe: Recipe, verb: str, place: str = "", submission: str = "one"
) -> container.StepOutputs:
    return container.run_container_step(verb, plan(recipe).address, REPLICA, place, submission)


def test_a_step_leaves_its_record_in_the_bucket_and_nothing_here(tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    made = done(sent(tmp_path), "ingest")
    assert set(tmp_path.iterdir()) - before == {tmp_path / "text"}
    assert Path.cwd() == tmp_path
    pull(REPLICA, tmp_path / "seen")
    record = read_record(tmp_path / "seen/reports/steps", "ingest")
    assert record is not None
    assert made == container.StepOutputs(REPLICA, record.outputs, "")
    assert list((tmp_path / "seen/data/raw").rglob("*.parquet"))


def test_a_step_that_fails_ends_with_the_verbs_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And what the verb made until then is in the bucket, for the next try."""
    with pytest.raises(SystemExit) as ended:
        done(sent(tmp_path, **{"data.train": f"[{{source: {tmp_path / 'absent'}}}]"}), "ingest")
    assert ended.value.code == 2
    assert "ingest ended with exit code 2, see above" in capfd.readouterr().err
    assert not open_bucket(REPLICA).list("reports/steps/ingest.json")


@pytest.mark.drawn("a container for the second time")
def test_the_second_time_it_is_unchanged_unless_the_cache_is_off(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = done(sent(tmp_path), "ingest")
    capfd.readouterr()
    assert done(sent(tmp_path), "ingest", submission="two") == first
    assert "ingest: unchanged" in capfd.readouterr().err
    done(sent(tmp_path, **{"pipeline.cache": False}), "ingest", submission="three")
    assert "unchanged" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("verb", "place", "fetched"),
    [
        ("train", "", {"columns"}),
        ("train", "launch.kind=vertex", set()),
        ("evaluate", "", {"raw"}),
        ("evaluate", "launch.kind=vertex", set()),
        ("gate", "", set()),
        ("register", "", set()),
        ("prepare", "", {"raw", "columns"}),
    ],
)
def test_a_container_fetches_the_data_that_its_verb_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, place: str, fetched: set[str]
) -> None:
    recipe, large = (
        sent(tmp_path),
        {
            "raw": "train-00000.parquet",
            "columns": "train.tokens-00000.bin",
        },
    )
    for kind, name in large.items():
        for each in (name, "manifest.json"):
            (tmp_path / "there/data" / kind).mkdir(parents=True, exist_ok=True)
            (tmp_path / "there/data" / kind / each).write_text("{}")
    push(tmp_path / "there", REPLICA)
    seen: list[str] = []

    def look(*_: Any, **__: Any) -> JobExit:
        root = load_recipe([container.RECIPE], environ={}, dotenv=None).folder.root
        assert all((root / "data" / kind / "manifest.json").exists() for kind in large)
        seen.extend(kind for kind, name in large.items() if (root / "data" / kind / name).exists())
        return JobExit(1, 0)

    monkeypatch.setattr(container, "foreground", look)
    with pytest.raises(SystemExit):
        done(recipe, verb, place)
    assert set(seen) == fetched
    assert all(open_bucket(REPLICA).stat(f"data/{kind}/{name}") for kind, name in large.items())


def test_each_training_has_checkpoints_of_its_own_and_one_that_is_tried_again_finds_its_own(
    tmp_path: Path,
) -> None:
    one, other = sent(tmp_path), sent(tmp_path, **{"train.steps": 7})
    (address,) = container._options("train", _as_read(one), "one")
    assert address.startswith(f"checkpoint.upload={REPLICA}/checkpoints/")
    assert container._options("train", _as_read(one), "two") == [address]
    assert container._options("train", _as_read(other), "one") != [address]
    assert container._options("gate", _as_read(one), "one") == []


def test_without_a_cache_each_run_trains_anew_and_goes_on_when_tried_again(tmp_path: Path) -> None:
    recipe = _as_read(sent(tmp_path, **{"pipeline.cache": False}))
    address, fresh = container._options("train", recipe, "one")
    assert fresh == "--fresh"
    open_bucket(address.partition("=")[2]).put("step-00000003/COMMIT.json", b"{}")
    recipe.folder.steps.mkdir(parents=True)
    (recipe.folder.steps / "train.json").write_text("{}")
    assert container._options("train", recipe, "one") == [address]
    assert not (recipe.folder.steps / "train.json").exists()
    assert container._options("train", recipe, "two")[1] == "--fresh"
    assert container._options("evaluate", recipe, "two") == ["--again"]
    assert container._options("deploy", recipe, "two") == []


@pytest.mark.parametrize("knob", ["data.train", "data.validation"])
def test_a_query_is_asked_again_each_time(knob: str, tmp_path: Path) -> None:
    recipe = _as_read(
        sent(
            tmp_path,
            **{
                "data.validation.fraction": None,
                knob: "[{source: gs://bucket/x.jsonl}, {source: 'bigquery:SELECT text FROM d.t'}]",
            },
        )
    )
    assert container._options("ingest", recipe, "one") == ["--again"]
    assert container._options("prepare", recipe, "one") == []
    assert container._options("ingest", _as_read(sent(tmp_path)), "one") == []


@pytest.mark.drawn("a container for the second time")
def test_new_rows_are_seen_and_equal_ones_do_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("google.cloud.bigquery", reason="google-cloud-bigquery is not installed")
    texts = [
        path.read_text(encoding="utf-8")
        for path in sorted(write_documents(tmp_path / "rows", count=30).iterdir())
    ]
    server = bigquery_server.Server([{"text": text} for text in texts])
    monkeypatch.setenv(EMULATOR, server.address)
    try:
        recipe = sent(
            tmp_path, **{"data.train": "[{source: 'bigquery:SELECT text FROM d.t ORDER BY id'}]"}
        )
        first = {verb: done(recipe, verb) for verb in ("ingest", "prepare")}
        capfd.readouterr()
        assert {verb: done(recipe, verb, submission="two") for verb in first} == first
        said = capfd.readouterr().err
        assert len(server.queries) == 2
        assert "ingest: unchanged" not in said
        assert "prepare: unchanged" in said
        server.rows.append({"text": "The mould of the next week rings true."})
        assert done(recipe, "ingest", submission="three") != first["ingest"]
    finally:
        server.server_close()


def _as_read(recipe: Recipe) -> Recipe:
    """As a container reads it."""
    path = Path("read.yaml")
    path.write_text(plan(recipe).recipe, encoding="utf-8")
    return load_recipe([path], environ={}, dotenv=None)


def test_a_training_is_supervised_and_the_others_are_not() -> None:
    assert container._job("train", [], []).argv == ("launch", "train", "pipeline.yaml")
    assert container._job("evaluate", [], ["--again"]).argv == (
        "evaluate",
        "pipeline.yaml",
        "--again",
    )
    assert container._job("evaluate", ["launch.kind=gce"], []).argv == (
        "launch",
        "evaluate",
        "pipeline.yaml",
        "launch.kind=gce",
    )


def test_a_deployment_is_recorded_so_that_the_next_run_skips_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []

    def foreground(job: Any, **_: Any) -> Any:
        asked.append(job.argv)
        return JobExit(0, 0)

    monkeypatch.setattr(container, "foreground", foreground)
    recipe = sent(tmp_path)
    with pytest.raises(SystemExit) as ended:
        done(recipe, "deploy")
    assert ended.value.code == 2
    assert "nothing that was registered" in capfd.readouterr().err
    _record(tmp_path, "register", "hash of the model")
    first = done(recipe, "deploy")
    assert done(recipe, "deploy") == first
    assert asked == [("deploy", "pipeline.yaml")] * 2
    _record(tmp_path, "register", "hash of another")
    assert done(recipe, "deploy") != first
    assert len(asked) == 3


def _record(root: Path, verb: str, outputs: str) -> None:
    folder = root / "seen"
    pull(REPLICA, folder)
    write_record(
        folder / "reports/steps",
        PipelineStepRecord(verb, "inputs", outputs, 0.1, "v1, live", "somewhere"),
    )
    push(folder, REPLICA)


@pytest.mark.slow
def test_a_step_whose_place_is_vertex_submits_a_job_and_waits(
    tmp_path: Path, service: vertex_jobs.State
) -> None:
    """The job's container really runs, in a folder of its own."""
    for path in write_documents(tmp_path / "some", count=8).iterdir():
        open_bucket("gs://bucket/text").put(path.name, path.read_bytes())
    recipe = sent(
        tmp_path,
        **{
            "cloud.endpoint": service.server.address,
            "data.train": "[{source: 'gs://bucket/text/*.txt'}]",
        },
    )
    made = done(recipe, "ingest", "launch.kind=vertex\nlaunch.nodes=1")
    (job,) = service.jobs.values()
    assert job.state == vertex_jobs.STATE.JOB_STATE_SUCCEEDED
    assert dict(job.labels)["ingot-verb"] == "ingest"
    pull(REPLICA, tmp_path / "seen")
    record = read_record(tmp_path / "seen/reports/steps", "ingest")
    assert record is not None
    assert record.outputs == made.fingerprint
    assert "CLUSTER_SPEC" not in os.environ
