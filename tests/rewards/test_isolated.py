"""Rewards in processes of their own: what hangs is stopped, what dies is started again, and
nothing that is printed or raised reaches the training.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ingot.base.errors import WrongInput
from ingot.config.sections.rewards import (
    JsonSchemaReward,
    PythonReward,
    RegexReward,
    RewardSettings,
)
from ingot.rewards.build import build_rewards
from ingot.rewards.protocol import RewardScores, Sample
from tests.rewards.crowd import many_open_files

FUNCTIONS = """
from __future__ import annotations
import dataclasses, os, pathlib, sys, time

@dataclasses.dataclass
class Looks:
    module: str

def closeness(sample, scale=1.0):
    print("a function may print")
    os.write(1, b"as it likes")
    return scale / (1 + abs(len(sample.answer) - len(sample.reference)))

def odd(sample, folder):
    if sample.answer == "hangs":
        while True: pass
    if sample.answer == "dies once":
        mark = pathlib.Path(folder, "died")
        if not mark.exists():
            mark.write_text("")
            os._exit(3)
    if sample.answer == "dies":
        os.kill(os.getpid(), 9)
    if sample.answer == "exits":
        sys.exit("bye")
    if sample.answer == "raises":
        raise ValueError("as it likes")
    if sample.answer == "text":
        return "1"
    return os.getpid()

