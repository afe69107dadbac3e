"""The command line as a person meets it: help, one-line errors, exit codes, signals."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import ingot as ingot_package
from ingot.base.errors import Failed, Stopped, WrongInput
from ingot.cli.app import app
from ingot.cli.guard import SignalReceived, guarded, write_any_text
from ingot.cli.output import print_json
from tests.cli.commands import clean_environment, command, ingot
from tests.launch.blocking import blocking_argv, wait_until, waiting_on
from tests.patience import PATIENCE_S

# `ingot ...` in the examples under --help, by the verbs they stand under.
ROOT: Any = typer.main.get_command(app)


def _verbs() -> list[tuple[str, Any]]:
    found = []
    for name, verb in ROOT.commands.items():
        inner = getattr(verb, "commands", None)
        found += (
            [(f"{name} {sub}", item) for sub, item in inner.items()] if inner else [(name, verb)]
        )
    return found


def test_the_verbs_that_messages_name_are_there() -> None:
    """Where the next step is one that does not exist, a user is left alone."""
    package = Path(ingot_package.__file__).parent
    unknown, named = [], 0
    for path in package.rglob("*.py"):
        for first, second in re.findall(r"`ingot ([a-z]+)(?: ([a-z]+))?", path.read_text("utf-8")):
            named += 1
            verb = ROOT.commands.get(first)
            inner = getattr(verb, "commands", None)
            if verb is None or (inner and second and second not in inner):
                unknown.append(f"{path.relative_to(package)}: ingot {first} {second}")
    assert named > 100
    assert not unknown


def test_help_lists_every_verb_at_once() -> None:
    done = ingot("--help")
    assert done.returncode == 0
    for verb in (
        "run",
        "ingest",
        "prepare",
        "train",
        "evaluate",
        "gate",
        "register",
        "deploy",
        "serve",
        "predict",
        "show",
        "explain",
        "doctor",
        "ui",
        "export",
    ):
        assert f" {verb} " in done.stdout


def test_help_waits_for_nothing_that_it_does_not_show() -> None:
    """Typer is all that is imported; `python -m benchmarks.startup` tells the seconds."""
    done = subprocess.run(
        [command()[0], "-X", "importtime", *command()[1:], "--help"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    packages = {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "ingot" in packages
    heavy = {
        "torch",
        "numpy",
        "transformers",
        "pyarrow",
        "pydantic",
        "yaml",
        "google",
        "kfp",
        "fastapi",
        "fsspec",
        "jinja2",
        "requests",
        "psutil",
        "rich",
        "markdown_it",
    }
    assert not packages & heavy


@pytest.mark.parametrize(
    ("name", "verb"), _verbs(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_verb_has_help_with_an_example_that_parses(name: str, verb: Any) -> None:
    assert verb.help
    assert verb.epilog.startswith(f"Example: ingot {name}")
    if "show" not in name:  # one verb in a process is proof that --help itself works
        return
    done = ingot(*name.split(), "--help")
    assert done.returncode == 0
    assert "Example:" in done.stdout


def test_version() -> None:
    import ingot as package

    assert ingot("--version").stdout == f"{package.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bogus",), "No such command 'bogus'; see `ingot --help`"),
        (("train",), "Missing argument 'RECIPE... KEY=VALUE...'; see `ingot train --help`"),
        (("train", "--bogus", "r.yaml"), "No such option: --bogus; see `ingot train --help`"),
        (("train", "missing.yaml"), "recipe missing.yaml does not exist; check the path"),
        (
            ("train", "train.steps=3"),
            "no recipe is given; name one, such as quickstart (`ingot recipes` lists them)",
        ),
        (
            ("explain", "train.optimiser.lr"),
            "no knob is called `train.optimiser.lr`; did you mean `train.optimizer.lr`?",
        ),
        (
            ("predict", "missing", "hello"),
            "missing is no model folder, run folder, recipe or address",
        ),
        (
            ("completion", "tcsh"),
            "error: Invalid value for 'bash|zsh|fish': 'tcsh' is not one of 'bash', 'zsh', 'fish';",
        ),
        (("deploy", "."), ". is a folder, and deploy makes live what is registered; give the"),
        (
            ("predict", "..", "hello"),
            "is neither a model folder (no config.json) nor a run folder (no model/)",
        ),
        (
            ("predict", ".", "hello", "max_token=3"),
            "predict has no setting `max_token`; did you mean `max_tokens`?",
        ),
        (("predict", ".", "hello", "max_tokens=many"), "`many` is not a whole number; give one"),
        (("show", "run", "nosuch"), "nosuch is neither a run folder nor a recipe; check the path"),
        (("export", ".", "there", "--format", "onnx"), "--format onnx is not known"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(
    arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    done = ingot(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path) -> None:
    for arguments in (("--debug", "train", "missing.yaml"), ("train", "missing.yaml", "--debug")):
        done = ingot(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert "Traceback" in done.stderr
        assert (
            done.stderr.splitlines()[-1]
            == "error: recipe missing.yaml does not exist; check the path"
        )


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_verb_with_one_line(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    argv = blocking_argv(tmp_path)
    process = subprocess.Popen(
        command(*argv), env=clean_environment(), stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: len(waiting_on(argv)) == 1)
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    assert err == f"stopped by {number.name}\n"


@pytest.mark.parametrize("what", ["knobs", "models"])  # printed, and drawn by rich
def test_a_reader_that_has_enough_is_no_error(what: str) -> None:
    process = subprocess.Popen(
        command("show", what), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(30) == 141


def test_what_a_terminal_has_no_letters_for_is_written_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "latin-1", write_through=True))
    write_any_text()
    print("Größe 金")
    assert written.getvalue() == "Größe ".encode("latin-1") + b"\\u91d1\n"
    written.truncate(written.seek(0))
    print_json("predict", completion="Größe 金 🔥")
    assert json.loads(written.getvalue())["completion"] == "Größe 金 🔥"


def test_nothing_fails_in_the_c_locale_either(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    stdout = io.TextIOWrapper(written, "ascii", "surrogateescape", write_through=True)
    monkeypatch.setattr("sys.stdout", stdout)
    write_any_text()
    print("─ Größe")
    assert written.getvalue() == b"\\u2500 Gr\\xf6\\xdfe\n"


@pytest.mark.parametrize("words", [["ingot", "train"], ["ingot.launch.node"]])
def test_nobody_who_reads_the_messages_is_no_error(words: list[str]) -> None:
    """A training and its node; both end here as wrong input does that somebody reads of."""
    reader, writer = os.pipe()
    os.close(reader)
    given = [sys.executable, "-m", *words]
    done = subprocess.run(given, stderr=writer, timeout=PATIENCE_S, check=False)
    os.close(writer)
    assert done.returncode == 2


WITHOUT = """
import os, subprocess, sys
for number in {0}:
    os.close(number)
