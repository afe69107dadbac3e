"""A recipe and its run folder as an object. Each method is a verb of the command line, in a process
of its own: nothing of a training stays in a notebook, and interrupting it leaves a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.api.verb import VerbProcess, for_python
from ingot.base.errors import IngotError, WrongInput
from ingot.base.progress import say
from ingot.base.runfolder import SET_ASIDE, RunFolder
from ingot.base.runlog import AppendedLines
from ingot.config.load import checked, read_values, split_arguments
from ingot.config.recipe import Recipe
from ingot.config.shipped import path_to_type, tell_names
from ingot.config.values import RecipeInputs, own_inputs
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
        quiet: do not show what the verbs say (on stderr; in a notebook below the cell), but for
            what goes wrong, and for what of the recipe changed since it was loaded.

    Raises:
        WrongInput: the recipe is wrong.
    """
    files, overrides = split_arguments(str(each) for each in recipe)
    if not files:
        raise WrongInput("no recipe is given; name one, such as quickstart (`ingot recipes`)")
    overrides += [f"{name.replace('__', '.')}={_typed(value)}" for name, value in knobs.items()]
    files = [os.path.expanduser(file) for file in files]
    paths = [path_to_type(file) for file in files] if quiet else tell_names(files)
    try:
        inputs = own_inputs(Path(".env"))
        recipe_read = checked(read_values(paths, overrides, inputs, verb=None))
    except WrongInput as error:
        raise WrongInput(for_python(str(error))) from None
    return Run(recipe_read, [*paths, *overrides], inputs, quiet=quiet)


def _typed(value: Any) -> str:
    """A value as it is typed on a command line: JSON, which is YAML where the letters that YAML
    folds or refuses are escaped; paths are texts.
    """
    try:
        typed = json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WrongInput(f"{value!r} is no value of a knob ({error}); give what YAML has") from None
    return "".join(map(_escaped, typed))


def _escaped(letter: str) -> str:
    """Half of a surrogate pair stays, for YAML to refuse."""
    is_kept = letter.isprintable() or "\ud800" <= letter <= "\udfff"
    return letter if is_kept else f"\\U{ord(letter):08x}"


def _plain(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    if callable(number := getattr(value, "item", None)):  # a number of numpy or torch
        return number()
    raise TypeError(f"its type is {type(value).__name__}")


class Run:
    """A recipe with its run folder; `load` makes it. What is done and unchanged is not done again,
    whoever did it: results come from the run folder. What is done is the recipe as it was loaded:
    a file that changes later is told, and is read by the next `load`.
    """

    def __init__(
        self,
        recipe: Recipe,
        arguments: Sequence[str],
        inputs: RecipeInputs,
        *,
        quiet: bool = False,
    ) -> None:
        self.recipe, self._arguments, self._quiet = recipe, tuple(arguments), quiet
        self._inputs, self._here = inputs, Path.cwd()

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

    def steps(self, *, fresh: bool = False) -> LoggedSteps:
        """Train, and give what is logged while training goes on. Leaving the loop stops the
        training, which saves a checkpoint; `train` then goes on from it. Where none could be saved,
        `close` raises the error, and a `break` prints it.

        Examples:
            >>> for step in run.steps():
            ...     print(step.step, step.loss)
        """
        return LoggedSteps(self._steps(fresh))

    def _steps(self, fresh: bool) -> Generator[StepMetrics, None, None]:
        lines = _from_now_on(self.folder)
        verb = self._verb("train", ["--fresh"] * fresh)
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

    def _verb(self, name: str, options: Sequence[str]) -> VerbProcess:
        arguments = [*self._arguments, *options]
        return VerbProcess(name, arguments, self._here, self._inputs, quiet=self._quiet)

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
        with self._verb(verb, options) as started:
            for step in _logged(lines, started):
                if on_step is not None:
                    on_step(step)
        if close := getattr(on_step, "close", None):  # no more steps come
            close()
        return started.result()


class LoggedSteps(Iterator[StepMetrics]):
    """What a training logs. Dropped by a `break`, it prints the error that the training ended with:
    one that is raised there reaches nobody, and Python prints it as ignored.
    """

    def __init__(self, steps: Generator[StepMetrics, None, None]) -> None:
        self._steps = steps

    def __next__(self) -> StepMetrics:
        return next(self._steps)

    def close(self) -> None:
        """Stop the training. Raises IngotError: it could not save a checkpoint."""
        self._steps.close()

    def __del__(self) -> None:
        try:
            self.close()
        except IngotError as error:
            say(f"error: {error}")


def _logged(lines: _LoggedLines | None, verb: VerbProcess) -> Iterator[StepMetrics]:
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
