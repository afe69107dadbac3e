"""A run goes on from the model of another one, which is named by its run folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingot.base.errors import Failed, WrongInput
from ingot.cli.carry import _adapter
from ingot.config.models.presets import preset
from ingot.config.models.weights import model_hash
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.models.hf.models import Encoder
from ingot.models.kinds import open_model
from ingot.pipeline.steps import step_named
from ingot.tokenizers.load import load_tokenizer
from ingot.train import trainer
from ingot.train.build import build_train_state
from ingot.train.finish import export_run
from ingot.train.trainer import train
from tests.objectives.ways import make_ready, recipe_of
from tests.small import TINY_MODEL, small_recipe
from tests.tolerances import LOGITS_FP32


def continued(root: Path, first: Recipe, **knobs: Any) -> Recipe:
    """A recipe that begins with the model and the tokenizer of another one's run."""
    return small_recipe(
        root,
        name="more",
        model__source=str(first.folder.root),
        model__config=None,
        tokenizer__source=None,
        tokenizer__vocab_size=None,
        **knobs,
    )


def check_kept(first: Recipe, second: Recipe) -> None:
    """Train at a rate that moves nothing: the weights that come out are those that went in."""
    ingest(second)
    prepare(second)
    train(second)
    before, after = (
        load_file(recipe.folder.model / "model.safetensors") for recipe in (first, second)
    )
    assert all(torch.allclose(after[name], before[name], atol=1e-9) for name in before)


def test_a_run_folder_is_a_source_of_weights_and_tokenizer(root: Path) -> None:
    first = small_recipe(root, precision__export="fp32")
    train(first)
    second = continued(
        root, first, train__optimizer__lr=1e-12, train__steps=1, precision__export="fp32"
    )
    check_kept(first, second)
    tokenizers = [
        (recipe.folder.model / "tokenizer.json").read_bytes() for recipe in (first, second)
    ]
    assert tokenizers[0] == tokenizers[1]
    lineage = json.loads((second.folder.model / "ingot.json").read_text())
    assert lineage["base"]["source"] == str(first.folder.root)
    # What the first run writes beside its model does not make the second one train again.
    assert step_named("train").folders(second) == [str(first.folder.model)]


@pytest.mark.drawn
@pytest.mark.parametrize("lora", [None, "{rank: 2}"])
def test_what_is_exported_is_not_rounded_to_what_is_computed_in(
    lora: str | None, root: Path
) -> None:
    """Neither weights that are trained, of which the model itself holds copies in bf16, nor a base
    that is kept in it.
    """
    first = small_recipe(root, train__steps=1, precision__export="fp32")
    train(first)
    second = continued(
        root,
        first,
        train__optimizer__lr=1e-12,
        train__steps=1,
        precision__compute="bf16",
        precision__export="fp32",
        model__lora=lora,
    )
    check_kept(first, second)


def test_a_run_does_not_begin_with_what_it_exports(root: Path) -> None:
    """Each training would make the next one another, and the model another one each time."""
    own = small_recipe(root, model__source=str(root / "runs/small"))
    with pytest.raises(WrongInput, match=r"model\.source \S+ is what this run exports; .*`name`"):
        train(own)


