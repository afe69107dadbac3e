from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import pytest

from ingot.base.runlog import JsonLines, Resumed
from ingot.report.metrics import GPU_USE, MEMORY, MetricsFile


def points(metrics: MetricsFile, key: str) -> tuple[list[float], list[float]]:
    steps, values = metrics.points(key)
    return steps.tolist(), values.tolist()


def test_what_was_appended_is_read_and_nothing_twice(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write(1, {"train/loss": 3.0, "samples/0": "once"})
    metrics = MetricsFile(lines.path)
    assert metrics.refresh()
    assert not metrics.refresh()
    lines.write(2, {"train/loss": 2.5, "train/lr": float("nan")})
    with lines.path.open("a") as stream:
        stream.write('{"step": 3, "train/loss"')
    assert metrics.refresh()
    assert points(metrics, "train/loss") == ([1, 2], [3.0, 2.5])
    assert points(metrics, "train/lr") == ([], [])
    with lines.path.open("a") as stream:
        stream.write(": 2.0}\n")
    assert metrics.refresh()
    assert points(metrics, "train/loss") == ([1, 2, 3], [3.0, 2.5, 2.0])
    assert metrics.texts == [(1, "samples/0", "once")]


def test_what_ceased_to_be_finite_is_known_until_it_is_finite_again(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step, loss in enumerate([2.0, math.nan, math.inf, None]):
        lines.write(step, {"gpu/rank0_util": math.nan} if loss is None else {"train/loss": loss})
    metrics = MetricsFile(lines.path)
    metrics.refresh()
    assert points(metrics, "train/loss") == ([0], [2.0])
    assert metrics.lost_at("train/loss") == [1, 2]
    assert set(metrics.lost) == {"train/loss"}, "a device that is not read is no loss"
    lines.write(4, {"train/loss": 1.5})
    metrics.refresh()
    assert metrics.lost_at("train/loss") == []


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in range(1, 11):
        lines.write(step, {"train/loss": float(step)})
    metrics = MetricsFile(path)
    metrics.refresh()
    again = JsonLines(path, Resumed(4))
    for step in range(5, 21):  # longer than it was
        again.write(step, {"train/loss": -float(step)})
    metrics.refresh()
    assert points(metrics, "train/loss")[1] == [
        1.0,
        2.0,
        3.0,
        4.0,
        *(-float(n) for n in range(5, 21)),
    ]
    path.unlink()
    assert metrics.refresh()
    assert len(metrics) == 0


def test_of_a_step_that_is_logged_twice_the_last_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [1, 2, 3, 4, 2, 3]
    path.write_text("".join(f'{{"step": {s}, "a": {n}}}\n' for n, s in enumerate(steps)))
    metrics = MetricsFile(path)
    metrics.refresh()
    assert points(metrics, "a") == ([1, 2, 3, 4], [0, 4, 5, 3])


def test_the_tail_holds_whole_lines_of_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}, "a": {n}}}\n' for n in range(1000)))
    metrics = MetricsFile(path, tail_bytes=100)
    metrics.refresh()
    steps, values = points(metrics, "a")
    assert steps == values
    assert steps[-1] == 999
    assert 3 <= len(steps) < 7
    with path.open("a") as stream:
        stream.write('{"step": 1000, "a": 1}\n')
    metrics.refresh()
    assert points(metrics, "a")[0][-1] == 1000


@pytest.mark.parametrize("torn", ["", '{"step": 1000, "a"'])
def test_a_tail_within_a_long_line_is_lengthened(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = {f"memory/rank{rank}_gb": 1.0 for rank in range(300)}
    path.write_text("".join(json.dumps({"step": n, **line}) + "\n" for n in range(9)) + torn)
    metrics = MetricsFile(path, tail_bytes=100)
    metrics.refresh()
    assert points(metrics, MEMORY)[0] == [8]


@pytest.mark.parametrize("line", ["[]", "{", '{"step": "x"}', '{"step": true, "a": 1}', "7", ""])
def test_other_lines_are_passed_over(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{line}\n{{"step": 1, "a": 2, "b": null, "c": [1]}}\n')
    metrics = MetricsFile(path)
    metrics.refresh()
    assert points(metrics, "a") == ([1], [2])
    assert list(metrics.columns) == ["a"]


def test_ranks_become_one_figure(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    ranks = {"memory/rank0_gb": 2.0, "memory/rank1_gb": 3.0, "gpu/rank0_util": 0.5}
    path.write_text(json.dumps({"step": 1, **ranks, "gpu/rank1_util": 1.0}) + "\n")
    metrics = MetricsFile(path)
    metrics.refresh()
    assert points(metrics, MEMORY) == ([1], [3.0])
    assert points(metrics, GPU_USE) == ([1], [0.75])


def test_a_curve_takes_no_more_than_its_numbers(tmp_path: Path) -> None:
    """A training of a million logged steps draws a page of them, in the memory of its rank 0."""
    count = 20_000
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}, "a": {n}.5}}\n' for n in range(count)))
    metrics = MetricsFile(path)
    metrics.refresh()
    tracemalloc.start()
    try:
        steps, values = metrics.points("a")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (steps[-1], values[-1]) == (count - 1, count - 0.5)
    assert most < 20 * count
