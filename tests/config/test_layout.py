"""Layouts that do not fit are refused before anything is loaded, with the numbers and with what
would fit.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.config.degrees import AXES, degrees_of
from ingot.config.load import load_recipe
from ingot.config.sections.layout import Parallel
from ingot.config.sections.training import Train
from ingot.config.shape import batch_plan, check_layout

QUANTIZED = ("model.source=hf:a/b", "model.lora={}", "model.quantize.kind=int8")
MODEL = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 30,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 4096,
}


@given(
    st.dictionaries(st.sampled_from(AXES), st.integers(1, 4)),
    st.integers(1, 64),
    st.sampled_from([None, "replicate", "shard"]),
)
def test_degrees_fill_the_processes_or_are_refused(
    given: dict[str, int], world: int, free: str | None
) -> None:
    knobs: dict[str, Any] = {"replicate": 1, **given, **({free: "auto"} if free else {})}
    fixed = math.prod(value for value in knobs.values() if value != "auto")
    if fixed != world and (free is None or world % fixed):
        with pytest.raises(WrongInput, match=str(world)):
            degrees_of(Parallel(**knobs), world)
        return
    found = degrees_of(Parallel(**knobs), world)
    assert found.world == world
    assert all(getattr(found, axis) == value for axis, value in knobs.items() if value != "auto")


@pytest.mark.parametrize(
    ("knobs", "world", "shards", "expert_shards"),
    [
        ({"shard": 8, "expert": 8}, 8, 8, 1),
        ({"shard": 8, "expert": 2}, 8, 8, 4),
        ({"replicate": 2, "shard": 4, "expert": 8}, 8, 4, 1),
        ({"replicate": 4, "expert": 2}, 4, 1, 1),
        ({"shard": 2, "context": 2, "expert": 2}, 4, 4, 2),
        ({"context": 4, "expert": 2}, 4, 1, 1),
        ({"replicate": 4, "shard": 6, "expert": 4}, 24, 6, 3),
    ],
)
def test_experts_are_sharded_over_what_their_axis_leaves(
    knobs: dict[str, int], world: int, shards: int, expert_shards: int
) -> None:
    """The expert axis takes ranks of the others, so the processes are as many as without it."""
    found = degrees_of(Parallel(**knobs), world)
    assert (found.world, found.shards, found.expert_shards) == (world, shards, expert_shards)
    assert found.text().endswith(f" x expert {knobs['expert']}")


def test_auto_is_what_the_other_degrees_leave() -> None:
    assert degrees_of(Parallel(tensor=2), 8).replicate == 4
    assert degrees_of(Parallel(tensor=2, shard="auto"), 8).shard == 4
    assert degrees_of(Parallel(replicate=2, shard="auto"), 8).shard == 4
    assert (
        degrees_of(Parallel(shard=2, tensor=2, pipeline=2), 8).text()
        == "pipeline 2 x shard 2 x tensor 2"
    )


@pytest.mark.parametrize(
    ("knobs", "world", "said"),
    [
        (
            {"shard": 2, "tensor": 2},
            2,
            (
                "parallel.shard 2 x parallel.tensor 2 takes 4 processes a copy, which does not"
                " divide 2; start 4 processes, or lower a degree"
            ),
        ),
        (
            {"tensor": 4},
            6,
            (
                "parallel.tensor 4 takes 4 processes a copy, which does not divide 6; start 8"
                " processes, or lower a degree"
            ),
        ),
        (
            {"replicate": 2, "pipeline": 2},
            8,
            (
                "parallel.pipeline 2 x parallel.replicate 2 needs 4 processes, 8 are running; start"
                " 4, or set parallel.replicate to auto"
            ),
        ),
        (
            {"replicate": 2},
            1,
            (
                "parallel.replicate 2 needs 2 processes, 1 is running; start 2, or set"
                " parallel.replicate to auto"
            ),
        ),
        (
            {"shard": 3, "context": 2, "tensor": 2, "expert": 8},
            12,
            (
                "parallel.expert 8 does not divide the 12 ranks of parallel.replicate x"
                " parallel.shard x parallel.context x parallel.tensor, which share the experts; 2,"
                " 4, 6, 12 would"
            ),
        ),
        (
            {"shard": 3, "tensor": 2, "expert": 3},
            6,
            (
                "parallel.expert 3 is no multiple of parallel.tensor 2, whose ranks share the"
                " experts; 2, 6 would"
            ),
        ),
    ],
)
def test_degrees_that_do_not_fit_the_processes(
    knobs: dict[str, Any], world: int, said: str
) -> None:
    with pytest.raises(WrongInput) as error:
        degrees_of(Parallel(**knobs), world)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("knobs", "seq_len", "said"),
    [
        (
            {"tensor": 5},
            64,
            "parallel.tensor 5 does not divide the model's 12 heads; 1, 2, 3, 4, 6, 12 would",
        ),
        (
            {"tensor": 3},
            64,
            "parallel.tensor 3 does not divide the model's 4 key/value heads; 1, 2, 4 would",
        ),
        (
            {"context": 3, "context_by": "ulysses"},
            66,
            (
                "parallel.context 3 does not divide the model's 4 key/value heads of a rank; 1, 2,"
                " 4 would"
            ),
        ),
        (
            {"context": 4, "context_by": "ulysses", "tensor": 2},
            64,
            "parallel.context 4 does not divide the model's 6 heads of a rank; 1, 2, 3, 6 would",
        ),
        (
            {"context": 4},
            60,
            (
                "parallel.context 4 cuts a row in 8 pieces, and data.seq_len 60 is no multiple of"
                " that; 56 would be"
            ),
        ),
        (
            {"tensor": 4},
            63,
            (
                "parallel.sequence cuts a row in 4 pieces, and data.seq_len 63 is no multiple of"
                " that; 60 would be, or set parallel.sequence to false"
            ),
        ),
        (
            {"pipeline": 4, "virtual": 2},
            64,
            (
                "parallel.pipeline 4 x parallel.virtual 2 makes 8 stages, the model has only 6"
                " layers; lower one of the two"
            ),
        ),
        (
            {"shard": 4, "tensor": 2},
            64,
            (
                "parallel.shard 4 divides neither the vocabulary of 61 (with parallel.tensor 2) nor"
                " the width of 30; 1, 2, 3, 5, 6, 10, 15, 30 would"
            ),
        ),
    ],
)
def test_degrees_that_do_not_fit_the_model_or_its_rows(
    knobs: dict[str, Any], seq_len: int, said: str
) -> None:
    parallel = Parallel(**knobs)
    world = parallel.tensor * parallel.context * parallel.pipeline * int(parallel.shard)
    with pytest.raises(WrongInput) as error:
        check_layout(parallel, world, MODEL, seq_len)
    assert str(error.value) == said


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"tensor": 4},
        {"context": 4},
        {"pipeline": 3, "virtual": 2},
        {"shard": 3, "tensor": 2},
        {"shard": 7},
    ],
)
def test_degrees_that_fit(knobs: dict[str, Any]) -> None:
    parallel = Parallel(**knobs)
    check_layout(
        parallel,
        parallel.tensor * parallel.context * parallel.pipeline * int(parallel.shard),
        MODEL,
        64,
    )


@pytest.mark.parametrize(
    ("train", "knobs", "world", "said"),
    [
        (
            {"global_batch": 12},
            {"tensor": 2},
            16,
            (
                "train.global_batch 12 does not divide over 8 shares of the batch (replicate 8 x"
                " tensor 2); 6 would fit"
            ),
        ),
        (
            {"global_batch": 12, "micro_batch": 5},
            {"pipeline": 2},
            2,
            (
                "train.micro_batch 5 does not divide the 12 rows of a rank, which a pipeline needs;"
                " 4 would fit"
            ),
        ),
        (
            {"global_batch": 12, "micro_batch": 4},
            {"pipeline": 2, "virtual": 2},
            2,
            "there are 3 (12 rows of a rank / train.micro_batch 4)",
        ),
    ],
)
def test_batches_that_do_not_fit(
    train: dict[str, Any], knobs: dict[str, Any], world: int, said: str
) -> None:
    with pytest.raises(WrongInput) as error:
        batch_plan(Train(**train), Parallel(**knobs), world)
    assert said in str(error.value)


def test_a_batch_is_dealt_over_its_shares_and_not_over_processes() -> None:
    plan = batch_plan(
        Train(global_batch=8, micro_batch=2), Parallel(tensor=2, shard=2, pipeline=2), 16
    )
    assert (plan.world, plan.per_rank, plan.micro_steps) == (4, 2, 1)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (("parallel.pipeline=2", "objective.kind=dpo"), "cannot be staged"),
        (
            ("parallel.tensor=2", "objective.kind=seq2seq"),
            (
                "parallel.tensor=2: the models of objective.kind seq2seq are shared by replicate"
                " and shard only"
            ),
        ),
        (
            ("parallel.context=2", "objective={kind: classify, labels: [a, b]}"),
            "parallel.context=2",
        ),
        (
            ("parallel.pipeline=2", "train.sample_every=5"),
            "train.sample_every is not possible with parallel.pipeline",
        ),
        (
            ("parallel.context=2", "train.evaluate_every=5", "train.evaluate_tasks=[loss]"),
            "train.evaluate_tasks is not possible with parallel.context",
        ),
        (("parallel.tensor=2", "train.sample_every=5"), "set parallel.sequence to false"),
        (
            ("parallel.tensor=2", "model.source=hf:a/b", "model.lora={dropout: 0.1}"),
            "model.lora.dropout 0.1 is not possible",
        ),
        (("parallel.virtual=2",), "parallel.virtual 2 is about parallel.pipeline, which is 1"),
        (
            ("parallel.pipeline=2", "parallel.virtual=2", "parallel.schedule=1f1b"),
            "has one stage a rank",
        ),
        (("parallel.pipeline=2", "parallel.schedule=zero_bubble"), "needs several stages a rank"),
        (
            ("memory.offload.activations=true", "memory.recompute.kind=full"),
            "choose one of the two",
        ),
        (("memory.offload.weights=true",), "set parallel.shard above 1"),
        (
            ("memory.offload.weights=true", "memory.offload.optimizer=0.5", "parallel.shard=2"),
            "set memory.offload.optimizer to 0",
        ),
        (("memory.recompute.layers=2",), "are for kind=full"),
        (
            ("precision.float8=rowwise", "objective.kind=seq2seq"),
            "precision.float8 is for decoders",
        ),
        (("train.profile={begin: 5, end: 4}",), "raise train.profile.end"),
        (
            ("model.neftune_alpha=5", "objective={kind: classify, labels: [a, b]}"),
            "model.neftune_alpha is for decoders",
        ),
        (
            (
                "model.neftune_alpha=5",
                "objective={kind: grpo, rewards: [{kind: exact}]}",
            ),
            "model.neftune_alpha: answers are sampled without noise",
        ),
        (("model.quantize=nf4",), "set model.lora={}, or model.quantize=null"),
        ((*QUANTIZED, "model.quantize.double=true"), "double is about the scales of nf4"),
        ((*QUANTIZED, "parallel.tensor=2"), "cuts matrices, beside model.quantize int8 across"),
        ((*QUANTIZED, "parallel.expert=2"), "parallel.expert 2 is not offered beside"),
        ((*QUANTIZED, "precision.master=stochastic"), "stochastic is not offered beside"),
        ((*QUANTIZED, "train.compile=true"), "train.compile is not offered beside"),
        (
            (*QUANTIZED, "memory.offload.weights=true", "parallel.shard=2"),
            "memory.offload.weights is not offered beside",
        ),
    ],
)
def test_what_no_mesh_can_do_is_refused_in_words(knobs: tuple[str, ...], said: str) -> None:
    with pytest.raises(WrongInput) as error:
        load_recipe(
            (), ["name=a", "data.train=[{source: a.jsonl}]", *knobs], environ={}, dotenv=None
        )
    assert said in str(error.value)


def loaded(tmp_path: Path, text: str, *overrides: str) -> Parallel:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"name: one\ndata: {{train: [{{source: text}}]}}\n{text}\n", encoding="utf-8")
    return load_recipe([file], list(overrides), environ={}, dotenv=None).parallel


def test_auto_is_a_word_for_a_section_to_which_settings_are_added(tmp_path: Path) -> None:
    assert loaded(tmp_path, "parallel: auto") == Parallel(degrees="auto")
    # What is set later does not silently bring back the degrees of a recipe without any.
    kept = Parallel(degrees="auto", reshard=False)
    assert loaded(tmp_path, "parallel: auto", "parallel.reshard=false") == kept
    assert loaded(tmp_path, "parallel: {shard: 8}", "parallel=auto") == Parallel(degrees="auto")
    given = Parallel(shard=8)
    assert loaded(tmp_path, "parallel: auto", "parallel.degrees=given", "parallel.shard=8") == given
    assert Parallel.model_validate("auto") == Parallel(degrees="auto")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parallel: atuo", r"yaml:3: `parallel` is 'atuo'; it should be `auto`, or a section"),
        (
            "parallel: {degrees: auto, tensor: 2}",
            r"yaml:3: parallel.tensor 2 beside parallel.degrees auto, which chooses it; set",
        ),
        ("parallel: {degres: auto}", "unknown knob `parallel.degres`; did you mean `parallel.degr"),
    ],
)
def test_auto_beside_degrees_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=message):
        loaded(tmp_path, text)


def test_degrees_that_are_not_decided_are_no_layout() -> None:
    with pytest.raises(WrongInput, match="parallel: auto is decided when training starts"):
        degrees_of(Parallel(degrees="auto"), 2)
