"""The exported folder as other tools read it: transformers opens model, tokenizer and chat
template, PEFT the adapter. Only this file imports them.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.base.errors import WrongInput, one_line, some_of
from ingot.config.models.rotary import overridden
from ingot.config.models.source import ModelKind, model_config
from ingot.config.recipe import Recipe
from ingot.data.cleaning.documents import read_documents
from ingot.data.columns.column import Column, column_prefix
from ingot.data.columns.manifest import PreparedData
from ingot.data.documents.chats import from_chat
from ingot.data.documents.preferences import from_preference
from ingot.data.documents.rated import from_rated
from ingot.models.adapters.lora import is_within
from ingot.models.hf.config import AUTO
from ingot.tokenizers.chats.chat import Chat
from ingot.tokenizers.chats.encode import encode_trained
from ingot.tokenizers.chats.render import strings_in
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.verify.proof import Check

CLASSES: dict[ModelKind, str] = {"decoder": "AutoModelForCausalLM", **AUTO}
"""transformers' class that opens each kind of model."""
MAX_NAMED = 3


class CannotOpen(Exception):
    """transformers or PEFT cannot open a folder, or not all of it; the message says why."""


@dataclass(frozen=True)
class TransformersModel:
    """A model of transformers', in evaluation mode."""

    kind: ModelKind
    inner: Any

    def to(self, device: torch.device, dtype: torch.dtype) -> TransformersModel:
        return TransformersModel(self.kind, self.inner.to(device=device, dtype=dtype))

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], targets: Sequence[int] = ()) -> Tensor:
        """Float32, on the CPU: `[T, V]` of a decoder's `tokens` or of the `targets` behind a
        source, `[1, C]` of a text to classify; `[T, V]` of a masked language model's tokens.
        """
        ids = torch.tensor([list(tokens)], device=self.inner.device)
        # Only ids are given: masks, positions and the shift of targets are left to transformers, as
        # its users do.
        labels = (
            {"labels": torch.tensor([list(targets)], device=self.inner.device)}
            if self.kind == "seq2seq"
            else {}
        )
        logits: Tensor = self.inner(
            input_ids=ids, attention_mask=torch.ones_like(ids), **labels
        ).logits
        return (logits if self.kind == "encoder" else logits[0]).float().cpu()

    @torch.no_grad()
    def scores(self, chats: Sequence[Sequence[int]]) -> list[float]:
        """The score of each of several chats, which stand in one batch, padded with the model's own
        padding.
        """
        most, pad = max(map(len, chats)), self.inner.config.pad_token_id
        ids = torch.tensor(
            [[*chat, *[pad] * (most - len(chat))] for chat in chats], device=self.inner.device
        )
        seen = torch.tensor(
            [[1] * len(chat) + [0] * (most - len(chat)) for chat in chats], device=self.inner.device
        )
        found: list[float] = self.inner(ids, attention_mask=seen).logits[:, 0].float().tolist()
        return found

    @torch.no_grad()
    def written(self, tokens: Sequence[int], most: int) -> list[int]:
        """The greedy continuation of `tokens` by a decoder, or the greedy output of a
        sequence-to-sequence model.
        """
        ids = torch.tensor([list(tokens)], device=self.inner.device)
        made = self.inner.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=1,
            max_length=None,
            max_new_tokens=most,
        )
        # A decoder returns the prompt too, the other kind its start token.
        found: list[int] = made[0, len(tokens) if self.kind == "decoder" else 1 :].tolist()
        return found

    @property
    def stops(self) -> set[int]:
        """The tokens at which transformers stops generating."""
        value = self.inner.generation_config.eos_token_id
        return set(value if isinstance(value, list) else [] if value is None else [value])

    @property
    def labels(self) -> list[str]:
        """The names of a classifier's classes, by number."""
        names: Mapping[int, str] = self.inner.config.id2label
        return [names[number] for number in sorted(names)]


