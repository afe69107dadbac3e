"""All benchmarks in one call, on this machine. `make bench`.

Figures of one run belong together and are compared as ratios; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import data, loader, spine
from benchmarks.comparison import Comparison, machine, show
from benchmarks.turns import take_turns
from ingot.base.environment import usable_cores

RESULTS = Path(__file__).parent / "results"
KNOWN: dict[str, Callable[[bool, Path], Comparison]] = {
    **spine.COMPARISONS,
    **data.COMPARISONS,
    **loader.COMPARISONS,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(KNOWN)}; all by default"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="turns of each contender; medians are shown"
    )
    parser.add_argument(
        "--threads", type=int, default=usable_cores(), help="threads of each contender"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes: shows that everything runs, measures nothing",
    )
    parser.add_argument("--write", metavar="NAME", help="keep the figures as results/NAME.json")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(KNOWN):
        parser.error(f"{', '.join(sorted(unknown))} is not one of {', '.join(KNOWN)}")
    console = Console(highlight=False, width=110)
    about = machine(asked.threads)
    console.print(", ".join(f"{key} {value}" for key, value in about.items()))
    kept: list[dict[str, Any]] = []
    for name in asked.names or KNOWN:
        with tempfile.TemporaryDirectory() as root:
            comparison = KNOWN[name](asked.quick, Path(root))
            results = take_turns(comparison.contenders, asked.rounds, asked.threads)
            ratios = show(comparison, results, console)
            kept.append(
                {
                    "title": comparison.title,
                    "unit": comparison.unit,
                    "results": [asdict(result) for result in results],
                    "ratios": ratios,
                }
            )
        if asked.write:
            RESULTS.mkdir(exist_ok=True)
            path = RESULTS / f"{asked.write}.json"
            path.write_text(
                json.dumps({"machine": about, "comparisons": kept}, indent=1) + "\n",
                encoding="utf-8",
            )
    if asked.write:
        console.print(f"written: {path}")


if __name__ == "__main__":
    main()
