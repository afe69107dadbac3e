"""Stopping: in every phase, once and twice, when the interpreter is stuck in C, and because the
machine is taken away.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ingot.base.errors import Stopped
from ingot.base.heartbeat import Phase, heartbeat_file, read_beats
from ingot.base.runlog import read_lines
from ingot.checkpoints.store import committed, newest_valid
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.train import evaluation
from ingot.train.interrupts import LeaveNow, PreemptionNotice, StopSignals, stacks_on_demand
from ingot.train.trainer import train
from tests import forks
from tests.patience import PATIENCE_S
from tests.ranks import run_ranks
from tests.small import copy_of, small_recipe
from tests.train.test_run import start_training

# Runs `ingot` with one function of it changed, which then takes a minute: so that a signal is sure
# to come in a certain phase.
SLOW = """
import sys, time
import {module} as module
original = module.{name}
def slow(*arguments, **knobs):
    open({sign!r}, "w").close()
    {wait}
    return original(*arguments, **knobs)
module.{name} = slow
for other in list(sys.modules.values()):
    if getattr(other, "{name}", None) is original:
        setattr(other, "{name}", slow)
from ingot.cli.app import main
sys.argv = ["ingot", "train", {recipe!r}]
main()
"""
IN_PYTHON = "[time.sleep(0.01) for _ in range(6000)]"
STUCK_IN_C = "import ctypes; ctypes.PyDLL(None).sleep(60)"


class Slow:
    """`ingot train` whose function `where` (module.name) has been reached and takes a minute."""

    def __init__(self, recipe: Recipe, root: Path, where: str, wait: str = IN_PYTHON) -> None:
        module, _, name = where.rpartition(".")
        file, sign = root / "recipe.yaml", root / "reached"
        file.write_text(dump_recipe(recipe))
        program = SLOW.format(module=module, name=name, sign=str(sign), wait=wait, recipe=str(file))
        self.process = forks.start_call(
            _execute, program, environment={"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
        )
        deadline = time.monotonic() + PATIENCE_S
        while not sign.exists():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def ended(self, signum: int) -> tuple[int, str]:
        """Exit code and messages after the signal; the function would take longer."""
        began = time.monotonic()
        self.process.send_signal(signum)
        _, messages = self.process.communicate(timeout=PATIENCE_S)
        assert time.monotonic() - began < 45, messages
        assert "Traceback" not in messages
        return self.process.returncode, messages


def _execute(program: str) -> None:
    exec(program, {"__name__": "__main__"})


def phase_of(recipe: Recipe) -> Phase:
    return read_beats(heartbeat_file(recipe.folder.heartbeats))[0].phase


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("where", "signum"),
    [
        ("ingot.models.spec.create_model", signal.SIGTERM),
        ("ingot.train.reference.reference_tables", signal.SIGINT),
        ("ingot.train.build.make_optimizer", signal.SIGUSR1),
    ],
)
def test_while_loading_there_is_nothing_to_save(
    where: str, signum: signal.Signals, root: Path
) -> None:
    recipe = small_recipe(root)
    code, messages = Slow(recipe, root, where).ended(signum)
    assert code == 128 + signum
    assert (
        f"stopped by {signum.name} before the first step: nothing to save; the same command starts"
        " again" in messages
    )
    assert newest_valid(recipe.folder.checkpoints) is None


@pytest.mark.drawn("a signal beside the steps")
def test_while_loading_an_older_checkpoint_stands(root: Path) -> None:
    recipe = small_recipe(
        root, train__steps=4, chaos__kill_at=3, checkpoint__every=2, checkpoint__asynchronous=False
    )
    slow = Slow(recipe, root, "ingot.train.trainer.announce", "pass")
    slow.process.communicate(timeout=PATIENCE_S)
    (root / "reached").unlink()
    code, messages = Slow(recipe, root, "ingot.models.spec.create_model").ended(signal.SIGTERM)
    assert code == 75
    assert "with checkpoint 2 committed" in messages


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("where", "phase"),
    [
        ("ingot.objectives.forward.forward", "first step"),
        ("ingot.evaluate.validation.validation_losses", "evaluating"),
        ("ingot.train.evaluation.sample_texts", "evaluating"),
        ("ingot.checkpoints.writer.write_checkpoint", "saving"),
    ],
)
def test_within_a_step_its_state_is_committed(where: str, phase: Phase, root: Path) -> None:
    """The slow function takes long enough for the signal to come while it runs."""
    every: dict[str, Any] = {
        "checkpoint__every": 2,
        "train__evaluate_every": 1,
        "train__sample_every": 1,
    }
    recipe = small_recipe(
        root,
        train__steps=100_000,
        checkpoint__asynchronous=False,
        evaluate__prompts="[the]",
        **every,
    )
    slow = Slow(recipe, root, where, "time.sleep(0.5)")
    assert phase_of(recipe) in (phase, "loading")
    code, messages = slow.ended(signal.SIGTERM)
    assert code == 75, messages
    found = newest_valid(recipe.folder.checkpoints)
    assert found is not None
    assert found.step >= 1
    assert f"with checkpoint {found.step} committed" in messages


@pytest.mark.drawn("a signal beside the steps")
def test_an_evaluation_is_broken_off_and_made_up_for(root: Path) -> None:
    """What was measured, and all that followed, is as if nobody had stopped it."""
    knobs: dict[str, Any] = {
        "train__steps": 4,
        "train__evaluate_every": 2,
        "train__sample_every": 2,
        "evaluate__prompts": "[the]",
        "checkpoint__every": 4,
    }
    recipe = small_recipe(root, **knobs)
    slow = Slow(recipe, root, "ingot.evaluate.validation.validation_losses", "time.sleep(1)")
    code, messages = slow.ended(signal.SIGTERM)
    assert code == 75, messages
    found = newest_valid(recipe.folder.checkpoints)
    assert found is not None
    assert found.step == 2
    assert found.commit["owed"] == ["validation", "samples"]
    broken = [line for line in read_lines(recipe.folder.metrics) if line["step"] == 2]
    assert [("train/loss" in line, "validation/loss" in line) for line in broken] == [(True, False)]
    # In processes of their own, as the first: this one may compute with another number of threads.
    other = small_recipe(root, name="other", **knobs)
    shutil.copytree(recipe.folder.data, other.folder.data)
    for one in (recipe, other):
        assert start_training(one, root).wait(timeout=PATIENCE_S) == 0
    assert _metrics(recipe) == _metrics(other)


def stop_in_evaluation(recipe: Recipe, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until a signal comes within evaluation `number` (from 1)."""
    original, count = evaluation.validation_losses, itertools.count(1)

    def stopping(*args: Any, **knobs: Any) -> Any:
        if next(count) == number:
            signal.raise_signal(signal.SIGTERM)
        return original(*args, **knobs)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "validation_losses", stopping)
        with pytest.raises(Stopped):
            train(recipe)


