"""Metrics of a run as they come to a managed TensorBoard: each step once, and never in the way of
the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import IngotError
from ingot.base.runlog import JsonLines, Resumed, append_line
from ingot.cloud.clients import GoogleClients
from ingot.cloud.vertex import tensorboard
from ingot.cloud.vertex.tensorboard import TensorboardRun, upload_metrics
from ingot.config.sections.deployment import Cloud
from tests.fakes import google, tensorboards
from tests.patience import PATIENCE_S


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GoogleClients, tensorboards.State]]:
    monkeypatch.setattr(tensorboard, "LOOK_S", 0.02)
    server = google.Server()
    try:
        yield (
            GoogleClients(Cloud(project="proj", endpoint=server.address, tensorboard="77")),
            tensorboards.install(server),
        )
    finally:
        server.server_close()


def logged(path: Path, steps: range, resume_step: int = 0) -> Path:
    sink = JsonLines(path, Resumed(resume_step))
    for step in steps:
        values: dict[str, float | str] = {
            "train/loss": 10.0 - step,
            "train/lr": 0.1,
            "sample/text": "no number",
        }
        sink.write(step, {**values, "gpu/util": float("nan")} if step == 1 else values)
    return path


def test_numbers_come_as_scalars_of_the_runs_experiment(
    tmp_path: Path, place: tuple[GoogleClients, tensorboards.State]
) -> None:
    google_, state = place
    assert (
        TensorboardRun(google_, "Run 1.x").send(logged(tmp_path / "metrics.jsonl", range(3))) == 6
    )
    assert set(state.points) == {"train/loss", "train/lr"}
    assert state.points["train/loss"] == [(0, 10.0), (1, 9.0), (2, 8.0)]
    (experiment,) = state.experiments.values()
    assert experiment.display_name == "Run 1.x"
    (run,) = state.runs
    assert run == f"{experiment.name}/runs/train"


def test_only_what_is_new_is_sent_and_a_new_key_begins_a_series(
    tmp_path: Path, place: tuple[GoogleClients, tensorboards.State]
) -> None:
    google_, state = place
    path, board = tmp_path / "metrics.jsonl", TensorboardRun(google_, "run")
    board.send(logged(path, range(1, 4)))
    assert board.send(path) == 0
    JsonLines(path, Resumed(10**9)).write(4, {"train/loss": 6.0, "held_out/loss": 5.0})
    assert board.send(path) == 2
    assert [step for step, _ in state.points["train/loss"]] == [1, 2, 3, 4]
    assert state.points["held_out/loss"] == [(4, 5.0)]


def test_after_a_restart_from_a_checkpoint_no_step_comes_twice(
    tmp_path: Path, place: tuple[GoogleClients, tensorboards.State]
) -> None:
    google_, state = place
    path = tmp_path / "metrics.jsonl"
    TensorboardRun(google_, "run").send(logged(path, range(8)))
    TensorboardRun(google_, "run").send(logged(path, range(6, 12), resume_step=5))
    assert [step for step, _ in state.points["train/loss"]] == list(range(12))


def test_a_lost_answer_makes_no_point_twice(
    tmp_path: Path, place: tuple[GoogleClients, tensorboards.State]
) -> None:
    google_, state = place
    path, board = tmp_path / "metrics.jsonl", TensorboardRun(google_, "run")
    board.send(logged(path, range(1)))
    for first in (1, 4):
        logged(path, range(first, first + 3), resume_step=10**6)
        state.server.fault("TensorboardService.WriteTensorboardExperimentData", 503, lose=True)
        with pytest.raises(IngotError):
            board.send(path)
        assert board.send(path) == 0
    assert [step for step, _ in state.points["train/loss"]] == list(range(7))


def test_a_long_run_goes_in_several_requests(
    tmp_path: Path, place: tuple[GoogleClients, tensorboards.State]
) -> None:
    google_, state = place
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(
            json.dumps({"step": step, "t_wall": 1.0 + step, "train/loss": 1.0}) + "\n"
            for step in range(2_500)
        )
    )
    assert TensorboardRun(google_, "run").send(path) == 2_500
    assert [step for step, _ in state.points["train/loss"]] == list(range(2_500))


def test_the_board_goes_by_its_whole_name_too(
    tmp_path: Path, place: tuple[GoogleClients, tensorboards.State]
) -> None:
    google_, state = place
    whole = GoogleClients(google_.cloud.model_copy(update={"tensorboard": state.board}))
    assert TensorboardRun(whole, "run").send(logged(tmp_path / "metrics.jsonl", range(3))) == 6


def test_a_look_at_a_long_run_reads_only_what_is_new(
    tmp_path: Path, place: tuple[GoogleClients, tensorboards.State], monkeypatch: pytest.MonkeyPatch
) -> None:
    google_, state = place
    path, board, read = tmp_path / "metrics.jsonl", TensorboardRun(google_, "run"), []

    def loads(text: str | bytes, really: Callable[..., Any] = json.loads, **options: Any) -> Any:
        read.extend(
            [1] if b"train/loss" in (text.encode() if isinstance(text, str) else text) else []
        )
        return really(text, **options)

    lines = "".join(
        json.dumps({"step": step, "t_wall": 1.0 + step, "train/loss": 1.0}) + "\n"
        for step in range(2_500)
    )
    path.write_text(lines + '{"step": 2500, "t_wa')
    board.send(path)
    monkeypatch.setattr(json, "loads", loads)
    assert board.send(path) == 0
    assert read == []
    JsonLines(path, Resumed(10**9)).write(2_500, {"train/loss": 2.0})
    assert board.send(path) == 1
    assert len(read) <= 2 * 2_501, (
        "the file was written anew, without the torn line: once by JsonLines, once here"
    )
    read.clear()
    append_line(path, {"step": 2_501, "t_wall": 1.0, "train/loss": 3.0})
    assert board.send(path) == 1
    assert read == [1]
    assert [step for step, _ in state.points["train/loss"]] == list(range(2_502))


def test_a_file_that_a_resumed_run_wrote_anew_is_read_anew(
    tmp_path: Path, place: tuple[GoogleClients, tensorboards.State]
) -> None:
    """By the same board, as in a process that goes on; the file is shorter than what was read of
    it, or longer again already.
    """
    google_, state = place
    path, board = tmp_path / "metrics.jsonl", TensorboardRun(google_, "run")
    board.send(logged(path, range(20)))
    logged(path, range(6, 8), resume_step=5)
    assert board.send(path) == 0
    logged(path, range(8, 40), resume_step=7)
    assert board.send(path) == 40
    logged(path, range(11, 90), resume_step=10)
    assert board.send(path) == 100
    assert [step for step, _ in state.points["train/loss"]] == list(range(90))
    assert [value for _, value in state.points["train/loss"]] == [10.0 - step for step in range(90)]


def test_what_is_logged_last_is_there_when_the_run_is_over(
    tmp_path: Path, place: tuple[GoogleClients, tensorboards.State]
) -> None:
    google_, state = place
    path = tmp_path / "metrics.jsonl"
    with upload_metrics(google_, "run", path):
        logged(path, range(2))
        until = time.monotonic() + PATIENCE_S
        while len(state.points.get("train/loss", [])) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(state.points["train/loss"]) == 2
        logged(path, range(2, 4), resume_step=10**6)
    assert [step for step, _ in state.points["train/loss"]] == [0, 1, 2, 3]


def test_a_board_that_fails_is_told_once_and_stops_nothing(
    tmp_path: Path,
    place: tuple[GoogleClients, tensorboards.State],
    capsys: pytest.CaptureFixture[str],
) -> None:
    google_, state = place
    state.board = "projects/proj/locations/us-central1/tensorboards/78"
    with upload_metrics(google_, "run", logged(tmp_path / "metrics.jsonl", range(2))):
        time.sleep(0.3)
    said = capsys.readouterr().err
    assert said.count("warning") == 1
    assert "tensorboards/77 does not exist" in said
    assert "cloud.tensorboard 77" in said


def test_nothing_that_goes_wrong_is_raised_where_it_is_entered(
    tmp_path: Path,
    place: tuple[GoogleClients, tensorboards.State],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    google_, _ = place
    path = logged(tmp_path / "metrics.jsonl", range(2))
    with upload_metrics(
        GoogleClients(google_.cloud.model_copy(update={"project": None})), "run", path
    ):
        pass
    assert "set cloud.project" in capsys.readouterr().err

    def broken(*_: object) -> int:
        raise ValueError("what no client should raise")

    monkeypatch.setattr(TensorboardRun, "send", broken)
    with upload_metrics(google_, "run", path):
        time.sleep(0.2)
    assert capsys.readouterr().err.count("what no client should raise") == 1


def test_a_board_that_does_not_answer_keeps_nobody_from_ending(
    tmp_path: Path, place: tuple[GoogleClients, tensorboards.State], monkeypatch: pytest.MonkeyPatch
) -> None:
    google_, state = place
    monkeypatch.setattr(tensorboard, "END_S", 0.3)
    state.server.fault("*", 0, times=10**6, delay_s=30.0)
    began = time.monotonic()
    with upload_metrics(google_, "run", logged(tmp_path / "metrics.jsonl", range(2))):
        time.sleep(0.2)
    assert 0.4 < time.monotonic() - began < 20


def test_without_a_board_nothing_is_asked(
    tmp_path: Path, place: tuple[GoogleClients, tensorboards.State]
) -> None:
    google_, state = place
    with upload_metrics(
        GoogleClients(google_.cloud.model_copy(update={"tensorboard": None})),
        "run",
        logged(tmp_path / "metrics.jsonl", range(2)),
    ):
        pass
    assert not state.server.calls
