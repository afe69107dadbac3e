"""What a training imports before its first step: torch's compiler is 1.5 s of CPU, and nobody asked
for it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ingot.config.load import dump_recipe
from tests.small import prepared, small_recipe


@pytest.mark.drawn("a start in an interpreter of its own")
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_a_training_without_compile_imports_no_compiler(tmp_path: Path, optimizer: str) -> None:
    knobs = {"train__optimizer__kind": optimizer, "precision__compute": "bf16", "train__steps": 2}
    recipe = small_recipe(prepared(tmp_path), **knobs)
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ingot", "train", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert {"torch", "ingot.train.trainer"} <= imported
    assert not {"torch._dynamo", "torch._inductor"} & imported
