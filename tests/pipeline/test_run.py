"""`ingot run` from raw text to a served model's answer, as a person types it: all of it, again,
changed, interrupted.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from ingot.base.errors import EXIT_WRONG_INPUT
from ingot.base.reports import read_record
from ingot.base.runlog import read_lines
from ingot.cli.verbs import STAMPS
from ingot.config.load import dump_recipe, read_recipe
from ingot.launch.places.local import JobExit
from ingot.pipeline import local
from ingot.pipeline.incremental import StepFailed
from ingot.pipeline.steps import step_named
from tests import forks
from tests.cli.commands import clean_environment, command, ingot, start_ingot
from tests.launch.blocking import wait_until
from tests.patience import PATIENCE_S
from tests.small import small_recipe, write_documents

STEPS = ("ingest", "prepare", "train", "evaluate", "gate", "register", "serve")
AGAIN_CPU_S = 12.0


def _world(root: Path) -> Path:
    """Documents and a recipe; the paths in the recipe are relative, so that the whole folder may be
    copied.
    """
    write_documents(root / "text")
    recipe = small_recipe(
        root,
        checkpoint__every=2,
        evaluate__prompts="[the]",
        serve__prompt="the bright",
        serve__prompt_tokens=8,
    )
    (root / "r.yaml").write_text(dump_recipe(recipe).replace(str(root) + "/", ""), encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A finished run, and what the command that made it said."""
    root = _world(tmp_path_factory.mktemp("run"))
    return root, ingot("run", "r.yaml", cwd=root, timeout_s=300)


@pytest.fixture
def copied(finished: tuple[Path, object], tmp_path: Path) -> Path:
    """The finished run in a folder of its own."""
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


def _done_again(stderr: str) -> list[str]:
    """The steps that a run did, by its messages."""
    return [
        line.split("] ")[1]
        for line in stderr.splitlines()
        if line.startswith("[") and "/7] " in line
    ]


def _left_behind(root: Path) -> list[psutil.Process]:
    """Processes that work in `root`."""
    found = []
    for process in psutil.process_iter(["cwd", "status"]):
        if (
            process.info["cwd"] == str(root)
            and process.info["status"] != psutil.STATUS_ZOMBIE
            and process.pid != os.getpid()
        ):
            found.append(process)
    return found


