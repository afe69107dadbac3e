"""Documents to token records: a pure function, the same on every engine.

A record is the same row of every column of its kind of document. Texts: BOS if the tokenizer has
one, the text, EOS. Chats: the chat as rendered by its template, and a mask of the trained tokens;
several such records where the template writes an answer otherwise once others follow.
Preferences: two such chats, of which only the answers are trained. Pairs: source and target, each
framed as the tokenizer frames a text. Labelled texts: the framed text, and the label. Masked texts:
the text alone, since each of its pieces gets a frame of its own. Existing
Megatron columns: their ids unchanged.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.config.sections.data import COLUMNS
from ingot.config.sections.objective import Documents
from ingot.data.columns.column import Column, bin_path
from ingot.data.columns.manifest import token_columns
from ingot.data.documents.chats import from_chat
from ingot.data.documents.examples import from_labelled, from_pair
from ingot.data.documents.messages import written
from ingot.data.documents.preferences import from_preference
from ingot.data.documents.rated import from_rated
from ingot.data.raw.ranges import RawRange
from ingot.data.splits import Shares, Split
from ingot.tokenizers.chats.chat import MARKS, Chat, Messages, is_trained
from ingot.tokenizers.chats.encode import encode_chats, encode_trained
from ingot.tokenizers.tokenizer import Tokenizer

# Version in the fingerprint of prepared data; raise it when the same documents would give other
# records, or more is told of them.
RECORDS = 2

EncodeBatch = Callable[[Sequence[str]], tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]
Ids = npt.NDArray[np.int32]
Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenRecords:
    """Consecutive records: the elements of each column, and the lengths of the records in it.

    `counts`: the number of records of each document, which is one but for some chats. `bytes` is
    the size of the texts that the model learns to write: of a chat what the assistant says, of a
    preference the chosen answer, of a pair the target; of a labelled text the text.
    """

    columns: dict[str, npt.NDArray[Any]]
    lengths: dict[str, Lengths]
    bytes: int
    counts: Lengths
    digest: int
    """Sum of the SHA-256 of the documents, so that it identifies the set of texts, independent of
    batching.
    """
    hashes: npt.NDArray[np.uint64]
    """The first 64 bits of the SHA-256 of each document."""
    rendered: int = 0
    """How many chats of the kind `chat` were rendered one by one, which is slower."""

    def record(self, index: int) -> dict[str, npt.NDArray[Any]]:
        ends = {name: int(lengths[: index + 1].sum()) for name, lengths in self.lengths.items()}
        return {
            name: column[ends[name] - int(self.lengths[name][index]) : ends[name]]
            for name, column in self.columns.items()
        }

    def of_document(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """All records of one document, one after another."""
        first = int(self.counts[:index].sum())
        found = [self.record(first + number) for number in range(int(self.counts[index]))]
        return {name: np.concatenate([one[name] for one in found]) for name in self.columns}

    @property
    def tokens(self) -> int:
        return sum(len(self.columns[name]) for name in token_columns(list(self.columns)))


def encode_records(
    documents: Documents,
    tokenizer: Tokenizer,
    encode_batch: EncodeBatch,
    texts: Sequence[str],
    prefix: str = "",
    *,
    whole: bool = False,
) -> TokenRecords:
    """The records of documents as `ingest` stores them.

    Args:
        encode_batch: encodes texts to the same ids as the tokenizer itself.
        prefix: prepended to the source of every pair.
        whole: make one record of a chat, in which its last answer is trained alone where the
            template writes an earlier one otherwise.

    Raises:
        WrongInput: the chat template refuses a chat.
    """
    digest, hashes = _hashed(text.encode() for text in texts)
    counts, rendered = np.ones(len(texts), np.int64), 0
    if documents == "chat":
        digest += _hashed(text.encode() for text in _untrained(texts))[0]
        made, size, counts, rendered = _chats(tokenizer, encode_batch, texts, whole)
    else:
        made, size = _ENCODE[documents](tokenizer, encode_batch, texts, prefix)
    names = COLUMNS[documents]
    columns = dict(zip(names, (flat for flat, _ in made), strict=True))
    lengths = dict(zip(names, (lengths for _, lengths in made), strict=True))
    return TokenRecords(columns, lengths, size, counts, digest, hashes, rendered)


def _hashed(documents: Iterable[bytes]) -> tuple[int, npt.NDArray[np.uint64]]:
    """`digest` and `hashes` of `TokenRecords`."""
    digests = [hashlib.sha256(document).digest() for document in documents]
    words = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 4)
    return sum(map(int.from_bytes, digests)), words[:, 0].copy()


EncodedColumns = tuple[list[tuple[npt.NDArray[Any], Lengths]], int]
"""The columns with the lengths of their records, and the bytes that the model learns to write."""


def _texts(
    tokenizer: Tokenizer, encode_batch: EncodeBatch, texts: Sequence[str], prefix: str
) -> EncodedColumns:
    return [encode_documents(tokenizer, texts, encode_batch)], sum(map(_bytes_of, texts))


def _chats(
    tokenizer: Tokenizer, encode_batch: EncodeBatch, texts: Sequence[str], whole: bool
) -> tuple[list[tuple[npt.NDArray[Any], Lengths]], int, Lengths, int]:
    chats = [from_chat(text) for text in texts]
    if whole:
        chats = [_through_trained(chat) for chat in chats]
    made, firsts = encode_trained(tokenizer, chats, encode_batch), [0] * len(chats)
    if whole and (made.counts > 1).any():
        firsts = [
            _last_answer(chat.messages) if count > 1 else 0
            for chat, count in zip(chats, made.counts.tolist(), strict=True)
        ]
        made = encode_trained(tokenizer, chats, encode_batch, firsts)
    columns: list[tuple[npt.NDArray[Any], Lengths]] = [
        (made.ids, made.lengths),
        (made.mask, made.lengths),
    ]
    said = sum(_spoken(chat.messages[first:]) for chat, first in zip(chats, firsts, strict=True))
    return columns, said, made.counts, made.rendered


def _through_trained(chat: Chat) -> Chat:
    """The chat without answers behind the last one that is trained, which nothing asks for."""
    answers = [number for number, one in enumerate(chat.messages) if one["role"] == "assistant"]
    trained = [number for number in answers if is_trained(chat.messages[number])]
    return chat.until(trained[-1] + 1) if trained and trained[-1] < answers[-1] else chat


def _untrained(texts: Iterable[str]) -> Iterator[str]:
    """Chats of which an answer is not trained: loss is measured on others than without its mark."""
    for text in texts:
        if any(f'"{mark}"' in text for mark in MARKS):
            answers = (one for one in from_chat(text).messages if one["role"] == "assistant")
            if not all(map(is_trained, answers)):
                yield f"untrained {text}"


def _last_answer(messages: Messages) -> int:
    """The number of the last message that is the assistant's."""
    return max(number for number, one in enumerate(messages) if one["role"] == "assistant")


