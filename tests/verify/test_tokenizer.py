"""The proof holds for a tokenizer that is right, and each planted fault turns it red."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ingot.base.errors import WrongInput
from ingot.cli.verify import _shown as shown
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.tokenizers.backend import JsonBackend, TokenBatch
from ingot.tokenizers.encoders import EncodeBatch, EncoderChoice, EncoderLibrary
from ingot.tokenizers.load import PREPARED, load_tokenizer
from ingot.verify.proof import Check, Proof
from ingot.verify.tokenizer import verify_tokenizer
from tests.small import small_recipe, write_documents
from tests.tokenizers.models import pieces_file, ranks_file
from tests.tokenizers.small import CHATML, bpe_files, unigram_files

NO_KNOBS: dict[str, object] = {"tokenizer__vocab_size": None}


def given(
    root: Path, files: dict[str, str] | dict[str, bytes] | None = None, **knobs: object
) -> Recipe:
    """A recipe over made-up documents with the tokenizer of these files; nothing is ingested."""
    if not (root / "text").exists():
        write_documents(root / "text", count=40)
    folder = root / "tokenizer"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in (files or bpe_files()).items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return small_recipe(root, **{"tokenizer__source": str(folder), **NO_KNOBS, **knobs})


def check(proof: Proof, what: str) -> Check:
    found = [one for one in proof.checks if one.what.startswith(what)]
    assert found, [one.what for one in proof.checks]
    return found[0]


def red(proof: Proof) -> list[str]:
    return [one.what for one in proof.checks if one.passed is False]


def test_what_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proof = verify_tokenizer(given(tmp_path))
    assert proof.holds, red(proof)
    assert "302 tokens" in proof.title
    assert "40 documents" in proof.title
    assert check(proof, "fast path").passed is True
    assert "ids for 40 documents" in check(proof, "fast path").detail
    assert check(proof, "encoder reference").passed is True
    assert check(proof, "round trip").detail == "100.00% of 40 documents come back as they were"
    assert "eos <|end_of_text|> (1)" in check(proof, "BOS, EOS").detail
    assert check(proof, "one BOS").passed is True
    assert "uint16 for 302 tokens" in check(proof, "ids fit").detail
    assert check(proof, "chat template").passed is None
    assert check(proof, "prepared data").passed is None
    assert shown("tokenizer", proof, as_json=False) == 0
    tried = len(proof.checks) - 2
    assert capsys.readouterr().out.endswith(f"all {tried} checks hold, 2 had no case\n")


def test_ingested_and_prepared(tmp_path: Path) -> None:
    write_documents(tmp_path / "text")
    recipe = small_recipe(tmp_path)
    ingest(recipe)
    prepare(recipe)
    proof = verify_tokenizer(recipe)
    assert proof.holds, red(proof)
    assert check(proof, "prepared data").passed is True
    files = load_tokenizer(recipe.folder.tokenizer).files
    config = {**json.loads(files["tokenizer_config.json"]), "eos_token": "<|pad|>"}
    (recipe.folder.tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(WrongInput, match=r"tokenizer_config\.json .* `ingot prepare --again`"):
        verify_tokenizer(recipe)
    (recipe.folder.tokenizer / PREPARED).unlink()
    assert red(verify_tokenizer(recipe)) == ["prepared data"]


def test_ingested_documents_are_the_same_ones(tmp_path: Path) -> None:
    recipe = given(tmp_path)
    before = verify_tokenizer(recipe).title
    ingest(recipe)
    after = verify_tokenizer(recipe)
    assert after.holds
    assert "documents" in after.title
    assert after.title.split("identity")[1] == before.split("identity")[1]


def test_nothing_learnt_yet(tmp_path: Path) -> None:
    write_documents(tmp_path / "text", count=3)
    with pytest.raises(WrongInput, match="none is learnt yet; run `ingot prepare`"):
        verify_tokenizer(small_recipe(tmp_path))


@dataclass(frozen=True)
class Planted(EncoderLibrary):
    @property
    def version(self) -> str:
        return "1"


def plant(monkeypatch: pytest.MonkeyPatch, encode_batch: EncodeBatch) -> None:
    monkeypatch.setattr(
        "ingot.tokenizers.encoders.LIBRARIES", (Planted("planted", lambda text: encode_batch),)
    )
    # As if the sample that encoders are chosen by had missed the fault.
    choice = EncoderChoice("planted 1", [("planted 1", "taken")], {"planted 1": 1.0})
    monkeypatch.setattr("ingot.verify.tokenizer.choose_encoder", lambda tokenizer, texts: choice)


def test_a_fast_path_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = given(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")

    def encode_batch(texts: Sequence[str]) -> TokenBatch:
        flat, offsets = tokenizer.encode_batch(texts)
        flat[offsets[3] : offsets[3] + 1] += 1
        return flat, offsets

    plant(monkeypatch, encode_batch)
    proof = verify_tokenizer(recipe)
    assert red(proof)[0] == "fast path against reference"
    assert (
        "planted 1 on doc0003.txt:1: differs from the reference on"
        in check(proof, "fast path").detail
    )
    assert (
        check(verify_tokenizer(given(tmp_path, tokenizer__encoder="reference")), "fast path").passed
        is None
    )


def test_a_fast_path_that_makes_special_tokens_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = given(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")

    def encode_batch(texts: Sequence[str]) -> TokenBatch:
        ids = [
            tokenizer._reference.control.encode(text, add_special_tokens=False).ids
            for text in texts
        ]
        return np.array([one for text in ids for one in text], np.int32), np.cumsum(
            [0, *map(len, ids)]
        )

    plant(monkeypatch, encode_batch)
    proof = verify_tokenizer(recipe)
    assert red(proof) == ["look-alikes of special tokens"]
    assert "becomes the special token '<|begin_of_text|>'" in check(proof, "look-alikes").detail


def test_a_reference_that_does_not_give_text_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        JsonBackend,
        "decode",
        lambda self, ids, *, skip_special: str(self._reference.decode(ids)).replace("für", "fur"),
    )
    proof = verify_tokenizer(given(tmp_path))
    assert red(proof) == ["round trip"]
    assert "comes back with" in check(proof, "round trip").detail


def test_what_a_normalizer_changes_is_by_design(tmp_path: Path) -> None:
    proof = verify_tokenizer(given(tmp_path, unigram_files()))
    assert proof.holds, red(proof)
    assert check(proof, "round trip").passed is None
    assert "by design: it does not work on bytes" in check(proof, "round trip").detail
    assert check(proof, "encoder gigatoken").passed is None


def test_a_named_token_that_is_not_there(tmp_path: Path) -> None:
    proof = verify_tokenizer(given(tmp_path, bpe_files(pad_token="[NOWHERE]")))
    assert red(proof) == ["BOS, EOS and padding"]
    assert (
        "names pad_token '[NOWHERE]', which the vocabulary does not have"
        in check(proof, "BOS, EOS").detail
    )


def test_no_eos_is_told(tmp_path: Path) -> None:
    proof = verify_tokenizer(given(tmp_path, bpe_files(eos_token=None)))
    assert proof.holds
    assert "without EOS a model does not learn" in check(proof, "BOS, EOS").detail


def test_a_template_that_writes_bos_twice(tmp_path: Path) -> None:
    proof = verify_tokenizer(
        given(tmp_path, bpe_files("{{ bos_token }}{{ bos_token }}{{ messages[0]['content'] }}"))
    )
    assert red(proof) == ["one BOS"]
    assert "the chat template writes <|begin_of_text|> 2 times" in check(proof, "one BOS").detail


def test_documents_that_spell_bos(tmp_path: Path) -> None:
    recipe = given(tmp_path)
    (tmp_path / "text" / "zzz.txt").write_text("<|begin_of_text|>melts")
    proof = verify_tokenizer(recipe)
    assert proof.holds
    assert (
        "1 documents begin with the letters <|begin_of_text|>, which stay text"
        in check(proof, "one BOS").detail
    )


def test_the_template(tmp_path: Path) -> None:
    with_one = check(verify_tokenizer(given(tmp_path, bpe_files(CHATML))), "chat template")
    assert (with_one.passed, with_one.detail.endswith("from the tokenizer itself")) == (True, True)
    (tmp_path / "chats.jsonl").write_text(
        json.dumps(
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        )
        + "\n"
    )
    chats = {"objective__kind": "sft", "data__train": [{"source": str(tmp_path / "chats.jsonl")}]}
    proof = verify_tokenizer(given(tmp_path, **chats))
    assert red(proof) == ["chat template"]
    assert "set tokenizer.template" in check(proof, "chat template").detail
    assert "1 documents" in proof.title


def test_models_show_what_others_read(tmp_path: Path) -> None:
    ranks = verify_tokenizer(given(tmp_path, {"tokenizer.model": ranks_file()}))
    assert ranks.holds, red(ranks)
    assert check(ranks, "tokenizer.json for other tools").passed is True
    unigram = verify_tokenizer(given(tmp_path, {"spiece.model": pieces_file("unigram")}))
    assert unigram.holds, red(unigram)
    assert check(unigram, "tokenizer.json for other tools").passed is None


def test_no_documents(tmp_path: Path) -> None:
    recipe = given(tmp_path)
    for path in (tmp_path / "text").iterdir():
        path.write_text(" ")
    with pytest.raises(WrongInput, match=r"data\.train has no document to try the tokenizer on"):
        verify_tokenizer(recipe)
