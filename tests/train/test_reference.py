"""The reference of preferences: computed once, for the pairs that training comes to, and never
taken for another one's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.layout import Parallel
from ingot.data.batches.loader import Batch, fixed_batches
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.models.device import computing_in
from ingot.models.kinds import AnyModel
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.train import reference
from ingot.train.build import build_train_state
from ingot.train.reference import open_reference, reference_tables
from ingot.train.setup import make_setup
from ingot.train.trainer import train
from tests import tolerances
from tests.models.tiny import make_reference
from tests.ranks import run_ranks
from tests.small import TINY_MODEL, small_recipe
from tests.train.stopping import train_until


def recipe_of(root: Path, **knobs: Any) -> Recipe:
    given = {
        "objective": {"kind": "dpo"},
        "data__train": [{"source": str(root / "pairs.jsonl")}],
        "tokenizer__template": "chatml",
        "tokenizer__vocab_size": 300,
        "data__seq_len": 64,
        "data__validation__fraction": 0.2,
        "train__steps": 3,
        "train__evaluate_every": 3,
        "train__evaluate_rows": 2,
        **knobs,
    }
    return small_recipe(root, **given)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    lines = [
        {
            "prompt": f"Which way {number}?",
            "chosen": "left " * (number % 5 + 1),
            "rejected": "right",
        }
        for number in range(60)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = recipe_of(tmp_path)
    ingest(recipe)
    prepare(recipe)
    return tmp_path


def tables(recipe: Recipe) -> dict[str, np.ndarray]:
    return {path.name: np.load(path) for path in sorted(recipe.folder.reference.glob("*.npy"))}


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(recipe.folder.model / "model.safetensors")


def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which references are opened from now on."""
    names: list[str] = []
    original = reference.create_model

    def build(model_spec: Any, *arguments: Any, **more: Any) -> Any:
        names.append(str(model_spec.folder))
        return original(model_spec, *arguments, **more)

    monkeypatch.setattr(reference, "create_model", build)
    return names


def test_it_is_computed_once_and_only_where_it_is_needed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe_of(root))
    first = tables(recipe_of(root))
    assert len(first) == 2
    known = {
        name.partition("-")[0]: int(np.isfinite(table).all(axis=1).sum())
        for name, table in first.items()
    }
    assert known == {
        "train": 12,
        "validation": 2,
    }, "three steps of four pairs, and two held-out ones"
    names = opened(monkeypatch)
    train(recipe_of(root), fresh=True)
    assert not names, "what is known is not computed again"
    train(recipe_of(root, train__steps=5), fresh=True)
    assert len(names) == 1, "a longer training needs more of it"
    longer = tables(recipe_of(root))
    assert longer.keys() == first.keys()
    for name, table in first.items():
        there = np.isfinite(table)
        assert np.array_equal(longer[name][there], table[there])


@pytest.mark.drawn("a table of another reference", keep=2)
def test_another_reference_has_a_table_of_its_own(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe_of(root))
    names = opened(monkeypatch)
    for seed in (1, 2):
        folder = make_reference(root / f"reference{seed}", seed=seed, vocab_size=300)
        train(recipe_of(root, objective={"kind": "dpo", "reference": str(folder)}), fresh=True)
    assert names == [str(root / "reference1"), str(root / "reference2")]
    assert len(tables(recipe_of(root))) == 6
    (root / "reference2" / "config.json").write_text(
        (root / "reference2" / "config.json")
        .read_text()
        .replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-3')
    )
    train(
        recipe_of(root, objective={"kind": "dpo", "reference": str(root / "reference2")}),
        fresh=True,
    )
    assert names[2:] == [str(root / "reference2")], "the same folder with another model in it"


