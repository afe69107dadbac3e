"""What a job gets from a recipe before its place is asked: what may be spent, and a meeting place
that is empty.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.replica import pull, push
from ingot.base.runlog import read_lines, record_event
from ingot.base.storage import write_atomic
from ingot.cloud.machines import accelerators_of
from ingot.cloud.prices import time_limit_s
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.config.sections.deployment import StepPlace
from ingot.launch import run_job, staging
from ingot.launch.handles import store_handle
from ingot.launch.job import Handle, Job, JobState
from ingot.launch.places.local import JobExit
from ingot.launch.places.logs import FileLog
from ingot.launch.places.node_commands import accelerators_in_vain
from ingot.launch.rendezvous import EXIT, Rendezvous
from tests import gcs
from tests.small import small_recipe


class Standing:
    """A launcher of which only the state of its job is asked."""

    shares_disk, paid_by_use = False, False

    def __init__(self, state: JobState) -> None:
        self.state = state

    def can(self, job: Job) -> list[str]:
        return []

    def status(self, handle: Handle) -> JobState:
        return self.state


def test_nodes_meet_where_nobody_has_left_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(tmp_path, launch__kind="gce", cloud__bucket="bucket", cloud__project="p")
    job = run_job.job_of(recipe, "train", distributed=True)
    with gcs.serving(monkeypatch) as server:
        open_bucket(job.rendezvous or "").put("exit-0.json", b"{}")
        assert staging.with_next_rendezvous(recipe, job).rendezvous == job.rendezvous
        assert not server.objects


@pytest.mark.parametrize(
    ("state", "runs"),
    [("running", True), ("queued", True), ("failed", False), ("preempted", False)],
)
def test_a_job_that_an_earlier_launcher_left_running_is_known(
    tmp_path: Path, state: JobState, runs: bool
) -> None:
    recipe = small_recipe(tmp_path, launch__kind="gce", cloud__bucket="bucket", cloud__project="p")
    job = run_job.job_of(recipe, "train", distributed=True)
    elsewhere = Standing(state)
    assert not run_job._already_runs(recipe, elsewhere, job)
    store_handle(recipe.folder.root, Handle("train", "gce", "ingot-1", job.argv, 0.0, ""), recipe)
    assert run_job._already_runs(recipe, elsewhere, job) is runs


def test_a_job_that_does_something_else_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything of the new recipe sent to it. A recipe file that was edited has the same
    name; where and for how long it runs is no other recipe.
    """
    cloud = {"launch__kind": "gce", "cloud__bucket": "bucket", "cloud__project": "p"}
    recipe, elsewhere = small_recipe(tmp_path, **cloud), Standing("running")
    monkeypatch.setattr(run_job, "launcher_of", lambda recipe: elsewhere)
    monkeypatch.setattr(run_job, "missing_inputs", lambda recipe, job: [])
    job = run_job.job_of(recipe, "train", distributed=True)
    store_handle(recipe.folder.root, Handle("train", "gce", "ingot-1", job.argv, 0.0, ""), recipe)
    spent = recipe.folder.root / "jobs" / "train.spent.json"
    write_atomic(spent, '{"seconds": 3600, "dollars": 9.5}')
    before = sorted(tmp_path.rglob("*"))
    for knobs, options, difference in (
        ({"train__optimizer__lr": 0.5}, (), "another recipe"),
        ({"launch__processes": 3}, (), "another recipe"),
        ({}, ("--fresh",), "other arguments"),
    ):
        other = small_recipe(tmp_path, **cloud, **knobs)
        wanted = run_job.job_of(other, "train", distributed=True, options=options)
        with pytest.raises(
            Failed, match=f"train is running already as gce job ingot-1 with {difference}; wait"
        ):
            run_job.run_job(other, wanted, supervised=False)
    assert sorted(tmp_path.rglob("*")) == before
    longer = small_recipe(tmp_path, **cloud, cloud__max_run="9h")
    assert run_job._already_runs(longer, elsewhere, job)
    begun_anew = replace(job, argv=(*job.argv, "--fresh"))
    store_handle(recipe.folder.root, Handle("train", "gce", "2", begun_anew.argv, 1.0, ""), recipe)
    assert run_job._already_runs(recipe, elsewhere, job)
    assert run_job._already_runs(recipe, elsewhere, begun_anew)
    on_a_shared_disk = replace(begun_anew, run_folder_url="")
    with pytest.raises(Failed, match="with other arguments"):
        run_job._already_runs(recipe, elsewhere, on_a_shared_disk)


class Ending:
    """A launcher of which each job ends as it is told to, at once; `limits` are the times that they
    were given.
    """

    poll_s = 0.01
    shares_disk, paid_by_use = False, False

    def __init__(self, states: list[JobState]) -> None:
        self.states, self.limits = states, list[float | None]()

    def can(self, job: Job) -> list[str]:
        return []

    def submit(self, job: Job) -> Handle:
        self.limits.append(job.time_limit_s)
        if self.states[-1:] == ["succeeded"]:
            Rendezvous(job.rendezvous or "").leave(0, EXIT, rank=0, code=0)
        return Handle(job.name, "gce", str(len(self.limits)), job.argv, 1.0, "")

    def status(self, handle: Handle) -> JobState:
        return self.states.pop(0)

    def log(self, handle: Handle) -> FileLog:
        return FileLog(list)


