"""Values of tuners that mean something else here, or that are not given and have defaults there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.adopt.stand_ins import LLAMAFACTORY, recipe_of

AXOLOTL = """\
base_model: org/ash-1b
sequence_len: 64
datasets:
  - path: org/rows
    type: chat_template
"""


@pytest.mark.parametrize(("mark", "lost"), [("train", False), ("keep", True)])
def test_a_mark_of_untrained_answers_with_another_name_is_told(
    tmp_path: Path, mark: str, lost: bool
) -> None:
    text = f"{AXOLOTL}    message_field_training: {mark}\n"
    notes = recipe_of(tmp_path, ash_yaml=text)[1]
    assert ("datasets[].message_field_training: an answer is left out by" in notes) == lost


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", (0.1, 0.5, 1.0)),
        ("rl_beta: 2.5\nsimpo_gamma: 1.2\ncpo_alpha: 0\n", (2.5, 1.2, 0.0)),
    ],
    ids=["not given", "given"],
)
def test_simpo_of_axolotl_is_that_of_trl(
    tmp_path: Path, given: str, expected: tuple[float, float, float]
) -> None:
    recipe, notes = recipe_of(tmp_path, ash_yaml=f"{AXOLOTL}rl: simpo\n{given}")
    found = recipe.objective.model_dump()
    assert (found["beta"], found["margin"], found["sft_weight"]) == expected
    assert "is not known" not in notes


def test_simpo_of_llamafactory_has_its_margin(tmp_path: Path) -> None:
    text = LLAMAFACTORY.replace("simpo_gamma: 0.5\n", "")
    assert recipe_of(tmp_path, elm_yaml=text)[0].objective.model_dump()["margin"] == 0.5
    text = LLAMAFACTORY.replace("simpo_gamma: 0.5", "simpo_gamma: 1.5")
    assert recipe_of(tmp_path, elm_yaml=text)[0].objective.model_dump()["margin"] == 1.5
