"""The five commands of docs/PLACES.md, as they stand there: each is one that ingot takes, but for
the account that none of these tests has.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ingot.cloud.doctor.context import needs_of
from ingot.cloud.prices import hourly_price_of
from ingot.config.load import read_recipe, split_arguments
from ingot.config.recipe import Recipe
from ingot.config.shipped import names
from ingot.launch.job import launcher_of
from ingot.launch.run_job import job_of
from ingot.pipeline.plan import submission_problems
from tests.house.source import PROJECT

PAGE = (PROJECT / "docs/PLACES.md").read_text(encoding="utf-8")
OURS = PAGE[PAGE.index("## With an account of your own") :]


def commands() -> list[list[str]]:
    """The words of each, without the prompt and what is remarked on it."""
    block = next(
        block
        for block in re.findall(r"```console\n(.*?)```", OURS, flags=re.DOTALL)
        if "ingot doctor" in block
    )
    return [
        shlex.split(line.removeprefix("$ "), comments=True)
        for line in block.replace("\\\n", " ").splitlines()
    ]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the file of one's own in it."""
    (mine,) = re.findall(r"```yaml\n(.*?)```", OURS, flags=re.DOTALL)
    (tmp_path / "mine.yaml").write_text(mine, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def recipe_of(words: list[str]) -> Recipe:
    """That of the last command of a line."""
    last = words[len(words) - words[::-1].index("ingot") :]
    files, overrides = split_arguments(
        [
            word
            for word in last
            if word in names() or (not word.startswith("--") and re.search(r"\.yaml$|=", word))
        ]
    )
    return read_recipe([*files, *overrides])


@pytest.mark.usefixtures("there")
def test_each_is_taken_and_bounded() -> None:
    doctor, shown, images, trained, submitted = commands()
    asked = needs_of(recipe_of(doctor))
    assert {"compute", "vertex", "images", "storage"} <= set(asked.uses)
    assert set(asked.images) == {"train", "serve"} == {"train", "serve"} & set(images)
    assert {demand.why for demand in asked.machines} == {"launch.machine", "serve.machine"}
    for words in (shown, trained):
        recipe = recipe_of(words)
        assert launcher_of(recipe).can(job_of(recipe, "train", distributed=True)) == []
        assert recipe.launch.machine == recipe_of(doctor).launch.machine
    assert ("--dry-run" in shown, "--dry-run" in trained) == (True, False)
    assert trained.index("ingest") < trained.index("prepare") < trained.index("launch")
    assert submission_problems(recipe_of(submitted)) == []
    for words in (trained, submitted):
        recipe = recipe_of(words)
        assert recipe.cloud.max_cost == 2.0
        assert 0 < hourly_price_of(recipe) < 1.0
    assert f"labels.ingot-run={recipe_of(trained).name}`" in OURS
