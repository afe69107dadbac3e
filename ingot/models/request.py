"""What is asked of generation and what comes back: requests, pieces, whole completions. No model in
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ingot.base.errors import WrongInput
from ingot.models.architecture import DecoderConfig
from ingot.models.sampling import Sampling

Finish = Literal["stop", "length", "error"]
GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on from it: at most `max_tokens` tokens, until EOS or one of the
    `stop` strings.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Token:
    """A generated token. `offset`: characters of the completion before it. Log-probabilities where
    they were asked for.
    """

    id: int
    offset: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What one step gave one request.

    `tokens` are those whose text lies in what has been given out so far: never EOS, nothing of a
    stop string. `generated`
    counts every token so far, EOS too. `finish`: None while more comes; `stop` at EOS or a stop
    string, `length` at max_tokens or the model's last position, `error` when the model's numbers
    were not finite.
    """

    text: str
    tokens: tuple[Token, ...]
    generated: int
    finish: Finish | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer; the fields are those of `Piece`."""

    text: str
    tokens: tuple[Token, ...]
    generated: int
    finish: Finish


def check(request: Request, config: DecoderConfig) -> None:
    """Raises WrongInput when the model cannot serve the request: no or too many prompt tokens,
    unknown ids.
    """
    if not request.prompt:
        raise WrongInput(
            "the prompt is empty and the tokenizer puts no BOS before it; give at least one"
            " character"
        )
    if len(request.prompt) >= config.max_position_embeddings:
        raise WrongInput(
            f"the prompt has {len(request.prompt):,} tokens, but the model has"
            f" {config.max_position_embeddings:,} positions for prompt and completion together;"
            " shorten it"
        )
    if min(request.prompt) < 0 or max(request.prompt) >= config.vocab_size:
        worst = min(request.prompt) if min(request.prompt) < 0 else max(request.prompt)
        raise WrongInput(
            f"token {worst} is not in the vocabulary of {config.vocab_size:,} tokens; give ids of"
            " this model's tokenizer"
        )
    if request.max_tokens < 1:
        raise WrongInput(f"max_tokens is {request.max_tokens}; ask for at least 1")


def join(pieces: Sequence[Piece]) -> Completion:
    """The whole answer from all pieces of one job; the last one carries the finish."""
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return Completion(
        "".join(piece.text for piece in pieces),
        tokens,
        pieces[-1].generated,
        pieces[-1].finish or "error",
    )
