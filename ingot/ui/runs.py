"""The runs under a folder as a browser asks for them: a row each, all that is known of one, and
curves with no more points than a screen has columns.

Nothing outside the folder is read: runs are found, never opened by a name that a request gave, and
a run with a link that leads out of the folder is shown as refused.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.base.runfolder import RunFolder
from ingot.report.goodput import Goodput
from ingot.report.headline import headline, trained_tokens
from ingot.report.metrics import MetricColumn, MetricsFile
from ingot.report.planned import cost_so_far
from ingot.report.run_view import RunView, read_run

Axis = Literal["step", "tokens", "time"]
Numbers = npt.NDArray[np.float64]
DEPTH, MOST_RUNS = 4, 5000
MARKS = ("recipe.yaml", "metrics.jsonl", "events.jsonl")
"""A folder with one of these is a run."""
TAIL_BYTES = 24 << 10
"""Of the metrics, what a row of the table is made of."""
LIVE_S = 1.0
"""How old the row of a run at work may be."""
MOST_NUMBERS = 20_000_000
"""Numbers of metrics that are kept in memory (12 bytes each), the runs asked for last."""
FEW, BLOCK = 40, 256
"""Curves of so few points are not smoothed; others by blocks of so many."""
READ_IN = ("", "reports", "reports/steps", "reports/examples", "heartbeats", "model")
"""The folders of a run whose files are read."""


class NoSuchRun(LookupError):
    """No run of that name lies in the folder."""


@dataclass
class _Row:
    stamp: tuple[Any, ...]
    made: float
    value: dict[str, Any]


class RunsFolder:
    """The runs under `root`. Threads may use it together."""

    def __init__(self, root: Path) -> None:
        """Raises WrongInput where `root` is no folder."""
        if not root.is_dir():
            raise WrongInput(f"{root} is no folder; give the folder that runs lie in")
        self.root = root.resolve()
        self._rows: dict[str, _Row] = {}
        self._metrics: OrderedDict[str, MetricsFile] = OrderedDict()
        self._steps: dict[str, tuple[Any, int | None]] = {}
        """Of each run the stamp of its recipe, and the tokens of a step."""
        self._found: tuple[float, dict[str, None]] | None = None
        """When the runs were looked for, and those that were found."""
        self.lock = threading.RLock()
        """Also held while columns of `metrics` are copied."""

    def names(self) -> list[str]:
        """The runs by their paths under the root, found at most LIVE_S ago; "." where the root is
        a run itself.
        """
        with self.lock:
            if self._found is None or time.monotonic() - self._found[0] > LIVE_S:
                found: list[str] = []
                self._find(self.root, "", DEPTH, found)
                self._found = time.monotonic(), dict.fromkeys(sorted(found))
            return list(self._found[1])

    def rows(self, within_s: float = math.inf) -> list[dict[str, Any]]:
        """A row of the table for each run, the last changed first. Runs that were not come to
        `within_s` have a row that says so (`pending`); the next call goes on with them.
        """
        until = time.monotonic() + within_s
        with self.lock:
            stamps = {name: _stamp(self._folder(name)) for name in self.names()}
            for gone in self._rows.keys() - stamps.keys():
                del self._rows[gone]
            newest = sorted(stamps, key=lambda name: -_newest(stamps[name]))
            rows = [self._row(name, stamps[name], until) for name in newest]
        return sorted(rows, key=lambda row: -row["changed"])

    def _folder(self, name: str) -> RunFolder:
        return RunFolder(self.root if name == "." else self.root / name)

    def run(self, name: str) -> RunFolder:
        """The run folder called `name`.

        Raises:
            NoSuchRun: there is none of that name.
            WrongInput: one of its files is a link out of the folder of runs.
        """
        self.names()
        if self._found is None or name not in self._found[1]:
            raise NoSuchRun(name)
        run = self._folder(name)
        self._check(run)
        return run

    def _check(self, run: RunFolder) -> None:
        if out := next(self._links_out(run.root), None):
            raise WrongInput(
                f"{out} is a link out of {self.root}; nothing outside is shown: move the run here,"
                " or give the folder that holds both"
            )

    def view(self, name: str) -> RunView:
        """All that is known of a run; raises as `run`."""
        with self.lock:
            return read_run(self.run(name), metrics=self.metrics(name))

    def metrics(self, name: str) -> MetricsFile:
        """A run's metrics, read as far as they go now; raises as `run`."""
        run = self.run(name)
        with self.lock:
            metrics = self._metrics.pop(name, None) or MetricsFile(run.metrics)
            metrics.refresh()
            self._metrics[name] = metrics
            while len(self._metrics) > 1 and sum(map(len, self._metrics.values())) > MOST_NUMBERS:
                self._metrics.popitem(last=False)
            return metrics

    def tokens_a_step(self, name: str) -> int | None:
        """Tokens of an optimizer step of a run, on average; raises as `run`."""
        with self.lock:
            run, known = self.run(name), self._steps.get(name)
            stamp = _stamp(run)[0]
            if known is None or known[0] != stamp:
                view = read_run(run, metrics=MetricsFile(run.metrics, TAIL_BYTES))
                known = self._steps[name] = (stamp, tokens_of_a_step(view))
            return known[1]

    def within(self, path: Path) -> bool:
        """Whether a path leads to a place under the root, links followed."""
        return path.resolve().is_relative_to(self.root)

    def _find(self, folder: Path, name: str, depth: int, found: list[str]) -> None:
        if len(found) >= MOST_RUNS:
            return
        try:
            entries = {entry.name: entry for entry in os.scandir(folder)}
        except OSError:
            return
        if any(mark in entries for mark in MARKS):
            found.append(name or ".")
            return
        for entry in entries.values() if depth else ():
            inner = f"{name}/{entry.name}" if name else entry.name
            if entry.name.startswith(".") or not os.path.isdir(entry):
                continue
            if entry.is_symlink() and not self.within(Path(entry.path)):
                continue
            self._find(folder / entry.name, inner, depth - 1, found)

    def _links_out(self, folder: Path) -> Iterator[Path]:
        """Links in a run, where its files are read, that lead out of the root."""
        for inner in READ_IN:
            try:
                entries = list(os.scandir(folder / inner))
            except OSError:
                continue
            for entry in entries:
                if entry.is_symlink() and not self.within(Path(entry.path)):
                    yield Path(entry.path)

    def _row(self, name: str, stamp: tuple[Any, ...], until: float) -> dict[str, Any]:
        run, known = self._folder(name), self._rows.get(name)
        if known is not None and known.stamp == stamp:
            age = time.monotonic() - known.made
            if not known.value["running"] or age < LIVE_S:
                return known.value
        if time.monotonic() > until:
            if known is not None:
                return {**known.value, "pending": True}
            waiting = {"state": "being read", "mood": "plain", "changed": _newest(stamp)}
            return {**_EMPTY, "id": name, "name": run.root.name, **waiting, "pending": True}
        try:
            self._check(run)
            value = row(name, read_run(run, metrics=MetricsFile(run.metrics, TAIL_BYTES)))
        except (WrongInput, PermissionError) as error:
            value = {**_EMPTY, "id": name, "name": run.root.name, "state": "refused"}
            value |= {"error": str(error), "mood": "bad", "changed": 0.0}
        self._rows[name] = _Row(stamp, time.monotonic(), value)
        return value


