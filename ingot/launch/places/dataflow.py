"""Dataflow: `prepare` with Apache Beam's runner of that name, driven from this machine in Beam's
own environment.

A prepare runs several pipelines in sequence, each using the previous one's results, so it is no
single template: the driver is a local process, and its workers share only the bucket with it. Both
have the job's time limit. Pipelines that a cancelled, failed or timed-out driver leaves on Dataflow
are cancelled by the next query of its state; those that another computer's driver started prevent
a start, as far as one is active just then.
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
import uuid
from collections.abc import Mapping
from pathlib import Path

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.processes import machine_id, started_at
from ingot.base.progress import say
from ingot.base.remote.replica import replica_url
from ingot.base.runfolder import folder_lock
from ingot.cloud import data_jobs
from ingot.cloud.clients import GoogleClients
from ingot.cloud.instances import label, user_labels
from ingot.config.recipe import Recipe
from ingot.launch.handles import find_handle, jobs_folder, store_handle
from ingot.launch.job import Handle, Job, JobLog, JobState
from ingot.launch.places.local import limited
from ingot.launch.places.logs import FileLog
from ingot.launch.places.node_commands import (
    ATTEMPT,
    START,
    container_command,
    job_labels,
)
from ingot.launch.rendezvous import EXIT, Rendezvous, SignalsByNote

KIND = "dataflow"
GRACE_S = 20.0
"""How long the driver may take to end when it is cancelled."""
POLL_S = 0.1
WALLTIME = "max_workflow_runtime_walltime_seconds"
"""The service's own time limit of a pipeline, which applies even if the driver is killed."""
NEEDS_BEAM = (
    "the driver needs apache-beam[gcp], which lives in an environment of its own; set"
    " data.engine={kind: beam, python: its interpreter}"
)


