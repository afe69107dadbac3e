"""Adapters of every family against PEFT: ours open there, PEFT's open here, those of modules that
its files hold as one included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.config.sections.lora import Lora
from ingot.models.adapters.lora import add_lora, lora_layers
from ingot.models.adapters.peft import load_adapter, read_adapter_config, save_adapter
from ingot.models.hf.folder import load_model
from tests import tolerances
from tests.measured import largest, measured
from tests.models.adapters.test_lora import excite, logits, relative
from tests.models.adapters.test_peft import reference, their_logits, theirs
from tests.models.hf.tiny import CPU
from tests.models.native.test_family import needs_reference
from tests.models.tiny import make_member

FIRST = ["llama2", "mistral", "qwen2", "qwen3"]
MEMBERS = [
    "gemma3",
    "olmo2",
    "olmo3",
    "smollm3",
    "granite",
    "phi3",
    "phi3-longrope",
    "glm4",
    "exaone4",
    "seed_oss",
    "ministral3",
]
MIXTURES = ["mixtral", "olmoe", "qwen3_moe", "glm4_moe", "minimax_m2", "gpt_oss"]
SOME: dict[str, Any] = {"rank": 2, "alpha": 3.0, "targets": ["v_proj", "up_proj", "o_proj"]}


@pytest.mark.parametrize(
    "case",
    [*MEMBERS, *(pytest.param(case, marks=pytest.mark.drawn("first families")) for case in FIRST)],
)
def test_both_ways(case: str, tmp_path: Path) -> None:
    """Ours opens in PEFT, and here again with the ranks that it had; PEFT's opens here."""
    from peft import PeftModel

    base = make_member(tmp_path / "base", case)
    for number, knobs in enumerate(({"rank": 4, "alpha": 6.0, "targets": "all-linear"}, SOME)):
        folder = tmp_path / f"ours-{number}"
        model = load_model(base, device=CPU)
        plain = logits(model)
        add_lora(model, Lora(**knobs), 0)
        save_adapter(excite(model), folder, base=str(base), kind="decoder")
        opened = PeftModel.from_pretrained(reference(base), str(folder)).eval()
        assert relative(logits(model), plain) > 0.05
        assert largest(logits(model), their_logits(opened), "out") <= tolerances.LOGITS_FP32
        again = load_model(base, device=CPU)
        add_lora(again, Lora(**knobs), 1)
        load_adapter(again, folder)
        assert torch.equal(logits(again), logits(model))
        for name, layer in lora_layers(again).items():
            assert torch.equal(layer.lora_A, lora_layers(model)[name].lora_A), name

    expected = their_logits(
        theirs(reference(base), tmp_path / "theirs", target_modules="all-linear")
    )
    ours = load_model(base, device=CPU)
    load_adapter(ours, tmp_path / "theirs")
    assert largest(logits(ours), expected, "in") <= tolerances.LOGITS_FP32
    merged = load_model(base, device=CPU)
    load_adapter(merged, tmp_path / "theirs", merge=True)
    assert measured(relative(logits(merged), expected), "merged") < tolerances.MERGED_FP32


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.drawn("mixtures")) for case in MIXTURES]
)
def test_attention_of_a_mixture(case: str, tmp_path: Path) -> None:
    """PEFT would take an adapter of `up_proj` for one of the experts, and leave dense layers and
    shared experts without it.
    """
    from peft import PeftModel

    needs_reference(case)
    base, folder = make_member(tmp_path / "base", case), tmp_path / "ours"
    model = load_model(base, device=CPU)
    plain = logits(model)
    add_lora(model, Lora(rank=4, alpha=6.0), 0)
    assert len(lora_layers(model)) == 4 * model.config.num_hidden_layers
    save_adapter(excite(model), folder, base=str(base), kind="decoder")
    opened = PeftModel.from_pretrained(reference(base), str(folder)).eval()
    assert relative(logits(model), plain) > 0.05
    assert largest(logits(model), their_logits(opened), "out") <= tolerances.LOGITS_FP32
    merged = load_model(base, device=CPU)
    load_adapter(merged, folder, merge=True)
    assert measured(relative(logits(merged), logits(model)), "merged") < tolerances.MERGED_FP32
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    expected = their_logits(theirs(reference(base), tmp_path / "theirs", target_modules=attention))
    ours = load_model(base, device=CPU)
    load_adapter(ours, tmp_path / "theirs")
    assert largest(logits(ours), expected, "in") <= tolerances.LOGITS_FP32
    with pytest.raises(WrongInput, match="attention alone is adapted, since PEFT has one"):
        add_lora(load_model(base, device=CPU), Lora(targets=["up_proj"]), 0)


def test_a_fused_module_is_one_of_pefts(tmp_path: Path) -> None:
    """The products of queries, keys and values are blocks of one, of three times the rank."""
    model = load_model(make_member(tmp_path / "base", "phi3"), device=CPU)
    add_lora(model, Lora(rank=4, alpha=6.0, targets=["qkv_proj", "down_proj"]), 0)
    assert len(lora_layers(model)) == 2 * 4
    save_adapter(excite(model), tmp_path / "adapter", base="base", kind="decoder")
    config = read_adapter_config(tmp_path / "adapter")
    assert config.targets == ("down_proj", "qkv_proj")
    assert {config.rank, *config.ranks.values()} == {4, 12}
    assert {config.alpha, *config.alphas.values()} == {6.0, 18.0}
