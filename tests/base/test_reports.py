from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.reports import (
    EvaluationReport,
    Metric,
    PipelineStepRecord,
    begin_record,
    did_not_end,
    file_sizes,
    is_intact,
    read_record,
    read_report,
    write_record,
    write_report,
)


def a_record(root: Path) -> PipelineStepRecord:
    (root / "data").mkdir(exist_ok=True)
    (root / "data" / "a").write_bytes(b"12345")
    return PipelineStepRecord(
        "prepare",
        "in",
        "out",
        1.5,
        "12 rows",
        "data",
        {"data.seq_len": 8},
        file_sizes(root, [root / "data" / "a"]),
        0,
    )


def test_a_record_comes_back_equal(tmp_path: Path) -> None:
    record = a_record(tmp_path)
    write_record(tmp_path / "steps", record)
    assert read_record(tmp_path / "steps", "prepare") == record
    assert record.files == {"data/a": 5}


@pytest.mark.parametrize("copied", [False, True])
def test_what_a_moved_or_copied_run_made_lies_in_it(tmp_path: Path, copied: bool) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (tmp_path / "registry/v1").mkdir(parents=True)
    record = a_record(old)
    places = (str(old / "data/a"), str(tmp_path / "registry/v1"), "gs://bucket/data/a")
    for step, place in zip("abc", places, strict=True):
        write_record(old / "reports/steps", replace(record, step=step, where=place))
    (shutil.copytree if copied else shutil.move)(old, new)
    found = [read_record(new / "reports/steps", step) for step in "abc"]
    assert [one and one.where for one in found] == [str(new / "data/a"), *places[1:]]


def test_a_record_is_void_when_a_file_is_gone_or_resized(tmp_path: Path) -> None:
    record = a_record(tmp_path)
    assert is_intact(tmp_path, record)
    (tmp_path / "data" / "a").write_bytes(b"123456")
    assert not is_intact(tmp_path, record)
    of_any_size = replace(record, files={"data/a": None})
    assert is_intact(tmp_path, of_any_size)
    (tmp_path / "data" / "a").unlink()
    assert not is_intact(tmp_path, record)
    assert not is_intact(tmp_path, of_any_size)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"step": "prepare", "unknown": 1}', "\udcff"]
)
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "prepare.json").write_bytes(text.encode(errors="surrogateescape"))
    assert read_record(tmp_path, "prepare") is None
    assert read_record(tmp_path, "never") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"knobs": None},
        {"files": None},
        *(
            {"knobs": {part: value}}
            for part in ("knobs", "folders", "outside")
            for value in (None, [])
        ),
    ],
)
def test_a_record_whose_parts_have_no_names_is_none(tmp_path: Path, wrong: dict[str, Any]) -> None:
    write_record(tmp_path, replace(a_record(tmp_path), **wrong))
    assert read_record(tmp_path, "prepare") is None


def test_a_step_that_was_begun_is_unfinished_until_it_has_its_record(tmp_path: Path) -> None:
    record = a_record(tmp_path)
    assert not did_not_end(tmp_path, "prepare"), "nobody began it"
    for _ in range(2):
        begin_record(tmp_path, "prepare")
        assert did_not_end(tmp_path, "prepare")
        assert read_record(tmp_path, "prepare") is None
        write_record(tmp_path, record)
        assert not did_not_end(tmp_path, "prepare")


LOSS = Metric(2.5, 2.4, 2.6, "lower", 100, "set1")


def report(**metrics: Metric) -> EvaluationReport:
    return EvaluationReport(
        "model", "tokenizer", {key.replace("__", "/"): value for key, value in metrics.items()}
    )


def test_a_report_comes_back_equal(tmp_path: Path) -> None:
    written = EvaluationReport(
        "m", "t", {"loss/loss": LOSS}, {"gzip": 3.0}, [{"prompt": "Größe", "completion": "x"}]
    )
    write_report(tmp_path / "reports" / "evaluate.json", written)
    assert read_report(tmp_path / "reports" / "evaluate.json") == written


