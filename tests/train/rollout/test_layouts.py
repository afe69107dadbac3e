"""Training on rewards in every layout: the answers, losses and weights of one process, sampled from
weights that are those in training.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.errors import Failed
from ingot.base.runlog import read_lines
from ingot.checkpoints.store import committed
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.models.native.decoder import Decoder
from ingot.parallel.mesh import running_mesh
from ingot.train.rollout import policy
from ingot.train.rollout.rollout import Rollout
from ingot.train.trainer import train
from tests import tolerances
from tests.objectives.test_every_way import distance, logged, weights
from tests.parallel.proving import MODELS
from tests.patience import PATIENCE_S
from tests.ranks import run_ranks
from tests.train.rollout.digits import apart, digits_recipe, odd_known, write_pairs
from tests.train.stopping import train_until

UNEVEN = {
    "train__global_batch": 12,  # three prompts
    "train__micro_batch": 3,
    "train__optimizer": "{kind: sgd, lr: 0.5}",
    "train__clip_norm": None,
}
KL = {"kl": 0.1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard": (2, {"parallel__shard": 2}),
    "tensor": (2, {"parallel__tensor": 2}),
    "tensor, whole rows": (2, {"parallel__tensor": 2, "parallel__sequence": False}),
    "context": (2, {"parallel__context": 2}),
    "pipeline": (2, {"parallel__pipeline": 2}),
    "replicate and shard": (4, {"parallel__replicate": 2, "parallel__shard": 2}),
    "shard and tensor": (4, {"parallel__shard": 2, "parallel__tensor": 2}),
    "pipeline and shard": (4, {"parallel__pipeline": 2, "parallel__shard": 2}),
}


@pytest.fixture(scope="module")
def alone(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A run of one process."""
    with odd_known():
        recipe = apart(ready, tmp_path_factory.mktemp("alone") / "root", KL, **UNEVEN)
        train(recipe)
    return recipe


def variant(root: Path, name: str, base: str, **layout: Any) -> Recipe:
    """A run of another model than the plain one, ingested and prepared where that lacks."""
    source = {"model__source": base, "model__config": None}
    knobs: dict[str, Any] = {"train__steps": 2, **UNEVEN, **layout}
    if name.startswith("mixture"):
        folder = root.with_name(f"{root.name}-mixture")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**MODELS["qwen3_moe"], "vocab_size": 262}))
        source = {"model__source": str(folder), "model__config": None, "model__init": "random"}
    else:
        knobs |= {"model__lora": "{rank: 4}", "tokenizer__source": f"{base}/model"}
        knobs |= {"tokenizer__vocab_size": None}
    if name == "quantized":
        knobs |= {"model__quantize": "{kind: nf4}"}
    recipe = digits_recipe(root, KL, **{**source, **knobs})
    if not recipe.folder.columns.exists():
        write_pairs(root)
        ingest(recipe)
        prepare(recipe)
    return recipe


def variant_on_ranks(root: str, name: str, base: str, layout: dict[str, Any]) -> None:
    with odd_known():
        train(variant(Path(root), name, base, **layout))


def on_ranks(ready: str, target: str, objective: dict[str, Any], knobs: dict[str, Any]) -> None:
    with odd_known():
        train(apart(Path(ready), Path(target), objective, **knobs))


def same_as(found: Recipe, wanted: Recipe) -> None:
    """Both runs have the same answers, and the same losses and weights but for rounding."""
    assert list(read_lines(found.folder.samples)) == list(read_lines(wanted.folder.samples))
    assert logged(found, "reward/mean") == logged(wanted, "reward/mean")
    for key in ("train/loss", "train/grad_norm", "train/policy/kl"):
        assert logged(found, key) == pytest.approx(
            logged(wanted, key), rel=tolerances.SPLIT_LOSS, abs=tolerances.SPLIT_LOSS
        )
    assert max(logged(found, "train/policy/ratio_error")) < tolerances.FIRST_RATIO
    assert distance(weights(found), weights(wanted)) < tolerances.SPLIT_WEIGHTS


