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
