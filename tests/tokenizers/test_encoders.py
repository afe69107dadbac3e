"""A fast library is taken only where its ids are the reference's, and what it cannot do goes to the
reference.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.tokenizers.backend import TokenBatch, flatten, split_batch
from ingot.tokenizers.edge_cases import FIXED, describe_difference, edge_case_texts
from ingot.tokenizers.encoders import (
    LEAD,
    LIBRARIES,
    REFERENCE,
    EncodeBatch,
    EncoderLibrary,
    choose_encoder,
    open_encoder,
)
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer
from tests.tokenizers.small import TEXTS, bpe_files, unigram_files

TOKENIZER = Tokenizer(bpe_files())
NAMES = [library.name for library in LIBRARIES]


@dataclass(frozen=True)
class Planted(EncoderLibrary):
    """A library of the tests' own; it counts as installed in version 1."""

    @property
    def version(self) -> str:
        return "1"


def planted(package: str, encode_batch: EncodeBatch) -> EncoderLibrary:
    return Planted(package, lambda _: encode_batch)


def test_the_fast_libraries_are_exact_here() -> None:
    choice = choose_encoder(TOKENIZER, TEXTS)
    assert [name for name, _ in choice.tried] == [*NAMES, REFERENCE]
    assert [why.startswith("taken: ") for _, why in choice.tried] == [
        name == choice.name for name in [*NAMES, REFERENCE]
    ]
    assert all("the same ids at" in why for _, why in choice.tried[:-1])
    assert choice.speeds[choice.name] * LEAD >= max(choice.speeds.values())


@pytest.mark.parametrize("name", [*NAMES, REFERENCE])
def test_ids_are_the_references(name: str) -> None:
    encoder = open_encoder(TOKENIZER, name)
    texts = [*TEXTS, *edge_case_texts(TOKENIZER.special_texts)]
    (flat, offsets), (wanted, places) = encoder.encode_batch(texts), TOKENIZER.encode_batch(texts)
    assert (flat.dtype, offsets.dtype, encoder.name) == (np.int32, np.int64, name)
    assert np.array_equal(flat, wanted)
    assert np.array_equal(offsets, places)
    empty = encoder.encode_batch([])
    assert (len(empty[0]), empty[1].tolist()) == (0, [0])


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_in_text_stay_text(name: str) -> None:
    encoder = open_encoder(TOKENIZER, name)
    flat, _ = encoder.encode_batch([f"a{token}b {token}" for token in TOKENIZER.special_texts])
    assert not {0, 1, 2, 300, 301} & set(flat.tolist())


@settings(max_examples=150)
@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
        | st.sampled_from([*FIXED, *TOKENIZER.special_texts]),
        max_size=6,
    )
)
def test_any_texts(texts: list[str]) -> None:
    wanted = [TOKENIZER.encode(text) for text in texts]
    for name in NAMES:
        assert list(split_batch(open_encoder_once(name)(texts))) == wanted


def open_encoder_once(name: str) -> EncodeBatch:
    if name not in _opened:
        _opened[name] = open_encoder(TOKENIZER, name).encode_batch
    return _opened[name]


_opened: dict[str, EncodeBatch] = {}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (
            lambda ids, text: [*ids[:-1], 7] if text == "\r\n" else ids,
            r"not taken: differs from the reference on '\\r\\n' at token \d+: \[7\] instead of",
        ),
        (
            lambda ids, text: ids[:-1] if text == TEXTS[1] else ids,
            r"not taken: differs from the reference on 'def melt",
        ),
        (
            lambda ids, text: [1] if text == "<|end_of_text|>" else ids,
            r"differs from the reference on '<\|end_of_text\|>' at token 0: \[1\] instead of",
        ),
    ],
)
def test_a_wrong_encoder_is_refused(wrong: object, reason: str) -> None:
    """Each differs from the reference on one text alone: of the nasty ones, of the user's own, of
    the special tokens.
    """

    def encode_batch(texts: Sequence[str]) -> TokenBatch:
        return flatten([wrong(TOKENIZER.encode(text), text) for text in texts])  # type: ignore[operator]

    choice = choose_encoder(TOKENIZER, TEXTS, [planted("wrong", encode_batch)])
    assert choice.name == REFERENCE
    assert choice.tried[0][0] == "wrong 1"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(choice.tried[0][1])


def test_one_that_lumps_texts_together_is_refused() -> None:
    def encode_batch(texts: Sequence[str]) -> TokenBatch:
        return flatten([TOKENIZER.encode_batch(texts)[0].tolist()])

    assert (
        "gives 1 results for"
        in choose_encoder(TOKENIZER, TEXTS, [planted("lump", encode_batch)]).tried[0][1]
    )


