"""From a folder or a recipe to a tokenizer, and what is said where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.tokenizers.load import load_tokenizer, resolve_tokenizer
from tests.tokenizers.models import ranks_file
from tests.tokenizers.small import TEXTS, bpe_files


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def recipe(**knobs: str) -> Recipe:
    overrides = [
        "name=x",
        "data.train=[{source: none}]",
        *(f"{knob.replace('__', '.')}={value}" for knob, value in knobs.items()),
    ]
    return load_recipe((), overrides, environ={}, dotenv=None)


def test_a_folder(tmp_path: Path) -> None:
    assert load_tokenizer(write(tmp_path, bpe_files())).vocab_size == 302


def test_eos_that_only_the_model_names(tmp_path: Path) -> None:
    files = bpe_files(eos_token=None, pad_token=None)
    assert load_tokenizer(write(tmp_path, files)).special.eos is None
    write(
        tmp_path,
        {
            "generation_config.json": json.dumps({"eos_token_id": [301, 1], "bos_token_id": 300}),
            "config.json": '{"pad_token_id": 2}',
        },
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.special.eos, tokenizer.special.pad, tokenizer.special.bos) == (301, 2, 0)
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").special == tokenizer.special, (
        "it must not need the model's files any more"
    )


def test_an_exported_folder_has_the_tokenizer_of_its_training(tmp_path: Path) -> None:
    """Though its model was trained from one that names tokens which that does not."""
    tokenizer = load_tokenizer(write(tmp_path, bpe_files(eos_token=None, pad_token=None)))
    beside = {
        "generation_config.json": '{"eos_token_id": 301, "pad_token_id": 2}',
        "ingot.json": json.dumps({"tokenizer": tokenizer.identity()}),
    }
    assert load_tokenizer(write(tmp_path, beside)).identity() == tokenizer.identity()


def test_no_identity_is_made_where_nothing_was_exported(tmp_path: Path) -> None:
    """It takes as long as to read the vocabulary, in every worker of `prepare`."""
    tokenizer = load_tokenizer(write(tmp_path, bpe_files()))
    assert "_identity" not in vars(tokenizer)


def test_special_tokens_map(tmp_path: Path) -> None:
    files = bpe_files(eos_token=None) | {
        "special_tokens_map.json": '{"eos_token": {"content": "<|im_end|>"}}'
    }
    assert load_tokenizer(write(tmp_path, files)).special.eos == 301


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": "{}"}, "has no tokenizer.json; copy the tokenizer's files there"),
        ({"recipe.yaml": "{}"}, "is a run that holds no trained model; run `ingot train` first"),
        ({"vocab.txt": "[UNK]"}, "has vocab.txt but no tokenizer.json.*save_pretrained"),
        (
            {"tokenizer.model": "x"},
            "tokenizer.model is neither tiktoken ranks nor a whole SentencePiece model",
        ),
        ({"vocab.json": "{}"}, "has no merges.txt"),
        (
            {"vocab.json": "{}", "merges.txt": ""},
            "vocab.json and merges.txt do not fit together .*no tokens",
        ),
        ({"vocab.json": "[]", "merges.txt": ""}, "do not fit together"),
        (
            {"vocab.json": '{"a": 0, "b": 1}', "merges.txt": "a b"},
            "do not fit together .*a merge has a part that is no token",
        ),
        (
            {
                "vocab.json": '{"a": 0}',
                "merges.txt": "",
                "tokenizer_config.json": '{"tokenizer_class": "Qwen2Tokenizer"}',
            },
            "vocab.json of Qwen2Tokenizer, whose way",
        ),
    ],
)
def test_a_folder_without(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        load_tokenizer(write(tmp_path, files))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("tokenizer_config.json", "chat_template", [{"name": "default"}]),
        ("tokenizer_config.json", "chat_template", ["{{ messages }}"]),
        ("tokenizer_config.json", "chat_template", 3),
        ("tokenizer_config.json", "additional_special_tokens", "<|im_end|>"),
        ("special_tokens_map.json", "additional_special_tokens", [{"id": 3}]),
        ("tokenizer_config.json", "added_tokens_decoder", {"one": {"content": "a"}}),
        ("tokenizer_config.json", "added_tokens_decoder", {"1": "a"}),
        ("tokenizer_config.json", "added_tokens_decoder", [{"content": "a"}]),
    ],
)
def test_a_value_of_another_kind_is_named(
    tmp_path: Path, name: str, key: str, value: object
) -> None:
    files = bpe_files()
    values = json.loads(files.get(name, "{}")) | {key: value}
    write(tmp_path, {**files, name: json.dumps(values)})
    with pytest.raises(WrongInput, match=f"{name}: {key} is not as transformers writes it, "):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_half_of_a_character_is_no_token(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, bpe_files() | {name: '{"eos_token": "\\ud800"}'})
    with pytest.raises(WrongInput, match=f"{name} holds half of a surrogate pair; fetch or save"):
        load_tokenizer(folder)


@pytest.mark.parametrize("index", ["7", None, -1, True, [7]])
def test_an_added_token_without_an_id_is_named(tmp_path: Path, index: object) -> None:
    write(tmp_path, {**bpe_files(), "added_tokens.json": json.dumps({"<x>": index})})
    with pytest.raises(WrongInput, match=r"added_tokens\.json: `<x>` has no id; fetch or save"):
        load_tokenizer(tmp_path)


def gpt2_files() -> dict[str, str]:
    state = json.loads(bpe_files()["tokenizer.json"])
    vocabulary = {text: index for text, index in state["model"]["vocab"].items() if index > 2} | {
        "<|endoftext|>": 0,
        "Ġa": 1,
    }
    merges = [" ".join(pair) for pair in state["model"]["merges"]]
    return {
        "vocab.json": json.dumps(vocabulary),
        "merges.txt": "\n".join(["#version: 0.2", *merges, "Ġ a"]) + "\n",
    }


def test_gpt2s_pair(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GPT2Tokenizer

    tokenizer = load_tokenizer(write(tmp_path / "pair", gpt2_files()))
    theirs = GPT2Tokenizer.from_pretrained(tmp_path / "pair")
    texts = [*TEXTS, "it's  12345\n\n x", "é 🔥"]
    assert [tokenizer.encode(text) for text in texts] == [
        theirs(text)["input_ids"] for text in texts
    ]
    assert (tokenizer.special.bos, tokenizer.special.eos, tokenizer.adds_bos) == (0, 0, False)
    assert 0 not in tokenizer.encode("a<|endoftext|>b")
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").identity() == tokenizer.identity()
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(TEXTS[0])[
        "input_ids"
    ] == tokenizer.encode(TEXTS[0])


def test_tokens_that_a_file_of_its_own_adds(tmp_path: Path) -> None:
    """As transformers before 4.34 wrote them beside a pair of files."""
    from transformers import AutoTokenizer

    files = gpt2_files()
    vocabulary = {**json.loads(files["vocab.json"]), "unused": 2}
    first = len(vocabulary)
    files["vocab.json"] = json.dumps(vocabulary)
    files["added_tokens.json"] = json.dumps({"<|im_start|>": first, "<|im_end|>": first + 1})
    files["special_tokens_map.json"] = json.dumps({"eos_token": "<|im_end|>"})
    files["config.json"] = '{"model_type": "gpt2"}'
    files["tokenizer_config.json"] = '{"tokenizer_class": "GPT2Tokenizer"}'
    tokenizer = load_tokenizer(write(tmp_path / "pair", files))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "pair")
    turn = "<|im_start|>a\n"
    assert tokenizer.encode(turn) == theirs(turn)["input_ids"]
    assert tokenizer.special.eos == theirs.eos_token_id == first + 1
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").identity() == tokenizer.identity()


@pytest.mark.parametrize(
    "added",
    [
        {"tokenizer_config.json": '{"additional_special_tokens": ["<|one|>", "<|im_end|>"]}'},
        {"tokenizer_config.json": '{"added_tokens_decoder": {"999": {"content": "<|one|>"}}}'},
        {"tokenizer_config.json": '{"eos_token": {"content": "<|one|>"}}'},
        {"added_tokens.json": '{"<|one|>": 999}', "tokenizer_config.json": "{}"},
    ],
)
def test_tokens_that_a_tokenizer_json_lacks_are_refused(
    tmp_path: Path, added: dict[str, str]
) -> None:
    """They would be read as pieces of text."""
    with pytest.raises(WrongInput, match=r"adds <\|one\|>, which the vocabulary lacks; open it"):
        load_tokenizer(write(tmp_path, {**bpe_files(), **added}))


def test_the_pair_of_a_model_that_puts_tokens_around_a_text_is_not_gpt2s(tmp_path: Path) -> None:
    files = {**gpt2_files(), "config.json": '{"model_type": "bart"}'}
    with pytest.raises(WrongInput, match=r"has a vocab\.json of a bart model, whose way"):
        load_tokenizer(write(tmp_path, files))


def test_tokenizer_json_wins(tmp_path: Path) -> None:
    files = bpe_files()
    write(tmp_path, files)
    (tmp_path / "tokenizer.model").write_bytes(ranks_file())
    assert load_tokenizer(tmp_path).library.startswith("tokenizers ")
    assert (
        load_tokenizer(tmp_path / "tokenizer.json").identity()
        == load_tokenizer(tmp_path).identity()
    )
    assert load_tokenizer(tmp_path / "tokenizer.model").library.startswith("tiktoken "), (
        "asked for by name"
    )
    write(tmp_path, {"tokenizer_config.json": json.dumps({"ingot_reference": "tokenizer.model"})})
    assert load_tokenizer(tmp_path).library.startswith("tiktoken "), "named by the configuration"
    (tmp_path / "tokenizer.model").unlink()
    assert load_tokenizer(tmp_path).library.startswith("tokenizers "), (
        "as transformers saves it again"
    )


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
    (tmp_path / "tokenizer.model").write_bytes(ranks_file())
    assert (
        resolve_tokenizer(recipe(tokenizer__source=str(tmp_path / "tokenizer.model")))
        == tmp_path / "tokenizer.model"
    )
