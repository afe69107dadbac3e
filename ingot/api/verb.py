"""The process behind a method of a run: a verb of the command line, which does the recipe as it was
loaded. Its messages are passed on, and its error is an exception here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import site
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

from ingot.base.environment import LOADED_VARIABLE
from ingot.base.errors import (
    EXIT_DONE,
    EXIT_KEEP,
    EXIT_STOPPED,
    EXIT_WRONG_INPUT,
    Failed,
    IngotError,
    Stopped,
    WrongInput,
)
from ingot.base.processes import own_python, preexec_die_with_parent
from ingot.config.values import RecipeInputs

OPTION = re.compile(r"--(fresh|again)\b")
"""The options of verbs that are arguments of their methods."""
PACKAGE = Path(__file__).parents[1]
OPEN_FILES = Path("/proc/self/fd")
"""Where Linux shows the files that a process has open, by their numbers."""


class VerbProcess:
    """A verb that runs while this is entered. Its messages are passed on, but for those of its end,
    which `result` raises. Left early, it is interrupted and waited for.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], here: Path, inputs: RecipeInputs, *, quiet: bool
    ) -> None:
        self.name, self._here, self._inputs, self._quiet = name, here, inputs, quiet
        self._command = [*own_python(), "-m", "ingot", name, *arguments, "--json"]
        self._out, self._last_words, self._changed = list[str](), list[str](), ""
        self._started: Future[subprocess.Popen[str]] = Future()
        # The kernel ends it with the thread that starts it, and whoever asks for the first step of
        # a training may be one that ends before: this one reads to the end.
        self._readers = [
            threading.Thread(target=work, daemon=True) for work in (self._keep, self._pass_on)
        ]

    def __enter__(self) -> VerbProcess:
        if changed := self._inputs.changed(self._here):
            self._changed = f"{', '.join(changed)} changed since the run was loaded"
            self._show(
                f"note: {self._changed}; {self.name} does what was loaded, and `ingot.load` again"
                " what is there now\n",
                always=True,  # what is done is not what the recipe says
            )
        try:
            for reader in self._readers:
                reader.start()
                self._started.result()
            return self
        except BaseException:  # Ctrl-C: nobody else knows of what may run by now
            if not self._started.cancel() and self._started.exception() is None:
                self._end(interrupted=True)
            for reader in self._readers:
                if reader.is_alive():
                    reader.join()
            raise

    def __exit__(self, _: object, why: BaseException | None, *__: object) -> None:
        self._end(interrupted=why is not None)
        for reader in self._readers:
            reader.join()
        if why is not None and (failure := self._failure()):
            self._tell_of_leaving(failure, why)

    def _end(self, *, interrupted: bool) -> None:
        process = self._started.result()
        try:
            if interrupted:
                process.send_signal(signal.SIGINT)
            process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise

    def _tell_of_leaving(self, failure: IngotError, why: BaseException) -> None:
        """How a verb ended that was left early, as it should (with a checkpoint) or not. Whoever
        left a loop hears of an exception; of two, the first goes on.
        """
        if isinstance(failure, Stopped):
            self._show(f"{failure}\n")
        elif isinstance(why, GeneratorExit):
            raise failure from None
        else:
            why.add_note(f"{self.name} failed as it was stopped for this: {failure}")
            self._show(f"error: {failure}\n", always=True)

    def over(self) -> bool:
        return self._started.result().poll() is not None

    def result(self) -> dict[str, Any]:
        """What the verb printed, once it is over.

        Raises:
            WrongInput, Failed, Stopped: as the verb ended, with its message.
        """
        if failure := self._failure():
            raise failure
        told: dict[str, Any] = json.loads("".join(self._out))
        return told

    def _failure(self) -> IngotError | None:
        """The error that the verb ended with; None if it has a result. Its exit code is not enough:
        none is known where this process ignores SIGCHLD, and Python says 0.
        """
        code = self._started.result().returncode
        if code in (EXIT_DONE, EXIT_KEEP) and self._out:
            return None
        said = for_python("".join(self._last_words).strip().removeprefix("error: "))
        message = said or f"{self.name} ended with exit code {code} and no result"
        if code == EXIT_WRONG_INPUT:
            # What was wrong may be mended there, and the next try would fail as this one did.
            note = (
                f"\nnote: {self._changed}; `ingot.load` the recipe again" if self._changed else ""
            )
            return WrongInput(message + note)
        by_signal = code in (-signal.SIGINT, 128 + signal.SIGINT)
        if code == EXIT_STOPPED or by_signal or message.startswith("stopped by "):
            return Stopped(message, signum=signal.SIGINT, committed=code == EXIT_STOPPED)
        return Failed(message)

    def _keep(self) -> None:
        """Start the process and read its result until it is over."""
        if not self._started.set_running_or_notify_cancel():
            return
        try:
            environment = _environment(self._here, looks_there="-P" not in self._command)
            with _written(self._inputs) as loaded:
                process = self._start({**environment, LOADED_VARIABLE: _path_of(loaded)})
                self._started.set_result(process)
                assert process.stdout is not None
                self._out += list(process.stdout)
                process.wait()
        except BaseException as error:  # whatever keeps it from starting is for who asked
            # The file is gone by now: who asked may end, and this thread with it.
            if self._started.done():
                raise
            self._started.set_exception(error)

    def _start(self, environment: dict[str, str]) -> subprocess.Popen[str]:
        # A session of its own: Ctrl-C reaches it once, from `__exit__`.
        return subprocess.Popen(
            self._command,
            cwd=self._here,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            preexec_fn=preexec_die_with_parent(signal.SIGTERM),
        )

    def _pass_on(self) -> None:
        stderr = self._started.result().stderr
        assert stderr is not None
        for line in stderr:
            if self._last_words or line.startswith(("error: ", "stopped by ")):
                self._last_words.append(line)
            else:
                self._show(line)

    def _show(self, line: str, *, always: bool = False) -> None:
        if always or not self._quiet:
            # What goes to stderr in a notebook stands in the colour of errors.
            shown = sys.stdout if in_notebook() else sys.stderr
            with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or a closed one
                shown.write(line)
                shown.flush()


