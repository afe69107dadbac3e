"""`ingot submit`: what is sent, what is refused, how a pipeline is followed and found again.
Against the service's own interface on loopback.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.replica import pull, push
from ingot.base.storage import write_atomic
from ingot.cloud import clients
from ingot.config.load import dump_recipe, load_recipe
from ingot.config.recipe import Recipe
from ingot.pipeline import submit
from ingot.pipeline.submit import prepare_submission, render_submission
from tests import forks, gcs, golden
from tests.fakes import google, pipelines
from tests.lazy import require
from tests.patience import PATIENCE_S
from tests.small import small_recipe

require("kfp", reason="kfp is not installed")


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    monkeypatch.setattr(clients, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(submit, "POLL_S", 0.01)
    # kfp asks for the whole stack with source lines, 49 times for each pipeline that it compiles.
    monkeypatch.setattr(inspect, "stack", functools.partial(inspect.stack, 0))
    with gcs.serving(monkeypatch) as server:
        yield server


@pytest.fixture
def service() -> Iterator[pipelines.State]:
    server = google.Server()
    try:
        yield pipelines.install(server)
    finally:
        server.server_close()


def recipe_for(root: Path, address: str | None, **knobs: Any) -> Recipe:
    return small_recipe(
        root,
        **{
            "data.train": "[{source: 'gs://bucket/text/*.txt'}]",
            "cloud.project": "proj",
            "cloud.bucket": "bucket",
            "cloud.endpoint": address,
            "cloud.images.train": "us-docker.pkg.dev/proj/ingot/ingot-train:latest",
            "cloud.images.serve": "us-docker.pkg.dev/proj/ingot/ingot-serve:latest",
            "registry.kind": "vertex",
            "launch.machine": (
                "{type: n1-standard-8, accelerator: nvidia-tesla-t4, accelerators: 1}"
            ),
            **knobs,
        },
    )


ELSEWHERE: dict[str, Any] = {
    "launch.kind": "vertex",
    "launch.nodes": 4,
    "launch.processes": 8,
    "launch.machine": "{type: a2-highgpu-8g, spot: true}",
    "pipeline.steps": (
        "{prepare: {launch: dataproc}, evaluate: {launch: local, processes: 1, machine: {type:"
        " g2-standard-8}}, register: {image: 'eu.gcr.io/x/y'}}"
    ),
    "cloud.service_account": "runner@proj.iam.gserviceaccount.com",
    "cloud.network": "projects/12/global/networks/vpc",
    "cloud.labels": "{team: nlp}",
    "cloud.secrets": "{HF_TOKEN: 'secret:hf-token'}",
    "pipeline.retries": 0,
}


@pytest.mark.drawn("a submitted pipeline", keep=3)
@pytest.mark.parametrize(("case", "knobs"), [("here", {}), ("elsewhere", ELSEWHERE)])
def test_the_same_recipe_gives_the_same_bytes(
    case: str, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the name of the recipe's object set aside, since that changes with every knob there
    is.
    """
    submission = prepare_submission(recipe_for(Path("root"), None, **knobs))
    text = render_submission(submission)
    assert text == render_submission(
        prepare_submission(
            recipe_for(
                Path("elsewhere"),
                None,
                **{**knobs, "data.train": "[{source: 'gs://bucket/text/*.txt'}]"},
            )
        )
    )
    shown = text.replace(
        submission.plan.address, "gs://bucket/ingot/pipelines/recipes/HASH.yaml"
    ).replace(submission.spec_address, "SPEC")
    golden.check(f"pipelines/{case}.yaml", shown)


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize(
    ("machine", "megabytes"),
    [("n1-standard-2", "7500M"), ("n1-standard-1", "3750M"), ("n1-standard-8", "30000M")],
)
def test_memory_is_told_in_whole_numbers_which_is_all_that_kfp_takes(
    machine: str, megabytes: str
) -> None:
    knobs = {"pipeline.steps": f"{{gate: {{machine: {{type: {machine}}}}}}}"}
    assert f"resourceMemoryLimit: {megabytes}" in render_submission(
        prepare_submission(recipe_for(Path("root"), None, **knobs))
    )


