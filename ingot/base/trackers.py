"""MLflow and Trackio as metric sinks, each by its own library. A restart goes on in the same run:
what it says once more of steps that are there already is not said again.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ingot.base.runlog import Resumed

# What MLflow accepts: characters of a key, of a parameter's value, and items of one call.
MLFLOW_KEY, MLFLOW_VALUE, MLFLOW_ITEMS = re.compile(r"[^\w\-. :/]"), 500, 100
RUN_TAG = "ingot.run"
# MLflow tries a server that is gone for minutes unless told otherwise, and training would wait.
MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class MLflow:
    """A run of an MLflow experiment, found again by a tag that holds `run_id`. Texts are its
    artifacts, the recipe its parameters.

    Args:
        uri: server, `sqlite:///FILE` or `file:FOLDER`; None: as `MLFLOW_TRACKING_URI` says.
        resumed: where the training goes on, of which steps are there already.
    """

    def __init__(
        self,
        uri: str | None,
        experiment: str,
        name: str,
        run_id: str,
        config: Mapping[str, Any],
        tags: Mapping[str, str],
        resumed: Resumed,
    ) -> None:
        for variable, value in MLFLOW_PATIENCE.items():
            os.environ.setdefault(variable, value)
        if uri is not None and uri.startswith("file:"):  # asked for by its name
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(experiment)
        place = known.experiment_id if known else self._client.create_experiment(experiment)
        found = self._client.search_runs([place], f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            last = self._last_step(found[0])
            self._client.update_run(self._id, status="RUNNING", name=name)
        else:
            made = self._client.create_run(place, tags={RUN_TAG: run_id, **tags}, run_name=name)
            self._id, last = made.info.run_id, None
            params = [Param(key, value[:MLFLOW_VALUE]) for key, value in _flat(config)]
            for start in range(0, len(params), MLFLOW_ITEMS):
                self._client.log_batch(self._id, params=params[start : start + MLFLOW_ITEMS])
        self._resumed, self._last = resumed, last

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        now, metrics = int(time.time() * 1000), []
        for name, value in self._resumed.unsaid(step, values, self._last).items():
            key = MLFLOW_KEY.sub("_", name)
            if isinstance(value, str):
                self._client.log_text(self._id, value, f"{key}/{step}.txt")
            else:
                metrics.append(self._metric(key, float(value), now, step))
        for start in range(0, len(metrics), MLFLOW_ITEMS):
            self._client.log_batch(self._id, metrics=metrics[start : start + MLFLOW_ITEMS])

    def close(self) -> None:
        failed = sys.exc_info()[0] is not None  # closed on the way out of an error
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")

    def _last_step(self, run: Any) -> int | None:
        # Those of single ranks, of which there may be hundreds, are logged with the loss.
        keys = (key for key in run.data.metrics if "/rank" not in key)
        histories = (self._client.get_metric_history(self._id, key) for key in keys)
        return max((item.step for history in histories for item in history), default=None)


class Trackio:
    """A run of a Trackio project, on this machine (`TRACKIO_DIR`) or in a Space of the hub. Trackio
    goes on in a run by its name, so the name ends with the beginning of `run_id`; it has no tags,
    so they stand in the run's configuration.
    """

    def __init__(
        self,
        project: str,
        name: str,
        run_id: str,
        config: Mapping[str, Any],
        place: Mapping[str, Any],
        resumed: Resumed,
    ) -> None:
        import trackio

        self._markdown = trackio.Markdown
        self._run = trackio.init(
            project=project,
            name=f"{name}-{run_id[:8]}",
            resume="allow",
            config=dict(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            **place,
        )
        # None for a new run; the library has no public name for it.
        self._resumed, self._last = resumed, self._run._initial_last_step

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        unsaid = self._resumed.unsaid(step, values, self._last)
        if unsaid:
            texts = {
                key: self._markdown(value) if isinstance(value, str) else value
                for key, value in unsaid.items()
            }
            self._run.log(texts, step=step)

    def close(self) -> None:
        self._run.finish()


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """The knobs in nested sections, by their dotted names."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield MLFLOW_KEY.sub("_", f"{before}{key}"), str(value)
