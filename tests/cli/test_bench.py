"""`ingot bench` as a person runs it: real processes, a table, figures and a plot, and one line
where nothing can be measured.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.config.load import dump_recipe
from tests.cli.commands import clean_environment, ingot
from tests.small import small_recipe


def recipe_file(root: Path) -> str:
    path = root / "small.yaml"
    path.write_text(dump_recipe(small_recipe(root)), encoding="utf-8")
    return str(path)


@pytest.mark.drawn("bench")
def test_rows_on_prepared_data_with_one_process_two_and_too_many(root: Path) -> None:
    done = ingot(
        "bench",
        recipe_file(root),
        "--devices",
        "1,2,3",
        "--micro-batch",
        "2",
        "--steps",
        "1",
        timeout_s=400,
        OMP_NUM_THREADS="1",
        COLUMNS="200",
    )
    assert done.returncode == 0, done.stderr
    run = root / "runs/small"
    assert {path.name for path in run.iterdir()} == {"data", "reports"}
    assert {path.name for path in (run / "reports").iterdir()} == {"bench.json", "bench.html"}
    report = json.loads((run / "reports/bench.json").read_text())
    assert [(row["devices"], row["status"]) for row in report["rows"]] == [
        (1, "measured"),
        (2, "measured"),
        (3, "refused"),
    ]
    assert report["rows"][1]["tokens_per_step"] == 4 * 32
    assert "train.global_batch 4 does not divide over 3 processes; 2 would fit" in done.stdout
    assert f"fastest: {report['best']['told']}" in done.stdout
    assert all(knob in done.stdout for knob in report["best"]["knobs"])
    assert "bench: 2 rows to measure" in done.stderr
    assert "tokens a second" in (run / "reports/bench.html").read_text()


@pytest.mark.slow
def test_memory_that_runs_out_is_a_row_of_each_number_of_processes_and_nothing_measured_is_a_failure(
    tmp_path: Path,
) -> None:
    """Without data, for --synthetic; under a limit of the shell, which the processes keep: 64 GB of
    embedding are too much for 4.
    """
    options = [
        "tokenizer.vocab_size=500000000",
        "--synthetic",
        "--devices",
        "1,2",
        "--micro-batch",
        "1,2",
        "--steps",
        "1",
        "--json",
    ]
    command = shlex.join([sys.executable, "-m", "ingot", "bench", recipe_file(tmp_path), *options])
    done = subprocess.run(
        ["sh", "-c", f"ulimit -d 4000000; {command}"],
        env=clean_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["devices"], row["micro_batch"], row["status"]) for row in rows] == [
        (count, size, "out of memory") for count in (1, 2) for size in (1, 2)
    ]
    assert [
        row["reason"].startswith("DefaultCPUAllocator: can't allocate memory") for row in rows
    ] == [True, False, True, False]
    assert rows[1]["reason"] == "not tried: 1 rows at once ran out already"


def test_without_data_it_says_what_to_do(tmp_path: Path) -> None:
    done = ingot("bench", recipe_file(tmp_path))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert (
        "holds no prepared data; run `ingot prepare` with this recipe first; or measure on made-up"
        " rows with --synthetic" in line
    )


def test_a_list_that_is_none_is_refused(tmp_path: Path) -> None:
    done = ingot("bench", recipe_file(tmp_path), "--micro-batch", "1;2")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "--micro-batch 1;2: `1;2` is no positive whole number" in done.stderr