EARLY: dict[str, Any] = {
    "train__steps": 12,
    "train__evaluate_every": 2,
    "train__early_stop": "{patience: 1, min_delta: 100}",
    "checkpoint__every": 3,
    "track__every": 10,
}
"""Training ends with the evaluation after step 4."""


@pytest.mark.drawn("a signal beside the steps")
def test_an_evaluation_that_is_made_up_for_may_end_training(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint then says that it is finished, and its last loss is told."""
    whole = small_recipe(copy_of(root, tmp_path / "whole"), **EARLY)
    told = train(whole).result
    recipe = small_recipe(root, **EARLY)
    stop_in_evaluation(recipe, 2, monkeypatch)
    before = committed(recipe.folder.checkpoints)[0].commit
    assert (before["step"], before["finished"], before["owed"]) == (4, False, ["validation"])
    assert train(recipe).result.rpartition(", ")[2] == told.rpartition(", ")[2]
    found = newest_valid(recipe.folder.checkpoints)
    assert found is not None
    now, straight = found.commit, committed(whole.folder.checkpoints)[0].commit
    assert (now["step"], now["finished"], now["owed"]) == (4, True, [])
    assert now["watched"] == straight["watched"]
    assert (now["files"], now["time"]) == (before["files"], before["time"])
    assert sorted(_metrics(recipe), key=str) == sorted(_metrics(whole), key=str)
    train(small_recipe(root, **{**EARLY, "train__steps": 2}))  # set aside, as a finished one is


@pytest.mark.drawn("a signal beside the steps")
def test_an_evaluation_of_the_last_step_is_made_up_for_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(root, train__steps=2, train__evaluate_every=2)
    stop_in_evaluation(recipe, 1, monkeypatch)
    train(recipe)
    assert committed(recipe.folder.checkpoints)[0].commit["owed"] == []
    measure = mock.Mock()
    monkeypatch.setattr(evaluation, "validation_losses", measure)
    train(recipe)
    measure.assert_not_called()


def _metrics(recipe: Recipe) -> list[dict[str, Any]]:
    clocks = {
        "t_wall",
        "train/tokens_per_s",
        "train/tokens_per_step",
        "train/examples_per_s",
        "train/mfu",
        "validation/seconds",
        "memory/rank0_gb",
    }
    return [
        {key: value for key, value in line.items() if key not in clocks}
        for line in read_lines(recipe.folder.metrics)
    ]


@pytest.mark.drawn("a signal beside the steps")
def test_while_exporting_the_checkpoint_stands(root: Path) -> None:
    recipe = small_recipe(root, train__steps=2)
    code, messages = Slow(recipe, root, "ingot.checkpoints.export.export_model").ended(
        signal.SIGTERM
    )
    assert code == 75
    assert "with checkpoint 2 committed" in messages
    assert not recipe.folder.model.exists()
    assert [event["kind"] for event in read_lines(recipe.folder.events)][-1] == "stop"


def test_a_process_that_is_stuck_in_c_is_ended_and_says_where(root: Path) -> None:
    """It holds the interpreter's lock, so that nothing written in Python could end it."""
    recipe = small_recipe(root, checkpoint__grace_s=1)
    slow = Slow(recipe, root, "ingot.objectives.forward.forward", STUCK_IN_C)
    code, messages = slow.ended(signal.SIGTERM)
    assert code == -signal.SIGKILL
    assert "did not follow the signal within 1 s (checkpoint.grace_s) and is killed" in messages
    assert "in slow" in (recipe.folder.logs / "stacks-rank0.txt").read_text()


def test_a_second_signal_leaves_at_once_without_harm(root: Path) -> None:
    recipe = small_recipe(root, train__steps=100, checkpoint__every=1)
    slow = Slow(recipe, root, "ingot.train.step.accumulate_gradients", "time.sleep(60)")
    slow.process.send_signal(signal.SIGTERM)
    assert slow.process.stderr is not None
    assert any("send it again to leave at once" in line for line in slow.process.stderr)
    time.sleep(2.2)
    code, _ = slow.ended(signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert committed(recipe.folder.checkpoints) == []


def test_the_same_request_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopSignals(60) as signals:
        signals.leave_between_steps()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        assert signals.signum == signal.SIGINT
        with pytest.raises(LeaveNow) as leave:
            signals.leave_at_once(5)
        assert (leave.value.signum, leave.value.committed) == (signal.SIGINT, 5)


@pytest.mark.parametrize(
    ("before", "heard"), [(lambda *_: None, signal.SIGHUP), (signal.SIG_IGN, 0)]
)
def test_a_closed_terminal_is_a_request_where_it_is_not_ignored(before: Any, heard: int) -> None:
    """As under `nohup`, where it is."""
    ours = signal.signal(signal.SIGHUP, before)
    try:
        with StopSignals(60) as signals:
            signals.leave_between_steps()
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.signum == heard
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, ours)


LATE = """
import atexit, os, signal, sys
from ingot.base.errors import Stopped
from ingot.cli import app
from ingot.train.interrupts import StopSignals
class AtTheVeryEnd:
    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.{name}):
        kill(me, number)  # Python has given its handlers back by now
def stopped(**knobs):
    with StopSignals(60) as signals:
        raise Stopped("stopped by another rank's word", signum=signal.SIGTERM, committed=True)
def late():
    try:
        stopped()
    finally:
        os.kill(os.getpid(), signal.{name})
last = AtTheVeryEnd()
atexit.register(lambda: os.kill(os.getpid(), signal.{name}))
app.command = lambda *_: lambda **knobs: late()
app.main()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_request_that_comes_after_it_was_followed_changes_nothing(name: str) -> None:
    """Ranks agree on a stop, and one may be done before its own node hands on the signal."""
    done = subprocess.run(
        [sys.executable, "-c", LATE.format(name=name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (75, "stopped by another rank's word\n")


def test_stacks_are_written_on_demand(tmp_path: Path) -> None:
    with stacks_on_demand(tmp_path / "logs", 3):
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.05)
    assert "test_stacks_are_written_on_demand" in (tmp_path / "logs/stacks-rank3.txt").read_text()


def test_a_notice_in_a_file_counts_as_a_signal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "notice"
    with StopSignals(60) as signals, PreemptionNotice(str(file)):
        signals.leave_between_steps()
        time.sleep(0.1)
        assert not signals.signum
        file.touch()
        _wait_for(lambda: signals.signum != 0)
        assert signals.signum == signal.SIGTERM
    assert f"this machine will be taken away, as {file} says" in capsys.readouterr().err


class Metadata(BaseHTTPRequestHandler):
    """Google's metadata server as far as it tells of pre-emption: it answers when something
    changes.
    """

    preempted = threading.Event()
    asked: list[tuple[str, str | None]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Metadata-Flavor"]))
        self.preempted.wait(5)
        body = b"TRUE" if self.preempted.is_set() else b"FALSE"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Metadata]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    yield Metadata
    server.shutdown()


def test_a_notice_of_the_metadata_server_counts_as_a_signal(metadata: type[Metadata]) -> None:
    with StopSignals(60) as signals, PreemptionNotice("gce"):
        signals.leave_between_steps()
        _wait_for(lambda: len(metadata.asked) > 0)
        assert not signals.signum
        metadata.preempted.set()
        _wait_for(lambda: signals.signum != 0)
    path, flavor = metadata.asked[0]
    assert path.startswith("/computeMetadata/v1/instance/preempted?wait_for_change=true")
    assert flavor == "Google"


def _wait_for(is_so: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stopped_on_one_rank(root: Path) -> tuple[int, str]:
    recipe = small_recipe(
        root,
        train__steps=100_000,
        train__micro_batch=1,
        checkpoint__every=50_000,
        train__evaluate_every=1,
    )
    if os.environ["RANK"] == "1":
        threading.Thread(target=_send_after_steps, args=(recipe,), daemon=True).start()
    with pytest.raises(Stopped) as stop:
        train(recipe)
    return stop.value.exit_code, str(stop.value)


def _send_after_steps(recipe: Recipe) -> None:
    _wait_for(lambda: any(line["step"] >= 3 for line in read_lines(recipe.folder.metrics)))
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_on_one_rank_stops_all_with_one_checkpoint(root: Path) -> None:
    one, other = run_ranks(2, stopped_on_one_rank, root)
    assert one == other
    found = newest_valid(small_recipe(root).folder.checkpoints)
    assert found is not None
    assert one == (
        75,
        (
            f"stopped by SIGTERM with checkpoint {found.step} committed; the same command goes on"
            " from there"
        ),
    )
    assert found.step >= 3