sys.exit(subprocess.run([sys.executable, *sys.argv[1:]], close_fds=False).returncode)
"""
CHILD = """
import os, subprocess, sys
from ingot.base.progress import open_closed_streams
open_closed_streams()
print("told")
print("\\udcff", file=sys.stderr)
assert sys.stdin.read() == ""
ask = "import os; [os.fstat(number) for number in range(3)]"
given = {"stdin": sys.stdin, "stdout": sys.stderr.fileno()}
sys.exit(subprocess.run([sys.executable, "-c", ask], **given).returncode)
"""


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_what_is_started_without_streams_and_its_children_have_empty_ones(
    closed: tuple[int, ...],
) -> None:
    """As by `>&-`, or by a service that gives none; a node hands them on to its ranks."""
    without = [sys.executable, "-c", WITHOUT.format(closed)]
    node = ["-m", "ingot.launch.node", "--", "--version"]
    for given in (["-c", CHILD], ["-m", "ingot", "--version"], node):
        done = subprocess.run(
            [*without, *given], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("show", "knobs"), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "error: disk full; make space and run the same command again\n"


def _raise(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (WrongInput("x is 3; make it 4"), 2, "error: x is 3; make it 4"),
        (Failed("disk full"), 1, "error: disk full"),
        (Stopped("stopped at 5", signum=15, committed=True), 75, "stopped at 5"),
        (Stopped("stopped early", signum=15, committed=False), 143, "stopped early"),
        (
            ZeroDivisionError("division by zero"),
            1,
            "error: ZeroDivisionError: division by zero; run again with --debug to see where",
        ),
        (
            RuntimeError("first\nsecond"),
            1,
            "error: RuntimeError: first; run again with --debug to see where",
        ),
        (MemoryError(), 1, "error: MemoryError: no message; run again with --debug to see where"),
        (SignalReceived(signal.SIGTERM), 143, "stopped by SIGTERM"),
        (KeyboardInterrupt(), 130, "stopped by SIGINT"),
    ],
)
def test_what_is_raised_becomes_a_line_and_a_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(lambda: _raise(error), debug=False) == code
    assert capsys.readouterr().err == f"{line}\n"


def test_a_taken_port_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    def listen() -> int:
        with (
            socket.create_server(("127.0.0.1", 0)) as first,
            socket.create_server(first.getsockname()),
        ):
            return 0

    assert guarded(listen, debug=False) == 1
    assert "port taken" in capsys.readouterr().err


def test_a_text_in_place_of_a_path_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """As of a prompt that was given before the model."""
    prompt = "Once upon a time " * 30
    assert guarded(lambda: os.stat(prompt) and 0, debug=False) == 2
    told = capsys.readouterr().err
    assert told == (
        f"error: {prompt[:80]}... is too long for the name of a file; check what was given,"
        " and in which order\n"
    )


def test_what_a_user_may_not_read_is_told_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path))
    assert guarded(lambda: _raise(error), debug=False) == 1
    told = f"error: this user may not read or write {tmp_path}; ask its owner, or chmod\n"
    assert capsys.readouterr().err == told


def test_other_ranks_say_who_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert guarded(lambda: _raise(Failed("gone")), debug=False) == 1
    assert capsys.readouterr().err == "rank 3: error: gone\n"


BUSY = """
import threading, time
import torch
from ingot.base.errors import leave

