"""Log-likelihoods of continuations given contexts under a decoder, batched by length and
distributed over ranks.

Contexts and continuations are tokenized as lm-evaluation-harness does it, so that the numbers can
be compared with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ingot.evaluate.distribute import Floats, by_length, rank_share, sum_over_ranks
from ingot.evaluate.subject import EvalModel
from ingot.models.device import computing_in, kernels_for_any_length
from ingot.models.native.head import IGNORE, LogitsView, VocabularyHead, apply_head
from ingot.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class ScoredSpan:
    """Tokens to score, after given ones."""

    context: list[int]
    continuation: list[int]

    def __len__(self) -> int:
        """The number of tokens that the model reads: the last one is only predicted."""
        return len(self.context) + len(self.continuation) - 1


def encode_spans(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[ScoredSpan]:
    """Encode pairs of context and continuation.

    Trailing spaces of a context move to the continuation; then both are encoded as one text, which
    is split after as many tokens as the context alone has. BOS is added if the tokenizer adds one.
    An empty context becomes BOS, or EOS if there is none. Unlike the harness, text that looks like
    a special token stays text.
    """
    moved = [_move_trailing_spaces(*pair) for pair in pairs]
    flat, offsets = tokenizer.encode_batch(
        [text for context, whole in moved for text in (context, whole)]
    )
    spans = []
    for number, (context, _) in enumerate(moved):
        begin, middle, end = offsets[2 * number : 2 * number + 3].tolist()
        head, whole = flat[begin:middle].tolist(), flat[middle:end].tolist()
        before = tokenizer.before
        if context and (head or before):
            spans.append(ScoredSpan([*before, *head], whole[len(head) :]))
        else:
            spans.append(_span_without_context(tokenizer, whole))
    return spans


def _move_trailing_spaces(context: str, continuation: str) -> tuple[str, str]:
    """The context without the spaces at its end, and the whole text."""
    return context.rstrip(), context + continuation


def _span_without_context(tokenizer: Tokenizer, whole: list[int]) -> ScoredSpan:
    start = tokenizer.special.bos if tokenizer.special.bos is not None else tokenizer.special.eos
    if start is None or whole[:1] == [start]:
        return ScoredSpan(whole[:1], whole[1:])
    return ScoredSpan([start], whole)


class _TokenScorer:
    """Per-token function of the head: log p(label) and, if `greedy`, whether the label is the most
    likely token.
    """

    def __init__(self, vocabulary: VocabularyHead, *, greedy: bool) -> None:
        self.vocabulary = vocabulary
        self.chunks: list[Tensor] | None = [] if greedy else None

    def token(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        if self.chunks is not None:
            self.chunks.append(self.vocabulary.whole(view.logits()).argmax(-1) == labels)
        return view.log_probability(labels)


@kernels_for_any_length
def log_likelihoods(
    subject: EvalModel, spans: Sequence[ScoredSpan], title: str, *, greedy: bool = False
) -> Floats:
    """For each span the sum of its continuation's log-probabilities in nats, and 1 if greedy
    decoding would produce it (0 unless `greedy`), [N, 2].

    Collective. A span must fit into the model's positions and have a token in both parts.

    Raises:
        Failed: the model gives numbers that are not finite.
    """
    found = np.zeros((len(spans), 2), np.float64)
    groups = rank_share(
        by_length([len(span) for span in spans], subject.recipe.evaluate.micro_batch), subject.mesh
    )
    done, waiting = 0, list[tuple[list[int], Tensor]]()
    with (
        subject.progress(title, len(spans), "continuations") as progress,
        torch.no_grad(),
        computing_in(subject.compute, subject.device),
    ):
        for group in subject.until_stopped(groups):
            waiting.append(
                (group, _token_scores(subject, [spans[number] for number in group], greedy=greedy))
            )
            # Read back one batch late, while the device computes the next one.
            if len(waiting) > 1:
                _store_sums(*waiting.pop(0), found)
            done += len(group)
            progress.update(min(done * subject.mesh.world, len(spans)))
    for pending in waiting:
        _store_sums(*pending, found)
    whole = sum_over_ranks(found, subject.mesh)
    if np.isnan(whole).any():
        raise subject.not_finite(title)
    return whole


def _store_sums(group: list[int], values: Tensor, found: Floats) -> None:
    scores = values.cpu().double().numpy()  # [2, B, T]
    found[group, 0] = scores[0].sum(axis=1)
    found[group, 1] = scores[1].min(axis=1)


def _token_scores(subject: EvalModel, spans: Sequence[ScoredSpan], *, greedy: bool) -> Tensor:
    """Log-probabilities of the labels, and whether greedy decoding agrees, `[2, B, T]`; 0 and 1
    where nothing is scored.
    """
    time = max(len(span) for span in spans)
    tokens = torch.zeros(len(spans), time, dtype=torch.int64)
    labels = torch.full((len(spans), time), IGNORE)
    for row, span in enumerate(spans):
        whole = torch.tensor([*span.context, *span.continuation])
        # Padding at the end is invisible to the tokens before it: attention is causal.
        tokens[row, : len(span)] = whole[:-1]
        labels[row, len(span.context) - 1 : len(span)] = whole[len(span.context) :]
    tokens, labels = tokens.to(subject.device), labels.to(subject.device)
    positions = torch.arange(time, device=subject.device).expand_as(tokens)
    decoder, scored = subject.decoder, labels != IGNORE
    judge = _TokenScorer(decoder.vocabulary_head, greedy=greedy)
    vocabulary = decoder.vocabulary_head
    # Logits are computed for the continuation's tokens only: contexts are much longer.
    hidden = vocabulary.enter(decoder.hidden(tokens, positions))[scored]
    found = torch.stack(
        (
            torch.zeros(labels.shape, device=subject.device),
            torch.ones(labels.shape, device=subject.device),
        )
    )
    found[0, scored] = apply_head(
        hidden,
        decoder.project,
        decoder.config.vocab_size,
        labels[scored],
        judge.token,
        view=vocabulary.view,
    )
    found[1, scored] = torch.cat(judge.chunks).float() if judge.chunks is not None else 0.0
    return found
