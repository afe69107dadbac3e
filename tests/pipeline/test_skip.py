"""What a step reads from a bucket: an object that was overwritten is something else. With the
client of the real storage, against the tests' own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gcs
from tests.lazy import require
from tests.patience import PATIENCE_S

require("gcsfs", reason="gcsfs is not installed")

# The client reads its environment when it is imported, and remembers what it listed: so each look
# is a process of its own, as each command is.
SCRIPT = """
import json, sys
from ingot.config.load import load_recipe
from ingot.pipeline.incremental import step_inputs
from ingot.pipeline.steps import step_named

recipe = load_recipe((), ("name=r", "data.train=[{source: a.jsonl}]", f"evaluate.tasks=[{{kind: choice, source: '{sys.argv[1]}'}}]"), environ={}, dotenv=None)
print(json.dumps(step_inputs(step_named("evaluate"), recipe, {})))
"""


def look(source: str, root: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FSSPEC_GS": '{"token": "anon"}', "PYTHONPATH": str(Path.cwd())}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, source],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


@pytest.mark.drawn("what a bucket changes")
def test_items_in_a_bucket_that_changed_are_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gcs.serving(monkeypatch) as server:
        server.write("sets/items.jsonl", b'{"question": "a"}', {}, {})
        found = []
        for data in (None, b'{"question": "b"}'):  # of the same length
            if data is not None:
                server.write("sets/items.jsonl", data, {}, {})
            for source in ("gs://bucket/sets/items.jsonl", "gs://bucket/sets/*.jsonl"):
                done = look(source, tmp_path)
                assert done.returncode == 0, done.stderr
                found.append(json.loads(done.stdout))
    assert [list(reads["folders"]) for reads in found[:2]] == [
        ["gs://bucket/sets/items.jsonl"],
        ["gs://bucket/sets/*.jsonl"],
    ]
    assert found[0]["knobs"] == found[2]["knobs"]
    assert found[0]["folders"] != found[2]["folders"]
    assert found[1]["folders"] != found[3]["folders"]


@pytest.mark.drawn("what a bucket changes")
def test_a_bucket_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gcs.serving(monkeypatch) as server:
        server.fault("list", 20, code=403, message="not yours")
        server.fault("stat", 20, code=403, message="not yours")
        done = look("gs://bucket/sets/items.jsonl", tmp_path)
    assert (
        "ingot.base.errors.Failed: gs://bucket/sets/items.jsonl cannot be reached (" in done.stderr
    )
    assert done.stderr.splitlines()[-1].endswith("check the network and your credentials")
