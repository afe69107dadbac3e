"""Weights and a tokenizer that they were not trained with are told apart from a sibling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.plan.checks.recipe import judge_tokenizer
from ingot.tokenizers.familiar import check_own, why_read_otherwise, why_unfamiliar
from ingot.tokenizers.tokenizer import Tokenizer
from tests.small import small_recipe
from tests.tokenizers.small import bpe_files, unigram_files


def saved(folder: Path, files: dict[str, str]) -> Tokenizer:
    made = Tokenizer(files, str(folder))
    made.save(folder)
    return made


def recipe_of(model: Path, tokenizer: str | Path | None) -> Recipe:
    source = None if tokenizer is None else str(tokenizer)
    return small_recipe(
        model.parent,
        model__source=str(model),
        tokenizer__source=source,
        **({} if source == "train" else {"tokenizer__vocab_size": None}),
    )


def test_ids_that_stand_for_other_text_are_told(tmp_path: Path) -> None:
    saved(tmp_path / "model", bpe_files())
    other = saved(tmp_path / "other", unigram_files())
    recipe = recipe_of(tmp_path / "model", tmp_path / "other")
    told = why_unfamiliar(recipe, other, tmp_path / "model")
    assert told is not None
    assert "of its ids stand for other text there; leave it empty" in told
    assert [one.message for one in judge_tokenizer(recipe, random=False)] == [told]
    assert not list(judge_tokenizer(recipe, random=True))


def test_a_model_that_was_given_another_tokenizer_since_is_refused(tmp_path: Path) -> None:
    """As by training it anew under its path; a base that met fewer special tokens is none."""
    before = saved(tmp_path / "before", bpe_files(pad_token="<|pad|>"))
    saved(tmp_path / "model", bpe_files())
    own = recipe_of(tmp_path / "model", None)
    check_own(own, before, tmp_path / "model")
    saved(tmp_path / "model", unigram_files())
    with pytest.raises(WrongInput, match="another tokenizer than when the data was prepared; run"):
        check_own(own, before, tmp_path / "model")
    check_own(recipe_of(tmp_path / "model", tmp_path / "before"), before, tmp_path / "model")


def test_a_copy_with_more_special_tokens_is_the_same(tmp_path: Path) -> None:
    saved(tmp_path / "model", bpe_files())
    copy = saved(tmp_path / "copy", bpe_files(pad_token="<|pad|>"))
    recipe = recipe_of(tmp_path / "model", tmp_path / "copy")
    assert why_unfamiliar(recipe, copy, tmp_path / "model") is None
    assert not list(judge_tokenizer(recipe, random=False))


def test_a_reserved_entry_by_another_name_is_read_alike(tmp_path: Path) -> None:
    """As fine-tunes do with `<unused0>`, which need not be marked as special."""

    def with_entry(name: str) -> Tokenizer:
        files = bpe_files()
        described = json.loads(files["tokenizer.json"])
        entry = described["added_tokens"][-1] | {"content": name, "special": False}
        index = max(described["model"]["vocab"].values()) + 1
        described["added_tokens"].append(entry | {"id": index})
        return saved(tmp_path / name[1:-1], files | {"tokenizer.json": json.dumps(described)})

    with_entry("<unused0>")
    renamed = with_entry("<think>")
    assert why_read_otherwise(renamed, tmp_path / "unused0") is None
    saved(tmp_path / "other", unigram_files())
    assert "stands for" in str(why_read_otherwise(renamed, tmp_path / "other"))


@pytest.mark.parametrize(("source", "told"), [("train", True), (None, False)])
def test_a_tokenizer_learnt_anew_is_new_to_all_weights(
    tmp_path: Path, source: str | None, told: bool
) -> None:
    tokenizer = saved(tmp_path / "learnt", bpe_files())
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "llama"}))
    recipe = recipe_of(tmp_path / "model", source)
    if source:
        assert "never met" in str(why_unfamiliar(recipe, tokenizer, tmp_path / "model"))
    found = [one.kind for one in judge_tokenizer(recipe, random=False)]
    assert found == (["warning"] if told else [])