def for_python(message: str) -> str:
    """A verb's message as its caller in Python can act on it: options are arguments here, and what
    overrides a recipe was typed on no command line.
    """
    return OPTION.sub(r"\1=True", message.replace("` on the command line", "`"))


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def _written(inputs: RecipeInputs) -> IO[str]:
    """A file that has the recipe for the process, and secrets that variables hold: it is gone once
    it is closed. Where the system shows open files it has no name: ranks of a long training are
    started again, and read it, when what cleans /tmp would have removed it.

    Raises:
        Failed: it cannot be written.
    """
    try:
        make = tempfile.TemporaryFile if OPEN_FILES.is_dir() else tempfile.NamedTemporaryFile
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(make("w", prefix="ingot-recipe-", encoding="utf-8"))
            inputs.write(file)
            opened.pop_all()  # open for whoever asked
            return file
    except OSError as error:
        raise Failed(
            f"the recipe cannot be written for its process ({error.strerror or error}); export"
            " TMPDIR=FOLDER, one with room that can be written"
        ) from error


def _path_of(file: IO[str]) -> str:
    """Where other processes read it."""
    named = isinstance(file.name, str)
    return file.name if named else f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _environment(here: Path, *, looks_there: bool) -> dict[str, str]:
    """This process's, in which Python finds the ingot that was imported here: whoever imported it
    may have put its folder on the path. `looks_there`: Python is not told to pass over `here`.

    Raises:
        WrongInput: another one lies in the folder, where Python looks first.
    """
    other = here / PACKAGE.name
    looks_there = looks_there and not os.environ.get("PYTHONSAFEPATH")
    if looks_there and (other / "__init__.py").is_file() and not other.samefile(PACKAGE):
        raise WrongInput(
            f"{other} would be run, and {PACKAGE} is imported here; load the recipe in another"
            " folder, or import that one"
        )
    root, path = str(PACKAGE.parent), os.environ.get("PYTHONPATH")
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *([path] if path else [])])}
