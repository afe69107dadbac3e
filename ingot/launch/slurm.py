"""A Slurm cluster: one job for one start, its nodes by srun. The job goes on when this process dies; the next command finds it.

Slurm's own requeue is off: supervise submits a new job. The nodes share our disk; signals go as notes, since Slurm's own reach every process of
a step and not the ranks alone. Secrets lie in files for their owner alone until the nodes have read them, and never in what Slurm stores.
"""

from __future__ import annotations

import contextlib
import difflib
import getpass
import json
import os
import shlex
import signal
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.progress import duration, say
from ingot.base.storage import write_atomic
from ingot.config.recipe import Recipe
from ingot.launch import cluster
from ingot.launch.cluster import Partition, Unanswered
from ingot.launch.handles import find, store
from ingot.launch.job import OVER, Handle, Job, Log, State
from ingot.launch.meeting import SIGNAL, Meeting
from ingot.launch.remote import FileLog
from ingot.launch.shared import folder, node_argv, refused, secrets, seen, told_by_nodes, variables
from ingot.launch.shared import interpreter as own_interpreter

KIND = "slurm"
TRIES, TRY_AGAIN_S = 5, 3.0
CORES = ("exclusive", "cpus-per-task", "cpus-per-gpu", "mincpus", "cores-per-socket")
"""Options of sbatch by which a person says how many cores a node gives."""
OURS = ("job-name", "output", "error", "chdir", "nodes", "ntasks", "ntasks-per-node", "signal", "requeue", "no-requeue", "open-mode", "array", "export",
        "comment", "parsable", "wait")
"""Options that are ours to set."""