@pytest.mark.drawn("layouts of a training on rewards")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_numbers_of_one_process(
    name: str, ready: Path, alone: Recipe, tmp_path: Path
) -> None:
    world, layout = LAYOUTS[name]
    run_ranks(
        world, on_ranks, str(ready), str(tmp_path), KL, {**UNEVEN, **layout}, timeout_s=PATIENCE_S
    )
    same_as(digits_recipe(tmp_path, KL, **UNEVEN), alone)


def test_answers_that_ranks_do_not_divide_are_all_given(ready: Path, tmp_path: Path) -> None:
    """Three answers to each of five prompts, on two ranks that share rows."""
    objective, knobs = {"group": 3, **KL}, {**UNEVEN, "train__global_batch": 15, "train__steps": 1}
    wanted = apart(ready, tmp_path / "one", objective, **knobs)
    train(wanted)
    layout = {**knobs, "parallel__context": 2}
    run_ranks(
        2, on_ranks, str(ready), str(tmp_path / "two"), objective, layout, timeout_s=PATIENCE_S
    )
    same_as(digits_recipe(tmp_path / "two", objective, **knobs), wanted)


VARIANTS = {
    "adapter": {"parallel__shard": 2},
    "quantized": {"parallel__shard": 2},
    "mixture": {"parallel__shard": 2, "parallel__expert": 2},
    "mixture, tensor": {"parallel__tensor": 2, "parallel__expert": 2},
}


@pytest.mark.drawn("layouts of a training on rewards")
@pytest.mark.parametrize("name", VARIANTS)
def test_adapters_packed_matrices_and_experts_are_gathered(
    name: str, alone: Recipe, tmp_path: Path
) -> None:
    base = str(alone.folder.root)
    wanted = variant(tmp_path / "one", name, base)
    train(wanted)
    found = variant(tmp_path / "two", name, base, **VARIANTS[name])
    run_ranks(
        2, variant_on_ranks, str(tmp_path / "two"), name, base, VARIANTS[name], timeout_s=PATIENCE_S
    )
    same_as(found, wanted)


@pytest.mark.drawn("layouts of a training on rewards")
def test_in_bfloat16_the_sampler_computes_as_the_trainer_does(ready: Path, tmp_path: Path) -> None:
    """With shards, as on one process, the ratio is 1 but for the rounding of bfloat16."""
    layout = {**UNEVEN, "parallel__shard": 2, "precision__compute": "bf16"}
    run_ranks(2, on_ranks, str(ready), str(tmp_path), {}, layout, timeout_s=PATIENCE_S)
    errors = logged(digits_recipe(tmp_path, **UNEVEN), "train/policy/ratio_error")
    assert max(errors) < tolerances.BF16_LOSS


@pytest.mark.drawn("layouts of a training on rewards")
def test_replicas_in_bfloat16_sample_before_their_first_step(ready: Path, tmp_path: Path) -> None:
    """FSDP sums their gradients, and the weights in training are those that are sampled from."""
    knobs = {**UNEVEN, "train__steps": 1, "precision__compute": "bf16", "parallel__replicate": 2}
    run_ranks(2, on_ranks, str(ready), str(tmp_path), {}, knobs, timeout_s=PATIENCE_S)
    errors = logged(digits_recipe(tmp_path, **UNEVEN), "train/policy/ratio_error")
    assert max(errors) < tolerances.BF16_LOSS


LONG = {"train__steps": 6, "checkpoint__every": 4, **UNEVEN}


def killed(ready: str, target: str, until: int) -> None:
    """Two ranks with a shard each, up to a step; what a checkpoint does not hold is lost."""
    with odd_known(), running_mesh():
        recipe = apart(Path(ready), Path(target), {"updates": 3}, **LONG, parallel__shard=2)
        train_until(until, recipe)


