"""A recipe made so small that many ranks of it train on one CPU: few layers, a narrow model, short
rows, a small vocabulary.

Everything that decides how it can be distributed stays: the kind of model, tied weights, biases,
norms, windows, the ratio of heads to key/value heads, the objective, the adapter. Rows are the
prepared ones, truncated, with ids modulo the small vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.base.environment import Ranks
from ingot.config.degrees import AXES, degrees_of
from ingot.config.models.experts import ExpertsConfig
from ingot.config.models.family import FULL, SLIDING, family_of
from ingot.config.models.rotary import ROTARY, overridden
from ingot.config.models.source import CONFIG, model_config
from ingot.config.recipe import Recipe
from ingot.config.sections.layout import MemorySettings, Parallel
from ingot.config.sections.objective import TWO_ROWS
from ingot.config.shape import batch_plan
from ingot.data.batches.rows import PackedRow, Rows
from ingot.data.batches.samples import SampleArrays, Samples
from ingot.data.columns.reader import IGNORE, Ids
from ingot.models.hf.config import read_hf_config
from ingot.models.hf.tensorfile import save_weights
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.models.spec import ModelSpec
from ingot.parallel.mesh import Mesh
from ingot.train.setup import TrainSetup, make_setup
from ingot.verify.layout.modes import scaled_layout

VOCABULARY = 61
"""The vocabulary size: a prime, so that no number of ranks divides it."""
SEQ_LEN = 48
"""The most tokens in a row; divisible by up to eight ranks with two chunks each."""
BATCH, STEPS = 8, 3
LAYERS = 4
"""Enough layers for two stages on each of two ranks, or one on each of four; more where the
recipe's own layout has more stages.
"""
_WIDTH, _FEED_FORWARD, _HEAD, _MOST_KV_HEADS = 40, 80, 8, 4
_EXPERTS, _EXPERT_WIDTH = 8, 24
_STD = 0.1
"""Standard deviation of the initial weights: large enough that every part of the model matters."""
_NARROW: dict[str, int | float] = {
    **dict.fromkeys(
        (
            "num_layers",
            "num_decoder_layers",
            "encoder_layers",
            "decoder_layers",
            "num_hidden_layers",
            "n_layers",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "num_attention_heads",
            "n_heads",
        ),
        4,
    ),
    **dict.fromkeys(("d_model", "hidden_size", "dim", "pooler_hidden_size"), 32),
    **dict.fromkeys(
        ("d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size", "hidden_dim"), 48
    ),
    "d_kv": 8,
    "embedding_size": 16,
    "vocab_size": VOCABULARY,
    "initializer_range": _STD,
    "init_std": _STD,
    "initializer_factor": 1.0,
}
"""Sizes of transformers' models by their names in configurations."""


@dataclass(frozen=True)
class SmallRun:
    """A recipe and the small one that is trained in its place in every layout. Picklable."""

    original: Recipe
    """The user's recipe, but for one process."""
    small: Recipe
    model_spec: ModelSpec
    teacher: Path | None
    seq_len: int

    def laid_out(self, parallel: Parallel, memory: MemorySettings, folder: Path) -> SmallRun:
        """The same in another layout, with its output in `folder`. Raises ValueError for a layout
        that the recipe rules out.
        """
        values = set_knobs(self.small)
        data = degrees_of(parallel, _world(parallel)).data
        # Several micro-batches, the last one partly empty, except for pipelines, which need full
        # ones.
        size = {1: 5, 2: 3}.get(data, 1)
        if parallel.pipeline > 1:
            size = BATCH // data // max(4, int(parallel.pipeline)) or 1
        values |= {
            "parallel": parallel.model_dump(mode="json"),
            "memory": memory.model_dump(mode="json"),
            "output": str(folder),
            "name": "small",
        }
        values["train"] |= {"micro_batch": size}
        return replace(self, small=Recipe.model_validate(values))

    def with_train(self, **knobs: Any) -> SmallRun:
        """The same with other knobs of `train`."""
        return replace(
            self,
            small=self.small.model_copy(
                update={"train": self.small.train.model_copy(update=knobs)}
            ),
        )

    def plan(self, mesh: Mesh) -> TrainSetup:
        """The training setup of this rank."""
        plan = _plan_of(json.dumps(set_knobs(self.original)))
        rows, held_out = (_small_rows(rows, self.seq_len) for rows in (plan.rows, plan.held_out))
        return replace(
            plan,
            recipe=self.small,
            batch=batch_plan(self.small.train, self.small.parallel, mesh.world),
            model_spec=self.model_spec,
            teacher=self.teacher,
            rows=rows,
            held_out=held_out,
            origin=None,
            begin=0,
            last=STEPS,
            compute="fp32",
        )


