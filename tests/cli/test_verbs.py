"""What a verb finds in its environment when it begins, and who sees a training while it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.base.reports import EvaluationReport, Metric, VerbOutcome, read_record, write_report
from ingot.base.storage import write_atomic
from ingot.cli import verbs
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from tests.fakes import project
from tests.fakes.google import Server
from tests.small import small_recipe


@pytest.fixture
def there() -> Iterator[project.State]:
    server = Server()
    yield project.install(server)
    server.server_close()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of the verb, put in place of its work."""
    found: dict[str, str] = {}

    def look(recipe: Recipe, again: bool) -> VerbOutcome:
        found.update(os.environ)
        return VerbOutcome("looked", str(recipe.folder.root), "made")

    monkeypatch.setitem(verbs.DO, "train", look)
    for name in ("HF_TOKEN", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return found


def written(folder: Path, **knobs: Any) -> list[str]:
    write_atomic(folder / "r.yaml", dump_recipe(small_recipe(folder, **knobs)))
    return [str(folder / "r.yaml")]


def test_a_verb_gets_the_variables_and_secrets_of_the_recipe(
    tmp_path: Path, there: project.State, seen: dict[str, str]
) -> None:
    arguments = written(
        tmp_path,
        launch__environment={"NCCL_DEBUG": "INFO"},
        launch__interface="lo",
        cloud__secrets={"HF_TOKEN": "secret:hf-token"},
        cloud__project="proj",
        cloud__endpoint=there.server.address,
    )
    assert verbs.do_step("train", arguments, again=True) == 0
    assert {
        name: seen.get(name)
        for name in ("HF_TOKEN", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    } == {
        "HF_TOKEN": "hunter2",
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()
    ]


def test_an_evaluation_outlives_the_reader_of_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `| head -1`, and with a full disk behind `>`."""

    def measure(recipe: Recipe, again: bool) -> VerbOutcome:
        loss = Metric(2.5, 2.4, 2.6, "lower", 100, "set")
        report = EvaluationReport("m", "t", {"loss/loss": loss})
        write_report(recipe.folder.reports / "evaluate.json", report)
        return VerbOutcome("measured", str(recipe.folder.root), "made")

    monkeypatch.setitem(verbs.DO, "evaluate", measure)
    arguments, run = written(tmp_path), small_recipe(tmp_path).folder
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as gone:
        patch.setattr("sys.stdout", gone)
        with pytest.raises(SystemExit):  # of rich
            verbs.do_step("evaluate", arguments, again=False)
    assert read_record(run.steps, "evaluate") is not None


def test_a_verb_has_the_processes_and_machines_of_its_place(
    tmp_path: Path, seen: dict[str, str]
) -> None:
    """In a container of the pipeline, too: nothing else tells it there. Four ranks would have
    processes of their own, and four machines are refused.
    """
    moved = "{train: {launch: local, processes: 1}}"
    assert (
        verbs.do_step(
            "train",
            written(
                tmp_path,
                launch__kind="ssh",
                launch__nodes=4,
                launch__processes=4,
                pipeline__steps=moved,
            ),
            again=True,
        )
        == 0
    )
    assert "PATH" in seen
    with pytest.raises(WrongInput, match=r"launch\.nodes=4: `ingot launch train`"):
        verbs.do_step("train", written(tmp_path, launch__kind="ssh", launch__nodes=4), again=True)


@pytest.mark.parametrize("verb", ["ingest", "prepare", "gate", "register", "run"])
def test_the_work_of_one_process_is_not_done_as_another_rank(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with variables that a shell kept: it would be done in silence and leave no record."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    arguments = written(tmp_path)
    do = (
        partial(verbs.do_all, arguments, fresh=False, debug=False, checked=False, as_json=False)
        if verb == "run"
        else partial(verbs.do_step, verb, arguments, again=False)
    )
    with pytest.raises(WrongInput, match=rf"^RANK=1 is set: `ingot {verb}` .*; unset RANK"):
        do()
    assert not small_recipe(tmp_path).folder.root.exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_local_rank_that_a_shell_kept_is_no_rank(
    processes: int, tmp_path: Path, seen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process would do the work of `launch.processes`."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(WrongInput, match=r"^LOCAL_RANK=0 is set and RANK is not.*, or unset"):
        verbs.do_step("train", written(tmp_path, launch__processes=processes), again=True)
    assert seen == {}


def test_ranks_of_a_cluster_that_sets_no_local_rank_share_a_training(
    tmp_path: Path, seen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubeflow's PyTorchJob has one process in each pod."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert verbs.do_step("train", written(tmp_path), again=True) == 0
    assert seen["RANK"] == "1"


def test_what_is_set_already_is_not_asked_for(
    tmp_path: Path, there: project.State, seen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node asks once for all its ranks, and a person may know better."""
    monkeypatch.setenv("HF_TOKEN", "mine")
    arguments = written(
        tmp_path,
        cloud__secrets={"HF_TOKEN": "secret:hf-token"},
        cloud__project="proj",
        cloud__endpoint=there.server.address,
    )
    assert verbs.do_step("train", arguments, again=True) == 0
    assert seen["HF_TOKEN"] == "mine"
    assert there.server.calls == []


def test_the_main_rank_alone_shows_a_training_on_tensorboard(
    tmp_path: Path, seen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, str]] = []

    class Board:
        def __init__(self, google: Any, name: str) -> None:
            self.name = name

        def send(self, metrics: Path) -> int:
            shown.append((self.name, json.loads(metrics.read_text())["loss"]))
            return 1

    monkeypatch.setattr("ingot.cloud.vertex.tensorboard.TensorboardRun", Board)
    arguments = written(tmp_path, cloud__tensorboard="board", cloud__project="proj")
    (tmp_path / "runs" / "small").mkdir(parents=True)
    (tmp_path / "runs" / "small" / "metrics.jsonl").write_text('{"step": 1, "loss": 3.5}\n')
    assert verbs.do_step("train", arguments, again=True) == 0
    assert shown == [("small", 3.5)]
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with verbs._shown(
        "train", small_recipe(tmp_path, cloud__tensorboard="board", cloud__project="proj")
    ):
        pass
    assert len(shown) == 1
