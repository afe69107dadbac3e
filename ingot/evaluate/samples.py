"""What the model makes of the recipe's prompts, greedily: for the eye, not for the gate."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.base.errors import WrongInput
from ingot.evaluate.subject import About, Subject
from ingot.evaluate.writing import encode_source, write_here
from ingot.models.generation.generator import Request, check
from ingot.models.generation.seq2seq import Summary, check_summary
from ingot.models.hf.loading import HubConfig
from ingot.models.native.config import DecoderConfig


def check_prompts(
    prompts: Sequence[str], max_tokens: int, about: About, config: DecoderConfig | HubConfig
) -> None:
    """Raises WrongInput, naming the prompt, when one has no token or leaves no position of the
    model for an answer, or the model writes nothing.
    """
    if prompts:
        about.must_be("evaluate.prompts", "decoder", "seq2seq")
    for prompt in prompts:
        try:
            if isinstance(config, DecoderConfig):
                check(Request(about.tokenizer.encode_prompt(prompt), max_tokens), config)
            else:
                check_summary(
                    Summary(encode_source(about.tokenizer, prompt, about.recipe), max_tokens),
                    config,
                )
        except WrongInput as error:
            raise WrongInput(f"evaluate.prompts, {prompt[:40]!r}: {error}") from None


def complete(subject: Subject, prompts: Sequence[str]) -> list[dict[str, str]]:
    """`{"prompt": ..., "completion": ...}` for each prompt, of `evaluate.sample_tokens` at most; on
    this rank alone.
    """
    if not prompts:
        return []
    max_tokens = subject.recipe.evaluate.sample_tokens
    if subject.kind == "decoder":
        encoded = [subject.tokenizer.encode_prompt(prompt) for prompt in prompts]
    else:
        encoded = [encode_source(subject.tokenizer, prompt, subject.recipe) for prompt in prompts]
    return [
        {"prompt": prompt, "completion": text or ""}
        for prompt, text in zip(prompts, write_here(subject, encoded, max_tokens), strict=True)
    ]
