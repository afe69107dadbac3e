"""Values of tuners that mean something else here, or that are not given and have defaults there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adopt.stand_ins import LLAMAFACTORY, recipe_of

AXOLOTL = """\
base_model: org/ash-1b
sequence_len: 64
datasets:
  - path: org/rows
    type: chat_template
"""
TEXTS = "model_name_or_path: org/fir-1b\ndataset_name: org/rows\nmax_length: 64\n"


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


@pytest.mark.parametrize(("norm", "clip"), [("0", None), ("0.0", None), ("0.3", 0.3)])
def test_no_clipping_is_carried(tmp_path: Path, norm: str, clip: float | None) -> None:
    for project in ({"ash_yaml": AXOLOTL}, {"elm_yaml": LLAMAFACTORY}, {"fir_yaml": TEXTS}):
        given = {name: f"{text}max_grad_norm: {norm}\n" for name, text in project.items()}
        assert recipe_of(tmp_path, **given)[0].train.clip_norm == clip
    assert recipe_of(tmp_path, fir_yaml=TEXTS)[0].train.clip_norm == 1.0


def test_texts_of_trl_are_pretrained_on(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, fir_yaml=f"{TEXTS}dataset_text_field: body\n")
    assert (recipe.objective.kind, recipe.data.train[0].text) == ("pretrain", "body")
    assert (recipe.data.pack, recipe.train.optimizer.lr) == ("none", 2e-5)
    assert "dataset_text_field: SFT of plain texts is objective.kind=pretrain" in notes
    text = f"{TEXTS}dataset_text_field: body\nloss_type: ipo\n"
    recipe, notes = recipe_of(tmp_path, fir_yaml=text)
    assert recipe.objective.kind == "ipo"
    assert "dataset_text_field: ipo does not train on plain texts" in notes