def _preferences(
    tokenizer: Tokenizer, encode_batch: EncodeBatch, texts: Sequence[str], prefix: str
) -> EncodedColumns:
    found = [from_preference(text) for text in texts]
    # All sides at once: a text that occurs in both, such as the prompt, is encoded once.
    chats = [one.sides[side] for side in range(2) for one in found]
    flat, mask, lengths = encode_chats(
        tokenizer, chats, encode_batch, [len(one.prompt) for one in found] * 2
    )
    cut = int(lengths[: len(found)].sum())
    chosen, rejected = lengths[: len(found)], lengths[len(found) :]
    columns: list[tuple[npt.NDArray[Any], Lengths]] = [
        (flat[:cut], chosen),
        (mask[:cut], chosen),
        (flat[cut:], rejected),
        (mask[cut:], rejected),
    ]
    return columns, sum(_spoken(one.chosen) for one in found)


def _rated(
    tokenizer: Tokenizer, encode_batch: EncodeBatch, texts: Sequence[str], prefix: str
) -> EncodedColumns:
    found = [from_rated(text) for text in texts]
    flat, mask, lengths = encode_chats(
        tokenizer, [one.chat for one in found], encode_batch, [len(one.prompt) for one in found]
    )
    labels = np.array([one.label for one in found], np.int32), np.ones(len(found), np.int64)
    return [(flat, lengths), (mask, lengths), labels], sum(_spoken(one.answer) for one in found)


def _pairs(
    tokenizer: Tokenizer, encode_batch: EncodeBatch, texts: Sequence[str], prefix: str
) -> EncodedColumns:
    pairs = [from_pair(text) for text in texts]
    sides = [prefix + pair.source for pair in pairs], [pair.target for pair in pairs]
    frames = tokenizer.frame, tokenizer.target_frame
    framed = [
        _framed(encode_batch, side, *frame) for side, frame in zip(sides, frames, strict=True)
    ]
    return framed, sum(len(pair.target.encode()) for pair in pairs)


def _labelled(
    tokenizer: Tokenizer, encode_batch: EncodeBatch, texts: Sequence[str], prefix: str
) -> EncodedColumns:
    found = [from_labelled(text) for text in texts]
    labels = np.array([one.label for one in found], np.int32), np.ones(len(found), np.int64)
    return [_framed(encode_batch, [one.text for one in found], *tokenizer.alone), labels], sum(
        len(one.text.encode()) for one in found
    )


def _masked(
    tokenizer: Tokenizer, encode_batch: EncodeBatch, texts: Sequence[str], prefix: str
) -> EncodedColumns:
    return [_framed(encode_batch, texts, [], [])], sum(map(_bytes_of, texts))


_ENCODE: dict[Documents, Callable[[Tokenizer, EncodeBatch, Sequence[str], str], EncodedColumns]] = {
    "text": _texts,
    "preference": _preferences,
    "rated": _rated,
    "pair": _pairs,
    "labelled": _labelled,
    "masked": _masked,
}


