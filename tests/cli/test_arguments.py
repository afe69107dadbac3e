"""Files, overrides and settings on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.cli.arguments import note_other_run, settings_without_recipe, values
from ingot.config.load import read_recipe, split_arguments

DEFAULTS: dict[str, Any] = {"count": 3, "share": 0.5, "word": "", "flag": False}


def test_files_and_overrides_in_any_order() -> None:
    assert split_arguments(
        [
            "a.yaml",
            "train.steps=3",
            "b/c-d.yaml",
            "data.train.0.source=/x/y=z",
            "cloud.prices.a2-h=3",
        ]
    ) == (
        ["a.yaml", "b/c-d.yaml"],
        ["train.steps=3", "data.train.0.source=/x/y=z", "cloud.prices.a2-h=3"],
    )


def test_a_path_with_an_equals_sign_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert split_arguments(["runs/lr=3.yaml"])[0] == ["runs/lr=3.yaml"]
    assert split_arguments(["lr=3.yaml"])[1] == ["lr=3.yaml"]
    Path("lr=3.yaml").touch()
    assert split_arguments(["lr=3.yaml"])[0] == ["lr=3.yaml"]


def test_a_recipe_is_read_with_its_overrides(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("name: a\ndata: {train: [{source: b}]}\n", encoding="utf-8")
    assert read_recipe(["seed=4", str(path)]).seed == 4


def test_settings_without_a_recipe() -> None:
    assert settings_without_recipe(["serve.port=0"]).serve.port == 0
    with pytest.raises(WrongInput, match=r"serve\.prto.*did you mean `serve\.port`"):
        settings_without_recipe(["serve.prto=0"])


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("count=7", "count", 7),
        ("share=1", "share", 1.0),
        ("share=0.25", "share", 0.25),
        ("word=3", "word", "3"),
        ("word=a=b", "word", "a=b"),
        ("flag=true", "flag", True),
    ],
)
def test_settings_take_the_type_of_their_default(argument: str, key: str, value: Any) -> None:
    chosen = values([argument], DEFAULTS, "verb")
    assert chosen == {**DEFAULTS, key: value}
    assert type(chosen[key]) is type(value)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("cuont=7", "did you mean `count`"),
        ("count=1.5", "not a whole number"),
        ("count=true", "not a whole number"),
        ("share=x", "not a number"),
        ("flag=1", "not true or false"),
        ("count=[", "not a whole number"),
    ],
)
def test_wrong_settings_are_refused(argument: str, says: str) -> None:
    with pytest.raises(WrongInput, match=says):
        values([argument], DEFAULTS, "verb")


def test_a_secret_that_would_be_written_down_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("name: a\ndata: {train: [{source: b}]}\n", encoding="utf-8")
    read_recipe([str(path), "launch.environment={WANDB_API_KEY: hush-77aa, A: b}"], "train")
    (line,) = capsys.readouterr().err.splitlines()
    assert "warning: launch.environment.WANDB_API_KEY looks like a secret" in line
    assert "hush" not in line


def test_a_knob_is_not_set_behind_the_supervisors_back(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("name: a\ndata: {train: [{source: b}]}\n", encoding="utf-8")
    with pytest.raises(WrongInput, match=r"launch\.environment\.INGOT_SEED would set a knob"):
        read_recipe([str(path), 'launch.environment={INGOT_SEED: "7"}'], "train")


def test_the_recipe_of_a_renamed_run_is_told_where_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/now/reports/steps").mkdir(parents=True)
    text = "name: before\ndata: {train: [{source: a}]}\n"
    for place in ("runs/now/recipe.yaml", "recipe.yaml"):
        Path(place).write_text(text, encoding="utf-8")

    def note(*arguments: str) -> str | None:
        return note_other_run(arguments, read_recipe(arguments))

    told = note("runs/now/recipe.yaml", "seed=1")
    assert told is not None
    assert "is of the run before: this works in runs/before;" in told
    onward = told.partition("; ")[2].removesuffix(" goes on in runs/now").split()
    assert onward == ["output=runs", "name=now"]
    assert note("runs/now/recipe.yaml", *onward) is None
    assert note("recipe.yaml") is None
    Path("runs/now").rename("runs/before")
    assert note("runs/before/recipe.yaml") is None
