"""What is asked of generation and what comes back: requests, pieces, whole completions. No model in
here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ingot.base.errors import WrongInput
from ingot.models.generation.sampling import Sampling

FinishReason = Literal["stop", "length", "error"]
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
class GeneratedToken:
    """A generated token. `offset`: characters of the completion before it. Log-probabilities where
    they were asked for.
    """

    id: int
    offset: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class CompletionChunk:
    """What one step gave one request.

    `tokens` are those whose text lies in what has been given out so far: never EOS, nothing of a
    stop string. `generated`
    counts every token so far, EOS too. `finish`: None while more comes; `stop` at EOS or a stop
    string, `length` at max_tokens or the model's last position, `error` when the model's numbers
    were not finite.
    """

    text: str
    tokens: tuple[GeneratedToken, ...]
    generated: int
    finish: FinishReason | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer; the fields are those of `CompletionChunk`."""

    text: str
    tokens: tuple[GeneratedToken, ...]
    generated: int
    finish: FinishReason


class DecoderLimits(Protocol):
    """What requests are checked against."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...


def check_request(request: Request, config: DecoderLimits) -> None:
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


def join_chunks(pieces: Sequence[CompletionChunk]) -> Completion:
    """The whole answer from all pieces of one job; the last one carries the finish."""
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return Completion(
        "".join(piece.text for piece in pieces),
        tokens,
        pieces[-1].generated,
        pieces[-1].finish or "error",
    )


Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"
# A UTF-8 character that is not whole yet has at most three bytes.
UNSURE = 3
# Tokens decoded together with the next one, so that a space at its beginning is kept.
CONTEXT = 5
# Text that never becomes UTF-8 would let the window grow for ever: past LONGEST it is cut to the
# last SHORTEST tokens, which reach far enough back that where characters begin is the same in both.
LONGEST, SHORTEST = 64, 16


class TextStream:
    """The text of one completion.

    `context` are the prompt's tokens: the first new token is decoded after them, so that prompt and
    completion can be joined. `length` counts the characters that are certain so far, those held
    back for a stop string included; `unsettled` those after them that show as replacements for now.
    """

    def __init__(self, decode: Decode, context: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._window = list(context[-CONTEXT:])
        self._old = len(self._window)  # tokens of the window whose text is all given out
        self._given = decode(self._window).rstrip(
            REPLACEMENT
        )  # the part of the window's text that is given out
        self._held = ""
        self.length = 0
        self.unsettled = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that now surely belongs to the completion. Afterwards `stopped` tells whether a stop
        string was met.
        """
        fresh = self._certain(token)
        if self.stopped or not fresh:
            return ""
        text = self._held + fresh
        self.length += len(fresh)
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self.length -= len(text) - min(found)
            self._held = ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back for a stop string, now that no more tokens come. Replacements at the
        end may be half a character: dropped.
        """
        held, self._held = self._held, ""
        return held

    def _certain(self, token: int) -> str:
        """New characters that later tokens can no longer change."""
        self._window.append(token)
        text = self._decode(self._window)
        # Replacements at the end may be the beginning of a character; SentencePiece shows even
        # whole characters before it so, as long as all of them are spelt in bytes. Nothing of the
        # kind is given out before it is settled.
        solid = text.rstrip(REPLACEMENT)
        if len(solid) < len(text) and len(self._window) <= LONGEST:
            self.unsettled = len(text) - len(solid)
            if not solid.startswith(self._given):
                return ""
            fresh, self._given = solid[len(self._given) :], solid
            return fresh
        unsure = self.unsettled = min(UNSURE, len(text) - len(solid))
        certain = text[: len(text) - unsure]
        fresh = (
            certain[len(self._given) :]
            if certain.startswith(self._given)
            else self._decode(self._window[self._old :])
        )
        self._slide(unsure)
        return fresh

    def _slide(self, unsure: int) -> None:
        """Forget tokens whose text is given out, keeping enough to decode the next ones as if
        nothing were missing.
        """
        self._window = self._window[-SHORTEST:] if unsure else self._window[self._old :]
        text = self._decode(self._window)
        self._given = text[: len(text) - unsure]
        self._old = len(self._window)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`, so that it may still come."""
    return next(
        (
            size
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )
