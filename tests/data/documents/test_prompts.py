"""Prompts and answers that are messages in a string, and those that only look like it."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from ingot.data.documents.chats import from_chat, to_chat
from ingot.data.documents.preferences import Preference
from ingot.data.documents.rated import from_rated, to_rated
from ingot.data.documents.records import BadRecord, ParsedDocument
from tests.data.documents.test_preferences import SIMPLE, bad, bot, of, sharegpt, user


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ann Lee", "role": "CTO"}',
        '{"from": "Oslo", "to": "Rome"}',
        '{"role": "model", "content": "robot", "speed": 1}',
        '[{"role": "CTO", "content": "Ann Lee"}]',
        '[{"from": "Oslo", "value": 3}, {"from": "Rome", "value": 4}]',
        '[{"role": "user", "content": "q"}, {"name": "b"}]',
        "[]",
    ],
)
def test_what_is_json_but_no_message_is_text(text: str) -> None:
    """Tasks of extraction, with answers and prompts that have keys as messages do."""
    found = of({"prompt": text, "chosen": text, "rejected": "no"})
    assert found == Preference([user(text)], [bot(text)], [bot("no")])
    chat = to_chat(1, {"prompt": text, "completion": text}, "auto", {})
    assert isinstance(chat, ParsedDocument)
    assert from_chat(chat.text).messages == [user(text), bot(text)]
    given = to_rated(1, {"prompt": "q", "completion": text, "label": True}, "auto", {})
    assert isinstance(given, ParsedDocument)
    assert from_rated(given.text).answer == [bot(text)]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([user("q"), {"role": "narrator", "content": "x"}], "unknown role"),
        ([user("q"), {"role": "assistant"}], "content is not text"),
    ],
)
def test_messages_in_json_with_a_fault_are_no_text(prompt: Any, reason: str) -> None:
    sides = {"chosen": "a", "rejected": "b"}
    assert bad({"prompt": json.dumps(prompt), **sides}).reason == reason
    listed = bad({"messages": json.dumps(prompt[1:]), **sides})
    assert listed.reason == reason, "a column for messages holds nothing else"


TALK = [user('say "hi"'), {**bot("it's hi\n"), "name": None}]


@pytest.mark.parametrize(
    "shown",
    [
        repr(TALK),
        repr(TALK[1]),
        str(np.array(TALK, object)),
        repr(TALK[:1]) + "\r\n",
        repr(np.array(TALK, object)),
        repr([np.array(TALK, object)]),
        repr((TALK[1],)),
        "[ " + repr(TALK[0]) + " ]",
        f"[OrderedDict({TALK[0]}), OrderedDict({TALK[1]})]",
        repr([OrderedDict(TALK[0]), OrderedDict(TALK[1])]),
        f"OrderedDict({list(TALK[0].items())})",
        f"[OrderedDict({list(TALK[0].items())}), OrderedDict({list(TALK[1].items())})]\n",
    ],
)
def test_messages_as_python_shows_them_are_no_text(shown: str) -> None:
    """So `datasets` and pandas write them into CSV."""
    reason = "messages as Python shows them"
    found = bad({"prompt": "q", "chosen": shown, "rejected": "no"})
    assert found.reason == reason
    assert "save the data set as JSON lines or Parquet" in found.detail
    assert bad({"prompt": shown, "chosen": "yes", "rejected": "no"}).reason == reason
    turned = sharegpt(("human", "q"))
    assert bad({"prompt": repr(turned), "chosen": "yes", "rejected": "no"}).reason == reason
    for record in ({"prompt": "q", "completion": shown}, {"messages": shown}):
        chat = to_chat(1, record, "auto", {})
        assert isinstance(chat, BadRecord)
        assert "is no JSON" in chat.detail
    rated = to_rated(1, {"prompt": "q", "completion": shown, "label": True}, "auto", {})
    assert isinstance(rated, BadRecord)
    assert rated.reason == reason


@pytest.mark.parametrize(
    "text",
    [
        "{'role': 'CTO', 'content': 'Ann Lee'}",
        "{'role': 'user'}",
        "{'role': 'user', 'content': 'hi'} is what I send.",
        "{'from': 'Oslo', 'value': 3}",
        "[{'name': 'b'}]",
        "{ 'model': 'x', 'messages': [{'role': 'user', 'content': 'hi'}] }",
        "{'role', 'user', 'content'}",
        "OrderedDict([('role', 'CTO'), ('content', 'Ann Lee')])",
        "OrderedDict([('role', 'user'), ('content', 'hi')]) is what I send.",
    ],
)
def test_what_is_python_but_no_message_is_text(text: str) -> None:
    found = of({"prompt": text, "chosen": text, "rejected": "no"})
    assert found == Preference([user(text)], [bot(text)], [bot("no")])


LINES = "\n".join(map(json.dumps, TALK))


@pytest.mark.parametrize(
    ("text", "as_what"),
    [
        (LINES, "lines of JSON"),
        (LINES.replace("\n", "\r\n\n") + "\n", "lines of JSON"),
        (json.dumps(json.dumps(TALK)), "JSON in a string of JSON"),
        (json.dumps(json.dumps(TALK[1])), "JSON in a string of JSON"),
        (json.dumps(LINES), "lines of JSON"),
        (json.dumps(repr(TALK)), "Python shows them"),
    ],
)
def test_messages_as_lines_or_twice_as_json_are_no_text(text: str, as_what: str) -> None:
    reason = f"messages as {as_what}"
    assert bad({"prompt": "q", "chosen": text, "rejected": "no"}).reason == reason
    assert bad({"prompt": text, "chosen": "yes", "rejected": "no"}).reason == reason
    chat = to_chat(1, {"prompt": "q", "completion": text}, "auto", {})
    rated = to_rated(1, {"prompt": "q", "completion": text, "label": True}, "auto", {})
    assert isinstance(chat, BadRecord)
    assert isinstance(rated, BadRecord)
    assert chat.reason == rated.reason == reason


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ann"}\n{"name": "Bob"}',
        '{"role": "CTO", "content": "a"}\n{"role": "CEO", "content": "b"}',
        LINES + "\nis what I send.",
        '"quoted"',
        json.dumps('{"name": "Ann"}'),
        '"He said {"',
    ],
)
def test_what_is_lines_or_quoted_but_no_message_is_text(text: str) -> None:
    found = of({"prompt": text, "chosen": text, "rejected": "no"})
    assert found == Preference([user(text)], [bot(text)], [bot("no")])


def test_messages_in_json_with_blanks_are_messages() -> None:
    """As `json.dumps` lays them out."""
    answer = json.dumps([bot("good")], indent=2)
    assert of({"prompt": "q", "chosen": answer, "rejected": "bad"}) == SIMPLE
    assert (
        of({"prompt": f" [ {json.dumps(user('q'))} ]", "chosen": "good", "rejected": "bad"})
        == SIMPLE
    )
    chat = to_chat(1, {"prompt": "q", "completion": answer}, "auto", {})
    rated = to_rated(1, {"prompt": "q", "completion": answer, "label": True}, "auto", {})
    assert isinstance(chat, ParsedDocument)
    assert isinstance(rated, ParsedDocument)
    assert from_chat(chat.text).messages == [user("q"), bot("good")]
    assert from_rated(rated.text).answer == [bot("good")]


def test_one_message_in_json_is_a_message() -> None:
    """As CSV has it."""
    sides = {"chosen": json.dumps(bot("good")), "rejected": json.dumps([bot("bad")])}
    assert of({"prompt": "q", **sides}) == SIMPLE
    thought = {
        "role": "assistant",
        "content": "good",
        "reasoning_content": "since",
        "refusal": None,
    }
    chosen = of({"prompt": "q", **sides, "chosen": json.dumps(thought)}).chosen
    assert chosen == [bot("good") | {"reasoning_content": "since"}]


def test_messages_in_json_have_their_own_column_names() -> None:
    prompt, answer = ([{"role": who, "text": "a"}] for who in ("user", "assistant"))
    record = {"prompt": json.dumps(prompt), "completion": json.dumps(answer), "label": True}
    given = to_rated(1, record, "auto", {"content": "text"})
    assert isinstance(given, ParsedDocument)
    found = from_rated(given.text)
    assert (found.prompt, found.answer) == ([user("a")], [bot("a")])


def test_what_lacks_an_instruction_is_named_as_what_it_was_to_be() -> None:
    found = to_rated(1, {"output": "a", "label": True}, "alpaca", {})
    assert isinstance(found, BadRecord)
    assert (found.reason, "`instruction`" in found.detail) == ("no rated answer columns", True)