class SlurmLauncher:
    """`launch.slurm`, asked from a node of the cluster."""

    look_s = 3.0

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self._knobs = recipe, recipe.launch.slurm

    def can(self, job: Job) -> list[str]:
        knobs, reasons = self._knobs, refused(self.recipe, job)
        reasons += [f"launch.slurm.options.{name} is set by ingot itself; leave it out" for name in knobs.options if name in OURS]
        if self.recipe.launch.code == "sync":
            reasons.append("launch.code=sync copies by ssh; on Slurm the nodes see our disk: use installed, or image with launch.slurm.image")
        if self.recipe.launch.code == "image" and knobs.image is None:
            reasons.append("launch.code=image needs launch.slurm.image")
        if knobs.time is not None and knobs.time <= knobs.signal_s:
            reasons.append(f"launch.slurm.time {knobs.time:g} s is no longer than launch.slurm.signal_s {knobs.signal_s} s, at which ranks are told to stop")
        if not cluster.installed():
            return [*reasons, "sbatch is not installed here; log in to a node of the Slurm cluster"]
        try:
            return reasons + self._cluster_refuses(job)
        except IngotError as error:
            return [*reasons, str(error)]

    def _cluster_refuses(self, job: Job) -> list[str]:
        if (found := cluster.version()) < cluster.OLDEST:
            return [f"Slurm {found[0]}.{found[1]:02d} is too old; {cluster.OLDEST[0]}.{cluster.OLDEST[1]} or newer is needed"]
        partitions = {partition.name: partition for partition in cluster.partitions()}
        name = self._knobs.partition or next((each.name for each in partitions.values() if each.is_default), None)
        if name is None:
            return [f"the cluster has no default partition; set launch.slurm.partition to one of {', '.join(partitions)}"]
        reasons = []
        for one in name.split(","):
            if one not in partitions:
                near = difflib.get_close_matches(one, partitions, 1, 0.0)
                reasons.append(f"launch.slurm.partition {one} is unknown; there are {', '.join(partitions)}{f'; nearest: {near[0]}' if near else ''}")
            else:
                reasons += _beyond(partitions[one], job.nodes, self._limit(job))
        return reasons

    def _limit(self, job: Job) -> float | None:
        limits = [limit for limit in (self._knobs.time, job.time_limit_s) if limit is not None]
        return min(limits) if limits else None

    def render(self, job: Job) -> str:
        """The script that sbatch gets."""
        launch, run = self.recipe.launch, self.recipe.folder
        lines = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in self._options(job, Path(folder(self.recipe), seen(run.logs))))]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in variables(self.recipe, job).items()]
        if job.nodes > 1:
            lines += [
                'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                "export PET_MASTER_ADDR=$(scontrol -o show node \"$head\" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')",
            ]
        meet = shlex.quote(seen(job.meet or ""))
        handed = ["--environment", f"{seen(job.meet or '')}/secrets-{{node}}.json"] if job.secrets else []
        python = launch.python or "python3" if self._knobs.image else own_interpreter(self.recipe)
        node = shlex.join(node_argv(self.recipe, job, python, *handed))
        lines += [
            "# Shortly before the time limit the ranks are told so by a note: a signal of srun would reach all their helpers too.",
            "tell() {",
            f"  note={meet}/{SIGNAL}-$(date +%s%N)",
            f"""  echo '{json.dumps({"number": int(signal.SIGUSR1), "rank": None, "by": KIND})}' > "$note.partial" && mv "$note.partial" "$note.json\"""",
            "}",
            "trap tell USR1",
            # The one task of a node gets all cores that the job has there, and a node that is lost ends the job.
            shlex.join(["srun", "--export=ALL", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1", *self._container(), "bash", "-c",
                        f"PET_NODE_RANK=$SLURM_NODEID exec {node}"]) + " &",
            "srun=$!",
            "wait $srun; code=$?",
            "while kill -0 $srun 2>/dev/null; do wait $srun; code=$?; done",
            "exit $code",
        ]
        return "\n".join(lines) + "\n"

    def _options(self, job: Job, logs: Path) -> list[str]:
        knobs, limit = self._knobs, self._limit(job)
        options: dict[str, str | None] = {
            "job-name": f"ingot-{self.recipe.name}-{job.name}", "account": knobs.account, "partition": knobs.partition,
            "time": cluster.written(limit) if limit else None, "nodes": str(job.nodes), "ntasks-per-node": "1",
            "gpus-per-node": str(knobs.gpus) if knobs.gpus is not None else None, "signal": f"B:USR1@{knobs.signal_s}", "no-requeue": "",
            "output": str(logs / f"slurm-{job.name}-%j.log"), "open-mode": "append", "export": "ALL", "chdir": folder(self.recipe),
        }
        # sbatch gives a task one core unless it is told otherwise: several nodes, or nodes without counted devices, are taken whole.
        if not any(name in knobs.options for name in CORES) and (knobs.gpus is None or job.nodes > 1):
            options["exclusive"] = ""
        return [name if value == "" else f"{name}={_quoted(value)}" for name, value in {**options, **knobs.options}.items() if value is not None]

    def _container(self) -> list[str]:
        """Flags of the pyxis plugin: the working folder and the run folder are seen under their own names."""
        if self._knobs.image is None:
            return []
        here = folder(self.recipe)
        root = Path(here, seen(self.recipe.folder.root))
        own = [here, *([] if root.is_relative_to(here) else [str(root)])]
        mounts = [*(f"{path}:{path}" for path in own), *self._knobs.mounts]
        return [f"--container-image={self._knobs.image}", f"--container-mounts={','.join(mounts)}", f"--container-workdir={here}"]

    def submit(self, job: Job) -> Handle:
        """Submit it, unless the very same command runs already: whoever supervised that is gone, and it is taken over.

        Raises:
            WrongInput: the cluster cannot run it.
            Failed: the controller does not answer or refuses; another command of this run is queued or running.
        """
        if reasons := self.can(job):
            raise WrongInput(f"{job.name} cannot run on Slurm: {'; '.join(reasons)}")
        root = self.recipe.folder.root
        if (old := find(root, job.name, KIND)) is not None and (state := self.status(old)) not in OVER:
            if old.argv == job.argv and "--fresh" not in job.argv:
                say(f"{job.name}: Slurm job {old.id}, submitted {duration(time.time() - old.started)} ago, is {state} and is watched from here again")
                return old
            raise Failed(f"{job.name} is {state} already as Slurm job {old.id} with other arguments; wait for it, or `ingot launch cancel {root}`")
        meet = Path(job.meet or "")
        script = meet / "slurm.sh"
        write_atomic(script, self.render(job))
        self.recipe.folder.logs.mkdir(parents=True, exist_ok=True)
        for node in range(job.nodes if job.secrets else 0):
            _leave_secrets(meet / f"secrets-{node}.json", secrets(job))
        try:
            number = self._sbatch(job, script)
        except BaseException:
            _forget_secrets(meet)
            raise
        log = self.recipe.folder.logs.absolute() / f"slurm-{job.name}-{number}.log"
        handle = Handle(job.name, KIND, number, job.argv, time.time(), str(log), {"meet": str(meet), "nodes": str(job.nodes)})
        try:
            return store(root, handle, self.recipe)
        except BaseException:
            self.cancel(handle)
            raise

    def _sbatch(self, job: Job, script: Path) -> str:
        """The number of the job. A lost answer is looked for before it is asked again, so that there is one job and not two."""
        token = f"ingot-{uuid.uuid4()}"
        # What is exported is kept by Slurm in its spool folders.
        environ = {name: value for name, value in os.environ.items() if name not in job.secrets}
        for left in range(TRIES - 1, -1, -1):
            try:
                return cluster.ask("sbatch", "--parsable", f"--comment={token}", str(script), environ=environ).strip().partition(";")[0]
            except Unanswered as error:
                say(f"warning: {error}")
                time.sleep(TRY_AGAIN_S)
                with contextlib.suppress(Unanswered):
                    if (number := cluster.commented(token, getpass.getuser())) is not None:
                        return number
                    if left:
                        continue
                raise Failed(f"{error}; whether {job.name} was submitted is unknown: see `squeue --me`, then run the same command again") from None
        raise AssertionError("the last try returns or raises")

    def status(self, handle: Handle) -> State:
        about = cluster.job(handle.id)
        # One that exits with 75 has failed by Slurm's word; the nodes know better. So they do when it has forgotten the job.
        state = "failed" if about is None else cluster.STATES.get(about.get("JobState", ""), "unknown")
        if state == "failed":
            state = told_by_nodes(handle.about["meet"], int(handle.about["nodes"]))
        if state in OVER:
            _forget_secrets(Path(handle.about["meet"]))
        return state

    def log(self, handle: Handle) -> Log:
        return FileLog(lambda: [Path(handle.log)])

    def signal(self, handle: Handle, number: int) -> None:
        Meeting(handle.about["meet"]).send(number)

    def cancel(self, handle: Handle) -> None:
        """scancel, and wait until the job is gone: its ranks have Slurm's KillWait to save a checkpoint."""
        if self.status(handle) in OVER:
            return
        cluster.ask("scancel", handle.id)
        while self.status(handle) not in OVER:
            time.sleep(0.5)


def _beyond(partition: Partition, nodes: int, limit_s: float | None) -> list[str]:
    """What a partition does not allow."""
    reasons = []
    most = min(partition.nodes, partition.most_nodes or partition.nodes)
    if nodes > most:
        reasons.append(f"launch.nodes={nodes} and partition {partition.name} gives {most}; lower it, or choose another launch.slurm.partition")
    if limit_s is not None and partition.seconds is not None and limit_s > partition.seconds:
        reasons.append(f"launch.slurm.time {duration(limit_s)} is beyond the limit of partition {partition.name}, {duration(partition.seconds)}")
    return reasons


def _quoted(value: str) -> str:
    """As sbatch reads the rest of a line."""
    return shlex.quote(value) if any(character in value for character in " '\"\\#") else value


def _leave_secrets(path: Path, values: Mapping[str, str]) -> None:
    """For one node, which removes it when it has read it."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
        json.dump(dict(values), stream)


def _forget_secrets(meet: Path) -> None:
    for path in meet.glob("secrets-*.json"):
        path.unlink(missing_ok=True)
