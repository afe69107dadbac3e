"""What the model makes of the recipe's prompts, greedily: for the eye, not for the gate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.models.decoder import Decoder
from ingot.models.device import Compute, computing_in
from ingot.models.generate import Generator, Request, check, eos_ids
from ingot.tokenizers.tokenizer import Tokenizer


def check_prompts(prompts: Sequence[str], max_tokens: int, model: Decoder, tokenizer: Tokenizer) -> None:
    """Raises WrongInput, naming the prompt, when one has no token or leaves no position of the model for an answer."""
    for prompt in prompts:
        try:
            check(_request(prompt, max_tokens, tokenizer), model.config)
        except WrongInput as error:
            raise WrongInput(f"evaluate.prompts, {prompt[:40]!r}: {error}") from None


def complete(model: Decoder, folder: Path, tokenizer: Tokenizer, prompts: Sequence[str], max_tokens: int, compute: Compute) -> list[dict[str, str]]:
    """`{"prompt": ..., "completion": ...}` for each prompt."""
    generator = Generator(model, eos=eos_ids(folder, tokenizer.special.eos), decode=tokenizer.decode)
    requests = [_request(prompt, max_tokens, tokenizer) for prompt in prompts]
    with computing_in(compute, next(model.parameters()).device):
        answers = generator.run(requests)
    return [{"prompt": prompt, "completion": answer.text} for prompt, answer in zip(prompts, answers, strict=True)]


def _request(prompt: str, max_tokens: int, tokenizer: Tokenizer) -> Request:
    return Request(tokenizer.encode_prompt(prompt), max_tokens)
