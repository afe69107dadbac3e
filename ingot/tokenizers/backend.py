"""The interface of tokenizer libraries behind `Tokenizer`, and the backend of Hugging Face's
`tokenizers` library. A backend is the reference: its ids are right by definition.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson
import tokenizers

from ingot.base.errors import WrongInput

TokenBatch = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
"""All ids of a batch of texts, concatenated, and the offset at which each text begins, [texts +
1].
"""


def flatten(lists: Sequence[Sequence[int]]) -> TokenBatch:
    """Concatenate lists of ids into one flat array with offsets."""
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    flat = np.empty(int(offsets[-1]), np.int32)
    for index, ids in enumerate(lists):
        flat[offsets[index] : offsets[index + 1]] = ids
    return flat, offsets


def split_batch(batch: TokenBatch) -> Iterator[list[int]]:
    """The ids of each text of a batch."""
    flat, offsets = batch
    return (flat[begin:end].tolist() for begin, end in itertools.pairwise(offsets.tolist()))


# Prefix that makes a vocabulary entry unreachable from text: a space, which such vocabularies spell
# differently, and a character without meaning.
UNREACHABLE = " \U0010ffff"


class HasIds(Protocol):
    """The result of an encoding: anything with ids."""

    @property
    def ids(self) -> list[int]: ...


class ControlEncoder(Protocol):
    """Encodes text in which special tokens are special: a rendered chat."""

    def encode(self, sequence: str, *, add_special_tokens: bool) -> HasIds: ...


class TokenizerBackend(Protocol):
    """A library opened on one tokenizer. Its ids are the reference. Text never becomes a special
    token, except through `control`.
    """

    library: str
    """The library with its version."""
    special: list[str]
    """The special tokens, as text."""
    added: list[str]
    """Added tokens that are not special: text may contain them."""
    named: dict[str, str]
    """`bos_token` and similar names with their tokens, as far as the library or its file knows
    them.
    """
    vocab_size: int
    before: list[int]
    """Ids that the library itself puts before a text."""
    after: list[int]
    """Ids that it puts after a text."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch: ...

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str: ...

    def token(self, index: int) -> str | None: ...

    def token_id(self, text: str) -> int | None: ...

    def state(self) -> dict[str, Any]:
        """Everything that determines ids, for the identity of the tokenizer."""

    def plain_json(self) -> str | None:
        """A tokenizer.json that encodes plain text exactly as this backend does and has no special
        tokens; None if there is none.
        """

    @property
    def lossy_reason(self) -> str | None:
        """Why decoding may, by design, not give the original text back; None if it always does."""

    @property
    def control(self) -> ControlEncoder: ...


LONG_TEXT = 10_000
"""Characters from which on an encoding takes so long that other threads must run meanwhile."""


def encode_beside_others(encoder: ControlEncoder, text: str) -> list[int]:
    """Ids of a text, nothing added. A long one is encoded as a batch of one: only then does the
    `tokenizers` library let other threads run.
    """
    if len(text) < LONG_TEXT or not isinstance(encoder, tokenizers.Tokenizer):
        return encoder.encode(text, add_special_tokens=False).ids
    (encoding,) = encoder.encode_batch_fast([text], add_special_tokens=False)
    return encoding.ids


_opened: weakref.WeakValueDictionary[str, JsonBackend] = weakref.WeakValueDictionary()


def json_backend(text: str, where: str) -> JsonBackend:
    """The backend of a tokenizer.json; that of another tokenizer with the same file while there is
    one, since a large vocabulary takes half a second to read.

    Raises:
        WrongInput: `text` is no tokenizer.json.
    """
    found = _opened.get(text)
    if found is None:
        found = _opened[text] = JsonBackend(text, where)
    return found


