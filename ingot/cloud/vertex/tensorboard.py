"""Uploads a run's metrics to a managed TensorBoard while it trains: the content of `metrics.jsonl`,
each step once even across restarts.

The service itself knows how far the upload got, by the highest step of each time series; nothing is
stored on this disk.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.base.runlog import AppendedLines
from ingot.cloud.clients import (
    AIPLATFORM,
    DENIED,
    NOT_FOUND,
    GoogleClients,
    call_api,
    create_once,
    http_status_of,
    list_all,
    message_types,
)
from ingot.cloud.instances import resource_name

LOOK_S = 30.0
"""Seconds between two checks for new metrics."""
END_S = 60.0
"""Timeout for the last upload when a run ends."""
RUN = "train"


@dataclass
class _Series:
    name: str
    sent: int
    """The highest step uploaded; -1 if none."""


@contextlib.contextmanager
def upload_metrics(google: GoogleClients, name: str, metrics: Path) -> Iterator[None]:
    """Inside the block, and at its end, upload what is appended to `metrics` to `cloud.tensorboard`
    as the experiment `name`. Does nothing if none is set.

    Errors are warned of once and never raised, and the end takes at most END_S, since this may run
    inside the training process.
    """
    if google.cloud.tensorboard is None:
        yield
        return
    over = threading.Event()

    def upload_until_over() -> None:
        board, warned = None, False
        while True:
            is_last = over.wait(LOOK_S)
            try:
                board = board or TensorboardRun(google, name)
                board.send(metrics)
            except Exception as error:  # no error of a client may stop a training
                if not warned:
                    say(f"warning: metrics do not reach TensorBoard ({error}); training goes on")
                warned = True
            if is_last:
                return

    thread = threading.Thread(target=upload_until_over, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(END_S)


def tensorboard_name(google: GoogleClients) -> str:
    """The full name of `cloud.tensorboard`, which may be given in full or as an id. Raises
    WrongInput if no project is known.
    """
    given = google.cloud.tensorboard or ""
    return given if given.startswith("projects/") else f"{google.parent}/tensorboards/{given}"


class TensorboardRun:
    """One run of one experiment. Raises WrongInput if no project is known."""

    def __init__(self, google: GoogleClients, name: str) -> None:
        self._google, self._name = google, name
        self._experiment = f"{tensorboard_name(google)}/experiments/{resource_name(name)}"
        self._series: dict[str, _Series] | None = None
        self._lines = AppendedLines()

    def send(self, metrics: Path) -> int:
        """Upload what the file has and the service has not; returns the number of points.

        Raises:
            WrongInput, Failed: as Google's services do; the state of the service is then read again
                before anything more is sent.
        """
        sent = 0
        try:
            while lines := self._lines.next(metrics)[0]:
                sent += self._send(_points(lines))
                self._lines.done(lines)
            return sent
        except WrongInput as error:
            if http_status_of(error) == NOT_FOUND:
                raise WrongInput(
                    f"{error} (cloud.tensorboard {self._google.cloud.tensorboard})"
                ) from error
            raise

    def _send(self, points: Mapping[str, list[tuple[int, float, float]]]) -> int:
        """Upload the points beyond the highest step of their series; returns their number."""
        if not points:
            return 0
        series = self._series if self._series is not None else self._known()
        self._series = None  # read again if this upload fails
        self._add(series, points.keys() - series.keys())
        new = {
            tag: wanted
            for tag, found in points.items()
            if (wanted := [point for point in found if point[0] > series[tag].sent])
        }
        if new:
            self._write(series, new)
        for tag, written in new.items():
            series[tag].sent = written[-1][0]
        self._series = series
        return sum(map(len, new.values()))

    def _known(self) -> dict[str, _Series]:
        """The existing time series; experiment and run are created if they do not exist."""
        types, client = message_types(AIPLATFORM), self._google.client("tensorboards")
        parent, _, id = self._experiment.partition("/experiments/")
        _create_if_missing(
            client.create_tensorboard_experiment,
            request=types.CreateTensorboardExperimentRequest(
                parent=parent,
                tensorboard_experiment_id=id,
                tensorboard_experiment=types.TensorboardExperiment(display_name=self._name[:128]),
            ),
        )
        _create_if_missing(
            client.create_tensorboard_run,
            request=types.CreateTensorboardRunRequest(
                parent=self._experiment,
                tensorboard_run_id=RUN,
                tensorboard_run=types.TensorboardRun(display_name=RUN),
            ),
        )
        found = list_all(
            client.list_tensorboard_time_series,
            "look at the time series of TensorBoard",
            again=False,
            parent=f"{self._experiment}/runs/{RUN}",
        )
        return {  # an empty series reports max_step 0, but its step 0 is still to come
            one.display_name: _Series(
                one.name, one.metadata.max_step if one.metadata.max_wall_time else -1
            )
            for one in found
        }

    def _add(self, series: dict[str, _Series], tags: set[str]) -> None:
        if not tags:
            return
        types, parent = message_types(AIPLATFORM), f"{self._experiment}/runs/{RUN}"
        wanted = [
            types.CreateTensorboardTimeSeriesRequest(
                parent=parent,
                tensorboard_time_series=types.TensorboardTimeSeries(
                    display_name=tag,
                    value_type=types.TensorboardTimeSeries.ValueType.SCALAR,
                    plugin_name="scalars",
                ),
            )
            for tag in sorted(tags)
        ]
        made = call_api(
            self._google.client("tensorboards").batch_create_tensorboard_time_series,
            "make time series of TensorBoard",
            again=False,
            parent=self._experiment,
            requests=wanted,
        )
        series |= {one.display_name: _Series(one.name, -1) for one in made.tensorboard_time_series}

    def _write(
        self, series: Mapping[str, _Series], points: Mapping[str, list[tuple[int, float, float]]]
    ) -> None:
        types = message_types(AIPLATFORM)
        data = [
            types.TimeSeriesData(
                tensorboard_time_series_id=series[tag].name.rpartition("/")[2],
                value_type=types.TensorboardTimeSeries.ValueType.SCALAR,
                values=[
                    types.TimeSeriesDataPoint(
                        step=step,
                        wall_time=datetime.fromtimestamp(wall, UTC),
                        scalar=types.Scalar(value=value),
                    )
                    for step, wall, value in found
                ],
            )
            for tag, found in points.items()
        ]
        run = types.WriteTensorboardRunDataRequest(
            tensorboard_run=f"{self._experiment}/runs/{RUN}", time_series_data=data
        )
        call_api(
            self._google.client("tensorboards").write_tensorboard_experiment_data,
            "write to TensorBoard",
            again=False,
            tensorboard_experiment=self._experiment,
            write_run_data_requests=[run],
        )


def _create_if_missing(create: Any, request: Any) -> None:
    create_once(
        create, "make the experiment in TensorBoard", again=False, denied=DENIED, request=request
    )


def _points(lines: Iterable[bytes]) -> dict[str, list[tuple[int, float, float]]]:
    """(step, seconds since the epoch, value) by key, sorted by step, each step once. Torn lines are
    left out.
    """
    found: dict[str, dict[int, tuple[int, float, float]]] = {}
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if not isinstance(line, dict):
            continue
        step, wall = line.get("step"), line.get("t_wall")
        if not isinstance(step, int) or not isinstance(wall, int | float):
            continue
        for key, value in line.items():
            if (
                key not in ("step", "t_wall")
                and isinstance(value, int | float)
                and not isinstance(value, bool)
                and math.isfinite(value)
            ):
                found.setdefault(key, {})[step] = (step, wall, float(value))
    return {key: [points[step] for step in sorted(points)] for key, points in found.items()}
