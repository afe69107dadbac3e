"""Log-probabilities of tokens in the formats of OpenAI's and vLLM's servers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ingot.models.generation.request import (
    REPLACEMENT,
    GeneratedToken,
    PromptToken,
    TextStream,
)
from ingot.tokenizers.tiktoken_backend import unspell
from ingot.tokenizers.tokenizer import Tokenizer

# A byte as vocabularies of SentencePiece spell it, and what decoding shows of parts of characters:
# one sign or several.
_BYTE, _SIGNS = re.compile("<0x([0-9A-F]{2})>"), re.compile(f"{REPLACEMENT}+")


class LogprobFormatter:
    """Formats the log-probabilities of one completion's tokens, in order. A token's text is what it
    adds to the token before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._before = tokenizer, list(prompt[-1:])

    def completions(self, tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
        """`logprobs` of a choice of `/v1/completions`: parallel lists. `text_offset` counts from
        the start of the completion.
        """
        texts, tops = [], list[dict[str, float] | None]()
        for token in tokens:
            texts.append(self._text(token.id))
            top: dict[str, float] = {}
            for other, logprob in token.top:
                # Two tokens may have the same text (bytes of a character); the likelier one counts.
                top.setdefault(self._text(other), logprob)
            if token.top:
                top.setdefault(texts[-1], token.logprob or 0.0)
            tops.append(None if token.logprob is None else top)
            self._before = [token.id]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": [token.offset for token in tokens],
        }

    def of_prompt(self, prompt: Sequence[PromptToken], count: int) -> list[GeneratedToken]:
        """The tokens of an echoed prompt as `completions` takes them; call it first."""
        self._before = []
        stream, places = TextStream(self._tokenizer.decode, ()), list[int]()
        for token in prompt:
            places.append(stream.length + stream.unsettled)
            before = stream.length
            stream.push(token.id)
            if stream.length > before:  # parts of the last character begin at it
                places[-4:] = [min(place, stream.length - 1) for place in places[-4:]]
        return [
            GeneratedToken(token.id, place, token.logprob, token.top[:count])
            for token, place in zip(prompt, places, strict=True)
        ]

    def prompt(self, prompt: Sequence[PromptToken], count: int) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token the likeliest ones and itself, by id."""
        told: list[dict[str, Any] | None] = []
        for token in prompt:
            ranked = [(*item, rank) for rank, item in enumerate(token.top[:count], 1)]
            if token.logprob is not None and token.id not in [other for other, *_ in ranked]:
                ranked.append((token.id, token.logprob, token.rank or 0))
            items = {
                str(other): {"logprob": value, "rank": rank, "decoded_token": self._text(other)}
                for other, value, rank in ranked
            }
            told.append(items or None)
            self._before = [token.id]
        return told

    def chat(self, tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
        """`logprobs` of a choice of `/v1/chat/completions`."""
        content = []
        for token in tokens:
            top = [self._item(other, logprob) for other, logprob in token.top]
            content.append({**self._item(token.id, token.logprob or 0.0), "top_logprobs": top})
            self._before = [token.id]
        return {"content": content, "refusal": None}

    def _item(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": self._bytes(token, text)}

    def _bytes(self, token: int, text: str) -> list[int] | None:
        """The bytes of a token, also where they are parts of characters and its text shows signs in
        their place; None where the vocabulary does not tell.
        """
        if REPLACEMENT not in text:
            return list(text.encode())
        entry = self._tokenizer.token(token) or ""
        spelt = bytes.fromhex(found[1]) if (found := _BYTE.fullmatch(entry)) else unspell(entry)
        shown = _SIGNS.sub(REPLACEMENT, spelt.decode(errors="replace"))
        return list(spelt) if spelt and shown == _SIGNS.sub(REPLACEMENT, text) else None

    def _text(self, token: int) -> str:
        return text_of(self._tokenizer, self._before, token)


def text_of(tokenizer: Tokenizer, before: Sequence[int], token: int) -> str:
    """The text of a token behind others, also of special ones, with the space that SentencePiece
    drops at the start of a text.
    """
    earlier = tokenizer.decode(before, skip_special=False)
    both = tokenizer.decode([*before, token], skip_special=False)
    added = both[len(earlier) :] if both.startswith(earlier) else ""
    # A further byte of a character that is not whole yet adds nothing.
    return added or tokenizer.decode([token], skip_special=False)
