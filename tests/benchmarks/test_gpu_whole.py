"""The program for a GPU in miniature on the CPU: killed once, and gone on with. Its rows are processes
as on a GPU, but forked from one that has imported what they need (tests/forkedmain.py). A commit
draws some of them, `make test-all` runs all.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import memory, results, training
from benchmarks.gpu.one_row import perform
from benchmarks.gpu.record import Asked, Record
from benchmarks.gpu.rows import PLANNED, ROWS, Row, in_miniature, named
from tests import forkedmain
from tests.exhaustive import EXHAUSTIVE
from tests.forks import start_call

IMPORTED = (
    *(f"benchmarks.gpu.{row.program}" for row in ROWS),
    "benchmarks.contenders.trainer",
    "ingot.__main__",
    "ingot.plan.tracing.trace",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torchao.float8",
    *(f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "t5", "bert")),
)
MINUTES, KILLED_AFTER, DRAWN = 9, 2, 4


def tried() -> list[Row]:
    rows = in_miniature()
    if EXHAUSTIVE:
        return rows
    drawn = random.Random(f"{os.environ['TEST_DRAW']} gpu").sample(range(len(rows)), DRAWN)
    return [rows[place] for place in sorted(drawn)]


def killed_and_gone_on_with(folder: str) -> bytes:
    """The program, killed after so many rows, and again, to its end: what it then showed and
    answered, and CPU seconds of all.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    tempfile.tempdir = folder
    into = Path(folder) / "gpu.jsonl"
    options = ["--device", "cpu", "--tiny", "--minutes", str(MINUTES), "--results", str(into)]
    sys.argv = ["gpu", *options]
    # Files that are changed while it runs would be another program's rows.
    with (
        mock.patch.object(results, "source_id", return_value="this"),
        mock.patch.object(program, "in_miniature", tried),
        contextlib.redirect_stdout(io.StringIO()) as shown,
    ):
        if (first := os.fork()) == 0:
            forkedmain.run(program.main)
        while os.waitpid(first, os.WNOHANG) == (0, 0):
            if into.exists() and len(done(into)) >= KILLED_AFTER:
                os.kill(first, signal.SIGKILL)
                os.waitpid(first, 0)
                break
            time.sleep(0.05)
        before = len(done(into))
        code = program.main()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(one.ru_utime + one.ru_stime for one in used)
    told = {"code": code, "before": before, "shown": shown.getvalue(), "cpu_s": seconds}
    return json.dumps(told).encode()


def done(into: Path) -> list[dict[str, Any]]:
    return [line for line in results.read(into) if "row" in line]


def test_the_whole_program_in_miniature(tmp_path: Path) -> None:
    began = time.monotonic()
    started = start_call(
        killed_and_gone_on_with,
        str(tmp_path),
        environment={"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
    )
    assert started.wait(60 * MINUTES) == 0
    told = json.loads(started.result())
    assert time.monotonic() - began < 60 * MINUTES
    lines = done(tmp_path / "gpu.jsonl")
    for line in lines:
        print(f"{line['seconds']:6.1f} s  {line['row']}: {line['status']}, {line['reason']}")
    print(f"{told['cpu_s']:.0f} CPU s\n{told['shown']}")
    assert told["code"] == 0
    # Each once, though the first call was killed.
    expected = {row.name: row for row in tried()}
    assert sorted(line["row"] for line in lines) == sorted(expected)
    assert KILLED_AFTER <= told["before"] < len(lines)
    assert {line["status"] for line in lines} == {"measured"}
    for name in expected:
        assert name.removeprefix("plan: ") in told["shown"]
    known = {line["row"]: line for line in lines}
    for line in lines:
        assert line["checks"] or line["figures"]
        for check in line["checks"]:
            assert check["holds"] or check["detail"].startswith("not run: "), (line["row"], check)
    assert_parts(known)


def assert_parts(known: dict[str, dict[str, Any]]) -> None:
    """That a row has all of its parts, and numbers where a GPU's would be."""
    for name, line in known.items():
        figures = line["figures"]
        held = {check["check"] for check in line["checks"] if check["holds"]}
        if name == "training beside the CPU":
            for what in training.BESIDE_CPU:
                assert f"{what} beside the CPU: losses" in held
        if name == "training, bits":
            for what in training.SAME_BITS:
                assert {f"float32, {what}: bits", f"bf16, {what}: bits"} <= held
        if name == "memory":
            assert figures.keys() == memory.WAYS.keys()
        if named(name).program in ("steps", "trainer"):
            assert figures["tokens_per_s"] > 0
            assert figures["allocated_bytes"] > 0
        elif named(name).kind == PLANNED:
            assert figures["allocated_bytes"] > 0
            assert figures["step_s"]["likely"] > 0


def shape(row: Row) -> tuple[Any, ...]:
    """What a row does, without its numbers."""
    numbers = {"micro_batch", "layers"}
    rest = sorted((name, value) for name, value in row.knobs.items() if name not in numbers)
    return row.program, "layers" in row.knobs, *rest


def test_every_row_has_one_in_miniature() -> None:
    assert {shape(row) for row in ROWS} == {shape(row) for row in in_miniature()}
    programs = {
        module.name
        for module in pkgutil.iter_modules(gpu.__path__, "benchmarks.gpu.")
        if hasattr(importlib.import_module(module.name), "run")
        and "record" in importlib.import_module(module.name).run.__annotations__
    }
    assert programs == {f"benchmarks.gpu.{row.program}" for row in ROWS}


@pytest.mark.slow
def test_every_family_by_itself() -> None:
    """The row of a GPU, which has all of them."""
    record = Record()
    perform(named("families"), Asked(torch.device("cpu"), tiny=False), record)
    assert record.lines
    assert all(line["holds"] for line in record.lines)
