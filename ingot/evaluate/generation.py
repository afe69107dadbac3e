"""Generates texts for many prompts, distributed over ranks: greedily, or by beam search for models
with an encoder; the completions of a recipe's own prompts may be sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.objective import CHAT_TEMPLATED
from ingot.evaluate.distribute import by_length, gather_texts, rank_share
from ingot.evaluate.subject import EvalModel, EvalModelInfo
from ingot.models.device import computing_in
from ingot.models.generation.generator import Generator
from ingot.models.generation.request import GREEDY, Completion, Request, check_request
from ingot.models.generation.sampling import Sampling
from ingot.models.generation.seq2seq import Seq2SeqRequest, answer_batch, check_seq2seq_request
from ingot.models.hf.config import HFConfig
from ingot.models.hf.models import TextReader
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.tokenizers.sentinels import decoder_for, encode_with_sentinels
from ingot.tokenizers.tokenizer import Tokenizer

MICRO_BATCHES_AT_ONCE = 4
"""Micro-batches of prompts that a decoder gets at once: new requests join as others finish, and
progress is still visible.
"""


def encode_source(tokenizer: Tokenizer, text: str, recipe: Recipe) -> list[int]:
    """Encode a source as in training: with the objective's prefix and the tokenizer's frame,
    truncated to data.seq_len. Sentinels in it stand for hidden spans.
    """
    ids = encode_with_sentinels(tokenizer, recipe.objective.source_prefix + text)
    before, after = map(len, tokenizer.frame)
    kept = max(recipe.data.seq_len - after, before)
    return [*ids[: len(ids) - after][:kept], *ids[len(ids) - after :]]


def generate_texts(
    subject: EvalModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    title: str,
    beams: int = 1,
) -> list[str]:
    """The text that a decoder generates after each prompt, or a model with an encoder for each
    source. Collective.

    Raises:
        Failed: the model gives numbers that are not finite.
    """
    if subject.kind == "decoder":
        return generate_answers(subject, [Request(prompt, max_tokens) for prompt in prompts], title)
    lengths = [len(prompt) for prompt in prompts]
    return _generate_distributed(
        subject,
        lengths,
        1,
        title,
        lambda group: generate_on_this_rank(
            subject, [prompts[number] for number in group], max_tokens, beams
        ),
    )


def generate_answers(subject: EvalModel, requests: Sequence[Request], title: str) -> list[str]:
    """What a decoder generates for each request. Collective; raises Failed as `generate_texts`
    does.
    """
    lengths = [len(request.prompt) for request in requests]
    return _generate_distributed(
        subject,
        lengths,
        MICRO_BATCHES_AT_ONCE,
        title,
        lambda group: _decoder_answers(subject, [requests[number] for number in group]),
    )


def generate_finished(
    subject: EvalModel, requests: Sequence[Request], title: str
) -> list[tuple[str, bool]]:
    """`generate_answers`, and whether each answer ended by itself."""
    found = _generate_distributed(
        subject,
        [len(request.prompt) for request in requests],
        MICRO_BATCHES_AT_ONCE,
        title,
        lambda group: [
            None if one.finish == "error" else f"{one.finish == 'stop':d}{one.text}"
            for one in _completions(subject, [requests[number] for number in group])
        ],
    )
    return [(text[1:], text[:1] == "1") for text in found]


def _generate_distributed(
    subject: EvalModel,
    lengths: Sequence[int],
    micro_batches: int,
    title: str,
    make: Callable[[list[int]], list[str | None]],
) -> list[str]:
    groups = rank_share(
        by_length(lengths, subject.recipe.evaluate.micro_batch * micro_batches), subject.mesh
    )
    mine, broken, done = dict[int, str](), 0, 0
    with subject.progress(title, len(lengths), "texts") as progress:
        for group in subject.until_stopped(groups):
            for number, text in zip(group, make(group), strict=True):
                mine[number] = text or ""
                broken += text is None
            done += len(group)
            progress.update(min(done * subject.mesh.world, len(lengths)))
    # All ranks agree on this, so that none waits for one that has raised.
    (broken_everywhere,) = subject.everyone.agree(float(broken))
    if broken_everywhere:
        raise subject.not_finite(title)
    return gather_texts(mine, len(lengths), subject.mesh)


def generate_on_this_rank(
    subject: EvalModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    beams: int = 1,
    sampling: Sampling = GREEDY,
) -> list[str | None]:
    """`generate_texts` for one batch on this rank only; None where the model's numbers are not
    finite.
    """
    model = subject.model
    if isinstance(model, Decoder):
        return _decoder_answers(
            subject, [Request(prompt, max_tokens, sampling) for prompt in prompts]
        )
    if isinstance(model, TextReader):
        raise WrongInput(
            f"{subject.where} is an encoder, which writes nothing; remove what asks it to"
        )
    with computing_in(subject.compute, subject.device):
        found = answer_batch(
            model,
            [Seq2SeqRequest(prompt, max_tokens, sampling, beams=beams) for prompt in prompts],
            subject.eos,
        )
    return [
        None if answer.finish == "error" else decoder_for(subject.tokenizer, prompt)(answer.ids)
        for prompt, answer in zip(prompts, found, strict=True)
    ]


def _decoder_answers(subject: EvalModel, requests: Sequence[Request]) -> list[str | None]:
    found = _completions(subject, requests)
    return [None if answer.finish == "error" else answer.text for answer in found]


def _completions(subject: EvalModel, requests: Sequence[Request]) -> list[Completion]:
    generator = Generator(
        subject.decoder,
        eos=subject.eos,
        decode=subject.tokenizer.decode,
        max_rows=subject.recipe.evaluate.micro_batch,
        all_say=subject.all_say,
    )
    with computing_in(subject.compute, subject.device):
        return generator.run(requests)


def check_prompts(
    prompts: Sequence[str], max_tokens: int, info: EvalModelInfo, config: DecoderConfig | HFConfig
) -> None:
    """Raises WrongInput, naming the prompt, if one has no tokens or leaves no position for an
    answer, or if the model cannot generate.
    """
    if prompts:
        info.require_kind("evaluate.prompts", "decoder", "seq2seq")
    for prompt in prompts:
        try:
            if isinstance(config, DecoderConfig):
                check_request(
                    Request(encode_sample(info.tokenizer, prompt, info.recipe), max_tokens), config
                )
            else:
                check_seq2seq_request(
                    Seq2SeqRequest(encode_source(info.tokenizer, prompt, info.recipe), max_tokens),
                    config,
                )
        except WrongInput as error:
            raise WrongInput(f"evaluate.prompts, {prompt[:40]!r}: {error}") from None


def encode_sample(tokenizer: Tokenizer, prompt: str, recipe: Recipe) -> list[int]:
    """Ids of a prompt for a decoder: a user's turn, through the chat template, where the model
    learns from chats.
    """
    if recipe.documents in CHAT_TEMPLATED and tokenizer.template is not None:
        return tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return tokenizer.encode_prompt(prompt)


def complete_prompts(subject: EvalModel, prompts: Sequence[str]) -> list[dict[str, str]]:
    """`{"prompt": ..., "completion": ...}` for each prompt, with at most `evaluate.sample_tokens`
    tokens, drawn at `evaluate.temperature`; on this rank only.
    """
    if not prompts:
        return []
    knobs = subject.recipe.evaluate
    sampling = Sampling(knobs.temperature, seed=subject.recipe.seed)
    if subject.kind == "decoder":
        encoded = [encode_sample(subject.tokenizer, prompt, subject.recipe) for prompt in prompts]
    else:
        encoded = [encode_source(subject.tokenizer, prompt, subject.recipe) for prompt in prompts]
    return [
        {"prompt": prompt, "completion": text or ""}
        for prompt, text in zip(
            prompts,
            generate_on_this_rank(subject, encoded, knobs.sample_tokens, sampling=sampling),
            strict=True,
        )
    ]