def work():
    numbers = torch.ones(700, 700)
    while True:
        (numbers @ numbers).clamp(-1, 1)

threading.Thread(target=work, daemon=True).start()
leaving = threading.Event()
threading.Thread(target=lambda: (leaving.wait(), time.sleep(0.1), print("waited for"))).start()
time.sleep(0.2)
print("answer")
leaving.set()
leave(7)
"""


def test_a_thread_inside_a_library_does_not_take_the_process_down() -> None:
    """Nor keep what was printed from being written, nor threads that are to end first."""
    done = subprocess.run(
        [sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "answer\nwaited for\n", "")


EARLY = """
import os, runpy, signal, sys

class Impatient:
    def find_spec(self, name, path=None, target=None):
        if name == "ingot.cli.app":
            os.kill(os.getpid(), int(sys.argv[1]))

sys.meta_path.insert(0, Impatient())
runpy.run_module("ingot", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("number", "rank", "line"),
    [
        (signal.SIGINT, "0", "stopped by SIGINT\n"),
        (signal.SIGTERM, "1", "rank 1: stopped by SIGTERM\n"),
    ],
)
def test_what_is_stopped_while_verbs_are_read_ends_as_later(
    number: int, rank: str, line: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EARLY, str(int(number))],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "RANK": rank},
    )
    assert (done.returncode, done.stderr) == (128 + number, line)


def test_the_script_begins_as_the_module_does() -> None:
    scripts = (Path(ingot_package.__file__).parents[1] / "pyproject.toml").read_text("utf-8")
    assert 'ingot = "ingot.cli.start:main"\n' in scripts


FAILING = """
import sys
from ingot.cli.app import main

class Device:
    def __del__(self):
        print("taken apart")

device = Device()
sys.argv = ["ingot", "explain", "no.such.knob"]
main()
"""


@pytest.mark.parametrize("world", ["1", "2"])
def test_a_rank_that_failed_takes_nothing_apart(world: str) -> None:
    """What it frees might wait for a device that waits for other ranks."""
    done = subprocess.run(
        [sys.executable, "-c", FAILING],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "WORLD_SIZE": world},
    )
    assert (done.returncode, done.stdout) == (2, "taken apart\n" if world == "1" else "")
    assert "no.such.knob" in done.stderr


@pytest.mark.parametrize("debug", [False, True])
def test_libraries_do_not_talk_of_their_own_insides(
    debug: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.NOTSET)

    def talk() -> int:
        logging.getLogger("torchao.kernels").warning("Failed to load")
        logging.getLogger("torch.utils._pytree").warning("deprecated")
        logging.getLogger("torchao").error("broken")
        return 0

    assert guarded(talk, debug=debug) == 0
    assert [record.message for record in caplog.records][-1] == "broken"
    assert (len(caplog.records) > 1) == debug


QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("serve", "runs/x", "--port", "8080"), "settings have no dashes: `serve.port=8080`"),
        (("train", QUICKSTART, "--steps", "5"), "settings have no dashes: `train.steps=5`"),
        (("train", QUICKSTART, "--lr=3e-4"), "dashes: `train.optimizer.lr=3e-4`"),
        (("run", QUICKSTART, "--train.steps"), "dashes: `train.steps=VALUE`"),
        (("predict", "x", "hi", "--max-tokens", "5"), "dashes: `max_tokens=5`"),
        (("serve", "x", "--api-key=sesame"), "dashes: `serve.api_key="),
        (("run", QUICKSTART, "--nosuch"), "No such option: --nosuch; see `ingot run --help`"),
        (("run", QUICKSTART, "train.steps"), "`train.steps` has no value; write `train.steps=VAL"),
        (("run", QUICKSTART, "train.stps"), "did you mean `train.steps=VALUE`?"),
        (("run", "nosuch.yaml"), "recipe nosuch.yaml does not exist; check the path"),
        (("run", QUICKSTART, "name="), "`name` is empty; it should be a valid string"),
        (("run", QUICKSTART, "output=/proc/x"), "output /proc/x is on no disk; set output to a"),
        (("ingest", QUICKSTART, "output=/proc/x"), "cannot be made there (No such file or"),
        (("ingest", QUICKSTART, "output=/dev/null/x"), ", /dev/null is in the way (Not a direct"),
        (("ingest", QUICKSTART, f"output={'a' * 300}"), "cannot be made there (File name too long"),
        (("predict", "empty", "hi"), "empty is an empty folder; give a model folder or a run"),
        (("import", "empty", "new"), "empty is an empty folder; give a model folder or a run"),
    ],
)
def test_wrong_commands_lead_on(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = ingot(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "sesame" not in done.stderr


@pytest.mark.parametrize("words", [(), ("show",), ("images",)])
def test_without_a_verb_the_help_is_the_answer(words: tuple[str, ...], tmp_path: Path) -> None:
    done = ingot(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage:" in done.stdout
