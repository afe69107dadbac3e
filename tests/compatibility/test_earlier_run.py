"""A run folder of an earlier ingot (commit 9102c43: a Llama of two layers on made-up text, trained
and registered) opens: its steps count as done, its model answers, its checkpoint is continued.

`run_of_9102c43.tar.gz` holds the recipe, its text and all that `ingot run recipe.yaml` wrote.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import ingot as command
from tests.tolerances import SPLIT_LOSS, SPLIT_WEIGHTS

RUN = Path("runs/before")


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(Path(__file__).with_name("run_of_9102c43.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses() -> dict[int, float]:
    lines = map(json.loads, (RUN / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def weights() -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(RUN / "model/model.safetensors")


def test_its_steps_count_as_done_and_its_model_answers(earlier: Path) -> None:
    done = command("run", "recipe.yaml", cwd=earlier)
    assert done.returncode == 0, done.stderr
    # Unpacked texts bear other times, so they are ingested again; nothing after that is, but that
    # the served model is asked something else by default since.
    assert done.stdout.count("unchanged") == 5
    answer = command(
        "predict", str(RUN), "copper the", "max_tokens=8", "temperature=0", cwd=earlier
    )
    assert answer.stdout.strip("\n") == "zhrue��mmm", answer.stderr


def test_its_checkpoint_is_continued_to_the_same_model(earlier: Path) -> None:
    from ingot.config.load import load_recipe
    from ingot.train.trainer import train

    before, wanted = losses(), weights()
    shutil.rmtree(RUN / "checkpoints/step-00000006")
    shutil.rmtree(RUN / "model")
    train(load_recipe(["recipe.yaml"], environ={}, dotenv=None))
    after, found = losses(), weights()
    assert sorted(after) == sorted(before) == [1, 2, 3, 4, 5, 6]
    for step, loss in before.items():
        assert after[step] == pytest.approx(loss, abs=SPLIT_LOSS)
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= SPLIT_WEIGHTS * tensor.norm(), name