@pytest.fixture
def bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    def staged(recipe: Recipe, job: Job) -> Job:
        meet = tmp_path / f"meet-{time.monotonic_ns()}"
        meet.mkdir()
        return replace(job, rendezvous=str(meet))

    monkeypatch.setattr(run_job, "stage_start", staged)
    monkeypatch.setattr(run_job, "missing_inputs", lambda recipe, job: [])
    monkeypatch.setattr("ingot.launch.supervisor.remote_attempt.NOTES_TIMEOUT_S", 0.0)
    monkeypatch.setattr(run_job, "committed_anywhere", lambda recipe, job: lambda: {4: (1, 1)})
    monkeypatch.chdir(tmp_path)
    return small_recipe(
        tmp_path,
        launch__kind="gce",
        cloud__bucket="bucket",
        cloud__project="p",
        cloud__max_run="2h",
        launch__restarts=1,
    )


def run_out(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, states: list[JobState], *options: str
) -> tuple[JobExit, list[float | None]]:
    elsewhere = Ending(states)
    monkeypatch.setattr(run_job, "launcher_of", lambda recipe: elsewhere)
    job = replace(
        run_job.job_of(recipe, "train", distributed=True, options=options), run_folder_url=""
    )
    return run_job.run_job(recipe, job, supervised=True), elsewhere.limits


