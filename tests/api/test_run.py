"""`ingot.load`: one small run by its methods, held against the files of its folder and against the
command line.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.api.curve import LiveCurve
from ingot.api.run import Run, StepMetrics, _from_now_on, _LoggedLines
from ingot.base.reports import read_report
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import JsonLines, Resumed, append_line, read_lines
from ingot.cli.output import plain
from ingot.config.load import dump_recipe, load_recipe
from ingot.report.results import RESULTS, RunResult, StepResult
from tests.cli.commands import clean_environment
from tests.cli.commands import ingot as command
from tests.small import small_recipe, write_documents

ODD = "\x85 \x7f\u2028#\ue000\U000f0000\uffff\\ü 🙂"
"""What YAML would fold, refuse, or take for a comment, and what merely looks so."""
VERBS = ("ingest", "prepare", "train", "evaluate", "gate", "register")


@dataclass
class Done:
    run: Run
    result: RunResult
    seen: list[StepMetrics]
    recipe: Path
    here: Path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A whole run, with what its callback saw."""
    here = tmp_path_factory.mktemp("api")
    write_documents(here / "text")
    recipe = here / "r.yaml"
    made = small_recipe(here, train__steps=6, train__evaluate_every=3, track__every=1)
    recipe.write_text(dump_recipe(made), encoding="utf-8")
    run = ingot.load(recipe, serve__prompt="the mould", quiet=True)
    seen: list[StepMetrics] = []
    return Done(run, run.run(on_step=seen.append), seen, recipe, here)


def one(done: Done, verb: str) -> Any:
    return done.result[verb]


def test_results_are_those_of_the_runs_own_files(done: Done) -> None:
    assert list(done.result.steps) == [*VERBS, "serve"]
    assert done.result.page.is_file()
    folder = done.run.folder
    lines = list(read_lines(folder.metrics))
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    trained = one(done, "train")
    assert (trained.step, trained.loss) == (6, losses[-1])
    assert (trained.model / "config.json").is_file()
    report = read_report(folder.reports / "evaluate.json")
    assert one(done, "evaluate").metrics == report.metrics
    assert one(done, "gate").deploy
    assert one(done, "gate").decision == "deploy"
    registered = one(done, "register")
    assert (registered.version, registered.live) == (1, True)
    assert (registered.where / "config.json").is_file()
    assert one(done, "prepare").tokens["train"] > 0
    assert one(done, "ingest").documents == 120
    assert one(done, "serve").prompt == "the mould"
    for verb, result in done.result.steps.items():
        assert type(result) is RESULTS[verb]
        assert not result.unchanged


def test_a_callback_sees_every_line_once_and_in_order(done: Done) -> None:
    logged = [
        (line["step"], line.get("train/loss")) for line in read_lines(done.run.folder.metrics)
    ]
    assert [(step.step, step.loss) for step in done.seen] == logged
    assert [(step.step, step.loss) for step in done.run.metrics()] == logged
    assert [step.step for step in done.seen if step.validation_loss is not None] == [3, 6]


@pytest.mark.parametrize("verb", VERBS)
def test_a_method_is_the_verb_and_json_is_its_result(verb: str, done: Done) -> None:
    """The same step from the command line: nothing is done again, and the same is told."""
    typed = one(done, verb)
    words = (verb, str(done.recipe), 'serve.prompt="the mould"', "--json")
    typed_out = command(*words, cwd=done.here)
    assert typed_out.returncode == 0, typed_out.stderr
    told = json.loads(typed_out.stdout)
    assert told.pop("schema") == 1
    assert RESULTS[verb].parse(told, done.here) == type(typed)(**{**vars(typed), "unchanged": True})
    assert set(told) == set(vars(typed))


def test_an_unchanged_step_is_told_so(done: Done) -> None:
    seen: list[StepMetrics] = []
    again: StepResult = done.run.train(on_step=seen.append)
    assert again.unchanged
    assert seen == [], "what an earlier training logged"
    assert asdict(again) == {**asdict(one(done, "train")), "unchanged": True}


