"""SentencePiece models, BPE and unigram: Llama 2's `tokenizer.model`, T5's `spiece.model`. Owns the
sentencepiece library.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.markers import canonical_json
from ingot.tokenizers.batches import Batch, flatten
from ingot.tokenizers.cutter import Cutter
from ingot.tokenizers.protobuf import CONTROL, UNKNOWN, USER_DEFINED, read_model
from ingot.tokenizers.reference import without_special
from ingot.tokenizers.settings import added_tokens


class PiecesReference:
    """The `sentencepiece` library on one of its models. Control symbols in a text are ordinary
    characters to it.

    BOS stands before a text where the model has one; where it has none but padding, as T5's, EOS
    stands behind it. A special token that only the configuration names (T5's sentinels) has its id
    from `added_tokens_decoder`.

    Raises:
        WrongInput: the file is damaged, sentencepiece is not installed, or the configuration adds
            tokens that only its own tokenizer.json can match in text.
    """

    converted: str | None = None
    """A tokenizer.json that says the same."""

    def __init__(self, data: bytes, config: Mapping[str, Any], where: str) -> None:
        self.model = read_model(data, where)
        self._processor = _processor(data, where)
        self.library = f"sentencepiece {importlib.metadata.version('sentencepiece')}"
        pieces = self.model.pieces
        self.ids = {
            piece.text: index
            for index, piece in enumerate(pieces)
            if piece.kind in (CONTROL, UNKNOWN)
        }
        self.ids |= _more(
            config,
            len(pieces),
            {piece.text for piece in pieces if piece.kind == USER_DEFINED},
            where,
        )
        self.special, self.changes = (
            list(self.ids),
            "in SentencePiece a space is the character ▁, and its normalizer may change texts",
        )
        self.added = [piece.text for piece in pieces if piece.kind == USER_DEFINED]
        self._spelled = {index: text for text, index in self.ids.items()} | {
            index: piece.text for index, piece in enumerate(pieces)
        }
        self._index = {text: index for index, text in self._spelled.items()}
        self.vocab_size = max(self._spelled) + 1
        ids = {
            name: getattr(self._processor, f"{name}_id")() for name in ("bos", "eos", "pad", "unk")
        }
        self.named = {
            f"{name}_token": pieces[index].text for name, index in ids.items() if index >= 0
        }
        self.before = [ids["bos"]] if ids["bos"] >= 0 else []
        self.after = [ids["eos"]] if ids["bos"] < 0 <= min(ids["eos"], ids["pad"]) else []
        self.control = Cutter(self.ids, self.encode)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> Batch:
        return flatten([self._processor.encode(text) for text in texts])

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """What lies between two special tokens is decoded by itself."""
        special = set(self.ids.values()) - {self._processor.unk_id()}
        parts, run = list[str](), list[int]()
        for index in ids:
            if index not in special:
                run.append(index)
            elif not skip_special:
                parts += [self._decoded(run), self._spelled[index]]
                run = []
        return "".join([*parts, self._decoded(run)])

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(
            self._processor.decode([index for index in ids if 0 <= index < len(self.model.pieces)])
        )

    def token(self, index: int) -> str | None:
        return self._spelled.get(index)

    def token_id(self, text: str) -> int | None:
        return self._index.get(text)

    def text_json(self) -> str | None:
        return None if self.converted is None else without_special(self.converted)

    def state(self) -> dict[str, Any]:
        model = self.model
        about = [[piece.text, piece.score, piece.kind] for piece in model.pieces]
        how = [
            model.kind,
            model.add_dummy_prefix,
            model.remove_extra_whitespaces,
            model.escape_whitespaces,
            model.whitespace_as_suffix,
        ]
        digest = hashlib.sha256(canonical_json([about, how]).encode() + model.charsmap).hexdigest()
        return {"sentencepiece": digest, "special": self.ids}


def _more(config: Mapping[str, Any], begin: int, matched: set[str], where: str) -> dict[str, int]:
    tokens = added_tokens(config)
    new = [token for token in tokens if token.id >= begin]
    wrong = [token.content for token in new if not token.special] + [
        token.content for token in tokens if token.special and token.content in matched
    ]
    if wrong:
        raise WrongInput(
            f"{where} adds {wrong[0]!r}, which SentencePiece and transformers match in text in"
            " different ways; give its tokenizer.json"
        )
    return {token.content: token.id for token in new}


def _processor(data: bytes, where: str) -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise WrongInput(
            "a SentencePiece model needs sentencepiece; pip install sentencepiece"
        ) from None
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise WrongInput(
            f"{where} is no SentencePiece model ({str(error)[:100]}); fetch the file again"
        ) from None
