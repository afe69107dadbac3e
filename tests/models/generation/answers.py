"""The texts that a sequence-to-sequence model writes, as ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ingot.models.generation.sampling import Sampling
from ingot.models.generation.seq2seq import Seq2SeqRequest, answer_batch, check_seq2seq_request
from ingot.models.hf.models import Seq2Seq


def generate(
    model: Seq2Seq,
    sources: Sequence[Sequence[int]],
    max_tokens: int,
    beams: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    eos: Collection[int] = (),
) -> list[list[int]]:
    """One for each source, in one batch. `eos`: tokens that end a text; the model's own if empty."""
    requests = [
        Seq2SeqRequest(source, max_tokens, Sampling(temperature, top_p, seed), (), beams)
        for source in sources
    ]
    for request in requests:
        check_seq2seq_request(request, model.config)
    return [written.ids for written in answer_batch(model, requests, eos)] if requests else []
