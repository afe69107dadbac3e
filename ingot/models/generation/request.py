"""The inputs and outputs of generation: requests, chunks, whole completions. No model is
needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.models.generation.sampling import Sampling

FinishReason = Literal["stop", "length", "error"]
GREEDY = Sampling()


class Constraint(Protocol):
    """Which tokens may come next in one answer, for a request of its own."""

    @property
    def failed(self) -> bool:
        """Whether it cannot go on; the answer then ends with an error."""
        ...

    def apply(self, logits: Tensor) -> None:
        """Exclude tokens from the logits `[V]` of the next one, in place."""
        ...

    def push(self, token: int) -> None:
        """Take the token that was chosen."""
        ...


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it: at most `max_tokens` tokens, until EOS (unless it is to be
    ignored), one of `stop_ids` or one of the `stop` strings; none of these ids ends it before
    `min_tokens`. `unstopped` tells by each token and the text that it makes final whether no stop
    string counts there; `special` are the special tokens in stop strings, which have no text.
    `prompt_logprobs`: as `sampling.logprobs`, for the tokens of the prompt; a
    completion then also tells the token that ends it. Prompts with different `cache_salt` share no
    computation.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    unstopped: Callable[[int, str], bool] | None = field(default=None, kw_only=True)
    special: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    stop_ids: tuple[int, ...] = field(default=(), kw_only=True)
    ignore_eos: bool = field(default=False, kw_only=True)
    min_tokens: int = field(default=0, kw_only=True)
    constraint: Constraint | None = field(default=None, kw_only=True)
    prompt_logprobs: int | None = field(default=None, kw_only=True)
    cache_salt: str | None = field(default=None, kw_only=True)

    def ends(self, eos: Collection[int]) -> frozenset[int]:
        """The tokens that end the completion, of a model that ends with `eos`."""
        return frozenset(self.stop_ids) | (frozenset() if self.ignore_eos else frozenset(eos))


@dataclass(frozen=True)
class GeneratedToken:
    """A generated token. `offset`: characters of the completion before it. Log-probabilities are
    set if they were requested.
    """

    id: int
    offset: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptToken:
    """A token of the prompt, what the model gives it behind those before it, and its place among
    all tokens by that, from 1; nothing is known of the first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True)
class CompletionChunk:
    """What one step produced for one request.

    `tokens` are those whose text is contained in the chunks so far: never EOS, nothing of a stop
    string. `generated` counts all tokens so far, EOS included. `finish`: None while more follows;
    `stop` at EOS or a stop string, `length` at max_tokens or the model's last position, `error` if
    the model's logits were not finite or the request's constraint failed. In the first chunk:
    `prompt`, the prompt's tokens, if their log-probabilities were asked for; `cached`, how many of
    them were read for an earlier request, None where nobody looked.
    """

    text: str
    tokens: tuple[GeneratedToken, ...]
    generated: int
    finish: FinishReason | None = None
    prompt: tuple[PromptToken, ...] = field(default=(), kw_only=True)
    cached: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Completion(CompletionChunk):
    """A whole completion, as one chunk."""

    finish: FinishReason


class DecoderLimits(Protocol):
    """The limits against which requests are checked."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...


@dataclass(frozen=True)
class ModelLimits:
    """The limits of a model whose configuration has other names for them."""

    vocab_size: int
    max_position_embeddings: int


class TooLong(WrongInput):
    """A prompt or text that does not fit into the model's `positions`."""

    def __init__(self, message: str, positions: int) -> None:
        super().__init__(message)
        self.positions = positions

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (*self.args, self.positions)


def check_request(request: Request, config: DecoderLimits) -> None:
    """Raises WrongInput if the model cannot serve the request: no prompt tokens or too many
    (TooLong), or unknown ids.
    """
    if not request.prompt:
        raise WrongInput(
            "the prompt is empty and the tokenizer puts no BOS before it; give at least one"
            " character"
        )
    if len(request.prompt) >= config.max_position_embeddings:
        raise TooLong(
            f"the prompt has {len(request.prompt):,} tokens, but the model has"
            f" {config.max_position_embeddings:,} positions for prompt and completion together;"
            " shorten it",
            config.max_position_embeddings,
        )
    check_ids(request.prompt, config)
    check_ids(request.stop_ids, config, "stop_token_ids: token")
    check_ids([token for token, _ in request.sampling.logit_bias], config, "logit_bias: token")
    if request.max_tokens < 1:
        raise WrongInput(f"max_tokens is {request.max_tokens}; ask for at least 1")
    if request.min_tokens > request.max_tokens:
        raise WrongInput(
            f"min_tokens is {request.min_tokens} and max_tokens {request.max_tokens}; lower the"
            " first or raise the second"
        )


