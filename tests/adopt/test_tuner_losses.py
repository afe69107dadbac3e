"""Losses of tuners, and what they weigh: they are carried over, or it is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.adopt.stand_ins import ASH, FIR, LLAMAFACTORY, recipe_of


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
    recipe, notes = recipe_of(tmp_path, ash_yaml=f"{ASH}rl: simpo\n{given}")
    found = recipe.objective.model_dump()
    assert (found["beta"], found["margin"], found["sft_weight"]) == expected
    assert "is not known" not in notes


@pytest.mark.parametrize(
    ("given", "of_trl", "beta", "says"),
    [
        ("", "", None, ""),
        ("rl_beta: 0.3\n", "", 0.3, ""),
        ("", "  beta: 0.5\n", 0.5, ""),
        ("dpo_beta: 0.2\norpo_alpha: 0.2\n", "", 0.2, ""),
        ("rl_beta: 0.3\n", "  beta: 0.5\n", 0.5, "trl.beta and rl_beta: say 0.5 and 0.3; the"),
        ("orpo_alpha: 0.3\ndpo_beta: 0.4\n", "", 0.4, "dpo_beta and orpo_alpha: say 0.4 and 0.3"),
        ("rl_beta: 0.3\n", "  beta: null\n", 0.3, ""),
    ],
)
@pytest.mark.parametrize(
    ("way", "knob", "usual"), [("dpo", "beta", 0.1), ("orpo", "beta", 0.1), ("grpo", "kl", 0.0)]
)
def test_the_strength_of_every_loss_of_axolotl_has_any_of_its_names(
    tmp_path: Path,
    way: str,
    knob: str,
    usual: float,
    given: str,
    of_trl: str,
    beta: float | None,
    says: str,
) -> None:
    rewards = "  reward_funcs: [judge.right]\n" if way == "grpo" else ""
    text = f"{ASH}rl: {way}\n{given}trl:\n  num_generations: 2\n{rewards}{of_trl}"
    recipe, notes = recipe_of(tmp_path, ash_yaml=text)
    found = recipe.objective.model_dump()
    assert found[knob] == (usual if beta is None else beta)
    assert found.get("kl_estimator", "k3") == ("k3" if found[knob] else "k2")
    assert says in notes
    assert bool(says) == (" and here" in notes)


def test_simpo_of_llamafactory_has_its_margin(tmp_path: Path) -> None:
    text = LLAMAFACTORY.replace("simpo_gamma: 0.5\n", "")
    assert recipe_of(tmp_path, elm_yaml=text)[0].objective.model_dump()["margin"] == 0.5
    text = LLAMAFACTORY.replace("simpo_gamma: 0.5", "simpo_gamma: 1.5")
    assert recipe_of(tmp_path, elm_yaml=text)[0].objective.model_dump()["margin"] == 1.5


@pytest.mark.parametrize(
    ("given", "kind", "weight"),
    [
        ("stage: dpo\npref_loss: sigmoid", "dpo", 0.3),
        ("stage: dpo\npref_loss: simpo", "simpo", 0.3),
        ("stage: dpo\npref_loss: ipo", "ipo", None),
        ("stage: dpo\npref_loss: orpo", "orpo", None),
        ("stage: kto", "kto", None),
        ("stage: sft", "sft", None),
    ],
)
@pytest.mark.parametrize("ftx", ["0.3", "0"])
def test_the_cross_entropy_that_llamafactory_adds_is_carried_or_told(
    tmp_path: Path, given: str, kind: str, weight: float | None, ftx: str
) -> None:
    text = re.sub("stage: dpo|pref_loss: .*", "", LLAMAFACTORY)
    recipe, notes = recipe_of(tmp_path, elm_yaml=f"{text}{given}\npref_ftx: {ftx}\n")
    assert recipe.objective.kind == kind
    found = recipe.objective.model_dump().get("sft_weight")
    assert found == (weight and float(ftx))
    told = ftx != "0" and kind in ("ipo", "orpo", "kto")
    assert (f"alone here, not to {kind}" in notes) == ("pref_ftx" in notes) == told


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "objective.kind: `trl grpo` and `trl rloo` read these keys, and grpo is taken"),
        ("reward_clip_range: [0, 1]\n", "reward_clip_range: RLOO is not offered; GRPO"),
        ("loss_type: dapo\n", ""),
    ],
)
def test_rloo_is_not_taken_for_grpo_in_silence(tmp_path: Path, given: str, says: str) -> None:
    recipe, notes = recipe_of(tmp_path, fir_yaml=f"{FIR}reward_funcs: [judge.right]\n{given}")
    assert recipe.objective.kind == "grpo"
    assert says in notes
    assert bool(says) == ("rloo" in notes.lower())
    found = recipe.objective.model_dump()
    assert (found["group"], found["kl"]) == ((2, 0.05) if "not offered" in says else (8, 0.0))


@pytest.mark.parametrize("loss", ["nll", "chunked_nll", "dft"])
def test_losses_of_texts_are_those_of_sft(tmp_path: Path, loss: str) -> None:
    recipe, notes = recipe_of(tmp_path, fir_yaml=f"{FIR}loss_type: {loss}\n")
    assert recipe.objective.kind == "sft"
    assert ("dft is not offered; cross-entropy stands for it" in notes) == (loss == "dft")


def test_scores_of_trl_are_centred(tmp_path: Path) -> None:
    recipe, _ = recipe_of(tmp_path, fir_yaml=f"{FIR}center_rewards_coefficient: 0.01\n")
    found = recipe.objective.model_dump()
    assert (found["kind"], found["center"]) == ("reward", 0.01)


def test_answers_of_rewards_whose_length_is_not_given_are_told(tmp_path: Path) -> None:
    text = f"{ASH}rl: grpo\ntrl:\n  reward_funcs: [judge.right]\n"
    says = "trl.max_completion_length: is not given"
    assert says in recipe_of(tmp_path, ash_yaml=text)[1]
    assert says not in recipe_of(tmp_path, ash_yaml=f"{text}  max_completion_length: 64\n")[1]


@pytest.mark.parametrize(
    ("name", "text", "given", "knob"),
    [
        ("ash_yaml", f"{ASH}rl: dpo\n", "dpo_label_smoothing: 0.1", "label_smoothing"),
        ("ash_yaml", f"{ASH}rl: dpo\n", "rpo_alpha: 0.1", "sft_weight"),
        ("ash_yaml", f"{ASH}rl: kto\n", "kto_desirable_weight: 0.1", "desirable_weight"),
        ("ash_yaml", f"{ASH}rl: kto\n", "kto_undesirable_weight: 0.1", "undesirable_weight"),
        ("elm_yaml", LLAMAFACTORY, "dpo_label_smoothing: 0.1", "label_smoothing"),
        ("elm_yaml", LLAMAFACTORY, "kto_chosen_weight: 0.1", "desirable_weight"),
        ("elm_yaml", LLAMAFACTORY, "kto_rejected_weight: 0.1", "undesirable_weight"),
        ("fir_yaml", FIR, "label_smoothing: 0.1", "label_smoothing"),
        ("fir_yaml", f"{FIR}beta: 0.2\n", "rpo_alpha: 0.1", "sft_weight"),
    ],
)
def test_what_a_loss_weighs_is_carried_or_told(
    tmp_path: Path, name: str, text: str, given: str, knob: str
) -> None:
    if name == "elm_yaml":
        text = re.sub("stage: dpo|pref_loss: .*|simpo_gamma: .*|pref_ftx: .*", "", text)
        text += "stage: kto\n" if "kto" in given else "stage: dpo\n"
    recipe, notes = recipe_of(tmp_path, **{name: f"{text}{given}\n"})
    assert recipe.objective.model_dump()[knob] == 0.1
    assert given.partition(":")[0] not in notes
    if name == "ash_yaml":
        other = re.sub("rl: .*", "rl: orpo", text)
        assert f"orpo has no objective.{knob}" in recipe_of(tmp_path, **{name: other + given})[1]


def test_a_reference_and_its_comparison_per_token_are_carried(tmp_path: Path) -> None:
    text = re.sub("pref_loss: .*", "ref_model: org/elm-dpo", LLAMAFACTORY)
    found = recipe_of(tmp_path, elm_yaml=text)[0].objective.model_dump()
    assert (found["kind"], found["reference"]) == ("dpo", "hf:org/elm-dpo")
    recipe, notes = recipe_of(tmp_path, ash_yaml=f"{ASH}rl: dpo\ndpo_norm_loss: true\n")
    assert recipe.objective.model_dump()["normalize_length"] is True
    assert "dpo_norm_loss" not in notes