def _stamp(run: RunFolder) -> tuple[Any, ...]:
    """Changes when a file does that a row is made of."""
    reports = ("evaluate.json", "gate.json", "plan.json", "steps")
    paths = (run.recipe, run.metrics, run.events, run.model / "ingot.json", run.heartbeats)
    return tuple(_changed((*paths, *(run.reports / name for name in reports))))


def _newest(stamp: tuple[Any, ...]) -> float:
    """When the newest of the files changed, seconds since the epoch."""
    return max((one[0] / 1e9 for one in stamp if one is not None), default=0.0)


def _changed(paths: Iterable[Path]) -> Iterator[tuple[int, int, int] | None]:
    for path in paths:
        try:
            about = os.stat(path)
            yield about.st_mtime_ns, about.st_size, about.st_ino
        except OSError:
            yield None


_FIGURES = (
    *("step", "last", "left_s", "tokens", "loss", "validation", "bits", "tokens_per_s", "goodput"),
    *("restarts", "cost", "gate", "parameters", "model", "objective"),
)
_EMPTY: dict[str, Any] = {
    "running": False,
    "pending": False,
    "error": "",
    "not_finite": [],
    **dict.fromkeys(_FIGURES),
}


def row(name: str, view: RunView) -> dict[str, Any]:
    """A run as a row of the table. What is not known is None."""
    top, bits, done = headline(view), view.metric("bits_per_byte"), view.progress
    account = view.goodput
    last = {
        "loss": view.curves["train/loss"].last,
        "validation": view.curves["validation/loss"].last,
        "tokens_per_s": view.curves["train/tokens_per_s"].last,
    }
    return {
        **_EMPTY,
        "id": name,
        "name": view.name,
        "state": top.state,
        "mood": "live" if view.running else top.mood,
        "running": view.running,
        "error": "; ".join(view.unread),
        "step": view.steps_done or None,
        "last": done.last if done else view.knob("train.steps"),
        "left_s": done.left_s if done and view.running else None,
        "tokens": trained_tokens(view) or None,
        **last,
        "not_finite": [name for name, value in last.items() if value and math.isnan(value)],
        "bits": bits.value if bits else None,
        "goodput": account.share() if account else None,
        "restarts": restarts(account) if account else None,
        "cost": cost_so_far(view),
        "gate": (view.gate or {}).get("decision"),
        "parameters": view.parameters,
        "model": view.knob("model.source"),
        "objective": view.knob("objective.kind"),
        "changed": view.changed,
    }


