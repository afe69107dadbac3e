from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ingot.base.console import console
from ingot.base.errors import WrongInput
from ingot.base.markers import write_marker
from ingot.base.reports import read_report, write_report
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import append_line
from ingot.report.failures import last_failure
from ingot.report.page import write_page
from ingot.report.run_view import read_run
from ingot.report.runs import each_of, runs_in
from ingot.report.tables import (
    LAST_HELD_OUT,
    LAST_TRAINED,
    comparable,
    compare,
    run_json,
    show_run,
    show_runs,
    show_samples,
)
from tests.nobody import as_nobody, open_folder
from tests.report.made_up import made_up_run
from tests.report.told import Told


def rows(text: str) -> list[list[str]]:
    """Cells of the table lines in `text`."""
    return [
        [cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")]
        for line in text.splitlines()
        if line[:1] in ("│", "┃")
    ]


def test_one_run_tells_its_steps_metrics_and_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_up_run(tmp_path)
    show_run(run)
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("quickstart  done up to serve, ")
    table = rows(out)
    assert table[0] == ["step", "seconds", "result", "look at"]
    assert [row[0] for row in table[1:8]] == [
        "ingest",
        "prepare",
        "train",
        "evaluate",
        "gate",
        "register",
        "serve",
    ]
    assert table[3] == ["train", "112.4", "300 steps in 1m 52s, loss 3.641", "model"]
    assert "at step 300: train/loss 3." in out
    assert "register: quickstart v2, live" in out


def test_a_loss_that_is_no_number_any_more_is_told_as_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = made_up_run(tmp_path), made_up_run(tmp_path, "other")
    append_line(run.metrics, {"step": 310, "train/loss": None})
    show_run(run)
    show_runs(tmp_path)
    compare(run, other)
    out = capsys.readouterr().out
    assert "at step 310 (step 300 is saved): train/loss nan, validation/loss 3." in out
    assert next(row for row in rows(out) if row[0] == "quickstart")[1:3] == ["310", "nan"]
    assert next(row for row in rows(out) if row[0] == LAST_TRAINED)[1::2] == ["nan"]
    told = run_json(run)
    assert told["step"] == 310
    assert math.isnan(told["figures"][LAST_TRAINED])
    page = write_page(run).read_text(encoding="utf-8")
    assert page.count("<u>not finite from step 310</u>") == 1


def test_a_training_that_was_given_up_tells_what_it_failed_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_up_run(tmp_path)
    (run.steps / "train.json").unlink()
    given_up = "two failures in a row; the last failure: rank 0 failed (exit 1) at step 3"
    append_line(run.events, {"kind": "failure", "cause": "train: of the attempt before"})
    append_line(run.events, {"kind": "start", "step": 0, "t_wall": 2e9})
    append_line(run.events, {"kind": "failure", "cause": f"train: {'disk full; ' * 9}", "step": 3})
    append_line(run.events, {"kind": "give_up", "cause": given_up})
    cause = f"{'disk full; ' * 9}; given up: two failures in a row"
    assert run_json(run)["state"] == f"failed: train: {cause}"
    failure = last_failure(read_run(run))
    assert failure is not None
    assert (failure.verb, failure.cause) == ("train", cause)
    capsys.readouterr()
    show_runs(tmp_path)
    (row,) = [row for row in rows(capsys.readouterr().out) if "failed" in " ".join(row)]
    assert row[6] == "failed: train", "a table of runs has a line for each"


def test_times_of_the_hour_that_comes_twice_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_up_run(tmp_path)
    append_line(run.events, {"kind": "save", "step": 8, "t_wall": 1792888200.0})
    append_line(run.events, {"kind": "save", "step": 9, "t_wall": 1792891800.0})
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
            time.tzset()
            show_run(run)
    finally:
        time.tzset()
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first == "2026-10-25 02:30:00 CEST  save at step 8"
    assert second == "2026-10-25 02:30:00 CET  save at step 9"


def test_a_run_that_was_moved_tells_where_its_files_are_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_up_run(tmp_path / "runs")
    moved = RunFolder(made.root.rename(tmp_path / "elsewhere"))
    show_run(moved)
    out = capsys.readouterr().out
    assert [row[3] for row in rows(out)[1:8]][:4] == [
        "data/raw",
        "data/columns",
        "model",
        "reports/evaluate.json",
    ]
    assert str(made.root) not in out
    assert run_json(moved)["steps"]["train"]["where"] == str(moved.model)
    page = write_page(moved).read_text(encoding="utf-8")
    assert '<td class="path">data/columns</td>' in page


def test_where_the_time_of_training_went_and_what_was_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_run(made_up_run(tmp_path))
    out = capsys.readouterr().out
    sentence = (
        "goodput 60.6 %: 1m 46s of 2m 54s were training; 42s down, 10s starting, 8s lost and"
        " repeated, 6s evaluating, 2s saving, 1s waiting for data\n"
    )
    assert sentence in out
    table = rows(out.split(sentence)[1])
    assert table == [
        ["time of training", "", "share"],
        ["training", "1m 46s", "60.6 %", "██████████████▌"],
        ["waiting for data", "1s", "0.3 %", "▏"],
        ["evaluating", "6s", "3.3 %", "▊"],
        ["saving", "2s", "1.3 %", "▎"],
        ["starting", "10s", "5.7 %", "█▍"],
        ["lost and repeated", "8s", "4.6 %", "█▏"],
        ["down", "42s", "24.1 %", "█████▊"],
        ["lost", "when", "rank", "step", "cost", "of it repeated", "cause"],
        [
            "died",
            time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(1_750_000_081)),
            "",
            "118, 18 again",
            "54s",
            "8s",
            "killed (out of memory?)",
        ],
    ]


