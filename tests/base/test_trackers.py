"""MLflow and Trackio keep what a training logs, by their own libraries in local files: each value
once, in one run, also where a restart logs steps again. They have an environment of their own
(`make trackers`), since they want older shared packages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ingot.base.runlog import Resumed
from ingot.base.trackers import MLflow

WRITE = """
import json, sys
from ingot.base.runlog import Resumed
from ingot.base.trackers import MLflow, Trackio
kind, place, run_id, first, steps, owed, fails = json.loads(sys.argv[1])
resumed = Resumed(first, tuple(owed))
recipe = {"train": {"lr": 0.5, "schedule": {"kind": "wsd"}}, "data": {}}
def sink():
    if kind == "mlflow":
        return MLflow(f"file:{place}", "texts", "a name", run_id, recipe, {"team": "b"}, resumed)
    return Trackio("texts", "a-name", run_id, recipe, {"group": "b", "space_id": None}, resumed)
made = sink()
try:
    for step in steps:
        made.write(step, {"train/loss": 10.0 / step, "train/rate@1": 1.0})
        if step % 2 == 0:
            made.write(step, {"evaluate/loss": 5.0 / step, "samples/text": "so it says"})
    if fails:
        raise ValueError("a crash")
except ValueError:
    made.close()
else:
    made.close()
"""
READ = {
    "mlflow": """
import json, sys
from pathlib import Path
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=f"file:{sys.argv[1]}")
(experiment,) = [e for e in client.search_experiments() if e.name == "texts"]
told = []
for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]):
    keys = sorted(run.data.metrics)
    values = {key: sorted([m.step, m.value] for m in client.get_metric_history(run.info.run_id, key)) for key in keys}
    folder = Path(run.info.artifact_uri.removeprefix("file:"))
    texts = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.txt"))
    told.append([run.info.run_name, run.data.tags["team"], run.info.status, run.data.params, values, texts])
print(json.dumps(told))
""",
    "trackio": """
import json
from trackio.sqlite_storage import SQLiteStorage
told = []
for run in SQLiteStorage.get_run_records("texts"):
    values = {}
    for line in SQLiteStorage.get_logs("texts", run["name"], run_id=run["id"]):
        for key, value in line.items():
            if key not in ("step", "timestamp"):
                values.setdefault(key, []).append([line["step"], value])
    config = SQLiteStorage.get_run_config("texts", run["name"], run_id=run["id"])
    told.append([run["name"], config["_Group"], None, config["train"], values, []])
print(json.dumps(told))
""",
}


def ran(kind: str, script: str, folder: Path, *arguments: str) -> str:
    python = os.environ.get("TRACKERS_PYTHON") or sys.executable
    if python == sys.executable and importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed here; `make trackers` runs this")
    result = subprocess.run(
        [python, "-c", script, *arguments],
        env={
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "TRACKIO_DIR": str(folder),
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "HOME": str(folder),
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["mlflow", "trackio"])
def test_a_restart_goes_on_in_the_same_run(kind: str, tmp_path: Path) -> None:
    """Killed behind step 4 with a checkpoint of step 2 that owes its evaluation; another training
    of the same name is another run.
    """

    place = str(tmp_path / "store")

    def write(run_id: str, first: int, steps: list[int], *owed: str, fails: bool = False) -> None:
        told = json.dumps([kind, place, run_id, first, steps, owed, fails])
        ran(kind, WRITE, tmp_path, told)

    write("run-id-one", 0, [1, 2, 3, 4], fails=True)
    (first,) = json.loads(ran(kind, READ[kind], tmp_path, place).splitlines()[-1])
    write("run-id-one", 2, [3, 4, 5, 6])
    write("run-id-two", 0, [1])
    told: list[Any] = json.loads(ran(kind, READ[kind], tmp_path, place).splitlines()[-1])
    assert len(told) == 2
    one, two = sorted(told, key=lambda run: -len(run[4]["train/loss"]))
    name, group, status, params, values, texts = one
    assert group == "b"
    assert values["train/loss"] == [[step, 10.0 / step] for step in range(1, 7)]
    assert values["evaluate/loss"] == [[step, 5.0 / step] for step in (2, 4, 6)]
    assert two[4]["train/loss"] == [[1, 10.0]]
    if kind == "mlflow":
        assert (name, two[0], first[2], status) == ("a name", "a name", "FAILED", "FINISHED")
        assert params == {"train.lr": "0.5", "train.schedule.kind": "wsd", "data": "{}"}
        assert [key for key in values if "rate" in key] == ["train/rate_1"]
        assert texts == [f"samples/text/{step}.txt" for step in (2, 4, 6)]
    else:
        assert name.startswith("a-name-")
        assert name != two[0]
        assert params == {"lr": 0.5, "schedule": {"kind": "wsd"}}
        assert len(values["samples/text"]) == 3


def test_what_a_restart_says_again() -> None:
    values = {"train/loss": 1.0, "evaluate/loss": 2.0}
    resumed = Resumed(4, ("evaluate",))
    assert resumed.unsaid(4, values, None) == values
    assert resumed.unsaid(7, values, 6) == values
    assert resumed.unsaid(4, values, 6) == {"evaluate/loss": 2.0}
    assert resumed.unsaid(5, values, 6) == {}
    assert Resumed(4).unsaid(4, values, 4) == {}


def test_histories_of_single_ranks_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other they would hold up a resume by minutes, and tell what the loss does."""
    client = mock.MagicMock()
    ranks = {f"memory/rank{rank}_gb": 1.0 for rank in range(64)}
    metrics = {"train/loss": 2.0, "validation/loss": 2.0, **ranks}
    client.search_runs.return_value = [mock.Mock(data=mock.Mock(metrics=metrics))]
    client.get_metric_history.return_value = [mock.Mock(step=4)]
    monkeypatch.setitem(sys.modules, "mlflow", mock.MagicMock())
    monkeypatch.setitem(sys.modules, "mlflow.entities", mock.MagicMock())
    monkeypatch.setitem(
        sys.modules, "mlflow.tracking", mock.Mock(MlflowClient=lambda tracking_uri: client)
    )
    sink = MLflow(None, "texts", "a name", "run-id", {}, {}, Resumed(4))
    asked = [call.args[1] for call in client.get_metric_history.call_args_list]
    assert asked == ["train/loss", "validation/loss"]
    sink.write(4, {"train/loss": 2.0})
    client.log_batch.assert_not_called()
