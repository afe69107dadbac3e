from __future__ import annotations

import json
import math
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest

from ingot.base.runlog import FailSafeSink, JsonLines, Resumed, TensorBoard, read_lines
from tests.lazy import lazy
from tests.patience import PATIENCE_S

EventAccumulator = lazy(
    "tensorboard.backend.event_processing.event_accumulator", "EventAccumulator"
)
PluginEventAccumulator = lazy(
    "tensorboard.backend.event_processing.plugin_event_accumulator", "EventAccumulator"
)


def test_json_lines_hold_every_value_and_no_nan(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write(1, {"train/loss": 2.5, "note": "text", "bad": math.nan, "worse": math.inf})
    sink.close()
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert {key: value for key, value in line.items() if key != "t_wall"} == {
        "step": 1,
        "train/loss": 2.5,
        "note": "text",
        "bad": None,
        "worse": None,
    }


def test_a_resumed_run_shows_no_step_twice_in_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path)
    for step in range(1, 8):
        first.write(step, {"train/loss": float(step)})
    with path.open("ab") as stream:
        stream.write(b'{"step": 8, "tr')  # killed while writing
    resumed = JsonLines(path, Resumed(4))
    for step in (5, 6):
        resumed.write(step, {"train/loss": -float(step)})
    assert [(line["step"], line["train/loss"]) for line in read_lines(path)] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, -5),
        (6, -6),
    ]


def test_what_is_owed_is_that_of_the_last_step_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path)
    for step in (2, 4):
        first.write(step, {"train/loss": 1.0})
        first.write(step, {"validation/loss": 2.0})
    JsonLines(path, Resumed(4, ("validation",)))
    kept = [(line["step"], "validation/loss" in line) for line in read_lines(path)]
    assert kept == [(2, False), (2, True), (4, False)]


def test_a_resume_holds_no_file_of_metrics_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = "x" * 1000
    path.write_text("".join(f'{{"step": {n}, "text": "{text}"}}\n' for n in range(3000)))
    tracemalloc.start()
    JsonLines(path, Resumed(2900))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300_000
    assert [line["step"] for line in read_lines(path)] == list(range(2901))


def test_json_lines_without_a_step_do_not_stop_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"other": 1}\n{"step": 9}\n')
    JsonLines(path, Resumed(3))
    assert list(read_lines(path)) == [{"other": 1}]


def test_tensorboard_reads_back_what_was_written_and_forgets_what_was_beyond_the_checkpoint(
    tmp_path: Path,
) -> None:
    first = TensorBoard(tmp_path)
    for step in range(1, 8):
        first.write(step, {"train/loss": float(step)})
    first.write(2, {"samples/0": "once **upon** a time"})
    first.close()
    resumed = TensorBoard(tmp_path, Resumed(4))
    for step in (5, 6):
        resumed.write(step, {"train/loss": -float(step)})
    resumed.close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("train/loss")] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, -5),
        (6, -6),
    ]
    seen = PluginEventAccumulator(str(tmp_path))  # what TensorBoard itself reads with
    seen.Reload()
    assert [event.step for event in seen.Tensors("train/loss")] == [1, 2, 3, 4, 5, 6]
    (text,) = reader.Tensors("samples/0")
    assert text.tensor_proto.string_val[0] == b"once **upon** a time"
    assert reader.SummaryMetadata("samples/0").plugin_data.plugin_name == "text"


def test_a_training_that_begins_shows_nothing_of_one_that_came_to_no_checkpoint(
    tmp_path: Path,
) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("the user's")
    first = TensorBoard(tmp_path)
    for step in range(1, 8):
        first.write(step, {"train/loss": float(step), "eval/loss": float(step)})
    first.close()
    second = TensorBoard(tmp_path)
    second.write(1, {"train/loss": -1.0})
    second.close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert reader.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in reader.Scalars("train/loss")] == [(1, -1)]
    assert other.exists()


WANDB = """
import sys
from pathlib import Path
from ingot.base.runlog import WeightsAndBiases
sink = WeightsAndBiases(Path(sys.argv[1]), "project", "name", "run-id-1", {"lr": 0.5}, {"entity": "team", "tags": ["a", "b"]})
for step in range(1, 4):
    sink.write(step, {"train/loss": 10.0 / step})
sink.close()
"""

WANDB_READ = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2
data, place, whole = Path(sys.argv[1]).read_bytes(), 7, b""  # LevelDB's log format after a header of 7 bytes
while place + 7 <= len(data):
    if 32768 - place % 32768 < 7:
        place += 32768 - place % 32768
        continue
    length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
    whole += data[place + 7 : place + 7 + length]
    place += 7 + length
    if kind not in (1, 4):  # only a whole record, or the last part of one, ends here
        continue
    record, whole = wandb_internal_pb2.Record.FromString(whole), b""
    if record.WhichOneof("record_type") == "history":
        print(json.dumps({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}))
    if record.WhichOneof("record_type") == "run":
        print(json.dumps({"run": record.run.run_id, "project": record.run.project, "name": record.run.display_name, "place": [record.run.entity, *record.run.tags]}))
"""


@pytest.mark.drawn("wandb itself")
def test_wandb_offline_keeps_every_value(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (ingot[track])")
    environment = {"WANDB_MODE": "offline", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    subprocess.run(
        [sys.executable, "-c", WANDB, str(tmp_path / "logs")],
        check=True,
        env=environment,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    (stored,) = (tmp_path / "logs").glob("wandb/offline-run-*/run-run-id-1.wandb")
    read = subprocess.run(
        [sys.executable, "-c", WANDB_READ, str(stored)],
        check=True,
        env=environment,
        capture_output=True,
        timeout=PATIENCE_S,
        text=True,
    )
    lines = [json.loads(line) for line in read.stdout.splitlines()]
    place = ["team", "a", "b"]
    assert {"run": "run-id-1", "project": "project", "name": "name", "place": place} in lines
    assert [(line["_step"], line["train/loss"]) for line in lines if "train/loss" in line] == [
        (1, 10.0),
        (2, 5.0),
        (3, 10.0 / 3),
    ]


class Failing:
    """A sink that fails from its third line on."""

    def __init__(self) -> None:
        self.lines = 0

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        self.lines += 1
        if self.lines >= 3:
            raise ConnectionError("no route")

    def close(self) -> None:
        raise ConnectionError("closed")


def test_a_sink_that_fails_warns_once_and_is_then_left_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = Failing()
    sink = FailSafeSink("tracker", lambda: made)
    for step in range(6):
        sink.write(step, {})
    sink.close()
    assert made.lines == 3
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == [
        "warning: tracker failed (ConnectionError: no route); training goes on without it"
    ]


def test_a_sink_that_cannot_be_made_warns_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    sink = FailSafeSink("TensorBoard", lambda: TensorBoard(tmp_path / "file" / "tensorboard"))
    sink.write(1, {"a": 1.0})
    sink.close()
    assert len(capsys.readouterr().err.splitlines()) == 1
