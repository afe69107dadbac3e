"""Runs verbs by name: the steps of a recipe, each imported when it is run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ingot.base.environment import AS_ONE_PROCESS, ranks
from ingot.base.errors import EXIT_DONE, WrongInput
from ingot.base.lazy import importing
from ingot.base.markers import fingerprint
from ingot.base.processes import own_python
from ingot.base.progress import say
from ingot.base.reports import VerbOutcome
from ingot.cli.arguments import note_other_run, with_paths
from ingot.cli.output import print_json
from ingot.config.load import read_recipe
from ingot.config.recipe import Recipe
from ingot.launch.job import Job
from ingot.launch.places.local import foreground
from ingot.pipeline.incremental import run_step
from ingot.pipeline.steps import step_named
from ingot.report.results import RESULTS, RunResult


def do_step(
    verb: str, arguments: list[str], *, again: bool, debug: bool = False, as_json: bool = False
) -> int:
    """Run one step of the recipe unless nothing changed; prints its result on stdout and returns
    its exit code.
    """
    more = [*(["--debug"] if debug else []), *(["--json"] if as_json else [])]
    recipe, step = read_recipe(arguments, verb), step_named(verb)
    if step.distributed:
        ranks()  # refuses the variables that a shell kept, before one of them is taken for a rank
    else:
        check_is_main(verb)
    prepare_environment(recipe)
    if verb == "prepare" and (elsewhere := other_interpreter(recipe)):
        options = [*(["--again"] if again else []), *more]
        return subprocess.run(
            [*own_python(elsewhere), "-m", "ingot", verb, *arguments, *options], check=False
        ).returncode
    launch = recipe.at(verb).launch
    if step.distributed and launch.nodes > 1 and not is_rank():
        raise WrongInput(
            f"launch.nodes={launch.nodes}: `ingot launch {verb}` starts a verb on several machines;"
            " use it, or set launch.nodes=1"
        )
    if step.distributed and launch.processes > 1 and not is_rank():
        options = [*([AGAIN[verb]] if again else []), *more]
        job = Job(
            verb, (verb, *arguments, *options), launch.processes, environment=launch.variables
        )
        return foreground(job, results=sys.stdout).code
    done: list[VerbOutcome] = []

    def do() -> VerbOutcome:
        # What libraries print while a verb works is no part of the one JSON object.
        out = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
        with _shown(verb, recipe), out:
            done.append(DO[verb](recipe, again))
        return done[0]

    record = run_step(step, recipe, do, STAMPS, again=again)
    if ranks().is_main and as_json:
        result = RESULTS[verb].read(recipe.folder, record, unchanged=not done)
        print_json(verb, **vars(result))
    elif ranks().is_main:
        # After its record is written: whatever becomes of this output, the work is not lost.
        if verb == "evaluate":
            from ingot.cli.console import show_report  # draws by rich

            show_report(recipe.folder)
        print(f"{verb}: {record.result}; see {record.where}")
    return record.exit_code


def other_interpreter(recipe: Recipe) -> str | None:
    """The interpreter of apache-beam's environment, if `prepare` uses Beam and this is another
    interpreter; else None.

    Raises:
        WrongInput: there is no interpreter at the path in the recipe.
    """
    engine = recipe.data.engine
    if (
        engine.kind != "beam"
        or engine.python is None
        or os.path.abspath(engine.python) == sys.executable
    ):
        return None
    if not os.access(engine.python, os.X_OK):
        raise WrongInput(
            f"data.engine.python {engine.python} is no interpreter; `make beam` makes an"
            " environment with one in .venv-beam/bin/python"
        )
    return os.path.abspath(engine.python)


def prepare_environment(recipe: Recipe) -> None:
    """Set the variables of `launch.environment`, and those of `cloud.secrets` that are not set yet:
    a node has set them for all its ranks.
    """
    os.environ.update(recipe.launch.variables)
    absent = {
        name: reference
        for name, reference in recipe.cloud.secrets.items()
        if name not in os.environ
    }
    if absent:
        from ingot.cloud.clients import GoogleClients
        from ingot.cloud.secrets import resolve_secrets

        os.environ.update(resolve_secrets(GoogleClients(recipe.cloud), absent))


@contextlib.contextmanager
def _shown(verb: str, recipe: Recipe) -> Iterator[None]:
    """While entered, a training's metrics are also uploaded to `cloud.tensorboard`."""
    if verb != "train" or recipe.cloud.tensorboard is None or not ranks().is_main:
        yield
        return
    from ingot.cloud.clients import GoogleClients
    from ingot.cloud.vertex.tensorboard import upload_metrics

    with upload_metrics(GoogleClients(recipe.cloud), recipe.name, recipe.folder.metrics):
        yield


