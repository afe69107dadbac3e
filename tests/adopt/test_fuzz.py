"""Whatever stands in the files: a recipe that loads, or WrongInput in printable lines; never
another exception, never a token.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.adopt.convert import PROJECTS, adopt
from ingot.base.errors import Failed, WrongInput
from tests.adopt.stand_ins import SETS, load

TOKEN = "hf_" + "Q7rT" * 8
KEYS = sorted(
    {name for project in PROJECTS for row in project.rows for name in (row.key, *row.also)}
)
FLAGS = [key for key in KEYS if key.startswith("-")]
VARIABLES = [key for key in KEYS if key.isupper() and key.isidentifier()]
NAMES = [key for key in KEYS if not key.startswith("-") and not key.isupper()]
VALUES = (
    st.sampled_from(
        [
            "",
            "0",
            "1",
            "-1",
            "2",
            "7",
            "0.5",
            "1e-5",
            "1e400",
            "nan",
            "9" * 40,
            "true",
            "false",
            "null",
            "none",
            "auto",
            "slurm",
            "full",
            "block",
            "hf:a/b",
            "a/b",
            "gs://b/c",
            "gs://",
            "gs:///",
            "/",
            "./x",
            "us-central1-a",
            "a2-highgpu-8g",
            "NFC",
            "bf16",
            "[1, 2]",
            '["a", "b"]',
            "[",
            "{",
            "${REGION}",
            "${output_dir}",
            "adam",
            "sgd",
            "torch.optim.SGD",
            "models.lora_x",
            "projects/1/secrets/x",
            "$(x)",
            "a: b",
            "#",
            "- x",
            "\u2028",
            "é" * 3,
        ]
    )
    | st.integers().map(str)
    | st.floats().map(str)
    | st.text(max_size=10)
)


def check(*texts: str | bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [folder / f"{number}.txt" for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_bytes(
                text if isinstance(text, bytes) else text.encode("utf-8", errors="surrogatepass")
            )
        try:
            adopted = adopt(paths)
        except (WrongInput, Failed) as error:
            told = str(error)
            assert all(line.strip() and line.isprintable() for line in told.split("\n")), told
            assert TOKEN not in told
            return
        load(folder, adopted)
        assert TOKEN not in adopted.text + "".join(adopted.notes)


@settings(max_examples=150, deadline=None)
@given(
    text=st.binary(max_size=60)
    | st.text(max_size=80)
    | st.lists(
        st.sampled_from(
            [
                "{",
                "}",
                "[",
                ":",
                '"',
                "A=",
                "--a ",
                "- ",
                "\n",
                "a: ",
                "&a ",
                "*a",
                "'",
                "\\\n",
                "%",
                "#",
                "<<: ",
                "? ",
                "|\n",
                "\t",
                "DIM=",
                "batch_size: ",
            ]
        ),
        max_size=12,
    ).map("".join)
)
def test_any_text(text: str | bytes) -> None:
    check(text)


@pytest.mark.drawn("fuzzed configurations")
@settings(max_examples=250, deadline=None)
@given(pairs=st.lists(st.tuples(st.sampled_from(FLAGS), VALUES), min_size=2, max_size=8))
def test_any_flags(pairs: list[tuple[str, str]]) -> None:
    check(" ".join(f"{flag} {value}" for flag, value in pairs))


@pytest.mark.drawn("fuzzed configurations")
@settings(max_examples=250, deadline=None)
@given(pairs=st.dictionaries(st.sampled_from(VARIABLES), VALUES, min_size=2, max_size=10))
def test_any_variables(pairs: dict[str, str]) -> None:
    check("\n".join(f"{name}={value}" for name, value in pairs.items()))


@pytest.mark.drawn("fuzzed configurations")
@settings(max_examples=250, deadline=None)
@given(
    pairs=st.dictionaries(
        st.sampled_from(NAMES),
        VALUES | st.lists(VALUES, max_size=2) | st.none() | st.booleans() | st.floats(),
        min_size=2,
        max_size=8,
    ),
    as_json=st.booleans(),
)
def test_any_mapping(pairs: dict[str, object], as_json: bool) -> None:
    check(json.dumps(pairs) if as_json else yaml.safe_dump(pairs, allow_unicode=True))


@pytest.mark.drawn("fuzzed configurations")
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_one_value_of_a_whole_configuration_replaced(data: st.DataObject) -> None:
    files = dict(data.draw(st.sampled_from(list(SETS.values()))))
    name = data.draw(st.sampled_from(list(files)))
    lines = files[name].splitlines()
    number = data.draw(st.integers(0, len(lines) - 1))
    words = lines[number].replace(",", ", ").split(" ")
    words[data.draw(st.integers(0, len(words) - 1))] = data.draw(VALUES | st.just(TOKEN))
    lines[number] = " ".join(words)
    check(*(text if other != name else "\n".join(lines) for other, text in files.items()))
