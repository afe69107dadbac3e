"""The tokenizer of all rooms: ids of texts, documents, prompts and chats.

The ids are those of the library that the tokenizer was made for, with one additional rule: text
never becomes a special token. Special tokens come only from BOS and EOS around a document and from
the chat template.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.storage import write_atomic
from ingot.tokenizers.backend import (
    TokenBatch,
    TokenizerBackend,
    encode_beside_others,
    json_backend,
)
from ingot.tokenizers.chats.chat import Chat, Messages, Tools
from ingot.tokenizers.chats.layouts import ChatLayouts
from ingot.tokenizers.chats.render import (
    NONE,
    ChatFormat,
    TemplateKwargs,
    mask_look_alikes,
    split_at_special,
)
from ingot.tokenizers.sentencepiece_backend import SentencePieceBackend
from ingot.tokenizers.settings import (
    CONVERSION_KEY,
    EXACT,
    MODEL_FILES,
    REFERENCE_KEY,
    Files,
    chat_template,
    named_tokens,
    read_config,
    text_of,
)
from ingot.tokenizers.tiktoken_backend import TiktokenBackend, is_ranks


def open_backend(files: Files, config: Mapping[str, Any], where: str) -> TokenizerBackend:
    """Open the file that defines the tokenizer: the one that the configuration names, else
    `tokenizer.json`, else a model.

    Raises:
        WrongInput: there is none, or its file cannot be read.
    """
    names = (
        [str(config[REFERENCE_KEY])]
        if config.get(REFERENCE_KEY) in files
        else ["tokenizer.json", *MODEL_FILES]
    )
    name = next((name for name in names if name in files), None)
    if name is None:
        raise WrongInput(
            f"{where} has none of {', '.join(names)}; copy the tokenizer's files there"
        )
    if name == "tokenizer.json":
        return json_backend(str(text_of(files, name)), where)
    data = files[name]
    data = data if isinstance(data, bytes) else data.encode()
    return open_model_backend(
        data,
        config,
        f"{where}/{name}",
        text_of(files, "tokenizer.json") if config.get(CONVERSION_KEY) == EXACT else None,
    )


def open_model_backend(
    data: bytes, config: Mapping[str, Any], where: str, converted: str | None = None
) -> TiktokenBackend | SentencePieceBackend:
    """Open a model file, tiktoken ranks or SentencePiece. `converted` is an equivalent
    tokenizer.json.
    """
    reference = (
        TiktokenBackend(data, config, where)
        if is_ranks(data)
        else SentencePieceBackend(data, config, where)
    )
    reference.converted = converted
    return reference


@dataclass(frozen=True)
class SpecialIds:
    """Ids of BOS, EOS and padding; None for those that the tokenizer does not have."""

    bos: int | None
    eos: int | None
    pad: int | None


class Tokenizer:
    """A tokenizer, given by its files. Thread-safe.

    Args:
        files: name -> content of `tokenizer.json`, or of a `tokenizer.model` as bytes, and if
            present of `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`.
        where: what to call it in messages.

    Raises:
        WrongInput: a file is not what its name says.
    """

    vocab_size: int
    """Largest id + 1, added tokens included."""
    special: SpecialIds
    adds_bos: bool
    """Whether the library itself puts BOS before a text."""
    template: str | None
    """The chat template, as Jinja."""
    before: list[int]
    """Ids before every text: BOS, or nothing."""
    after: list[int]
    """Ids after every document: EOS, or nothing."""
    frame: tuple[list[int], list[int]]
    """Ids before and after a text for models with an encoder (source and target): what the
    tokenizer's own post-processor adds, `[CLS]` and `[SEP]` for BERT. If it adds nothing after a
    text, EOS is used, since a target must have an end.
    """
    alone: tuple[list[int], list[int]]
    """The same around a text to classify: with an end only where the library itself puts one."""
    target_frame: tuple[list[int], list[int]]
    """The same around targets. It differs only if texts are marked with their language, as for NLLB
    and mBART (`src_lang` and `tgt_lang`).
    """
    unnamed_language: str | None
    """The language that frames both sources and targets because no `tgt_lang` is set; None if there
    is none.
    """
    files: dict[str, str | bytes]
    """The files by name: texts, and models as bytes."""
    library: str
    """The library whose ids these are, with its version."""
    special_texts: list[str]
    """The special and added tokens as text: what other text may look like."""
    special_ids: dict[str, int]
    """Every special token and its id."""
    mask: int | None
    """The token that stands for a hidden one; None if there is none."""
    never_masked: set[int]
    """What a masked language model is not asked for: special tokens, and the one for what the
    vocabulary lacks.
    """
    named: dict[str, str]
    """The texts of `bos_token`, `eos_token` and the like; the vocabulary may lack one of them."""

    def __init__(self, files: Files, where: str = "tokenizer") -> None:
        self.files, self._where = dict(files), where
        config = read_config(files, where)
        self._reference = open_backend(files, config, where)
        self._special, self.library = self._reference.special, self._reference.library
        self.special_texts = [*self._special, *self._reference.added]
        self.named = self._reference.named | named_tokens(config)
        self.special_ids = {
            text: index
            for text in self._special
            if (index := self._reference.token_id(text)) is not None
        }
        named = (self._reference.token_id(text) for text in self.named.values())
        self.never_masked = {*self.special_ids.values(), *(one for one in named if one is not None)}
        self.mask = self._reference.token_id(self.named.get("mask_token", ""))
        self.template = chat_template(files, config)
        self.vocab_size, before = self._reference.vocab_size, self._reference.before
        ids = {name: self._reference.token_id(text) for name, text in self.named.items()}
        self.special = SpecialIds(ids.get("bos_token"), ids.get("eos_token"), ids.get("pad_token"))
        # transformers rebuilds the frame of a text if the configuration sets `add_bos_token`
        # explicitly.
        asked = config.get("add_bos_token")
        self.adds_bos = self.special.bos is not None and (
            asked if isinstance(asked, bool) else before == [self.special.bos]
        )
        self.before = [self.special.bos] if self.adds_bos and self.special.bos is not None else []
        self.after = [] if self.special.eos is None else [self.special.eos]
        around = (
            before
            if not isinstance(asked, bool)
            else [*self.before, *(before[1:] if before[:1] == [self.special.bos] else before)]
        )
        frame = around, self._reference.after or self.after
        self.frame, _ = self._marked(frame, config, "src_lang")
        self.alone = self.frame[0], self.frame[1] if self._reference.after else []
        self.target_frame, self.unnamed_language = self._marked(self.frame, config, "tgt_lang")

    def _marked(
        self, frame: tuple[list[int], list[int]], config: Mapping[str, Any], knob: str
    ) -> tuple[tuple[list[int], list[int]], str | None]:
        """`frame` with the language of `knob` in place of its own, or prepended if it has none; and
        the language that stays in the frame because `knob` sets none.
        """
        kinds = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token")
        plain = {self._reference.token_id(self.named[kind]) for kind in kinds if kind in self.named}
        before, after = frame
        own = [token for token in (*before, *after) if token not in plain]
        name = config.get(knob)
        if not isinstance(name, str):
            return frame, str(self.token(own[0])) if own else None
        language = self._reference.token_id(name)
        if language is None or name not in self.special_texts:
            raise WrongInput(
                f"{self._where}: {knob} `{name}` is no special token of this tokenizer; set"
                " tokenizer.source_language and tokenizer.target_language to the tokens of its"
                " languages"
            )
        if not own:
            return ([language, *before], after), None
        swapped = [[language if token == own[0] else token for token in side] for side in frame]
        return (swapped[0], swapped[1]), None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added. Look-alikes of special tokens stay text."""
        return self._reference.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """`encode` of many texts: all ids concatenated, and the offset at which each text begins,
        [len(texts) + 1].
        """
        return self._reference.encode_batch(texts)

    def encode_document(self, text: str) -> list[int]:
        """Ids of a document to train on: BOS if the library adds one, the text, EOS if there is
        one.
        """
        return [*self.before, *self.encode(text), *self.after]

    def encode_framed(self, text: str) -> list[int]:
        """Ids of a text as the encoder of pairs reads it, with `frame` around it."""
        before, after = self.frame
        return [*before, *self.encode(text), *after]

    def encode_masked(self, text: str) -> list[int]:
        """The same of a text in which special tokens are special, as transformers reads it: its
        mask tokens hide something.
        """
        before, after = self.frame
        ids = self._reference.control.encode(text, add_special_tokens=False).ids
        return [*before, *ids, *after]

    def encode_alone(self, text: str) -> list[int]:
        """Ids of a text as the library itself frames it, with `alone` around it."""
        return [*self.alone[0], *self.encode(text), *self.alone[1]]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt to complete: BOS if the library adds one, the text."""
        return [*self.before, *self.encode(text)]

    def encode_chat(
        self,
        messages: Messages,
        tools: Tools | None = None,
        kwargs: TemplateKwargs = NONE,
    ) -> list[int]:
        """Ids of a chat by the tokenizer's own template, ending with the generation prompt.

        Special tokens, BOS included, come only from the template: look-alikes in a message stay
        text.

        Args:
            messages: each with `role` and `content`, and whatever else the template reads.
            tools: what the model may call, in OpenAI's format.
            kwargs: arguments of the template's own; what it never asks for changes nothing.

        Raises:
            WrongInput: there is no template, or it refuses these messages, or knows no tools.
        """
        form = self.chat_format
        if not messages or any(not isinstance(message.get("role"), str) for message in messages):
            raise WrongInput(
                "a chat is a list of one or more messages, each with a `role`; give at least one"
            )
        chat = form.as_read(Chat(messages, tools))
        (masked, named, told), originals = mask_look_alikes(
            [chat.messages, chat.tools, kwargs], self._special
        )
        text = form.with_tools(named).render(masked, generation_prompt=True, kwargs=told)
        if not originals:
            return encode_beside_others(form.control, text)
        ids: list[int] = []
        for is_special, piece in split_at_special(text, self._special, originals):
            ids += [self.special_ids[piece]] if is_special else self.encode(piece)
        return ids

    @property
    def chat_format(self) -> ChatFormat:
        """How chats are rendered and encoded.

        Raises:
            WrongInput: there is no template.
        """
        if not self.template:
            raise WrongInput(
                f"{self._where} has no chat template; train with tokenizer.template, or take a"
                " model or tokenizer that was made for chats"
            )
        return ChatFormat(
            self._where, self.template, self.special_ids, self.named, self._reference.control
        )

    @functools.cached_property
    def chat_layouts(self) -> ChatLayouts:
        """What the template writes around the contents of chats, as far as it was met."""
        return ChatLayouts(self.chat_format)

    @property
    def where(self) -> str:
        """Its name in error messages."""
        return self._where

    def decode(self, ids: Sequence[int] | npt.NDArray[Any], *, skip_special: bool = True) -> str:
        """Decode ids; bytes that are not UTF-8 become the replacement character."""
        return self._reference.decode([int(token) for token in ids], skip_special=skip_special)

    def token(self, index: int) -> str | None:
        """The vocabulary's entry for this id; None if there is none."""
        return self._reference.token(index) if index >= 0 else None

    def token_id(self, text: str) -> int | None:
        """The id of a vocabulary entry; None if there is none."""
        return self._reference.token_id(text)

    def plain_json(self) -> str | None:
        """A `tokenizer.json` without special tokens for fast libraries; None if there is no
        equivalent one.
        """
        return self._reference.plain_json()

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest entry of the vocabulary."""
        return max((len(self.token(index) or "") for index in range(self.vocab_size)), default=0)

    @property
    def lossy_reason(self) -> str | None:
        """Why decoding may, by design, not give the original text back; None if it always does."""
        return self._reference.lossy_reason

    def identity(self) -> str:
        """Fingerprint of all that decides about ids, the template included; not of file bytes."""
        return self._identity

    @property
    def ids_for_model(self) -> dict[str, int | None]:
        """A model configuration's token ids, by name: `bos`, `eos`, `pad`; if targets begin with
        their language, `forced_bos`; and the token that ends a target.
        """
        before, after = self.target_frame
        spoken = before[0] if before and self.target_frame != self.frame else None
        ends = {"forced_bos": spoken, "target_end": after[-1] if after else None}
        return {**asdict(self.special), **ends}

    @functools.cached_property
    def _identity(self) -> str:
        about = {
            "special": asdict(self.special),
            "adds_bos": self.adds_bos,
            "template": self.template,
        }
        return fingerprint({**self._reference.state(), **about})

    @property
    def template_identity(self) -> str | None:
        """Fingerprint of the chat template; None where there is none."""
        return None if self.template is None else fingerprint(self.template)

    @property
    def files_identity(self) -> str:
        """Fingerprint of the files' bytes, to see whether they have changed since they were
        saved.
        """
        contents = {
            name: content.encode() if isinstance(content, str) else content
            for name, content in self.files.items()
        }
        return fingerprint(
            {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        )

    def save(self, folder: Path) -> None:
        """Write the files into `folder`, each atomically; `load_tokenizer` and transformers'
        `AutoTokenizer` open it.

        Beside a model (`tokenizer.model`, `spiece.model`) a converted `tokenizer.json` is written
        for other tools. In `tokenizer_config.json` the key `ingot_reference` then names the model,
        which still defines the ids here, and `ingot_conversion` records whether both gave the same
        ids on all edge-case texts, or where they first differed.
        """
        for name, content in self.files.items():
            write_atomic(folder / name, content)
