"""The compiled pipeline, really run: Kubeflow's own local runner starts each step as a process of
its own; all that they share is a bucket.
"""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.replica import pull
from ingot.base.reports import PipelineStepRecord, read_record
from ingot.config.recipe import Recipe
from ingot.pipeline import container
from ingot.pipeline import kubeflow as compiler
from ingot.pipeline.kubeflow import compile_pipeline, spec_text
from ingot.pipeline.plan import VERBS, PipelinePlan, plan
from ingot.registry.local import LocalRegistry
from tests import gcs
from tests.lazy import lazy, require
from tests.small import small_recipe, write_documents

require("kfp", reason="kfp is not installed")
kfp, components, local = lazy("kfp"), lazy("kfp.components"), lazy("kfp.local")

REPLICA = "gs://bucket/ingot/runs/small"
STUB = """
import json, os, pathlib, sys
from typing import NamedTuple

class StepOutputs(NamedTuple):
    replica: str
    fingerprint: str
    decision: str

def run_container_step(verb, recipe, replica, place, submission):
    path = pathlib.Path(os.environ["STEPS"])
    is_first = not path.exists() or f'"{verb}"' not in path.read_text()
    with path.open("a") as file:
        file.write(json.dumps([verb, recipe, replica, place, submission]) + "\\n")
    if is_first and verb == os.environ["FAILS"]:
        sys.exit(1)
    return StepOutputs(replica + "/" + verb, "f", os.environ["DECISION"] if verb == "gate" else "")
"""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    with gcs.serving(monkeypatch) as server:
        yield server


def recipe_for(root: Path, **knobs: Any) -> Recipe:
    return small_recipe(
        root,
        **{
            "output": "runs",
            "data.train": "[{source: 'gs://bucket/text/*.txt'}]",
            "cloud.project": "proj",
            "cloud.bucket": "bucket",
            "cloud.images.train": "us-docker.pkg.dev/proj/ingot/ingot-train:latest",
            "registry.path": str(root / "registry.sqlite"),
            "serve.prompt": "the",
            "evaluate.tasks": "[{kind: loss}]",
            **knobs,
        },
    )


def run(recipe: Recipe, root: Path) -> dict[str, PipelineStepRecord]:
    """Compile, run, and the records that lie in the bucket afterwards."""
    wanted = plan(recipe)
    folder, _, name = wanted.address.rpartition("/")
    open_bucket(folder).put(name, wanted.recipe.encode())
    _run(wanted, root)
    pull(REPLICA, root / "seen", parts=["reports", "jobs", "recipe.yaml"])
    found = {verb: read_record(root / "seen/reports/steps", verb) for verb in VERBS}
    return {verb: record for verb, record in found.items() if record is not None}


def _run(wanted: PipelinePlan, root: Path) -> None:
    """Kubeflow's runner on the compiled text."""
    pipeline = components.load_component_from_text(spec_text(compile_pipeline(wanted)))
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(root / "outputs"),
        raise_on_error=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        pipeline()