def test_of_many_losses_the_largest_stand_there_and_the_rest_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_up_run(tmp_path)
    run.events.unlink()
    told = Told()
    told.start(5, attempt=1, seconds=5)
    for number in range(1, 15):
        kept = 100 * number - number - 1
        told.save(kept, step=number, spent={"productive": kept - told.began}, total_s=0)
        told.event(100 * number - number, "killed", attempt=number, rank=number, cause="chaos")
        told.event(100 * number, "restart", attempt=number + 1, seconds=number, cause="died")
        told.start(100 * number + 5, attempt=number + 1, seconds=5)
    told.own(1500, "finish", step=14)
    for event in told.events:
        append_line(run.events, event)
    show_run(run)
    out = capsys.readouterr().out
    assert [row[2] for row in rows(out) if row[0] == "killed"] == [
        "14",
        "13",
        "12",
        "11",
        "10",
        "9",
        "8",
        "7",
        "6",
        "5",
    ]
    assert "and 4 more that cost 34s together; they are in events.jsonl" in out


def test_without_metrics_no_step_is_done(tmp_path: Path) -> None:
    assert read_run(made_up_run(tmp_path / "whole")).steps_done == 300
    assert read_run(RunFolder(tmp_path)).steps_done == 0


def test_without_a_training_nothing_is_said_of_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_up_run(tmp_path)
    run.events.write_text('{"kind": "gate", "t_wall": 1}\n{"kind": "start", "t_wal')
    show_run(run)
    out = capsys.readouterr().out
    assert "goodput" not in out
    assert "time of training" not in out


def test_a_step_whose_files_changed_and_a_broken_file_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_up_run(tmp_path)
    record = (run.steps / "train.json").read_text()
    (run.steps / "train.json").write_text(
        record.replace('"files": {}', '"files": {"model/config.json": 1}')
    )
    (run.reports / "gate.json").write_text("{")
    run.recipe.write_text("name: [a")
    run.events.write_text("{}\n")
    show_run(run)
    out = capsys.readouterr().out
    told = [line for line in out.splitlines() if line.startswith("recipe.yaml could not be read")]
    assert "got '<stream end>'" in told[0], "what is wrong is in that line, not in three below"
    assert "None" not in out, "an event without a name tells nothing"
    assert "(its files are missing or were changed)" in " ".join(out.replace("│", " ").split())
    assert "reports/gate.json could not be read" in out


def test_a_model_of_transformers_is_no_broken_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_up_run(tmp_path)
    (run.model / "config.json").write_text('{"model_type": "t5", "d_model": 64}')
    show_run(run)
    assert "could not be read" not in capsys.readouterr().out
    weights = json.loads((run.model / "ingot.json").read_bytes())["parameters"]
    assert read_run(run).parameters == weights


def test_runs_stand_one_a_line_the_last_changed_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up_run(tmp_path, "old")
    made_up_run(tmp_path, "new", bits=1.9).root.rename(tmp_path / "new[red]")
    (tmp_path / "registry").mkdir()
    for path in (tmp_path / "old").rglob("*"):
        os.utime(path, (time.time() - 3 * 24 * 3600,) * 2)
    (tmp_path / "old").touch()  # the folder, which says nothing of the run
    show_runs(tmp_path)
    table = rows(capsys.readouterr().out)
    assert table[0] == [
        "run",
        "steps",
        "loss",
        "validation",
        "bits per byte",
        "gate",
        "state",
        "when",
    ]
    assert [row[0] for row in table[1:]] == ["new[red]", "old"]
    assert table[1][1] == "300"
    assert table[1][4:7] == ["1.900", "deploy", "done up to serve"]
    assert table[1][7].endswith("ago")
    assert table[2][7].startswith(time.strftime("%Y-", time.localtime(time.time() - 3 * 24 * 3600)))


