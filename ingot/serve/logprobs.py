"""Log-probabilities as OpenAI's two routes spell them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingot.models.generation.generator import Token
from ingot.tokenizers.tokenizer import Tokenizer


class LogprobWriter:
    """Spells the tokens of one completion, in order; each is shown as it reads after the one before
    it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._before = tokenizer, list(prompt[-1:])

    def completions(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """`logprobs` of a choice of `/v1/completions`: parallel lists. `text_offset` counts from
        the start of the completion.
        """
        texts, tops = [], []
        for token in tokens:
            texts.append(self._text(token.id))
            top: dict[str, float] = {}
            for other, logprob in token.top:
                # Two tokens may read alike (bytes of a character); the likelier one stays.
                top.setdefault(self._text(other), logprob)
            if token.top:
                top.setdefault(texts[-1], token.logprob or 0.0)
            tops.append(top)
            self._before = [token.id]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": [token.offset for token in tokens],
        }

    def chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """`logprobs` of a choice of `/v1/chat/completions`."""
        content = []
        for token in tokens:
            top = [self._item(other, logprob) for other, logprob in token.top]
            content.append({**self._item(token.id, token.logprob or 0.0), "top_logprobs": top})
            self._before = [token.id]
        return {"content": content, "refusal": None}

    def _item(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }

    def _text(self, token: int) -> str:
        """A token's own text, special ones included, with the space that SentencePiece drops at the
        start of a text.
        """
        before = self._tokenizer.decode(self._before, skip_special=False)
        both = self._tokenizer.decode([*self._before, token], skip_special=False)
        return (
            both[len(before) :]
            if both.startswith(before)
            else self._tokenizer.decode([token], skip_special=False)
        )