@pytest.mark.drawn("layouts of a training on rewards")
def test_shards_that_were_killed_go_on_bit_for_bit_and_on_one_process(
    ready: Path, tmp_path: Path
) -> None:
    """The checkpoint of step 4 lies inside of the second rollout of three updates."""
    whole, broken, moved = (tmp_path / name for name in ("whole", "broken", "moved"))
    many, one = ({"updates": 3}, {**LONG, "parallel__shard": 2}), ({"updates": 3}, LONG)
    run_ranks(2, on_ranks, str(ready), str(whole), *many, timeout_s=PATIENCE_S)
    run_ranks(2, killed, str(ready), str(broken), 5, timeout_s=PATIENCE_S)
    shutil.copytree(broken, moved)
    run_ranks(2, on_ranks, str(ready), str(broken), *many, timeout_s=PATIENCE_S)
    wanted = digits_recipe(whole, *many[:1], **LONG)
    found = digits_recipe(broken, *many[:1], **LONG)
    assert next(iter(committed(found.folder.checkpoints))).step == 6
    pairs = weights(found), weights(wanted)
    assert all(torch.equal(pairs[0][name], pairs[1][name]) for name in pairs[1])
    assert list(read_lines(found.folder.samples)) == list(read_lines(wanted.folder.samples))
    elsewhere = apart(ready, moved, *one[:1], **one[1])
    train(elsewhere)
    assert list(read_lines(elsewhere.folder.samples)) == list(read_lines(wanted.folder.samples))
    assert distance(weights(elsewhere), weights(wanted)) < tolerances.SPLIT_WEIGHTS


def sampled_from_others(ready: str, target: str, how: str) -> str:
    """What a training says if the weights that answers are sampled from are not those in training:
    the copy of an earlier step, or a replica's own.
    """
    layout = "parallel__shard" if how == "stale" else "parallel__replicate"
    gather, sample, copies = policy.SampledPolicy._gather, Rollout._sample, []

    def once(self: policy.SampledPolicy) -> Decoder:
        copies.append(copies[0] if copies else gather(self))
        return copies[-1]

    def damaged(self: Rollout, *given: Any) -> Any:
        if self.mesh.rank == 1:
            weight = next(self._policy._trained.parameters())
            with torch.no_grad():
                weight[1, 2] = torch.nextafter(weight[1, 2], torch.tensor(9.0))
        return sample(self, *given)

    with odd_known(), pytest.MonkeyPatch.context() as patch:
        if how == "stale":
            patch.setattr(policy.SampledPolicy, "_gather", once)
        else:
            patch.setattr(Rollout, "_sample", damaged)
        recipe = apart(Path(ready), Path(target), {}, **UNEVEN, **{layout: 2})
        with pytest.raises(Failed) as told:
            train(recipe)
    return f"{len(copies)} {told.value}"


@pytest.mark.parametrize("how", ["stale", "damaged"])
def test_answers_from_other_weights_than_those_in_training_are_noticed(
    how: str, ready: Path, tmp_path: Path
) -> None:
    for said in run_ranks(
        2, sampled_from_others, str(ready), str(tmp_path), how, timeout_s=PATIENCE_S
    ):
        assert "sample from others than they train" in said
        assert said.startswith("2 " if how == "stale" else "0 ")


def test_a_checksum_changes_with_every_bit_and_adds_up_over_shards() -> None:
    values = torch.randn(5, 6)
    where = (slice(0, 5), slice(0, 6))
    whole = policy._checksum(values, where, torch.float32)
    parts = [(slice(0, 2), slice(0, 6)), (slice(2, 5), slice(0, 4)), (slice(2, 5), slice(4, 6))]
    found = sum(policy._checksum(values[part], part, torch.float32) for part in parts)
    assert found % policy.WORD == whole
    changed = values.clone()
    changed[3, 1] = torch.nextafter(changed[3, 1], torch.tensor(9.0))
    for other in (
        changed,
        values[[1, 0, 2, 3, 4]],
        values[:, [1, 0, 2, 3, 4, 5]],
        values.bfloat16(),
    ):
        assert policy._checksum(other, where, torch.float32) != whole


def test_a_checksum_knows_the_names() -> None:
    one = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    like = dict.fromkeys(dict(one.named_parameters()), torch.float32)
    other = torch.nn.ModuleDict({"a": one["b"], "b": one["a"]})
    assert policy.checksum(one, like) != policy.checksum(other, like)