def test_two_runs_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = made_up_run(tmp_path, "one"), made_up_run(tmp_path, "two", steps=400, bits=2.0)
    compare(one, other)
    table = rows(capsys.readouterr().out)
    assert ["train.steps", "300", "400"] in table
    assert not any(row[0] == "data.seq_len" for row in table)
    assert ["loss/bits_per_byte", "2.2580", "2.0000", "-0.258"] in table


def test_names_and_values_are_whole_in_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.report.tables.console", lambda: console(width=80))
    names = [f"a-long-name-of-a-run-that-ends-in-{end}" for end in ("one", "two")]
    paths = [f"/data/of/some/project/that/has/a/long/name/{end}.jsonl" for end in "ab"]
    runs = [made_up_run(tmp_path, name) for name in names]
    for run, path in zip(runs, paths, strict=True):
        recipe = yaml.safe_load(run.recipe.read_text())
        recipe["data"]["train"] = [{"source": path}]
        run.recipe.write_text(yaml.safe_dump(recipe))

    show_runs(tmp_path)
    compare(*runs)
    out = capsys.readouterr().out
    assert "…" not in out
    assert all(end in out for end in ("one", "two", "a.jsonl", "b.jsonl"))


def test_metrics_of_other_evaluation_sets_are_never_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = made_up_run(tmp_path, "one"), made_up_run(tmp_path, "two", bits=2.0)
    report = other.reports / "evaluate.json"
    report.write_text(report.read_text().replace("0ddba11decaf0002", "another"))
    assert read_report(report).metrics["loss/bits_per_byte"].set_fingerprint == "another"
    compare(one, other)
    table = rows(capsys.readouterr().out)
    assert ["loss/bits_per_byte", "2.2580", "2.0000", "not comparable"] in table
    assert ["loss/loss", "3.7412", "3.7412", "+0"] in table


def test_losses_of_trainings_on_other_data_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = made_up_run(tmp_path, "one"), made_up_run(tmp_path, "two")

    def verdicts() -> dict[str, str]:
        compare(one, other)
        return {row[0]: row[-1] for row in rows(capsys.readouterr().out)}

    assert verdicts()["train/loss (last)"] == verdicts()["validation/loss (last)"] == "+0"
    lineage = other.model / "ingot.json"
    made = json.loads(lineage.read_bytes())
    lineage.write_text(json.dumps(made | {"data": "of another"}))
    assert verdicts()["train/loss (last)"] == "not comparable"
    assert verdicts()["validation/loss (last)"] == "+0", "the same documents are held out"
    lineage.write_text(json.dumps(made | {"held_out": "of another"}))
    assert verdicts()["train/loss (last)"] == "+0"
    assert verdicts()["validation/loss (last)"] == "not comparable", "though evaluated on the same"


def test_losses_of_trainings_that_go_on_are_compared_by_their_columns(tmp_path: Path) -> None:
    """Knobs that change no record are no reason to refuse, and equal knobs are none to compare."""
    one, other = made_up_run(tmp_path, "one"), made_up_run(tmp_path, "two")
    recipe = yaml.safe_load(other.recipe.read_text())
    for run in (one, other):
        (run.model / "ingot.json").unlink()
        (run.reports / "evaluate.json").unlink()

    def are_compared(**knobs: Any) -> list[bool]:
        changed = {**recipe, "data": {**recipe["data"], **knobs}}
        other.recipe.write_text(yaml.safe_dump(changed))
        views = [read_run(run) for run in (one, other)]
        return [comparable(views, name) for name in (LAST_TRAINED, LAST_HELD_OUT)]

    assert are_compared() == are_compared(engine={"kind": "local", "workers": 4}) == [True, True]
    assert are_compared(skip=[[3, 4]]) == [False, False], "without the columns nobody knows"
    for run in (one, other):
        run.columns.mkdir(parents=True)
        write_marker(
            run.columns,
            "manifest.json",
            {"data": {"train": "of both", "validation": "of both"}},
            [],
        )
    assert are_compared(skip=[[3, 4]]) == are_compared(on_bad="stop") == [True, True]
    others = {"data": {"train": "of both", "validation": "of another"}}
    write_marker(other.columns, "manifest.json", others, [])
    assert are_compared() == [True, False]
    for run in (one, other):  # as an earlier version wrote it, of all splits
        write_marker(run.columns, "manifest.json", {"data": "of both"}, [])
    assert are_compared() == [True, True]
    assert are_compared(skip=[[3, 4]]) == [False, False]