def test_one_that_fails_is_refused() -> None:
    class PanicException(BaseException):
        pass

    def panic(texts: Sequence[str]) -> TokenBatch:
        raise PanicException("index out\nof bounds")

    assert (
        "fails on the texts it was tried on (PanicException: index out of bounds)"
        in choose_encoder(TOKENIZER, TEXTS, [planted("panic", panic)]).tried[0][1]
    )


@pytest.mark.parametrize(
    ("speeds", "taken"),
    [((1e3, 1.4e3), "one 1"), ((1e3, 1.6e3), "other 1"), ((1e-6, 1e-6), REFERENCE)],
)
def test_the_fastest_is_taken_and_of_equals_the_first(
    monkeypatch: pytest.MonkeyPatch, speeds: tuple[float, float], taken: str
) -> None:
    measured = iter(speeds)
    monkeypatch.setattr("ingot.tokenizers.encoders._measure", lambda fast, trials: next(measured))
    libraries = [
        planted(package, lambda texts: TOKENIZER.encode_batch(texts))
        for package in ("one", "other")
    ]
    assert choose_encoder(TOKENIZER, TEXTS, libraries).name == taken


def test_what_is_not_installed() -> None:
    choice = choose_encoder(
        TOKENIZER, TEXTS, [EncoderLibrary("no-such-package", lambda text: TOKENIZER.encode_batch)]
    )
    assert (choice.name, choice.tried[0]) == (
        REFERENCE,
        ("no-such-package", "not taken: not installed; pip install no-such-package"),
    )


def test_a_tokenizer_that_no_fast_library_reads() -> None:
    choice = choose_encoder(Tokenizer(unigram_files()), TEXTS)
    assert choice.name == REFERENCE
    assert all("does not support this tokenizer" in why for _, why in choice.tried[:-1])


def test_without_a_sample_the_nasty_texts_decide() -> None:
    assert set(choose_encoder(TOKENIZER, []).speeds) == {*NAMES, REFERENCE}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gigatoken 0.0.1",
            (
                r"the encoder gigatoken 0.0.1 was chosen and version .* is installed here; pip"
                r" install gigatoken==0.0.1, or set tokenizer.encoder"
            ),
        ),
        (
            "hasty 1",
            "there is no encoder 'hasty 1'; take 'reference' or one of gigatoken, fastokens",
        ),
    ],
)
def test_an_encoder_that_is_not_here(name: str, message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        open_encoder(TOKENIZER, name)


def test_a_tokenizer_that_the_chosen_one_cannot_read() -> None:
    with pytest.raises(
        WrongInput, match="was chosen and fails here: does not support this tokenizer"
    ):
        open_encoder(Tokenizer(unigram_files()), NAMES[0])


def test_a_batch_that_it_fails_on_goes_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(texts: Sequence[str]) -> TokenBatch:
        raise RuntimeError("match limit")

    monkeypatch.setattr("ingot.tokenizers.encoders.LIBRARIES", (planted("brittle", fail),))
    flat, _ = open_encoder(TOKENIZER, "brittle 1").encode_batch(TEXTS)
    assert np.array_equal(flat, TOKENIZER.encode_batch(TEXTS)[0])


def _threads(folder: Path, name: str) -> tuple[int, int]:
    encoder = open_encoder(load_tokenizer(folder), name)
    before = os.times()
    started = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        encoder.encode_batch([text + str(number) for number, text in enumerate(TEXTS * 200)])
    ours = [
        Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")
    ]
    assert os.times().user >= before.user
    return started, len([task for task in ours if "jemalloc" not in task])


@pytest.mark.drawn
@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts threads as Linux shows them"
)
@pytest.mark.parametrize("name", NAMES)
def test_a_worker_process_has_one_thread(tmp_path: Path, name: str) -> None:
    TOKENIZER.save(tmp_path)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        started, ended = pool.apply(_threads, (tmp_path, name))
    assert ended <= started


def test_where_two_differ() -> None:
    assert (
        describe_difference("ab", [1, 2, 3], [1, 2])
        == "differs from the reference on 'ab' at token 2: [] instead of [3]"
    )
    assert (
        describe_difference("x" * 50, [1], [2])
        == f"differs from the reference on {'x' * 37 + '...'!r} at token 0: [2] instead of [1]"
    )


def test_of_a_book_only_the_beginning_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference takes minutes over a hundred megabytes."""
    seen = list[int]()
    real = Tokenizer.encode_batch
    monkeypatch.setattr(
        Tokenizer,
        "encode_batch",
        lambda self, texts: (seen.append(max(map(len, texts))), real(self, texts))[1],
    )
    monkeypatch.setattr("ingot.tokenizers.encoders.LONGEST", 1000)
    book = "copper melts. " * 20_000
    choose_encoder(TOKENIZER, [book], [])
    assert seen
    assert max(seen) < len(book)
