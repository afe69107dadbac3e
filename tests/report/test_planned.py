"""What was planned beside what came, in the terminal and on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ingot.base.masking import keys_hidden
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import append_line
from ingot.report.page import render
from ingot.report.planned import PlanComparison, beside_plan, decisions
from ingot.report.run_view import read_run
from ingot.report.tables import show_run
from tests.report.made_up import made_up_run


def plan(**changed: Any) -> dict[str, Any]:
    def number(low: float, likely: float, high: float) -> dict[str, Any]:
        return {"low": low, "likely": likely, "high": high, "origin": "modelled"}

    return {
        "schema": 1,
        "knobs": {"train": {"steps": 300, "global_batch": 8}},
        "place": {"type": "cuda", "price": {"on_demand": 36.0, "spot": 9.0, "uses_spot": True}},
        "memory": [{"peak": number(1e9, 2e9, 3e9)}, {"peak": number(2e9, 4e9, 5e9)}],
        "run": {
            "step_s": number(0.2, 0.3, 0.5),
            "total_s": number(10.0, 20.0, 30.0),
            "money": {"on demand": number(1, 2, 3), "spot": number(0.1, 0.4, 0.9)},
        },
    } | changed


def compared(tmp_path: Path, content: Any, *, memory_gb: float = 4.5) -> PlanComparison | None:
    run = made_up_run(tmp_path)
    line = {"step": 300, "memory/rank0_gb": 1.0, "memory/rank1_gb": memory_gb}
    append_line(run.metrics, line)
    run.plan.write_text(content if isinstance(content, str) else json.dumps(content))
    return beside_plan(read_run(run))


def figures(found: PlanComparison | None) -> dict[str, tuple[str, str]]:
    assert found is not None
    return {one.what: (one.came, one.verdict) for one in found.figures}


def test_each_figure_is_held_against_its_range(tmp_path: Path) -> None:
    found = compared(tmp_path, plan())
    assert found is not None
    told = figures(found)
    assert told["peak memory of a rank"] == ("4.50 GB", "within")
    came, verdict = told["seconds a step"]
    assert 0.3 < float(came) < 0.4, "8 rows at some 24 a second, the median"
    assert verdict == "within"
    assert told["the training"][1] == "above", "made-up runs take minutes"
    came, verdict = told["US dollars spot"]
    assert came[:3] == "0.4", "2m 54s at 9 dollars an hour"
    assert verdict == "within"
    assert found.figures[0].planned == "4.00 GB (2.00 GB to 5.00 GB)"


def test_a_rank_that_took_more_than_was_planned_is_seen(tmp_path: Path) -> None:
    told = figures(compared(tmp_path, plan(), memory_gb=5.5))
    assert told["peak memory of a rank"] == ("5.50 GB", "above")


def test_a_process_on_a_cpu_is_not_held_against_its_tensors(tmp_path: Path) -> None:
    told = figures(compared(tmp_path, plan(place={"type": "cpu", "price": None})))
    [name] = [what for what in told if "memory" in what]
    assert "whole process" in name
    assert told[name][1] == ""
    assert not [what for what in told if "US dollars" in what]


def test_a_plan_of_other_knobs_says_so(tmp_path: Path) -> None:
    knobs = {"train": {"steps": 7, "global_batch": 8}}
    found = compared(tmp_path, plan(knobs=knobs))
    assert found is not None
    assert "train.steps" in found.changed
    assert "train.global_batch" not in found.changed
    assert found.remark.startswith("The run has other knobs than the plan: ")


def test_a_key_in_an_address_makes_no_other_plan(tmp_path: Path) -> None:
    """A signed address has another one at every start, and its record a mark in place of it."""
    run, address = made_up_run(tmp_path), "https://host/a.jsonl?X-Amz-Signature="
    recipe = yaml.safe_load(run.recipe.read_text(encoding="utf-8"))
    found = []
    for source in (f"{address}one", f"{address}two", f"{address}two&part=3"):
        plans = plan(knobs=keys_hidden({"data": {**recipe["data"], "train": [{"source": source}]}}))
        run.plan.write_text(json.dumps(plans), encoding="utf-8")
        recipe["data"]["train"] = [{"source": f"{address}two"}]
        run.recipe.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        beside = beside_plan(read_run(run))
        assert beside is not None
        found.append(beside.changed)
    assert found == [[], [], ["data.train.0.source"]]


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", {"run": 3, "memory": "?"}, {"memory": [{"peak": {"low": "?"}}]}]
)
def test_a_damaged_plan_is_no_error(tmp_path: Path, content: Any) -> None:
    found = compared(tmp_path, content)
    assert found is None or all(one.planned == "unknown" for one in found.figures)


def test_tables_and_page_show_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(tmp_path, plan()) is not None
    run = RunFolder(tmp_path / "quickstart")
    show_run(run)
    out = capsys.readouterr().out
    assert "4.50 GB" in out
    assert "within" in out
    page = render(read_run(run))
    assert "Planned and come" in page
    assert "4.50 GB" in page


def test_a_run_without_a_plan_shows_none(tmp_path: Path) -> None:
    view = read_run(made_up_run(tmp_path))
    assert beside_plan(view) is None
    assert "Planned and come" not in render(view)


def test_what_was_decided_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_up_run(tmp_path)
    layout = {"degrees": {"shard": 8, "tensor": 1}, "devices": {"world": 8, "name": "H100"}}
    run.layout.write_text(json.dumps({**layout, "why": "the fastest of 3"}))
    run.micro_batch.write_text(json.dumps({"micro_batch": 4, "why": "the largest that fits"}))
    assert decisions(read_run(run)) == [], "the recipe gives both"
    with run.recipe.open("a") as file:
        file.write("\nparallel: {degrees: auto}\ntrain: {micro_batch: auto}\n")
    told = decisions(read_run(run))
    assert told == [
        "parallel: auto is shard 8 on 8 x H100: the fastest of 3",
        "train.micro_batch: auto is 4: the largest that fits",
    ]
    show_run(run)
    assert all(line in capsys.readouterr().out.replace("\n", " ") for line in told[:1])
    page = render(read_run(run))
    assert all(line in page for line in told)
