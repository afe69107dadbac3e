"""How long a person waits for a command that does little work: CPU seconds of `ingot --help`,
`ingot submit --dry-run`, `ingot show run` and a training of one step with its export, beside the
imports that they cannot do without.

`python -m benchmarks.startup`. Asked: 0.15 s, 3 s, 0.4 s and 2 s. The least of several rounds,
which take turns; a busy machine stretches CPU seconds, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

INGOT = (sys.executable, "-m", "ingot")
PYTHON = (sys.executable, "-c")
RECIPE = "recipes/quickstart.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        knobs = small_run(Path(root))
        commands = commands_of(Path(root), knobs)
        found: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(asked.rounds):
            for name, command in commands.items():
                found[name].append(_cpu_seconds(command))
    for name, seconds in found.items():
        print(f"{name:<40}{min(seconds):6.2f} s")


def small_run(root: Path) -> list[str]:
    """The quick start's recipe on a little text and with few weights, trained once; returns its
    knobs.
    """
    (root / "text").mkdir()
    for number in range(100):
        (root / "text" / f"{number}.txt").write_text(f"{number} melts slowly\n" * 50)
    knobs = [
        f"output={root / 'runs'}",
        f"data.train=[{{source: {root / 'text'}}}]",
        "data.validation={fraction: 0.1}",
        "tokenizer.vocab_size=300",
        "data.seq_len=64",
        "data.clean={}",
        "train.steps=1",
        "train.evaluate_every=null",
        "model.config={hidden_size: 32, num_hidden_layers: 2}",
    ]
    for verb in ("ingest", "prepare", "train"):
        subprocess.run([*INGOT, verb, RECIPE, *knobs], check=True, capture_output=True)
    return knobs


def commands_of(root: Path, knobs: Sequence[str]) -> Mapping[str, Sequence[str]]:
    place = ("recipes/places/vertex.yaml", "launch.processes=1")
    submit = (*INGOT, "submit", RECIPE, *place, "--dry-run")
    return {
        "import typer.rich_utils": (*PYTHON, "import typer.rich_utils"),
        "ingot --help": (*INGOT, "--help"),
        "import pydantic": (*PYTHON, "import pydantic"),
        "ingot show run": (*INGOT, "show", "run", str(root / "runs" / "quickstart")),
        "ingot submit --dry-run": submit,
        "import torch": (*PYTHON, "import torch"),
        "import ingot.train.trainer": (*PYTHON, "import ingot.train.trainer"),
        "ingot train --fresh, one step, export": (*INGOT, "train", RECIPE, *knobs, "--fresh"),
    }


def _cpu_seconds(command: Sequence[str]) -> float:
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


if __name__ == "__main__":
    main()
