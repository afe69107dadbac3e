"""The exported folder as other tools read it: transformers opens model and tokenizer, PEFT the
adapter. Both are imported here alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.models.kinds import Kind

CLASSES: dict[Kind, str] = {
    "decoder": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "encoder": "AutoModelForSequenceClassification",
}
"""What transformers calls the way to open each kind of model."""
NAMED = 3


class NotOpened(Exception):
    """transformers or PEFT does not open what lies in a folder, or not all of it; the message says
    why.
    """


@dataclass(frozen=True)
class Theirs:
    """A model of transformers', in evaluation mode."""

    kind: Kind
    inner: Any

    def to(self, device: torch.device, dtype: torch.dtype) -> Theirs:
        return Theirs(self.kind, self.inner.to(device=device, dtype=dtype))

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], targets: Sequence[int] = ()) -> Tensor:
        """Float32, on the CPU: `[T, V]` of a decoder's `tokens` or of the `targets` behind a
        source, `[1, C]` of a text to classify.
        """
        ids = torch.tensor([list(tokens)], device=self.inner.device)
        # Nothing but ids: masks, positions and the shift of targets are left to transformers, as
        # its users leave them.
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
    def written(self, tokens: Sequence[int], most: int) -> list[int]:
        """What a decoder writes behind `tokens`, or a sequence-to-sequence model to a source: the
        likeliest token each time.
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
        # A decoder gives the prompt back, the other kind the token that it starts from.
        found: list[int] = made[0, len(tokens) if self.kind == "decoder" else 1 :].tolist()
        return found

    @property
    def stops(self) -> set[int]:
        """The tokens that end what transformers generates."""
        value = self.inner.generation_config.eos_token_id
        return set(value if isinstance(value, list) else [] if value is None else [value])

    @property
    def labels(self) -> list[str]:
        """The names of a classifier's classes, by number."""
        names: Mapping[int, str] = self.inner.config.id2label
        return [names[number] for number in sorted(names)]


def open_theirs(folder: Path, kind: Kind, *, labels: Sequence[str] = ()) -> Theirs:
    """The model in `folder`, in float32 on the CPU, configured as it lies there. `labels`: classes
    of a head that the folder need not have.

    Raises:
        NotOpened: transformers refuses it, or would fill what it does not find there with random
            numbers.
    """
    library = _transformers()
    # The base of a classifier's adapter brings no head for its classes: the adapter does.
    asked: dict[str, Any] = (
        {"num_labels": len(labels), "ignore_mismatched_sizes": True} if labels else {}
    )
    try:
        opener = getattr(library, CLASSES[kind])
        model, about = opener.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True, **asked
        )
    except Exception as error:  # each architecture refuses in its own way
        raise NotOpened(f"transformers does not open {folder} ({_one_line(error)})") from None
    wrong = [f"{name} is missing" for name in sorted(about["missing_keys"])] + [
        f"{name} has no place" for name in sorted(about["unexpected_keys"])
    ]
    if wrong and not labels:
        raise NotOpened(
            f"transformers does not find in {folder} what its config.json describes:"
            f" {'; '.join(wrong[:NAMED])}{_more(wrong)}"
        )
    return Theirs(kind, model.eval())


def open_adapter(base: Theirs, adapter: Path) -> Theirs | None:
    """The adapter in a folder, opened by PEFT beside its base, which then is used up; None where
    PEFT is not installed.

    Raises:
        NotOpened: PEFT refuses it.
    """
    try:
        import peft
    except ImportError:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Theirs(
                base.kind, peft.PeftModel.from_pretrained(base.inner, str(adapter)).eval()
            )
    except Exception as error:  # whatever is wrong with an adapter, PEFT has its own way to say it
        raise NotOpened(f"PEFT does not open {adapter} ({_one_line(error)})") from None


def chat_ids(folder: Path, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
    """The ids of chats by the tokenizer and the template in `folder`, as transformers makes them.

    Raises:
        NotOpened: transformers refuses the tokenizer, the template, or a chat.
    """
    library = _transformers()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return [
            list(
                tokenizer.apply_chat_template(
                    [dict(message) for message in chat], tokenize=True, return_dict=False
                )
            )
            for chat in chats
        ]
    except Exception as error:  # Jinja's errors among them
        raise NotOpened(
            f"transformers does not write chats with {folder} ({_one_line(error)})"
        ) from None


def _transformers() -> Any:
    import transformers

    library: Any = transformers
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _more(wrong: Sequence[str]) -> str:
    return f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
