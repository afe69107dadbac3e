"""The process of one row: `python -m benchmarks.gpu.one_row --device cuda`. It reads which, and the
file for what it finds, from a line of JSON, and has imported by then what most rows need.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.gpu.rows import Row, named

if TYPE_CHECKING:
    from benchmarks.gpu.record import Asked, Record

MEASURED, FAILED, MEMORY, REFUSED = "measured", "failed", "out of memory", "not run"
IMPORTED = ("torch._inductor.compile_fx", "ingot.verify.bench_row", "benchmarks.gpu.training")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.one_row")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    for name in IMPORTED:
        importlib.import_module(name)
    given = json.loads(sys.stdin.readline())
    row, into = named(given["row"]), Path(given["into"])
    # Read when something is first compiled, and when the device is first asked for.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = given["cache"]
    if row.beside or asked.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if row.beside:
        os.nice(10)
    import torch

    from benchmarks.gpu.record import Asked, Record, Refused, is_out_of_memory, reason_of

    device = torch.device(asked.device if asked.device == "cpu" else "cuda:0")
    record = Record(into)
    status, reason = MEASURED, ""
    try:
        perform(row, Asked(device, asked.tiny, 2 if asked.tiny else 10), record)
    except Refused as refused:
        status, reason = REFUSED, str(refused)
    except Exception as error:
        status, reason = (MEMORY if is_out_of_memory(error) else FAILED), reason_of(error)
        if status == FAILED:
            import traceback

            traceback.print_exc()
    with into.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"status": status, "reason": reason}) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries must not hold the end up: what counts is written.
    os._exit(0)


def perform(row: Row, asked: Asked, record: Record) -> None:
    """Do a row in this process."""
    import torch

    from ingot.models import device

    program = importlib.import_module(f"benchmarks.gpu.{row.program}")
    compiler: Any = torch.compile
    if asked.tiny and not asked.cuda:
        # Graphs as on a GPU, and no code: it would be another device's, and take minutes.
        compiler = functools.partial(torch.compile, backend="aot_eager")
    with (
        mock.patch.object(torch, "compile", compiler),
        mock.patch.dict(device.PEAK_SIZE, {"cpu": 64} if asked.tiny else {}),
    ):
        program.run(asked, record, **row.knobs)


if __name__ == "__main__":
    main()
