"""The process behind a method: it is the ingot that was imported, nothing of how it ended is lost,
and none is left behind. Programs of a line stand in for verbs where it matters how they end.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from io import BytesIO, TextIOWrapper
from pathlib import Path
from subprocess import Popen

import pytest

from ingot.api.run import LoggedSteps, StepMetrics
from ingot.api.verb import PACKAGE, VerbProcess
from ingot.base.errors import EXIT_STOPPED, Failed, Stopped, WrongInput
from ingot.config.values import RecipeInputs
from tests import forkedmain

AT_SIGINT = (
    "import signal, sys; signal.sigwait([signal.SIGINT]); sys.stderr.write({!r}); sys.exit({})"
)
"""A program that says how it ended once it is interrupted."""


@pytest.fixture
def held_interrupts() -> Iterator[None]:
    """A program that starts meanwhile gets SIGINT when it waits for one, not before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def verb(
    program: str,
    here: Path | None = None,
    *,
    inputs: RecipeInputs | None = None,
    quiet: bool = True,
) -> VerbProcess:
    made = VerbProcess("train", [], here or Path.cwd(), inputs or RecipeInputs(), quiet=quiet)
    made._command = [sys.executable, "-c", program]
    return made


def test_a_verb_goes_on_when_the_thread_that_began_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the training of `steps()` whose first one was asked for in a thread of its own."""
    monkeypatch.setattr(forkedmain, "is_program", lambda args: False)  # a real interpreter
    begun = VerbProcess("recipes", [], Path.cwd(), RecipeInputs(), quiet=True)
    thread = threading.Thread(target=begun.__enter__)
    thread.start()
    thread.join()
    begun.__exit__(None, None)
    assert begun.result()["recipes"]


@pytest.mark.usefixtures("held_interrupts")
def test_who_leaves_a_loop_hears_that_no_checkpoint_was_saved(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def steps(told: str, code: int) -> LoggedSteps:
        def logged() -> Generator[StepMetrics, None, None]:
            with verb(AT_SIGINT.format(told, code)):
                yield StepMetrics(1, {})

        return LoggedSteps(logged())

    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    for told, code in (("error: disk full\n", 1), ("error: no such folder\n", 2)):
        left = steps(told, code)
        next(left)
        with pytest.raises((Failed, WrongInput), match=told[7:-1]):
            left.close()
        del left
        assert capfd.readouterr().err == ""
        for _ in steps(told, code):
            break
        assert capfd.readouterr().err == told
    left = steps("stopped by SIGINT; a checkpoint is saved\n", EXIT_STOPPED)
    next(left)
    left.close()
    for _ in steps("stopped by SIGINT; a checkpoint is saved\n", EXIT_STOPPED):
        break
    assert capfd.readouterr().err == ""
    assert ignored == []


@pytest.mark.usefixtures("held_interrupts")
def test_what_stopped_a_verb_goes_on_and_takes_its_error_along(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (
        pytest.raises(ValueError, match="mine") as raised,
        verb(AT_SIGINT.format("error: disk full\n", 1)),
    ):
        raise ValueError("mine")
    assert raised.value.__notes__ == ["train failed as it was stopped for this: disk full"]
    assert capsys.readouterr().err == "error: disk full\n", "quiet is for what went well"
    saved = "stopped by SIGINT; a checkpoint is saved\n"
    for quiet, shown in ((True, ""), (False, saved)):
        with (
            pytest.raises(KeyboardInterrupt) as interrupt,
            verb(AT_SIGINT.format(saved, EXIT_STOPPED), quiet=quiet),
        ):
            raise KeyboardInterrupt
        assert not hasattr(interrupt.value, "__notes__")
        assert capsys.readouterr().err == shown


def test_no_result_is_an_error_whatever_the_exit_code() -> None:
    """Where a process ignores SIGCHLD, it is told of every child that it ended with 0."""
    with verb("import sys; sys.stderr.write('error: disk full\\n')") as failed:
        pass
    with pytest.raises(Failed, match="disk full"):
        failed.result()
    with verb("import sys; sys.exit(130)") as interrupted:
        pass
    with pytest.raises(Stopped, match="train ended with exit code 130 and no result"):
        interrupted.result()


def test_a_recipe_that_changed_is_told_also_where_little_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever mends the file that an error names, and tries again, would meet it again."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("seed: 2", encoding="utf-8")
    program = "import sys; sys.stderr.write('error: seed is wrong\\n'); sys.exit(2)"
    for loaded, told in (
        ("seed: 1", f"{recipe} changed since the run was loaded; "),
        ("seed: 2", ""),
    ):
        inputs = RecipeInputs(texts={str(recipe): loaded})
        with verb(program, inputs=inputs) as failed:
            pass
        with pytest.raises(WrongInput) as raised:
            failed.result()
        note = f"\nnote: {told}`ingot.load` the recipe again" if told else ""
        assert str(raised.value) == f"seed is wrong{note}"
        shown = capsys.readouterr().err
        assert shown.startswith(f"note: {told}train does what was loaded") if told else not shown


@pytest.mark.parametrize("closed", [None, TextIOWrapper(BytesIO())])
def test_a_verb_goes_on_where_nobody_can_read_its_messages(
    closed: TextIOWrapper | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever for a reader."""
    if closed is not None:
        closed.close()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", closed)
        program = "import sys; sys.stderr.write('step 1\\nerror: disk full\\n')"
        with verb(program, quiet=False) as failed:
            pass
    with pytest.raises(Failed, match=r"^disk full$"):
        failed.result()


