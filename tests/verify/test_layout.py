"""`ingot verify layout`: the user's recipe made small, which layouts are tried, the table and its
exit code, and what bad input gets.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT, WrongInput
from ingot.cli import verify as verbs
from ingot.config.degrees import AXES, Degrees
from ingot.config.models.presets import PRESETS
from ingot.config.recipe import Recipe
from ingot.config.shape import check_layout
from ingot.data.batches.samples import RowArrays
from ingot.data.columns.reader import IGNORE
from ingot.models.hf.config import read_hf_config
from ingot.models.native.config import DecoderConfig
from ingot.verify.layout import modes
from ingot.verify.layout.models import VOCABULARY, small_decoder, small_hub
from ingot.verify.layout.modes import (
    HUB_MODES,
    MODES,
    layout,
    layouts_for,
    mode_pairs,
    parse_layouts,
    scaled_layout,
)
from ingot.verify.layout.proof import LayoutProof, LayoutResult, verify_layout
from ingot.verify.layout.recipe import SEQ_LEN, cut_short, folded
from ingot.verify.layout.steps import LayoutDifference, ParameterShard, RankResult, compare
from tests.cli.commands import ingot
from tests.models.hf import tiny as hub_tiny
from tests.parallel.products import PAIRED, all_layouts
from tests.small import small_recipe

EQUAL = LayoutDifference(
    loss=1e-7,
    norm=1e-7,
    weights=3e-8,
    share=0.5,
    share_bound=0.52,
    where="step 3: model.norm.weight differs most, by 1e-8 of its norm",
)


def recipe(**knobs: Any) -> Recipe:
    return small_recipe(Path("somewhere"), **knobs)


def test_the_verb_prints_the_table_and_keeps_it(root: Path) -> None:
    values = small_recipe(root).model_dump(mode="json", exclude_unset=True)
    (root / "recipe.yaml").write_text(json.dumps(values), encoding="utf-8")
    done = ingot(
        "verify",
        "layout",
        str(root / "recipe.yaml"),
        "--layouts",
        "shard=2,recompute=full;tensor=4",
        timeout_s=300,
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == EXIT_DONE, done.stderr
    assert "shard 2, full recompute" in done.stdout
    assert "all 1 layouts equal one process" in done.stdout
    assert (
        "no case: tensor 4: parallel.tensor 4 does not divide the model's 2 key/value heads"
        in done.stdout
    )
    kept = json.loads((root / "runs" / "small" / "reports" / "layout.json").read_text())
    assert [(one["layout"], one["holds"]) for one in kept["layouts"]] == [
        ("shard 2, full recompute", True),
        ("tensor 4", None),
    ]
    first = kept["layouts"][0]
    assert first["degrees"] == {
        "pipeline": 1,
        "replicate": 1,
        "shard": 2,
        "context": 1,
        "tensor": 1,
        "expert": 1,
    }
    assert 0 <= first["difference"]["weights"] < kept["bounds"]["weights"]
    assert 0.49 < first["difference"]["share"] < first["difference"]["share_bound"] < 0.53


def test_help_shows_an_example() -> None:
    done = ingot("verify", "layout", "--help")
    assert done.returncode == EXIT_DONE
    assert "Example: ingot verify layout quickstart" in " ".join(done.stdout.split())


def test_data_that_are_not_prepared_are_one_line(tmp_path: Path) -> None:
    values = small_recipe(tmp_path).model_dump(mode="json", exclude_unset=True)
    (tmp_path / "recipe.yaml").write_text(json.dumps(values), encoding="utf-8")
    done = ingot("verify", "layout", str(tmp_path / "recipe.yaml"))
    assert done.returncode == EXIT_WRONG_INPUT
    assert "ingot prepare" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shards=2", "`shards=2` is not KNOB=VALUE with a knob of replicate, shard"),
        ("shard=2;tensor", "`tensor` is not KNOB=VALUE"),
        ("", "`` is not KNOB=VALUE"),
        ("shard=auto", "`shard=auto` says auto; give numbers"),
        ("shard=0", "`shard=0`: Input should be greater than 0"),
        ("shard=4,tensor=4", "takes 16 processes, 8 at most"),
        ("virtual=2", "parallel.virtual 2 is about parallel.pipeline"),
        ("recompute=some", "`recompute=some`"),
    ],
)
def test_wrong_layouts_are_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(WrongInput) as caught:
        verify_layout(small_recipe(tmp_path), text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layouts_are_read_with_their_knobs() -> None:
    first, second = parse_layouts(
        "shard=2, reshard=false, tensor=2 ;"
        " pipeline=2,virtual=2,schedule=zero_bubble,recompute=selective"
    )
    assert first.name == "shard 2 x tensor 2, kept"
    assert (first.processes, first.parallel.reshard, first.parallel.replicate) == (4, False, 1)
    assert second.name == "pipeline 2, zero bubble, virtual 2, selective recompute"
    assert len(parse_layouts("shard=2;shard=2")) == 1


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ({}, "replicate 2"),
        ({"replicate": 1}, "one process"),
        ({"shard": "auto"}, "shard 2"),
        ({"degrees": "auto"}, "shard 2"),
        ({"shard": 64}, "shard 8"),
        ({"replicate": 4, "shard": 8}, "replicate 2 x shard 4"),
        ({"shard": 16, "tensor": 8}, "shard 2 x tensor 4"),
        ({"shard": 12}, "shard 6"),
        ({"shard": 8, "expert": 8}, "shard 8 x expert 8"),
        ({"shard": 12, "expert": 4}, "shard 6 x expert 2"),
        ({"replicate": 2, "context": 2, "expert": 4}, "replicate 2 x context 2 x expert 4, ring"),
        ({"shard": 8, "tensor": 4, "expert": 32}, "shard 2 x tensor 4 x expert 8"),
        ({"shard": "auto", "tensor": 2, "pipeline": 2}, "pipeline 2 x shard 2 x tensor 2, auto"),
        (
            {"pipeline": 2, "replicate": 2, "shard": 2, "tensor": 2},
            "replicate 2 x shard 2 x tensor 2",
        ),
        (
            {"pipeline": 2, "virtual": 2, "replicate": 2, "shard": 2, "context": 2},
            "replicate 2 x shard 2 x context 2, ring",
        ),
        (
            {"pipeline": 4, "virtual": 2, "schedule": "zero_bubble", "shard": 8},
            "pipeline 2 x shard 4, zero bubble, virtual 2",
        ),
    ],
)
def test_a_large_layout_is_scaled_down(knobs: dict[str, Any], name: str) -> None:
    own = scaled_layout(recipe(parallel=json.dumps(knobs)))
    assert own.name == name
    assert own.processes <= 8


def test_a_layout_that_was_decided_is_the_recipes_own(tmp_path: Path) -> None:
    auto = small_recipe(tmp_path, parallel="auto")
    degrees = dict.fromkeys((*AXES, "expert"), 1) | {"tensor": 16}
    auto.folder.reports.mkdir(parents=True)
    kept = {"schema": 1, "degrees": degrees, "devices": {"memory": 1}, "settings": {"seed": 0}}
    auto.folder.layout.write_text(json.dumps(kept))
    assert scaled_layout(auto).name == "tensor 8"


def test_what_is_tried_for_a_recipe() -> None:
    own, *others = layouts_for(
        recipe(parallel=json.dumps({"shard": 8, "tensor": 4}), memory__recompute__kind="full")
    )
    assert own.name == "shard 2 x tensor 4, full recompute"
    names = [one.name for one in others]
    assert names[: len(MODES)] == [layout(**knobs).name for knobs in MODES.values()]
    assert names[len(MODES) :] == [
        "shard 2 x tensor 2",
        "shard 2, full recompute",
        "tensor 2, full recompute",
    ]
    seq2seq = recipe(
        objective=json.dumps({"kind": "seq2seq"}),
        model__source="hf:a/b",
        model__config=None,
        tokenizer__source=None,
        tokenizer__vocab_size=None,
    )
    assert [one.name for one in layouts_for(seq2seq)] == [
        layout(**MODES[mode]).name for mode in HUB_MODES
    ]


def test_a_torch_too_old_for_zero_bubble_tries_the_other_modes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = recipe(parallel=json.dumps(MODES["1f1b"]))
    every = [one.name for one in layouts_for(asked)]
    assert "left out" not in capsys.readouterr().err
    monkeypatch.setattr(modes, "ZERO_BUBBLE_SINCE", "99.0")
    assert [one.name for one in layouts_for(asked)] == [
        name for name in every if "zero bubble" not in name
    ]
    assert "zero bubble needs torch 99.0 and is left out" in capsys.readouterr().err
    assert layouts_for(recipe(parallel=json.dumps(MODES["zero bubble"])))[0].name in every


def test_the_table_has_every_mode_every_pair_and_six_products() -> None:
    names = {one.name for one in all_layouts()}
    assert names >= {layout(**knobs).name for knobs in MODES.values()}
    used = [
        {
            axis
            for axis in ("replicate", "shard", "tensor", "pipeline", "context")
            if getattr(one.degrees, axis) > 1
        }
        for one in all_layouts()
    ]
    axes = ("replicate", "shard", "tensor", "pipeline", "context")
    for first, axis in enumerate(axes):
        for other in axes[first + 1 :]:
            assert {axis, other} in used, f"{axis} x {other}"
    assert sum(len(one) >= 3 for one in used) >= 6
    assert {"shard", "tensor", "pipeline"} in used
    assert {"context", "tensor", "shard"} in used
    assert {one.processes for one in all_layouts()} >= {2, 4, 8}
    assert all(one.name in names for one in mode_pairs(PAIRED))


@pytest.mark.parametrize("name", PRESETS)
def test_a_small_model_is_of_its_family(name: str) -> None:
    large = DecoderConfig.from_hf(PRESETS[name])
    small = DecoderConfig.from_hf(small_decoder(PRESETS[name], SEQ_LEN))
    for same in ("tie_word_embeddings", "qkv_bias", "output_bias", "mlp_bias", "qk_norm", "norms"):
        assert getattr(small, same) == getattr(large, same), same
    assert set(small.ropes) == set(large.ropes)
    assert (
        small.num_attention_heads * large.num_key_value_heads
        == large.num_attention_heads * small.num_key_value_heads
    )
    assert {window is None for window in small.windows} == {
        window is None for window in large.windows
    }
    assert small.vocab_size == VOCABULARY
    if large.num_key_value_heads % 4 == 0:
        check_layout(layout(tensor=4).parallel, 4, small.to_hf(), SEQ_LEN)


@pytest.mark.parametrize(
    "own",
    [
        {"tensor": 8},
        {"context": 8, "context_by": "ulysses"},
        {"pipeline": 8},
        {"pipeline": 4, "virtual": 4},
    ],
    ids=str,
)
def test_a_small_model_can_be_in_the_layout_of_the_whole(own: dict[str, Any]) -> None:
    large = {
        **PRESETS["llama-3m"],
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    asked = layout(**own)
    small = small_decoder(large, SEQ_LEN, asked.parallel)
    check_layout(asked.parallel, asked.processes, small, SEQ_LEN)


@pytest.mark.parametrize(
    ("own", "sizes"),
    [
        ({"tensor": 3}, {"intermediate_size": 1536}),
        ({"tensor": 2, "shard": 3}, {"hidden_size": 576}),
        ({"tensor": 2, "shard": 3}, {"vocab_size": 24_000}),
        ({"shard": 6, "expert": 6}, {"n_routed_experts": 60}),
        ({"tensor": 5, "expert": 5}, {"n_routed_experts": 60, "moe_intermediate_size": 20}),
    ],
    ids=str,
)
def test_odd_ranks_share_a_small_model_if_they_can_share_the_whole(
    own: dict[str, Any], sizes: dict[str, int]
) -> None:
    undivided = {
        **PRESETS["llama-3m"],
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64),
        "num_attention_heads": 30,
        "num_key_value_heads": 30,
    }
    if "expert" in own:
        undivided |= {
            "model_type": "glm4_moe",
            "n_routed_experts": 64,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
        }
    asked = layout(**own)
    divided = {**undivided, **sizes}
    for whole in (divided, small_decoder(divided, SEQ_LEN, asked.parallel)):
        check_layout(asked.parallel, asked.processes, whole, 240)
    for whole in (undivided, small_decoder(undivided, SEQ_LEN, asked.parallel)):
        with pytest.raises(WrongInput, match="divide"):
            check_layout(asked.parallel, asked.processes, whole, 240)


def test_nothing_is_proved_of_a_layout_that_was_not_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    findings = [
        LayoutResult(layout(tensor=8), reason="no", possible=False),
        LayoutResult(layout(shard=2), EQUAL),
    ]
    for own, code in ((True, EXIT_FAILED), (False, EXIT_DONE)):
        proof = LayoutProof("verify layout small", findings, Path("layout.json"), own)
        assert verbs._compared(proof, as_json=False) == code
        last = capsys.readouterr().out.strip().splitlines()[-1]
        assert ("the recipe's own layout could not be tried" in last) == own


def test_windows_stay_and_become_short() -> None:
    sliding = {**PRESETS["llama-3m"], "model_type": "mistral", "sliding_window": 4096}
    assert set(DecoderConfig.from_hf(small_decoder(sliding, 48)).windows) == {16}
    mixed = {
        **PRESETS["llama-3m"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    }
    assert DecoderConfig.from_hf(small_decoder(mixed, 48)).windows == (None, None, 16, 16)


@pytest.mark.parametrize("name", [*hub_tiny.SEQ2SEQ, *hub_tiny.ENCODERS])
def test_a_small_model_of_transformers_is_built(name: str) -> None:
    kind = "seq2seq" if name in hub_tiny.SEQ2SEQ else "encoder"
    given = {
        **(hub_tiny.SEQ2SEQ if kind == "seq2seq" else hub_tiny.ENCODERS)[name],
        "hidden_dropout_prob": 0.1,
        "dropout_rate": 0.1,
        "attention_dropout": 0.1,
    }
    large = read_hf_config({**given, "vocab_size": 500}, kind, name)  # type: ignore[arg-type]
    small = read_hf_config(small_hub(large.to_hf()), kind, "small")  # type: ignore[arg-type]
    assert small.vocab_size == VOCABULARY
    model = small.build().train()
    assert all(
        module.p == 0.0 for module in model.modules() if isinstance(module, torch.nn.Dropout)
    )


def test_rows_are_cut_around_their_first_target_and_folded() -> None:
    tokens = np.arange(2 * 40).reshape(2, 40) + 1000
    labels = np.full((2, 40), IGNORE)
    labels[0, 30:34] = 2000
    row = RowArrays(tokens, labels, np.tile(np.arange(40), (2, 1)), np.ones((2, 40), np.int64))
    cut, targets, positions, _ = cut_short(row, 16)
    assert cut.shape == (2, 16)
    assert (targets[0] == 2000).sum() == 4
    assert positions[0, 0] == 24  # as far right as the row allows
    assert positions[1, 0] == 0
    assert list(folded(np.array([IGNORE, 0, 61, 123]))) == [IGNORE, 0, 0, 1]


def measured(
    weights: dict[str, torch.Tensor],
    loss: float = 1.0,
    norm: float = 2.0,
    part: tuple[slice, ...] = (),
) -> RankResult:
    pieces = {
        name: ParameterShard(tuple(tensor.shape), part, tensor[part] if part else tensor)
        for name, tensor in weights.items()
    }
    return RankResult(
        [loss],
        [norm],
        [pieces],
        {name: piece.values.numel() for name, piece in pieces.items()},
        [1],
    )


def test_differences_are_counted_from_every_rank() -> None:
    whole = {"model.a.weight": torch.ones(4, 2), "model.norm.weight": torch.ones(2)}
    alone, one, two = measured(whole), (slice(0, 2),), (slice(2, 4),)
    halves = [
        measured({"model.a.weight": whole["model.a.weight"]}, part=part) for part in (one, two)
    ]
    for half in halves:
        half.weights[0]["model.norm.weight"] = alone.weights[0]["model.norm.weight"]
    same = compare(halves, alone, Degrees(shard=2), 1)
    assert (same.loss, same.norm, same.weights) == (0.0, 0.0, 0.0)
    # Only the second rank is wrong, and only in a copy that the first one has too.
    halves[1].weights[0]["model.norm.weight"] = ParameterShard((2,), (), torch.tensor([1.0, 1.1]))
    wrong = compare(halves, alone, Degrees(shard=2), 1)
    assert wrong.weights == pytest.approx(0.1 / 10**0.5)
    assert wrong.where.startswith("step 1: model.norm.weight differs most, by 7.1e-02")
    # A part that nobody has, a loss that is no number.
    gone = compare(halves[:1], alone, Degrees(shard=2), 1)
    assert gone.weights == float("inf")
    assert "model.a.weight" in gone.where
    assert compare([replace(alone, losses=[float("nan")])], alone, Degrees(), 1).loss == float(
        "inf"
    )
    assert compare([replace(alone, local_sizes={"a": 1000})], alone, Degrees(), 1).share == 100


@pytest.mark.parametrize(
    ("worse", "said"),
    [
        ({"loss": 1e-4}, "loss 0.0001 > 1e-05"),
        ({"norm": 1e-4}, "norm"),
        ({"weights": 2e-6}, "weights 2e-06 > 1e-06"),
        ({"share": 1.0}, "share 1 > 0.52"),
        ({"loss": float("nan")}, "loss nan"),
    ],
)
def test_what_differs_fails_with_one_line(
    worse: dict[str, float], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [
        LayoutResult(layout(shard=2), EQUAL),
        LayoutResult(layout(tensor=2), replace(EQUAL, **worse)),
        LayoutResult(layout(context=2), reason="no", possible=False),
    ]
    proof = LayoutProof("verify layout small", findings, Path("layout.json"), own=True)
    assert not proof.holds
    assert verbs._compared(proof, as_json=False) == EXIT_FAILED
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith(
        "verify layout small: 1 of 2 layouts differ from one process; the first is tensor 2: "
    )
    assert said in last
    assert "step 3: model.norm.weight differs most" in last


def test_layouts_that_cannot_be_prove_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    proof = LayoutProof(
        "verify layout small",
        [LayoutResult(layout(context=2), reason="no", possible=False)],
        Path("layout.json"),
        own=False,
    )
    assert verbs._compared(proof, as_json=False) == EXIT_FAILED
    assert "not one of these layouts can be" in capsys.readouterr().out
    failed = LayoutProof(
        "verify layout small",
        [
            LayoutResult(layout(shard=2), EQUAL),
            LayoutResult(layout(shard=4), reason="rank 0 of 4 died"),
        ],
        Path("layout.json"),
        own=False,
    )
    assert verbs._compared(failed, as_json=False) == EXIT_FAILED