def open_transformers(
    folder: Path,
    kind: ModelKind,
    *,
    labels: Sequence[str] = (),
    changed: Mapping[str, Any] | None = None,
    held: Sequence[str] = (),
) -> TransformersModel:
    """Open the model in `folder` in float32 on the CPU, with the values in `changed` of its
    configuration. `held`: modules that an adapter has, so that they need not be in the folder;
    `labels`: the classes of such a head.

    Raises:
        CannotOpen: transformers refuses it, or would fill what it does not find there with random
            numbers.
    """
    library = _transformers()
    # The base of a classifier's adapter has no head for its classes: the adapter has it.
    asked: dict[str, Any] = (
        {"num_labels": len(labels), "ignore_mismatched_sizes": True} if labels else {}
    )
    try:
        if changed:
            values = overridden(model_config(folder), changed)
            if labels:
                values |= {"id2label": dict(enumerate(labels))}
                values.pop("label2id", None)
                del asked["num_labels"]
            asked["config"] = library.AutoConfig.for_model(**values)
        opener = getattr(library, CLASSES[kind])
        model, about = opener.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True, **asked
        )
    except Exception as error:  # each architecture fails in its own way
        raise CannotOpen(
            f"transformers does not open {folder} ({one_line(error, kind=True)})"
        ) from None
    missing = [name for name in sorted(about["missing_keys"]) if not is_within(name, held)]
    surplus = [] if held else sorted(about["unexpected_keys"])
    wrong = [f"{name} is missing" for name in missing]
    wrong += [f"{name} has no place" for name in surplus]
    if wrong:
        raise CannotOpen(
            f"transformers does not find in {folder} what its config.json describes:"
            f" {some_of(wrong, MAX_NAMED, '; ')}"
        )
    return TransformersModel(kind, model.eval())


def open_adapter(base: TransformersModel, adapter: Path) -> TransformersModel | None:
    """Open an adapter by PEFT on its base, which is consumed; None if PEFT is not installed.

    Raises:
        CannotOpen: PEFT refuses it.
    """
    try:
        import peft
    except ImportError:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return TransformersModel(
                base.kind, peft.PeftModel.from_pretrained(base.inner, str(adapter)).eval()
            )
    except Exception as error:  # PEFT raises exceptions of many kinds
        raise CannotOpen(f"PEFT does not open {adapter} ({one_line(error, kind=True)})") from None


def chat_ids(folder: Path, chats: Sequence[Chat]) -> list[list[int]]:
    """The ids of chats by transformers, with the tokenizer and template in `folder`.

    Raises:
        CannotOpen: transformers refuses the tokenizer, the template, or a chat.
    """
    library = _transformers()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return [
            list(
                tokenizer.apply_chat_template(
                    [dict(message) for message in chat.messages],
                    tools=chat.tools,
                    tokenize=True,
                    return_dict=False,
                )
            )
            for chat in chats
        ]
    except Exception as error:  # Jinja's errors among them
        raise CannotOpen(
            f"transformers does not write chats with {folder} ({one_line(error, kind=True)})"
        ) from None


def _transformers() -> Any:
    import transformers

    library: Any = transformers
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


CHAT_TEMPLATE = "chat template"
MAX_CHATS = 16
CHAT_COLUMNS = {"chat": ("tokens",), "preference": ("chosen", "rejected"), "rated": ("answer",)}
"""The columns that hold whole chats."""


def check_chats(recipe: Recipe, prepared: PreparedData, tokenizer: Tokenizer) -> Check:
    """Compare transformers' ids of held-out chats with the prepared ones. `tokenizer` is the one
    they were prepared with.

    A chat with look-alikes of special tokens is skipped: transformers turns them into those tokens,
    here they stay text.
    """
    if recipe.documents not in CHAT_COLUMNS:
        return Check(
            CHAT_TEMPLATE,
            None,
            f"the run is trained on {recipe.documents} documents, which no template writes",
        )
    asked, passed_over = _asked_chats(recipe, prepared, tokenizer)
    if not asked:
        return Check(
            CHAT_TEMPLATE,
            None,
            f"{passed_over} held-out chats hold text that looks like special tokens, which"
            " transformers takes for such, or are written by the template in parts only",
        )
    try:
        found = chat_ids(recipe.folder.model, [chat for _, chat, _ in asked])
    except CannotOpen as error:
        return Check(
            CHAT_TEMPLATE,
            False,
            f"{error}; put back the template and tokenizer that the run was trained with",
        )
    for (where, _, ids), theirs in zip(asked, found, strict=True):
        if theirs != ids:
            return Check(
                CHAT_TEMPLATE,
                False,
                f"{where}: {_first_difference(theirs, ids, tokenizer)}; put back the template that"
                " the run was trained with",
            )
    left = (
        f"; {passed_over} that hold look-alikes of special tokens, or that the template writes in"
        " parts only, are passed over"
        if passed_over
        else ""
    )
    return Check(
        CHAT_TEMPLATE,
        True,
        f"{len(asked)} held-out chats, {sum(len(ids) for _, _, ids in asked):,} ids, the same as"
        f" prepared{left}",
    )


