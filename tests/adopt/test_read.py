"""Four forms of files become entries; what cannot be read is told by file and line, never by what
stands there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.adopt.read import DEEPEST, MOST_BYTES, MOST_ENTRIES, File, read_file
from ingot.base.errors import WrongInput


def read(folder: Path, text: str | bytes) -> File:
    path = folder / "f"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_file(path)


def pairs(folder: Path, text: str | bytes) -> list[tuple[str, object]]:
    return [(entry.key, entry.value) for entry in read(folder, text).entries]


def test_variables(tmp_path: Path) -> None:
    text = "# head\n\nexport A=1\nB = 'x # y'\nC=\"z\"\nD=v # said\nH='a' # 'b'\nE=#\nF=a#b\nG=\n"
    assert pairs(tmp_path, text) == [
        ("A", "1"),
        ("B", "x # y"),
        ("C", "z"),
        ("D", "v"),
        ("H", "a"),
        ("E", ""),
        ("F", "a#b"),
        ("G", ""),
    ]
    assert [entry.where.rsplit(":")[-1] for entry in read(tmp_path, text).entries][:2] == ["3", "4"]


def test_json_keeps_numbers_as_they_are_written_and_sees_a_key_twice(tmp_path: Path) -> None:
    text = '\ufeff{"a": 1e-5, "b": {"c": true, "d": {}}, "e": null, "f": [1, "x", [2]], "a": 2}'
    assert pairs(tmp_path, text) == [
        ("a", "1e-5"),
        ("b.c", "true"),
        ("b.d", ""),
        ("e", ""),
        ("f", ("1", "x", "{...}")),
        ("a", "2"),
    ]


def test_yaml(tmp_path: Path) -> None:
    text = "---\na: {b: 2e-5, c: on}\nd:\n  - x\n  - {y: 1}\ne: 2001-01-01\n? [1]\n: odd\n"
    assert pairs(tmp_path, text) == [
        ("a.b", "2e-5"),
        ("a.c", "on"),
        ("d", ("x", "{...}")),
        ("e", "2001-01-01"),
        ("?", "odd"),
    ]
    assert [entry.where.rsplit(":")[-1] for entry in read(tmp_path, text).entries] == [
        "2",
        "2",
        "3",
        "6",
        "7",
    ]


def test_flags(tmp_path: Path) -> None:
    text = (
        "torchrun train.py -N 2 --lr=-1e-4 --steps -1 \\\n  --on --names a 'b c'  #"
        " said\n--last_one x"
    )
    assert pairs(tmp_path, text) == [
        ("-N", "2"),
        ("--lr", "-1e-4"),
        ("--steps", "-1"),
        ("--on", "true"),
        ("--names", ("a", "b c")),
        ("--last_one", "x"),
    ]
    assert read(tmp_path, text).form == "flags"


def test_a_comment_among_flags_begins_a_word_and_ends_with_its_line(tmp_path: Path) -> None:
    text = (
        "#!/bin/bash\n# don't run it twice\npython train.py --name run#7 \\\n"
        "  # --lr 1 \\\n  --note 'a # b' --lr 2 # not \"3\"\n--steps \"#4\" --mark \\#5 --last '6'#7\n"
    )
    assert pairs(tmp_path, text) == [
        ("--name", "run#7"),
        ("--note", "a # b"),
        ("--lr", "2"),
        ("--steps", "#4"),
        ("--mark", "#5"),
        ("--last", "6#7"),
    ]


def test_mappings_in_a_list_are_numbered_in_json_as_in_yaml(tmp_path: Path) -> None:
    told = [("a.0.b", "1"), ("a.1.c.d", "x"), ("e", ())]
    assert pairs(tmp_path, '{"a": [{"b": 1}, {"c": {"d": "x"}}], "e": []}') == told
    assert pairs(tmp_path, "a: [{b: 1}, {c: {d: x}}]\ne: []") == told


def test_what_is_merged_into_a_mapping_is_read_unless_it_says_it_itself(tmp_path: Path) -> None:
    text = (
        "base: &base {a: 1, b: 2}\nother: &other {<<: *base, b: 3, c: 4}\n"
        "one: {b: 5, <<: *other}\ntwo: {<<: [*base, *other], d: 6}\nlist: [{<<: *other}]\n"
    )
    found = pairs(tmp_path, text)[2:]
    assert found == [
        *(("other.a", "1"), ("other.b", "3"), ("other.c", "4")),
        *(("one.a", "1"), ("one.c", "4"), ("one.b", "5")),
        *(("two.a", "1"), ("two.b", "2"), ("two.c", "4"), ("two.d", "6")),
        *(("list.0.a", "1"), ("list.0.b", "3"), ("list.0.c", "4")),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("# only said\n", "is empty"),
        (b"\xff\xfe=1", "is not UTF-8"),
        ("A=1\nsecret stuff\n", ":2: the line is not NAME=value"),
        ('{"a": 1,\n oops}', ":2: not valid JSON"),
        ('{"a": 1}\n{"b": 2}', ":2: more than one JSON object"),
        ("--a 'b", "not a command line (no closing"),
        ("a: [1\nb: 2", "not valid YAML"),
        ("just words\n", "neither JSON, YAML, NAME=value lines nor a command line"),
        ("- 1\n- 2\n", "neither JSON, YAML"),
        ('{"a":' * 30_000, "nested too deeply"),
        ("a: " + "{x: " * (DEEPEST + 2) + "1" + "}" * (DEEPEST + 2), "nested too deeply"),
        ("a: &a {x: *a}", "nested too deeply"),
        ("a: &a {<<: *a}", "nested too deeply"),
        ("a: {<<: 1}", "not valid YAML (<< is for mappings)"),
        ("\n".join(f"a{i}: 1" for i in range(MOST_ENTRIES + 2)) + "\nb: {c: 1}", "too long"),
        ("--a " * (MOST_ENTRIES + 1), "more than"),
        ("A=" + "x" * MOST_BYTES, "more than 1,000,000 bytes"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(
    text: str | bytes, says: str, tmp_path: Path
) -> None:
    with pytest.raises(WrongInput) as refused:
        read(tmp_path, text)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "stuff" not in str(refused.value)


def test_files_that_are_not_there_or_are_folders(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match="does not exist; check the path"):
        read_file(tmp_path / "none.env")
    with pytest.raises(WrongInput, match="is a folder"):
        read_file(tmp_path)
    with pytest.raises(WrongInput, match="cannot be read"):
        read_file(Path("a\0b"))
