"""One face over a reference tokenizer: ids of texts, documents, prompts and chats.

The ids are those of the `tokenizers` library, with one rule on top: text is text. What looks like a special token in it
stays ordinary characters; only BOS and EOS around a document and the chat template put special tokens in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from ingot.base.errors import WrongInput
from ingot.base.fingerprint import fingerprint
from ingot.base.storage import write_atomic
from ingot.tokenizers.chat import mask, pieces, render
from ingot.tokenizers.reference import chat_template, named_tokens, parse, read_config, state_of, tokens_around, without_leaks


@dataclass(frozen=True)
class Special:
    """Ids of the tokens that frame a text; None where the tokenizer has none."""

    bos: int | None
    eos: int | None
    pad: int | None


class Tokenizer:
    """A tokenizer as its Hugging Face files say it. Safe to use from several threads.

    Args:
        files: name -> content of `tokenizer.json` and, where there are such, `tokenizer_config.json`,
            `special_tokens_map.json`, `chat_template.jinja`.
        where: what to call it in messages.

    Raises:
        WrongInput: a file is not what its name says.
    """

    vocab_size: int
    """Largest id + 1, added tokens included."""
    special: Special
    adds_bos: bool
    """Whether the reference itself puts BOS before a text."""
    template: str | None
    """The chat template, as Jinja."""
    before: list[int]
    """What stands before every text: BOS, or nothing."""
    after: list[int]
    """What stands after every document: EOS, or nothing."""
    files: dict[str, str]
    """The Hugging Face files by name."""

    def __init__(self, files: Mapping[str, str], where: str = "tokenizer") -> None:
        self.files, self._where = dict(files), where
        self._reference = parse(files["tokenizer.json"], where)
        self._special = [token.content for token in self._reference.get_added_tokens_decoder().values() if token.special and token.content]
        self._text = without_leaks(self._reference, self._special)
        config = read_config(files, where)
        self._named = named_tokens(config)
        self.template = chat_template(files, config)
        self.vocab_size = max(self._reference.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        before, _ = tokens_around(self._reference)
        if "bos_token" not in self._named and len(before) == 1:
            self._named["bos_token"] = str(self._reference.id_to_token(before[0]))
        ids = {name: self._reference.token_to_id(text) for name, text in self._named.items()}
        self.special = Special(ids.get("bos_token"), ids.get("eos_token"), ids.get("pad_token"))
        # transformers rebuilds what stands around a text where the configuration says so in so many words.
        asked = config.get("add_bos_token")
        self.adds_bos = self.special.bos is not None and (asked if isinstance(asked, bool) else before == [self.special.bos])
        self.before = [self.special.bos] if self.adds_bos and self.special.bos is not None else []
        self.after = [] if self.special.eos is None else [self.special.eos]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added. What looks like a special token stays text."""
        return self._text.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """`encode` of many texts: all ids one after the other, and where each text begins, [len(texts) + 1]."""
        encodings = self._text.encode_batch_fast(list(texts), add_special_tokens=False)
        offsets = np.zeros(len(encodings) + 1, np.int64)
        np.cumsum([len(encoding) for encoding in encodings], out=offsets[1:])
        flat = np.empty(int(offsets[-1]), np.int32)
        for index, encoding in enumerate(encodings):
            flat[offsets[index] : offsets[index + 1]] = encoding.ids
        return flat, offsets

    def encode_document(self, text: str) -> list[int]:
        """Ids of a text to train on: BOS where the reference puts one, the text, EOS where there is one."""
        return [*self.before, *self.encode(text), *self.after]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text to go on from: BOS where the reference puts one, the text."""
        return [*self.before, *self.encode(text)]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a chat by the tokenizer's own template, ready for the assistant's next turn.

        Special tokens come from the template alone, BOS included: look-alikes in a message stay text.

        Args:
            messages: `{"role": ..., "content": ...}` each, and whatever else the template reads.

        Raises:
            WrongInput: there is no template, or it refuses these messages.
        """
        if self.template is None:
            raise WrongInput(f"{self._where} has no chat template; send a plain prompt, or use a model that was tuned on chats")
        if not messages or any(not isinstance(message.get("role"), str) for message in messages):
            raise WrongInput("a chat is a list of one or more messages, each with a `role`; give at least one")
        masked, originals = mask(messages, self._special)
        text = render(self.template, masked, self._named, generation_prompt=True)
        if not originals:
            return self._control.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        for is_special, piece in pieces(text, self._special, originals):
            ids += self._control.encode(piece, add_special_tokens=False).ids if is_special else self.encode(piece)
        return ids

    @functools.cached_property
    def _control(self) -> tokenizers.Tokenizer:
        """The reference as it is, which makes special tokens of what looks like them; for rendered templates only."""
        return parse(self.files["tokenizer.json"], self._where)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any], *, skip_special: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become the replacement character."""
        return str(self._reference.decode([int(token) for token in ids], skip_special_tokens=skip_special))

    def token(self, index: int) -> str | None:
        """How the vocabulary spells the token with this id; None where there is none."""
        return self._reference.id_to_token(index) if index >= 0 else None

    def identity(self) -> str:
        """Fingerprint of what decides about ids: vocabulary, merges, normalisation, special tokens, template. Not of file bytes."""
        return self._identity

    @functools.cached_property
    def _identity(self) -> str:
        about = {"special": asdict(self.special), "adds_bos": self.adds_bos, "template": self.template}
        return fingerprint({**state_of(self._reference), **about})

    @property
    def template_identity(self) -> str | None:
        """Fingerprint of the chat template; None where there is none."""
        return None if self.template is None else fingerprint(self.template)

    def save(self, folder: Path) -> None:
        """Write the Hugging Face files into `folder`, each at once; `AutoTokenizer` opens it."""
        for name, content in self.files.items():
            write_atomic(folder / name, content)
