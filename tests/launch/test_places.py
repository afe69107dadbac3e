"""What a job gets from a recipe before its place is asked: what may be spent, and a meeting place that is empty."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ingot.base.errors import Failed
from ingot.launch import places
from ingot.launch.handles import store
from ingot.launch.job import Handle, State
from tests import gcs
from tests.small import small_recipe


class Standing:
    """A launcher of which only the state of its job is asked."""

    def __init__(self, state: State) -> None:
        self.state = state

    def status(self, handle: Handle) -> State:
        return self.state


def test_nodes_meet_where_nobody_has_left_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipe(tmp_path, launch__kind="gce", cloud__bucket="bucket", cloud__project="p")
    job = places.place(recipe, "train", ["r.yaml"], shared=True)
    with gcs.serving(monkeypatch) as server:
        places.open_bucket(job.meet or "").put("exit-0.json", b"{}")
        assert places.again(recipe, job).meet == job.meet
        assert not server.objects


def test_each_start_gets_what_is_left_of_the_time_and_none_begins_for_nothing(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, launch__kind="gce", cloud__bucket="bucket", cloud__project="p", cloud__max_run="1h")
    job = places.place(recipe, "train", ["r.yaml"], shared=True)
    assert job.time_limit_s == 3600.0
    assert places._in_time(job, 600.0).time_limit_s == 3000.0
    assert places._in_time(replace(job, time_limit_s=None), 1e9).time_limit_s is None
    with pytest.raises(Failed, match=r"cloud\.max_run and cloud\.max_cost allow are used up"):
        places._in_time(job, 3590.0)


@pytest.mark.parametrize(("state", "runs"), [("running", True), ("queued", True), ("failed", False), ("preempted", False)])
def test_a_job_that_an_earlier_launcher_left_running_is_known(tmp_path: Path, state: State, runs: bool) -> None:
    recipe = small_recipe(tmp_path, launch__kind="gce", cloud__bucket="bucket", cloud__project="p")
    job = places.place(recipe, "train", ["r.yaml"], shared=True)
    elsewhere = Standing(state)
    assert not places._runs_already(recipe, elsewhere, job)
    store(recipe.folder.root, Handle("train", "gce", "ingot-1", job.argv, 0.0, ""), recipe)
    assert places._runs_already(recipe, elsewhere, job) is runs
