"""The check before the first step looks into data sets and tokenizers of the hub, by the real client
against a hub of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.data.sources.hub_server import Server
from tests.lazy import require

require("datasets", reason="datasets is not installed")

# The client takes the hub's address when it is imported.
SCRIPT = """
import json, sys
from ingot.cli.check import sources as check_sources
from ingot.cli.check.recipe import findings, read_checked
check_sources.LOOK_S = 100.0
found = findings(*read_checked(["recipe.yaml"], "run"), ("ingest",))
print(json.dumps([found.wrong, found.unknown]))
print(json.dumps(["torch" in sys.modules, "datasets" in sys.modules]))
"""


def test_the_first_records_of_a_data_set_are_looked_at(tmp_path: Path) -> None:
    rows = json.dumps({"text": "one"}) + "\n"
    server = Server("org/set", {"train.jsonl": rows.encode()})
    (tmp_path / "recipe.yaml").write_text(
        "name: a\ndata:\n  train:\n    - {source: 'hf:org/set', text: body}\n"
        "    - {source: 'hf:org/none'}\n"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.address,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            check=False,
            timeout=200,
        )
    finally:
        server.server_close()
    assert done.returncode == 0, done.stderr
    (wrong, unknown), imported = (json.loads(line) for line in done.stdout.splitlines())
    assert unknown == []
    nothing, column = sorted(wrong, key=lambda line: "org/set" in line)
    assert nothing.startswith("recipe.yaml:5: data.train.1.source hf:org/none is no data set")
    assert column.startswith("recipe.yaml:4: hf:org/set has no column `body`; it has text")
    assert imported == [False, False], "what is heavy is imported by the process that looks"