def restarts(account: Goodput) -> int:
    """How often a training was started again."""
    return max(len(account.attempts) - 1, 0)


def tokens_of_a_step(view: RunView) -> int | None:
    steps = view.steps_trained
    return round(trained_tokens(view) / steps) or None if steps else None


def curve(
    metrics: MetricsFile,
    key: str,
    axis: Axis,
    tokens_a_step: int | None,
    points: int,
    low: float | None = None,
    high: float | None = None,
    *,
    bands: bool = True,
    smoothing: float = 0.0,
) -> dict[str, Any] | None:
    """One curve between `low` and `high` of the axis: lists x and y, and where points were left out
    and `bands` are wanted the lowest and highest of each column; `lost` is where it ceased to be
    finite. Of many points `smooth` is what `smoothing` makes of all that were logged, so that it is
    the same whatever is seen of them. None where the run has none.
    """
    if key not in metrics.columns.keys() | metrics.lost or (axis == "tokens" and not tokens_a_step):
        return None
    column = metrics.columns.get(key, MetricColumn())
    lines = np.array(column.lines, np.int64)
    y, along = np.array(column.values, np.float64), _along(metrics, axis, tokens_a_step)
    x, lost = along[lines], along[metrics.lost.get(key, [])[:1]]
    known = np.isfinite(x)
    if not known.all():
        x, y = x[known], y[known]
    if (np.diff(x) < 0).any():  # a clock that was set back
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
    # A point beyond each end, so that the line runs on to the edge.
    first = 0 if low is None else max(int(np.searchsorted(x, low)) - 1, 0)
    last = len(x) if high is None else min(int(np.searchsorted(x, high, "right")) + 1, len(x))
    drawn, middles = downsampled(x[first:last], y[first:last], points)
    if smoothing and len(y) > FEW:
        drawn["smooth"] = smoothed(y, smoothing)[first:last][middles].astype(np.float32)
    drawn["lost"] = float(lost[0]) if np.isfinite(lost).any() else None
    return {name: drawn[name] for name in drawn if bands or name not in ("low", "high")}


def _along(metrics: MetricsFile, axis: Axis, tokens_a_step: int | None) -> Numbers:
    """Where each line of the metrics stands on an axis; NaN where that is not known."""
    if axis == "time":
        times = np.array(metrics.times, np.float64)
        return times - np.nanmin(times) if np.isfinite(times).any() else times
    return np.array(metrics.steps, np.float64) * (tokens_a_step or 1 if axis == "tokens" else 1)


def smoothed(values: Numbers, weight: float) -> Numbers:
    """Exponential smoothing by the `weight` of what came before, without its bias towards 0 at the
    beginning.
    """
    count, block = len(values), np.arange(BLOCK)
    powers = weight ** np.arange(1, BLOCK + 1)
    within = np.tril(weight ** np.abs(np.subtract.outer(block, block)))
    rows = np.pad(values, (0, -count % BLOCK)).reshape(-1, BLOCK) @ within.T * (1 - weight)
    for before, row in pairwise(rows):
        row += before[-1] * powers
    return rows.ravel()[:count] / (1 - weight ** np.arange(1, count + 1))


def downsampled(
    x: Numbers, y: Numbers, points: int
) -> tuple[dict[str, Any], npt.NDArray[np.int64]]:
    """At most `points` columns: the middle of their x, mean, lowest and highest, so that no spike
    is lost; and the points that are these middles.
    """
    count = len(x)
    if count <= points:
        return {"x": x, "y": y.astype(np.float32), "n": count}, np.arange(count)
    starts = np.linspace(0, count, points, endpoint=False).astype(np.int64)
    sizes = np.diff(np.append(starts, count))
    middles = starts + sizes // 2
    columns = {
        "x": x[middles],
        "y": (np.add.reduceat(y, starts) / sizes).astype(np.float32),
        "low": np.minimum.reduceat(y, starts).astype(np.float32),
        "high": np.maximum.reduceat(y, starts).astype(np.float32),
        "n": count,
    }
    return columns, middles


def curve_keys(files: Sequence[MetricsFile]) -> list[str]:
    """The keys that any of the runs has, losses first."""
    found = {key for metrics in files for key in (*metrics.columns, *metrics.lost)}
    first = ("train/loss", "validation/loss", "train/lr", "train/grad_norm", "train/tokens_per_s")
    rank = {key: number for number, key in enumerate(first)}
    return sorted(found, key=lambda key: (rank.get(key, len(first)), key))
