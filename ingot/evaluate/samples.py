"""What the model makes of the recipe's prompts, greedily: for the eye, not for the gate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ingot.models.decoder import Decoder
from ingot.models.device import Compute, computing_in
from ingot.models.generate import Generator, Request, eos_ids
from ingot.tokenizers.tokenizer import Tokenizer


def complete(model: Decoder, folder: Path, tokenizer: Tokenizer, prompts: Sequence[str], max_tokens: int, compute: Compute) -> list[dict[str, str]]:
    """`{"prompt": ..., "completion": ...}` for each prompt.

    Raises:
        WrongInput: a prompt has no token, or leaves no position of the model for an answer.
    """
    generator = Generator(model, eos=eos_ids(folder, tokenizer.special.eos), decode=tokenizer.decode)
    requests = [Request(tokenizer.encode_prompt(prompt), max_tokens) for prompt in prompts]
    with computing_in(compute, next(model.parameters()).device):
        answers = generator.run(requests)
    return [{"prompt": prompt, "completion": answer.text} for prompt, answer in zip(prompts, answers, strict=True)]
