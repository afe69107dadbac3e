"""`ingot adopt` as a person runs it: the recipe alone on stdout, notes on stderr, and the recipe is
one that other verbs take.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ingot.adopt.convert import HEADS, adopt
from ingot.cli.check.recipe import findings, read_checked
from tests.adopt.stand_ins import LLAMA, SETS
from tests.cli.commands import ingot


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


@pytest.mark.parametrize("name", SETS)
def test_what_is_missing_stands_at_the_top_of_each_recipe(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    for file, text in SETS[name].items():
        (tmp_path / file).write_text(text)
    adopted = adopt([Path(file) for file in SETS[name]], findings)
    (tmp_path / "recipe.yaml").write_text(adopted.text)
    found = findings(*read_checked(["recipe.yaml"], "run"))
    assert found.wrong or found.unknown, "something is missing in each"
    said = adopted.text[: adopted.text.index("\nname:")]
    for kind, lines in ((HEADS["missing"], found.wrong), (HEADS["unchecked"], found.unknown)):
        below = said.partition(f"# {kind}:\n")[2]
        for line in lines:
            assert line.partition(": ")[2] in below, (line, said)