class DataflowLauncher(SignalsByNote):
    """`launch.kind: dataflow`, or `pipeline.steps.prepare.launch: dataflow`; for `prepare`."""

    poll_s = 2.0
    shares_disk, paid_by_use = False, True

    def __init__(self, recipe: Recipe) -> None:
        engine = recipe.data.engine
        self._recipe, self._options = recipe, dict(engine.options) if engine.kind == "beam" else {}
        # Jobs are looked up in the region and project of Beam's own options.
        location: dict[str, str] = {
            name: self._options[name] for name in ("project", "region") if name in self._options
        }
        self._google = GoogleClients(recipe.cloud.model_copy(update=location))

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
        if not job.run_folder_url or not job.rendezvous:
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
            reasons.append(NEEDS_BEAM)
        elif not os.access(engine.python, os.X_OK):
            reasons.append(
                f"data.engine.python {engine.python} is no interpreter; `make beam` makes an"
                " environment with one in .venv-beam/bin/python"
            )
        return reasons

    def render(self, job: Job) -> str:
        """See `Launcher`: the command line that drives the pipelines."""
        variables = [
            f"{name}={shlex.quote(value)}" for name, value in job.public_environment.items()
        ]
        return f"# in {Path.cwd()}\n{' '.join([*variables, shlex.join(self._command(job))])}\n"

    def busy(self, job: Job) -> str | None:
        """See `ExclusiveLauncher`: a pipeline of this run that this run folder did not start."""
        known = find_handle(self._recipe.folder.root, job.name, KIND)
        labels = job_labels(self._recipe, job.name, job.run_folder_url)
        for found in self._dataflow_jobs(job.name, labels):
            if known is None or found.labels.get(START) != known.about["start"]:
                return (
                    f"the Dataflow job {found.id} works on this run and was started elsewhere;"
                    " cancel it there, or wait for it"
                )
        return None

    def submit(self, job: Job) -> Handle:
        """See `Launcher`. The driver is detached from this terminal. If one is already running, its
        handle is returned. Raises Failed if one was started elsewhere.
        """
        if reasons := self.can(job):
            raise WrongInput(f"{job.name} cannot run on Dataflow: {'; '.join(reasons)}")
        root = self._recipe.folder.root
        log = root / "logs" / f"{job.name}.dataflow.log"
        with folder_lock(jobs_folder(root), f"{job.name}.{KIND}.lock"):
            known = find_handle(root, job.name, KIND)
            if known is not None and self.status(known) == "running":
                say(f"{job.name}: it runs already")
                return known
            if reason := self.busy(job):
                raise Failed(reason)
            start = uuid.uuid4().hex[:8]
            log.parent.mkdir(parents=True, exist_ok=True)
            self._cancelled(job.name).unlink(missing_ok=True)
            with log.open("ab") as output:
                driver = subprocess.Popen(
                    self._command(job, start),
                    env={**os.environ, **job.public_environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            about = {
                "start": start,
                "meet": job.rendezvous,
                "mirror": job.run_folder_url,
                "machine": machine_id() or "",
                "host": socket.gethostname(),
            }
            started = started_at(driver.pid) or time.time()
            handle = Handle(job.name, KIND, str(driver.pid), job.argv, started, str(log), about)
            return store_handle(root, handle, self._recipe)

    def status(self, handle: Handle) -> JobState:
        """See `Launcher`; of a driver on another machine only the end is known. Pipelines that a
        failed driver left on Dataflow are cancelled.

        Notes are read after the driver's state, since a driver leaves its note before it exits.
        """
        is_here = self._is_here(handle)
        if is_here and self._is_alive(handle):
            return "running"
        notes = Rendezvous.of(handle).notes(EXIT)
        if self._cancelled(handle.name).exists():
            return "cancelled"
        if notes and notes[0]["code"] == 0:
            return "succeeded"
        if not notes and not is_here:
            return "unknown"
        self._cancel_dataflow_jobs(handle)
        return "failed"

    def log(self, handle: Handle) -> JobLog:
        """See `Launcher`."""
        return FileLog(lambda: [Path(handle.log)])

    def cancel(self, handle: Handle) -> None:
        """See `Launcher`: the driver first, which would otherwise start the next pipeline, then its
        pipelines on Dataflow.
        """
        if self._is_alive(handle):
            if not self._is_here(handle):
                raise Failed(
                    f"the driver of {handle.name} runs on {handle.about['host']}; cancel it there"
                )
            self._cancelled(handle.name).touch()
            self._end(handle)
        self._cancel_dataflow_jobs(handle)

    def _cancel_dataflow_jobs(self, handle: Handle) -> None:
        """Cancel what the driver of this start has left on Dataflow."""
        labels = {
            **job_labels(self._recipe, handle.name, handle.about["mirror"]),
            ATTEMPT: handle.about["meet"].rpartition("-")[2],
            START: handle.about["start"],
        }
        for job in self._dataflow_jobs(handle.name, labels):
            data_jobs.cancel_dataflow_job(self._google, job)

    def _dataflow_jobs(self, verb: str, labels: Mapping[str, str]) -> list[data_jobs.DataflowJob]:
        return data_jobs.active_dataflow_jobs(self._google, self._job_name(verb), labels)

    def _command(self, job: Job, start: str = "drawn-by-submit") -> list[str]:
        """The driver, under a time limit that ends its process group."""
        return [*limited(self._limit_s(job)), *self._driver(job, start)]

    def _driver(self, job: Job, start: str) -> list[str]:
        _, *node = container_command(self._recipe, job)
        return [sys.executable, *node, f"data.engine={json.dumps(self._engine(job, start))}"]

    def _engine(self, job: Job, start: str) -> dict[str, object]:
        """Beam's knobs; the recipe's own options take precedence, except for the labels that
        identify the jobs.
        """
        engine, cloud = self._recipe.data.engine, self._google.cloud
        if engine.kind != "beam":
            raise WrongInput(NEEDS_BEAM)
        work = f"{self._google.bucket}/ingot/dataflow"
        options = {
            "project": self._google.project,
            "region": cloud.region,
            "temp_location": f"{work}/temp",
            "staging_location": f"{work}/staging",
            "sdk_container_image": job.image or "",
            "job_name": self._job_name(job.name),
            # A process works on one bundle at a time, and there are as many processes as cores.
            "number_of_worker_harness_threads": "1",
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
            "shared": job.run_folder_url,
            "options": {
                **options,
                **engine.options,
                "labels": self._labels(job, start),
                "dataflow_service_options": self._service_options(job),
            },
        }

    def _labels(self, job: Job, start: str) -> str:
        """The labels of `cloud.labels`, those of `data.engine.options`, and ours. `start`
        distinguishes this start from one of the same number made by another computer.
        """
        own = dict(
            each.partition("=")[::2] for each in self._options.get("labels", "").split(",") if each
        )
        labels = {
            **user_labels(self._recipe.cloud),
            **own,
            **job_labels(self._recipe, job.name, job.run_folder_url),
            ATTEMPT: job.start_number,
            START: start,
        }
        return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))

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
        """Includes a hash of the replica: Dataflow treats a job with the name of a running one as
        that job, even from another run.
        """
        mark = fingerprint(replica_url(self._google.bucket, self._recipe.name))[:6]
        run = label(self._recipe.name).replace("_", "-")[:34].strip("-")
        return self._options.get("job_name", f"ingot-{run}-{mark}-{verb}")

    def _cancelled(self, name: str) -> Path:
        return jobs_folder(self._recipe.folder.root) / f"{name}.dataflow.cancelled"

    @staticmethod
    def _is_here(handle: Handle) -> bool:
        """Whether this machine started the driver: it may be called otherwise since, as a laptop in
        another network, or have been started again.
        """
        about = handle.about
        return about.get("machine", "") == machine_id() or about["host"] == socket.gethostname()

    @staticmethod
    def _is_alive(handle: Handle) -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(int(handle.id), os.WNOHANG)
        began = started_at(int(handle.id))
        return began is not None and abs(began - handle.started) < 2.0

    def _end(self, handle: Handle) -> None:
        """Kill the driver with its process group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(handle.id), number)
            until = time.monotonic() + GRACE_S
            while self._is_alive(handle) and time.monotonic() < until:
                time.sleep(POLL_S)