@pytest.mark.slow
def test_the_pipeline_runs_both_ways_at_the_gate_tries_again_and_skips_what_is_unchanged(
    tmp_path: Path,
    bucket: gcs.Server,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(compiler, "FIRST_DELAY", "1s")
    monkeypatch.chdir(tmp_path)
    for path in sorted(write_documents(tmp_path / "text").iterdir()):
        open_bucket("gs://bucket/text").put(path.name, path.read_bytes())
    good = recipe_for(tmp_path, **{"train.steps": 12})

    # The first step fails once, when it sends what it made.
    bucket.fault("list", code=403, message="refused on purpose")
    first = run(good, tmp_path)
    said = capfd.readouterr().out
    assert "refused on purpose" in said
    assert any("Task ingest failed (attempt 1/3)" in record.message for record in caplog.records)
    assert list(first) == list(VERBS)
    assert first["gate"].exit_code == 0
    live = LocalRegistry(good.registry_path).live("small")
    assert live is not None
    assert live.number == 1

    # Nothing changed: every step says so, and none is done.
    again = run(good, tmp_path)
    said = capfd.readouterr().out
    assert again == first
    for verb in VERBS:
        assert f"{verb}: unchanged" in said

    # A worse model: the gate keeps the live one, and what comes after it does not run.
    before = dict(bucket.objects)
    worse = run(recipe_for(tmp_path, **{"train.steps": 1}), tmp_path)
    said = capfd.readouterr().out
    assert worse["gate"].exit_code == 3
    assert worse["register"] == first["register"]
    for verb in ("ingest", "prepare"):
        assert f"{verb}: unchanged" in said
        assert worse[verb] == first[verb]
    assert "register:" not in said
    live = LocalRegistry(good.registry_path).live("small")
    assert live is not None
    assert live.number == 1
    assert before.keys() != bucket.objects.keys()
    assert not list(tmp_path.glob("runs"))


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package before the real one, whose steps do nothing but write down in this file that they
    ran, and with what.
    """
    package = tmp_path / "stub/ingot/pipeline"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "container.py").write_text(STUB, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPS", str(tmp_path / "steps.jsonl"))
    return tmp_path / "steps.jsonl"


def test_the_stub_has_the_face_of_the_real_steps() -> None:
    assert list(inspect.signature(container.run_container_step).parameters) == [
        "verb",
        "recipe",
        "replica",
        "place",
        "submission",
    ]
    assert container.StepOutputs._fields == ("replica", "fingerprint", "decision")


@pytest.mark.drawn("compiled pipelines")
@pytest.mark.parametrize(
    ("decision", "fails", "ran"),
    [
        (
            "deploy",
            "prepare",
            ["ingest", "prepare", "prepare", "train", "evaluate", "gate", "register", "deploy"],
        ),
        ("keep", "none", ["ingest", "prepare", "train", "evaluate", "gate"]),
    ],
)
def test_a_compiled_pipeline_runs_by_what_the_gate_says(
    decision: str,
    fails: str,
    ran: list[str],
    tmp_path: Path,
    steps: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The short sibling of the slow test: Kubeflow's own runner and the real specification, with
    steps that do nothing.
    """
    monkeypatch.setattr(compiler, "FIRST_DELAY", "1s")
    monkeypatch.setenv("DECISION", decision)
    monkeypatch.setenv("FAILS", fails)
    place = {
        "launch.kind": "vertex",
        "launch.processes": 2,
        "pipeline.steps": "{evaluate: {processes: 1}}",
    }
    wanted = plan(recipe_for(tmp_path, **place))
    _run(wanted, tmp_path)
    verbs, recipes, replicas, places, submissions = zip(
        *map(json.loads, steps.read_text(encoding="utf-8").splitlines()), strict=True
    )
    assert list(verbs) == ran
    assert set(recipes) == {wanted.address}
    assert replicas == tuple(f"{REPLICA}{_handed_on(verb)}" for verb in verbs)
    assert dict(zip(verbs, places, strict=True)) == {
        step.verb: "\n".join(step.place) for step in wanted.steps if step.verb in ran
    }
    assert len(set(submissions)) == 1
    assert "$" not in submissions[0]


def _handed_on(verb: str) -> str:
    """What the steps before it added to the address of the run; the gate hands on its decision
    alone.
    """
    return "".join(f"/{before}" for before in VERBS[: VERBS.index(verb)] if before != "gate")


@pytest.mark.drawn("compiled pipelines")
def test_the_compiled_text_is_a_pipeline_by_kfps_own_loader(tmp_path: Path) -> None:
    wanted = plan(recipe_for(tmp_path))
    text = spec_text(compile_pipeline(wanted))
    loaded = components.load_component_from_text(text).pipeline_spec
    assert loaded.schema_version == "2.1.0"
    assert set(loaded.root.dag.tasks) == {
        "ingest",
        "prepare",
        "train",
        "evaluate",
        "gate",
        "condition-1",
    }
    assert text == spec_text(compile_pipeline(wanted))
    assert json.dumps(yaml.safe_load(text), sort_keys=True) == json.dumps(
        compile_pipeline(wanted), sort_keys=True
    )
