"""Rewards that compare texts in this process: exact match, and numbers as GSM8K states them. Each
takes time linear in the answer and cannot hang.
"""

from __future__ import annotations

import re
import string
import unicodedata
from decimal import Decimal, InvalidOperation

from ingot.config.sections.rewards import ExactReward, LengthReward, NumericReward
from ingot.rewards.protocol import RewardFailed, Sample

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b\s*", re.IGNORECASE)

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
INVALID = "[invalid]"
"""What the harness takes for the answer of a text without a number."""


class Exact:
    """Whether the answer is the reference after normalisation."""

    def __init__(self, settings: ExactReward) -> None:
        self._settings = settings

    def __call__(self, sample: Sample) -> float:
        reference, answer = str(sample.reference), sample.answer
        if (after := self._settings.after) is not None:
            _, found, answer = answer.rpartition(after)
            reference = reference.rpartition(after)[2]
            if not found:
                return 0.0
        return float(self.normalise(answer) == self.normalise(reference))

    def normalise(self, text: str) -> str:
        """The text as it is compared."""
        settings = self._settings
        if settings.unicode != "none":
            text = unicodedata.normalize(settings.unicode, text)
        if settings.ignore_case:
            text = text.casefold()
        if settings.ignore_punctuation:
            text = text.translate(PUNCTUATION)
        if settings.ignore_articles:
            text = ARTICLES.sub("", text)
        if settings.whitespace == "collapse":
            text = " ".join(text.split())
        return text.strip() if settings.whitespace == "strip" else text


class Numeric:
    """Whether the answer's number is the reference's, as lm-evaluation-harness' gsm8k finds it."""

    def __init__(self, settings: NumericReward) -> None:
        self._settings = settings

    def __call__(self, sample: Sample) -> float:
        reference, tolerance = bare(str(sample.reference)), self._settings.tolerance
        find = strict if self._settings.extract == "strict" else flexible
        answer = bare(find(sample.answer))
        if tolerance is None:
            return float(answer == reference)
        if (wanted := _number(reference)) is None:
            raise RewardFailed(f"the reference {reference[:80]!r} is no number")
        given = _number(answer)
        return float(given is not None and abs(given - wanted) <= Decimal(str(tolerance)))


class Length:
    """Whether an answer is of the length that is wanted."""

    def __init__(self, settings: LengthReward) -> None:
        self._settings = settings

    def __call__(self, sample: Sample) -> float:
        settings = self._settings
        text = sample.answer
        length = len(text) if settings.unit == "characters" else len(text.split())
        most = length if settings.most is None else settings.most
        beyond = max(settings.least - length, length - most, 0)
        return max(0.0, 1 - beyond / (settings.margin + 1)) if beyond else 1.0


def strict(answer: str) -> str:
    """The first number that follows `#### `; INVALID if there is none."""
    found = STRICT.search(answer)
    return INVALID if found is None else found[1].strip()


def flexible(answer: str) -> str:
    """The last thing that looks like a number; INVALID if there is none."""
    found = FLEXIBLE.findall(answer)
    return (found[-1][0] or found[-1][1]).strip() if found else INVALID


def bare(text: str) -> str:
    """A number or a whole reference as the harness compares it (its `regexes_to_ignore`): without
    commas and `$`, what follows the last `#### `, without a full stop at the end, in lower case.
    """
    text = text.replace(",", "").replace("$", "").rpartition("#### ")[2]
    return re.sub(r"\.$", "", text).lower()


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
