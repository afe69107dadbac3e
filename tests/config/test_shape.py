from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ingot.base.errors import WrongInput
from ingot.config.presets import PRESETS, preset
from ingot.config.sections.layout import Parallel
from ingot.config.sections.training import Train
from ingot.config.shape import batch_plan, flops_per_token, parameter_count, total_steps
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from tests import tolerances


def real_model(config: dict[str, Any]) -> PreTrainedModel:
    values = {
        key: value for key, value in config.items() if key not in ("model_type", "architectures")
    }
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values)
        )
    return model


def real_count(config: dict[str, Any]) -> int:
    return sum(parameter.numel() for parameter in real_model(config).parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_counted_as_transformers_has_them(name: str) -> None:
    assert parameter_count(preset(name)) == real_count(preset(name))


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


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral"},
        {"model_type": "mistral", "attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen2", "attention_bias": False, "tie_word_embeddings": True},
        {"model_type": "qwen3"},
        {"model_type": "qwen3", "attention_bias": True},
        {"model_type": "qwen3", "head_dim": 48, "num_key_value_heads": 1},
        {"model_type": "qwen3", "tie_word_embeddings": True},
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
    assert flops_per_token(config, seq_len) == pytest.approx(
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
    assert flops_per_token(config, seq_len) == 3 * (2 * matrices + attention)


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
    ],
)
def test_steps_mean_what_the_knob_says(train: dict[str, Any], rows: int, steps: int) -> None:
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
