from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.config.models.presets import PRESETS, preset
from ingot.config.sections.layout import Parallel
from ingot.config.sections.training import Train
from ingot.config.shape import (
    batch_plan,
    flops_per_token,
    least_parameters,
    parameter_count,
    total_steps,
)
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from tests import tolerances
from tests.lazy import lazy

transformers = lazy("transformers")


def real_model(config: dict[str, Any]) -> Any:
    values = {
        key: value for key, value in config.items() if key not in ("model_type", "architectures")
    }
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config["model_type"], **values)
        )


def real_count(config: dict[str, Any]) -> int:
    return sum(parameter.numel() for parameter in real_model(config).parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_counted_as_transformers_has_them(name: str) -> None:
    assert parameter_count(preset(name)) == real_count(preset(name))


def test_the_bound_of_a_gated_t5_holds_all_its_matrices() -> None:
    config = preset("t5-mini")
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**config))
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    biases = 2 * model.config.num_heads * model.config.relative_attention_num_buckets
    assert least_parameters(config) == matrices - biases


@pytest.mark.parametrize(
    "change",
    [
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": None},
        {"head_dim": 16},
        {"vocab_size": 257},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "num_key_value_heads": 6},
    ],
)
def test_parameters_are_counted_for_odd_shapes_too(change: dict[str, Any]) -> None:
    config = {**preset("llama-3m"), **change}
    assert parameter_count(config) == real_count(config)


NESTED = {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4}
        for kind in ("full_attention", "sliding_attention")
    }
}


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral"},
        {"model_type": "qwen2"},
        {"model_type": "qwen2", "attention_bias": False, "tie_word_embeddings": True},
        {"model_type": "qwen3"},
        {"model_type": "qwen3", "attention_bias": True},
        {"model_type": "qwen3", "head_dim": 48, "num_key_value_heads": 1},
        {"model_type": "qwen3", "tie_word_embeddings": True},
        {"model_type": "gemma3_text", "hidden_act": None, **NESTED},
        {"model_type": "olmo2", "num_key_value_heads": 2},
        {"model_type": "olmo3", **NESTED},
        {"model_type": "smollm3", "mlp_bias": True, "pad_token_id": None},
        {"model_type": "granite", "attention_bias": True},
        {"model_type": "phi3", "pad_token_id": None},
        {"model_type": "glm4", "pad_token_id": None},
        {"model_type": "exaone4"},
        {"model_type": "seed_oss", "attention_out_bias": True},
        {"model_type": "ministral3", "rope_parameters": None},
        {"model_type": "mixtral"},
        {"model_type": "qwen3_moe", "mlp_only_layers": [0], "moe_intermediate_size": 48},
        {"model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
        {
            "model_type": "olmoe",
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 2,
            "pad_token_id": None,
        },
    ],
)
def test_parameters_are_counted_for_every_model_type(change: dict[str, Any]) -> None:
    """Here, in transformers, and in the decoder that we build."""
    config = {**preset("llama-3m"), **change}
    with torch.device("meta"):
        ours = Decoder(DecoderConfig.from_hf(config))
    assert (
        parameter_count(config)
        == real_count(config)
        == sum(parameter.numel() for parameter in ours.parameters())
    )


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def test_of_experts_only_the_chosen_ones_are_active() -> None:
    """The published numbers of Qwen3-30B-A3B: 30.5 and 3.3 billion."""
    assert parameter_count(QWEN3_30B_A3B) == 30_532_122_624
    active = parameter_count(QWEN3_30B_A3B, active=True)
    idle = 48 * 120 * 3 * 2048 * 768
    assert active == 30_532_122_624 - idle == 3_353_032_704
    head = 151_936 * 2048
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    attention = 12 * 32 * 128 * 48 * 512 / 2
    assert flops_per_token(QWEN3_30B_A3B, 512, None) == 6 * (active - head - norms) + attention


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-1b", 1_235_814_400),
        ("llama-3b", 3_212_749_824),
        ("llama-8b", 8_030_261_248),
        ("mistral-7b", 7_248_023_552),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
    ],
)
def test_presets_of_published_models_have_their_number_of_parameters(name: str, count: int) -> None:
    assert parameter_count(preset(name)) == count