def test_nothing_is_read_for_nobody(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics of a long training take seconds to parse, before the verb even starts."""
    monkeypatch.setattr(_LoggedLines, "read", lambda _: pytest.fail("read the logs"))
    assert done.run.train().unchanged


@pytest.mark.parametrize(
    ("knobs", "path", "value"),
    [
        ({"train__optimizer__lr": 1e-5}, "train.optimizer.lr", 1e-5),
        ({"name": "007"}, "name", "007"),
        ({"name": "true"}, "name", "true"),
        ({"train__clip_norm": None}, "train.clip_norm", None),
        ({"evaluate__prompts": ["a: b", "{"]}, "evaluate.prompts", ["a: b", "{"]),
        ({"output": Path("elsewhere")}, "output", "elsewhere"),
        ({"serve__prompt": ODD}, "serve.prompt", ODD),
    ],
)
def test_a_knob_arrives_as_it_is(knobs: dict[str, Any], path: str, value: Any, done: Done) -> None:
    found: Any = ingot.load(done.recipe, quiet=True, **knobs).recipe
    for name in path.split("."):
        found = getattr(found, name)
    assert (found if not isinstance(found, Path) else str(found)) == value


def test_knobs_and_overrides_reach_the_verb(done: Done) -> None:
    """Not only the recipe that Python shows: the process that does the work has them too."""
    run = ingot.load(done.recipe, "train.steps=7", name="other", quiet=True)
    assert run.recipe.train.steps == 7
    assert run.folder.root.name == "other"
    assert run.ingest().run == run.folder.root
    assert "steps: 7" in run.folder.recipe.read_text()


@pytest.mark.parametrize("quiet", [True, False])
def test_a_recipe_that_looks_like_an_option_is_a_file(
    quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Path` has no `./`, so that nobody can type it."""
    monkeypatch.chdir(tmp_path)
    recipe = Path("./-r.yaml")
    recipe.write_text("name: mine\ndata: {train: [{source: builtin:stdlib}]}\n", encoding="utf-8")
    for given in (recipe, "-r.yaml", "./-r.yaml"):
        assert ingot.load(given, quiet=quiet)._arguments == ("./-r.yaml",)


def test_what_was_loaded_is_what_is_done(
    done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep that writes one file again and again, and trains afterwards."""
    monkeypatch.chdir(tmp_path)
    one, dotenv = Path("sweep.yaml"), Path(".env")
    said = done.recipe.read_text(encoding="utf-8")

    def load(number: int) -> Run:
        one.write_text(f"{said.replace('name: small', f'name: sweep{number}')}", encoding="utf-8")
        monkeypatch.setenv("INGOT_TRAIN__STEPS", str(number))
        dotenv.write_text(f"INGOT_SEED={number}\n", encoding="utf-8")
        return ingot.load("sweep.yaml")

    runs = [load(number) for number in (1, 2)]
    runs[1].ingest()
    assert "since the run was loaded" not in capsys.readouterr().err
    for path in (one, dotenv):
        path.unlink()
    monkeypatch.setenv("INGOT_TRAIN__STEPS", "nonsense")
    assert runs[0].ingest().run == tmp_path / runs[0].folder.root
    for number, run in enumerate(runs, start=1):
        did = load_recipe([run.folder.recipe], environ={}, dotenv=None)
        assert did == run.recipe
        assert (did.name, did.seed, did.train.steps) == (f"sweep{number}", number, number)
    changed = f"note: {one.absolute()}, .env, $INGOT_TRAIN__STEPS changed since the run was loaded"
    assert changed in capsys.readouterr().err


def test_errors_are_exceptions_with_the_command_lines_words(
    done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(done.here)
    for words in (("nosuch",), (str(done.recipe), "train.stps=3"), (str(done.recipe), "data=3")):
        typed = command("ingest", *words, cwd=done.here)
        with pytest.raises(ingot.WrongInput) as raised:
            ingot.load(*words)
        assert typed.stderr.replace("` on the command line", "`") == f"error: {raised.value}\n"
    monkeypatch.setenv("HOME", str(done.here))
    assert ingot.load(f"~/{done.recipe.name}", quiet=True).recipe == ingot.load(done.recipe).recipe
    away = ingot.load(done.recipe, name="away", data__train=[{"source": "gone"}], quiet=True)
    with pytest.raises(ingot.WrongInput) as raised:
        away.ingest()
    typed = command(
        "ingest", str(done.recipe), "name=away", "data.train=[{source: gone}]", cwd=done.here
    )
    assert typed.stderr == f"error: {raised.value}\n"
    assert ingot.load(done.recipe, train__steps=np.int64(7)).recipe.train.steps == 7
    with pytest.raises(ingot.WrongInput, match="is no value of a knob"):
        ingot.load(done.recipe, train__clip_norm=math.nan)


def test_leaving_the_loop_stops_the_training_with_a_checkpoint(done: Done) -> None:
    """And the interrupted training is no result: nothing is exported."""
    run = ingot.load(done.recipe, name="left", train__steps=100_000, quiet=True)
    run.ingest()
    run.prepare()
    for step in run.steps():
        assert step.loss is not None
        break
    assert list(run.folder.checkpoints.iterdir())
    assert not run.folder.model.exists()
    (stopped,) = [event for event in read_lines(run.folder.events) if event["kind"] == "stop"]
    assert stopped["cause"] == "SIGINT"
    other = ingot.load(done.recipe, name="left", train__steps=100_000, seed=3, quiet=True)
    with pytest.raises(ingot.WrongInput, match=r"seed 0 -> 3; .* or start over with fresh=True \("):
        other.train()


def test_a_training_that_rolls_back_is_told_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail, curve, seen = _LoggedLines(path), LiveCurve(), list[int]()

    def write(lines: JsonLines, steps: range, loss: float) -> None:
        for step in steps:
            lines.write(step, {"train/loss": loss})
        for line in tail.read():
            seen.append(line.step)
            curve(line)

    write(JsonLines(path), range(1, 6), 4.0)
    write(JsonLines(path, Resumed(2)), range(3, 5), 3.0)  # steps 3 to 5 are done again
    assert seen == [1, 2, 3, 4, 5, 3, 4]
    assert curve.points["loss"] == [(1, 4.0), (2, 4.0), (3, 3.0), (4, 3.0)]
    write(JsonLines(path, Resumed(4)), range(5, 6), 2.0)
    assert seen[7:] == [5], "nothing was taken away that was given"


def test_what_lay_there_is_not_told_and_what_comes_is_however_the_clock_goes(
    tmp_path: Path,
) -> None:
    """A clock that is set back in the midst of a training would silence it until it caught up."""
    run = RunFolder(tmp_path)

    def log(path: Path, *lines: tuple[int, float]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        for step, when in lines:
            append_line(path, {"step": step, "t_wall": when, "train/loss": 1.0})

    log(run.metrics, (1, 5000.0), (2, 5001.0))
    aside = tmp_path / "earlier" / "other" / run.metrics.name
    log(aside, (1, 7000.0), (2, 7001.0))
    tail = _from_now_on(run)
    log(run.metrics, (3, 1400.0))
    assert [line.step for line in tail.read()] == [3]
    JsonLines(run.metrics, Resumed(2))  # rolls back
    log(run.metrics, (3, 1200.0))
    assert [line.step for line in tail.read()] == [3]
    aside.rename(run.metrics)  # brings back
    log(run.metrics, (3, 1300.0))
    assert [line.step for line in tail.read()] == [3]


def test_what_json_has_no_number_for_is_null() -> None:
    value = {"a": math.nan, "b": [math.inf, 1.5], "c": Path("x")}
    assert plain(value) == {"a": None, "b": [None, 1.5], "c": "x"}
    json.dumps(plain(value), allow_nan=False)


def test_importing_costs_nothing() -> None:
    code = (
        "import sys; before = len(sys.modules); import ingot; new = len(sys.modules) - before\n"
        "print(new, *sorted({'torch', 'pydantic', 'numpy'} & set(sys.modules)))\n"
        "ingot.load; assert 'torch' not in sys.modules\n"
        "import ingot.train, ingot.evaluate; assert ingot.train.__path__ and ingot.evaluate.__path__"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert len(out) == 1, out
    assert int(out[0]) < 20


def test_every_public_name_is_there() -> None:
    assert set(ingot.__all__) <= set(dir(ingot))
    assert all(getattr(ingot, name) is not None for name in ingot.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        _ = ingot.nosuch
