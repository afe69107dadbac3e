"""Dataflow: `prepare` by Apache Beam's runner of that name, driven from this machine in the
environment that Beam lives in.

A prepare is several pipelines one after the other, each with the results of the one before, so it
is no single template: the driver is a process here, whose workers have no more than the bucket.
Both have the job's time and no more. What a driver leaves on Dataflow that is cancelled, fails or
runs out of time is cancelled as well, by whoever asks next how it stands.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from ingot.base.errors import Failed, WrongInput
from ingot.base.lock import folder_lock
from ingot.base.markers import fingerprint
from ingot.base.processes import started_at
from ingot.base.progress import say
from ingot.base.remote.replica import replica_url
from ingot.cloud import dataflows
from ingot.cloud.clients import Google
from ingot.cloud.instances import label
from ingot.config.recipe import Recipe
from ingot.launch.gce_cluster import ATTEMPT, labels_of, node_command
from ingot.launch.handles import find, jobs_folder, store
from ingot.launch.job import Handle, Job, Log, State
from ingot.launch.meeting import EXIT, Meeting
from ingot.launch.remote import FileLog

KIND = "dataflow"
GRACE_S = 20.0
"""How long the driver may take to end when it is cancelled."""
PENDING_S = 0.1
WALLTIME = "max_workflow_runtime_walltime_seconds"
"""The service's own bound on a pipeline, which holds when the driver is killed."""