def pairs_seen(seq_len: int, window: int | None) -> int:
    """Query and key pairs of one row, the diagonal counted half as the formula has it."""
    return sum(2 * min(place, (window or seq_len) - 1) + 1 for place in range(seq_len))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, [16, 16, 16]),
        ({"model_type": "mistral", "sliding_window": 64}, [None] * 3),
        ({"model_type": "mistral", "sliding_window": 1000}, [None] * 3),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 3),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 5,
                "max_window_layers": 1,
            },
            [None, 5, 5],
        ),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 5}, [None] * 3),
    ],
)
def test_a_sliding_window_makes_attention_cheaper(
    changes: dict[str, Any], windows: list[int | None]
) -> None:
    config, seq_len = {**preset("llama-3m"), **changes}, 64
    matrices = sum(
        module.weight.numel()
        for module in real_model(config).modules()
        if isinstance(module, torch.nn.Linear)
    )
    each = (
        2 * 2 * config["num_attention_heads"] * config["head_dim"]
    )  # scores and mixing, of one pair
    attention = sum(each * pairs_seen(seq_len, window) / 2 / seq_len for window in windows)
    assert flops_per_token(config, seq_len, None) == pytest.approx(
        3 * (2 * matrices + attention), rel=tolerances.EXACT
    )


@pytest.mark.parametrize("name", ["llama-3m", "llama-56m"])
def test_the_work_of_a_token_is_what_the_matrix_products_of_the_real_model_cost(name: str) -> None:
    config, seq_len = preset(name), 64
    matrices = sum(
        module.weight.numel()
        for module in real_model(config).modules()
        if isinstance(module, torch.nn.Linear)
    )
    # Forward: two operations a weight; attention: scores and mixing, each 2 * E operations for the
    # (T + 1) / 2 tokens seen on average.
    attention = (
        config["num_hidden_layers"]
        * config["num_attention_heads"]
        * config["head_dim"]
        * 2
        * 2
        * seq_len
        / 2
    )
    assert flops_per_token(config, seq_len, None) == 3 * (2 * matrices + attention)


def test_presets_differ_and_an_unknown_one_names_the_nearest() -> None:
    assert preset("llama-3m") is not preset("llama-3m")
    assert preset("llama-3m")["rope_parameters"] is not preset("llama-3m")["rope_parameters"]
    with pytest.raises(
        WrongInput, match=r"preset:llama-3 is unknown; did you mean preset:llama-3m\?"
    ):
        preset("llama-3")


@pytest.mark.parametrize(
    ("train", "rows", "steps"),
    [
        ({"steps": 7}, 1, 7),
        ({"tokens": 4096}, 1, 1),
        ({"tokens": 4097}, 1, 2),
        ({}, 100, 3),
        ({"epochs": 2}, 100, 6),
        ({"epochs": 0.5}, 100, 1),
        ({"epochs": 0.01}, 100, 1),
        ({"epochs": 1.4}, 1440, 63),
        ({"epochs": 4.6}, Fraction(800), 115),
    ],
)
def test_steps_mean_what_the_knob_says(
    train: dict[str, Any], rows: Fraction | int, steps: int
) -> None:
    assert total_steps(Train(global_batch=32, **train), rows, seq_len=128) == steps


@given(global_batch=st.integers(1, 200), micro_batch=st.integers(1, 50), world=st.integers(1, 20))
def test_a_batch_is_dealt_whole_or_refused_with_a_number_that_fits(
    global_batch: int, micro_batch: int, world: int
) -> None:
    train = Train(global_batch=global_batch, micro_batch=micro_batch)
    if global_batch % world == 0:
        plan = batch_plan(train, Parallel(), world)
        assert plan.per_rank * world == global_batch
        assert (
            (plan.micro_steps - 1) * plan.micro_batch
            < plan.per_rank
            <= plan.micro_steps * plan.micro_batch
        )
        return
    with pytest.raises(WrongInput) as error:
        batch_plan(train, Parallel(), world)
    fits = int(str(error.value).split("; ")[1].split()[0])
    assert global_batch % fits == 0
    assert all(
        global_batch % n or abs(n - world) >= abs(fits - world) for n in range(1, global_batch + 1)
    )


def test_another_number_of_processes_than_asked_for_is_refused() -> None:
    assert batch_plan(Train(), Parallel(replicate=2), 2).world == 2
    with pytest.raises(
        WrongInput,
        match=(
            r"parallel.replicate 4 needs 4 processes, 2 are running; start 4, or set"
            r" parallel.replicate to auto"
        ),
    ):
        batch_plan(Train(), Parallel(replicate=4), 2)


def test_a_huge_batch_is_refused_at_once() -> None:
    with pytest.raises(WrongInput, match="does not divide over 3 processes"):
        batch_plan(Train(global_batch=10**15), Parallel(), 3)
