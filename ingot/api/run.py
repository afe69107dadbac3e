"""A recipe and its run folder as an object. Each method is a verb of the command line, in a process
of its own: nothing of a training stays in a notebook, and interrupting it leaves a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from ingot.base.processes import preexec_die_with_parent
from ingot.base.runfolder import SET_ASIDE, RunFolder
from ingot.base.runlog import AppendedLines
from ingot.config.load import load_recipe, split_arguments
from ingot.config.recipe import Recipe
from ingot.config.shipped import resolve, tell_names
from ingot.report.results import (
    RESULTS,
    EvaluateResult,
    GateResult,
    IngestResult,
    PrepareResult,
    RegisterResult,
    Result,
    RunResult,
    TrainResult,
)

if TYPE_CHECKING:
    from ingot.api.model import Model

POLL_S = 0.1
OPTION = re.compile(r"--(fresh|again)\b")
"""The options of verbs that are arguments of their methods."""


@dataclass(frozen=True)
class StepMetrics:
    """One line of `metrics.jsonl`: what was logged at a step, under TensorBoard's names
    (`train/loss`, `validation/loss`). A number that was not finite is NaN.
    """

    step: int
    values: dict[str, float | str]

    @property
    def loss(self) -> float | None:
        """Training loss, as the objective counts it: in nats a token of texts, chats and pairs;
        None in a line of something else.
        """
        return self._number("train/loss")

    @property
    def validation_loss(self) -> float | None:
        return self._number("validation/loss")

    @property
    def lr(self) -> float | None:
        return self._number("train/lr")

    @property
    def tokens_per_s(self) -> float | None:
        return self._number("train/tokens_per_s")

    def _number(self, name: str) -> float | None:
        value = self.values.get(name)
        return value if isinstance(value, float | int) else None


OnStep = Callable[[StepMetrics], object]


def load(*recipe: str | Path, quiet: bool = False, **knobs: Any) -> Run:
    """The run of a recipe: recipe files, names of ingot's own recipes and places, and `key=value`
    as on the command line; then knobs as keywords, with `__` for dots. Later ones win.

    Examples:
        >>> run = ingot.load("quickstart", "places/laptop", train__steps=100)
        >>> run.train().loss

    Args:
        quiet: do not show what the verbs say (on stderr; in a notebook below the cell).

    Raises:
        WrongInput: the recipe is wrong.
    """
    files, overrides = split_arguments(str(each) for each in recipe)
    if not files:
        raise WrongInput("no recipe is given; name one, such as quickstart (`ingot recipes`)")
    overrides += [f"{name.replace('__', '.')}={_typed(value)}" for name, value in knobs.items()]
    files = [os.path.expanduser(file) for file in files]
    paths = [str(resolve(file)[0]) for file in files] if quiet else tell_names(files)
    try:
        recipe_read = load_recipe(paths, overrides)
    except WrongInput as error:
        raise WrongInput(_for_python(str(error))) from None
    return Run(recipe_read, [*paths, *overrides], quiet=quiet)


def _for_python(message: str) -> str:
    """A verb's message as its caller in Python can act on it: options are arguments here, and what
    overrides a recipe was typed on no command line.
    """
    return OPTION.sub(r"\1=True", message.replace("` on the command line", "`"))


def _typed(value: Any) -> str:
    """A value as it is typed on a command line: JSON, which is YAML; paths are texts."""
    try:
        return json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WrongInput(f"{value!r} is no value of a knob ({error}); give what YAML has") from None


def _plain(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    if callable(number := getattr(value, "item", None)):  # a number of numpy or torch
        return number()
    raise TypeError(f"its type is {type(value).__name__}")


class Run:
    """A recipe with its run folder; `load` makes it. What is done and unchanged is not done again,
    whoever did it: results come from the run folder.
    """

    def __init__(self, recipe: Recipe, arguments: Sequence[str], *, quiet: bool = False) -> None:
        self.recipe, self._arguments, self._quiet = recipe, tuple(arguments), quiet
        self._here = Path.cwd()

    def __repr__(self) -> str:
        return f"<ingot run {self.recipe.name} in {self.folder.root}>"

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def folder(self) -> RunFolder:
        """The paths of the run."""
        return RunFolder(self._here / self.recipe.folder.root)

    def ingest(self, *, again: bool = False) -> IngestResult:
        """Read the sources into raw documents."""
        return self._do(IngestResult, "ingest", ["--again"] * again)

    def prepare(self, *, again: bool = False) -> PrepareResult:
        """Train or fetch the tokenizer, and turn documents into columns of tokens."""
        return self._do(PrepareResult, "prepare", ["--again"] * again)

    def train(self, *, fresh: bool = False, on_step: OnStep | None = None) -> TrainResult:
        """Train, or go on from the newest checkpoint, and export the model. `on_step` is called
        with what is logged, while training goes on; an exception in it stops the training, which
        saves a checkpoint. Steps that a training rolls back over come again, as it does them again.
        A `close` that it has is called after the last step.
        """
        return self._do(TrainResult, "train", ["--fresh"] * fresh, on_step)

    def evaluate(self, *, again: bool = False) -> EvaluateResult:
        """Measure the model."""
        return self._do(EvaluateResult, "evaluate", ["--again"] * again)

    def gate(self, *, again: bool = False) -> GateResult:
        """Is the model better than the live one?"""
        return self._do(GateResult, "gate", ["--again"] * again)

    def register(self, *, again: bool = False) -> RegisterResult:
        """Keep the model as a version, and make it live if the gate said so."""
        return self._do(RegisterResult, "register", ["--again"] * again)

    def run(self, *, fresh: bool = False, on_step: OnStep | None = None) -> RunResult:
        """Do all steps in order, skipping what is done and unchanged."""
        told, here = self._told("run", ["--fresh"] * fresh, on_step), self._here
        steps = {verb: RESULTS[verb].parse(value, here) for verb, value in told["steps"].items()}
        return RunResult(here / told["run"], here / told["page"], steps)

    def steps(self, *, fresh: bool = False) -> Iterator[StepMetrics]:
        """Train, and give what is logged while training goes on. Leaving the loop stops the
        training, which saves a checkpoint; `train` then goes on from it.

        Examples:
            >>> for step in run.steps():
            ...     print(step.step, step.loss)
        """
        lines = _from_now_on(self.folder)
        verb = _Verb("train", [*self._arguments, *["--fresh"] * fresh], self._here, self._quiet)
        with verb:
            yield from _logged(lines, verb)
        verb.result()

    def metrics(self) -> list[StepMetrics]:
        """Everything that was logged so far."""
        return list(_LoggedLines(self.folder.metrics).read())

    def model(self) -> Model:
        """The trained model."""
        from ingot.api.model import Model

        return Model(self.folder.root)

    def _do(
        self,
        kind: type[Result],
        verb: str,
        options: Sequence[str],
        on_step: OnStep | None = None,
    ) -> Result:
        return kind.parse(self._told(verb, options, on_step), self._here)

    def _told(self, verb: str, options: Sequence[str], on_step: OnStep | None) -> dict[str, Any]:
        # Logs may be long: they are read for whoever wants to know, and for nobody else.
        lines = None if on_step is None else _from_now_on(self.folder)
        with _Verb(verb, [*self._arguments, *options], self._here, self._quiet) as started:
            for step in _logged(lines, started):
                if on_step is not None:
                    on_step(step)
        if close := getattr(on_step, "close", None):  # no more steps come
            close()
        return started.result()


class _Verb:
    """A verb that runs. Its messages are passed on, but for those of an error, which `result`
    raises. Left early, it is interrupted and waited for.
    """

    def __init__(self, verb: str, arguments: Sequence[str], here: Path, quiet: bool) -> None:
        self.name, self._quiet, self._error = verb, quiet, list[str]()
        self._out: list[str] = []
        command = [sys.executable, "-m", "ingot", verb, *arguments, "--json"]
        started: Future[subprocess.Popen[str]] = Future()
        # The kernel ends it with the thread that starts it, and whoever asks for the first step of
        # a training may be one that ends before: this one reads to the end.
        self._readers = [
            threading.Thread(target=self._keep, args=(command, here, started), daemon=True)
        ]
        self._readers[0].start()
        self._process = started.result()

    def _keep(self, command: list[str], here: Path, started: Future[subprocess.Popen[str]]) -> None:
        """Start the process and read its result until it is over."""
        try:
            # A session of its own: Ctrl-C reaches it once, from `__exit__`.
            process = subprocess.Popen(
                command,
                cwd=here,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
                preexec_fn=preexec_die_with_parent(signal.SIGTERM),
            )
        except BaseException as error:  # whatever keeps it from starting is for the one who asked
            started.set_exception(error)
            return
        started.set_result(process)
        assert process.stdout is not None
        self._out += list(process.stdout)
        process.wait()

    def __enter__(self) -> _Verb:
        self._readers.append(threading.Thread(target=self._pass_on, daemon=True))
        self._readers[-1].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait()
        except KeyboardInterrupt:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
            raise
        for reader in self._readers:
            reader.join()

    def over(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> dict[str, Any]:
        """What the verb printed, once it is over.

        Raises:
            WrongInput, Failed, Stopped: as the verb ended, with its message.
        """
        code = self._process.returncode
        if code in (EXIT_DONE, EXIT_KEEP):
            told: dict[str, Any] = json.loads("".join(self._out))
            return told
        raise _error(self.name, code, "".join(self._error).strip().removeprefix("error: "))

    def _pass_on(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if self._error or line.startswith(("error: ", "stopped by ")):
                self._error.append(line)
            elif not self._quiet:
                # What goes to stderr in a notebook stands in the colour of errors.
                shown = sys.stdout if in_notebook() else sys.stderr
                shown.write(line)
                shown.flush()


def _error(verb: str, code: int, message: str) -> IngotError:
    message = _for_python(message) or f"{verb} ended with exit code {code}"
    if code == EXIT_WRONG_INPUT:
        return WrongInput(message)
    if code == EXIT_STOPPED or message.startswith("stopped by "):
        return Stopped(message, signum=signal.SIGINT, committed=code == EXIT_STOPPED)
    return Failed(message)


def _logged(lines: _LoggedLines | None, verb: _Verb) -> Iterator[StepMetrics]:
    """What is logged until the verb is over; without `lines`, only wait for it."""
    while True:
        over = verb.over()  # asked before reading, so that nothing is missed
        if lines is not None:
            yield from lines.read()
        if over:
            return
        time.sleep(POLL_S)


def _from_now_on(run: RunFolder) -> _LoggedLines:
    """What a verb that begins now will log: nothing of what lies here, nor of the trainings that
    are set aside, one of which it may bring back.
    """
    lines = _LoggedLines(run.metrics)
    aside = (run.root / SET_ASIDE).glob(f"*/{run.metrics.name}")
    for each in (lines, *(_LoggedLines(path, lines.given) for path in aside)):
        deque(each.read(), maxlen=0)
    return lines


class _LoggedLines:
    """What is logged, each line once. A training that rolls back writes the file anew, without the
    steps that it does again: what stays of it was given before. Lines are told apart by what they
    are, not by whether they are later: a clock may be set back.
    """

    def __init__(self, path: Path, given: set[int] | None = None) -> None:
        """`given`: hashes of the lines to pass over; those that are read are added."""
        self._path, self._lines = path, AppendedLines()
        self.given = set[int]() if given is None else given

    def read(self) -> Iterator[StepMetrics]:
        while True:
            found, _ = self._lines.next(self._path)
            if not found:
                return
            self._lines.done(found)
            for line in found:
                yield from self._parse(line)

    def _parse(self, line: bytes) -> list[StepMetrics]:
        try:
            value = json.loads(line)
            step, when = int(value.pop("step")), float(value.pop("t_wall"))
        except (ValueError, KeyError, TypeError):  # torn by a crash
            return []
        known = hash((step, when, *value))
        if known in self.given:
            return []
        self.given.add(known)
        return [StepMetrics(step, {k: math.nan if v is None else v for k, v in value.items()})]


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
