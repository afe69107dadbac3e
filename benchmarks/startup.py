"""How long a person waits for a command that does no work: CPU seconds of `ingot --help` and `ingot
submit --dry-run`, beside Typer's own imports.

`python -m benchmarks.startup`. Asked: 0.3 s and 3 s. The least of several rounds, which take turns;
a busy machine stretches CPU seconds, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

INGOT = (sys.executable, "-m", "ingot")
COMMANDS: dict[str, Sequence[str]] = {
    "import typer.rich_utils": (sys.executable, "-c", "import typer.rich_utils"),
    "ingot --help": (*INGOT, "--help"),
    "ingot submit --dry-run": (
        *INGOT,
        "submit",
        "recipes/quickstart.yaml",
        "recipes/places/vertex.yaml",
        "--dry-run",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(parser.parse_args().rounds):
        for name, command in COMMANDS.items():
            found[name].append(_cpu_seconds(command))
    least = {name: min(seconds) for name, seconds in found.items()}
    for name, seconds in least.items():
        print(
            f"{name:<26}{seconds:6.2f} s{seconds / least['import typer.rich_utils']:8.1f} times"
            " Typer's imports"
        )


def _cpu_seconds(command: Sequence[str]) -> float:
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


if __name__ == "__main__":
    main()
