"""`metrics.jsonl` as columns, read once and then only where it grew."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import orjson

from ingot.base.runlog import AppendedLines

MOST_KEYS = 400
"""A file with more keys keeps the first ones, so that a reader's memory is bounded."""
MEMORY, GPU_USE, GPU_MEMORY = "memory/peak_gb", "gpu/util", "gpu/memory"
OF_RANKS = ("memory/rank", "gpu/rank")


@dataclass
class MetricColumn:
    """The finite values of one key, and the numbers of the lines that they stand in; steps
    increase.
    """

    lines: array[int] = field(default_factory=lambda: array("I"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.values)


class MetricsFile:
    """The columns of a metrics file. `refresh` reads what was appended since; a file that was
    written anew, as at a resume, is read anew.

    Values of the ranks become one column: the highest memory, the mean use of the GPUs. Of a step
    that is logged twice the last line counts.
    """

    def __init__(self, path: Path, tail_bytes: int | None = None) -> None:
        """`tail_bytes`: begin that far before the end, where only the newest values are wanted."""
        self.path, self._lines = path, AppendedLines(tail_bytes)
        self._clear()

    def _clear(self) -> None:
        self.steps, self.times = array("d"), array("d")
        self.columns: dict[str, MetricColumn] = {}
        self.lost: dict[str, list[int]] = {}
        """Of each key that was logged last as no finite number (null): the lines since the last
        that was one.
        """
        self.texts: list[tuple[float, str, str]] = []
        """(step, key, text): samples, mostly."""
        self._last = 0.0

    def refresh(self) -> bool:
        """Read what is new; returns whether anything was. A missing file is an empty one."""
        changed = False
        while True:
            lines, anew = self._lines.next(self.path)
            if anew:
                changed = changed or bool(self.steps)
                self._clear()
            if not lines:
                return changed
            for line in lines:
                self._add(line)
            self._lines.done(lines)
            changed = True

    def points(self, key: str) -> tuple[array[float], array[float]]:
        """Steps and values of `key`, in a quarter of the memory that lists of them take."""
        column = self.columns.get(key) or MetricColumn()
        return array("d", map(self.steps.__getitem__, column.lines)), column.values[:]

    def lost_at(self, key: str) -> list[float]:
        """The steps since the last finite value of `key` at which it was logged as none."""
        return [self.steps[line] for line in self.lost.get(key, ())]

    def __len__(self) -> int:
        """The numbers that are held."""
        return sum(map(len, self.columns.values()))

    def _add(self, line: bytes) -> None:
        try:
            values = orjson.loads(line)
        except orjson.JSONDecodeError:
            return
        step = values.get("step") if isinstance(values, dict) else None
        if not is_number(step):
            return
        number, when = len(self.steps), values.get("t_wall")
        later = not number or step > self._last
        self._last = step if later else self._last
        self.steps.append(step)
        self.times.append(when if is_number(when) else math.nan)
        for key in self.lost.keys() & values.keys():
            if values[key] is not None:
                del self.lost[key]
        ranks: dict[str, list[float]] = {}
        for key, value in values.items():
            if type(value) is float and later and (column := self.columns.get(key)) is not None:
                column.lines.append(number)  # by far the most; JSON has no numbers but finite ones
                column.values.append(value)
            elif is_number(value):
                if key.startswith(OF_RANKS):
                    name = MEMORY if key[0] == "m" else GPU_USE if key[-1] == "l" else GPU_MEMORY
                    ranks.setdefault(name, []).append(value)
                elif key not in ("step", "t_wall"):
                    self._put(key, number, value)
            elif isinstance(value, str):
                self.texts.append((step, key, value))
            elif value is None and not key.startswith((*OF_RANKS, "t_wall")):
                self._lose(key, number)
        for name, found in ranks.items():
            self._put(name, number, max(found) if name == MEMORY else sum(found) / len(found))

    def _lose(self, key: str, line: int) -> None:
        if key in self.lost or len(self.lost) < MOST_KEYS:
            self.lost.setdefault(key, []).append(line)

    def _put(self, key: str, line: int, value: float) -> None:
        column = self.columns.get(key)
        if column is None:
            if len(self.columns) >= MOST_KEYS:
                return
            column = self.columns[key] = MetricColumn()
        step, at = self.steps[line], len(column.lines)
        if at and self.steps[column.lines[-1]] >= step:
            at = bisect_left(column.lines, step, key=self.steps.__getitem__)
            if self.steps[column.lines[at]] == step:
                column.lines[at], column.values[at] = line, value
                return
        column.lines.insert(at, line)
        column.values.insert(at, value)


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
