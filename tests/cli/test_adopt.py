"""`ingot adopt` as a person runs it: the recipe alone on stdout, notes on stderr, and the recipe is
one that other verbs take.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.cli.commands import ingot
from tests.config.adopt.stand_ins import LLAMA, SETS


def test_the_recipe_on_stdout_the_notes_on_stderr(tmp_path: Path) -> None:
    for name, text in SETS["torchtune"].items():
        (tmp_path / name).write_text(text)
    done = ingot("adopt", *SETS["torchtune"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["name"] == "spruce"
    notes = done.stderr.splitlines()
    assert (
        notes[0]
        == "adopt: spruce.yaml, cloud.env, pipeline.yaml: continued pretraining on Google Cloud"
    )
    assert "Not carried over:" in notes
    head = [line.removeprefix("# ") for line in done.stdout.splitlines() if line.startswith("#")]
    assert notes[1:] == head[2:]  # what is said on the terminal stands in the recipe too
    (tmp_path / "recipe.yaml").write_text(done.stdout)
    shown = ingot("show", "config", "recipe.yaml", "train.epochs=1", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "similarity: 0.85" in shown.stdout


def test_the_recipe_is_found_wrong_where_its_layout_is(tmp_path: Path) -> None:
    """What is adopted is a recipe like any other: another verb checks it and names the knob."""
    (tmp_path / ".env").write_text(LLAMA)
    (tmp_path / "recipe.yaml").write_text(ingot("adopt", ".env", cwd=tmp_path).stdout)
    (tmp_path / ".env").unlink()
    done = ingot("show", "config", "recipe.yaml", "train.steps=0", cwd=tmp_path)
    assert done.returncode == 2
    assert "`train.steps` is 0" in done.stderr


def test_what_cannot_be_adopted_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    token = "hf_" + "x1Y2" * 8
    (tmp_path / "a.args").write_text(f"--hf-model-id a/b --dataset-dir c --hf-token {token}")
    for files, says in (
        (["missing.env"], "missing.env does not exist"),
        (["a.args"], "puts a secret on a command line"),
        (["."], "is a folder"),
    ):
        done = ingot("adopt", *files, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert token not in done.stderr
    assert ingot("adopt").returncode == 2
