"""Real tokenizers give the ids that transformers gives, on text in many scripts; and text stays
text.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Reference

from ingot.tokenizers.backend import split_batch
from ingot.tokenizers.edge_cases import edge_case_texts
from ingot.tokenizers.encoders import REFERENCE, choose_encoder, open_encoder
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer
from tests.tokenizers.small import real_tokenizer, transformers_tokenizer

# As Llama 3's own code has it.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMES = ("hf_gpt2", "hf_llama3_2", "hf_qwen3", "hf_t5")
ODD = ["", " ", "a\n\n  b\t\r\n", "👩‍👩‍👧 é é \x00\x01", "x" * 3000, "12345678 3.14", "ﬁ ½ Ⅷ"]


@pytest.fixture(scope="session")
def texts(test_data: Path) -> list[str]:
    with gzip.open(test_data / "debian_docs" / "multi.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [
            json.loads(line)["text"][:2000] for line in itertools.islice(lines, 0, 4000, 125)
        ] + ODD


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("name", NAMES)
def test_the_ids_of_transformers(test_data: Path, texts: list[str], name: str) -> None:
    folder = test_data / "tokenizers" / name
    ours, theirs = real_tokenizer(folder), transformers_tokenizer(folder)
    end = [theirs.eos_token_id] if name == "hf_t5" else []
    for text in texts:
        assert [*ours.encode_prompt(text), *end] == theirs(text)["input_ids"]
    assert ours.special.eos == theirs.eos_token_id
    special = {token.content for token in theirs.added_tokens_decoder.values() if token.special}
    # T5 has no `<`, so text may hold its unknown token.
    ids = set(theirs.convert_tokens_to_ids(sorted(special))) - {
        theirs.unk_token_id if name == "hf_t5" else None
    }
    for text in special:
        assert not ids & set(ours.encode(f"a{text}b {text}"))
    if ours.template is not None:
        chat = [
            {"role": "user", "content": "Hi there"},
            {"role": "assistant", "content": "yo"},
            {"role": "user", "content": "more?"},
        ]
        assert ours.encode_chat(chat) == theirs.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False
        )


# Not T5: transformers rebuilds its normalizer with other parts.
@pytest.mark.parametrize(
    "name", ["hf_gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:3])]
)
def test_what_transformers_saves_has_the_same_identity(
    test_data: Path, name: str, tmp_path: Path
) -> None:
    folder = test_data / "tokenizers" / name
    transformers_tokenizer(folder).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).identity() == real_tokenizer(folder).identity()


FOLDERS = {
    "hf_gpt2": "hf_gpt2",
    "hf_llama3_2": "hf_llama3_2",
    "hf_qwen3": "hf_qwen3",
    "hf_t5": "hf_t5",
    "llama3": "llama3",
    "llama2": "llama2",
    "t5": "hf_t5/spiece.model",
    "gpt2": "gpt2_hf_style",
}
UNREAD = {"hf_t5", "t5"}
"""Those that no fast library reads."""
FAST = ("hf_gpt2", "hf_t5", "llama2", "t5")
"""One of each backend's kind; the large ones of the same kinds are marked slow."""


def original(folder: Path, name: str) -> Callable[[str], list[int]]:
    """The library's own answer, asked without this project."""

    import sentencepiece
    import tiktoken
    from transformers import GPT2Tokenizer

    if name == "llama3":
        lines = (line.split() for line in (folder / "tokenizer.model").read_bytes().splitlines())
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        return tiktoken.Encoding(
            name, pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={}
        ).encode_ordinary
    if name in ("llama2", "t5"):
        file = folder / "tokenizer.model" if name == "llama2" else folder
        return sentencepiece.SentencePieceProcessor(model_file=str(file)).encode  # type: ignore[no-any-return]
    reference = (
        GPT2Tokenizer.from_pretrained(folder)._tokenizer
        if name == "gpt2"
        else Reference.from_file(str(folder / "tokenizer.json"))
    )
    reference.no_truncation()
    reference.encode_special_tokens = True
    return lambda text: list(reference.encode(text, add_special_tokens=False).ids)


@pytest.fixture(
    scope="module",
    params=[
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FOLDERS
    ],
)
def real(request: pytest.FixtureRequest, test_data: Path) -> tuple[str, Path, Tokenizer]:
    folder = test_data / "tokenizers" / FOLDERS[request.param]
    return request.param, folder, real_tokenizer(folder)


@pytest.mark.drawn
def test_reference_and_fast_encoder_give_the_ids_of_the_library(
    real: tuple[str, Path, Tokenizer], texts: list[str]
) -> None:
    name, folder, tokenizer = real
    source = Path(json.__file__).read_text()
    nasty = [
        *texts,
        source,
        source.replace("    ", "\t").replace("\n", "\r\n"),
        source.replace("\n", " "),
        *edge_case_texts(tokenizer.special_texts[:9]),
    ]
    theirs = original(folder, name)
    wanted = list(split_batch(tokenizer.encode_batch(nasty)))
    for text, ids in zip(nasty, wanted, strict=True):
        # A text that spells a piece which is also a special token (T5's `</s>`) has other ids: it
        # must stay text.
        if name != "hf_t5" or not any(token in text for token in tokenizer.special_texts):
            assert ids == theirs(text), text[:60]
    choice = choose_encoder(tokenizer, texts[:9])
    exact = [library for library in choice.speeds if library != REFERENCE]
    assert len(exact) == (0 if name in UNREAD else 2), choice.tried
    for library in exact[:1]:
        assert list(split_batch(open_encoder(tokenizer, library).encode_batch(nasty))) == wanted


def test_special_tokens_of_real_ones(real: tuple[str, Path, Tokenizer]) -> None:
    name, _, tokenizer = real
    expected = {
        "hf_gpt2": (50256, 50256, False),
        "gpt2": (50256, 50256, False),
        "hf_llama3_2": (128000, 128009, True),
        "llama3": (128000, 128001, True),
        "hf_qwen3": (None, 151645, False),
        "hf_t5": (None, 1, False),
        "t5": (None, 1, False),
        "llama2": (1, 2, True),
    }
    assert (tokenizer.special.bos, tokenizer.special.eos, tokenizer.adds_bos) == expected[name]
    if name == "llama3":
        assert [tokenizer.token(index) for index in (128000, 128001, 128009)] == [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|eot_id|>",
        ]
        assert tokenizer.vocab_size == 128256


def test_saved_models_open_again(
    real: tuple[str, Path, Tokenizer], texts: list[str], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    name, _, tokenizer = real
    if name.startswith("hf_"):
        pytest.skip("saved as it is; opened again above")
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.identity(), again.special, again.library) == (
        tokenizer.identity(),
        tokenizer.special,
        tokenizer.library,
    )
    if name != "t5":
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        for text in texts:
            assert theirs(text)["input_ids"] == tokenizer.encode_prompt(text)
