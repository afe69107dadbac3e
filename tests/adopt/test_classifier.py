"""The classifier's flags, those of Lightning among them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from tests.adopt.stand_ins import CLASSIFIER, recipe_of

FLAGS = "--train-data-file a.csv --batch-size 16"


def test_all_flags(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, c_args=CLASSIFIER)
    assert (recipe.name, recipe.output, recipe.model.source) == (
        "small-encoder",
        "/srv/jobs/reviews",
        "hf:org/small-encoder",
    )
    assert recipe.objective.kind == "classify"
    assert recipe.labels == ["0", "1", "2"]
    assert (recipe.data.train[0].source, recipe.train.epochs, recipe.train.optimizer.lr) == (
        "reviews.csv",
        4,
        2e-5,
    )
    assert (recipe.launch.processes, recipe.train.micro_batch, recipe.train.global_batch) == (
        3,
        24,
        72,
    )
    assert recipe.precision.compute == "fp32"
    assert "--accelerator: dp is not offered" in notes
    assert "objective.labels: the classes are called by their numbers" in notes


def test_defaults_are_those_of_the_project(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, c_args=FLAGS)
    assert (recipe.model.source, recipe.train.optimizer.lr, len(recipe.labels)) == (
        "hf:FacebookAI/roberta-large",
        1e-3,
        4,
    )
    assert "no --max_epochs is given" in notes


@pytest.mark.parametrize(
    ("flags", "processes", "told"),
    [
        ("--gpus 2", 2, ""),
        ("--gpus -1", 1, "asked for all GPUs"),
        ("--gpus 0", 1, ""),
        ("--gpus 1,3", 2, ""),
        ("--tpu_cores 8", 8, "launch.tpu"),
        ("--accelerator tpu", 8, "launch.tpu"),
        ("--gpus 4 --num_nodes 2", 4, ""),
    ],
)
def test_devices(flags: str, processes: int, told: str, tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, c_args=f"{FLAGS} {flags}")
    assert recipe.launch.processes == processes
    assert recipe.train.global_batch == 16 * processes * recipe.launch.nodes
    assert told in notes
    assert (recipe.launch.kind == "tpu") == ("tpu" in flags)


def test_a_job_folder_in_a_bucket_and_half_precision(tmp_path: Path) -> None:
    recipe, notes = recipe_of(
        tmp_path,
        c_args=f"{FLAGS} --job-dir gs://jobs-bucket/jobs/one/ --precision 16 --accelerator ddp",
    )
    assert (recipe.checkpoint.upload, recipe.cloud.bucket, recipe.precision.compute) == (
        "gs://jobs-bucket/jobs/one",
        "jobs-bucket",
        "bf16",
    )
    assert "--precision: 16 is not offered; bf16 is" in notes
    assert "--accelerator" not in notes


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, c_args=f"{FLAGS} --pretrained_model_path ./mine")
    assert recipe.model.source == "./mine"
    assert "./mine must be a Hugging Face folder" in notes


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--gpus many", "it should be a number of GPUs"),
        ("--num_classes 1", "--num_classes is '1'; it should be a number from 2"),
        ("--precision 8", "it should be 16, 32, 64 or bf16"),
        ("--max_epochs -1", "`train.epochs` is -1; it should be greater than 0"),
    ],
)
def test_values_that_cannot_be_are_refused(flags: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(WrongInput) as refused:
        recipe_of(tmp_path, c_args=f"{FLAGS} {flags}")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "length", "batch", "clip"),
    [
        ("--accumulate_grad_batches 4 --gradient_clip_val 0.5", (None, None, 1.0), 64, 0.5),
        ("--gradient_clip_val 0 --limit_train_batches 1.0", (None, None, 1.0), 16, None),
        ("--limit_train_batches 0.25 --max_epochs 2", (2, None, 0.25), 16, 1.0),
        (
            "--limit_train_batches 100 --max_epochs 3 --accumulate-grad-batches 8",
            (None, 39, 1.0),
            128,
            1.0,
        ),
        ("--max_steps 500 --max_epochs 3", (None, 500, 1.0), 16, 1.0),
    ],
)
def test_what_lightning_calls_otherwise(
    tmp_path: Path, flags: str, length: tuple[object, ...], batch: int, clip: float | None
) -> None:
    recipe, notes = recipe_of(tmp_path, c_args=f"{FLAGS} {flags}")
    assert (recipe.train.epochs, recipe.train.steps, recipe.data.fraction) == length
    assert (recipe.train.global_batch, recipe.train.clip_norm) == (batch, clip)
    assert "Unknown keys" not in notes


def test_a_pickled_frame_is_never_read_and_the_way_on_is_told(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    recipe, notes = recipe_of(tmp_path, c_args="--train-data-file df.pickle --batch-size 16")
    assert recipe.data.train[0].source == "df.parquet"
    assert "a pickled data frame can run code, and is never read" in notes
    frame = pandas.DataFrame({"text": ["a", "b"], "label": ["0", "1"]})
    frame.to_pickle(tmp_path / "df.pickle")
    command = notes[notes.index("python -c ") :].split("\n")[0]
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], cwd=tmp_path, check=True, capture_output=True
    )
    assert done.returncode == 0
    assert pandas.read_parquet(tmp_path / "df.parquet").equals(frame)