@pytest.mark.parametrize(
    ("knob", "value", "trained"),
    [
        ("objective", {"kind": "orpo"}, "not comparable"),
        ("data.seq_len", 32, "not comparable"),
        ("train.evaluate_rows", 2, "+0"),
    ],
)
def test_losses_of_another_kind_are_not_compared(
    knob: str, value: Any, trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = made_up_run(tmp_path, "one"), made_up_run(tmp_path, "two")
    recipe = yaml.safe_load(other.recipe.read_text())
    *sections, key = knob.split(".")
    inner = recipe
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    other.recipe.write_text(yaml.safe_dump(recipe))
    compare(one, other)
    found = {row[0]: row[-1] for row in rows(capsys.readouterr().out)}
    assert found["train/loss (last)"] == trained
    assert found["validation/loss (last)"] == "not comparable"


def test_a_run_without_a_figure_keeps_none_of_the_others_from_being_compared(
    tmp_path: Path,
) -> None:
    runs = [made_up_run(tmp_path, name) for name in ("one", "two", "rewarded")]
    recipe = yaml.safe_load(runs[-1].recipe.read_text())
    runs[-1].recipe.write_text(yaml.safe_dump({**recipe, "objective": {"kind": "grpo"}}))
    views = [read_run(run) for run in runs]
    assert not comparable(views, LAST_HELD_OUT), "it has the figure"
    runs[-1].metrics.unlink()
    views = [read_run(run) for run in runs]
    assert comparable(views, LAST_TRAINED)
    assert comparable(views, LAST_HELD_OUT)


def test_a_folder_that_is_no_run_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(
        WrongInput, match=r"is no run folder \(no recipe\.yaml in it\); `ingot run` makes one"
    ):
        show_run(RunFolder(tmp_path / "none"))
    with pytest.raises(WrongInput, match=r"holds no run; give the folder that runs lie in"):
        show_runs(tmp_path)
    with pytest.raises(WrongInput, match="is no run folder"):
        compare(made_up_run(tmp_path), RunFolder(tmp_path / "none"))
    assert [run.root.name for run in runs_in(tmp_path)] == ["quickstart"]


def test_a_run_that_this_user_may_not_read_hides_no_other() -> None:
    def read(root: Path) -> None:
        told, shown = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(shown):
            show_runs(root)
            read_as_json = each_of(runs_in(root), run_json)
        assert "quickstart" in shown.getvalue()
        assert [value["name"] for value in read_as_json] == ["quickstart"]
        lines = [
            f"{root}/{name} is left out: this user may not read {root}/{file}; ask its owner, or"
            " chmod"
            for name, file in (("locked", "locked/recipe.yaml"), ("partly", f"partly/{part}"))
        ]
        assert told.getvalue().splitlines() == [*lines, *lines]

    part = "reports/steps/train.json"
    with open_folder() as root:
        made_up_run(root)
        for name, inner in (("locked", ""), ("partly", "reports/steps")):
            shutil.copytree(root / "quickstart", root / name)
            (root / name / inner).chmod(0o600 if os.getuid() == 0 else 0)
        (root / "link").symlink_to(root / "locked" / "reports")
        as_nobody(read, root)
        for folder in (root / "locked", root / "partly" / "reports" / "steps"):
            folder.chmod(0o700)


def test_text_from_files_is_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_up_run(tmp_path)
    append_line(run.events, {"kind": "[bold]x[/]", "cause": "[/nonsense]", "t_wall": 1.0})
    report = read_report(run.reports / "evaluate.json")
    report.metrics["[/x]/y"] = report.metrics["loss/loss"]
    write_report(run.reports / "evaluate.json", report)
    show_run(run)
    compare(run, run)
    out = capsys.readouterr().out
    assert "[bold]x[/]: [/nonsense]" in out
    assert "[/x]/y" in out


def test_the_answers_to_prompts_are_shown_the_best_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    with pytest.raises(WrongInput, match="no answers yet: only a training on rewards"):
        show_samples(run, 2)
    answers = [
        {"answer": "3", "reward": 0.0, "finished": True},
        {"answer": "9 [b]", "reward": 1.0, "finished": False},
    ]
    for step in (1, 2, 3):
        append_line(
            run.samples, {"step": step, "prompt": "3 9", "reference": "9", "answers": answers}
        )
    show_samples(run, 2)
    out = capsys.readouterr().out
    assert "step 1" not in out
    assert "step 2: 3 9" in out
    assert "reference: 9" in out
    assert rows(out)[:3] == [["reward", "answer"], ["1.000", "9 [b] ..."], ["0", "3"]]


def test_a_narrow_terminal_shows_every_step_s_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.report.tables.console", lambda: console(width=40))
    show_run(made_up_run(tmp_path))
    told = capsys.readouterr().out
    assert {"ingest", "prepare", "evaluate", "register"} <= {row[0] for row in rows(told)}
    assert "…" not in told.split("goodput")[0].partition("ingest")[2]