@pytest.mark.parametrize(("supervised", "code"), [(True, 75), (False, 130)])
def test_a_request_to_stop_while_inputs_are_sent_is_followed_before_a_job_is_made(
    supervised: bool, code: int, bounded: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def staged(recipe: Recipe, job: Job) -> Job:
        os.kill(os.getpid(), signal.SIGINT)
        return replace(job, rendezvous="")

    monkeypatch.setattr(run_job, "stage_start", staged)
    elsewhere = Ending(["failed"])
    monkeypatch.setattr(run_job, "launcher_of", lambda recipe: elsewhere)
    job = replace(run_job.job_of(bounded, "train", distributed=True), run_folder_url="")
    ended = run_job.run_job(bounded, job, supervised=supervised)
    assert ended == JobExit(code, signal.SIGINT)  # there is a checkpoint for a training to go on
    assert elsewhere.limits == []


def test_the_bounds_hold_for_all_launches_together_until_the_job_is_done(
    bounded: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = bounded.folder.root / "jobs" / "train.spent.json"
    ended, limits = run_out(bounded, monkeypatch, ["preempted", "preempted"])
    assert (ended.code, [round(limit or 0) for limit in limits]) == (75, [7200, 7200])
    write_atomic(spent, '{"seconds": 3600, "dollars": 9.5}')
    _, limits = run_out(bounded, monkeypatch, ["preempted", "preempted"])
    assert [round(limit or 0) for limit in limits] == [3600, 3600]
    write_atomic(spent, '{"seconds": 7000, "dollars": 9.5}')
    with pytest.raises(
        Failed,
        match=(
            r"is used up \(1h 56m, about 9\.50 US dollars\); raise them, and the same command"
            r" goes on"
        ),
    ):
        run_out(bounded, monkeypatch, [])
    raised = bounded.model_copy(
        update={"cloud": bounded.cloud.model_copy(update={"max_run": 10_600.0})}
    )
    ended, limits = run_out(raised, monkeypatch, ["succeeded"])
    assert (ended.code, [round(limit or 0) for limit in limits]) == (0, [3600])
    assert not spent.exists(), "it is done"
    write_atomic(spent, '{"seconds": 7000, "dollars": 9.5}')
    assert round(run_out(bounded, monkeypatch, ["succeeded"], "--fresh")[1][0] or 0) == 7200


def test_a_restart_asks_nobody_how_its_own_last_start_ended(
    bounded: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that does not answer at that moment would end the training."""
    submit = Ending.submit

    def stored(self: Ending, job: Job) -> Handle:
        return store_handle(bounded.folder.root, submit(self, job), bounded)

    monkeypatch.setattr(Ending, "submit", stored)
    ended, limits = run_out(bounded, monkeypatch, ["preempted", "succeeded"])
    assert (ended.code, len(limits)) == (0, 2)


@pytest.mark.parametrize(("ran_s", "left_s"), [("as begun", 5400), (900.0, 6300), (None, 7200)])
def test_a_start_that_nobody_saw_end_is_counted_to_its_nodes_last_word(
    ran_s: Any, left_s: int, bounded: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From when its place began to charge, where that is another time than its beginning."""
    meet = tmp_path / "meet"
    meet.mkdir()
    now = time.time()
    (meet / "exit-0.json").write_text(
        json.dumps({"node": 0, "rank": 0, "code": 0, "t_wall": now - 80_000})
    )
    root = bounded.folder.root
    store_handle(
        root, Handle("train", "gce", "0", ("train",), 1.0, "", {"meet": str(meet)}), bounded
    )
    write_atomic(
        root / "jobs" / "train.spent.json",
        json.dumps({"since": now - 81_800, "limit_s": 7200, "dollars_an_hour": 2.0}),
    )
    if ran_s != "as begun":
        waited = None if ran_s is None else 1800.0 - ran_s
        monkeypatch.setattr(Ending, "waited_s", lambda self, handle: waited, raising=False)
    _, limits = run_out(bounded, monkeypatch, ["failed", "succeeded"])
    assert [round(limit or 0) for limit in limits] == [left_s]


def test_starts_that_only_wait_for_machines_use_nothing_up(
    bounded: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ending, "waited_s", lambda self, handle: None, raising=False)
    run_out(bounded, monkeypatch, ["preempted", "preempted"])
    spent = json.loads((bounded.folder.root / "jobs" / "train.spent.json").read_text())
    assert (spent["seconds"], spent["since"]) == (0.0, None)


def test_a_place_that_does_not_say_whether_the_job_runs_is_sent_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(tmp_path, launch__kind="gce", cloud__bucket="bucket", cloud__project="p")
    store_handle(recipe.folder.root, Handle("train", "gce", "ingot-1", ("train",), 0.0, ""), recipe)
    with pytest.raises(
        Failed,
        match=(
            r"whether gce ingot-1 still does train cannot be told now; run the same command again"
        ),
    ):
        run_job._already_runs(
            recipe, Standing("unknown"), run_job.job_of(recipe, "train", distributed=True)
        )


def test_nodes_read_the_recipe_as_it_is_resolved_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, overrides and variables of this machine alike; also where they share its disk."""
    monkeypatch.chdir(tmp_path)
    for kind, options in (("ssh", ("--fresh",)), ("gce", ())):
        recipe = small_recipe(
            tmp_path,
            output="runs",
            launch__kind=kind,
            cloud__bucket="bucket",
            cloud__project="p",
            train__steps=7,
        )
        with gcs.serving(monkeypatch):
            job = staging.stage_start(
                recipe, run_job.job_of(recipe, "train", distributed=True, options=options)
            )
        verb, given, *more = job.argv
        assert (verb, given, more) == ("train", "runs/small/jobs/nodes.train.yaml", list(options))
        assert load_recipe([given], environ={}, dotenv=None).train.steps == 7


def test_what_a_job_made_while_nobody_waited_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop that was closed, and the same command the next morning."""
    recipe = small_recipe(tmp_path, launch__kind="gce", cloud__bucket="bucket", cloud__project="p")
    root, node = recipe.folder.root, tmp_path / "node"
    with gcs.serving(monkeypatch):
        job = staging.stage_start(recipe, run_job.job_of(recipe, "train", distributed=True))
        store_handle(root, Handle("train", "gce", "1", job.argv, 0.0, ""), recipe)
        record_event(recipe.folder.events, "hang", rank=1)
        pull(job.run_folder_url or "", node)
        (node / "model").mkdir()
        (node / "model" / "model.safetensors").write_bytes(b"weights")
        (node / "metrics.jsonl").write_text('{"step": 1}\n')
        record_event(node / "events.jsonl", "finish", step=1)
        push(node, job.run_folder_url or "")
        staging.stage_start(recipe, run_job.job_of(recipe, "train", distributed=True))
        pull(job.run_folder_url or "", tmp_path / "third")
    for folder in (root, tmp_path / "third"):
        assert (folder / "model" / "model.safetensors").read_bytes() == b"weights"
        assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'
        assert {event["kind"] for event in read_lines(folder / "events.jsonl")} == {
            "finish",
            "hang",
        }


@pytest.mark.parametrize("place", sorted((Path(__file__).parents[3] / "recipes/places").iterdir()))
def test_in_the_shipped_places_no_step_ends_for_its_cost_or_has_more_than_it_uses(
    place: Path,
) -> None:
    quickstart = place.parents[1] / "quickstart.yaml"
    recipe = load_recipe([quickstart, place], environ={}, dotenv=None)
    if recipe.launch.kind in ("local", "ssh", "slurm"):
        return
    for verb, nodes in (("train", recipe.launch.nodes), ("evaluate", 1)):
        assert time_limit_s(recipe.at(verb), nodes=nodes) == recipe.cloud.max_run
    for verb in ("ingest", "prepare", "gate", "register"):
        with_gpus = accelerators_of(recipe.launch.machine)[1] > 0
        assert bool(accelerators_in_vain(recipe, verb)) == with_gpus
        own = {**recipe.pipeline.steps, verb: StepPlace(machine=recipe.launch.machine)}
        steps = recipe.pipeline.model_copy(update={"steps": own})
        asked = recipe.model_copy(update={"pipeline": steps})
        assert accelerators_in_vain(asked, verb) == [], "what is asked for by name is given"