def test_the_base_comes_back_and_a_report_may_have_none(tmp_path: Path) -> None:
    written = EvaluationReport(
        "m",
        "t",
        {"loss/loss": LOSS},
        {"gzip -9": 2.0, "loss/loss/first_line": 0.1},
        [],
        {"loss/loss": LOSS},
    )
    write_report(tmp_path / "evaluate.json", written)
    assert read_report(tmp_path / "evaluate.json") == written
    assert written.bits_per_byte == {"gzip -9": 2.0}
    without = {key: value for key, value in asdict(written).items() if key != "base"}
    (tmp_path / "evaluate.json").write_text(json.dumps(without))
    assert read_report(tmp_path / "evaluate.json").base == {}
    with pytest.raises(Failed, match="base loss/loss is inf"):
        write_report(
            tmp_path / "evaluate.json",
            EvaluationReport(
                "m", "t", {}, {}, [], {"loss/loss": Metric(float("inf"), 0, 0, "lower", 1, "s")}
            ),
        )


def test_an_interval_without_width_is_none_also_in_a_report_that_is_read(tmp_path: Path) -> None:
    """Of one document the value was told as both ends: nothing may take that for certainty."""
    before = asdict(report(loss__loss=LOSS))
    before["metrics"]["loss/loss"] |= {"ci_low": 2.5, "ci_high": 2.5, "n": 1}
    (tmp_path / "before.json").write_text(json.dumps(before))
    found = read_report(tmp_path / "before.json")
    assert found.metrics["loss/loss"].interval is None
    assert found.metrics["loss/loss"].interval_words(str) == "not known"
    write_report(tmp_path / "now.json", found)
    now = json.loads((tmp_path / "now.json").read_bytes())["metrics"]["loss/loss"]
    assert now == {**before["metrics"]["loss/loss"], "ci_low": None, "ci_high": None}
    assert read_report(tmp_path / "now.json") == found


def test_a_metric_is_found_by_key_and_by_its_tail_where_that_is_unique() -> None:
    found = report(loss__perplexity=LOSS, loss__loss=LOSS, other__loss=LOSS)
    assert found.metric("loss/loss") == ("loss/loss", LOSS)
    assert found.metric("perplexity") == ("loss/perplexity", LOSS)
    assert found.metric("rouge1") is None
    assert found.metric("erplexity") is None
    with pytest.raises(
        WrongInput, match=r"metric `loss` is one of loss/loss, other/loss; give the whole key"
    ):
        found.metric("loss")


@pytest.mark.parametrize(
    "change",
    [
        {"value": float("nan")},
        {"ci_low": float("-inf")},
        {"value": "2.5"},
        {"value": None},
        {"direction": "sideways"},
        {"ci_high": None},
        {"unknown": 1},
    ],
)
def test_a_report_with_an_impossible_metric_is_refused_in_words(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    value = asdict(report(loss__loss=LOSS))
    value["metrics"]["loss/loss"].update(change)
    (tmp_path / "evaluate.json").write_text(json.dumps(value))
    with pytest.raises(WrongInput, match=r"evaluate\.json.*run `ingot evaluate` again"):
        read_report(tmp_path / "evaluate.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"metrics": 3}', "\udcff"])
def test_a_torn_report_is_refused_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "evaluate.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(WrongInput, match=r"not an evaluation report.*run `ingot evaluate` again"):
        read_report(tmp_path / "evaluate.json")


def test_a_missing_and_a_newer_report_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match="does not exist; run `ingot evaluate` first"):
        read_report(tmp_path / "evaluate.json")
    (tmp_path / "evaluate.json").write_text('{"schema": 99}')
    with pytest.raises(WrongInput, match=r"schema 99, newer.*upgrade"):
        read_report(tmp_path / "evaluate.json")


def test_a_number_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="loss/loss is nan"):
        write_report(
            tmp_path / "evaluate.json",
            report(loss__loss=Metric(float("nan"), 0, 0, "lower", 1, "s")),
        )
    assert not (tmp_path / "evaluate.json").exists()
