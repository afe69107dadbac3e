"""A package beside ingot, installed as pip installs it, adds kinds behind the doors; the project's
own proofs run on them unchanged.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ingot
from ingot.base.errors import WrongInput
from ingot.base.reports import EvaluationReport, Metric, read_report
from ingot.config.doors import OBJECTIVES, OPTIMIZERS, PLACES, REWARDS
from ingot.config.identity import changes
from ingot.config.knobs import knobs
from ingot.config.load import dump_recipe, load_recipe
from ingot.config.recipe import Recipe
from ingot.config.sections.deployment import MetricGate
from ingot.data.cleaning.clean import clean
from ingot.data.engines.local import LocalEngine
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.data.raw.store import open_raw
from ingot.data.sources.find import source_stamps
from ingot.data.sources.records import read_records
from ingot.evaluate.evaluate import evaluate
from ingot.launch.job import Job
from ingot.pipeline.steps import STEPS
from ingot.registry.gate import decide
from ingot.rewards.build import build_rewards
from ingot.rewards.protocol import Sample
from ingot.train.step import StepContext, run_steps
from ingot.train.trainer import train
from ingot.verify.layout.proof import verify_layout
from tests import tolerances
from tests.data.small import everything
from tests.data.small import recipe as small_data
from tests.data.test_ingest import documents
from tests.objectives.test_every_way import distance, logged, weights
from tests.objectives.ways import recipe_of, write_all
from tests.patience import PATIENCE_S

PACKAGE = Path(__file__).parent / "package"
SLIC = {"kind": "slic", "beta": 2.0, "margin": 0.5}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that pip has installed the package into, found by this process and by those that
    it starts.
    """
    folder = tmp_path_factory.mktemp("plugin")
    source, site = folder / "source", folder / "site"
    shutil.copytree(PACKAGE, source)  # pip builds inside it
    command = (
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
        *("--no-build-isolation", "--no-compile", "--target", str(site), str(source)),
    )
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(site), str(Path.cwd()))))
        yield site


@pytest.fixture(scope="module")
def prepared(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared")
    write_all(root)
    recipe = recipe_of(root, "dpo", objective=SLIC)
    ingest(recipe)
    prepare(recipe)
    return root


def apart(prepared: Path, target: Path, **given: Any) -> Recipe:
    """A recipe of SLiC in a folder of its own, over the prepared preferences."""
    recipe = recipe_of(prepared, "dpo", objective=SLIC, output=str(target / "runs"), **given)
    if not recipe.folder.data.exists():
        shutil.copytree(prepared / "runs" / "dpo" / "data", recipe.folder.data)
    return recipe


@pytest.mark.drawn("a plugin's kinds")
def test_its_kinds_are_understood_listed_and_explained(prepared: Path) -> None:
    recipe = apart(prepared, prepared, train__optimizer={"kind": "lion"})
    assert (recipe.objective.kind, recipe.documents) == ("slic", "preference")
    file = prepared / "again.yaml"
    file.write_text(dump_recipe(recipe))
    assert load_recipe([file], environ={}, dotenv=None) == recipe
    assert OBJECTIVES.package_of("slic") == "ingot-extras 0.1"
    listed = {knob.path for knob in knobs(installed=True)} - {knob.path for knob in knobs()}
    assert {"objective[slic].margin", "train.optimizer[lion].betas"} <= listed


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "sl1c"}, r"objective\.kind.*did you mean 'slic'"),
        ({**SLIC, "margen": 1}, r"unknown knob `objective\.margen`"),
        ({**SLIC, "beta": -1}, r"`objective\.beta` is -1; it should be greater than 0"),
    ],
)
def test_what_is_wrong_is_said_as_of_built_in_kinds(
    prepared: Path, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(WrongInput, match=message):
        recipe_of(prepared, "dpo", objective=wrong)


def test_without_the_package_its_kinds_are_unknown(
    plugin: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(plugin)])
    assert OBJECTIVES.find("slic") is OPTIMIZERS.find("lion") is None
    with pytest.raises(WrongInput, match=r"`objective\.kind` is 'slic'; it should be one of"):
        recipe_of(prepared, "dpo", objective=SLIC)


def test_a_pipeline_is_refused_by_what_the_objective_says(prepared: Path) -> None:
    with pytest.raises(WrongInput, match=r"objective\.kind slic needs all of a row at once"):
        apart(prepared, prepared, parallel__pipeline=2)


def test_its_settings_import_no_torch(plugin: Path) -> None:
    names = ("slic", "lion", "contains", "niced", "shouting", "majority", "vowels")
    code = f"import sys, {', '.join(f'ingot_extras.{name}' for name in names)};"
    code += " print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_it_learns_and_any_split_gives_the_same_numbers(prepared: Path, tmp_path: Path) -> None:
    given = {"train__optimizer": "{kind: sgd, lr: 0.2}", "train__steps": 3}
    given |= {"train__clip_norm": 0.5, "precision__export": "fp32"}
    whole = apart(prepared, tmp_path / "whole", train__micro_batch=4, **given)
    train(whole)
    parted = apart(prepared, tmp_path / "parted", train__micro_batch=1, **given)
    train(parted)
    losses = logged(whole)
    assert losses[-1] < losses[0]
    assert logged(parted) == pytest.approx(losses, rel=tolerances.SPLIT_LOSS)
    assert distance(weights(parted), weights(whole)) < tolerances.SPLIT_WEIGHTS