def _bytes_of(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def _spoken(messages: Messages) -> int:
    """Bytes of what the assistant says, thinks and calls in messages that are trained."""
    return sum(
        _bytes_of(text)
        for message in messages
        if message["role"] == "assistant" and is_trained(message)
        for text in written(message)
    )


def encode_documents(
    tokenizer: Tokenizer, texts: Sequence[str], encode_batch: EncodeBatch | None = None
) -> tuple[Ids, Lengths]:
    """`Tokenizer.encode_document` of each text: the concatenated ids, and the length of each
    text.
    """
    return _framed(encode_batch or tokenizer.encode_batch, texts, tokenizer.before, tokenizer.after)


def frame_of(documents: Documents, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids before and after each text of pairs (sources), labelled or masked texts."""
    return tokenizer.alone if documents == "labelled" else tokenizer.frame


def _framed(
    encode_batch: EncodeBatch, texts: Sequence[str], before: Sequence[int], after: Sequence[int]
) -> tuple[Ids, Lengths]:
    """Ids of each text with `before` prepended and `after` appended."""
    flat, offsets = encode_batch(texts)
    lengths = np.diff(offsets) + (len(before) + len(after))
    ends = np.cumsum(lengths)
    framed = np.empty(len(flat) + len(texts) * (len(before) + len(after)), np.int32)
    inner = np.ones(len(framed), np.bool_)
    for position, tokens in ((ends - lengths, before), (ends - len(after), after)):
        for shift, token in enumerate(tokens):
            framed[position + shift] = token
            inner[position + shift] = False
    framed[inner] = flat
    return framed, lengths


def identity(
    documents: Documents, tokenizer: Tokenizer, prefix: str = "", *, whole: bool = False
) -> dict[str, Any]:
    """What determines the records beside the documents."""
    about: dict[str, Any] = {
        "version": RECORDS,
        "documents": documents,
        "whole": whole,
        "tokenizer": tokenizer.identity(),
    }
    if documents in ("pair", "labelled", "masked"):
        about["frame"] = frame_of(documents, tokenizer)
    if documents == "pair" and tokenizer.target_frame != tokenizer.frame:
        about["target_frame"] = tokenizer.target_frame
    return about | {"prefix": prefix} if documents == "pair" else about


BATCH_TOKENS = 500_000


def existing_records(
    task: RawRange, shares: Shares, tokenizer: Tokenizer, splits: Counter[Split | None]
) -> Iterator[tuple[Split, TokenRecords]]:
    """The documents of a range, about a megabyte at a time. Bytes are counted for held-out
    documents only, by decoding them. `splits` counts all documents, also those of none.

    Raises:
        WrongInput: an id is not in the vocabulary, so these columns were made by another tokenizer.
    """
    waiting: dict[Split, list[Ids]] = {}
    tokens: Counter[Split] = Counter()
    for doc_id, stored in _documents(task):
        low, high = (int(stored.min()), int(stored.max())) if len(stored) else (0, 0)
        if not 0 <= low <= high < tokenizer.vocab_size:
            raise WrongInput(
                f"{bin_path(Path(task.path))}: document {doc_id} has the id"
                f" {low if low < 0 else high:,}, the tokenizer only {tokenizer.vocab_size:,} ids;"
                " another one made these columns: set tokenizer.source to it"
            )
        ids = stored.astype(np.int32)  # only now, since it cuts large ones
        split = shares.split(task.split, doc_id)
        splits[split] += 1
        if split is None:
            continue
        waiting.setdefault(split, []).append(ids)
        tokens[split] += len(ids)
        if tokens[split] >= BATCH_TOKENS:
            yield split, _token_records(waiting.pop(split), split, tokenizer)
            tokens[split] = 0
    for split, batch in waiting.items():
        yield split, _token_records(batch, split, tokenizer)


def _documents(task: RawRange) -> Iterator[tuple[str, npt.NDArray[np.integer[Any]]]]:
    """(doc_id, ids as they are stored); a document is all sequences that Megatron's document index
    groups together.
    """
    column, name = Column(Path(task.path)), Path(task.path).name
    counts = column.document_lengths()
    first = int(counts[: task.within].sum())
    for number, count in enumerate(
        counts[task.within : task.within + task.documents].tolist(), start=task.within + 1
    ):
        yield f"{name}:{number}", column.slice(column.begin(first), column.begin(first + count))
        first += count


def _token_records(documents: list[Ids], split: Split, tokenizer: Tokenizer) -> TokenRecords:
    size = (
        sum(len(tokenizer.decode(ids).encode()) for ids in documents)
        if split == "validation"
        else 0
    )
    digest, hashes = _hashed(ids.tobytes() for ids in documents)
    return TokenRecords(
        {"tokens": np.concatenate(documents)},
        {"tokens": np.array([len(ids) for ids in documents], np.int64)},
        size,
        np.ones(len(documents), np.int64),
        digest,
        hashes,
    )
