"""A Slurm cluster: one Slurm job per start, whose nodes srun starts. The job continues when this
process dies; the next command finds it.

Slurm's own requeue is off, since the supervisor submits a new job. The nodes share our disk.
Signals are sent as notes, since Slurm's own reach every process of a step, not only the ranks.
Secrets lie in files that only their owner can read until the nodes have read them, and never in
anything that Slurm stores.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import shlex
import signal
import time
import uuid
from dataclasses import replace
from pathlib import Path

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.progress import duration, say
from ingot.base.storage import write_atomic
from ingot.config.recipe import Recipe
from ingot.launch.handles import check_same_work, find_handle, store_handle, store_recipe
from ingot.launch.job import FINAL_STATES, Handle, Job, JobLog, JobState
from ingot.launch.places import slurm_cluster
from ingot.launch.places.logs import FileLog
from ingot.launch.places.node_commands import (
    UNACCELERATED,
    interpreter,
    node_variables,
    path_on_nodes,
    remove_secrets,
    secret_values,
    shared_disk_command,
    shared_disk_reasons,
    with_named_secrets,
    working_folder,
    write_secrets,
)
from ingot.launch.places.slurm_cluster import MEMORY_OPTIONS, NoAnswer
from ingot.launch.rendezvous import SIGNAL, Rendezvous, SignalsByNote, state_by_notes

KIND = "slurm"
SUBMIT_TRIES, RETRY_S = 5, 3.0
CANCEL_TIMEOUT_S = 300.0
"""How long a job may take to be gone after scancel: its ranks have Slurm's KillWait to save a
checkpoint.
"""
TOKEN = "slurm.token"
"""A file in a start's rendezvous, present from before submission until the job's number is known:
holds the handle without a number, and the comment by which the job is found.
"""
CURRENT, NO_REQUEST = "slurm.current", "none"
"""A file beside it with the comment of the only submission whose job may work, or `NO_REQUEST`: a
request whose answer was lost may be carried out when another has long taken its place, or none.
"""
OWN_OPTIONS = (
    *("job-name", "output", "error", "chdir", "nodes", "ntasks", "ntasks-per-node", "signal"),
    *("requeue", "no-requeue", "open-mode", "array", "export", "comment", "parsable", "wait"),
)
"""sbatch options that only ingot sets."""


class SlurmLauncher(SignalsByNote):
    """`launch.slurm`, driven from a node of the cluster."""

    poll_s = 3.0
    shares_disk, paid_by_use = True, False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self._knobs = recipe, recipe.launch.slurm

    def can(self, job: Job) -> list[str]:
        """See `Launcher`."""
        try:
            return self._reasons(job)
        except IngotError as error:
            return [str(error)]

    def _reasons(self, job: Job) -> list[str]:
        """Raises Failed if the cluster does not answer, which says nothing about the job."""
        knobs, reasons = self._knobs, shared_disk_reasons(self.recipe, job)
        reasons += [
            f"launch.slurm.options.{name} is set by ingot itself; leave it out"
            for name in knobs.options
            if name in OWN_OPTIONS
        ]
        reasons += slurm_cluster.share_reasons(knobs, job.processes)
        if self.recipe.launch.code == "sync":
            reasons.append(
                "launch.code=sync copies by ssh; on Slurm the nodes see our disk: use installed, or"
                " image with launch.slurm.image"
            )
        if self.recipe.launch.code == "image" and knobs.image is None:
            reasons.append("launch.code=image needs launch.slurm.image")
        if knobs.time is not None and knobs.time <= knobs.signal_s:
            reasons.append(
                f"launch.slurm.time {knobs.time:g} s is no longer than launch.slurm.signal_s"
                f" {knobs.signal_s} s, at which ranks are told to stop"
            )
        if not slurm_cluster.is_installed():
            return [*reasons, "sbatch is not installed here; log in to a node of the Slurm cluster"]
        # Errors that hold on any cluster are reported before this one is queried.
        return reasons or slurm_cluster.cluster_reasons(
            knobs.partition, job.nodes, self._limit_s(job)
        )

    def _limit_s(self, job: Job) -> float | None:
        limits = [limit for limit in (self._knobs.time, job.time_limit_s) if limit is not None]
        return min(limits) if limits else None

    def render(self, job: Job) -> str:
        """See `Launcher`: the script for sbatch."""
        job = with_named_secrets(self.recipe, job)
        logs = Path(working_folder(self.recipe), path_on_nodes(self.recipe.folder.logs))
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH --{option}" for option in self._sbatch_options(job, logs)),
        ]
        rendezvous = shlex.quote(path_on_nodes(job.rendezvous))
        lines += [
            "# Of several requests of this start, as of one without an answer, the last one works.",
            f"current=$(cat {rendezvous}/{CURRENT} 2>/dev/null)",
            'if [ "${current:-$1}" != "$1" ]; then echo "ingot: $1 was given up"; exit 0; fi',
        ]
        lines += [
            f"export {name}={shlex.quote(value)}"
            for name, value in node_variables(self.recipe, job).items()
        ]
        if job.nodes > 1:
            lines += [
                'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                (
                    'export PET_MASTER_ADDR=$(scontrol -o show node "$head" | sed -n \'s/.*'
                    " NodeAddr=\\([^ ]*\\).*/\\1/p')"
                ),
            ]
        note = json.dumps({"number": int(signal.SIGUSR1), "ranks": None, "by": KIND})
        lines += [
            (
                "# Shortly before the time limit the ranks are told so by a note: a signal of srun"
                " would reach all their helpers too."
            ),
            "tell() {",
            f"  note={rendezvous}/{SIGNAL}-$(date +%s%N)",
            f"""  echo '{note}' > "$note.partial" && mv "$note.partial" "$note.json\"""",
            "}",
            "trap tell USR1",
            f"{shlex.join(self._srun(job))} &",
            "srun=$!",
            "wait $srun; code=$?",
            "while kill -0 $srun 2>/dev/null; do wait $srun; code=$?; done",
            "exit $code",
        ]
        return "\n".join(lines) + "\n"

    def _srun(self, job: Job) -> list[str]:
        """The command that starts the nodes. The single task of a node gets all cores that the job
        has there, and losing a node ends the job.
        """
        launch = self.recipe.launch
        python = launch.python or "python3" if self._knobs.image else interpreter(self.recipe)
        secrets = f"{path_on_nodes(job.rendezvous)}/secrets-{{node}}.json"
        options = ["--environment", secrets] if job.secrets else []
        node = shlex.join(shared_disk_command(self.recipe, job, python, *options))
        return [
            "srun",
            "--export=ALL",
            "--ntasks-per-node=1",
            "--cpu-bind=none",
            "--kill-on-bad-exit=1",
            *self._container_options(),
            "bash",
            "-c",
            f"PET_NODE_RANK=$SLURM_NODEID exec {node}",
        ]

    def _sbatch_options(self, job: Job, logs: Path) -> list[str]:
        knobs, limit_s = self._knobs, self._limit_s(job)
        # A verb that needs no accelerator only gets the node's share of cores.
        gpus = None if job.name in UNACCELERATED else knobs.gpus
        options: dict[str, str | None] = {
            "job-name": f"ingot-{self.recipe.name}-{job.name}",
            "account": knobs.account,
            "partition": knobs.partition,
            "time": slurm_cluster.format_time(limit_s) if limit_s else None,
            "nodes": str(job.nodes),
            "ntasks-per-node": "1",
            "gpus-per-node": None if gpus is None else str(gpus),
            **slurm_cluster.node_share(knobs, job.nodes),
            "signal": f"B:USR1@{knobs.signal_s}",
            "no-requeue": "",
            # A path of a user may hold a %, which Slurm would read as one of its own patterns.
            "output": str(logs).replace("%", "%%") + f"/slurm-{job.name}-%j.log",
            "open-mode": "append",
            "export": "ALL",
            "chdir": working_folder(self.recipe),
        }
        return [
            name if value == "" else f"{name}={_quoted(value)}"
            for name, value in {**options, **knobs.options}.items()
            if value is not None
        ]

    def _container_options(self) -> list[str]:
        """Flags of the pyxis plugin: the working directory and the run folder have the same paths
        inside the container.
        """
        if self._knobs.image is None:
            return []
        folder = working_folder(self.recipe)
        root = Path(folder, path_on_nodes(self.recipe.folder.root))
        own = [folder, *([] if root.is_relative_to(folder) else [str(root)])]
        mounts = [*(f"{path}:{path}" for path in own), *self._knobs.mounts]
        return [
            f"--container-image={self._knobs.image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={folder}",
        ]

    def submit(self, job: Job) -> Handle:
        """Submit the job, unless the very same command is already running without a supervisor;
        that job is then adopted.

        Raises:
            WrongInput: the cluster cannot run it.
            Failed: the controller does not answer or refuses; another command of this run is queued
                or running.
        """
        if reasons := self._reasons(job):
            raise WrongInput(f"{job.name} cannot run on Slurm: {'; '.join(reasons)}")
        job = with_named_secrets(self.recipe, job)
        self._settle_submissions(job)
        if (running := self._already_running(job)) is not None:
            return running
        rendezvous = Path(job.rendezvous)
        write_atomic(rendezvous / "slurm.sh", self.render(job))
        self.recipe.folder.logs.mkdir(parents=True, exist_ok=True)
        for node in range(job.nodes if job.secrets else 0):
            write_secrets(rendezvous / f"secrets-{node}.json", secret_values(job))
        about = {"meet": str(rendezvous), "nodes": str(job.nodes)}
        unnumbered = Handle(job.name, KIND, "", job.argv, time.time(), "", about)
        store_recipe(self.recipe.folder.root, unnumbered, self.recipe)
        return self._store_numbered(*self._sbatch(job, unnumbered))

    def _sbatch(self, job: Job, unnumbered: Handle) -> tuple[Handle, str]:
        """Submit, and return the handle with the submission's token, and the job's number. If the
        answer was lost, the job is looked up before it is submitted again under a new token, with
        which the old one no longer works, so that it never runs twice.
        """
        rendezvous, environ = Path(unnumbered.about["meet"]), self._sbatch_environment(job)
        script = str(rendezvous / "slurm.sh")
        for _ in range(SUBMIT_TRIES):
            token = f"ingot-{uuid.uuid4()}"
            handle = replace(unnumbered, about={**unnumbered.about, "token": token})
            write_atomic(rendezvous / TOKEN, handle.to_json())
            write_atomic(rendezvous / CURRENT, token)
            command = ("sbatch", "--parsable", f"--comment={token}", script, token)
            try:
                output = slurm_cluster.run_command(*command, environ=environ)
                return handle, output.strip().partition(";")[0]
            except NoAnswer as error:
                trouble = str(error)
                say(f"warning: {trouble}")
            except IngotError:
                remove_secrets(rendezvous)
                (rendezvous / TOKEN).unlink()
                # An earlier request of ours, without an answer, may be carried out still.
                write_atomic(rendezvous / CURRENT, NO_REQUEST)
                raise
            time.sleep(RETRY_S)
            try:
                if (number := slurm_cluster.job_with_comment(token, getpass.getuser())) is not None:
                    return handle, number
            except Failed as error:
                trouble = str(error)
                break
        # It may run nevertheless, and its nodes then need the secrets.
        raise NoAnswer(
            f"{trouble}; whether {job.name} was submitted is unknown: the same command asks that"
            " first"
        )

    def _sbatch_environment(self, job: Job) -> dict[str, str]:
        """The environment without variables that would override the script or the new job's own,
        and without secrets.
        """
        own = {option.partition("=")[0] for option in self._sbatch_options(job, Path())}
        own.update(OWN_OPTIONS, MEMORY_OPTIONS if "mem" in own else ())
        return slurm_cluster.environment_of_job(own, job.secrets)

    def _settle_submissions(self, job: Job) -> None:
        """Resolve submissions of this verb whose answer was lost. Raises NoAnswer as long as the
        cluster does not answer.
        """
        for path in Path(job.rendezvous).parent.glob(f"{job.name}-*/{TOKEN}"):
            unnumbered = Handle.from_json(path.read_text(encoding="utf-8"))
            number = slurm_cluster.job_with_comment(unnumbered.about["token"], getpass.getuser())
            if number is not None:
                self._store_numbered(unnumbered, number)
            else:
                write_atomic(path.parent / CURRENT, NO_REQUEST)  # it may be carried out still
                remove_secrets(path.parent)
                path.unlink()

    def _store_numbered(self, unnumbered: Handle, number: str) -> Handle:
        """Store the handle of a job whose number is now known."""
        log = self.recipe.folder.logs.absolute() / f"slurm-{unnumbered.name}-{number}.log"
        handle = replace(unnumbered, id=number, log=str(log))
        try:
            store_handle(self.recipe.folder.root, handle)
        except BaseException:
            self.cancel(handle)
            raise
        Path(handle.about["meet"], TOKEN).unlink(missing_ok=True)
        return handle

    def _already_running(self, job: Job) -> Handle | None:
        """The job that already runs the same command. Raises Failed if a job of this name runs a
        different one.
        """
        root = self.recipe.folder.root
        known = find_handle(root, job.name, KIND)
        if known is None:
            return None
        if (known.about["meet"], known.argv) == (job.rendezvous, job.argv):
            return known  # this very start, whose answer was lost
        if (state := self.status(known)) in FINAL_STATES:
            return None
        check_same_work(root, known, state, job, self.recipe)
        say(
            f"{job.name}: Slurm job {known.id}, submitted"
            f" {duration(time.time() - known.started)} ago, is {state} and is watched from here"
            " again"
        )
        return known

    def status(self, handle: Handle) -> JobState:
        """See `Launcher`. Slurm reports a node that exits with 75 as failed, so the nodes' notes
        decide about failures, and also when Slurm no longer knows the job.
        """
        fields = slurm_cluster.job_fields(handle.id)
        state: JobState = (
            "failed"
            if fields is None
            else slurm_cluster.STATES.get(fields.get("JobState", ""), "unknown")
        )
        if state == "failed":
            state = state_by_notes(Rendezvous.of(handle), int(handle.about["nodes"]))
        if state in FINAL_STATES:
            remove_secrets(Path(handle.about["meet"]))
        return state

    def log(self, handle: Handle) -> JobLog:
        """See `Launcher`."""
        return FileLog(lambda: [Path(handle.log)])

    def cancel(self, handle: Handle) -> None:
        """scancel, and wait until the job is gone. Raises Failed if it stays."""
        deadline, asked = time.monotonic() + CANCEL_TIMEOUT_S, False
        while time.monotonic() < deadline:
            with contextlib.suppress(NoAnswer):
                if self.status(handle) in FINAL_STATES:
                    return
                if not asked:
                    slurm_cluster.run_command("scancel", handle.id)
                    asked = True
            time.sleep(0.5)
        raise Failed(
            f"Slurm job {handle.id} is not gone {CANCEL_TIMEOUT_S:g} s after scancel: see its state"
            f" and nodes (`scontrol show job {handle.id}`), and have a node whose processes cannot"
            " be ended set down (`scontrol update NodeName=... State=DOWN Reason=...`); then cancel"
            " once more"
        )


def _quoted(value: str) -> str:
    """Quoted for an sbatch line, whose rest is read as one value."""
    return shlex.quote(value) if any(character in value for character in " '\"\\#") else value
