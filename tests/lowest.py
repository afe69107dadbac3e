"""The lowest versions that pyproject.toml allows, exactly: `python -m tests.lowest` prints what `pip
install -r` takes. `make lowest` makes an environment of them and runs `TESTS` there.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("float8", "track")
TOOLS = ("peft", "accelerate", "hypothesis", "filelock", "pytest", "pytest-timeout", "pytest-xdist")
"""Of the extra `dev`, what these tests need."""
TESTS = (
    "tests/models",
    "tests/train/test_step.py",
    "tests/train/test_run.py",
    "tests/train/test_resume.py",
    "tests/train/test_precision.py",
    "tests/train/rollout",
    "tests/parallel/test_compiled.py",
    "tests/parallel/test_float8.py",
    "tests/parallel/test_old_torch.py",
    "tests/parallel/test_offload.py",
    "tests/parallel/test_recompute.py",
    "tests/parallel/test_weights.py",
    "tests/serve/native",
    "tests/verify/test_export.py",
    "tests/verify/test_resume.py",
    "tests/checkpoints",
    "tests/data/batches",
    "tests/plan/tracing",
    "tests/benchmarks/test_gpu.py",
    "tests/benchmarks/test_gpu_whole.py",
    # Tables and wheels are those of the versions in constraints.txt.
    "--deselect=tests/models/hf/test_types.py::test_the_tables_are_those_of_the_installed_transformers",
    "--deselect=tests/benchmarks/test_gpu.py::test_the_wheels_and_what_is_there_are_all_that_is_needed",
)
"""Families, a training step, rollouts, adapters, serving, export, plans, the program for a GPU."""


def requirements(torch: str | None = None) -> list[str]:
    """`NAME==LOWEST` of all that is needed; `torch`: another version of it."""
    with PYPROJECT.open("rb") as stream:
        project = tomllib.load(stream)["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(one for extra in EXTRAS for one in extras[extra])]
    asked += [one for one in extras["dev"] if re.split("[<>=]", one)[0] in TOOLS]
    found = [f"{name}=={lowest}" for name, _, lowest in (one.partition(">=") for one in asked)]
    if torch is not None:
        found = [f"torch=={torch}" if one.startswith("torch==") else one for one in found]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lowest", description=__doc__)
    parser.add_argument("--torch", metavar="VERSION", help="another version of torch")
    parser.add_argument("--tests", action="store_true", help="print the tests instead")
    asked = parser.parse_args()
    print("\n".join(TESTS if asked.tests else requirements(asked.torch or None)))


if __name__ == "__main__":
    main()
