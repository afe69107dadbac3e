"""`python -m benchmarks.gpu --minutes N`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu.packages import missing
from benchmarks.gpu.results import Results, head, kept, nvidia
from benchmarks.gpu.rows import ROWS, in_miniature
from benchmarks.gpu.runner import Runner, in_words
from benchmarks.gpu.table import show
from ingot.base.errors import WrongInput
from ingot.plan.devices.types import device_type


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="What is right, how fast it is and what the plan had said, on one GPU.",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="end within; default 10")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("build/gpu.jsonl"),
        help="rows in this file that were measured at this commit are not measured again; new ones"
        " are appended",
    )
    parser.add_argument(
        "--also",
        nargs="+",
        default=[],
        metavar="COMMIT",
        help="rows of these commits count, too, unless a check failed",
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts of names")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="in miniature: shows that all runs, measures nothing"
    )
    parser.add_argument(
        "--plans",
        metavar="DEVICE",
        help="only make the plans, for a device such as h100; needs no GPU, and another call with"
        " the same --results takes them from there",
    )
    parser.add_argument("--list", action="store_true", help="list the rows and end")
    parser.add_argument(
        "--show", action="store_true", help="show what a file holds, of any machine, and end"
    )
    return parser


def main() -> int:
    asked = arguments().parse_args()
    began, console = time.monotonic(), Console(highlight=False, width=150)
    if lacks := missing():
        raise SystemExit(
            f"this Python lacks {', '.join(lacks)}: install them, or make the folder of wheels with"
            " `make gpu-wheels` where there is a network and put them on PYTHONPATH"
        )
    known = in_miniature() if asked.tiny else ROWS
    rows = [row for row in known if not asked.only or any(part in row.name for part in asked.only)]
    if asked.list:
        for row in rows:
            console.print(f"{row.estimate_s:5.0f} s  {row.kind:8} {row.name}")
        return 0
    if asked.show:
        found = kept(asked.results)
        found.planned = planned_device(asked.plans or found.head["device"]) or "unknown"
        return 1 if show(found, console) else 0
    gpu = nvidia()
    if asked.device == "cuda" and not gpu and not asked.plans:
        raise SystemExit(
            "benchmarks.gpu measures a CUDA GPU, and nvidia-smi names none here; run it on a"
            " machine with one, or `--device cpu --tiny` to see that it runs"
        )
    about: dict[str, Any] = head(asked.device)
    name = asked.plans or gpu.get("device", "h100" if asked.tiny else "cpu")
    planned = planned_device(name)
    if planned is None:
        console.print(f"no plans: `ingot plan` does not know {name}")
        rows = [row for row in rows if not row.beside]
    if asked.plans:
        rows = [row for row in rows if row.beside]
    results = Results(asked.results, about, asked.also, planned or "unknown")
    runner = Runner(
        results,
        asked.device,
        asked.tiny,
        began + 60 * asked.minutes,
        planned or "unknown",
        show=lambda row, line: tell(console, line),
    )
    for why in runner.run(rows):
        console.print(f"not begun: {why}", style="dim")
    return 1 if show(results, console) else 0


def planned_device(name: str) -> str | None:
    """Its name in plans, the same for what CUDA calls it; None where they know none."""
    if name == "cpu":
        return name
    try:
        return device_type(name).name
    except WrongInput:
        return None


def tell(console: Console, line: dict[str, Any]) -> None:
    console.print(in_words(line), markup=False)


if __name__ == "__main__":
    raise SystemExit(main())
