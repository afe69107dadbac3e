"""Whatever is written in a recipe, a variable or an override: a Recipe or a WrongInput, never
another exception.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.config.knobs import knobs
from ingot.config.load import dump_recipe, load_recipe
from ingot.config.recipe import Recipe
from tests.exhaustive import examples

PATHS = sorted({knob.plain for knob in knobs()})
NAMES = sorted(
    {part for path in PATHS for part in path.split(".")} | {"kind", "0", "1", "", "<<", "x"}
)
WORDS = st.sampled_from(
    [
        "adamw",
        "sgd",
        "cosine",
        "auto",
        "yes",
        "null",
        "train",
        "hf:a/b",
        "gs://a",
        "env:K",
        "1e-4",
        "bf16",
        "deploy",
        ".",
    ]
)
ODD = st.sampled_from(
    [
        "2001-99-99",
        "2001-01-01",
        "0x" + "f" * 5000,
        "9" * 5000,
        "&a *a",
        "!!binary x",
        "!!int x",
        "²",
        "[[",
        "{a: 1",
        "~",
        ".nan",
        "-.inf",
        "!!set {a, b}",
        "1:30",
        "0o7",
        "'",
        "\x00",
        "\ud7ff\ue000",
        "{[1]: 2}",
        "!x y",
        "%",
        "a: b: c",
        "- - -",
        "[" * 3000,
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | WORDS
    | st.text(max_size=8)
    | st.dates()
    | st.binary(max_size=4)
)
TREE_KEYS = st.sampled_from(NAMES) | st.integers(0, 3) | st.text(max_size=4)
TREES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TREE_KEYS, inner, max_size=4),
    max_leaves=12,
)
PIECES = st.lists(
    ODD | st.sampled_from(NAMES) | st.sampled_from([": ", "\n", "  ", "- ", "#"]), max_size=8
).map("".join)
KEYS = (
    st.sampled_from(PATHS)
    | st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map(".".join)
    | st.text(max_size=12)
)
VALUES = ODD | WORDS | st.text(max_size=12) | SCALARS.map(str)


def check(text: str | bytes, overrides: list[str], environ: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "r.yaml")
        file.write_bytes(
            text if isinstance(text, bytes) else text.encode("utf-8", errors="surrogatepass")
        )
        try:
            recipe = load_recipe([file], overrides, environ=environ, dotenv=None)
        except WrongInput as error:
            lines = str(error).split("\n")
            assert all(line.strip() and line.isprintable() for line in lines), lines
            return
        assert isinstance(recipe, Recipe)
        file.write_text(dump_recipe(recipe), encoding="utf-8")
        assert load_recipe([file], environ={}, dotenv=None) == recipe


def with_base(tree: Any) -> str:
    base: dict[str, Any] = {"name": "a", "data": {"train": [{"source": "x"}]}}
    return yaml.safe_dump({**base, **tree} if isinstance(tree, dict) else tree, allow_unicode=True)


@settings(max_examples=examples(80, 300), deadline=None)
@given(
    tree=st.dictionaries(st.sampled_from(sorted(Recipe.model_fields)), TREES, max_size=3) | TREES
)
def test_any_tree(tree: Any) -> None:
    check(with_base(tree), [], {})


@settings(max_examples=examples(50, 150), deadline=None)
@given(text=st.binary(max_size=40) | st.text(max_size=60) | PIECES)
def test_any_text(text: str | bytes) -> None:
    check(text, [], {})


@settings(max_examples=examples(80, 300), deadline=None)
@given(
    pairs=st.lists(st.tuples(KEYS, VALUES), max_size=3),
    variables=st.dictionaries(KEYS, VALUES, max_size=2),
)
def test_any_override_and_variable(pairs: list[tuple[str, str]], variables: dict[str, str]) -> None:
    environ = {f"INGOT_{key.replace('.', '__').upper()}": value for key, value in variables.items()}
    check(with_base({}), [f"{key}={value}" for key, value in pairs], environ)