def _asked_chats(
    recipe: Recipe, prepared: PreparedData, tokenizer: Tokenizer
) -> tuple[list[tuple[str, Chat, list[int]]], int]:
    """The first held-out chats, each with its place and prepared ids; and how many of them are
    passed over.
    """
    names = CHAT_COLUMNS[recipe.documents]
    asked: list[tuple[str, Chat, list[int]]] = []
    passed_over = 0
    for doc_id, chats, stored in itertools.islice(
        _stored_chats(recipe, prepared, tokenizer, names), MAX_CHATS
    ):
        for name, chat, ids in zip(names, chats, stored, strict=True):
            where = doc_id if len(names) == 1 else f"{doc_id} ({name})"
            if not chat or any(
                token in text
                for text in strings_in([chat.messages, chat.tools])
                for token in tokenizer.special_texts
            ):
                passed_over += 1
            else:
                asked.append((where, tokenizer.chat_format.as_read(chat), ids))
    return asked, passed_over


def _stored_chats(
    recipe: Recipe, prepared: PreparedData, tokenizer: Tokenizer, names: Sequence[str]
) -> Iterator[tuple[str, list[Chat], list[list[int]]]]:
    """Held-out documents as chats, with their prepared records; documents that the template refused
    have none and are skipped. Of a chat that is several records each is the chat cut where it ends,
    without messages if the template does not write that as a whole.
    """
    split = recipe.data.examples_split
    parts = [part for source in prepared.splits[split] for part in source.parts]
    columns = [
        [Column(column_prefix(recipe.folder.columns, split, name, part.number)) for part in parts]
        for name in names
    ]
    records = zip(
        *(
            (record for column in one for record in (column[index] for index in range(len(column))))
            for one in columns
        ),
        strict=True,
    )
    for document in read_documents(recipe, split):
        chats, first = _sides(recipe, document.text)
        try:
            made = encode_trained(tokenizer, chats, tokenizer.encode_batch, [first] * len(chats))
        except WrongInput:
            continue
        if recipe.documents == "chat":
            rows = [[chats[0].until(count)] for count in made.messages]
        else:
            rows = [[chat.until(count) for chat, count in zip(chats, made.messages, strict=True)]]
        for row in rows:
            stored = [[int(token) for token in record] for record in next(records)]
            yield document.doc_id, row, stored


def _sides(recipe: Recipe, text: str) -> tuple[list[Chat], int]:
    """The chats of a document, and the number of their first message that is trained."""
    if recipe.documents == "chat":
        return [from_chat(text)], 0
    if recipe.documents == "rated":
        rated = from_rated(text)
        return [rated.chat], len(rated.prompt)
    preference = from_preference(text)
    return list(preference.sides), len(preference.prompt)


def _first_difference(theirs: Sequence[int], stored: Sequence[int], tokenizer: Tokenizer) -> str:
    at = next(
        (
            place
            for place, (one, other) in enumerate(zip(theirs, stored, strict=False))
            if one != other
        ),
        min(len(theirs), len(stored)),
    )
    one, other = (
        repr(tokenizer.token(ids[at])) if at < len(ids) else "nothing" for ids in (theirs, stored)
    )
    return (
        f"token {at} is {one} by transformers, {other} as prepared ({len(theirs)} ids for"
        f" {len(stored)})"
    )
