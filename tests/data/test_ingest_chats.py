"""Chats as sources: every format gives the same chats, and texts are not taken for chats."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.raw.store import open_raw
from ingot.data.sources.local_files import STDLIB
from tests.data.small import recipe, write_jsonl
from tests.data.test_ingest import documents

ROWS = [
    {"instruction": "Name a metal.", "input": "", "output": "Kupfer"},
    {"instruction": "Translate.", "input": "金", "output": "gold\n🔥"},
    {"instruction": 'Say, "nothing".', "input": "now", "output": "no\tthing"},
]
CHATS = [
    {
        "messages": [
            {
                "role": "user",
                "content": row["instruction"] + ("\n" + row["input"] if row["input"] else ""),
            },
            {"role": "assistant", "content": row["output"]},
        ]
    }
    for row in ROWS
]


def chats(root: Path, *sources: Any, **knobs: Any) -> Recipe:
    return recipe(root, *sources, objective__kind="sft", **knobs)


def found(made: Recipe) -> list[Any]:
    return [json.loads(text) for text in documents(made.folder.raw).values()]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    kind = path.suffix
    if kind == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind in (".parquet", ".arrow"):
        write_table(path, pa.Table.from_pylist(rows))
    else:
        with path.open("w", newline="", encoding="utf-8") as text:
            writer_of_rows = csv.DictWriter(text, list(rows[0]))
            writer_of_rows.writeheader()
            writer_of_rows.writerows(rows)
    return path


def write_table(path: Path, table: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with path.open("wb") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow", "csv"])
def test_every_format_gives_the_same_chats(tmp_path: Path, kind: str) -> None:
    made = chats(tmp_path, write(tmp_path / f"a.{kind}", ROWS))
    ingest(made)
    assert found(made) == CHATS
    source = open_raw(made).splits["train"][0]
    assert (source.kind, source.documents) == ("chat", 3)


def test_tsv(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('instruction\toutput\nA "question"\tan answer\n')
    made = chats(tmp_path, tmp_path / "a.tsv")
    ingest(made)
    assert found(made)[0]["messages"][0]["content"] == 'A "question"'


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_nested_messages_and_other_names(tmp_path: Path, kind: str) -> None:
    rows = [
        {"talk": [{"who": "human", "says": "Hi"}, {"who": "gpt", "says": "Hello"}], "id": number}
        for number in range(3)
    ]
    columns = {"conversations": "talk", "from": "who", "value": "says"}
    made = chats(
        tmp_path,
        {
            "source": str(write(tmp_path / f"a.{kind}", rows)),
            "layout": "sharegpt",
            "columns": columns,
        },
    )
    ingest(made)
    assert (
        found(made)
        == [
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Hello"},
                ]
            }
        ]
        * 3
    )
    with pytest.raises(
        WrongInput,
        match=(
            r"has no chat \(layout auto\) in its columns talk, id: set `columns` of this source,"
            r" such as \{prompt: YOURS, completion: YOURS\}"
        ),
    ):
        ingest(chats(tmp_path, tmp_path / f"a.{kind}"))


FRAMED = {"type": "function", "function": {"name": "f", "description": "d"}}


def test_descriptions_of_tools_are_kept_as_a_server_is_told_of_them(tmp_path: Path) -> None:
    bare = {"description": "d", "name": "f", "parameters": None, "strict": True}
    tools: list[Any] = [None, "", "[]", [], json.dumps([bare]), [bare], [FRAMED]]
    rows = [{**CHATS[0], "tools": given} for given in tools]
    rows += [{**CHATS[0], "tools": given} for given in ("[", {"name": "f"}, ["f"], [{"x": 1}])]
    path = tmp_path / "tools.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ingest(made := chats(tmp_path, path, data__max_skipped=1.0))
    assert found(made) == CHATS[:1] * 4 + [{**CHATS[0], "tools": [FRAMED]}] * 3
    assert open_raw(made).splits["train"][0].bad == {"not a list of tools": 4}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_tools_by_their_older_name(tmp_path: Path, ending: str) -> None:
    """Calls of the same age are read, and the model must know what it may call."""
    bare = FRAMED["function"]
    rows = [{**CHATS[0], "functions": [bare]}, {**CHATS[0], "functions": []}]
    path = write(tmp_path / f"a.{ending}", rows)
    ingest(made := chats(tmp_path, path))
    assert found(made) == [{**CHATS[0], "tools": [FRAMED]}, CHATS[0]]
    ingest(made := chats(tmp_path, {"source": str(path), "columns": {"tools": "none"}}))
    assert found(made) == [CHATS[0]] * 2
    both = {**CHATS[0], "tools": [FRAMED], "functions": [{"name": "older"}]}
    ingest(made := chats(tmp_path, write(tmp_path / f"b.{ending}", [both])))
    assert found(made) == [{**CHATS[0], "tools": [FRAMED]}]


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize(
    ("column", "value", "nothing", "told"),
    [
        (
            "chat_template_kwargs",
            {"enable_thinking": False, "xml_tools": []},
            {"enable_thinking": None, "xml_tools": []},
            "set tokenizer.template_kwargs",
        ),
        ("images", ["a.png"], [], "texts are trained on alone"),
    ],
)
def test_what_would_make_another_chat_is_not_left_out_in_silence(
    tmp_path: Path, ending: str, column: str, value: Any, nothing: Any, told: str
) -> None:
    given = [json.dumps(one) if ending == "csv" else one for one in (value, nothing, None)]
    rows = [{"prompt": "q", "completion": "a", column: one} for one in given]
    path = write(tmp_path / f"a.{ending}", rows)
    ingest(made := chats(tmp_path, path))
    assert len(found(made)) == 2
    source = open_raw(made).splits["train"][0]
    assert source.bad == {f"`{column}` is not read": 1}
    assert told in source.examples[0]
    assert f"columns={{{column}: none}} leaves them out" in source.examples[0]
    ingest(made := chats(tmp_path, {"source": str(path), "columns": {column: "none"}}))
    assert len(found(made)) == 3


@pytest.mark.parametrize(
    ("kind", "answers"),
    [("dpo", {"chosen": "a", "rejected": "b"}), ("kto", {"completion": "a", "label": True})],
)
def test_nor_of_a_preference_or_a_rated_answer(
    tmp_path: Path, kind: str, answers: dict[str, Any]
) -> None:
    rows = [{"prompt": "q", **answers, "images": images} for images in ([], ["a.png"])]
    made = recipe(tmp_path, write(tmp_path / "a.jsonl", rows), objective__kind=kind)
    ingest(made)
    source = open_raw(made).splits["train"][0]
    assert (source.documents, source.bad) == (1, {"`images` is not read": 1})


def test_a_table_gives_no_tool_what_only_another_has(tmp_path: Path) -> None:
    """All structs of a column of Arrow have the same keys."""
    a, b = ({"type": "object", "properties": {name: {"type": "string"}}} for name in "ab")
    tools = [[{"name": "f", "parameters": parameters}] for parameters in (a, b)]
    call = {"name": "f", "arguments": {"a": "x"}}
    other = {"name": "f", "arguments": {"b": "x"}}
    rows = [
        {
            "messages": [*CHATS[0]["messages"], {"role": "assistant", "tool_calls": [given]}],
            "tools": told,
        }
        for told, given in zip(tools, (call, other), strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "tools.parquet")
    ingest(made := chats(tmp_path, tmp_path / "tools.parquet"))
    for one, parameters, given in zip(found(made), (a, b), (call, other), strict=True):
        assert one["tools"][0]["function"]["parameters"] == parameters
        assert one["messages"][-1]["tool_calls"] == [given]


def _rows_of(json_type: pa.DataType) -> pa.DataType:
    """The type of chats with parts that are JSON, in maps as well."""
    arguments = pa.map_(pa.string(), pa.list_(json_type))
    call = pa.struct([("name", pa.string()), ("arguments", arguments)])
    turn = [("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))]
    tool = pa.struct([("name", pa.string()), ("parameters", json_type)])
    return pa.struct([("messages", pa.list_(pa.struct(turn))), ("tools", pa.list_(tool))])


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tables_give_json_and_maps_as_records_in_json_do(tmp_path: Path, kind: str) -> None:
    """`datasets` stores as JSON what differs between records, Spark writes maps. A null in either
    is meant, and a value that is no JSON costs its own record alone.
    """
    asked = {"role": "user", "content": "go"}

    def chat(n: list[Any], x: list[Any], parameters: Any) -> dict[str, Any]:
        call = {"name": "f", "arguments": {"n": n, "x": x}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        return {"messages": [asked, answer], "tools": [{"name": "f", "parameters": parameters}]}

    parameters = {"properties": {"a": {"type": ["integer", "null"]}}, "default": None}
    wanted = chat([2**70 + 1, None], [{"y": None}], parameters)
    told = json.dumps(parameters)
    rows = [chat([str(2**70 + 1), None], ['{"y": null}'], text) for text in (told, "{", told)]
    stored = pa.array(rows, _rows_of(pa.string())).cast(_rows_of(pa.json_()))
    table = pa.Table.from_struct_array(stored)
    ingest(
        made := chats(
            tmp_path,
            write_table(tmp_path / f"a.{kind}", table),
            write(tmp_path / "a.jsonl", [wanted] * 2),
        )
    )
    first, *others = found(made)
    assert others == [first] * 3
    assert first["messages"] == wanted["messages"]
    assert first["tools"][0]["function"]["parameters"] == parameters
    assert open_raw(made).splits["train"][0].bad == {"not JSON": 1}


def test_a_record_too_deep_to_look_through_is_skipped(tmp_path: Path) -> None:
    """orjson parses what is too deep for Python; the chat after it is read."""
    deep = '{"messages": ' + "[" * 990 + "]" * 990 + "}"
    path = tmp_path / "deep.jsonl"
    path.write_text(f"{deep}\n{json.dumps(CHATS[0])}\n")
    made = chats(tmp_path, path)
    ingest(made)
    assert found(made) == CHATS[:1]


def test_large_integers_stay_exact(tmp_path: Path) -> None:
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"n": 2**70 + 1}}}],
    }
    made = chats(
        tmp_path,
        write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "go"}, call]}]),
    )
    ingest(made)
    assert found(made)[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["n"] == 2**70 + 1


def test_bad_chats_are_counted(tmp_path: Path) -> None:
    surrogate = (
        '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content":'
        ' "x"}]}'
    )
    lines = [
        json.dumps(ROWS[0]),
        "{broken",
        '{"messages": []}',
        surrogate,
        json.dumps({"messages": [{"role": "user", "content": "only a question"}]}),
        "[1]",
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    made = chats(tmp_path, tmp_path / "a.jsonl", data__max_skipped=1.0)
    ingest(made)
    assert len(found(made)) == 1
    assert open_raw(made).splits["train"][0].bad == {
        "broken JSON": 1,
        "empty chat": 1,
        "invalid UTF-8": 1,
        "no assistant turn": 1,
        "not a JSON object": 1,
    }


def test_texts_are_not_chats(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a text")
    for source in (tmp_path / "in", STDLIB):
        with pytest.raises(
            WrongInput,
            match=(
                r"data\.train\[0\]\.source .* holds text \(.*\), and objective\.kind=sft trains on"
                r" chats; give JSONL"
            ),
        ):
            ingest(chats(tmp_path, source))


def test_what_was_ingested_as_text_is_not_used_for_chats(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    ingest(recipe(tmp_path, path))
    with pytest.raises(
        WrongInput,
        match=r"a\.jsonl was ingested as text, objective\.kind=sft takes chat; run `ingot ingest`",
    ):
        open_raw(chats(tmp_path, path))


def test_real_sets(tmp_path: Path, test_data: Path) -> None:
    demo = test_data / "llamafactory_demo"
    made = chats(tmp_path, demo / "alpaca_en_demo.json", demo / "glaive_toolcall_en_demo.json")
    ingest(made)
    raw = open_raw(made).splits["train"]
    assert [source.documents > 250 for source in raw] == [True, True]
    assert all(chat["messages"][-1]["role"] == "assistant" for chat in found(made)[:900])
