"""Preferences in every layout become one form; what is no preference is named."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.data.documents.kinds import plain_text, said, with_texts
from ingot.data.documents.preferences import Preference, from_preference, to_preference
from ingot.data.documents.rated import from_rated, to_rated
from ingot.data.documents.records import BadRecord, ParsedDocument

Said = list[tuple[str, str]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def sharegpt(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": who, "value": text} for who, text in said]


def of(record: Any, layout: str = "auto", **columns: str) -> Preference:
    found = to_preference(1, record, layout, columns)
    assert isinstance(found, ParsedDocument), found
    return from_preference(found.text)


def bad(record: Any, layout: str = "auto", **columns: str) -> BadRecord:
    found = to_preference(7, record, layout, columns)
    assert isinstance(found, BadRecord), found
    assert found.row == 7
    return found


HH = "\n\nHuman: q\n\nAssistant: a\n\nHuman: more?\n\nAssistant: "
SIMPLE = Preference([user("q")], [bot("good")], [bot("bad")])


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": [user("q")], "chosen": [bot("good")], "rejected": [bot("bad")]}, SIMPLE),
        ({"prompt": "q", "chosen": "good", "rejected": "bad", "score": 1}, SIMPLE),
        ({"chosen": [user("q"), bot("good")], "rejected": [user("q"), bot("bad")]}, SIMPLE),
        (
            {
                "prompt": "q",
                "chosen": [user("q"), bot("good")],
                "rejected": [user("q"), bot("bad")],
            },
            SIMPLE,
        ),
        (
            {
                "prompt": json.dumps([user("q")]),
                "chosen": json.dumps([bot("good")]),
                "rejected": json.dumps([bot("bad")]),
            },
            SIMPLE,
        ),
        (
            {
                "conversations": sharegpt(("human", "q")),
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            },
            SIMPLE,
        ),
        ({"messages": [user("q")], "chosen": bot("good"), "rejected": bot("bad")}, SIMPLE),
        (
            {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad", "output": "o"},
            SIMPLE,
        ),
        (
            {
                "instruction": "q",
                "input": "n",
                "history": [["x", "y"]],
                "system": "s",
                "chosen": "good",
                "rejected": "bad",
            },
            Preference(
                [{"role": "system", "content": "s"}, user("x"), bot("y"), user("q\nn")],
                [bot("good")],
                [bot("bad")],
            ),
        ),
        (
            {"system": "s", "prompt": "q", "chosen": "good", "rejected": "bad"},
            SIMPLE._replace(prompt=[{"role": "system", "content": "s"}, user("q")]),
        ),
        (
            {"chosen": HH + "good", "rejected": HH + "bad "},
            SIMPLE._replace(prompt=[user("q"), bot("a"), user("more?")]),
        ),
        (
            {"prompt": "q", "chosen": '{"a": 1}', "rejected": "[{]"},
            Preference([user("q")], [bot('{"a": 1}')], [bot("[{]")]),
        ),
        (
            {
                "prompt": [user("q")],
                "chosen": [bot("good"), user("and"), bot("so")],
                "rejected": [bot("bad")],
            },
            SIMPLE._replace(chosen=[bot("good"), user("and"), bot("so")]),
        ),
    ],
)
def test_layouts(record: dict[str, Any], expected: Preference) -> None:
    assert of(record) == expected


FIRST = [user("q"), bot("a"), user("more?")]


def test_a_question_that_stands_before_whole_conversations_is_no_other_prompt() -> None:
    """Answers that both sides have would be trained, and weigh in losses by length."""
    sides = {"chosen": [*FIRST, bot("good")], "rejected": [*FIRST, bot("bad")]}
    expected = SIMPLE._replace(prompt=FIRST)
    for prompt in ("q", FIRST[:1], FIRST[:2], FIRST, None):
        assert of({"prompt": prompt, **sides}) == expected
    assert of({"prompt": " more?\n", **sides}) == expected, "some repeat the last question"
    assert of({"messages": sides["chosen"], **sides}) == expected, "or one of the conversations"


def test_a_system_message_before_the_prompt_or_the_conversations_stands_once() -> None:
    system = {"role": "system", "content": "s"}
    short = {"chosen": [user("q"), bot("good")], "rejected": [user("q"), bot("bad")]}
    whole = {name: [system, *side] for name, side in short.items()}
    expected = SIMPLE._replace(prompt=[system, user("q")])
    for record in (
        {"prompt": "q", **whole},
        {"prompt": [user("q")], **whole},
        {"prompt": [system, user("q")], **short},
        {"prompt": [system], **short},
        {"prompt": "q", "system": "s", **whole},
        {"prompt": "q", "system": "s", **short},
    ):
        assert of(record) == expected
        rated = to_rated(1, {**record, "completion": record["chosen"], "label": 1}, "auto", {})
        assert isinstance(rated, ParsedDocument), rated
        assert from_rated(rated.text)[:2] == ([system, user("q")], [bot("good")])
    assert of({"instruction": "q", "system": "s", **short}) == expected
    assert "to another prompt" in bad({"prompt": [{**system, "content": "t"}], **whole}).reason


def test_conversations_to_another_prompt_are_refused_with_a_way_out() -> None:
    sides = {"chosen": [user("q"), bot("good")], "rejected": [user("q"), bot("bad")]}
    record = {"prompt": "other", **sides}
    found = bad(record)
    assert found.reason == "a whole conversation in the place of an answer, to another prompt"
    assert found.detail == (
        "it begins with 'q', the prompt with 'other'; columns={prompt: none} goes by the"
        " conversation alone"
    )
    assert of(record, prompt="none") == SIMPLE
    rated = {"prompt": "other", "completion": sides["chosen"], "label": True}
    refused = to_rated(1, rated, "auto", {})
    assert isinstance(refused, BadRecord)
    columns = {"messages": "completion", "completion": "none", "prompt": "none"}
    assert "columns={messages: completion, completion: none, prompt: none}" in refused.detail
    taken = to_rated(1, rated, "auto", columns)
    assert isinstance(taken, ParsedDocument)
    assert from_rated(taken.text)[:2] == ([user("q")], [bot("good")])


CALL = {**bot(""), "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}


def test_sides_that_differ_behind_an_answer_of_both_are_compared_from_it_on() -> None:
    """As where both make one call and each gets another result, or one ends and one goes on."""
    for before, after in (
        ([CALL], ([{"role": "tool", "content": time}, bot(time)] for time in ("1", "2"))),
        ([bot("a")], ([user(text), bot("b")] for text in ("more?", "and?"))),
        ([bot("a")], ([], [user("more?"), bot("b")])),
    ):
        chosen, rejected = ([*before, *rest] for rest in after)
        sides = {"chosen": [user("q"), *chosen], "rejected": [user("q"), *rejected]}
        for prompt in ("q", [user("q")], None):
            assert of({"prompt": prompt, **sides}) == Preference([user("q")], chosen, rejected)
    late: list[Any] = [[CALL, {"role": "tool", "content": time}, bot(time)] for time in ("1", "2")]
    found = of({"chosen": [*FIRST, *late[0]], "rejected": [*FIRST, *late[1]]})
    assert found == Preference(FIRST, *late), "no more than the last answer of both"


def test_a_rated_conversation_is_rated_by_what_follows_its_last_question() -> None:
    def parts(record: dict[str, Any]) -> tuple[Any, Any]:
        found = to_rated(1, {"prompt": "q", "label": True, **record}, "auto", {})
        assert isinstance(found, ParsedDocument), found
        return from_rated(found.text)[:2]

    assert parts({"completion": [*FIRST, bot("good")]}) == (FIRST, [bot("good")])
    looked = [{**bot(""), "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
              {"role": "tool", "content": "3"}, bot("It is 3.")]  # fmt: skip
    assert parts({"completion": [*FIRST, *looked]}) == (FIRST, looked)
    system = {"role": "system", "content": "s"}
    assert parts({"completion": [user("q"), bot("good")], "system": "s"}) == (
        [system, user("q")],
        [bot("good")],
    )
    assert parts({"completion": [bot("a"), user("more?"), bot("good")]}) == (
        [user("q")],
        [bot("a"), user("more?"), bot("good")],
    ), "an answer of several turns, as it was given"


def test_renamed_columns_and_named_layouts() -> None:
    assert (
        of(
            {"question": "q", "yes": "good", "no": "bad"},
            prompt="question",
            chosen="yes",
            rejected="no",
        )
        == SIMPLE
    )
    assert of({"chosen": HH + "good", "rejected": HH + "bad"}, "hh").chosen == [bot("good")]
    assert of({"prompt": "q", "chosen": HH + "good", "rejected": "bad"}, "messages").chosen == [
        bot(HH + "good")
    ], "not taken for another layout"
    with pytest.raises(
        WrongInput,
        match=r"renames output, which layout alpaca of preferences does not have.*instruction",
    ):
        to_preference(1, {}, "alpaca", {"output": "x"})


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        (
            {"prompt": "q", "chosen": "x"},
            "no preference columns",
            "`rejected` is missing or null; keys: prompt, chosen",
        ),
        (
            {"prompt": "q", "chosen": None, "rejected": "x"},
            "no preference columns",
            "`chosen` is missing or null",
        ),
        (
            {"prompt": "q", "chosen": "same", "rejected": "same"},
            "chosen and rejected are equal",
            "",
        ),
        (
            {"chosen": [user("q"), bot("x")], "rejected": [user("q"), bot("x")]},
            "chosen and rejected are equal",
            "",
        ),
        ({"prompt": "q", "chosen": " ", "rejected": "x"}, "empty chosen", ""),
        ({"prompt": "q", "chosen": "x", "rejected": ""}, "empty rejected", ""),
        ({"chosen": [user("q")], "rejected": [user("q"), bot("x")]}, "empty chosen", ""),
        ({"chosen": HH, "rejected": HH + "x"}, "empty chosen", ""),
        ({"chosen": "x", "rejected": "y"}, "no prompt", ""),
        ({"prompt": " ", "chosen": "x", "rejected": "y"}, "no prompt", ""),
        (
            {"prompt": [{"role": "system", "content": "s"}], "chosen": "x", "rejected": "y"},
            "no prompt",
            "",
        ),
        (
            {"prompt": [{"role": "narrator", "content": "q"}], "chosen": "x", "rejected": "y"},
            "unknown role",
            "narrator",
        ),
        (
            {"prompt": "q", "chosen": [bot("x"), user("y")], "rejected": "z"},
            "ends with a user turn",
            "`chosen`",
        ),
        (
            {"chosen": [user("q"), bot("x")], "rejected": [user("other"), bot("x")]},
            "the sides differ before the answer",
            "user turn",
        ),
        ({"prompt": "q", "chosen": "x", "rejected": 3}, "not a list of messages", "int"),
        ({"prompt": 3, "chosen": "x", "rejected": "y"}, "not a list of messages", "int"),
        ({"prompt": "q", "chosen": "\ud800", "rejected": "y"}, "invalid UTF-8", ""),
        (
            {"prompt": "q", "chosen": "x", "rejected": [{**bot("y"), "weight": 0}]},
            "an answer that is judged is marked as not trained",
            "`rejected` has weight 0",
        ),
    ],
)
def test_bad_records(record: dict[str, Any], reason: str, detail: str) -> None:
    found = bad(record)
    assert found.reason == reason
    assert detail in found.detail
    assert found.keys == (tuple(record) if reason == "no preference columns" else ())


def test_marks_in_a_prompt_say_nothing_and_in_a_rated_answer_too_much() -> None:
    talk = [user("q"), {**bot("x"), "weight": 0}, user("r")]
    assert of({"prompt": talk, "chosen": "y", "rejected": "z"}).prompt == talk
    rated = {"prompt": talk, "completion": [{**bot("y"), "train": False}], "label": True}
    found = to_rated(1, rated, "auto", {})
    assert isinstance(found, BadRecord)
    assert found.reason == "an answer that is judged is marked as not trained"


def test_hh_needs_its_turns() -> None:
    assert bad({"chosen": "x", "rejected": "y"}, "hh").reason == "no turns in the text"
    assert (
        bad({"chosen": "x\n\nHuman: a\n\nAssistant: b", "rejected": "y"}, "hh").reason
        == "no turns in the text"
    )


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=4)
    | st.sampled_from(["user", "assistant", "gpt", HH + "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "x"]), inner, max_size=3
        )
    ),
    max_leaves=10,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=3)}
    ),
    max_size=4,
)
RECORDS = st.dictionaries(
    st.sampled_from(
        ["prompt", "chosen", "rejected", "conversations", "messages", "instruction", "system"]
    ),
    JSON | MESSAGES,
    max_size=5,
)


@given(RECORDS, st.sampled_from(["auto", "messages", "sharegpt", "alpaca", "hh"]))
def test_any_json_is_a_preference_or_bad(record: Any, layout: str) -> None:
    found = to_preference(1, record, layout, {})
    if isinstance(found, BadRecord):
        assert found.reason
        return
    made = from_preference(found.text)
    assert made.prompt
    assert made.chosen != made.rejected
    assert all(
        side[0]["role"] == side[-1]["role"] == "assistant" for side in (made.chosen, made.rejected)
    )
    again = to_preference(1, json.loads(found.text), "messages", {})
    assert again == found, "the canonical form is its own canonical form"


def test_what_is_said_and_changing_it() -> None:
    stored = to_preference(1, {"prompt": "q", "chosen": "good", "rejected": "bad"}, "auto", {})
    assert isinstance(stored, ParsedDocument)
    assert said("preference", stored.text) == ["q", "good", "bad"]
    assert plain_text("preference", stored.text) == "q\ngood\nbad"
    louder = with_texts("preference", stored.text, lambda texts: [text.upper() for text in texts])
    assert from_preference(louder) == Preference([user("Q")], [bot("GOOD")], [bot("BAD")])
    with pytest.raises(WrongInput, match="is not a preference"):
        from_preference('{"messages": []}')


def test_real_sharegpt(test_data: Path) -> None:
    for name in ("dpo_en_demo.json", "dpo_zh_demo.json"):
        records = json.loads((test_data / "llamafactory_demo" / name).read_text(encoding="utf-8"))
        found = [to_preference(row, record, "auto", {}) for row, record in enumerate(records, 1)]
        assert sum(isinstance(item, ParsedDocument) for item in found) == len(found) == 300
        for record, item in zip(records, found, strict=True):
            assert isinstance(item, ParsedDocument)
            made = from_preference(item.text)
            assert [message["content"] for message in made.chosen] == [record["chosen"]["value"]]
            assert [message["content"] for message in made.prompt] == [
                turn["value"] for turn in record["conversations"]
            ]


def test_real_hh(test_data: Path) -> None:
    """Four of its chosen answers are empty; in all others both sides begin with the same words and
    an assistant goes on.
    """
    with gzip.open(
        test_data / "hh-rlhf" / "harmless-base.test.jsonl.gz", "rt", encoding="utf-8"
    ) as stream:
        records = [json.loads(line) for line in stream]
    found = [to_preference(row, record, "auto", {}) for row, record in enumerate(records, 1)]
    assert len(found) == 2312
    assert Counter(item.reason for item in found if isinstance(item, BadRecord)) == {
        "empty chosen": 4
    }
    for record, item in zip(records, found, strict=True):
        if isinstance(item, ParsedDocument):
            made = from_preference(item.text)
            assert made.prompt[0]["role"] == "user"
            for side, text in zip(made.sides, (record["chosen"], record["rejected"]), strict=True):
                words = " ".join(
                    f"{'Human' if message['role'] == 'user' else 'Assistant'}: {message['content']}"
                    for message in side.messages
                )
                assert words.split() == text.split()
