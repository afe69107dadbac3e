"""Which chats are alike: by what was said, thought and called, and for exact duplicates by all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.config.recipe import Recipe
from ingot.config.sections.objective import Documents
from ingot.data.cleaning.report import DroppedExample
from ingot.data.raw.store import RawData, open_raw
from tests.data.cleaning.small import kept, numbered, places, small, text


def of_kind(made: Recipe, kind: Documents) -> RawData:
    """The raw data of a recipe for texts, whose texts are stored documents of another kind."""
    raw = open_raw(made)
    return replace(
        raw, splits={"train": [replace(source, kind=kind) for source in raw.splits["train"]]}
    )


def chats_of(made: Recipe) -> RawData:
    return of_kind(made, "chat")


def test_chats_are_compared_by_what_was_said(tmp_path: Path) -> None:
    def chat(*contents: str) -> str:
        roles = ("user", "assistant")
        return json.dumps(
            {
                "messages": [
                    {"role": role, "content": content}
                    for role, content in zip(roles, contents, strict=True)
                ]
            },
            ensure_ascii=False,
        )

    made = small(
        tmp_path,
        [chat("Café?", "Yes."), chat("cafe\u0301?", "YES."), chat("Tea?", "No.")],
        exact=True,
        normalize="nfc",
    )
    cleaned, documents = kept(made, raw=chats_of(made))
    assert places(documents) == numbered(1, 3)
    assert json.loads(documents[0][1])["messages"][0]["content"] == "Café?"
    assert cleaned.report.steps[0].examples == [
        DroppedExample("t.jsonl:2", "café? YES.", "t.jsonl:1")
    ]


def exchange(question: str = "Go?", *, tools: str = "", **answer: Any) -> str:
    """A stored chat of a question and an answer that has more than its content."""
    told = {"tools": [{"type": "function", "function": {"name": tools}}]} if tools else {}
    said = {"role": "assistant", "content": "Yes.", **answer}
    return json.dumps({"messages": [{"role": "user", "content": question}, said], **told})


def call(name: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "look", "arguments": {"for": name}}}]


@pytest.mark.parametrize(
    ("chats", "expected"),
    [
        ([exchange(reasoning_content="as a"), exchange(reasoning_content="as b")], [1, 2]),
        ([exchange(reasoning_content="as\na"), exchange(reasoning_content="As  a")], [1]),
        ([exchange(reasoning_content="a"), exchange(thinking="a")], [1, 2]),
        ([exchange(tool_calls=call("a")), exchange(tool_calls=call("b"))], [1, 2]),
        ([exchange(tools="a"), exchange(tools="b"), exchange(tools="a")], [1, 2]),
        ([exchange(), exchange().replace("user", "system"), exchange("go?")], [1, 2]),
        ([exchange("1 2", content="3"), exchange("1", content="2 3")], [1, 2]),
        ([exchange("1 2", content="3 "), exchange("\t1\n2", content="3")], [1]),
    ],
)
def test_chats_are_equal_if_all_in_them_is(
    tmp_path: Path, chats: list[str], expected: list[int]
) -> None:
    made = small(tmp_path, chats, exact=True)
    assert places(kept(made, raw=chats_of(made))[1]) == numbered(*expected)


def test_pairs_that_are_divided_elsewhere_are_not_equal(tmp_path: Path) -> None:
    pairs = [("1 2", "3"), ("1", "2 3"), ("1\n2", "3")]
    stored = [json.dumps({"source": source, "target": target}) for source, target in pairs]
    made = small(tmp_path, stored, exact=True)
    assert places(kept(made, raw=of_kind(made, "pair"))[1]) == numbered(1, 2)


def test_thoughts_and_calls_are_compared_but_tools_are_not(tmp_path: Path) -> None:
    """Chats that share a long list of tools alone are not alike."""
    same, names = text(1), " ".join(f"tool{number}" for number in range(200))
    made = small(
        tmp_path,
        [
            exchange(reasoning_content=same),
            exchange(reasoning_content=text(2)),
            exchange(tool_calls=call(text(3))),
            exchange(tool_calls=call(text(4))),
            exchange(text(5), tools=names),
            exchange(text(6), tools=names),
            exchange(reasoning_content=f"{same} too"),
        ],
        fuzzy={},
    )
    assert places(kept(made, raw=chats_of(made))[1]) == numbered(1, 2, 3, 4, 5, 6)