def test_one_that_reads_other_text_is_refused(root: Path) -> None:
    """Ids of another tokenizer are numbers that it would take for other words in silence; special
    tokens that it does not know, such as those of chats, are no hindrance.
    """
    recipe = recipe_of(root, train__steps=1)
    folder = make_reference(root / "other", vocab_size=300)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_text((recipe.folder.tokenizer / file).read_text())
    named = recipe_of(root, train__steps=1, objective={"kind": "dpo", "reference": str(folder)})
    own = json.loads((folder / "tokenizer.json").read_text())
    own["added_tokens"][-1]["content"] += "|"
    (folder / "tokenizer.json").write_text(json.dumps(own))
    train(named)
    ids = own["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (folder / "tokenizer.json").write_text(json.dumps(own))
    said = rf"reads the id {ids['b']} as 'b', which stands for 'a' in the data; choose a reference"
    with pytest.raises(WrongInput, match=said):
        train(named, fresh=True)


@pytest.mark.drawn("a table of another reference", keep=2)
def test_rows_that_are_cut_otherwise_have_a_table_of_their_own(root: Path) -> None:
    train(recipe_of(root))
    left = recipe_of(root, data__truncate="left")
    prepare(left)
    train(left, fresh=True)
    assert len(tables(left)) == 4


def log_probabilities(model: AnyModel, batch: Batch, mesh: Mesh) -> torch.Tensor:
    token = CrossEntropy().token
    with torch.no_grad(), computing_in("bf16", mesh.device):
        return model.eval()(batch.tokens, batch.positions, None, batch.labels, token)


@pytest.mark.parametrize("kept", ["whole", "stochastic", "adapter"])
def test_in_bf16_the_policy_begins_at_its_reference(kept: str, root: Path) -> None:
    """Float32 weights under autocast give other numbers than the policy's, which are cast."""
    knobs: dict[str, Any] = {"precision__compute": "bf16"}
    if kept == "stochastic":
        knobs["precision__master"] = "stochastic"
    if kept == "adapter":
        folder = make_reference(root / "base", seed=1, vocab_size=300)
        knobs |= {"model__source": str(folder), "model__config": None, "model__lora": {"rank": 4}}
    recipe = recipe_of(root, **knobs)
    with running_mesh(Parallel()) as mesh:
        setup = make_setup(recipe, mesh)
        held = open_reference(setup, mesh)
        policy = build_train_state(setup, None, reference_tables(setup, mesh), mesh).model
        assert {one.dtype for one in held.parameters()} == {torch.bfloat16}
        batch = next(fixed_batches(setup.rows, [0, 1], 2))
        expected = log_probabilities(policy, batch, mesh)
        assert torch.equal(log_probabilities(held, batch, mesh), expected)


FP32, BF16 = ({"precision__compute": compute} for compute in ("fp32", "bf16"))


@pytest.mark.drawn("a table of another reference", keep=2)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FP32, BF16),
        (BF16, {**BF16, "precision__master": "stochastic"}),
        (FP32, {**FP32, "model__config": {**TINY_MODEL, "rope_theta": 500.0}}),
        (FP32, {**FP32, "data__seq_len": 48}),
    ],
)
def test_what_gives_other_numbers_has_a_table_of_its_own(
    one: dict[str, Any], other: dict[str, Any], root: Path
) -> None:
    with running_mesh(Parallel()) as mesh:
        for knobs in (one, other):
            prepare(recipe_of(root, **knobs))
            reference_tables(make_setup(recipe_of(root, **knobs), mesh), mesh)
    assert len(tables(recipe_of(root))) == 4


def on_ranks(root: str) -> None:
    train(recipe_of(Path(root), name="shared"))


def test_ranks_share_the_work_and_the_table(root: Path) -> None:
    train(recipe_of(root))
    shared = recipe_of(root, name="shared")
    ingest(shared)
    prepare(shared)
    run_ranks(2, on_ranks, str(root))
    alone, together = tables(recipe_of(root)), tables(shared)
    assert alone.keys() == together.keys()
    for name, table in alone.items():
        np.testing.assert_allclose(together[name], table, rtol=tolerances.NLL_FP32)


def test_a_resumed_training_keeps_the_reference_that_it_began_with(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy as the other run had trained it, where that goes on and deletes the checkpoint:
    what was computed before is enough, and no later model takes its place.
    """

    def of(name: str, steps: int, **knobs: Any) -> Recipe:
        recipe = recipe_of(root, name=name, train__steps=steps, **knobs)
        if not recipe.folder.data.exists():
            shutil.copytree(recipe_of(root).folder.data, recipe.folder.data)
        return recipe

    other = of("other", 2, checkpoint__keep=1)
    train(other)
    start = {"train__start_from": str(other.folder.root), "checkpoint__every": 1}
    whole, broken = (of(name, 6, **start) for name in ("whole", "broken"))
    train(whole)
    train_until(4, broken)
    train(of("other", 8, checkpoint__keep=1, resume__allow=["train.steps"]))
    shutil.copytree(broken.folder.root, root / "runs" / "again")
    names = opened(monkeypatch)
    train(broken)
    assert tables(broken).keys() == tables(whole).keys()
    assert weights(broken).keys() == weights(whole).keys()
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(broken).items())
    assert len(names) == 0, "nothing was computed again"
    again = of("again", 6, **start)
    shutil.rmtree(again.folder.reference)
    with pytest.raises(WrongInput, match=r"step-00000002, which this training began .* is gone"):
        train(again)
    checkpoints = other.folder.checkpoints
    shutil.copytree(checkpoints / "step-00000008", checkpoints / "step-00000002")
    with pytest.raises(WrongInput, match="is another one by now"):
        train(again)
