"""A cleaning step: documents that are mostly upper-case letters are dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from ingot.config.sections.data import CleaningSettings


class Shouting(CleaningSettings):
    """Drop documents of which too many letters are capitals."""

    implementation = "stays_unless_shouted"
    kind: Literal["shouting"] = "shouting"
    """Which step."""
    name: str = "shouting"
    """The name that the report of cleaning has for it."""
    most: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The largest share of capitals that stays."""


def stays_unless_shouted(settings: Shouting) -> Callable[[str], bool]:
    """Called once in each worker."""

    def stays(text: str) -> bool:
        letters = [letter for letter in text if letter.isalpha()]
        return sum(map(str.isupper, letters)) <= settings.most * len(letters)

    return stays
