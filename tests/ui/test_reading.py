"""What is shown: rows, one run, curves, differences, data."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from ingot.base.markers import FileEntry, read_marker, write_marker
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import append_line, record_event
from ingot.config.load import dump_recipe
from ingot.data.columns.manifest import MANIFEST
from ingot.report.metrics import MetricsFile
from ingot.report.run_view import read_run
from ingot.ui.details import examples, samples
from ingot.ui.runs import Axis, RunsFolder, curve, curve_keys, downsampled
from tests.nobody import as_nobody, open_folder
from tests.report.made_up import BEGAN, COMPLETIONS, PROMPTS, made_up_run
from tests.small import prepared, small_recipe
from tests.ui.serving import Shown, showing


def test_every_run_has_a_row(shown: Shown) -> None:
    answer = shown.get("/api/runs").json()
    rows = {row["id"]: row for row in answer["runs"]}
    assert set(rows) == {"first", "second", "failed", "more/inner"}
    assert rows["first"]["bits"] == pytest.approx(2.2)
    assert rows["first"]["step"] == rows["first"]["last"] == 300
    assert rows["first"]["gate"] == "deploy"
    assert rows["first"]["loss"] < rows["more/inner"]["loss"] + 5
    assert rows["failed"]["state"] == "failed: train"
    assert rows["failed"]["mood"] == "bad"
    assert not answer["acts"]


def test_a_row_follows_its_run(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.ui.runs.LIVE_S", 0.0)
    runs = RunsFolder(run.root.parent)
    (before,) = runs.rows()
    assert runs.rows() == [before]
    append_line(run.metrics, {"step": 77, "train/loss": 0.125})
    (after,) = runs.rows()
    assert after["step"] == 77
    assert after["loss"] == 0.125
    shutil.rmtree(run.root)
    assert runs.rows() == []


def test_a_prompt_with_an_arrow_is_told_whole(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "runs", "arrows", steps=20)
    prompt = "def f(x) -> int:"
    recipe = yaml.safe_load(run.recipe.read_text())
    recipe.setdefault("evaluate", {})["prompts"] = [prompt]
    run.recipe.write_text(yaml.safe_dump(recipe))
    append_line(
        run.metrics, {"step": 10, "samples/0": f"{prompt} -> a -> b", "samples/1": "c -> d"}
    )
    metrics = MetricsFile(run.metrics)
    found = samples(read_run(run, "", metrics), metrics)
    told = [(one["prompt"], one["completion"]) for one in found]
    assert told[:2] == [(prompt, "a -> b"), ("c", "d")]
    assert told[2:] == list(zip(PROMPTS, COMPLETIONS, strict=True))


def test_a_run_is_told_whole(shown: Shown) -> None:
    told = shown.get("/api/run?run=first").json()
    assert [tile["name"] for tile in told["tiles"]][:2] == ["parameters", "bits per byte"]
    metric = next(one for one in told["evaluation"]["metrics"] if one["key"].endswith("per_byte"))
    assert metric["ci_low"] < metric["value"] < metric["ci_high"]
    assert told["gate_report"]["decision"] == "deploy"
    sample = {"step": 200, "key": "samples/0", "prompt": "def", "completion": "main200(run0)"}
    assert sample in told["samples"]
    assert told["goodput_account"]["parts"]
    failed = shown.get("/api/run?run=failed").json()["failure"]
    assert failed["verb"] == "train"
    assert failed["cause"] == "disk full; make space and run it again"
    assert failed["command"].startswith("ingot run ")
    assert time.time() - 3600 < failed["when"] <= time.time(), "the browser knows its own clock"


def test_curves_are_cut_to_the_screen_and_lose_no_spike(tmp_path: Path) -> None:
    run = made_up_run(tmp_path, "long", steps=10_000, log_every=1)
    append_line(run.metrics, {"step": 7_777, "train/loss": 99.0})
    metrics = MetricsFile(run.metrics)
    metrics.refresh()
    drawn = curve(metrics, "train/loss", "step", None, 500)
    assert drawn is not None
    assert len(drawn["x"]) == len(drawn["y"]) == 500
    assert drawn["n"] == 10_000
    spike = int(np.argmax(drawn["high"]))
    assert drawn["high"][spike] == 99.0
    assert abs(drawn["x"][spike] - 7_777) <= 20
    zoomed = curve(metrics, "train/loss", "step", None, 500, 7_700, 7_800)
    assert zoomed is not None
    assert "high" not in zoomed
    assert 99.0 in zoomed["y"]
    assert zoomed["x"][0] == 7_699
    assert zoomed["x"][-1] == 7_801
    tokens = curve(metrics, "train/loss", "tokens", 2048, 500)
    assert tokens is not None
    assert tokens["x"][-1] == pytest.approx(drawn["x"][-1] * 2048)
    assert curve(metrics, "train/loss", "tokens", None, 500) is None
    timed = curve(metrics, "train/loss", "time", None, 500)
    assert timed is not None
    assert 0 <= timed["x"][0] < timed["x"][-1] < 3_400
    assert curve(metrics, "no/such", "step", None, 500) is None


@pytest.mark.parametrize("axis", ["step", "tokens", "time"])
def test_a_curve_tells_where_it_ceased_to_be_finite(axis: Axis, run: RunFolder) -> None:
    for step in (60, 70):
        line = {"step": step, "t_wall": BEGAN + 30 + step / 3}
        append_line(run.metrics, {**line, "train/loss": None, "a/new": None})
    runs = RunsFolder(run.root.parent)
    (row,) = runs.rows()
    assert (row["step"], row["not_finite"]) == (70, ["loss"])
    metrics = runs.metrics("alone")
    drawn, never, whole = (
        curve(metrics, key, axis, 2048, 500, bands=False)
        for key in ("train/loss", "a/new", "train/lr")
    )
    assert drawn
    assert never
    assert whole
    place = {"step": 60, "tokens": 60 * 2048, "time": 59 / 3}[axis]
    assert drawn["lost"] == never["lost"] == pytest.approx(place)
    assert (len(drawn["x"]), len(never["x"]), whole["lost"]) == (6, 0, None)
    assert "a/new" in curve_keys([metrics])


def test_a_smoothed_curve_is_the_same_at_any_zoom_and_width(tmp_path: Path) -> None:
    metrics, expected = MetricsFile(tmp_path / "metrics.jsonl"), dict[float, float]()
    weight, total, seen = 0.9, 0.0, 0.0
    for step in range(1, 1001):
        loss = 2 + (step * 7919 % 101) / 50
        append_line(metrics.path, {"step": step, "train/loss": loss})
        total, seen = weight * total + (1 - weight) * loss, weight * seen + 1 - weight
        expected[step] = total / seen
    metrics.refresh()
    for points, low, high in ((1000, None, None), (90, None, None), (64, 300, 900), (9, 500, 520)):
        drawn = curve(metrics, "train/loss", "step", None, points, low, high, smoothing=weight)
        assert drawn is not None
        told = [expected[step] for step in drawn["x"]]
        assert drawn["smooth"].tolist() == pytest.approx(told, rel=1e-6)
    plain = curve(metrics, "train/loss", "step", None, 90)
    assert plain is not None
    assert "smooth" not in plain


def test_columns_hold_means_and_extremes() -> None:
    x = np.arange(10.0)
    drawn, middles = downsampled(x, np.array([0.0, 8, 1, 1, 1, 1, 1, 1, -4, 4]), 5)
    assert drawn["x"].tolist() == x[middles].tolist() == [1, 3, 5, 7, 9]
    assert drawn["y"].tolist() == [4, 1, 1, 1, 0]
    assert drawn["low"].tolist() == [0, 1, 1, 1, -4]
    assert drawn["high"].tolist() == [8, 1, 1, 1, 4]


def test_curves_of_several_runs_come_in_one_answer(shown: Shown) -> None:
    answer = shown.get("/api/curves?run=first&run=second&key=train/loss&key=train/mfu").json()
    assert set(answer["curves"]) == {"train/loss", "train/mfu"}
    assert set(answer["curves"]["train/loss"]) == {"first", "second"}
    assert answer["keys"][:2] == ["train/loss", "validation/loss"]
    assert answer["left_out"] == 0


def test_two_runs_differ_in_what_they_differ(shown: Shown) -> None:
    answer = shown.get("/api/compare?run=first&run=second").json()
    assert [one["knob"] for one in answer["knobs"]] == ["name"]
    bits = next(one for one in answer["figures"] if one["figure"].endswith("bits_per_byte"))
    assert bits["values"] == [pytest.approx(2.2), pytest.approx(2.3)]
    assert bits["comparable"]
    assert bits["intervals"][0][0] < 2.2 < bits["intervals"][0][1]


def test_a_training_at_work_says_how_long_it_will_take(run: RunFolder) -> None:
    run.events.unlink()
    record_event(run.events, "start", step=0, cause="first step", last=1000)
    row = RunsFolder(run.root.parent).rows()[0]
    assert row["last"] == 1000
    assert not row["running"]
    assert row["left_s"] is None


def test_data_is_shown_as_it_is_trained(tmp_path: Path) -> None:
    prepared(tmp_path)
    recipe = small_recipe(tmp_path)
    recipe.folder.recipe.write_text(dump_recipe(recipe), encoding="utf-8")
    with showing(tmp_path / "runs") as server:
        answer = server.get("/api/data?run=small&first=1&count=2").json()
    assert answer["kind"] == "text"
    assert [example["number"] for example in answer["examples"]] == [1, 2]
    (part,) = answer["examples"][0]["parts"]
    assert part["trained"] == part["tokens"]
    text = "".join(piece[0] for piece in part["pieces"])
    source = (tmp_path / "text").glob("*.txt")
    assert any(path.read_text(encoding="utf-8").strip() in text for path in source)
    assert answer["splits"]["train"] > answer["splits"]["validation"] > 0


def test_examples_tell_of_their_source_no_login_and_no_key(root: Path) -> None:
    run = RunFolder(root / "runs" / "small")
    manifest = read_marker(run.columns, MANIFEST)
    assert manifest is not None
    signed = "https://me:pass@data.org/a.jsonl?X-Amz-Signature=5ecret"
    manifest["splits"]["train"][0]["source"] = signed
    files = [FileEntry(**entry) for entry in manifest["files"]]
    write_marker(run.columns, MANIFEST, manifest, files)
    (told,) = examples(run, "train", 0, 1, root)["examples"]
    assert told["source"] == "https://(hidden)@data.org/a.jsonl?X-Amz-Signature=(hidden)"


def test_without_data_the_browser_is_told_in_words(shown: Shown) -> None:
    answer = shown.get("/api/data?run=first")
    assert answer.status_code == 409
    assert "no prepared data" in answer.json()["error"]


def test_damaged_files_are_named(run: RunFolder) -> None:
    (run.reports / "gate.json").write_text("{")
    (row,) = RunsFolder(run.root.parent).rows()
    assert "reports/gate.json could not be read" in row["error"]
    json.dumps(row, allow_nan=False)


def test_a_run_that_this_user_may_not_read_hides_no_other() -> None:
    def read(root: Path) -> None:
        rows = {row["name"]: row for row in RunsFolder(root).rows()}
        assert rows["partly"]["state"] == "refused"
        assert f"{root}/partly/reports/steps/" in rows["partly"]["error"]
        assert rows["whole"]["step"] == 20

    with open_folder() as root:
        for name in ("whole", "partly"):
            made_up_run(root, name, steps=20)
        locked = root / "partly" / "reports" / "steps"
        locked.chmod(0o600 if os.getuid() == 0 else 0)
        (root / "link").symlink_to(locked / "behind")
        as_nobody(read, root)
        locked.chmod(0o700)


def test_a_long_list_is_there_at_once_and_read_by_and_by(tmp_path: Path) -> None:
    for number in range(4):
        made_up_run(tmp_path, f"run{number}", steps=20)
    runs = RunsFolder(tmp_path)
    assert [row["pending"] for row in runs.rows(within_s=-1)] == [True] * 4
    assert [row["state"] for row in runs.rows(within_s=-1)] == ["being read"] * 4
    rows = runs.rows()
    assert [row["pending"] for row in rows] == [False] * 4
    assert runs.rows(within_s=-1) == rows