def test_another_recipe_gives_another_recipe_object_and_nothing_of_this_machine_stands_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = (
        prepare_submission(recipe_for(Path("/home/me"), None, **{"train.steps": steps}))
        for steps in (6, 7)
    )
    assert one.plan.address != other.plan.address
    assert one.plan.address.endswith(f"{fingerprint(one.plan.recipe)}.yaml")
    assert "/home/me" not in render_submission(one) + one.plan.recipe
    read = yaml.safe_load(one.plan.recipe)
    assert (read["output"], read["launch"]["kind"], read["checkpoint"]["upload"]) == (
        "runs",
        "local",
        "gs://bucket/ingot/runs/small/checkpoints",
    )


def test_containers_work_in_the_project_that_was_asked_and_not_in_one_of_google(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is that of the credentials, the recipe does not name it; those of a container are of
    a tenant project.
    """
    given = (object(), "mine")
    monkeypatch.setattr(clients, "_credentials", lambda endpoint: given)
    submission = prepare_submission(recipe_for(Path("root"), None, **{"cloud.project": None}))
    assert submission.google.parent == "projects/mine/locations/us-central1"
    executors = submission.spec["deploymentSpec"]["executors"].values()
    assert len(executors) == 7
    for executor in executors:
        named = {one["name"]: one["value"] for one in executor["container"]["env"]}
        assert named == {"GOOGLE_CLOUD_PROJECT": "mine"}


def test_no_secret_stands_in_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    submission = prepare_submission(recipe_for(Path("root"), None, **ELSEWHERE))
    assert "hf_very_secret" not in render_submission(submission) + submission.plan.recipe
    assert "secret:hf-token" in submission.plan.recipe


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"registry.kind": "local"}, "set registry.kind to vertex"),
        ({"cloud.bucket": None}, "set cloud.bucket"),
        ({"cloud.project": None}, "no project|no Google Cloud project|GOOGLE_CLOUD_PROJECT"),
        ({"cloud.images.train": None}, "no container image for train"),
        ({"data.train": "[{source: text}]"}, "data source text lies on this machine"),
        (
            {"data.validation": "[{source: held/out.txt}]", "data.validation.fraction": None},
            "data source held/out.txt lies on this machine",
        ),
        (
            {
                "model.source": "models/x",
                "model.config": None,
                "tokenizer.source": None,
                "tokenizer.vocab_size": None,
            },
            "model.source models/x cannot be read",
        ),
        (
            {
                "model.source": "gs://b/x",
                "model.config": None,
                "tokenizer.source": None,
                "tokenizer.vocab_size": None,
            },
            "model.source gs://b/x cannot be read",
        ),
        ({"train.start_from": "runs/other"}, "train.start_from runs/other cannot be read"),
        (
            {"data.train": "[{source: 'megatron:columns/old'}]"},
            "data source megatron:columns/old lies on this machine; give the texts as gs://...",
        ),
        (
            {"tokenizer.template": "mine.jinja"},
            "tokenizer.template mine.jinja lies on this machine",
        ),
        (
            {"data.clean.contamination": "{against: [items.jsonl]}"},
            "data.clean.contamination.against items.jsonl lies on this machine",
        ),
        (
            {
                "evaluate.tasks": (
                    "[{kind: reward, rewards: [{kind: python, function: 'mine.py:f'}]}]"
                )
            },
            "reward python: mine.py lies on this machine",
        ),
        ({"pipeline.steps": "{deploy: {launch: gce}}"}, "pipeline.steps.deploy.launch"),
        (
            {"launch.machine.disk_gb": 500},
            "launch.machine.disk_gb cannot be had in a container of the pipeline",
        ),
        ({"evaluate.model": "models/y"}, "evaluate.model models/y cannot be read"),
        ({"launch.machine": "{type: n1-standrad-8}"}, "nearest is n1-standard-8"),
        (
            {"pipeline.steps": "{prepare: {machine: {type: x}}}"},
            "prepare: machine type x is not known",
        ),
        ({"launch.kind": "slurm"}, "set pipeline.steps.train.launch to vertex or gce"),
        (
            {"launch.processes": 4},
            (
                "train: 4 processes share 1 accelerators on each machine; set"
                " pipeline.steps.train.processes to 1"
            ),
        ),
        (
            {"cloud.max_cost": 10},
            "not bounded by cloud.max_cost; set pipeline.steps.train.launch to vertex",
        ),
        ({"launch.secrets": "[HF_TOKEN]"}, "cloud.secrets: {HF_TOKEN: secret:NAME}"),
    ],
)
def test_what_cannot_be_a_pipeline_is_told_before_anything_is_asked(
    knobs: dict[str, Any], told: str, service: pipelines.State
) -> None:
    with pytest.raises(WrongInput, match=told) as refused:
        prepare_submission(recipe_for(Path("root"), service.server.address, **knobs))
    assert "\n" not in str(refused.value)
    assert not service.server.calls


def submitted(
    root: Path, service: pipelines.State, **knobs: Any
) -> tuple[Recipe, submit.Submission, str]:
    recipe = recipe_for(root, service.server.address, **knobs)
    submission = prepare_submission(recipe)
    return recipe, submission, submit.submit(recipe, submission)[0]


def test_recipe_and_specification_lie_in_the_bucket_and_the_service_takes_the_job(
    tmp_path: Path, service: pipelines.State, bucket: gcs.Server
) -> None:
    _, submission, id = submitted(tmp_path, service, **ELSEWHERE)
    job = service.jobs[id]
    assert (
        bucket.objects[submission.plan.address.removeprefix("gs://bucket/")].data.decode()
        == submission.plan.recipe
    )
    assert (
        yaml.safe_load(bucket.objects[submission.spec_address.removeprefix("gs://bucket/")].data)
        == submission.spec
    )
    assert job.service_account == "runner@proj.iam.gserviceaccount.com"
    assert job.network == "projects/12/global/networks/vpc"
    assert dict(job.labels) == {"team": "nlp", "ingot-run": "small", "ingot-verb": "pipeline"}
    assert dict(job.runtime_config.parameter_values) == {
        "recipe": submission.plan.address,
        "replica": "gs://bucket/ingot/runs/small",
    }
    assert job.runtime_config.failure_policy.name == "PIPELINE_FAILURE_POLICY_FAIL_FAST"
    assert job.runtime_config.gcs_output_directory == "gs://bucket/ingot/pipelines"
    read = load_recipe([_written(tmp_path, submission.plan.recipe)], environ={}, dotenv=None)
    assert read.launch.kind == "local"


def _written(folder: Path, text: str) -> Path:
    path = folder / "read.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_steps_are_told_until_the_end(
    tmp_path: Path, service: pipelines.State, capsys: pytest.CaptureFixture[str]
) -> None:
    _, submission, id = submitted(tmp_path, service)
    submit.follow(submission, id)
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.endswith(": succeeded")] == [
        f"{verb}: succeeded"
        for verb in ("ingest", "prepare", "train", "evaluate", "gate", "register", "deploy")
    ]
    assert (
        said[-1]
        == "the gate passed the model, and the step deploy is done; its log says what it changed"
    )


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_what_there_is_to_look_at_comes_back(
    tmp_path: Path, service: pipelines.State, bucket: gcs.Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a pipeline that failed; model and data stay where they are, and are left alone by the
    next submission.
    """
    recipe, submission, id = submitted(tmp_path, service)
    there = tmp_path / "container"
    for path in (
        "metrics.jsonl",
        "samples.jsonl",
        "reports/index.html",
        "model/model.safetensors",
        "data/columns/manifest.json",
    ):
        write_atomic(there / path, "made\n")
    push(there, submission.plan.replica)
    service.fails = {"register": "no"}
    root = recipe.folder.root
    with pytest.raises(Failed, match="register failed"):
        submit.follow(submission, id, root)
    assert sorted(
        str(path.relative_to(root))
        for path in root.rglob("*.*")
        if path.is_file() and "/." not in str(path)
    ) == ["jobs/pipeline.json", "metrics.jsonl", "reports/index.html", "samples.jsonl"]
    assert f"model and data stay in {submission.plan.replica}" in capsys.readouterr().err
    push(root, submission.plan.replica)
    assert pull(submission.plan.replica, tmp_path / "third")
    assert (tmp_path / "third" / "model" / "model.safetensors").exists()
    write_atomic(there / "metrics.jsonl", "more\n")
    push(there, submission.plan.replica)
    bucket.fault("media", code=403, times=100)
    with pytest.raises(Failed, match="register failed"):
        submit.follow(submission, id, root)
    assert f"what the pipeline made lies in {submission.plan.replica}" in capsys.readouterr().err


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_no_record_of_the_pipeline_vouches_for_a_model_or_data_that_lie_here(
    tmp_path: Path, service: pipelines.State
) -> None:
    """Its own model may be another of the same sizes; records of what comes back, or does not lie
    here, are brought.
    """
    root, there = tmp_path / "runs/small", tmp_path / "container"
    steps = ("ingest", "prepare", "train", "evaluate")
    write_atomic(root / "model/model.safetensors", "ours")
    write_atomic(root / "data/columns/manifest.json", "ours")
    for step in ("train", "evaluate"):  # `prepare` had begun anew and was stopped
        write_atomic(root / f"reports/steps/{step}.json", "ours")
    recipe, submission, id = submitted(tmp_path, service)
    assert recipe.folder.root == root
    pull(submission.plan.replica, there)
    write_atomic(there / "model/model.safetensors", "made")
    for step in steps:
        write_atomic(there / f"reports/steps/{step}.json", "made")
    push(there, submission.plan.replica)
    submit.follow(submission, id, root)
    found = {path.stem: path.read_text() for path in (root / "reports/steps").iterdir()}
    assert found == {"ingest": "made", "train": "ours", "evaluate": "made"}
    assert (root / "model/model.safetensors").read_text() == "ours"
    # What is pulled whole later brings each record with its files.
    pull(submission.plan.replica, root)
    assert (root / "model/model.safetensors").read_text() == "made"
    for step in steps:
        assert (root / f"reports/steps/{step}.json").read_text() == "made"


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_a_gate_that_keeps_the_live_model_is_a_good_end(
    tmp_path: Path, service: pipelines.State, capsys: pytest.CaptureFixture[str]
) -> None:
    service.decision = "keep"
    _, submission, id = submitted(tmp_path, service)
    submit.follow(submission, id)
    said = capsys.readouterr().err
    assert "register: not triggered" in said
    assert said.endswith("the gate keeps the live model; nothing was registered\n")


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_a_step_that_fails_is_named_with_its_error(
    tmp_path: Path, service: pipelines.State
) -> None:
    service.fails = {"train": "The replica exited with a non-zero status of 1."}
    _, submission, id = submitted(tmp_path, service)
    with pytest.raises(
        Failed,
        match=(
            "train failed: The replica exited with a non-zero status of 1.; see its log,"
            f" .*/pipelines/runs/{id}"
        ),
    ):
        submit.follow(submission, id)


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_a_pipeline_that_somebody_cancels_is_told(tmp_path: Path, service: pipelines.State) -> None:
    recipe, submission, id = submitted(tmp_path, service)
    assert submit.cancel(recipe) == [id]
    with pytest.raises(Failed, match="was cancelled; submit it again"):
        submit.follow(submission, id)
    assert submit.cancel(recipe) == []


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_a_network_that_is_down_for_a_while_ends_no_following(
    tmp_path: Path,
    service: pipelines.State,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 0.02)
    _, submission, id = submitted(tmp_path, service)
    service.server.fault("PipelineService.GetPipelineJob", 503, times=20)
    submit.follow(submission, id)
    said = capsys.readouterr().err
    assert said.count("warning: could not look at the pipeline") == 1
    assert "the step deploy is done" in said


@pytest.mark.drawn
@pytest.mark.parametrize("lose", [True, False])
def test_a_lost_answer_makes_no_second_pipeline(
    lose: bool, tmp_path: Path, service: pipelines.State
) -> None:
    service.server.fault("PipelineService.CreatePipelineJob", 503, lose=lose)
    _, _, id = submitted(tmp_path, service)
    assert list(service.jobs) == [id]
    assert len(service.server.requests("PipelineService.CreatePipelineJob")) == 2


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_the_same_command_again_finds_the_pipeline_that_runs_and_starts_a_new_one_when_it_is_over(
    tmp_path: Path, service: pipelines.State
) -> None:
    recipe, submission, id = submitted(tmp_path, service)
    assert submit.submit(recipe, submission) == (id, True)
    submit.follow(submission, id)
    time.sleep(1.0)  # names tell seconds
    other, is_old = submit.submit(recipe, submission)
    assert other != id
    assert not is_old


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_a_command_that_was_killed_before_its_answer_gives_the_same_name_again(
    tmp_path: Path, service: pipelines.State
) -> None:
    recipe, submission, id = submitted(tmp_path, service)
    del service.jobs[id]
    assert submit.submit(recipe, submission) == (id, False)


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_two_pipelines_of_one_run_are_refused(tmp_path: Path, service: pipelines.State) -> None:
    _, _, id = submitted(tmp_path / "one", service)
    with pytest.raises(Failed, match=f"the pipeline {id} of small goes on"):
        submitted(tmp_path / "two", service, **{"train.steps": 7})
    assert list(service.jobs) == [id]


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_what_is_submitted_while_another_one_is_uploaded_is_refused(
    tmp_path: Path, service: pipelines.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload, refused = submit._upload, list[str]()
    # Another recipe: what is equal gets an equal id within the same second.
    second = recipe_for(tmp_path / "other", service.server.address, **{"train.steps": 7})

    def meanwhile(recipe: Recipe, submission: submit.Submission) -> None:
        monkeypatch.setattr(submit, "_upload", upload)
        with pytest.raises(Failed) as caught:
            submit.submit(second, prepare_submission(second))
        refused.append(str(caught.value))
        upload(recipe, submission)

    monkeypatch.setattr(submit, "_upload", meanwhile)
    _, _, id = submitted(tmp_path, service)
    assert "pipelines/locks/small is in use by ingot submit of small" in refused[0]
    assert list(service.jobs) == [id]
    with pytest.raises(Failed, match=f"the pipeline {id} of small goes on"):
        submit.submit(second, prepare_submission(second))


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_the_run_folder_goes_along_where_the_bucket_has_none_and_never_over_a_newer_one(
    root: Path, service: pipelines.State, bucket: gcs.Server
) -> None:
    steps = root / "runs/small/reports/steps"
    steps.mkdir(parents=True)
    (steps / "ingest.json").write_text("{}")
    recipe, submission, id = submitted(root, service)
    assert bucket.objects["ingot/runs/small/reports/steps/ingest.json"].data == b"{}"
    submit.follow(submission, id)
    (steps / "ingest.json").write_text('{"stale": true}')
    submit.submit(recipe, submission)
    assert bucket.objects["ingot/runs/small/reports/steps/ingest.json"].data == b"{}"


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize(
    ("location", "ok"),
    [
        ("US-CENTRAL1", True),
        ("US", True),
        ("NAM4", True),
        ("EUROPE-WEST4", False),
        ("EU", False),
        ("EUR4", False),
    ],
)
def test_a_bucket_of_another_region_is_refused(
    location: str, ok: bool, tmp_path: Path, service: pipelines.State, bucket: gcs.Server
) -> None:
    bucket.location = location
    if ok:
        submitted(tmp_path, service)
    else:
        with pytest.raises(
            WrongInput, match=f"lies in {location.lower()}, and cloud.region is us-central1"
        ):
            submitted(tmp_path, service)
        assert not service.jobs


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_a_missing_bucket_and_a_missing_right_are_told(
    tmp_path: Path, service: pipelines.State
) -> None:
    with pytest.raises(WrongInput, match="other"):
        submitted(tmp_path, service, **{"cloud.bucket": "other"})
    service.server.fault(
        "PipelineService.CreatePipelineJob",
        403,
        message="Permission 'aiplatform.pipelineJobs.create' denied",
    )
    with pytest.raises(WrongInput, match=r"pipelineJobs.create.*Vertex AI User"):
        submitted(tmp_path, service)


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_one_schedule_a_run_made_and_then_replaced(
    tmp_path: Path, service: pipelines.State
) -> None:
    recipe = recipe_for(tmp_path, service.server.address)
    first = submit.schedule(recipe, prepare_submission(recipe), "0 3 * * 1")
    changed = recipe_for(tmp_path, service.server.address, **{"train.steps": 9})
    second = submit.schedule(changed, prepare_submission(changed), "TZ=Europe/Berlin 30 4 * * *")
    assert first.name == second.name
    (kept,) = service.schedules.values()
    assert kept.cron == "TZ=Europe/Berlin 30 4 * * *"
    assert kept.max_concurrent_run_count == 1
    started = service.start_scheduled(first.name)
    assert (
        started.runtime_config.parameter_values["recipe"]
        == prepare_submission(changed).plan.address
    )


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_a_namesake_in_another_bucket_is_somebody_elses(
    tmp_path: Path,
    service: pipelines.State,
    bucket: gcs.Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither followed, nor refused for, nor cancelled, nor its schedule replaced."""
    monkeypatch.setattr(submit, "_check_cloud", lambda *_: None)  # of one bucket at a time here
    ann = recipe_for(tmp_path / "ann", service.server.address)
    theirs = {"cloud.bucket": "theirs", "data.train": "[{source: 'gs://theirs/text/*.txt'}]"}
    bob = recipe_for(tmp_path / "bob", service.server.address, **theirs)
    id, _ = submit.submit(ann, prepare_submission(ann))
    kept = submit.schedule(ann, prepare_submission(ann), "0 3 * * 1")
    bucket.bucket = "theirs"
    other, is_running = submit.submit(bob, prepare_submission(bob))
    assert (other != id, is_running) == (True, False)
    made = submit.schedule(bob, prepare_submission(bob), "0 5 * * 2")
    assert {name: one.cron for name, one in service.schedules.items()} == {
        kept.name: "0 3 * * 1",
        made.name: "0 5 * * 2",
    }
    assert submit.cancel(bob) == [other]
    assert submit.cancel(bob) == []
    assert submit.cancel(ann) == [id]


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_a_schedule_that_was_made_twice_is_made_one(
    tmp_path: Path, service: pipelines.State
) -> None:
    recipe = recipe_for(tmp_path, service.server.address)
    made = submit.schedule(recipe, prepare_submission(recipe), "0 3 * * 1")
    service._keep("projects/proj/locations/us-central1/schedules/77", service.schedules[made.name])
    submit.schedule(recipe, prepare_submission(recipe), "0 4 * * 1")
    assert [schedule.cron for schedule in service.schedules.values()] == ["0 4 * * 1"]


@pytest.mark.parametrize(
    "cron",
    [
        "",
        "monday",
        "0 3 * *",
        "0 24 * * *",
        "60 * * * *",
        "0 3 0 * *",
        "0 3 * 13 *",
        "*/0 * * * *",
        "0 3 * * 8",
    ],
)
def test_a_time_that_is_none_is_refused(cron: str) -> None:
    with pytest.raises(WrongInput, match='such as "0 3'):
        submit.check_cron(cron)


@pytest.mark.parametrize(
    "cron", ["0 3 * * 1", "*/15 0-6,22 1 */2 1-5", "CRON_TZ=Asia/Tokyo 0 0 * * *"]
)
def test_a_time_is_taken(cron: str) -> None:
    assert submit.check_cron(cron) == cron


def _command(root: Path, recipe: Recipe, *options: str, **variables: str) -> forks.Process:
    path = root / "recipe.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    return forks.start(
        ("submit", str(path), *options),
        cwd=root,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.drawn("pipelines from the command line")
def test_the_command_prints_the_page_and_an_interrupt_leaves_the_pipeline_running(
    tmp_path: Path, service: pipelines.State
) -> None:
    open_bucket("gs://bucket/text").put("a.txt", b"the ingot cools slowly")
    service.server.fault("PipelineService.GetPipelineJob", 0, times=10**6, delay_s=0.5)
    process = _command(tmp_path, recipe_for(tmp_path, service.server.address))
    assert process.stdout is not None
    link = process.stdout.readline().strip()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    (id,) = service.jobs
    assert (
        link
        == f"https://console.cloud.google.com/vertex-ai/locations/us-central1/pipelines/runs/{id}?project=proj"
    )
    assert "the pipeline goes on; the same command follows it, and with --cancel ends it" in said
    assert not service.server.requests("PipelineService.CancelPipelineJob")


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_a_dry_run_prints_what_would_be_sent_and_asks_nobody(
    tmp_path: Path, service: pipelines.State, bucket: gcs.Server
) -> None:
    recipe = recipe_for(tmp_path, service.server.address)
    process = _command(tmp_path, recipe, "--dry-run")
    out, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    line, *plan = said.splitlines()  # what only the bucket knows
    assert all(each.startswith("plan: ") for each in plan), said
    assert line.startswith("not checked: ")
    assert "gs://bucket/text/*.txt lies elsewhere, and a dry run asks nobody" in line
    assert out == render_submission(prepare_submission(recipe))
    assert not service.server.calls
    assert not bucket.objects


@pytest.mark.drawn("a submitted pipeline", keep=3)
def test_a_dry_run_loads_no_client_of_the_service(tmp_path: Path) -> None:
    code = (
        "import sys; from ingot.cli.app import main; sys.argv = ['ingot', 'submit', sys.argv[1],"
        " '--dry-run']\ntry:\n    main()\nfinally:\n    print('aiplatform' if"
        " 'google.cloud.aiplatform_v1' in sys.modules else 'none', file=sys.stderr)"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe_for(tmp_path, None)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "none"
    assert "schemaVersion" in done.stdout


@pytest.mark.drawn("pipelines from the command line")
def test_cancel_from_the_command_line(tmp_path: Path, service: pipelines.State) -> None:
    recipe, _, id = submitted(tmp_path, service)
    process = _command(tmp_path, recipe, "--cancel")
    out, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out.strip()) == (0, id), said
    assert open_bucket("gs://bucket/ingot/pipelines").list("specs/")
