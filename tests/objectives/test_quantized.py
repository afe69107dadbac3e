"""Preferences and rewards over a base in few bits: what the policy is held against is the base that
it starts from, in the same bytes.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot.base.errors import Stopped
from ingot.base.runlog import read_lines
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.models.hf.folder import load_model
from ingot.models.quantized import Quantization
from ingot.models.quantized_experts import STACKS
from ingot.train import step as loop
from ingot.train.trainer import train
from tests import tolerances
from tests.models.tiny import FAMILY, make_reference
from tests.objectives.ways import make_ready, prepare_way, recipe_of
from tests.train.rollout.digits import apart as digits_apart
from tests.train.rollout.digits import made_ready as digits_ready
from tests.train.rollout.digits import odd_known

WAYS = ("dpo-lora", "kto-lora", "reward-lora")
KNOBS: dict[str, Any] = {
    "model__lora": {"rank": 4, "alpha": 8},
    "model__neftune_alpha": None,
    "model__quantize": "nf4",
    "train__steps": 6,
    "train__optimizer__lr": 0.02,
    "precision__export": "fp32",
    "track__every": 1,
}


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ready(tmp_path_factory.mktemp("quantized") / "root", ())


def prepared(ready: Path, target: Path, way: str, **knobs: Any) -> Recipe:
    prepare_way(ready, way)
    recipe = recipe_of(ready, way, output=str(target / "runs"), **{**KNOBS, **knobs})
    shutil.copytree(ready / "runs" / way / "data", recipe.folder.data)
    return recipe


def logged(recipe: Recipe, key: str) -> list[float]:
    return [line[key] for line in read_lines(recipe.folder.metrics) if key in line]


def assert_merged_into_the_rounded_base(recipe: Recipe, name: str) -> None:
    """The export has the matrix that training computed with, and the product."""
    adapter = load_file(recipe.folder.adapter / "adapter_model.safetensors")
    base = load_file(Path(recipe.model.source) / "model" / "model.safetensors")
    found = load_file(recipe.folder.model / "model.safetensors")
    inner = f"base_model.model.{name}"
    product = adapter[f"{inner}.lora_B.weight"] @ adapter[f"{inner}.lora_A.weight"] * 2
    assert product.any()
    rounded = Quantization("nf4").rounded(base[f"{name}.weight"].float())
    assert (found[f"{name}.weight"] - product - rounded).abs().max() < 1e-6


@pytest.mark.drawn("ways over a base in few bits")
@pytest.mark.parametrize("way", WAYS)
def test_it_learns_and_begins_at_its_reference(way: str, ready: Path, tmp_path: Path) -> None:
    recipe = prepared(ready, tmp_path, way)
    train(recipe)
    losses = logged(recipe, "train/loss")
    assert losses[-1] < losses[0]
    if way == "dpo-lora":
        assert losses[0] == pytest.approx(math.log(2), abs=tolerances.NLL_FP32)
        assert abs(logged(recipe, "train/rewards/margin")[0]) < tolerances.LOGPROB
    if way == "kto-lora":
        # A reward of 0 has half of each answer's weight.
        assert abs(logged(recipe, "train/rewards/margin")[0]) < tolerances.LOGPROB
    assert_merged_into_the_rounded_base(recipe, "model.layers.0.mlp.up_proj")


def rounded_source(source: Path, target: Path) -> Path:
    """A model folder whose linear layers are the numbers that their four bits stand for."""
    shutil.copytree(source, target)
    (target / "ingot.json").unlink()
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = Quantization("nf4").rounded(tensor.float())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.drawn("preferences over a base in few bits")
@pytest.mark.parametrize("kind", ["ipo", "simpo", "orpo"])
def test_it_begins_as_the_rounded_base_does_and_resumes_bit_for_bit(
    kind: str, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_way(ready, "dpo-lora")
    teacher = ready / "runs" / "teacher" / "model"
    plain = rounded_source(teacher, tmp_path / "rounded")

    def made(place: str, **knobs: Any) -> Recipe:
        given = {
            "objective": {"kind": kind},
            "output": str(tmp_path / place),
            "checkpoint__every": 3,
        }
        recipe = recipe_of(ready, "dpo-lora", **{**KNOBS, **given, **knobs})
        ingest(recipe)
        prepare(recipe)
        return recipe

    whole = made("whole")
    train(whole)
    own = {
        "model__source": str(plain),
        "tokenizer__source": str(plain),
        "tokenizer__vocab_size": None,
        "model__config": None,
    }
    dense = made("dense", **own, model__quantize=None)
    train(dense)
    losses = logged(whole, "train/loss")
    # IPO begins with the same number whatever the base is: its second one tells.
    assert losses[:2] == pytest.approx(logged(dense, "train/loss")[:2], rel=tolerances.LOSS_FP32)
    assert losses[-1] < losses[0]
    broken, original = made("broken"), loop.run_steps

    def stop_at(context: loop.StepContext, first: int, last: int) -> loop.LoopEnd:
        original(context, first, 4)
        raise Stopped("as if killed", signum=9, committed=True)

    with monkeypatch.context() as patch:
        patch.setattr("ingot.train.trainer.run_steps", stop_at)
        with pytest.raises(Stopped):
            train(broken)
    train(broken)
    assert logged(broken, "train/loss") == losses
    name = "adapter_model.safetensors"
    found, wanted = (load_file(one.folder.adapter / name) for one in (broken, whole))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.drawn("ways over a base in few bits")
def test_a_reference_has_tables_of_its_own_for_each_base(ready: Path, tmp_path: Path) -> None:
    """A table of the whole base, computed before, is not that of the quantised one."""
    train(prepared(ready, tmp_path, "dpo-lora", model__quantize=None))
    packed = recipe_of(ready, "dpo-lora", output=str(tmp_path / "runs"), **KNOBS)
    train(packed, fresh=True)
    assert len(list(packed.folder.reference.glob("train-*.npy"))) == 2
    assert logged(packed, "train/loss")[0] == pytest.approx(math.log(2), abs=tolerances.NLL_FP32)


@pytest.mark.drawn("ways over a base in few bits")
def test_answers_are_sampled_from_the_policy_in_few_bits(tmp_path: Path) -> None:
    """The ratio to what the sampler noted is 1, and the penalty for leaving the reference 0."""
    with odd_known():
        ready = digits_ready(tmp_path / "root")
        recipe = digits_apart(
            ready,
            tmp_path / "run",
            {"kl": 0.1},
            model__source=str(make_reference(tmp_path / "source", vocab_size=300)),
            model__config=None,
            tokenizer__source="train",
            model__lora={"rank": 4},
            model__quantize="nf4",
            track__every=1,
        )
        train(recipe)
    assert max(logged(recipe, "train/policy/ratio_error")) < tolerances.NLL_FP32
    assert abs(logged(recipe, "train/policy/kl")[0]) < tolerances.EXACT
    assert logged(recipe, "train/policy/kl")[-1] > tolerances.EXACT


@pytest.mark.drawn("ways over a base in few bits")
def test_a_mixture_is_trained_and_exported_as_it_was_trained(ready: Path, tmp_path: Path) -> None:
    """Its experts as their bytes stand for."""
    source = make_reference(tmp_path / "mixture", **FAMILY["mixtral"], vocab_size=400)
    given = {
        "model__source": str(source),
        "model__config": None,
        "tokenizer__source": str(ready / "runs" / "teacher" / "model"),
        "tokenizer__vocab_size": None,
    }
    recipe = prepared(ready, tmp_path, "sft-lora", **given)
    train(recipe)
    before, after = (
        dict(load_model(folder, device=torch.device("cpu")).named_parameters())
        for folder in (source, recipe.folder.model)
    )
    stacks = [name for name in before if name.endswith(STACKS)]
    assert stacks
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(after[name], Quantization("nf4").rounded(before[name].detach()))
    for name in stacks:
        for found, matrix in zip(after[name], before[name], strict=True):
            assert torch.equal(found, Quantization("nf4").rounded(matrix.detach())), name
