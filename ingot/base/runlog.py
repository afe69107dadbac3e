"""The logs of a run: `events.jsonl` (start, save, failure, restart), from which goodput is
computed, and metrics, written to `metrics.jsonl` and other sinks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import IO, Any, Protocol

from ingot.base.masking import keys_hidden
from ingot.base.progress import say
from ingot.base.storage import (
    atomic_file,
    disk_errors,
    fsync_folder,
    lock_file,
    make_folder,
    remove_partials_of,
)

MOST_LINES = 1000
"""Lines of a growing file that are held at once, so that a long run's are never all in memory."""


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one JSON line; lines of concurrent writers never interleave.

    A torn last line (from a crash while appending) is terminated first, so that it does not swallow
    this one.
    """
    line = (json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n").encode()
    with disk_errors(path):
        make_folder(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            # Else another writer's line may be seen half-way, and taken for torn.
            lock_file(descriptor, path, wait=True)
            end = os.fstat(descriptor).st_size
            if end and os.pread(descriptor, 1, end - 1) != b"\n":
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        finally:
            os.close(descriptor)


def flush_lines(path: Path) -> None:
    """Make the lines appended so far durable; does nothing if there is no file.

    Appending alone is not durable, since fsync takes milliseconds. Whatever vouches for earlier
    lines (a checkpoint for the metrics of its steps) calls this first.
    """
    with disk_errors(path), contextlib.suppress(FileNotFoundError):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        fsync_folder(path.parent)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects in a file of lines, without torn lines (crashes while appending). Yields
    nothing if there is no file.
    """
    if not path.is_file():
        return
    with path.open("rb") as stream:
        for line in stream:
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


class AppendedLines:
    """What was appended to a file of lines since it was last read, a part at a time. If the last
    line is no longer in its place, a resumed run has written the file anew: then from its
    beginning. `tail_bytes`: begin that far before the end, where only the newest lines are wanted.
    """

    def __init__(self, tail_bytes: int | None = None) -> None:
        self._tail_bytes = tail_bytes
        self._at, self._last = 0, b""

    def next(self, path: Path) -> tuple[list[bytes], bool]:
        """The next complete lines, at most MOST_LINES, the same until `done` is called; and whether
        they are the first of the file. Without a file there are none.
        """
        try:
            stream = path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            self._at, self._last = 0, b""
            return [], True
        with stream:
            stream.seek(self._at - len(self._last))
            if stream.read(len(self._last)) != self._last:
                self._at, self._last = 0, b""
                stream.seek(0)
            begins = not self._last
            if begins and self._tail_bytes is not None:
                self._at = _tail_begin(stream, self._tail_bytes)
                stream.seek(self._at)
            lines = takewhile(lambda line: line.endswith(b"\n"), islice(stream, MOST_LINES))
            return list(lines), begins

    def done(self, lines: Sequence[bytes]) -> None:
        """Go on after these lines."""
        self._at, self._last = self._at + sum(map(len, lines)), lines[-1]


def _tail_begin(stream: IO[bytes], length: int) -> int:
    """Where the first whole line of the last `length` bytes begins. A tail without one, within a
    long line, is doubled until it has one.
    """
    size = os.fstat(stream.fileno()).st_size
    while length < size:
        stream.seek(size - length)
        stream.readline()
        begin = stream.tell()
        if stream.readline().endswith(b"\n"):
            return begin
        length *= 2
    return 0


def record_event(
    path: Path,
    kind: str,
    *,
    attempt: int = 0,
    rank: int = 0,
    step: int | None = None,
    seconds: float | None = None,
    cause: str | None = None,
    **more: Any,
) -> None:
    """Append one event; `seconds` is its duration, `cause` says why it happened."""
    event = {
        "t_wall": time.time(),
        "t_mono": time.monotonic(),
        "attempt": attempt,
        "rank": rank,
        "kind": kind,
        "step": step,
        "seconds": seconds,
        "cause": keys_hidden(cause),
        **more,
    }
    append_line(path, event)


