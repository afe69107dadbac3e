"""Learning from a training that is over: which of its steps count, for which device, and what plans
say afterwards.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.base.masking import knobs_hidden
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import append_line
from ingot.config.load import dump_recipe, load_recipe
from ingot.plan.as_json import plain
from ingot.plan.assemble import RECORDED, known_coefficients
from ingot.plan.devices.coefficients import (
    UNMEASURED,
    Coefficients,
    Curve,
    coefficients_of,
    cpu_coefficients,
    cpu_name,
    save,
)
from ingot.plan.devices.learned import folder, forget, learned_factor
from ingot.plan.devices.types import device_type
from ingot.plan.learn import LEAST, learn, undisturbed
from ingot.plan.place import place_of
from ingot.plan.ranges import Range
from tests.cli.commands import ingot
from tests.small import small_recipe

PROCESSOR = "Quick 9000"
HERE = {"type": "cpu", "name": PROCESSOR, "threads": 2, "world": 1, "per_node": 1}
ROWS = 4
PLANNED = Range(0.8, 1.0, 1.3, "measured")


@pytest.fixture(autouse=True)
def _calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    calibrate(1.0)


def calibrate(seconds: float) -> None:
    name, title = cpu_name(2, 1, PROCESSOR)
    took = (0.9 * seconds, seconds, 1.1 * seconds)
    curves = {"matmul float32": Curve(((0.0, took), (1e9, took)), "measured")}
    save(Coefficients(name, title, curves, **UNMEASURED, origin="measured", threads=2))


def known() -> Coefficients:
    found = cpu_coefficients(2, 1, PROCESSOR)
    assert found is not None
    return found


def test_a_plan_counts_on_the_threads_that_openmp_would_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(place_of(small_recipe(tmp_path)), type="cpu", kind="local", device=None)
    monkeypatch.setattr("ingot.plan.assemble.usable_cores", lambda: 6)
    counted: list[int] = []
    monkeypatch.setattr(
        "ingot.plan.assemble.cpu_coefficients", lambda threads, ranks: counted.append(threads)
    )
    for given in ("4,2", "", "all"):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        known_coefficients(here)
    assert counted == [4, 6, 6]


def plan_of(world: int = 1, **changed: Any) -> dict[str, Any]:
    """What `ingot plan --keep` writes, as far as it is read."""
    now = known()
    return {
        "knobs": {},
        "place": {"world": world, "about": "this machine, CPU"},
        "coefficients": {"name": now.name, "basis": now.basis, "learned": plain(now.learned)},
        "step": {"total": plain(PLANNED)},
    } | changed


def trained(
    root: Path,
    seconds: list[float],
    *,
    devices: Any = HERE,
    plan: Any = "of this run",
    **knobs: Any,
) -> RunFolder:
    """A run that logged each of its steps."""
    recipe = small_recipe(root, train__global_batch=ROWS, **knobs)
    run = recipe.folder
    run.reports.mkdir(parents=True)
    run.recipe.write_text(dump_recipe(recipe), encoding="utf-8")
    append_line(run.events, {"kind": "start", "step": 0, "devices": devices})
    for number, took in enumerate(seconds):
        append_line(run.metrics, {"step": number + 1, "train/examples_per_s": ROWS / took})
    if plan is not None:
        content = plan_of() | {"knobs": recipe.at("train").select(RECORDED)}
        run.plan.write_text(json.dumps(content if plan == "of this run" else content | plan))
    return run


def took(coefficients: Coefficients) -> Range:
    return coefficients.seconds("matmul", "float32", 5e8)


def test_plans_say_afterwards_what_came(tmp_path: Path) -> None:
    # The first step warms up; of the others the quartiles are 1.4, 1.5 and 1.6.
    found = learn(trained(tmp_path, [9.0, 1.3, 1.4, 1.5, 1.6, 7.0]))
    assert found.device == known().name
    assert found.came == Range(1.4, 1.5, 1.6, "measured")
    after = took(known())
    assert after.likely == pytest.approx(1.5)
    assert after.low == pytest.approx(0.9 * 1.4)
    assert after.high == pytest.approx(1.1 * 1.6)
    assert after.origin == "learned"


def test_a_second_plan_is_corrected_once_more_and_not_twice(tmp_path: Path) -> None:
    run = trained(tmp_path, [9.0, *[1.5] * 4])
    learn(run)
    # A plan of now tells 1.5 seconds; the same steps come, and change nothing.
    told = json.loads(run.plan.read_text()) | {
        "coefficients": plan_of()["coefficients"],
        "step": {"total": plain(PLANNED * 1.5)},
    }
    run.plan.write_text(json.dumps(told))
    learn(run)
    assert took(known()).likely == pytest.approx(1.5)


def test_what_was_learned_can_be_taken_away(tmp_path: Path) -> None:
    before = took(known())
    run = trained(tmp_path, [9.0, *[1.5] * 4])
    told = ingot("plan", "--learn", str(run.root))
    assert told.returncode == 0, told.stderr
    assert "take 1.5 times" in told.stderr
    assert took(known()) != before
    name = known().name
    assert f"--forget {name}" in told.stderr
    assert ingot("plan", "--forget", name).returncode == 0
    assert took(known()) == before
    again = ingot("plan", "--forget", name)
    assert again.returncode == 2
    assert "nothing was learned" in again.stderr


def test_a_plan_that_hides_the_key_of_a_source_is_of_its_training(tmp_path: Path) -> None:
    signed = [{"source": "https://me:pass@host/a.jsonl?X-Amz-Signature=s3cr3t"}]
    run = trained(tmp_path, [9.0, *[1.5] * 4], plan=None, data__train=signed)
    knobs = load_recipe([run.recipe], environ={}, dotenv=None).at("train").select(RECORDED)
    run.plan.write_text(json.dumps(plan_of(knobs=knobs_hidden(knobs))))
    learn(run)
    assert took(known()).likely == pytest.approx(1.5)


def test_a_new_calibration_is_not_corrected_by_what_was_learned_of_the_old_one(
    tmp_path: Path,
) -> None:
    run = trained(tmp_path, [9.0, *[1.5] * 4])
    learn(run)
    calibrate(2.0)
    assert took(known()).likely == pytest.approx(2.0)
    with pytest.raises(WrongInput, match="calibrated anew since"):
        learn(run)


def test_trainings_are_taken_together_and_one_counts_once(tmp_path: Path) -> None:
    one = trained(tmp_path / "one", [9.0, *[1.2] * 4])
    other = trained(tmp_path / "other", [9.0, *[1.6] * 4])  # both plans tell what was known before
    for run in (one, other, one):
        learn(run)
    factor = learned_factor(known().name, known().basis)
    assert factor is not None
    assert (factor.low, factor.likely, factor.high) == pytest.approx((1.2, 1.4, 1.6))


def test_of_a_guessed_device_the_range_becomes_that_of_other_recipes(tmp_path: Path) -> None:
    a100 = device_type("a100-80")
    before = coefficients_of(a100)
    devices = {"type": "cuda", "name": a100.cuda_names[0], "threads": 0, "world": 8, "per_node": 8}
    told = plan_of(8, coefficients={"name": "a100-80", "basis": before.basis, "learned": None})
    plan = {name: told[name] for name in ("place", "coefficients")}
    learn(trained(tmp_path, [9.0, *[1.5] * 4], devices=devices, plan=plan))
    was, now = (one.seconds("matmul", "bfloat16", 1e15) for one in (before, coefficients_of(a100)))
    assert now.likely == pytest.approx(1.5 * was.likely)
    assert now.high == pytest.approx(1.25 * now.likely)
    assert now.low == pytest.approx(0.8 * now.likely)
    assert was.high / was.likely > 1.4, "what was guessed was less sure"
    forget("a100-80")
    assert coefficients_of(a100) == before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"plan": None}, "has no plan to learn from; keep one with `ingot plan RECIPE --keep`"),
        ({"plan": {"coefficients": {"name": "h100"}}}, "and its plan is for 1 x h100"),
        ({"plan": {"place": {"world": 8}}}, "and its plan is for 8 x quick-9000"),
        ({"plan": {"knobs": {"train": {"steps": 7}}}}, "has other knobs than its plan: train"),
        ({"plan": {"step": {"unknown": "a trace"}}}, "does not tell the seconds of a step"),
        ({"devices": None}, "does not tell what"),
        ({"devices": HERE | {"name": "Slow 100"}}, "ran on 1 x slow-100-1-x-2-threads, and its"),
        ({"devices": HERE | {"type": "cuda"}}, "device Quick 9000 is not known"),
        ({"seconds": [1.0] * LEAST}, f"has {LEAST - 1} logged steps that nothing disturbed"),
    ],
)
def test_nothing_is_learned_from_what_is_no_measure(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    run = trained(tmp_path, **{"seconds": [1.0] * 8} | changed)
    with pytest.raises(WrongInput) as refused:
        learn(run)
    assert said in str(refused.value)
    assert took(known()).origin == "measured"


def test_another_file_in_the_place_of_the_plan_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path, [1.0] * 8)
    run.plan.write_text(json.dumps({"schema": 1, "step": {}}))
    with pytest.raises(WrongInput, match="is no plan; keep one"):
        learn(run)


def test_a_run_that_moved_to_other_machines_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path, [1.0] * 8)
    append_line(run.events, {"kind": "start", "step": 4, "devices": HERE | {"threads": 8}})
    with pytest.raises(WrongInput, match="several kinds of machines"):
        learn(run)


def test_steps_that_were_disturbed_do_not_count(tmp_path: Path) -> None:
    run = trained(tmp_path, [float(number) for number in range(1, 13)])
    for kind, step in (("start", 5), ("straggler", 8), ("lost", 10), ("save", 11)):
        append_line(run.events, {"kind": kind, "step": step, "devices": HERE})
    left = [2.0, 3.0, 4.0, 5.0, 7.0, 9.0, 11.0, 12.0]
    assert undisturbed(run, ROWS) == pytest.approx(left)


def test_lines_of_metrics_stand_for_all_steps_since_the_line_before(tmp_path: Path) -> None:
    run = trained(tmp_path, [])
    for step in (1, 10, 20, 30):
        append_line(run.metrics, {"step": step, "train/examples_per_s": ROWS / step})
    append_line(run.events, {"kind": "skip", "step": 14})
    assert undisturbed(run, ROWS) == pytest.approx([10.0, 30.0])


def test_corrections_that_cannot_be_read_are_refused() -> None:
    name = known().name
    (folder() / f"{name}.learned.json").write_text("[]")
    with pytest.raises(WrongInput, match=f"take it away with `ingot plan --forget {name}`"):
        known()
    assert forget(name)
    assert known().learned is None
    with pytest.raises(WrongInput, match="is not the name of a device"):
        forget("../h100")