@pytest.mark.parametrize(
    "layouts",
    ["replicate=2, context=2", pytest.param(None, id="all", marks=pytest.mark.slow)],
)
def test_its_layouts_hold(prepared: Path, layouts: str | None) -> None:
    """Two ranks that share the pairs, and two that have a part of each answer."""
    proof = verify_layout(apart(prepared, prepared), layouts)
    assert proof.holds, [one.summary for one in proof.findings]
    assert layouts is None or all(one.holds for one in proof.findings)


@pytest.mark.drawn("a plugin's kinds")
def test_it_resumes_bit_for_bit_with_its_optimizer(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"train__optimizer": "{kind: lion, lr: 0.003}", "train__steps": 6}
    given |= {"checkpoint__every": 2}
    whole = apart(prepared, tmp_path / "whole", **given)
    train(whole)
    broken = apart(prepared, tmp_path / "broken", **given)
    with monkeypatch.context() as patch:
        patch.setattr("ingot.train.trainer.run_steps", _stop_after(3))
        with pytest.raises(KeyboardInterrupt):
            train(broken)
    train(broken)
    assert logged(broken) == logged(whole)
    found, expected = weights(broken), weights(whole)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_its_source_is_ingested_and_seen_unchanged(plugin: Path, tmp_path: Path) -> None:
    small = small_data(tmp_path, {"source": "numbers:3", "text": "body"})
    ingest(small)
    source = open_raw(small, unchanged=True).splits["train"][0]
    assert (source.files, source.documents, source.bad) == (3, 12, {"null `body`": 3})
    assert documents(small.folder.raw)["numbers-1:4"] == "number 1-4"
    first = everything(small.folder.raw)
    ingest(small)
    assert everything(small.folder.raw) == first
    assert [stamp["shard"] for stamp in source_stamps(small)["train"]] == [0, 1, 2]


def test_its_cleaning_step_drops_and_is_counted(plugin: Path, tmp_path: Path) -> None:
    """The same with one process and with several; the report has its own line beside ingot's."""
    texts = ["quiet words", "LOUD WORDS", "half LOUD", "x", "VERY LOUD INDEED", "quiet words"]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    given: dict[str, Any] = {"data__clean": {"min_chars": 3, "exact": True}}
    given["data__clean"]["steps"] = [{"kind": "shouting", "most": 0.6}]
    made = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        source = {"source": str(tmp_path / "texts.jsonl")}
        small = small_data(folder, source, **given)
        ingest(small)
        report = clean(small, open_raw(small), LocalEngine(workers)).report
        made.append({step.step: step.documents for step in report.steps})
        shown = {step.step: [one.text for one in step.examples] for step in report.steps}
        assert shown["shouting"] == ["LOUD WORDS", "VERY LOUD INDEED"]
    assert made == [{"min_chars": 1, "shouting": 2, "exact": 1}] * 2


def test_what_no_cleaning_step_can_be_is_refused(plugin: Path, tmp_path: Path) -> None:
    two = [{"kind": "shouting"}, {"kind": "shouting", "most": 0.1}]
    for steps, message in (
        (two, r"data\.clean\.steps.*two steps called shouting; give each its own `name`"),
        ([{"kind": "shoutin"}], r"data\.clean\.steps.*did you mean 'shouting'"),
        ([{"kind": "shouting", "most": 2}], r"`data\.clean\.steps\.0\.most` is 2"),
    ):
        with pytest.raises(WrongInput, match=message):
            small_data(tmp_path, "x", data__clean={"steps": steps})


def test_its_gate_decides(plugin: Path, tmp_path: Path) -> None:
    """Two of three metrics better; the built-in gate would keep, since the third is worse."""
    rule = small_data(tmp_path, "x", gate={"kind": "majority"}).gate

    def report(model: str, *values: float) -> EvaluationReport:
        metrics = {
            f"task/{n}": Metric(value, value, value, "lower", 9, "set")
            for n, value in enumerate(values)
        }
        return EvaluationReport(model, "tokenizer", metrics)

    new, old = report("new", 1.0, 1.0, 3.0), report("old", 2.0, 2.0, 2.0)
    assert decide(new, old, rule).decision == "deploy"
    assert decide(old, new, rule).reason == "better by -1 metrics, gate.lead is 1"
    assert decide(new, old, MetricGate(metric="task/2")).decision == "keep"
    assert decide(old, old, rule).reason == "this very model is live already"
    kept = decide(new, old, rule.model_copy(update={"override": "keep"}))
    assert (kept.decision, kept.reason.startswith("gate.override says keep")) == ("keep", True)


