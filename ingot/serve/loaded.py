"""A model folder, opened for answering: weights, tokenizer and the tokens that end an answer, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.base.errors import WrongInput
from ingot.models.adapter import is_adapter
from ingot.models.classifier import Classifier
from ingot.models.decoder import Decoder
from ingot.models.device import pick_device, resolve_compute
from ingot.models.folder import CONFIG, check_template, read_lineage
from ingot.models.generate import Generator, check, eos_ids
from ingot.models.hub import Encoder, Seq2Seq
from ingot.models.kinds import Kind, Model, base_folder, kind_of_folder, open_model
from ingot.models.request import Request
from ingot.models.summaries import Summarizer, Summary, check_summary, check_text
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer

# A matrix of a model smaller than this is multiplied before a second thread has woken up; on a machine that others use,
# too, waiting for that thread takes many times longer than the product.
ONE_THREAD_WEIGHTS = 20_000_000


@dataclass(frozen=True)
class Loaded:
    """What a server or a single prediction works with.

    `created`: when the folder was made, seconds since the epoch. `prefix` stands before every source, as it did in training.
    """

    model: Model
    tokenizer: Tokenizer
    eos: frozenset[int]
    created: int
    kind: Kind = "decoder"
    prefix: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of a classifier's classes, in the order of its scores."""
        return self.model.config.labels if isinstance(self.model, Encoder) else ()

    def generator(self, max_rows: int) -> Generator:
        """A decoder's. Other kinds have `worker` alone."""
        assert isinstance(self.model, Decoder)
        return Generator(self.model, eos=self.eos, decode=self.tokenizer.decode, max_rows=max_rows)

    def worker(self, max_rows: int) -> Generator | Summarizer | Classifier:
        """What answers requests, up to `max_rows` together."""
        if isinstance(self.model, Decoder):
            return self.generator(max_rows)
        if isinstance(self.model, Seq2Seq):
            return Summarizer(self.model, eos=self.eos, decode=self.tokenizer.decode, max_rows=max_rows)
        return Classifier(self.model, max_rows=max_rows)

    def encode(self, text: str) -> list[int]:
        """Ids of a text as this kind of model reads it."""
        if self.kind == "decoder":
            return self.tokenizer.encode_prompt(text)
        return self.tokenizer.encode_framed(self.prefix + text)

    def check(self, request: Request) -> None:
        """Raises WrongInput when the model cannot serve the request."""
        if isinstance(self.model, Decoder):
            check(request, self.model.config)
        elif isinstance(request, Summary):
            check_summary(request, self.model.config)
        else:
            check_text(request.prompt, self.model.config)


def load(folder: Path, *, any_template: bool = False) -> Loaded:
    """Open `folder` on this machine's accelerator, in bfloat16 where it has that, else on the CPU in float32.

    Raises:
        WrongInput: not a model folder, no tokenizer in it, one that does not fit the model, or, unless `any_template`,
            another chat template than the model was trained with.
    """
    kind = kind_of_folder(folder)
    base = base_folder(folder) if is_adapter(folder) else folder
    # The tokenizer comes first: that it is missing should not take the minutes that weights may take.
    tokenizer = load_tokenizer(folder if (folder / "tokenizer_config.json").exists() else base)
    if not any_template:
        check_template(folder, tokenizer.template_identity, "serve.any_template")
    device = pick_device()
    dtype = torch.bfloat16 if resolve_compute("auto", device) == "bf16" else torch.float32
    model = open_model(folder, device=device, dtype=dtype)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise WrongInput(
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} tokens, the model's vocabulary {model.config.vocab_size:,}; "
            "put the tokenizer beside it that the model was trained with"
        )
    if device.type == "cpu" and sum(parameter.numel() for parameter in model.parameters()) < ONE_THREAD_WEIGHTS:
        torch.set_num_threads(1)
    prefix = str((read_lineage(folder) or {}).get("prefix", ""))
    return Loaded(model, tokenizer, _eos(base, tokenizer, model), int((base / CONFIG).stat().st_mtime), kind, prefix)


def _eos(folder: Path, tokenizer: Tokenizer, model: Model) -> frozenset[int]:
    """The tokens that end an answer."""
    if isinstance(model, Encoder):
        return frozenset()
    named = eos_ids(folder, tokenizer.special.eos)
    if isinstance(model, Decoder):
        return named
    # Targets end as the tokenizer frames them. An id that only the configuration names may be an ordinary token of a tokenizer trained here.
    special = set(tokenizer.special_ids.values())
    return frozenset([*(token for token in named if token in special), *tokenizer.frame[1][-1:]])
