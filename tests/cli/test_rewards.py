"""Rewards on the command line: `ingot show rewards` scores answers of the user's own, and `ingot
check` refuses what cannot work on this machine.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Literal

import pytest

from ingot.base.errors import WrongInput
from ingot.cli.check.recipe import findings
from ingot.cli.views.rewards import FIELDS, read_samples, show_rewards
from ingot.config.doors import BUILT_IN
from ingot.config.load import read_with_origins
from ingot.config.sections.objective import PretrainSettings
from ingot.config.sections.rewards import Reward
from ingot.rewards.protocol import Sample

LINES = [
    {"prompt": "2 + 2?", "answer": "#### 4", "reference": "#### 4"},
    {"answer": "four", "reference": "#### 4", "finished": False},
    {"answer": "#### 4", "reference": None},
]
RECIPE = """
name: rewarded
data: {train: [{source: nowhere.jsonl}]}
objective:
  kind: rewarded
  rewards:
    - {kind: numeric, weight: 2}
    - {kind: length, name: short, most: 1}
"""


def write(folder: Path, *lines: object) -> Path:
    file = folder / "samples.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n\n")
    return file


def test_samples_are_read(tmp_path: Path) -> None:
    assert read_samples(write(tmp_path, *LINES)) == [
        Sample("2 + 2?", "#### 4", "#### 4"),
        Sample("", "four", "#### 4", finished=False),
        Sample("", "#### 4"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "line 2 has no answer"),
        ({"prompt": "a"}, "line 2 has no answer"),
        ({"answer": 4}, "line 2: answer is 4; give a text"),
        ({"answer": "4", "finished": "yes"}, "line 2: finished is 'yes'; give true or false"),
        ({"answer": "4", "target": "4"}, "line 2 has the key 'target'; there are prompt, answer"),
    ],
)
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        read_samples(write(tmp_path, LINES[0], line))


def test_a_sample_is_told_all_that_a_training_tells(tmp_path: Path) -> None:
    """Else a reward that asks whether there are other turns cannot be tried."""
    assert list(FIELDS) == [field.name for field in dataclasses.fields(Sample)]
    (sample,) = read_samples(write(tmp_path, {"answer": "4", "alone": False}))
    assert sample == Sample("", "4", alone=False)


def test_a_sample_holds_any_letter(tmp_path: Path) -> None:
    """Letters that end lines elsewhere, and those that JSON allows between its own."""
    file, answer = tmp_path / "samples.jsonl", "a\u2028b\u2029c\x85d"
    lines = [json.dumps({"answer": answer}, ensure_ascii=False), '{"answer": "4"}\r', ""]
    file.write_text("\n".join(lines), encoding="utf-8", newline="")
    assert [sample.answer for sample in read_samples(file)] == [answer, "4"]


def test_a_file_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match="has no samples"):
        read_samples(write(tmp_path, ""))
    with pytest.raises(WrongInput, match="cannot be read"):
        read_samples(tmp_path / "none.jsonl")


def test_a_recipe_without_rewards_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("name: plain\ndata: {train: [{source: nowhere.jsonl}]}\n")
    with pytest.raises(WrongInput, match=r"objective\.kind is pretrain; list some in"):
        show_rewards([str(file)], write(tmp_path, *LINES), as_json=False)


class Rewarded(PretrainSettings):
    """An objective with rewards, behind its door."""

    kind: Literal["rewarded"]  # type: ignore[assignment]
    rewards: list[Reward] = []  # noqa: RUF012


@pytest.fixture(autouse=True)
def rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN["objective"], "rewarded", f"{__name__}:Rewarded")


def test_check_refuses_rewards_that_cannot_work_here(tmp_path: Path) -> None:
    recipe, values = read_with_origins([str(write_recipe(tmp_path))])
    assert not [line for line in findings(recipe, values, ["train"]).wrong if "reward" in line]
    wrong = "\n    - {kind: http, url: 'http://h/', key_variable: NOT_SET}"
    wrong += "\n    - {kind: length}\n    - {kind: length}"
    recipe, values = read_with_origins([str(write_recipe(tmp_path, RECIPE.rstrip() + wrong))])
    told = "\n".join(findings(recipe, values, ["train"]).wrong)
    assert "reward http: key_variable NOT_SET is not set" in told
    assert "two rewards are called length" in told
    assert "NOT_SET" not in "\n".join(findings(recipe, values, ["prepare"]).wrong)


@pytest.mark.parametrize(
    ("place", "way"),
    [
        ("kind: ssh, ssh: {hosts: [a]}", "export it here"),
        ("kind: vertex", r"set cloud.secrets=\{JUDGE: secret:NAME\}"),
    ],
)
def test_check_tells_of_keys_that_come_to_no_node(
    place: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = "\n    - {kind: http, url: 'http://h/', key_variable: JUDGE}\n"

    def told(more: str = "") -> list[str]:
        text = f"{RECIPE.rstrip()}{judge}launch: {{{place}{more}}}\n"
        recipe, values = read_with_origins([str(write_recipe(tmp_path, text))])
        return [line for line in findings(recipe, values, ["train"]).unknown if "JUDGE" in line]

    (line,) = told()
    assert re.search(rf"key_variable JUDGE comes to no node .*; {way}", line)
    assert told(", environment: {JUDGE: word}") == []
    monkeypatch.setenv("JUDGE", "word")
    assert bool(told()) == ("cloud" in way)


def write_recipe(folder: Path, text: str = RECIPE) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(text)
    return file


def test_every_value_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_recipe(tmp_path)
    assert show_rewards([str(file)], write(tmp_path, *LINES), as_json=False) == 0
    shown = capsys.readouterr()
    assert "four" in shown.out
    assert "failed" in shown.out
    assert "numeric failed on 1 of 3: the sample has no reference" in shown.err
    assert show_rewards([str(file)], write(tmp_path, *LINES), as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rewards"] == {"numeric": [1.0, 0.0, None], "short": [0.0, 1.0, 0.0]}
    assert told["total"] == [2.0, 1.0, 0.0]
    assert told["failures"] == {"numeric": 1, "short": 0}