def make_small(recipe: Recipe, folder: Path) -> SmallRun:
    """Make a recipe small, with layers and heads enough for its own layout; a small teacher is
    written into `folder`. Raises WrongInput if recipe, prepared data and model do not fit together.
    """
    own = scaled_layout(recipe).parallel
    asked = recipe.model_copy(update={"parallel": Parallel(), "memory": MemorySettings()})
    plan = _plan_of(json.dumps(set_knobs(asked)))
    seq_len = min(SEQ_LEN, recipe.data.seq_len // 16 * 16 or recipe.data.seq_len)
    teacher = (
        None if plan.teacher is None else _small_teacher(plan.teacher, folder / "teacher", seq_len)
    )
    return SmallRun(
        asked,
        _small_recipe(asked, seq_len, teacher),
        _small_spec(plan.model_spec, seq_len, own),
        teacher,
        seq_len,
    )


@cache
def _plan_of(recipe: str) -> TrainSetup:
    """The setup of the recipe, made once per process, since reading a large tokenizer takes a
    second.
    """
    return make_setup(Recipe.model_validate_json(recipe), Mesh(Ranks(), torch.device("cpu")))


def set_knobs(recipe: Recipe) -> dict[str, Any]:
    """The knobs that were set explicitly: whether one was set decides whether some recipes are
    valid.
    """
    values: dict[str, Any] = recipe.model_dump(mode="json", exclude_unset=True)
    return {**{section: {} for section in ("train", "precision", "checkpoint", "data")}, **values}


def _world(parallel: Parallel) -> int:
    """The number of processes of a layout without `auto`."""
    return math.prod(int(getattr(parallel, axis)) for axis in AXES)


def _small_recipe(recipe: Recipe, seq_len: int, teacher: Path | None) -> Recipe:
    """The small recipe: float32, plain SGD (Adam would hide a wrong scale), no dropout."""
    values = set_knobs(recipe)
    values["train"] |= {
        "steps": STEPS,
        "epochs": None,
        "tokens": None,
        "global_batch": BATCH,
        "micro_batch": BATCH,
        "optimizer": {"kind": "sgd", "lr": 1.0},
        "clip_norm": None,
        "early_stop": None,
        "evaluate_every": None,
        "evaluate_tasks": [],
        "sample_every": None,
        "start_from": None,
        "reset_optimizer": False,
        "start_step": None,
        "compile": False,
        "profile": None,
    }
    values["precision"] |= {"compute": "fp32", "master": "fp32", "reduce": "fp32", "float8": "none"}
    values["checkpoint"] |= {"best": None}
    values["data"] |= {"seq_len": seq_len}
    if (lora := recipe.model.lora) is not None:
        values["model"]["lora"] |= {"rank": min(lora.rank, 4), "dropout": 0.0, "adapter": None}
    if recipe.objective.needs_teacher:
        values["objective"] |= {"teacher": str(teacher)}
    if recipe.objective.needs_reference:
        values["objective"] |= {"reference": None}
    return Recipe.model_validate(values)


def _small_spec(model_spec: ModelSpec, seq_len: int, own: Parallel) -> ModelSpec:
    values = model_spec.config.to_hf()
    if isinstance(model_spec.config, DecoderConfig):
        return ModelSpec(
            "decoder", DecoderConfig.from_hf(small_decoder(values, seq_len, own)), None, True
        )
    return ModelSpec(
        model_spec.kind,
        read_hf_config(
            small_hub(values),
            model_spec.config.kind,
            "the small model",
            labels=model_spec.config.labels,
            unproved=True,
        ),
        None,
        True,
    )


def small_decoder(
    values: Mapping[str, Any],
    seq_len: int,
    own: Parallel = Parallel(),  # noqa: B008 (frozen)
) -> dict[str, Any]:
    """A configuration of the same family, by Hugging Face's names, that `own` can distribute if the
    whole one can.
    """
    config = DecoderConfig.from_hf(values)
    layers = max(LAYERS, int(own.pipeline) * own.virtual)
    shared = int(own.tensor) * (int(own.context) if own.context_by == "ulysses" else 1)
    kv_heads = config.num_key_value_heads
    if kv_heads > _MOST_KV_HEADS:
        kv_heads = math.gcd(kv_heads, math.lcm(_MOST_KV_HEADS, shared))
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": _WIDTH,
        "intermediate_size": _FEED_FORWARD,
        "num_hidden_layers": layers,
        "head_dim": _HEAD,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": (
            kv_heads * (config.num_attention_heads // config.num_key_value_heads)
        ),
        "initializer_range": _STD,
        "max_position_embeddings": max(
            int(values.get("max_position_embeddings") or 0), config.max_position_embeddings, seq_len
        ),
    }
    if config.experts is not None:
        sizes |= _small_experts(values, config.experts, dense=not all(config.sparse))
    windows = [window for window in config.windows if window is not None]
    if windows:
        sizes["sliding_window"] = max(2, min(*windows, seq_len // 3))
        if family_of(values).windows == "pattern" or values.get("layer_types") is not None:
            kinds = list(
                dict.fromkeys(FULL if window is None else SLIDING for window in config.windows)
            )
            sizes["layer_types"] = [kinds[layer % len(kinds)] for layer in range(layers)]
        elif "max_window_layers" in values:
            sizes["max_window_layers"] = layers // 2 if None in config.windows else 0
    if family_of(values).rotary == "listed" and None in config.ropes:
        sizes["no_rope_layers"] = [layer % 2 for layer in range(layers)]
    share = next((rope.share for rope in config.ropes if rope is not None), 1.0)
    if (counted := family_of(values).rotated) and values.get(counted) is not None:
        sizes[counted] = int(_HEAD * share)
    for name in ROTARY:
        scaling = values.get(name) or {}
        if "short_factor" in scaling:
            pairs = int(_HEAD * (scaling.get("partial_rotary_factor") or share)) // 2
            shorter = {key: scaling[key][:pairs] for key in ("short_factor", "long_factor")}
            sizes[name] = {**scaling, **shorter}
    return overridden(values, sizes)


def _small_experts(
    values: Mapping[str, Any], experts: ExpertsConfig, *, dense: bool
) -> dict[str, Any]:
    """At most `_EXPERTS` of them, and one dense layer where there are any."""
    keys = family_of(values).experts
    assert keys is not None
    named = [key for key in keys.count if values.get(key) is not None] or keys.count[:1]
    sizes: dict[str, Any] = dict.fromkeys(named, min(experts.count, _EXPERTS))
    sizes["num_experts_per_tok"] = min(experts.chosen, _EXPERTS // 2)
    if keys.width != "intermediate_size":
        sizes[keys.width] = min(experts.width, _EXPERT_WIDTH)
    if keys.dense_until is not None:
        sizes[keys.dense_until] = int(dense)
    elif dense:
        sizes |= {"mlp_only_layers": [0], "decoder_sparse_step": 1}
    if experts.groups > 1:
        sizes |= {"n_group": 2, "topk_group": min(experts.groups_chosen, 2)}
    return sizes


def small_hub(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a model of transformers, for the sizes in `_NARROW`; dropout is off, since its
    masks depend on the layout.
    """
    made = {**values, **_NARROW}
    for name, value in values.items():
        if ("dropout" in name or "layerdrop" in name) and isinstance(value, float):
            made[name] = 0.0
        if name.endswith("_token_id") and isinstance(value, int):
            made[name] = value % VOCABULARY
    return made


def _small_teacher(folder: Path, target: Path, seq_len: int) -> Path:
    """A small model of the teacher's family with random weights."""
    values = small_decoder(model_config(folder), seq_len)
    model = Decoder(DecoderConfig.from_hf(values))
    init_weights(model, seed=1)
    target.mkdir(parents=True)
    save_weights({name: parameter.detach() for name, parameter in model.named_parameters()}, target)
    (target / CONFIG).write_text(json.dumps(values), encoding="utf-8")
    return target


def _small_rows(rows: Rows | Samples, seq_len: int) -> Rows | Samples:
    return SmallSamples(rows, seq_len) if isinstance(rows, Samples) else SmallRows(rows, seq_len)


class SmallRows(Rows):
    """Rows truncated to the part where their targets begin. Every other row of a single document is
    split into two, so that there are documents to isolate.
    """

    def __init__(self, whole: Rows, seq_len: int) -> None:
        vars(self).update(vars(whole))
        self._whole, self.seq_len = whole, seq_len

    def batch(self, ids: Sequence[int], out: Ids | None = None) -> PackedRow:
        tokens, labels, positions, segments = cut_short(self._whole.batch(ids), self.seq_len)
        middle = self.seq_len // 2
        for place, row in enumerate(ids):
            if row % 2 and segments[place].min() == segments[place].max() and middle:
                segments[place, middle:] += 1
                positions[place, middle:] -= positions[place, middle]
                labels[place, middle - 1] = IGNORE
        made = PackedRow(*(np.empty((4, len(ids), self.seq_len), np.int64) if out is None else out))
        for target, values in zip(
            made, (folded(tokens), folded(labels), positions, segments), strict=True
        ):
            target[:] = values
        return made


class SmallSamples(Samples):
    """Samples truncated: preferences to where the answers begin, others to their beginning."""

    def __init__(self, whole: Samples, seq_len: int) -> None:
        vars(self).update(vars(whole))
        self._whole, self.seq_len = whole, seq_len

    def fields(
        self, ids: Sequence[int], count: int | None = None, places: Sequence[int] | None = None
    ) -> SampleArrays:
        made = self._whole.fields(ids, count, places)
        if self.kind in TWO_ROWS:
            tokens, labels, positions, segments = cut_short(made, self.seq_len)
            return SampleArrays(folded(tokens), folded(labels), positions, segments)
        labels = made.labels if made.labels.ndim == 1 else folded(made.labels[:, : self.seq_len])
        tokens, positions, segments = (
            values[:, : self.seq_len] for values in (made.tokens, made.positions, made.segments)
        )
        return SampleArrays(folded(tokens), labels, positions, segments)


def cut_short(fields: PackedRow | SampleArrays, seq_len: int) -> tuple[Ids, Ids, Ids, Ids]:
    """The `seq_len` positions of rows `[R, S]` that begin shortly before each row's first
    target.
    """
    length = fields.tokens.shape[1]
    first = (fields.labels != IGNORE).argmax(axis=1) - seq_len // 4
    chosen = first.clip(0, max(0, length - seq_len))[:, None] + np.arange(min(seq_len, length))
    tokens, labels, positions, segments = (
        np.take_along_axis(values, chosen, axis=1) for values in fields
    )
    return tokens, labels, positions, segments


def folded(ids: Ids) -> Ids:
    """Ids modulo the small vocabulary; -100 stays."""
    return np.where(ids < 0, ids, ids % VOCABULARY)
