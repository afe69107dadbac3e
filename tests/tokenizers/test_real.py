"""Real tokenizers give the ids that transformers gives, on text in many scripts; and text stays text."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ingot.tokenizers.load import load_tokenizer

NAMES = ("hf_gpt2", "hf_llama3_2", "hf_qwen3", "hf_t5")
ODD = ["", " ", "a\n\n  b\t\r\n", "👩‍👩‍👧 é é \x00\x01", "x" * 3000, "12345678 3.14", "ﬁ ½ Ⅷ"]


@pytest.fixture(scope="session")
def texts(test_data: Path) -> list[str]:
    with gzip.open(test_data / "debian_docs" / "multi.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"][:2000] for line in itertools.islice(lines, 0, 4000, 80)] + ODD


@pytest.mark.parametrize("name", NAMES)
def test_the_ids_of_transformers(test_data: Path, texts: list[str], name: str, tmp_path: Path) -> None:
    folder = test_data / "tokenizers" / name
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    end = [theirs.eos_token_id] if name == "hf_t5" else []
    for text in texts:
        assert [*ours.encode_prompt(text), *end] == theirs(text)["input_ids"]
    assert ours.special.eos == theirs.eos_token_id
    special = {token.content for token in theirs.added_tokens_decoder.values() if token.special}
    # T5 has no `<`, so text may hold its unknown token.
    ids = set(theirs.convert_tokens_to_ids(sorted(special))) - {theirs.unk_token_id if name == "hf_t5" else None}
    for text in special:
        assert not ids & set(ours.encode(f"a{text}b {text}"))
    if ours.template is not None:
        chat = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "more?"}]
        assert ours.encode_chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    if name != "hf_t5":  # transformers rebuilds T5's normalizer with other parts
        theirs.save_pretrained(tmp_path)
        assert load_tokenizer(tmp_path).identity() == ours.identity()
