"""What is told before a machine is made: nothing of it may be found out by machines that are
paid.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.base.markers import write_marker
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.index import read_index
from ingot.base.remote.replica import push
from ingot.config.recipe import Recipe
from ingot.data.columns.manifest import read_prepared
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.launch import run_job
from ingot.launch.staging import committed_anywhere, missing_inputs, stage_start, unreachable_inputs
from tests import gcs
from tests.small import copy_of, small_recipe

MIRROR = "gs://bucket/ingot/runs/small"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    with gcs.serving(monkeypatch) as server:
        yield server


def recipe_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **knobs: Any) -> Recipe:
    monkeypatch.chdir(tmp_path)
    return small_recipe(
        tmp_path,
        output="runs",
        **{"launch.kind": "gce", "cloud.bucket": "bucket", "cloud.project": "p", **knobs},
    )


def missing(recipe: Recipe, verb: str = "train", *options: str) -> list[str]:
    return missing_inputs(recipe, run_job.job_of(recipe, verb, distributed=True, options=options))


def test_columns_are_here_or_in_the_bucket(
    server: gcs.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_in(tmp_path, monkeypatch)
    for verb in ("train", "evaluate"):
        [reason] = missing(recipe, verb)
        assert (
            reason
            == f"nothing is prepared, neither here nor in {MIRROR}; run `ingot ingest` and `ingot"
            " prepare` with the same recipe first"
        )
    assert missing(recipe, "prepare") == []
    recipe.folder.columns.mkdir(parents=True)
    write_marker(recipe.folder.columns, "manifest.json", {}, [])
    assert missing(recipe) == []
    push(recipe.folder.root, MIRROR)
    (recipe.folder.columns / "manifest.json").unlink()
    assert missing(recipe) == []
    stage_start(recipe, run_job.job_of(recipe, "evaluate", distributed=True))
    assert missing(recipe) == [], "it is still there, though it was deleted here"


def checkpoint(folder: Path, step: int) -> None:
    (folder / f"step-{step:08d}").mkdir(parents=True)
    write_marker(folder / f"step-{step:08d}", "COMMIT.json", {"step": step}, [])


def test_a_checkpoint_is_not_left_behind_nor_in_the_way(
    server: gcs.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_in(tmp_path, monkeypatch)
    recipe.folder.columns.mkdir(parents=True)
    write_marker(recipe.folder.columns, "manifest.json", {}, [])
    checkpoint(recipe.folder.checkpoints, 40)
    [reason] = missing(recipe)
    assert reason.startswith(
        f"checkpoint 40 of this machine is newer than what {MIRROR}/checkpoints holds; send it"
        f" (gcloud storage cp -r runs/small/checkpoints/step-00000040 {MIRROR}/checkpoints/)"
    )
    assert missing(recipe, "train", "--fresh") == []
    open_bucket(f"{MIRROR}/checkpoints").put("step-00000040/COMMIT.json", b"{}")
    assert missing(recipe) == []
    [reason] = missing(recipe, "train", "--fresh")
    assert "holds checkpoints up to step 40, which --fresh would not begin from" in reason


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"cloud.bucket": None}, "set cloud.bucket"),
        ({"output": "/home/me/runs"}, "output /home/me/runs is a folder of this machine"),
        ({"model.source": "models/mine"}, "model.source models/mine"),
        ({"model.source": "gs://bucket/model"}, "model.source gs://bucket/model"),
        ({"tokenizer.source": "mine.json"}, "tokenizer.source mine.json"),
        ({"evaluate.model": "runs/other"}, "evaluate.model runs/other"),
        ({"train.start_from": "runs/other"}, "train.start_from runs/other"),
        (
            {"objective": {"kind": "distill", "teacher": "runs/teacher"}},
            "objective.teacher runs/teacher",
        ),
        (
            {"objective": {"kind": "dpo", "reference": "./reference"}},
            "objective.reference ./reference",
        ),
        ({"model.lora": {"rank": 4, "adapter": "adapters/a"}}, "model.lora.adapter adapters/a"),
    ],
)
def test_what_lies_on_this_machine_alone_is_named(
    knobs: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_in(tmp_path, monkeypatch)
    values = recipe.model_dump(exclude_unset=True)
    for knob, value in knobs.items():
        *sections, name = knob.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        if knob == "tokenizer.source" or (knob == "model.source" and "tokenizer" in values):
            values["tokenizer"] = {"source": "hf:a/b"}
            inner = values[sections[0]]
        inner[name] = value
    [reason] = unreachable_inputs(Recipe.model_validate(values), "train")
    assert told in reason
    assert ";" in reason


JUDGED: dict[str, Any] = {
    "objective": {
        "kind": "grpo",
        "group": 4,
        "rewards": [
            {"kind": "python", "function": "mine.py:score"},
            {"kind": "json_schema", "file": "schema.json"},
            {"kind": "classifier", "model": "runs/judge", "class_name": "good"},
            {"kind": "python", "name": "installed", "function": "package.module:score"},
        ],
    },
    "train.evaluate_every": 2,
    "train.evaluate_tasks": ["watched"],
    "evaluate.tasks": [
        {"kind": "choice", "name": "watched", "source": "exam.jsonl"},
        {"kind": "choice", "name": "later", "source": "file:///home/me/later.jsonl"},
        {"kind": "choice", "name": "far", "source": "gs://bucket/exam.jsonl"},
        {"kind": "lm_eval", "tasks": ["mine"], "include": "tasks"},
        {"kind": "reward", "rewards": [{"kind": "python", "function": "other.py:score"}]},
    ],
    "tokenizer.template": "./my.jinja",
}
OF_TRAINING = ["mine.py", "schema.json", "runs/judge", "exam.jsonl"]


@pytest.mark.parametrize(
    ("verb", "read"),
    [
        ("ingest", ["text"]),
        ("prepare", ["./my.jinja"]),
        ("train", OF_TRAINING),
        ("evaluate", ["exam.jsonl", "file:///home/me/later.jsonl", "tasks", "other.py"]),
    ],
)
def test_a_job_elsewhere_reads_no_file_of_this_machine(
    verb: str, read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards, the items of tasks and a chat template too."""
    knobs = {**JUDGED, "data.train": [{"source": "text"}]}
    reasons = unreachable_inputs(recipe_in(tmp_path, monkeypatch, **knobs), verb)
    assert [reason.partition(" lies on this machine")[0].split()[-1] for reason in reasons] == read


