"""Adapters of tuners: their scale, their layers and their frozen weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from tests.adopt.stand_ins import ASH, FIR, LLAMAFACTORY, adopt_texts, load, recipe_of


@pytest.mark.parametrize(
    ("given", "targets"),
    [
        ("", ["q_proj", "v_proj"]),
        ("lora_target_modules: null\n", ["q_proj", "v_proj"]),
        ("lora_target_modules: [o_proj]\n", ["o_proj"]),
        ("lora_target_modules: all-linear\n", "all-linear"),
    ],
)
def test_an_adapter_of_trl_is_where_peft_puts_it(
    tmp_path: Path, given: str, targets: str | list[str]
) -> None:
    recipe, notes = recipe_of(tmp_path, fir_yaml=f"{FIR}use_peft: true\n{given}")
    assert recipe.model.lora is not None
    assert recipe.model.lora.targets == targets
    said = "lora_target_modules: is not given: q_proj and v_proj, as PEFT" in notes
    assert said == (targets == ["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("project", "given", "alpha", "remark"),
    [
        ("fir_yaml", "use_peft: true\nlora_r: 64\n", 32, "lora_alpha, its default there"),
        ("fir_yaml", "use_peft: true\nlora_r: 64\nlora_alpha: 128\n", 128, "lora_alpha"),
        ("elm_yaml", "lora_rank: 64\n", 128, "lora_alpha, its default there"),
        ("elm_yaml", "lora_rank: 64\nlora_alpha: 0\n", 128, "lora_alpha, its default there"),
        ("elm_yaml", "lora_rank: 64\nlora_alpha: 32\n", 32, "lora_alpha"),
        ("ash_yaml", "adapter: lora\nlora_r: 64\n", 128, "lora_alpha, which is not given"),
        ("ash_yaml", "adapter: lora\nlora_r: 64\nlora_alpha: 16\n", 16, "lora_alpha"),
    ],
)
def test_an_adapter_has_the_scale_that_it_had_there(
    tmp_path: Path, project: str, given: str, alpha: float, remark: str
) -> None:
    elm = re.sub(r"lora_rank: .*\n|lora_alpha: .*\n", "", LLAMAFACTORY)
    text = {"fir_yaml": FIR, "elm_yaml": elm, "ash_yaml": ASH}[project] + given
    adopted = adopt_texts(tmp_path, {project.replace("_", "."): text})
    lora = load(tmp_path, adopted).model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha) == (64, alpha)
    assert re.search(rf"alpha: {alpha:.1f} +# {remark}$", adopted.text, re.MULTILINE)
    told = "lora_alpha: is not given, and axolotl has no default; 128 stands for it"
    assert (told in "\n".join(adopted.notes)) == ("which is not given" in remark)


def test_an_adapter_whose_scale_is_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"lora_alpha: `model\.lora\.alpha` is 0\.0"):
        recipe_of(tmp_path, fir_yaml=f"{FIR}use_peft: true\nlora_alpha: 0\n")


def test_an_adapter_of_axolotl_that_names_no_layers_is_told(tmp_path: Path) -> None:
    says = "lora_target_modules: is not given, nor lora_target_linear"
    text = f"{ASH}adapter: lora\n"
    assert says in recipe_of(tmp_path, ash_yaml=text)[1]
    assert says not in recipe_of(tmp_path, ash_yaml=f"{text}lora_target_linear: true\n")[1]


@pytest.mark.parametrize(("bits", "kind"), [(4, "nf4"), (8, "int8"), (3, "nf4")])
def test_bits_of_frozen_weights_that_are_not_offered_are_told(
    tmp_path: Path, bits: int, kind: str
) -> None:
    text = LLAMAFACTORY.replace("deepspeed: ", "# ")
    recipe, notes = recipe_of(tmp_path, elm_yaml=f"{text}quantization_bit: {bits}\n")
    assert recipe.model.quantize is not None
    assert recipe.model.quantize.kind == kind
    assert ("quantization_bit: 3 are not offered" in notes) == (bits == 3)


@pytest.mark.parametrize(
    ("given", "dropout", "told"),
    [
        ("loss_type: nll\n", 0.05, False),
        ("loss_type: nll\nlora_dropout: 0\n", 0.0, False),
        ("loss_type: nll\nlora_dropout: 0.1\n", 0.1, False),
        ("beta: 0.1\n", 0.0, False),
        ("beta: 0.1\nlora_dropout: 0.1\n", 0.0, True),
        ("beta: 0.1\nlora_dropout: 0\n", 0.0, False),
        ("beta: 0.1\ndisable_dropout: false\n", 0.05, False),
        ("loss_type: kto\nlora_dropout: 0.1\n", 0.0, True),
        ("center_rewards_coefficient: 0.01\n", 0.0, False),
        ("reward_funcs: [judge.right]\n", 0.0, True),
        ("reward_funcs: [judge.right]\ndisable_dropout: false\n", 0.0, True),
    ],
)
def test_an_adapter_of_trl_has_dropout_where_it_had_it(
    tmp_path: Path, given: str, dropout: float, told: bool
) -> None:
    recipe, notes = recipe_of(tmp_path, fir_yaml=f"{FIR}use_peft: true\n{given}")
    assert recipe.model.lora is not None
    assert recipe.model.lora.dropout == dropout
    assert ("lora_dropout: 0 here: " in notes) == told


@pytest.mark.parametrize(
    ("way", "dropout"), [("sft", 0.1), ("rm", 0.1), ("dpo", 0.0), ("kto", 0.0)]
)
def test_an_adapter_of_llamafactory_has_dropout_where_it_had_it(
    tmp_path: Path, way: str, dropout: float
) -> None:
    text = LLAMAFACTORY.replace("stage: dpo", f"stage: {way}\nlora_dropout: 0.1")
    recipe, notes = recipe_of(tmp_path, elm_yaml=text)
    assert recipe.model.lora is not None
    assert recipe.model.lora.dropout == dropout
    assert ("lora_dropout: 0 here: training on preferences" in notes) == (dropout == 0)


@pytest.mark.parametrize("way", ["", "dpo", "ipo", "simpo", "orpo", "kto"])
def test_an_adapter_of_axolotl_has_dropout_where_it_had_it(tmp_path: Path, way: str) -> None:
    text = f"{ASH}adapter: lora\nlora_dropout: 0.1\nrl: {way}\n"
    recipe, notes = recipe_of(tmp_path, ash_yaml=text)
    assert recipe.model.lora is not None
    assert recipe.model.lora.dropout == (0.0 if way else 0.1)
    assert ("lora_dropout: 0 here: training on preferences" in notes) == bool(way)
