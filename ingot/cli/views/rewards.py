"""`ingot show rewards`: what a recipe's rewards say of answers in a file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ingot.base.console import console
from ingot.base.errors import EXIT_DONE, WrongInput
from ingot.base.progress import say
from ingot.cli.output import print_json
from ingot.config.load import read_recipe
from ingot.config.recipe import Recipe
from ingot.config.sections.rewards import RewardSettings
from ingot.rewards.build import build_rewards
from ingot.rewards.protocol import RewardScores, Sample

MOST_CHARACTERS = 48
FIELDS: dict[str, type] = {
    "prompt": str,
    "answer": str,
    "reference": str,
    "finished": bool,
    "alone": bool,
}
"""Those of a `Sample`, whose docstrings say what they are."""


def show_rewards(arguments: list[str], file: Path, *, as_json: bool) -> int:
    """Score the samples of a file by a recipe's rewards and print every value.

    Raises:
        WrongInput: the recipe has no rewards, or one that cannot work here; a line of the file is
            no sample.
    """
    settings = rewards_of(read_recipe(arguments))
    samples = read_samples(file)
    with build_rewards(settings) as score:
        scores = score(samples)
    if as_json:
        print_json(
            "show rewards",
            samples=len(samples),
            rewards=scores.each,
            total=scores.total,
            failures=scores.failures,
            reasons=scores.reasons,
        )
        return EXIT_DONE
    console().print(_table(samples, scores))
    for name, count in scores.failures.items():
        if count:
            say(f"{name} failed on {count} of {len(samples)}: {scores.reasons[name]}")
    return EXIT_DONE


def rewards_of(recipe: Recipe) -> list[RewardSettings]:
    """The rewards that the recipe trains on, else those that its evaluations measure.

    Raises:
        WrongInput: it has none.
    """
    places: list[Any] = [recipe.objective, *recipe.tasks]
    for place in places:
        if found := getattr(place, "rewards", None):
            return list(found)
    raise WrongInput(
        f"the recipe has no rewards: objective.kind is {recipe.objective.kind}; list some in"
        " objective.rewards or in a task of evaluate.tasks"
    )


def read_samples(file: Path) -> list[Sample]:
    """The samples of a file of JSON lines.

    Raises:
        WrongInput: it cannot be read, is empty, or has a line that is no sample; names the line.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongInput(f"--samples {file} cannot be read ({error}); give a text file") from None
    samples = [
        _sample(line, f"--samples {file}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not samples:
        raise WrongInput(f'--samples {file} has no samples; give lines such as {{"answer": "4"}}')
    return samples


def _sample(line: str, where: str) -> Sample:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WrongInput(f"{where} is no JSON ({error}); give an object a line") from None
    if not isinstance(given, dict) or "answer" not in given:
        raise WrongInput(f'{where} has no answer; give an object such as {{"answer": "4"}}')
    for name, value in given.items():
        kind = FIELDS.get(name)
        if kind is None:
            raise WrongInput(f"{where} has the key {name!r}; there are {', '.join(FIELDS)}")
        if not isinstance(value, kind) and not (name == "reference" and value is None):
            wanted = "true or false" if kind is bool else "a text"
            raise WrongInput(f"{where}: {name} is {value!r:.60}; give {wanted}")
    return Sample(**{"prompt": "", **given})


def _table(samples: Sequence[Sample], scores: RewardScores) -> Table:
    table = Table("answer", *scores.each, "total")
    for number, sample in enumerate(samples):
        values = [values[number] for values in scores.each.values()]
        table.add_row(
            Text(_shortened(sample.answer)),
            *("failed" if value is None else f"{value:g}" for value in values),
            f"{scores.total[number]:g}",
        )
    table.add_section()
    means = [[value for value in values if value is not None] for values in scores.each.values()]
    table.add_row(
        f"mean of {len(samples)}",
        *(f"{statistics.fmean(mean):.4g}" if mean else "" for mean in means),
        f"{statistics.fmean(scores.total):.4g}",
    )
    return table


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_CHARACTERS else line[: MOST_CHARACTERS - 3] + "..."