class JsonBackend:
    """The backend of Hugging Face's `tokenizers` library, on a tokenizer.json.

    Raises:
        WrongInput: `text` is no tokenizer.json.
    """

    library = f"tokenizers {tokenizers.__version__}"

    def __init__(self, text: str, where: str) -> None:
        self._json, self._where = text, where
        self._reference = parse(text, where)
        known = [
            token for token in self._reference.get_added_tokens_decoder().values() if token.content
        ]
        self.special = [token.content for token in known if token.special]
        self.added = [token.content for token in known if not token.special]
        self._text = sealed(self._reference, self.special, where)
        self.vocab_size = (
            max(self._reference.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        self.before, self.after = framing_tokens(self._reference)
        self.named = (
            {"bos_token": str(self._reference.id_to_token(self.before[0]))}
            if len(self.before) == 1
            else {}
        )

    def encode(self, text: str) -> list[int]:
        return encode_beside_others(self._text, text)

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        encodings = self._text.encode_batch_fast(list(texts), add_special_tokens=False)
        return flatten([encoding.ids for encoding in encodings])

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return str(self._reference.decode(ids, skip_special_tokens=skip_special))

    def token(self, index: int) -> str | None:
        return self._reference.id_to_token(index)

    def token_id(self, text: str) -> int | None:
        return self._reference.token_to_id(text)

    def state(self) -> dict[str, Any]:
        return id_state(self._reference)

    def plain_json(self) -> str:
        return without_special(self._json if self._text is self._reference else self._text.to_str())

    @property
    def lossy_reason(self) -> str | None:
        return _lossy_reason(json.loads(self._json))

    @functools.cached_property
    def control(self) -> tokenizers.Tokenizer:
        return _twin(self._reference) or parse(self._json, self._where)


def _lossy_reason(state: dict[str, Any]) -> str | None:
    normalizer, cutting = state.get("normalizer"), json.dumps(state.get("pre_tokenizer"))
    if normalizer is not None:
        return f"its normalizer ({normalizer['type']}) changes texts"
    if "ByteLevel" not in cutting:
        return "it does not work on bytes"
    return "it puts a space before a text" if '"add_prefix_space": true' in cutting else None


def without_special(text: str) -> str:
    """A tokenizer.json without its special tokens and without the post-processor that adds them."""
    state = orjson.loads(text)
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["special"]]
    state.update(post_processor=None, truncation=None, padding=None)
    return orjson.dumps(state).decode()


def parse(text: str, where: str) -> tokenizers.Tokenizer:
    """A tokenizer that neither truncates nor pads, whatever its file asks for.

    Raises:
        WrongInput: `text` is no tokenizer.json.
    """
    try:
        reference = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise WrongInput(
            f"{where}/tokenizer.json cannot be read ({str(error)[:120]}); fetch or save the"
            " tokenizer again"
        ) from error
    reference.no_truncation()
    reference.no_padding()
    return reference


def _twin(reference: tokenizers.Tokenizer) -> tokenizers.Tokenizer | None:
    """Another tokenizer that shares the vocabulary, in which special tokens are special: made in
    none of the time that it takes to read it. None if the added tokens would not be the same.
    """
    twin = tokenizers.Tokenizer(reference.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(reference, name)) is not None:
            setattr(twin, name, part)
    added = reference.get_added_tokens_decoder()
    for index in sorted(added):
        twin.add_tokens([added[index]])
    found = twin.get_added_tokens_decoder()
    same = {index: token.__getstate__() for index, token in added.items()} == {
        index: token.__getstate__() for index, token in found.items()
    }
    return twin if same else None


def sealed(
    reference: tokenizers.Tokenizer, special: Sequence[str], where: str
) -> tokenizers.Tokenizer:
    """The tokenizer, changed so that no text becomes a special token.

    The library's own switch keeps added tokens from matching, but where a special token is also an
    entry of the model's vocabulary (T5's `</s>`) the model still finds it in text. Such entries are
    renamed to something that no text contains.

    Raises:
        WrongInput: merges make or take such an entry, so that texts need it.
    """
    reference.encode_special_tokens = True
    leaks = {
        text
        for text in special
        if reference.token_to_id(text) in reference.encode(text, add_special_tokens=False).ids
    }
    if not leaks:
        return reference
    state = json.loads(reference.to_str())
    for merge in state["model"].get("merges", []):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if found := leaks & {*parts, "".join(parts)}:
            raise WrongInput(
                f"the special token {min(found)!r} of {where}/tokenizer.json is also made by its"
                " merges, so that texts would hold it; make a token of its own the special one"
            )
    rename = {text: UNREACHABLE + text for text in leaks}
    vocabulary = state["model"]["vocab"]
    if isinstance(vocabulary, dict):
        state["model"]["vocab"] = {
            rename.get(text, text): token for text, token in vocabulary.items()
        }
    else:
        state["model"]["vocab"] = [[rename.get(text, text), score] for text, score in vocabulary]
    if state["model"].get("unk_token") in rename:
        state["model"]["unk_token"] = rename[state["model"]["unk_token"]]
    for token in state["added_tokens"]:
        token["content"] = rename.get(token["content"], token["content"])
    state["post_processor"] = None
    sealed = parse(json.dumps(state, ensure_ascii=False), "tokenizer")
    sealed.encode_special_tokens = True
    return sealed


def framing_tokens(reference: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer itself puts before and after a text, found by encoding one."""
    text = _some_text(reference)
    bare, framed = (
        reference.encode(text, add_special_tokens=framed).ids for framed in (False, True)
    )
    for begin in range(len(framed) - len(bare) + 1):
        if framed[begin : begin + len(bare)] == bare:
            return framed[:begin], framed[begin + len(bare) :]
    return [], []


def _some_text(reference: tokenizers.Tokenizer) -> str:
    """A text with at least one id, so that special tokens before it can be told from those after
    it: "a", or an entry of the vocabulary if that has none (as in a vocabulary of DNA letters).
    """

    def has_ids(text: str) -> bool:
        return bool(reference.encode(text, add_special_tokens=False).ids)

    if has_ids("a"):
        return "a"
    added = {token.content for token in reference.get_added_tokens_decoder().values()}
    own = sorted(reference.get_vocab(with_added_tokens=False).keys() - added)
    return next(filter(has_ids, own), "a")


def id_state(reference: tokenizers.Tokenizer) -> dict[str, Any]:
    """Everything that determines ids, without empty values and without settings for character
    offsets, so that saving the file again does not change it.
    """
    state = orjson.loads(reference.to_str())
    return {
        name: _without_defaults(state.get(name))
        for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")
    }


def _without_defaults(value: Any) -> Any:
    if isinstance(value, dict):
        if set(map(type, value.values())) == {int}:  # a vocabulary
            return {key: item for key, item in value.items() if key != "trim_offsets"}
        return {
            key: _without_defaults(item)
            for key, item in value.items()
            if key != "trim_offsets" and item is not None and item != "" and item is not False
        }
    if not isinstance(value, list) or _is_plain(value):
        return value
    return [_without_defaults(item) for item in value]


PLAIN = {str, int, float}


def _is_plain(value: list[Any]) -> bool:
    """Whether a list holds texts and numbers alone, or short lists of such, as merges and some
    vocabularies do by the hundred thousand.
    """
    kinds = set(map(type, value))
    return kinds <= PLAIN or (
        kinds == {list} and set(map(type, itertools.chain.from_iterable(value))) <= PLAIN
    )


@dataclass(frozen=True)
class EncodedIds:
    """Ids of a text, in the shape that `ControlEncoder` returns."""

    ids: list[int]


class SpecialTokenSplitter:
    """Encodes rendered chats for libraries that only encode plain text: each special token becomes
    its id, and the text between them is passed to `encode`.
    """

    def __init__(self, special: Mapping[str, int], encode: Callable[[str], list[int]]) -> None:
        self._special, self._encode = special, encode
        # Longer tokens first, so that a token is not mistaken for a shorter one that it begins
        # with.
        self._pattern = re.compile(
            f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})"
            if special
            else r"((?!))"
        )

    def encode(self, sequence: str, *, add_special_tokens: bool) -> EncodedIds:
        """Adds nothing around the text, whatever `add_special_tokens` says: the chat template has
        already done that.
        """
        ids: list[int] = []
        for number, piece in enumerate(self._pattern.split(sequence)):
            if piece:
                ids += [self._special[piece]] if number % 2 else self._encode(piece)
        return EncodedIds(ids)
