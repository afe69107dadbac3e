"""A reward: how close an answer's share of vowels is to one that is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from ingot.config.sections.rewards import RewardSettings
from ingot.rewards.protocol import RewardFailed, Sample

VOWELS = frozenset("aeiouAEIOU")


class Vowels(RewardSettings):
    """1 for an answer with just the wanted share of vowels, less the further it is away."""

    implementation = "closeness"
    kind: Literal["vowels"] = "vowels"
    """Which reward."""
    share: Annotated[float, Field(ge=0, le=1)] = 0.4
    """The share of an answer's letters that should be vowels."""


def closeness(settings: Vowels) -> Callable[[Sample], float]:
    """Called once in each process that scores."""

    def score(sample: Sample) -> float:
        letters = [letter for letter in sample.answer if letter.isalpha()]
        if not letters:
            raise RewardFailed("the answer has no letters")
        found = sum(letter in VOWELS for letter in letters) / len(letters)
        return 1 - abs(found - settings.share)

    return score