class _Interrupted(Future[Popen[str]]):
    """Ctrl-C while the main thread waits for a process that is being started."""

    def __init__(self) -> None:
        super().__init__()
        self._starts, self._was_interrupted = threading.Event(), False

    def set_running_or_notify_cancel(self) -> bool:
        goes_on = super().set_running_or_notify_cancel()
        self._starts.set()
        return goes_on

    def result(self, timeout: float | None = None) -> Popen[str]:
        if not self._was_interrupted:
            self._was_interrupted = True
            assert self._starts.wait(60)
            raise KeyboardInterrupt
        return super().result(timeout)


@pytest.mark.usefixtures("held_interrupts")
def test_an_interrupt_while_a_verb_starts_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starting = verb(AT_SIGINT.format("", 1))
    starting._started = _Interrupted()
    with pytest.raises(KeyboardInterrupt):
        starting.__enter__()
    assert starting._started.result().returncode == 1
    assert not starting._readers[0].is_alive(), "with its file, which may hold secrets"
    other = verb("")
    monkeypatch.setattr(other._readers[0], "start", lambda: signal.default_int_handler(2, None))
    with pytest.raises(KeyboardInterrupt):
        other.__enter__()
    other._keep()  # the thread, if it comes to life after all
    assert other._started.cancelled()


def test_a_verb_that_does_not_start_leaves_no_recipe_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold secrets, and whoever asked may end as soon as they are told. Linux gives it no
    name; other systems do.
    """
    monkeypatch.setattr("ingot.api.verb.OPEN_FILES", tmp_path / "none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    failing, left = verb("", tmp_path / "gone"), list[Path]()

    def tell(error: BaseException) -> None:
        left.extend(tmp_path.iterdir())
        Future.set_exception(failing._started, error)

    monkeypatch.setattr(failing._started, "set_exception", tell)
    with pytest.raises(FileNotFoundError):
        failing.__enter__()
    assert left == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(Failed, match="export TMPDIR=FOLDER"):
        verb("").__enter__()


@pytest.mark.parametrize("is_shown", [True, False], ids=["Linux", "no /proc"])
def test_what_was_loaded_is_read_after_tmp_was_cleaned(
    is_shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by ranks that a long training starts again. Where no open file is shown it has a name."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    clean = f"import shutil; shutil.rmtree({str(folder)!r}); "
    if not is_shown:
        monkeypatch.setattr("ingot.api.verb.OPEN_FILES", folder / "none")
        clean = ""
    program = "import json; from ingot.config.values import own_inputs; "
    program += "print(json.dumps(own_inputs(None).dotenv))"
    knobs = {"INGOT_SEED": "3"}
    with verb(clean + program, inputs=RecipeInputs(dotenv=knobs)) as reading:
        pass
    assert reading.result() == knobs
    assert not folder.exists() or not list(folder.iterdir())


def test_the_ingot_that_was_imported_is_the_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ingot").mkdir()
    (tmp_path / "ingot" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = (
        "import ingot, json, os; print(json.dumps([ingot.__file__, os.environ['PYTHONPATH']]))"
    )
    path = f"{PACKAGE.parent}{os.pathsep}{tmp_path}"

    def runs_what_was_imported(started: VerbProcess) -> bool:
        with started:
            pass
        return list(started.result()) == [str(PACKAGE / "__init__.py"), path]

    assert runs_what_was_imported(verb(program))
    with pytest.raises(WrongInput, match="would be run, and"):
        verb(program, tmp_path).__enter__()
    told = verb(program, tmp_path)
    told._command.insert(1, "-P")
    assert runs_what_was_imported(told), "Python does not look in the folder"
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert runs_what_was_imported(verb(program, tmp_path))
