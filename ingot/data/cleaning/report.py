"""What cleaning did: for each step how many documents it dropped, how large they were, and some of
them to look at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Step = Literal["min_chars", "max_chars", "languages", "exact", "fuzzy", "contamination"]
STEPS: tuple[Step, ...] = ("min_chars", "max_chars", "languages", "exact", "fuzzy", "contamination")
KEPT, ELSEWHERE = 0, 255
"""Beside 1 + place in `STEPS`, what stands for a document's fate: it stays; it is in no split, by
`data.fraction`, and plays no part.
"""
EXAMPLES = 5


def reason(step: Step) -> int:
    """The number that stands for a document dropped by this step."""
    return 1 + STEPS.index(step)


@dataclass(frozen=True)
class Example:
    """A dropped document, the beginning of its text, and the document that stays in its place where
    there is one.
    """

    doc_id: str
    text: str
    survivor: str | None = None
    similarity: float | None = None


@dataclass(frozen=True)
class Dropped:
    """What one step dropped: documents, and bytes of their texts in normal form."""

    step: Step
    documents: int
    bytes: int
    examples: list[Example]


@dataclass(frozen=True)
class Report:
    """Documents and bytes that were looked at, what each step dropped in its turn, and what else is
    to be known, as counts.
    """

    documents: int = 0
    bytes: int = 0
    steps: list[Dropped] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, value: dict[str, Any]) -> Report:
        """A report from its JSON form, `dataclasses.asdict`."""
        steps = [
            Dropped(**{**step, "examples": [Example(**example) for example in step["examples"]]})
            for step in value["steps"]
        ]
        return cls(value["documents"], value["bytes"], steps, value["notes"])
