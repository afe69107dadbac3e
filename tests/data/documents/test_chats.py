"""Chats in three layouts become one form; what is no chat is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.data.documents.chats import from_chat, to_chat
from ingot.data.documents.kinds import plain_text
from ingot.data.documents.records import BadRecord, ParsedDocument

HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def said(record: Any, layout: str = "auto", **columns: str) -> list[tuple[str, str]]:
    found = to_chat(1, record, layout, columns)
    assert isinstance(found, ParsedDocument), found
    return [(message["role"], message["content"]) for message in from_chat(found.text).messages]


def bad(record: Any, layout: str = "auto", **columns: str) -> BadRecord:
    found = to_chat(7, record, layout, columns)
    assert isinstance(found, BadRecord)
    assert found.row == 7
    return found


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": HELLO}, [("user", "hi"), ("assistant", "yo")]),
        ({"messages": json.dumps(HELLO)}, [("user", "hi"), ("assistant", "yo")]),
        (
            {"messages": HELLO, "system": "s"},
            [("system", "s"), ("user", "hi"), ("assistant", "yo")],
        ),
        (
            {
                "messages": [
                    {"role": "developer", "content": "d"},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "text", "text": "a"},
                            "b",
                            {"type": "text", "value": "c"},
                        ],
                    },
                ]
            },
            [("system", "d"), ("assistant", "abc")],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": "f"},
                    {"from": "observation", "value": "o"},
                    {"from": "gpt", "value": "a"},
                ],
                "system": "",
                "tools": "[]",
            },
            [("user", "q"), ("assistant", "f"), ("tool", "o"), ("assistant", "a")],
        ),
        ({"conversations": HELLO}, [("user", "hi"), ("assistant", "yo")]),
        ({"instruction": "i", "input": "", "output": "o"}, [("user", "i"), ("assistant", "o")]),
        ({"prompt": "p", "completion": "c"}, [("user", "p"), ("assistant", "c")]),
        (
            {"prompt": HELLO[:1], "completion": HELLO[1:], "messages": None, "system": "s"},
            [("system", "s"), ("user", "hi"), ("assistant", "yo")],
        ),
        ({"prompt": "hi", "completion": HELLO}, [("user", "hi"), ("assistant", "yo")]),
        (
            {"messages": [{"role": "system", "content": "own"}, *HELLO], "system": "s"},
            [("system", "own"), ("user", "hi"), ("assistant", "yo")],
        ),
        (
            {
                "instruction": "i",
                "input": "n",
                "output": "o",
                "system": "s",
                "history": [["q", "a"]],
            },
            [
                ("system", "s"),
                ("user", "q"),
                ("assistant", "a"),
                ("user", "i\nn"),
                ("assistant", "o"),
            ],
        ),
        (
            {"instruction": "i", "input": None, "output": "o", "history": None, "messages": None},
            [("user", "i"), ("assistant", "o")],
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": "first"},
                    {"role": "user", "content": "x"},
                ]
            },
            [("assistant", "first"), ("user", "x")],
        ),
    ],
)
def test_layouts(record: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert said(record) == expected


def test_renamed_columns() -> None:
    asked = [("user", "p"), ("assistant", "c")]
    for layout in ("auto", "messages"):
        assert said({"q": "p", "a": "c"}, layout, prompt="q", completion="a") == asked
    assert said({"question": "q", "answer": "a"}, instruction="question", output="answer") == [
        ("user", "q"),
        ("assistant", "a"),
    ]
    assert said(
        {"talk": [{"who": "human", "what": "q"}, {"who": "gpt", "what": "a"}]},
        "sharegpt",
        conversations="talk",
        value="what",
        **{"from": "who"},
    ) == [("user", "q"), ("assistant", "a")]
    with pytest.raises(
        WrongInput, match=r"renames question, which layout alpaca does not have.*instruction"
    ):
        to_chat(1, {}, "alpaca", {"question": "instruction"})


def test_a_completion_that_is_a_conversation_has_question_and_system_message_once() -> None:
    system = {"role": "system", "content": "s"}
    once = [("system", "s"), ("user", "hi"), ("assistant", "yo")]
    for prompt in ("hi", HELLO[:1], [system, HELLO[0]], " hi\n"):
        assert said({"prompt": prompt, "completion": [system, *HELLO]}) == once
        assert said({"prompt": prompt, "system": "s", "completion": [system, *HELLO]}) == once
        assert said({"prompt": prompt, "system": "s", "completion": HELLO}) == once
    for prompt in ([system, HELLO[0]], [system]):
        assert said({"prompt": prompt, "completion": HELLO}) == once
    other: dict[str, Any] = {"prompt": "or else", "completion": HELLO}
    refused = bad(other)
    assert refused.reason == "a whole conversation in the place of an answer, to another prompt"
    assert "columns={messages: completion} goes by the conversation alone" in refused.detail
    assert said(other, messages="completion") == once[1:]


def test_other_keys_stay_and_null_ones_go() -> None:
    call = [{"function": {"name": "f", "arguments": {}}}]
    found = to_chat(
        1,
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": call,
                    "name": None,
                    "weight": 1,
                }
            ]
        },
        "messages",
        {},
    )
    assert isinstance(found, ParsedDocument)
    assert (
        found.text
        == '{"messages":[{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":{}}}],"weight":1}]}'
    )


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        ({"text": "x", "id": 1}, "no chat columns", "keys: text, id"),
        ({"prompt": HELLO, "completion": "c"}, "the prompt has answers", "a `weight` of 0"),
        ({"messages": []}, "empty chat", ""),
        ({"messages": "x"}, "not a list of messages", "no JSON"),
        ({"messages": {"role": "user"}}, "not a list of messages", "dict"),
        ({"messages": ["x"]}, "not a list of messages", "message 0 is str"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role", "narrator"),
        ({"messages": [{"content": "x"}]}, "unknown role", "a message has no `role`"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant turn", ""),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": " "}]},
            "no assistant turn",
            "",
        ),
        ({"instruction": "x", "output": ""}, "no assistant turn", ""),
        ({"messages": [{"role": "assistant", "content": None}]}, "content is not text", "null"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image_url"}]}]},
            "content is not text",
            "image_url",
        ),
        ({"instruction": 3, "output": "x"}, "content is not text", "`instruction` is int"),
        (
            {"instruction": "x", "output": "y", "history": [["q"]]},
            "history is not a list of pairs",
            "",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "at": b"bytes"}]},
            "not JSON",
            "bytes",
        ),
        ({"messages": [{"role": "assistant", "content": "x", "at": float("nan")}]}, "not JSON", ""),
        ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "invalid UTF-8", ""),
        (
            {"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]},
            "weight of an answer is not 0 or 1",
            "`weight` is '0.5'",
        ),
        (
            {"conversations": [{"from": "gpt", "value": "x", "train": "false"}]},
            "weight of an answer is not 0 or 1",
            "`train` is 'false'",
        ),
    ],
)
def test_bad_records(record: dict[str, Any], reason: str, detail: str) -> None:
    found = bad(record)
    assert found.reason == reason
    assert detail in found.detail
    assert found.keys == (tuple(record) if reason == "no chat columns" else ())


@pytest.mark.parametrize(
    "column", ["images", "audio", "chat_template_kwargs", "tools", "functions"]
)
@pytest.mark.parametrize(
    "nothing",
    [None, "", "None", "nan", float("nan"), "[]", "{}", {}, [None], "[None]", False, 0,
     {"a": None, "b": []}, "{'a': None, 'b': ''}"],
)  # fmt: skip
def test_what_a_table_has_where_there_is_nothing(column: str, nothing: Any) -> None:
    found = to_chat(1, {"messages": HELLO, column: nothing}, "auto", {})
    assert isinstance(found, ParsedDocument), found
    assert from_chat(found.text).tools is None


@pytest.mark.parametrize("one", ["image", "video", "audio"])
@pytest.mark.parametrize("plural", ["", "s"])
def test_what_is_no_text_is_not_left_out_in_silence(one: str, plural: str) -> None:
    refused = bad({"messages": HELLO, f"{one}{plural}": ["a.bin"]})
    assert refused.reason == f"`{one}{plural}` is not read"
    assert f"columns={{{one}{plural}: none}} leaves them out" in refused.detail


@pytest.mark.parametrize("variables", [{"a": False}, {"a": 0}, "{'a': False}", "{'a': x}"])
def test_variables_that_are_set_are_no_nothing(variables: Any) -> None:
    refused = bad({"messages": HELLO, "chat_template_kwargs": variables})
    assert refused.reason == "`chat_template_kwargs` is not read"


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("functions", ["sort", "max"], "`functions` has 'sort'"),
        ("functions", "def f(): pass", "`functions` is no JSON"),
        ("functions", {"name": "f"}, "`functions` is dict"),
        ("tools", "f", "`tools` is no JSON"),
    ],
)
def test_what_is_no_list_of_tools_can_be_left_out(column: str, value: Any, told: str) -> None:
    record = {"messages": HELLO, column: value}
    refused = bad(record)
    assert refused.reason == "not a list of tools"
    assert refused.detail == f"{told}; columns={{{column}: none}} leaves them out"
    assert said(record, **{column: "none"}) == said({"messages": HELLO})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "human", "gpt", "text"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "messages",
                    "conversations",
                    "role",
                    "content",
                    "from",
                    "value",
                    "type",
                    "text",
                    "instruction",
                    "output",
                    "history",
                    "system",
                    "tool_calls",
                    "x",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": JSON}),
    max_size=3,
)


RECORDS = JSON.filter(lambda value: isinstance(value, dict)) | st.fixed_dictionaries(
    {"messages": MESSAGES}
)


@given(RECORDS, st.sampled_from(["auto", "messages", "sharegpt", "alpaca"]))
def test_any_json_is_a_chat_or_bad(record: Any, layout: str) -> None:
    found = to_chat(1, record, layout, {})
    if isinstance(found, BadRecord):
        assert found.reason
        return
    messages = from_chat(found.text).messages
    assert any(message["role"] == "assistant" for message in messages)
    assert all(
        isinstance(message["content"], str)
        and message["role"] in ("system", "user", "assistant", "tool")
        for message in messages
    )
    again = to_chat(1, json.loads(found.text), "messages", {})
    assert again == found, "the canonical form is its own canonical form"


CALLED = {"name": "f", "arguments": {"n": 1}}


@pytest.mark.parametrize(
    "turn",
    [
        {"from": "function_call", "value": json.dumps(CALLED)},
        {"from": "function_call", "value": json.dumps([CALLED])},
        {"role": "assistant", "content": None, "function_call": CALLED},
        {"role": "assistant", "content": "", "function_call": {**CALLED, "name": "f"}},
    ],
)
def test_calls_of_older_layouts_are_calls(turn: dict[str, Any]) -> None:
    """As text a server would not read them as such."""
    key = "conversations" if "from" in turn else "messages"
    found = to_chat(1, {key: [turn]}, "auto", {})
    assert isinstance(found, ParsedDocument)
    assert from_chat(found.text).messages == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": CALLED}],
        }
    ]


def test_what_cleaning_sees() -> None:
    found = to_chat(1, {"instruction": "ﬁ é", "output": "½"}, "alpaca", {})
    assert isinstance(found, ParsedDocument)
    assert plain_text("chat", found.text) == "ﬁ é\n½"


@pytest.mark.parametrize("stored", ["", "plain text", "[]", "{}", "3"])
def test_what_was_not_stored_as_a_chat(stored: str) -> None:
    with pytest.raises(WrongInput, match="is not a chat"):
        from_chat(stored)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("alpaca_en_demo.json", 999),
        ("alpaca_zh_demo.json", 1000),
        ("glaive_toolcall_en_demo.json", 300),
        ("kto_en_demo.json", 300),
        ("v1_sft_demo.jsonl", 500),
    ],
)
def test_real_files(test_data: Path, name: str, count: int) -> None:
    text = (test_data / "llamafactory_demo" / name).read_text(encoding="utf-8")
    records = (
        [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)
    )
    found = [to_chat(row, record, "auto", {}) for row, record in enumerate(records, 1)]
    assert sum(isinstance(item, ParsedDocument) for item in found) == len(found) == count
    if "glaive" in name:
        roles = {
            message["role"]
            for item in found
            if isinstance(item, ParsedDocument)
            for message in from_chat(item.text).messages
        }
        assert roles == {"user", "assistant", "tool"}
