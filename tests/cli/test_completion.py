"""What a shell is given at the Tab key, by its own protocol, and in a real bash."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ingot.cli.completion import KNOBS, complete_arguments
from ingot.config.knobs import all_knobs
from tests.cli.commands import clean_environment, ingot
from tests.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("incomplete", "some"),
    [
        ("qui", ["quickstart"]),
        ("places/lap", ["places/laptop"]),
        ("train.optimizer.l", ["train.optimizer.lr="]),
        ("track.tensorboard=", ["track.tensorboard=true", "track.tensorboard=false"]),
        ("train.optimizer.kind=s", ["train.optimizer.kind=sgd"]),
        ("my", ["my.yaml"]),
        ("folder/", ["folder/inner.yaml"]),
    ],
)
def test_names_knobs_and_values(
    incomplete: str,
    some: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/inner.yaml").touch()
    found = complete_arguments(incomplete)
    assert set(some) <= set(found)
    assert all(each.startswith(incomplete) for each in found)


def test_every_knob_that_can_be_typed_is_offered() -> None:
    sections = {knob.plain for knob in all_knobs() if "section" in knob.type.split(" | ")}
    typed = {knob.plain for knob in all_knobs() if "[]" not in knob.path} - sections
    offered = {
        each for letter in "abcdefghijklmnopqrstuvwxyz" for each in complete_arguments(letter)
    }
    assert {f"{name}=" for name in typed} == {each for each in offered if each.endswith("=")}
    assert KNOBS.is_file()


@pytest.mark.drawn
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script_and_its_answers(shell: str, tmp_path: Path) -> None:
    script = ingot("completion", shell).stdout
    assert f"_INGOT_COMPLETE=complete_{shell}" in script
    words = "ingot train quick"
    asked = {"_INGOT_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": words}
    asked |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "COMP_WORDS": words, "COMP_CWORD": "2"}
    code = (
        "import sys, atexit; sys.argv = ['ingot']\n"
        "heavy = {'torch', 'numpy', 'transformers', 'ingot.config.recipe'}\n"
        "atexit.register(lambda: print(len(sys.modules), *(heavy & set(sys.modules)),"
        " file=sys.stderr))\n"
        "from ingot.cli.app import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=clean_environment(**asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "quickstart" in done.stdout, done.stderr
    (modules,) = done.stderr.split()  # and nothing heavy among them
    assert int(modules) < 400


def test_in_a_real_bash(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not on this machine")
    (tmp_path / "ingot").write_text(f'#!/bin/sh\nexec {sys.executable} -m ingot "$@"\n')
    (tmp_path / "ingot").chmod(0o755)
    (tmp_path / "script").write_text(ingot("completion", "bash").stdout)
    leader, follower = pty.openpty()
    shell = subprocess.Popen(
        [bash, "--norc", "-i"],
        cwd=tmp_path,
        env=clean_environment(TERM="dumb", PS1="$ "),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    try:
        os.write(leader, b'PATH="$PWD:$PATH"; source ./script\n')
        for typed, completed in (
            ("ingot tra", "ingot train "),
            ("ingot train quicks", "ingot train quickstart "),
            ("ingot train quickstart train.optimizer.l", "train.optimizer.lr="),
            ("ingot train quickstart train.optimizer.kind=mu", "train.optimizer.kind=muon "),
        ):
            os.write(leader, f"\x15{typed}\t".encode())
            _await(leader, completed)
    finally:
        shell.kill()
        shell.wait()
        os.close(leader)


def _await(terminal: int, text: str, timeout_s: float = PATIENCE_S) -> None:
    """Read a terminal until it shows `text`."""
    shown, until = "", time.monotonic() + timeout_s
    while text not in shown:
        ready, _, _ = select.select([terminal], [], [], max(until - time.monotonic(), 0))
        assert ready, shown
        shown += os.read(terminal, 4096).decode()