def _start(root: Path, *overrides: str) -> forks.Process:
    return start_ingot(
        *("run", "r.yaml", *overrides), cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.drawn("all steps of a run")
def test_all_steps_end_in_an_answer_a_table_and_a_page(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    root, done = finished
    assert done.returncode == 0, done.stderr
    assert _done_again(done.stderr) == list(STEPS)
    said = json.loads((root / "runs/small/reports/predict.json").read_bytes())
    assert said["prompt"] == "the bright"
    assert said["usage"]["completion_tokens"] <= 8
    for step in STEPS:
        record = read_record(root / "runs/small/reports/steps", step)
        assert record is not None
        assert f"│ {step} " in done.stdout
        assert record.result in done.stdout
    assert "runs/small/reports/index.html" in done.stdout
    assert "<html" in (root / "runs/small/reports/index.html").read_text(encoding="utf-8")
    assert "Nothing changed" not in done.stdout
    assert not _left_behind(root)


@pytest.mark.drawn("all steps of a run")
def test_the_second_run_skips_everything_quickly_and_without_torch(copied: Path) -> None:
    before = {
        path: path.stat().st_mtime_ns
        for path in (copied / "runs").rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [command()[0], "-X", "importtime", *command()[1:], "run", "r.yaml"],
        cwd=copied,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < AGAIN_CPU_S
    loaded = {
        line.rsplit("|", 1)[1].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "ingot.pipeline.local" in loaded
    assert not loaded & {"torch", "transformers", "pyarrow"}
    assert done.stdout.count("unchanged") == len(STEPS)
    assert "Nothing changed: all 7 steps were skipped." in done.stdout
    assert re.search(r"^Serve the model: ingot serve \S+$", done.stdout, re.MULTILINE)
    assert (
        json.loads((copied / "runs/small/reports/predict.json").read_bytes())["completion"]
        .split("\n")[0]
        .strip()
        in done.stdout
    )
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.drawn("all steps of a run")
def test_only_what_depends_on_a_change_runs_again(copied: Path) -> None:
    done = ingot(
        "run",
        "r.yaml",
        "serve.prompt=copper",
        "serve.prompt_temperature=2",
        "checkpoint.keep=1",
        "track.every=5",
        "train.micro_batch=4",
        cwd=copied,
    )
    assert done.returncode == 0, done.stderr
    assert _done_again(done.stderr) == ["serve"]
    assert "serve: again, because serve.prompt the bright -> copper" in done.stderr
    drawn = json.loads((copied / "runs/small/reports/predict.json").read_bytes())["completion"]
    seeded = ("max_tokens=8", "seed=0", "temperature=2")
    told = ingot("predict", "runs/small", "copper", *seeded, cwd=copied)
    assert told.stdout.strip() == drawn.strip(), told.stderr
    greedy = ingot("predict", "runs/small", "copper", "max_tokens=8", cwd=copied)
    assert greedy.stdout.strip() != drawn.strip()
    assert done.stdout.count("unchanged") == 6
    assert "Nothing changed" not in done.stdout


def test_a_step_done_by_hand_is_done_for_run_too(copied: Path) -> None:
    """And a gate that keeps the live model ends the run cleanly: nothing after it is done."""
    assert ingot("gate", "r.yaml", "gate.override=keep", cwd=copied).returncode == 3
    done = ingot("run", "r.yaml", "gate.override=keep", cwd=copied)
    assert done.returncode == 0, done.stderr
    assert _done_again(done.stderr) == []
    assert done.stdout.count("not done: the gate keeps the live model") == 2
    assert "served model" not in done.stdout


@pytest.mark.drawn("a run that is broken off in training")
def test_killed_in_training_it_goes_on_and_ends_with_the_same_model(
    finished: tuple[Path, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a source changed meanwhile: that is read once the training is finished."""
    root = _world(tmp_path)
    run = _start(root, "train.steps=6")
    wait_until(lambda: bool(list((root / "runs/small/checkpoints").glob("*/COMMIT.json"))), 120)
    run.kill()
    run.communicate(timeout=PATIENCE_S)
    wait_until(lambda: not _left_behind(root))
    (root / "text/doc0000.txt").write_text("Something else.\n" * 9, encoding="utf-8")
    done = ingot("run", "r.yaml", cwd=root, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert (
        "ingest: not again, although what data.train reads changed: the unfinished" in done.stderr
    )
    assert "train" in _done_again(done.stderr)
    assert "ingest" not in _done_again(done.stderr)
    starts = [
        event for event in read_lines(root / "runs/small/events.jsonl") if event["kind"] == "start"
    ]
    assert starts[-1]["step"] >= 2
    hashes = {
        json.loads((folder / "runs/small/model/ingot.json").read_bytes())["model_hash"]
        for folder in (root, finished[0])
    }
    assert len(hashes) == 1
    monkeypatch.chdir(root)
    ingest, recipe = step_named("ingest"), read_recipe(["r.yaml"])
    assert local._record_of(ingest, recipe, STAMPS, fresh=False) is None


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (JobExit(128 + signal.SIGKILL, 0), "was killed, perhaps for want of memory; the same"),
        (JobExit(128 + signal.SIGTERM, signal.SIGTERM), "was stopped; the same"),
        (JobExit(EXIT_WRONG_INPUT, 0), "cannot be done, see above; mend that"),
        (JobExit(4, 0), "failed (exit 4), see above; the same"),
    ],
)
def test_how_a_step_ended_is_told(
    ended: JobExit, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "foreground", lambda job: ended)
    recipe = small_recipe(tmp_path)
    with pytest.raises(StepFailed, match=f"^ingest {re.escape(said)}"):
        local._execute(step_named("ingest"), recipe, (), {})


@pytest.mark.drawn("a run that is broken off in training")
def test_stopped_in_training_it_saves_and_says_so(copied: Path) -> None:
    run = _start(copied, "train.steps=100000")
    folder = copied / "runs/small"
    # The finished training is set aside first; then there are checkpoints of the new one.
    wait_until(
        lambda: (
            any((folder / "earlier").glob("*/checkpoints"))
            and any((folder / "checkpoints").glob("*/COMMIT.json"))
        ),
        120,
    )
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 75
    assert out == ""
    assert "committed; the same command goes on from there" in err
    assert err.splitlines()[-1] == "train was stopped; the same command goes on from here"
    assert not _left_behind(copied)


@pytest.mark.drawn("a server of the command")
def test_no_server_stays_when_run_is_killed_in_its_last_step(copied: Path) -> None:
    run = _start(copied, "serve.prompt=x", "serve.prompt_tokens=1000")
    wait_until(lambda: len(_left_behind(copied)) == 2, 60)
    server = max(_left_behind(copied), key=lambda process: process.pid)
    wait_until(lambda: server.net_connections("tcp"), 60)
    run.kill()
    run.communicate(timeout=PATIENCE_S)
    wait_until(lambda: not _left_behind(copied))
    assert ingot("run", "r.yaml", cwd=copied).returncode == 0


def test_a_step_that_fails_ends_the_run_with_its_code(copied: Path) -> None:
    done = ingot("run", "r.yaml", "data.train.0.fraction=0.000000001", cwd=copied)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[-2].startswith("error: ")
    assert (
        lines[-1]
        == "error: ingest cannot be done, see above; mend that and run the same command again"
    )
    assert done.stdout == ""


@pytest.mark.drawn("all steps of a run")
def test_two_runs_in_one_folder_are_refused(copied: Path) -> None:
    first = _start(copied, "serve.prompt=y")
    wait_until(lambda: len(_left_behind(copied)) == 2, 60)
    second = ingot("run", "r.yaml", cwd=copied)
    assert second.returncode == 1
    assert f"in use by process {first.pid}" in second.stderr
    first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 0