number = 3
"""
HANGS = "(a|a)*b"
ENOUGH = {"timeout": 60.0}
"""Seconds for an answer that takes none, also on a machine that stands still now and then."""


def score(settings: RewardSettings, *answers: str, reference: str | None = None) -> RewardScores:
    with build_rewards([settings]) as rewards:
        return rewards([Sample("", answer, reference) for answer in answers])


@pytest.mark.parametrize(
    ("knobs", "answer", "value"),
    [
        ({"pattern": "b+"}, "abbc", 1.0),
        ({"pattern": "b+", "match": "whole"}, "abbc", 0.0),
        ({"pattern": "a.*c", "match": "whole"}, " ab\nbc\n", 1.0),
        ({"pattern": "a.*c", "flags": []}, "ab\nbc", 0.0),
        ({"pattern": "ABBC", "flags": ["ignore_case"]}, "abbc", 1.0),
        ({"pattern": "^b$", "flags": ["multiline"]}, "a\nb", 1.0),
        ({"pattern": "<answer>(.*)</answer>", "group": 1}, "<answer> 42 </answer>", 1.0),
        ({"pattern": "<answer>(.*)</answer>", "group": 1}, "<answer>41</answer>", 0.0),
        ({"pattern": "a(?P<x>4.)|b", "group": "x"}, "b", 0.0),
    ],
)
def test_regular_expressions(knobs: dict[str, Any], answer: str, value: float) -> None:
    from ingot.rewards.isolated import Regex

    settings = RegexReward(kind="regex", **knobs)
    assert Regex(settings)(Sample("", answer, "42")) == value


@pytest.mark.drawn("rewards in a process")
def test_a_pattern_that_hangs_is_stopped_and_the_others_are_scored() -> None:
    settings = RegexReward(kind="regex", pattern=HANGS, match="whole", timeout=8.0, at_once=2)
    began = time.monotonic()
    scores = score(settings, "ab", "a" * 40, "b", "c")
    assert scores.each == {"regex": [1.0, None, 1.0, 0.0]}
    assert scores.reasons == {"regex": "it took more than 8 s and was stopped"}
    assert time.monotonic() - began < 60


def test_a_process_with_many_open_files_scores() -> None:
    """The limit of open files is raised for the columns, so that descriptors pass 1,023."""
    with many_open_files():
        scores = score(RegexReward(kind="regex", pattern="b", **ENOUGH), "ab", "a")
    assert scores.each == {"regex": [1.0, 0.0]}


def test_patterns_are_checked_when_the_recipe_is_read() -> None:
    with pytest.raises(ValidationError, match="is no regular expression"):
        RegexReward(kind="regex", pattern="(")
    with pytest.raises(ValidationError, match="group 2 is not in the pattern, which has 0, 1"):
        RegexReward(kind="regex", pattern="(a)", group=2)


def test_a_schema_judges_json(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(
        '{"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}'
    )
    settings = JsonSchemaReward(kind="json_schema", file=str(file), **ENOUGH)
    answers = ('{"a": 1}', '{"a": "1"}', "{}", "no", "```json\n{}\n```", '{"a": NaN}', "[" * 50_000)
    assert score(settings, *answers).total == [1.0, 0, 0, 0, 0, 0, 0]
    blocks = JsonSchemaReward(kind="json_schema", file=str(file), block=True, **ENOUGH)
    given = ('So:\n```json\n{"a": 1}\n```\n', '{"a": 1}', '```json\n{"a": 1}\n```\n```\n{}\n```')
    assert score(blocks, *given).total == [1.0, 0.0, 0.0]


@pytest.mark.drawn("rewards in a process")
def test_a_schema_of_the_reference_fetches_nothing_and_cannot_hang() -> None:
    settings = JsonSchemaReward(kind="json_schema", **ENOUGH)
    assert score(settings, "[1]", '"1"', reference='{"type": "array"}').total == [1.0, 0.0]
    remote = score(settings, "[1]", reference='{"$ref": "http://127.0.0.1:9/schema"}')
    assert remote.failures == {"json_schema": 1}
    assert "127.0.0.1:9" in remote.reasons["json_schema"]
    wrong = score(settings, "[1]", reference='{"type": "aray"}')
    assert "no JSON Schema" in wrong.reasons["json_schema"]
    short = JsonSchemaReward(kind="json_schema", timeout=1.0)
    hangs = score(short, f'"{"a" * 40}"', reference='{"pattern": "^(a|a)*b$"}')
    assert "took more than 1 s" in hangs.reasons["json_schema"]


def test_a_schema_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"reward json_schema: file .*none.json cannot be read"):
        score(JsonSchemaReward(kind="json_schema", file=str(tmp_path / "none.json")))
    (tmp_path / "wrong.json").write_text('{"type": "aray"}')
    with pytest.raises(WrongInput, match=r"wrong.json is no JSON Schema"):
        score(JsonSchemaReward(kind="json_schema", file=str(tmp_path / "wrong.json")))


@pytest.fixture
def functions(tmp_path: Path) -> str:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return str(file)


def test_a_function_of_the_users_scores(functions: str, capfd: Any) -> None:
    settings = PythonReward(
        kind="python", function=f"{functions}:closeness", arguments={"scale": 2.0}
    )
    assert score(settings, "abc", "a", reference="abc").total == [2.0, 2 / 3]
    assert capfd.readouterr().out == ""
    installed = PythonReward(kind="python", function="math:isnan")
    assert "TypeError" in score(installed, "1").reasons["python"]


@pytest.mark.drawn("rewards in a process")
def test_a_function_may_do_anything_and_ends_nothing(functions: str, tmp_path: Path) -> None:
    settings = PythonReward(
        kind="python",
        function=f"{functions}:odd",
        arguments={"folder": str(tmp_path)},
        timeout=8.0,
        at_once=1,
    )
    answers = ("dies once", "fine", "hangs", "fine", "raises", "text", "exits", "dies", "fine")
    with build_rewards([settings]) as rewards:
        scores = rewards([Sample("", answer) for answer in answers])
        values = scores.each["python"]
        assert [value is None for value in values] == [
            *(False, False, True, False, True, True, True, True, False)
        ]
        assert scores.failures == {"python": 5}
        assert scores.reasons == {"python": "it took more than 8 s and was stopped"}
        last = int(values[-1] or 0)
        os.kill(last, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("nowhere:f", "No module named 'nowhere'"),
        ("{file}:nothing", "has no attribute 'nothing'"),
        ("{file}:number", "is a int; name a function"),
    ],
)
def test_a_function_that_is_not_there_is_refused_before(
    functions: str, function: str, reason: str
) -> None:
    settings = PythonReward(kind="python", function=function.format(file=functions))
    with pytest.raises(WrongInput, match=f"reward python: .*{reason}"):
        build_rewards([settings])
