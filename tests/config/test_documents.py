"""YAML as recipes are written in it, read by libyaml and by PyYAML's own parser."""

from __future__ import annotations

from itertools import chain

import pytest
import yaml

from ingot.config import documents
from ingot.config.shipped import FOLDER

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
    "text", ["[" * 100_000, "- " * 100_000 + "a", "".join(" " * n + "a:\n" for n in range(3000))]
)
def test_a_depth_crashes_nothing(text: str) -> None:
    with pytest.raises(RecursionError):
        documents.compose(text)
