"""YAML as recipes are written in it, read by libyaml and by PyYAML's own parser."""

from __future__ import annotations

from itertools import chain

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.config import documents
from ingot.config.shipped import FOLDER
from tests.exhaustive import examples

ODD = """\
base: &base {lr: 1e-3, "on": true, half: .5, day: 2001-02-03, none: ~}
train:
  <<: *base
  steps: 0x10   # sixteen
  text: |
    one
      two
  folded: >-
    one
    two
list: [a b, "c: d", {e: f}]
金: 'it''s 🔥'
"""


def shape(node: yaml.Node | None) -> object:
    """What is read of a node: its tag, its line and what it holds."""
    if node is None or isinstance(node, yaml.ScalarNode):
        return node and (node.tag, node.value, node.start_mark.line)
    inner = chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
    return node.tag, node.start_mark.line, [shape(one) for one in inner]


@pytest.mark.skipif(documents._Parser is None, reason="PyYAML was built without libyaml")
def test_both_parsers_read_the_same() -> None:
    recipes = [path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.yaml")]
    texts = [ODD, "", "# nothing\n", *recipes]
    assert len(texts) > 10
    for text in texts:
        assert shape(documents.compose(text)) == shape(yaml.compose(text, yaml.SafeLoader))
    assert documents.value_of(ODD) == yaml.safe_load(ODD)


@pytest.mark.parametrize("text", ["a: [b\nc: d", "a: b: c", "'", "a: *b", "---\na: 1\n---\nb: 2"])
def test_what_is_wrong_is_told_alike(text: str) -> None:
    with pytest.raises(yaml.YAMLError) as ours:
        documents.compose(text)
    with pytest.raises(yaml.YAMLError) as theirs:
        yaml.compose(text, yaml.SafeLoader)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    "text", ["[" * 40_000, "- " * 40_000 + "a", "".join(" " * n + "a:\n" for n in range(3000))]
)
def test_a_depth_crashes_nothing(text: str) -> None:
    with pytest.raises(RecursionError):
        documents.compose(text)


def test_aliases_stand_for_as_many_values_as_a_recipe_may_need() -> None:
    shared = "knobs: &knobs [1, 2, 3, 4, 5]\n"
    listed = shared + "all: [" + "*knobs, " * 3000 + "]"
    assert documents.value_of(listed)["all"] == [[1, 2, 3, 4, 5]] * 3000
    literal = "all: [" + "[1, 2, 3, 4, 5], " * 5000 + "]"
    assert len(documents.value_of(literal)["all"]) == 5000, "what stands there is not counted"
    with pytest.raises(yaml.YAMLError, match="aliases that stand for"):
        documents.compose(shared + "all: [" + "*knobs, " * 5000 + "]")


# What YAML 1.2 reads as a number is quoted, and only here.
TEXTS = (st.text(max_size=12) | st.text("ab 10.:-#'\"[]{},&*!|>%@`?\\~\t\n", max_size=200)).filter(
    lambda text: not documents._EXPONENT.match(text)
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=examples(60, 3000))
@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_bytes_do_not_tell_by_what_they_were_written(values: dict[str, object]) -> None:
    theirs = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    assert documents.dump(values) == theirs
    assert documents.dump({"name": values, "path": "a/b"}) == yaml.safe_dump(
        {"name": values, "path": "a/b"}, sort_keys=False, allow_unicode=True
    )


@pytest.mark.skipif(documents._Dumper is None, reason="PyYAML was built without libyaml")
def test_what_libyaml_writes_otherwise_is_known() -> None:
    assert documents._OTHERWISE.search(documents._dump({"a": {"": 1}}, documents._Dumper))
    assert not documents._OTHERWISE.search(documents._dump({"a": ["", "b c"]}, documents._Dumper))
    for odd in ({"": 1}, {"a" * 130: 1}, {"a": "🔥"}):
        assert documents.dump(odd) == documents._dump(odd, yaml.SafeDumper)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("/data/run #3", "/data/run #3"),
        ("####", "####"),
        ("'a # b'", "a # b"),
        ("a#b", "a#b"),
        ("\ue000 #1 \U000f0000", "\ue000 #1 \U000f0000"),
        ('"\\ue000 #1 \\U000F0000"', "\ue000 #1 \U000f0000"),
        ("{a: b #3, c: [#, 1]}", {"a": "b #3", "c": ["#", 1]}),
        ("a: 1 # one\nb: 2", {"a": 1, "b": 2}),
    ],
)
def test_a_hash_that_was_typed_is_a_letter(text: str, value: object) -> None:
    assert documents.typed_value(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "one\ntwo\n\nthree\n",
        "Follow it.\n# Rules",
        "# Title\n# Rules",
        "x = 1 # one\n# two\ny = 2",
        "'Title'\n# Rules",
        "> as she said\nI say",
        "one\n---\ntwo",
    ],
)
def test_lines_that_were_typed_stay_lines(text: str) -> None:
    assert documents.typed_value(text) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\n7\n", 7),
        ("\n", None),
        ("- a # one\n- b", ["a", "b"]),
        ("| # as it is\n  one\n  # two\n", "one\n# two\n"),
        ("'one\n\n  # two'", "one\n# two"),
        ('"one #\\n\\\n  two"', "one #\ntwo"),
    ],
)
def test_yaml_of_several_lines_may_be_typed(text: str, value: object) -> None:
    assert documents.typed_value(text) == value


@pytest.mark.parametrize("text", ["[a, b] # c", "'a' # b", "{a: 1} #"])
def test_what_stands_behind_a_typed_value_is_not_dropped(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        documents.typed_value(text)


@pytest.mark.parametrize("text", ["1e-5", "-1E5", ".5e3", "+2.5e1", "7e10"])
def test_an_exponent_is_a_number_where_one_may_be(text: str) -> None:
    """YAML 1.1 wants a dot and a sign, which Python and YAML 1.2 do not."""
    found = documents.value_of(f"{{a: [{text}], b: '{text}'}}")
    assert found == {"a": [text], "b": text}
    assert documents.with_numbers(found) == {"a": [float(text)], "b": text}
    for dumper in filter(None, (documents._PlainDumper, documents._Dumper)):
        again = documents.value_of(documents._dump({"text": text, "number": 1e-5}, dumper))
        assert documents.with_numbers(again) == {"text": text, "number": 1e-5}