def is_rank() -> bool:
    """Whether this process was started as one of several ranks, by ingot, torchrun or a cluster."""
    return "LOCAL_RANK" in os.environ


def check_is_main(verb: str) -> None:
    """Refuse to do the work of one process as one of several ranks: they would all do it in the
    same folder, and those beside rank 0 in silence and without a record.
    """
    if not ranks().is_main:
        raise WrongInput(
            f"RANK={ranks().rank} is set: `ingot {verb}` is the work of one process, and only rank"
            f" 0 records it; {AS_ONE_PROCESS}"
        )


def do_all(arguments: list[str], *, fresh: bool, debug: bool, checked: bool, as_json: bool) -> int:
    """Run all steps. What the steps need that are not done is checked once, by `ingot launch run`
    where that started this (`checked`).
    """
    from ingot.cli.check.recipe import check, read_checked
    from ingot.pipeline.local import print_summary, run

    check_is_main("run")
    arguments = with_paths(arguments)
    recipe, values = read_checked(arguments, "run")
    if note := note_other_run(arguments, recipe):
        say(note)
    prepare_environment(recipe)

    def before(verbs: Sequence[str]) -> None:
        if not checked:
            check(recipe, values, verbs)

    done = run(recipe, arguments, STAMPS, before=before, fresh=fresh, debug=debug)
    if not as_json:
        print_summary(recipe, done)
        return EXIT_DONE
    here = recipe.folder
    steps = {
        record.step: RESULTS[record.step].read(here, record, unchanged=record.step in done.skipped)
        for record in done.records
    }
    print_json("run", **vars(RunResult(here.root, here.reports / "index.html", steps)))
    return EXIT_DONE


def _ingest(recipe: Recipe, again: bool) -> VerbOutcome:
    with importing():
        from ingot.data.ingest import ingest

    return ingest(recipe)


def _prepare(recipe: Recipe, again: bool) -> VerbOutcome:
    with importing():
        from ingot.data.prepare import prepare

    return prepare(recipe, again=again)


def _train(recipe: Recipe, again: bool) -> VerbOutcome:
    with importing():
        from ingot.train.trainer import train

    if recipe.parallel.degrees == "given" and recipe.train.micro_batch != "auto":
        return train(recipe, fresh=again)
    from ingot.plan.automatic import SearchingPlanner

    return train(recipe, fresh=again, planner=SearchingPlanner())


def _evaluate(recipe: Recipe, again: bool) -> VerbOutcome:
    with importing():
        from ingot.evaluate.evaluate import evaluate

    return evaluate(recipe)


def _gate(recipe: Recipe, again: bool) -> VerbOutcome:
    from ingot.registry.verbs import gate

    return gate(recipe)


def _register(recipe: Recipe, again: bool) -> VerbOutcome:
    from ingot.registry.verbs import register

    return register(recipe)


def _source_stamps(recipe: Recipe) -> dict[str, Any]:
    """A short fingerprint of the source files of each split, however many they are."""
    from ingot.data.sources.find import source_stamps

    return {
        f"what data.{split} reads": {"files": len(stamps), "stamps": fingerprint(stamps)}
        for split, stamps in source_stamps(recipe).items()
    }


def _live_stamp(recipe: Recipe) -> dict[str, Any]:
    from ingot.registry.verbs import gate_stamp

    return {"the live model": gate_stamp(recipe)}


def _registered_stamp(recipe: Recipe) -> dict[str, Any]:
    from ingot.registry.verbs import register_stamp

    return {"the version that is live": register_stamp(recipe)}


AGAIN = {"train": "--fresh", "evaluate": "--again"}
DO: dict[str, Callable[[Recipe, bool], VerbOutcome]] = {
    "ingest": _ingest,
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
    "gate": _gate,
    "register": _register,
}
STAMPS: dict[str, Callable[[Recipe], Any]] = {
    "ingest": _source_stamps,
    "gate": _live_stamp,
    "register": _registered_stamp,
}
