"""From a folder or a recipe to a tokenizer, and what is said where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.tokenizers.load import load_tokenizer, resolve_tokenizer
from tests.tokenizers.small import bpe_files


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def recipe(**knobs: str) -> Recipe:
    overrides = ["name=x", "data.train=[{source: none}]", *(f"{knob.replace('__', '.')}={value}" for knob, value in knobs.items())]
    return load_recipe((), overrides, environ={}, dotenv=None)


def test_a_folder(tmp_path: Path) -> None:
    assert load_tokenizer(write(tmp_path, bpe_files())).vocab_size == 302


def test_eos_that_only_the_model_names(tmp_path: Path) -> None:
    files = bpe_files(eos_token=None, pad_token=None)
    assert load_tokenizer(write(tmp_path, files)).special.eos is None
    write(tmp_path, {"generation_config.json": json.dumps({"eos_token_id": [301, 1], "bos_token_id": 300}), "config.json": '{"pad_token_id": 2}'})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.special.eos, tokenizer.special.pad, tokenizer.special.bos) == (301, 2, 0)
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").special == tokenizer.special, "it must not need the model's files any more"


def test_special_tokens_map(tmp_path: Path) -> None:
    files = bpe_files(eos_token=None) | {"special_tokens_map.json": '{"eos_token": {"content": "<|im_end|>"}}'}
    assert load_tokenizer(write(tmp_path, files)).special.eos == 301


@pytest.mark.parametrize(("files", "message"), [
    ({"config.json": "{}"}, "has no tokenizer.json; copy the tokenizer's files there"),
    ({"tokenizer.model": "x"}, "has tokenizer.model but no tokenizer.json.*save_pretrained"),
    ({"vocab.json": "{}", "merges.txt": ""}, "has vocab.json but no tokenizer.json"),
])
def test_a_folder_without(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        load_tokenizer(write(tmp_path, files))


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")


def test_not_utf8(tmp_path: Path) -> None:
    write(tmp_path, bpe_files())
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff{}")
    with pytest.raises(WrongInput, match="not UTF-8"):
        load_tokenizer(tmp_path)


def test_the_recipes_own(tmp_path: Path) -> None:
    assert resolve_tokenizer(recipe(tokenizer__source=str(tmp_path))) == tmp_path
    assert resolve_tokenizer(recipe(model__source=str(tmp_path))) == tmp_path
    with pytest.raises(WrongInput, match=r"tokenizer.source .*nowhere does not exist"):
        resolve_tokenizer(recipe(tokenizer__source=str(tmp_path / "nowhere")))
    (tmp_path / "tokenizer.model").write_text("x")
    with pytest.raises(WrongInput, match=r"tokenizer.source .* is a file; give the Hugging Face folder"):
        resolve_tokenizer(recipe(tokenizer__source=str(tmp_path / "tokenizer.model")))