def test_an_adapter_of_a_model_on_the_hub_names_its_revision(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = small_recipe(root)
    train(first)
    base = shutil.copytree(first.folder.model, root / "base")
    asked: list[str | None] = []

    def fetched(name: str, revision: str | None) -> Path:
        asked.append(revision)
        return base

    monkeypatch.setattr("ingot.config.models.source.fetch_model", fetched)
    monkeypatch.setattr("ingot.models.kinds.fetch_model", fetched)
    second = small_recipe(
        root,
        model__source="hf:org/base",
        model__revision="v1",
        model__config=None,
        model__lora="{rank: 2}",
        train__steps=1,
    )
    train(second)
    open_model(second.folder.adapter, device=torch.device("cpu"))
    assert set(asked) == {"v1"}
    settings = json.loads((second.folder.adapter / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("org/base", "v1")


def test_an_adapter_goes_on_beside_the_model_that_it_was_trained_with(root: Path) -> None:
    """Beside another one, or without what `model.config` changed of it, it would change another
    model than it was trained to.
    """
    first = small_recipe(root)
    train(first)
    base = shutil.copytree(first.folder.model, root / "base")
    other = shutil.copytree(base, root / "other")
    about = json.loads((other / "ingot.json").read_text())
    (other / "ingot.json").write_text(json.dumps({**about, "model_hash": "of another"}))

    def recipe(source: Path, adapter: Path | None = None, **config: float) -> Recipe:
        onward = {} if adapter is None else {"adapter": str(adapter)}
        return small_recipe(
            root,
            model__source=str(source),
            model__config=config,
            model__lora={"rank": 2, **onward},
            train__steps=1,
        )

    begun = recipe(base, rope_theta=500.0)
    train(begun)
    adapter = shutil.copytree(begun.folder.adapter, root / "adapter")
    with pytest.raises(
        WrongInput, match=r"beside the model \S+ \(\S+base\), and model\.source \S+"
    ):
        train(recipe(other, adapter, rope_theta=500.0))
    with pytest.raises(WrongInput, match=r"with model\.config\.rope_theta=500\.0, and the recipe"):
        train(recipe(base, adapter))
    train(recipe(base, adapter, rope_theta=500.0))


def test_the_adapter_of_an_earlier_training_is_no_longer_the_runs(root: Path) -> None:
    """It would be exported and pushed as that of a model that it is not of."""
    first = small_recipe(root)
    train(first)
    base = shutil.copytree(first.folder.model, root / "base")
    knobs = {"model__source": str(base), "model__config": None, "train__steps": 1}
    adapted = small_recipe(root, **knobs, model__lora="{rank: 2}")
    train(adapted)
    run = adapted.folder
    made = [json.loads((one / "ingot.json").read_text()) for one in (run.model, run.adapter)]
    assert made[0]["model_hash"] == made[1]["merged"]
    assert _adapter(run.model) == run.adapter
    kept = shutil.copytree(run.adapter, root / "kept")
    train(small_recipe(root, **knobs))
    assert not run.adapter.exists()
    run.adapter.mkdir()
    notes = run.adapter / "notes.txt"
    notes.write_text("of a person", encoding="utf-8")
    train(small_recipe(root, **knobs | {"train__steps": 2}))
    assert notes.exists(), "nothing that training did not write is deleted"
    shutil.rmtree(run.adapter)
    shutil.copytree(kept, run.adapter)  # as an earlier version left it
    with pytest.raises(WrongInput, match="is no adapter, and has none beside it"):
        _adapter(run.model)
    assert _adapter(run.adapter) == run.adapter


def test_an_adapter_names_the_model_that_it_was_trained_beside(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another run may export another model there: while the weights are read, which is refused, or
    before the training ends.
    """
    first, kept, other = small_recipe(root), root / "kept", root / "other"
    for seed, copy in ((0, kept), (5, other)):
        train(small_recipe(root, seed=seed, train__steps=1))
        shutil.copytree(first.folder.model, copy)
    base = root / "base"

    def put(model: Path, *, recorded: bool = True) -> None:
        shutil.copytree(model, base, dirs_exist_ok=True)
        if not recorded:
            (base / "ingot.json").unlink()

    def recipe(seed: int) -> Recipe:
        return small_recipe(
            root,
            seed=seed,
            model__source=str(base),
            model__config=None,
            model__lora="{rank: 2}",
            train__steps=1,
        )

    def built(*given: Any) -> Any:
        made = build_train_state(*given)
        put(other)
        return made

    def exported(*given: Any) -> None:
        put(other)
        export_run(*given)

    put(kept)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(trainer, "build_train_state", built)
        with pytest.raises(Failed, match=r"base was changed while it was read.*again"):
            train(recipe(1))
    monkeypatch.setattr(trainer, "export_run", exported)
    for recorded in (True, False):
        put(kept, recorded=recorded)
        train(begun := recipe(2 + recorded))
        assert "base holds another model than training began with" in capsys.readouterr().err
        about = json.loads((begun.folder.adapter / "ingot.json").read_text())
        assert (about["base"]["model_hash"] == model_hash(kept)) == recorded
        with pytest.raises(WrongInput, match=r"was trained beside the model"):
            open_model(begun.folder.adapter, device=torch.device("cpu"))


def test_a_model_drawn_at_random_stops_at_the_tokens_of_its_own_vocabulary(root: Path) -> None:
    """Not at what has their numbers in the folder that its shape is from."""
    base = root / "base"
    base.mkdir()
    others = {"bos_token_id": 311, "eos_token_id": [101, 312], "pad_token_id": 313}
    values = {**preset("llama-3m"), **TINY_MODEL}
    (base / "config.json").write_text(json.dumps({**values, "vocab_size": 4000, **others}))
    (base / "generation_config.json").write_text(json.dumps(others))
    recipe = small_recipe(
        root, model__source=str(base), model__init="random", model__config=None, train__steps=1
    )
    train(recipe)
    special = load_tokenizer(recipe.folder.tokenizer).special
    for name in ("config.json", "generation_config.json"):
        written = json.loads((recipe.folder.model / name).read_text())
        for token in ("bos", "eos", "pad"):
            assert written.get(f"{token}_token_id") == getattr(special, token), name


def test_the_adapter_of_a_classifier_is_its_merged_model(tmp_path: Path) -> None:
    """With the pooler that a masked language model lacks, and the names of its own classes beside
    a base that has others.
    """
    root = make_ready(tmp_path, ["mlm"])
    cpu = torch.device("cpu")

    def trained(name: str, base: Path, labels: Sequence[str]) -> Recipe:
        recipe = recipe_of(
            root,
            "classify",
            name=name,
            model__source=str(base),
            model__config=None,
            model__lora={"rank": 2},
            tokenizer__source=None,
            tokenizer__vocab_size=None,
            objective__labels=list(labels),
            train__steps=1,
            precision__export="fp32",
        )
        ingest(recipe)
        prepare(recipe)
        train(recipe)
        merged, adapted = (
            open_model(folder, device=cpu)
            for folder in (recipe.folder.model, recipe.folder.adapter)
        )
        assert isinstance(merged, Encoder)
        assert isinstance(adapted, Encoder)
        assert merged.config.labels == adapted.config.labels == tuple(labels)
        tokens = torch.arange(20).view(2, 10) + 7
        one, other = (
            model.logits(tokens, torch.arange(10).expand(2, 10)) for model in (merged, adapted)
        )
        torch.testing.assert_close(one, other, atol=LOGITS_FP32, rtol=0)
        return recipe

    masked = recipe_of(root, "mlm", train__steps=1)
    train(masked)
    first = trained("first", masked.folder.model, ["cold", "hot"])
    lines = (root / "labelled.jsonl").read_text()
    renamed = lines.replace('"hot"', '"warm"').replace('"cold"', '"cool"')
    (root / "labelled.jsonl").write_text(renamed)
    trained("second", first.folder.model, ["cool", "warm"])


def test_a_run_that_has_no_model_yet_is_named(root: Path) -> None:
    first = small_recipe(root)
    second = continued(root, first)
    ingest(second)
    with pytest.raises(WrongInput, match="small has no tokenizer"):
        prepare(second)
