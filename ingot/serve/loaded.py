"""A model folder, opened for generating: weights, tokenizer and the tokens that end an answer, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.base.errors import WrongInput
from ingot.models.decoder import Decoder
from ingot.models.device import pick_device, resolve_compute
from ingot.models.folder import CONFIG, check_template, load_model, model_config
from ingot.models.generate import Generator, eos_ids
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer

# A matrix of a model smaller than this is multiplied before a second thread has woken up; on a machine that others use,
# too, waiting for that thread takes many times longer than the product.
ONE_THREAD_WEIGHTS = 20_000_000


@dataclass(frozen=True)
class Loaded:
    """What a server or a single prediction works with. `created`: when the folder was made, seconds since the epoch."""

    model: Decoder
    tokenizer: Tokenizer
    eos: frozenset[int]
    created: int

    def generator(self, max_rows: int) -> Generator:
        return Generator(self.model, eos=self.eos, decode=self.tokenizer.decode, max_rows=max_rows)


def load(folder: Path, *, any_template: bool = False) -> Loaded:
    """Open `folder` on this machine's accelerator, in bfloat16 where it has that, else on the CPU in float32.

    Raises:
        WrongInput: not a model folder, no tokenizer in it, one that does not fit the model, or, unless `any_template`,
            another chat template than the model was trained with.
    """
    model_config(folder)
    # The tokenizer comes first: that it is missing should not take the minutes that weights may take.
    tokenizer = load_tokenizer(folder)
    if not any_template:
        check_template(folder, tokenizer.template_identity, "serve.any_template")
    device = pick_device()
    dtype = torch.bfloat16 if resolve_compute("auto", device) == "bf16" else torch.float32
    model = load_model(folder, device=device, dtype=dtype)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise WrongInput(
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} tokens, the model's vocabulary {model.config.vocab_size:,}; "
            "put the tokenizer beside it that the model was trained with"
        )
    if device.type == "cpu" and sum(parameter.numel() for parameter in model.parameters()) < ONE_THREAD_WEIGHTS:
        torch.set_num_threads(1)
    return Loaded(model, tokenizer, eos_ids(folder, tokenizer.special.eos), int((folder / CONFIG).stat().st_mtime))