class MetricSink(Protocol):
    """Receives numbers (and texts) of one step; keys are TensorBoard's (`train/loss`)."""

    def write(self, step: int, values: Mapping[str, float | str]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Resumed:
    """Where a training goes on: behind `step`; metrics whose names begin with one of `owed` are
    written again at that very step.
    """

    step: int = 0
    owed: tuple[str, ...] = ()

    def unsaid(
        self, step: int, values: Mapping[str, float | str], last: int | None
    ) -> Mapping[str, float | str]:
        """What of `values` is new to a tracker that has lines up to step `last`, since a killed
        training may have logged more steps than its checkpoint holds.
        """
        if last is None or step > last:
            return values
        again = self.again(step)
        return {name: value for name, value in values.items() if name.startswith(again)}

    def again(self, step: int) -> tuple[str, ...]:
        """What the names of the metrics begin with that are written again at this step."""
        return tuple(f"{name}/" for name in self.owed) if step == self.step else ()


class JsonLines:
    """One line per logged step. Lines behind the step that training goes on from are removed, so
    that no step is shown twice, and those that are written again.
    """

    def __init__(self, path: Path, resumed: Resumed = Resumed()) -> None:
        self.path = path
        if path.exists():
            remove_partials_of(path)
            with atomic_file(path) as stream:
                for line in read_lines(path):
                    step = line.get("step", 0)
                    is_owed = any(key.startswith(resumed.again(step)) for key in line)
                    if step <= resumed.step and not is_owed:
                        stream.write(json.dumps(line).encode() + b"\n")

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        finite = {
            key: value if isinstance(value, str) or math.isfinite(value) else None
            for key, value in values.items()
        }
        append_line(self.path, {"step": step, "t_wall": time.time(), **finite})

    def close(self) -> None:
        pass


class TensorBoard:
    """TensorBoard event files, by tensorboard's own writer, which needs no torch. A training that
    begins removes those of an earlier one; one that is resumed hides what lies behind its step.
    """

    def __init__(self, folder: Path, resumed: Resumed = Resumed()) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if not resumed.step:
            for path in folder.glob("events.out.tfevents.*"):
                path.unlink()
        self._event = Event
        self._writer = EventFileWriter(str(folder))
        # Makes TensorBoard discard what was logged after the checkpoint, but the first one that it
        # reads does not.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(
            Event(wall_time=time.time(), step=resumed.step + 1, session_log=start)
        )

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        items = []
        for key, value in values.items():
            if isinstance(value, str):
                metadata = SummaryMetadata(
                    plugin_data=SummaryMetadata.PluginData(plugin_name="text")
                )
                shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
                tensor = TensorProto(
                    dtype="DT_STRING", string_val=[value.encode()], tensor_shape=shape
                )
                items.append(Summary.Value(tag=key, metadata=metadata, tensor=tensor))
            else:
                items.append(Summary.Value(tag=key, simple_value=value))
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=Summary(value=items))
        )

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run; offline with `WANDB_MODE=offline`. `run_id` is stable, so that a resumed run
    continues the same one. `place`: `entity` and `tags`, if given.
    """

    def __init__(
        self,
        folder: Path,
        project: str,
        name: str,
        run_id: str,
        config: Mapping[str, Any],
        place: Mapping[str, Any],
    ) -> None:
        import wandb

        os.makedirs(folder, exist_ok=True)
        self._run = wandb.init(
            project=project,
            name=name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=dict(config),
            **place,
        )

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class FailSafeSink:
    """Keeps a run alive when a sink fails: warns once, then drops its metrics silently."""

    def __init__(self, name: str, make: Any) -> None:
        self.name = name
        self._sink: MetricSink | None = None
        self._try(lambda: setattr(self, "_sink", make()))

    def _try(self, call: Any) -> None:
        try:
            call()
        except (
            Exception
        ) as error:  # whatever a tracker's library raises: none of it may stop a training run
            self._sink = None
            say(
                f"warning: {self.name} failed ({type(error).__name__}: {error}); training goes on"
                " without it"
            )

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        if (sink := self._sink) is not None:
            self._try(lambda: sink.write(step, values))

    def close(self) -> None:
        if (sink := self._sink) is not None:
            self._try(sink.close)
