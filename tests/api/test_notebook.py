"""The notebook under examples/: its code cells in order, in one interpreter and an empty folder. By
nbclient with a real kernel where both are installed, else as plain Python.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import clean_environment
from tests.cli.test_wheel import SHORT

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"
BY_KERNEL = """\
import sys, nbformat
from nbclient import NotebookClient
NotebookClient(nbformat.read(sys.argv[1], 4), timeout=300).execute()
"""
BY_HAND = """\
import json, sys
space = {}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile(cell["source"], cell["id"], "exec"), space)
"""


def test_every_code_cell_compiles_and_nothing_of_a_run_is_kept_in_it() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    for cell in [cell for cell in cells if cell["cell_type"] == "code"]:
        compile(cell["source"], cell["id"], "exec")
        assert cell["outputs"] == []


@pytest.mark.drawn("a proof as the README has it")
def test_it_runs_from_an_empty_folder(tmp_path: Path) -> None:
    kernel = all(importlib.util.find_spec(name) for name in ("nbclient", "ipykernel"))
    done = subprocess.run(
        [sys.executable, "-c", BY_KERNEL if kernel else BY_HAND, str(NOTEBOOK)],
        cwd=tmp_path,
        env=clean_environment(**SHORT),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/quickstart/model/config.json").is_file()
