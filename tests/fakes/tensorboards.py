"""Vertex AI's TensorBoard, with its state: `install(server)` answers on a
`tests.fakes.google.Server`. What is written stays, twice if sent twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tests.fakes.google import Refused, Server
from tests.lazy import lazy

types = lazy("google.cloud.aiplatform_v1")

ID = re.compile(r"[a-z0-9][a-z0-9-]{0,127}")


@dataclass
class State:
    """`points` by the display name of the time series: step and value in the order in which they
    came.
    """

    server: Server
    board: str = "projects/proj/locations/us-central1/tensorboards/77"
    experiments: dict[str, types.TensorboardExperiment] = field(default_factory=dict)
    runs: dict[str, types.TensorboardRun] = field(default_factory=dict)
    series: dict[str, types.TensorboardTimeSeries] = field(default_factory=dict)
    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def create_experiment(
        self, request: types.CreateTensorboardExperimentRequest
    ) -> types.TensorboardExperiment:
        if request.parent != self.board:
            raise Refused(404, f"The Tensorboard {request.parent} does not exist.")
        if not ID.fullmatch(request.tensorboard_experiment_id):
            raise Refused(
                400, f"Invalid tensorboard_experiment_id {request.tensorboard_experiment_id}"
            )
        name = f"{self.board}/experiments/{request.tensorboard_experiment_id}"
        if name in self.experiments:
            raise Refused(409, f"{name} already exists.")
        self.experiments[name] = types.TensorboardExperiment(
            name=name, display_name=request.tensorboard_experiment.display_name
        )
        return self.experiments[name]

    def create_run(self, request: types.CreateTensorboardRunRequest) -> types.TensorboardRun:
        if request.parent not in self.experiments:
            raise Refused(404, f"{request.parent} does not exist.")
        name = f"{request.parent}/runs/{request.tensorboard_run_id}"
        if name in self.runs:
            raise Refused(409, f"{name} already exists.")
        if not request.tensorboard_run.display_name:
            raise Refused(400, "display_name is required.")
        self.runs[name] = types.TensorboardRun(
            name=name, display_name=request.tensorboard_run.display_name
        )
        return self.runs[name]

    def create_series(
        self, request: types.BatchCreateTensorboardTimeSeriesRequest
    ) -> types.BatchCreateTensorboardTimeSeriesResponse:
        if request.parent not in self.experiments:
            raise Refused(404, f"{request.parent} does not exist.")
        made = []
        for one in request.requests:
            series = one.tensorboard_time_series
            if one.parent not in self.runs:
                raise Refused(404, f"{one.parent} does not exist.")
            if any(known.display_name == series.display_name for known in self.series.values()):
                raise Refused(409, f"{series.display_name} already exists.")
            if (
                series.value_type != types.TensorboardTimeSeries.ValueType.SCALAR
                or not series.display_name
            ):
                raise Refused(400, "value_type and display_name are required.")
            series.name = f"{one.parent}/timeSeries/{self.server.number()}"
            self.series[series.name] = series
            made.append(series)
        return types.BatchCreateTensorboardTimeSeriesResponse(tensorboard_time_series=made)

    def list_series(
        self, request: types.ListTensorboardTimeSeriesRequest
    ) -> types.ListTensorboardTimeSeriesResponse:
        if request.parent not in self.runs:
            raise Refused(404, f"{request.parent} does not exist.")
        return types.ListTensorboardTimeSeriesResponse(
            tensorboard_time_series=list(self.series.values())
        )

    def write(
        self, request: types.WriteTensorboardExperimentDataRequest
    ) -> types.WriteTensorboardExperimentDataResponse:
        if request.tensorboard_experiment not in self.experiments:
            raise Refused(404, f"{request.tensorboard_experiment} does not exist.")
        for run in request.write_run_data_requests:
            if run.tensorboard_run not in self.runs:
                raise Refused(404, f"{run.tensorboard_run} does not exist.")
            for data in run.time_series_data:
                series = self.series.get(
                    f"{run.tensorboard_run}/timeSeries/{data.tensorboard_time_series_id}"
                )
                if series is None:
                    raise Refused(404, f"{data.tensorboard_time_series_id} does not exist.")
                if data.value_type != series.value_type or len(data.values) > 1000:
                    raise Refused(400, "value_type differs, or too many points")
                kept = self.points.setdefault(series.display_name, [])
                for point in data.values:
                    if point.wall_time is None:
                        raise Refused(400, "wall_time is required.")
                    kept.append((point.step, point.scalar.value))
                    newest = max(step for step, _ in kept)
                    series.metadata = types.TensorboardTimeSeries.Metadata(
                        max_step=newest, max_wall_time=point.wall_time
                    )
        return types.WriteTensorboardExperimentDataResponse()


def install(server: Server) -> State:
    state = State(server)
    server.on("TensorboardService.CreateTensorboardExperiment", state.create_experiment)
    server.on("TensorboardService.CreateTensorboardRun", state.create_run)
    server.on("TensorboardService.BatchCreateTensorboardTimeSeries", state.create_series)
    server.on("TensorboardService.ListTensorboardTimeSeries", state.list_series)
    server.on("TensorboardService.WriteTensorboardExperimentData", state.write)
    return state