class DataflowLauncher:
    """`launch.kind: dataflow`, or `pipeline.steps.prepare.launch: dataflow`; for `prepare`."""

    look_s = 2.0

    def __init__(self, recipe: Recipe) -> None:
        engine = recipe.data.engine
        self._recipe, self._options = recipe, dict(engine.options) if engine.kind == "beam" else {}
        # Where Beam is told to make its jobs, there they are looked for.
        where: dict[str, str] = {
            name: self._options[name] for name in ("project", "region") if name in self._options
        }
        self._google = Google(recipe.cloud.model_copy(update=where))

    def can(self, job: Job) -> list[str]:
        """See `Launcher`."""
        engine, reasons = self._recipe.data.engine, list[str]()
        if job.name != "prepare":
            reasons.append(
                f"Dataflow does prepare, not {job.name}; choose another launch.kind for it"
            )
        if job.nodes > 1:
            reasons.append(
                f"launch.nodes is {job.nodes}, and Dataflow chooses its workers by"
                " data.engine.options; set launch.nodes=1"
            )
        if job.mirror is None or job.meet is None:
            reasons.append("there is no bucket to work from; set cloud.bucket")
        if job.image is None:
            reasons.append(
                "its workers need an image with apache-beam and ingot; set launch.image (or"
                " pipeline.steps.prepare.image)"
            )
        if engine.kind == "spark":
            reasons.append(
                "data.engine.kind is spark, and this place is Beam; set data.engine={kind: beam,"
                " python: ...}, or use dataproc"
            )
        elif engine.kind == "local" or engine.python is None:
            reasons.append(
                "the driver needs apache-beam[gcp], which lives in an environment of its own; set"
                " data.engine={kind: beam, python: its interpreter}"
            )
        elif not os.access(engine.python, os.X_OK):
            reasons.append(
                f"data.engine.python {engine.python} is no interpreter; `make beam` makes an"
                " environment with one in .venv-beam/bin/python"
            )
        return reasons

    def render(self, job: Job) -> str:
        """See `Launcher`: the command line that drives the pipelines."""
        shown = [f"{name}={shlex.quote(value)}" for name, value in self._variables(job).items()]
        return f"# in {Path.cwd()}\n{' '.join([*shown, shlex.join(self._command(job))])}\n"

    def submit(self, job: Job) -> Handle:
        """See `Launcher`. The driver is no child of this terminal. One that runs already is not
        started twice: its handle comes back.
        """
        if reasons := self.can(job):
            raise WrongInput(f"{job.name} cannot run on Dataflow: {'; '.join(reasons)}")
        root = self._recipe.folder.root
        log = root / "logs" / f"{job.name}.dataflow.log"
        with folder_lock(jobs_folder(root), f"{job.name}.{KIND}.lock"):
            known = find(root, job.name, KIND)
            if known is not None and self.status(known) == "running":
                say(f"{job.name}: it runs already")
                return known
            log.parent.mkdir(parents=True, exist_ok=True)
            self._cancelled(job.name).unlink(missing_ok=True)
            with log.open("ab") as output:
                driver = subprocess.Popen(
                    self._command(job),
                    env={**os.environ, **self._variables(job)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            about = {
                "meet": job.meet or "",
                "mirror": job.mirror or "",
                "host": socket.gethostname(),
            }
            return store(
                root,
                Handle(
                    job.name,
                    KIND,
                    str(driver.pid),
                    job.argv,
                    started_at(driver.pid) or time.time(),
                    str(log),
                    about,
                ),
                self._recipe,
            )

    def status(self, handle: Handle) -> State:
        """See `Launcher`; of a driver on another machine only the end is known. What one that
        failed has left on Dataflow is cancelled.

        Notes are read after the driver: who leaves has said so before.
        """
        is_here = handle.about["host"] == socket.gethostname()
        if is_here and self._alive(handle):
            return "running"
        notes = Meeting(handle.about["meet"]).notes(EXIT)
        if self._cancelled(handle.name).exists():
            return "cancelled"
        if notes and notes[0]["code"] == 0:
            return "succeeded"
        if not notes and not is_here:
            return "unknown"
        self._clear(handle)
        return "failed"

    def log(self, handle: Handle) -> Log:
        return FileLog(lambda: [Path(handle.log)])

    def signal(self, handle: Handle, number: int) -> None:
        Meeting(handle.about["meet"]).send(number)

    def cancel(self, handle: Handle) -> None:
        """See `Launcher`: the driver first, which else would make the next job, then what it left
        on Dataflow.
        """
        if self._alive(handle):
            if handle.about["host"] != socket.gethostname():
                raise Failed(
                    f"the driver of {handle.name} runs on {handle.about['host']}; cancel it there"
                )
            self._cancelled(handle.name).touch()
            self._end(handle)
        self._clear(handle)

    def _clear(self, handle: Handle) -> None:
        """Cancel what the driver of this start has left on Dataflow."""
        for job in dataflows.active(
            self._google,
            self._job_name(handle.name),
            self._labels(handle.name, handle.about["mirror"], handle.about["meet"]),
        ):
            dataflows.cancel(self._google, job)

    def _command(self, job: Job) -> list[str]:
        """The driver, which a limit of time ends with all that it leads."""
        return [
            "timeout",
            "--signal=TERM",
            "--kill-after=60",
            str(self._limit_s(job)),
            *self._driver(job),
        ]

    def _driver(self, job: Job) -> list[str]:
        _, *node = node_command(self._recipe, job)
        return [sys.executable, *node, f"data.engine={json.dumps(self._engine(job))}"]

    def _engine(self, job: Job) -> dict[str, object]:
        """Beam's knobs; options that the recipe gives hold, but for the labels that jobs are found
        by.
        """
        engine, cloud = self._recipe.data.engine, self._google.cloud
        assert engine.kind == "beam"
        work = f"{self._google.bucket}/ingot/dataflow"
        options = {
            "project": self._google.project,
            "region": cloud.region,
            "temp_location": f"{work}/temp",
            "staging_location": f"{work}/staging",
            "sdk_container_image": job.image or "",
            "job_name": self._job_name(job.name),
            # a process does one bundle at a time, and there are as many processes as cores
            "number_of_worker_harness_threads": ("1"),
        }
        if cloud.service_account:
            options["service_account_email"] = cloud.service_account
        if cloud.subnetwork:
            options["subnetwork"] = (
                cloud.subnetwork
                if "/" in cloud.subnetwork
                else f"regions/{cloud.region}/subnetworks/{cloud.subnetwork}"
            )
        elif cloud.network:
            options["network"] = cloud.network
        return {
            "kind": "beam",
            "runner": "DataflowRunner" if engine.runner == "DirectRunner" else engine.runner,
            "partitions": engine.partitions,
            "python": engine.python,
            "shared": job.mirror,
            "options": {
                **options,
                **engine.options,
                "labels": self._all_labels(job),
                "dataflow_service_options": self._service_options(job),
            },
        }

    def _all_labels(self, job: Job) -> str:
        """Those of `cloud.labels`, those of `data.engine.options`, and ours."""
        given = {label(name): label(value) for name, value in self._recipe.cloud.labels.items()}
        own = dict(
            each.partition("=")[::2] for each in self._options.get("labels", "").split(",") if each
        )
        return ",".join(
            f"{name}={value}"
            for name, value in sorted(
                {**given, **own, **self._labels(job.name, job.mirror or "", job.meet or "")}.items()
            )
        )

    def _service_options(self, job: Job) -> str:
        own = [
            each for each in self._options.get("dataflow_service_options", "").split(",") if each
        ]
        bounded = any(each.startswith(WALLTIME) for each in own)
        return ",".join(own if bounded else [*own, f"{WALLTIME}={self._limit_s(job)}"])

    def _limit_s(self, job: Job) -> int:
        return max(
            1, int(job.time_limit_s if job.time_limit_s is not None else self._recipe.cloud.max_run)
        )

    def _job_name(self, verb: str) -> str:
        """With a mark of the replica: a job that is asked for under the name of one that runs would
        be that one, whosever it is.
        """
        mark = fingerprint(replica_url(self._google.bucket, self._recipe.name))[:6]
        return self._options.get(
            "job_name",
            f"ingot-{label(self._recipe.name).replace('_', '-')[:34].strip('-')}-{mark}-{verb}",
        )

    def _labels(self, verb: str, mirror: str, meet: str) -> dict[str, str]:
        """By which the jobs of one start are found, whose number its meeting place ends with."""
        return {**labels_of(self._recipe, verb, mirror), ATTEMPT: meet.rpartition("-")[2]}

    def _variables(self, job: Job) -> dict[str, str]:
        return {
            name: value
            for name, value in sorted(job.environment.items())
            if name not in job.secrets
        }

    def _cancelled(self, name: str) -> Path:
        return jobs_folder(self._recipe.folder.root) / f"{name}.dataflow.cancelled"

    @staticmethod
    def _alive(handle: Handle) -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(int(handle.id), os.WNOHANG)
        began = started_at(int(handle.id))
        return began is not None and abs(began - handle.started) < 2.0

    def _end(self, handle: Handle) -> None:
        """With all that it leads."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(handle.id), number)
            until = time.monotonic() + GRACE_S
            while self._alive(handle) and time.monotonic() < until:
                time.sleep(PENDING_S)
