"""The face over a reference tokenizer: framing, batches, look-alikes, identity."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Reference

from ingot.base.errors import WrongInput
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import SpecialIds, Tokenizer
from tests.tokenizers.small import CHATML, TEXTS, bpe_files, unigram_files


def changed(files: dict[str, str], name: str, **values: object) -> dict[str, str]:
    return {**files, name: json.dumps({**json.loads(files[name]), **values})}


def test_a_batch_is_each_text_alone() -> None:
    tokenizer = Tokenizer(bpe_files())
    texts = [*TEXTS, "", "<|im_end|>"]
    flat, offsets = tokenizer.encode_batch(texts)
    assert (flat.dtype, offsets.dtype) == (np.int32, np.int64)
    assert [flat[begin:end].tolist() for begin, end in itertools.pairwise(offsets)] == [
        tokenizer.encode(text) for text in texts
    ]


def test_an_empty_batch() -> None:
    flat, offsets = Tokenizer(bpe_files()).encode_batch([])
    assert (len(flat), offsets.tolist()) == (0, [0])


def test_added_tokens_count_in_the_vocabulary() -> None:
    assert Tokenizer(bpe_files()).vocab_size == 302


def test_text_stays_text_where_special_tokens_are_pieces_too() -> None:
    files = unigram_files()
    naive = Reference.from_str(files["tokenizer.json"])
    naive.encode_special_tokens = True
    assert 1 in naive.encode("a</s>b", add_special_tokens=False).ids, (
        "the trap that this test is about is gone"
    )
    tokenizer = Tokenizer(files)
    for text in ("a</s>b", "</s>", "<pad> x", "<unk>"):
        assert not {0, 1, 2} & set(tokenizer.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for text in ("\U0010ffff</s>", " \U0010ffff</s>", "\U0010ffff<pad> x"):
        assert not {0, 1} & set(tokenizer.encode(text)), (
            "nor by the name that such a piece gets instead"
        )
    assert tokenizer.encode("abc") == naive.encode("abc", add_special_tokens=False).ids
    assert tokenizer.encode_document("ab") == [*tokenizer.encode("ab"), 1]
    assert tokenizer.special == SpecialIds(None, 1, 0)


@pytest.mark.parametrize(
    ("config", "adds"),
    [({}, True), ({"add_bos_token": False}, False), ({"add_bos_token": True}, True)],
)
def test_bos_by_looking_unless_the_configuration_says(config: dict[str, bool], adds: bool) -> None:
    tokenizer = Tokenizer(bpe_files(**config))
    assert tokenizer.adds_bos is adds
    assert tokenizer.encode_prompt("x") == [0] * adds + tokenizer.encode("x")


def test_no_bos_where_the_reference_puts_none() -> None:
    files = changed(bpe_files(), "tokenizer.json", post_processor=None)
    assert Tokenizer(files).adds_bos is False
    assert (
        Tokenizer(
            changed(files, "tokenizer_config.json", bos_token=None, add_bos_token=True)
        ).before
        == []
    )


def test_bos_that_only_the_reference_knows() -> None:
    tokenizer = Tokenizer(changed(bpe_files(), "tokenizer_config.json", bos_token=None))
    assert (tokenizer.special.bos, tokenizer.adds_bos) == (0, True)


def test_a_special_token_that_merges_need_is_refused() -> None:
    """As GPT-2 with `!` for padding: the file can be read, but texts would hold the token."""
    files = bpe_files()
    state = json.loads(files["tokenizer.json"])
    left, _ = state["model"]["merges"][0]
    token = {**state["added_tokens"][0], "id": state["model"]["vocab"][left], "content": left}
    state["added_tokens"].append(token)
    with pytest.raises(
        WrongInput, match=rf"special token '{left}' of .* is also made by its merges"
    ):
        Tokenizer({**files, "tokenizer.json": json.dumps(state)})


def test_a_special_token_outside_the_vocabulary_is_none() -> None:
    assert Tokenizer(bpe_files(pad_token="[NOWHERE]")).special.pad is None


def test_the_file_may_not_cut_or_pad() -> None:
    files = bpe_files()
    reference = Reference.from_str(files["tokenizer.json"])
    reference.enable_truncation(4)
    reference.enable_padding(length=8)
    assert Tokenizer({**files, "tokenizer.json": reference.to_str()}).encode(TEXTS[0]) == Tokenizer(
        files
    ).encode(TEXTS[0])


def test_identity_is_of_what_decides_not_of_bytes() -> None:
    files = bpe_files()
    same = {**files, "tokenizer.json": json.dumps(json.loads(files["tokenizer.json"]), indent=4)}
    identity = Tokenizer(files).identity()
    assert Tokenizer(same).identity() == identity
    assert (
        Tokenizer(changed(files, "tokenizer_config.json", model_max_length=5)).identity()
        == identity
    )
    assert Tokenizer({**files, "chat_template.jinja": CHATML}).identity() != identity
    assert (
        Tokenizer(changed(files, "tokenizer_config.json", eos_token="<|im_end|>")).identity()
        != identity
    )
    assert (
        Tokenizer(changed(files, "tokenizer_config.json", add_bos_token=False)).identity()
        != identity
    )
    model = json.loads(files["tokenizer.json"])["model"]
    model["merges"] = model["merges"][:-1]
    assert Tokenizer(changed(files, "tokenizer.json", model=model)).identity() != identity


def test_template_identity() -> None:
    assert Tokenizer(bpe_files()).template_identity is None
    assert (
        Tokenizer(bpe_files(CHATML)).template_identity
        != Tokenizer(bpe_files(CHATML + " ")).template_identity
    )


def test_saved_is_the_same(tmp_path: Path) -> None:
    tokenizer = Tokenizer(bpe_files(CHATML))
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.identity(), again.template, again.files) == (
        tokenizer.identity(),
        CHATML,
        tokenizer.files,
    )


def test_decode_shows_or_hides_special_tokens() -> None:
    tokenizer = Tokenizer(bpe_files())
    ids = tokenizer.encode_document("copper")
    assert tokenizer.decode(ids) == "copper"
    assert (
        tokenizer.decode(np.array(ids), skip_special=False)
        == "<|begin_of_text|>copper<|end_of_text|>"
    )
    assert tokenizer.token(1) == "<|end_of_text|>"
    assert tokenizer.token(10_000) is None


def test_threads_share_one() -> None:
    tokenizer = Tokenizer(bpe_files(CHATML))
    chat = [{"role": "user", "content": "hello"}]
    expected = (tokenizer.encode("<|im_end|>"), tokenizer.encode_chat(chat))
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(
                lambda _: (tokenizer.encode("<|im_end|>"), tokenizer.encode_chat(chat)), range(200)
            )
        )
    assert all(pair == expected for pair in found)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object"),
    ],
)
def test_broken_files(name: str, text: str, message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        Tokenizer({**bpe_files(), name: text}, "folder")