def check_ids(ids: Sequence[int], config: DecoderLimits, what: str = "token") -> None:
    """Raises WrongInput for ids that the model does not have; `what` they are."""
    worst = next((token for token in ids if not 0 <= token < config.vocab_size), None)
    if worst is not None:
        raise WrongInput(
            f"{what} {worst} is not in the vocabulary of {config.vocab_size:,} tokens; give ids of"
            " this model's tokenizer"
        )


def join_chunks(pieces: Sequence[CompletionChunk]) -> Completion:
    """The whole completion from all chunks of one job; the last one has the finish reason."""
    return Completion(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        pieces[-1].generated,
        pieces[-1].finish or "error",
        prompt=pieces[0].prompt,
        cached=pieces[0].cached,
    )


Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"
# An incomplete UTF-8 character has at most three bytes.
UNSURE = 3
# The first of the characters that stand for special tokens where stop strings are looked for:
# halves of surrogate pairs, which no text holds.
FIRST_MARK = 0xD800
# Tokens decoded before the next one as context, so that a space at its beginning is kept.
CONTEXT = 5
# Output that never becomes valid UTF-8 would let the window grow without bound: past LONGEST it is
# cut to the last SHORTEST tokens, which reach back far enough that characters begin at the same
# places in both.
LONGEST, SHORTEST = 64, 16


class TextStream:
    """Incremental detokenization of one completion, with stop strings.

    `context` are the prompt's tokens: the first new token is decoded after them, so that prompt and
    completion can be concatenated. `length` counts the final characters so far, including those
    held back for a stop string; `unsettled` those after them that are still replacement characters.
    `unstopped`, `special`: as in `Request`.
    """

    def __init__(
        self,
        decode: Decode,
        context: Sequence[int],
        stop: Sequence[str] = (),
        unstopped: Callable[[int, str], bool] | None = None,
        special: Mapping[str, int] | None = None,
    ) -> None:
        self._decode = decode
        marks = {text: chr(FIRST_MARK + place) for place, text in enumerate(special or ())}
        self._marks = {token: marks[text] for text, token in (special or {}).items()}
        self._unmarked = {ord(mark): None for mark in marks.values()}
        self._stop = (*stop, *with_marks(stop, marks))
        self._unstopped = unstopped if self._stop else None
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
        """Add a token and return the text that is now final. Afterwards `stopped` says whether a
        stop string was found.
        """
        fresh = self._certain(token)
        passed = self._unstopped is not None and self._unstopped(token, fresh)
        mark = self._marks.get(token, "")
        if self.stopped or not fresh + mark:
            return ""
        text = self._held + fresh + mark
        self.length += len(fresh)
        if passed:
            self._held = ""
            return self._shown(text)
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self.length -= len(self._shown(text[min(found) :]))
            self._held = ""
            return self._shown(text[: min(found)])
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return self._shown(text[: len(text) - keep])

    def finish(self) -> str:
        """The text held back for a stop string, once no more tokens follow. Replacement characters
        at the end, which may be an incomplete character, are dropped.
        """
        held, self._held = self._held, ""
        return self._shown(held)

    def _shown(self, text: str) -> str:
        """The text without marks of special tokens."""
        return text.translate(self._unmarked) if self._unmarked else text

    def _certain(self, token: int) -> str:
        """New characters that later tokens can no longer change."""
        self._window.append(token)
        text = self._decode(self._window)
        # Trailing replacement characters may be the beginning of a character; SentencePiece shows
        # even complete characters that way as long as all of them are byte tokens. They are held
        # back until they are final.
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
        if fresh or unsure:
            self._slide(unsure)
        else:
            # A token without text, such as a special one: the text before it stays as well. Behind
            # such tokens alone the next word would be the first, and lose its space.
            del self._window[self._old : -SHORTEST]
        return fresh

    def _slide(self, unsure: int) -> None:
        """Drop tokens whose text has been returned, keeping enough to decode the next ones
        correctly.
        """
        self._window = self._window[-SHORTEST:] if unsure else self._window[self._old :]
        text = self._decode(self._window)
        self._given = text[: len(text) - unsure]
        self._old = len(self._window)


def special_in(stop: Sequence[str], special: Mapping[str, int]) -> dict[str, int]:
    """The special tokens whose text is in one of the stop strings."""
    return {name: token for name, token in special.items() if any(name in text for text in stop)}


def with_marks(stop: Sequence[str], marks: Mapping[str, str]) -> list[str]:
    """The stop strings that hold special tokens, with the mark of each in its place."""
    marked = list(stop)
    for special in sorted(marks, key=len, reverse=True):
        marked = [text.replace(special, marks[special]) for text in marked]
    return [text for text in marked if text not in stop]


def overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next(
        (
            size
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )
