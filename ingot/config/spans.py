"""How much of a text span corruption hides: lengths alone, as T5 counts them."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_TOKENS = 2
"""A shorter text has nothing to hide beside something that stays."""
_PLAN = "spans"


@dataclass(frozen=True)
class SpanLengths:
    """Span corruption (Raffel et al. 2020) by its two figures: what share of the tokens is hidden,
    and in spans of how many tokens on average.
    """

    noise_density: float
    mean_noise_span_length: float

    @classmethod
    def of_plan(cls, how: str) -> SpanLengths | None:
        """What `plan` named; None for rows that no span corruption reads."""
        name, *figures = how.partition("-")[2].split("_")
        return cls(*map(float, figures)) if name == _PLAN else None

    @property
    def plan(self) -> str:
        """A name of its own for rows that are planned for this corruption."""
        return f"{_PLAN}_{self.noise_density}_{self.mean_noise_span_length}"

    def hidden(self, length: int) -> tuple[int, int]:
        """How many tokens of a text of `length` of them, at least two, are hidden, and in how many
        spans: at least one of each, and something stays before each span.
        """
        asked = round(length * self.noise_density)
        tokens = min(max(asked, 1), length - 1)
        spans = round(min(tokens, length - asked) / self.mean_noise_span_length)
        return tokens, max(spans, 1)

    def corrupted(self, length: int) -> tuple[int, int]:
        """How long the text without its spans is, and how long the spans are together: each with
        a sentinel for each span, and without what frames them.
        """
        tokens, spans = self.hidden(length)
        return length - tokens + spans, tokens + spans

    def target_len(self, seq_len: int) -> int:
        """The longest target of texts that become at most `seq_len` tokens, where the tokenizer
        puts one token behind a text, as T5's does.
        """
        return self.corrupted(max(LEAST_TOKENS, self.longest(seq_len - 1)))[1] + 1

    def longest(self, room: int) -> int:
        """How long a text may be so that, corrupted, it has at most `room` tokens; 0 where not even
        the shortest fits.
        """
        if self.corrupted(LEAST_TOKENS)[0] > room:
            return 0
        length = LEAST_TOKENS
        while self.corrupted(length + 1)[0] <= room:
            length += 1
        return length