def test_what_lies_in_the_run_folder_is_sent(
    server: gcs.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["runs/small/judges/mine.py", "runs/small/../mine.py", "runs/small/checkpoints/mine.py"]
    names += [str(tmp_path / "runs/small/mine.py"), "runs/small/.mine.py"]
    rewards = [
        {"kind": "python", "name": str(number), "function": f"{name}:score"}
        for number, name in enumerate(names)
    ]
    knobs = {"objective": {"kind": "grpo", "group": 4, "rewards": rewards}}
    recipe = recipe_in(tmp_path, monkeypatch, **knobs)
    reasons = unreachable_inputs(recipe, "train")
    assert [reason.partition(":")[0] for reason in reasons] == [f"reward {n}" for n in range(1, 5)]
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    stage_start(recipe, run_job.job_of(recipe, "train", distributed=True))
    sent = read_index(open_bucket(MIRROR)).entries
    assert [path for path in sent if path.endswith(".py")] == ["judges/mine.py", "mine.py"]


def test_what_the_run_folder_should_hold_is_here_or_in_the_bucket(
    server: gcs.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["runs/small/mine.py", "runs/small/judge"]
    rewards = [
        {"kind": "python", "function": f"{names[0]}:score"},
        {"kind": "classifier", "model": names[1], "class_name": "good"},
    ]
    knobs = {"objective": {"kind": "grpo", "group": 4, "rewards": rewards}}
    recipe = recipe_in(tmp_path, monkeypatch, **knobs)
    recipe.folder.columns.mkdir(parents=True)
    write_marker(recipe.folder.columns, "manifest.json", {}, [])
    told = [f"{name} is neither here nor in {MIRROR}; put it there" for name in names]
    assert [reason.partition(": ")[2] for reason in missing(recipe)] == told
    for file in (Path(names[0]), Path(names[1]) / "config.json"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    assert missing(recipe) == []
    push(recipe.folder.root, MIRROR)
    (Path(names[1]) / "config.json").unlink()
    assert missing(recipe) == []


ALONE = "lies on this machine alone; run `ingot ingest` and `ingot prepare` here first"


def on_columns(root: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> Recipe:
    knobs = {"tokenizer.source": "made/data/tokenizer", "tokenizer.vocab_size": None}
    return recipe_in(root, monkeypatch, **knobs, **{"data.train": [{"source": prefix}]})


def test_columns_of_this_machine_are_prepared_here(
    prepared_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ingest copies none of them; what is prepared is a copy."""
    (copy_of(prepared_root, tmp_path) / "runs/small").rename(tmp_path / "made")
    recipe = on_columns(
        tmp_path, monkeypatch, source := "megatron:made/data/columns/train.tokens-*"
    )
    for verb in ("ingest", "prepare"):
        assert f"data source {source} {ALONE}" in unreachable_inputs(recipe, verb)
    ingest(recipe)
    prepare(recipe)
    shutil.rmtree(tmp_path / "made/data/columns")
    assert not [told for told in unreachable_inputs(recipe, "train") if "data source" in told]
    assert len(read_prepared(recipe.folder.columns).splits["train"]) == 1


def test_columns_that_were_ingested_here_are_not_prepared_elsewhere(
    prepared_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run folder that is sent, too: ingest keeps whole paths, and nodes have others."""
    (copy_of(prepared_root, tmp_path) / "runs/small").rename(tmp_path / "made")
    (tmp_path / "runs/small").mkdir()
    (tmp_path / "made/data/columns").rename(tmp_path / "runs/small/mine")
    recipe = on_columns(tmp_path, monkeypatch, "megatron:runs/small/mine/train.tokens-*")
    for verb in ("ingest", "prepare"):
        assert not [told for told in unreachable_inputs(recipe, verb) if "data source" in told]
    ingest(recipe)
    whole = f"megatron:{tmp_path}/runs/small/mine/train.tokens-00000"
    assert f"data source {whole} {ALONE}" in unreachable_inputs(recipe, "prepare")


@pytest.mark.parametrize("scheme", ["", "./", "file://", "megatron:"])
def test_sources_in_the_run_folder_are_sent(
    scheme: str, server: gcs.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"{scheme}runs/small/mine/a.jsonl"
    recipe = recipe_in(tmp_path, monkeypatch, **{"data.train": [{"source": source}]})
    for verb in ("ingest", "prepare"):
        assert unreachable_inputs(recipe, verb) == []
    assert f"data source {source} is neither here nor in {MIRROR}" in missing(recipe, "ingest")[0]
    mine = recipe.folder.root / "mine"
    mine.mkdir(parents=True)
    for ending in ("", ".idx", ".bin"):
        (mine / f"a.jsonl{ending}").touch()
    assert missing(recipe, "ingest") == []


def test_a_copy_of_a_checkpoint_in_the_bucket_is_none_of_them(
    server: gcs.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_in(tmp_path, monkeypatch)
    bucket = open_bucket(f"{MIRROR}/checkpoints")
    for name in ("step-00000004", "step-00000009-best", "step-00000004/old", "step-latest"):
        bucket.put(f"{name}/COMMIT.json", b"{}")
    job = run_job.job_of(recipe, "train", distributed=True)
    assert list(committed_anywhere(recipe, job)()) == [4]


def test_a_bucket_elsewhere_is_told_before_anything_is_sent(
    server: gcs.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.location = "EUROPE-WEST4"
    recipe = recipe_in(tmp_path, monkeypatch)
    [reason] = missing(recipe)
    assert "EUROPE-WEST4" in reason.upper()
    assert "us-central1" in reason
    job = run_job.job_of(recipe, "train", distributed=True)
    with pytest.raises(WrongInput, match=r"launch\.kind gce"):
        run_job.run_job(recipe, job, supervised=True)
    assert not server.objects