def test_its_version_counts_where_its_kinds_are_used(
    plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version runs the steps again that use it, and those alone."""
    items = {"kind": "choice", "source": "numbers:3"}
    knobs: dict[str, dict[str, Any]] = {
        "ingest": {"data__validation": [{"source": "numbers:3"}]},
        "prepare": {"data__clean": {"steps": [{"kind": "shouting"}]}},
        "train": {"train__optimizer": {"kind": "lion"}},
        "evaluate": {"evaluate__tasks": [items]},
        "gate": {"gate": {"kind": "majority"}},
    }

    def reads(verb: str) -> dict[str, Any]:
        recipe = small_data(tmp_path, tmp_path, **knobs[verb])
        return {step.verb: step.knobs(recipe) for step in STEPS}

    before = {verb: reads(verb) for verb in knobs}
    newer = tmp_path / "newer"
    shutil.copytree(plugin, newer)
    about = newer / "ingot_extras-0.1.dist-info" / "METADATA"
    about.write_text(about.read_text().replace("Version: 0.1\n", "Version: 0.2\n"))
    path = [str(newer) if each == str(plugin) else each for each in sys.path]
    monkeypatch.setattr(sys, "path", path)
    for verb, old in before.items():
        new = reads(verb)
        assert [step for step in old if old[step] != new[step]] == [verb]
        (told,) = changes(old[verb], new[verb])
        code = r"\(([0-9a-f]{8})\)"
        versions = rf"ingot-extras 0\.1 {code} -> ingot-extras 0\.2 {code}"
        found = re.fullmatch(rf"package\.[a-z]+\.[a-z]+ {versions}", told)
        assert found is not None
        assert found[1] == found[2], "the code is the same"


def test_its_code_counts_under_the_same_version(plugin: Path, tmp_path: Path) -> None:
    """As of a package that is edited where it lies."""
    recipe = small_data(tmp_path, tmp_path, train__optimizer={"kind": "lion"})
    file = plugin / "ingot_extras" / "niced.py"  # another one, which the first may use
    (step,), before = [step for step in STEPS if step.verb == "train"], file.read_text()
    made = step.knobs(recipe)
    assert step.knobs(recipe) == made
    file.write_text(before + "# edited\n")
    try:
        (told,) = changes(made, step.knobs(recipe))
    finally:
        file.write_text(before)
    assert told.startswith("package.optimizer.lion ingot-extras 0.1 (")
    assert step.knobs(recipe) == made


def test_its_source_gives_the_items_of_an_evaluation(plugin: Path) -> None:
    found = read_records("numbers:2", "evaluate.tasks.source", ["body"], limit=2)
    assert [record.text("body") for record in found] == ["number 0-1", "number 0-2"]
    assert found[0].place == "numbers-0:1"


def test_an_unknown_source_names_those_that_there_are(plugin: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"hf:, wikipedia:, bigquery:, megatron:, numbers: or"):
        ingest(small_data(tmp_path, {"source": "number:3"}))
    with pytest.raises(WrongInput, match="builtin:stdlib, builtin:digits"):
        ingest(small_data(tmp_path, {"source": "builtin:other"}))


def test_its_evaluation_is_measured(prepared: Path, tmp_path: Path) -> None:
    task = {"kind": "contains", "prompts": ["ingot melts", "the copper"], "word": ""}
    given: dict[str, Any] = {"train__steps": 1, "evaluate__tasks": [task]}
    recipe = apart(prepared, tmp_path, **given)
    train(recipe)
    evaluate(recipe)
    report = read_report(recipe.folder.reports / "evaluate.json")
    assert report.metrics["contains/share"].value == 1.0, "every answer contains nothing"


def test_its_reward_scores_in_a_process_of_its_own(plugin: Path) -> None:
    settings = REWARDS.load("vowels", "objective.rewards.kind")(weight=2.0, share=0.5)
    with build_rewards([settings]) as rewards:
        scores = rewards([Sample("", answer) for answer in ("ab", "aaaa", "...")])
    assert scores.total == [2.0, 1.0, 0.0]
    assert scores.reasons == {"vowels": "the answer has no letters"}


def test_its_place_runs_a_job(prepared: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"launch__kind": "niced", "launch__options": {"level": 5}}
    launcher = PLACES.load("niced", "launch.kind")(apart(prepared, tmp_path, **given))
    assert launcher.can(Job("train", ("train", "r.yaml"), nodes=2))
    job = Job("version", ("--version",))
    assert "nice -n 5" in launcher.render(job)
    handle = launcher.submit(job)
    until = time.monotonic() + PATIENCE_S
    while launcher.status(handle) == "running" and time.monotonic() < until:
        time.sleep(launcher.poll_s)
    assert launcher.status(handle) == "succeeded"
    assert launcher.log(handle).read().decode().strip() == ingot.__version__
    with pytest.raises(WrongInput, match=r"launch\.options\.level is 40; give a number"):
        PLACES.load("niced", "launch.kind")(
            apart(prepared, tmp_path, **given | {"launch__options": {"level": 40}})
        )


def _stop_after(step: int) -> Any:
    def stop(context: StepContext, first: int, last: int) -> None:
        run_steps(context, first, step)
        raise KeyboardInterrupt

    return stop
