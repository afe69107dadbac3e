"""A Slurm cluster: one job for one start, its nodes by srun. The job goes on when this process
dies; the next command finds it.

Slurm's own requeue is off: supervise submits a new job. The nodes share our disk; signals go as
notes, since Slurm's own reach every process of a step and not the ranks alone. Secrets lie in files
for their owner alone until the nodes have read them, and never in what Slurm stores.
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
from dataclasses import replace
from pathlib import Path

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.progress import duration, say
from ingot.base.storage import write_atomic
from ingot.config.recipe import Recipe
from ingot.launch import cluster
from ingot.launch.cluster import Partition, Unanswered
from ingot.launch.handles import does_the_work_of, find, keep_recipe, store
from ingot.launch.job import OVER, Handle, Job, Log, State
from ingot.launch.meeting import SIGNAL, Meeting
from ingot.launch.remote import FileLog
from ingot.launch.shared import (
    folder,
    forget_secrets,
    leave_secrets,
    node_argv,
    refused,
    secrets,
    seen,
    told_by_nodes,
    variables,
)
from ingot.launch.shared import interpreter as own_interpreter

KIND = "slurm"
TRIES, TRY_AGAIN_S = 5, 3.0
GONE_S = 300.0
"""How long a job may take to be gone after scancel: its ranks have Slurm's KillWait to save a
checkpoint.
"""
TOKEN = "slurm.token"
"""In the place where a start's nodes meet, from before it is submitted until its number is known:
the handle without one, and what finds it.
"""
CORES = ("exclusive", "cpus-per-task", "cpus-per-gpu", "mincpus", "cores-per-socket")
"""Options of sbatch by which a person says how many cores a node gives."""
OURS = (
    "job-name",
    "output",
    "error",
    "chdir",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "signal",
    "requeue",
    "no-requeue",
    "open-mode",
    "array",
    "export",
    "comment",
    "parsable",
    "wait",
)
"""Options that are ours to set."""


class SlurmLauncher:
    """`launch.slurm`, asked from a node of the cluster."""

    look_s = 3.0

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self._knobs = recipe, recipe.launch.slurm

    def can(self, job: Job) -> list[str]:
        try:
            return self._reasons(job)
        except IngotError as error:
            return [str(error)]

    def _reasons(self, job: Job) -> list[str]:
        """Raises Failed where the cluster does not answer, which is no word about the job."""
        knobs, reasons = self._knobs, refused(self.recipe, job)
        reasons += [
            f"launch.slurm.options.{name} is set by ingot itself; leave it out"
            for name in knobs.options
            if name in OURS
        ]
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
        if not cluster.installed():
            return [*reasons, "sbatch is not installed here; log in to a node of the Slurm cluster"]
        # What is wrong in any case is told before the cluster is asked.
        return reasons or self._cluster_refuses(job)

    def _cluster_refuses(self, job: Job) -> list[str]:
        if (found := cluster.version()) < cluster.OLDEST:
            return [
                f"Slurm {found[0]}.{found[1]:02d} is too old;"
                f" {cluster.OLDEST[0]}.{cluster.OLDEST[1]} or newer is needed"
            ]
        partitions = {partition.name: partition for partition in cluster.partitions()}
        knob, theirs = (
            ("launch.slurm.partition" if self._knobs.partition else "SBATCH_PARTITION"),
            os.environ.get("SBATCH_PARTITION"),
        )
        name = (
            self._knobs.partition
            or theirs
            or next((each.name for each in partitions.values() if each.is_default), None)
        )
        if name is None:
            return [
                "the cluster has no default partition; set launch.slurm.partition to one of"
                f" {', '.join(partitions)}"
            ]
        reasons = []
        for one in name.split(","):
            if one not in partitions:
                near = difflib.get_close_matches(one, partitions, 1, 0.0)
                reasons.append(
                    f"{knob} {one} is unknown; there are"
                    f" {', '.join(partitions)}{f'; nearest: {near[0]}' if near else ''}"
                )
            else:
                reasons += _beyond(partitions[one], job.nodes, self._limit(job))
        return reasons

    def _limit(self, job: Job) -> float | None:
        limits = [limit for limit in (self._knobs.time, job.time_limit_s) if limit is not None]
        return min(limits) if limits else None

    def render(self, job: Job) -> str:
        """The script that sbatch gets."""
        launch, run = self.recipe.launch, self.recipe.folder
        lines = [
            "#!/bin/bash",
            *(
                f"#SBATCH --{option}"
                for option in self._options(job, Path(folder(self.recipe), seen(run.logs)))
            ),
        ]
        lines += [
            f"export {name}={shlex.quote(value)}"
            for name, value in variables(self.recipe, job).items()
        ]
        if job.nodes > 1:
            lines += [
                'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                (
                    'export PET_MASTER_ADDR=$(scontrol -o show node "$head" | sed -n \'s/.*'
                    " NodeAddr=\\([^ ]*\\).*/\\1/p')"
                ),
            ]
        meet = shlex.quote(seen(job.meet or ""))
        handed = (
            ["--environment", f"{seen(job.meet or '')}/secrets-{{node}}.json"]
            if job.secrets
            else []
        )
        python = launch.python or "python3" if self._knobs.image else own_interpreter(self.recipe)
        node = shlex.join(node_argv(self.recipe, job, python, *handed))
        lines += [
            (
                "# Shortly before the time limit the ranks are told so by a note: a signal of srun"
                " would reach all their helpers too."
            ),
            "tell() {",
            f"  note={meet}/{SIGNAL}-$(date +%s%N)",
            f"""  echo '{json.dumps({"number": int(signal.SIGUSR1), "rank": None, "by": KIND})}' > "$note.partial" && mv "$note.partial" "$note.json\"""",
            "}",
            "trap tell USR1",
            # The one task of a node gets all cores that the job has there, and a node that is lost
            # ends the job.
            shlex.join(
                [
                    "srun",
                    "--export=ALL",
                    "--ntasks-per-node=1",
                    "--cpu-bind=none",
                    "--kill-on-bad-exit=1",
                    *self._container(),
                    "bash",
                    "-c",
                    f"PET_NODE_RANK=$SLURM_NODEID exec {node}",
                ]
            )
            + " &",
            "srun=$!",
            "wait $srun; code=$?",
            "while kill -0 $srun 2>/dev/null; do wait $srun; code=$?; done",
            "exit $code",
        ]
        return "\n".join(lines) + "\n"

    def _options(self, job: Job, logs: Path) -> list[str]:
        knobs, limit = self._knobs, self._limit(job)
        options: dict[str, str | None] = {
            "job-name": f"ingot-{self.recipe.name}-{job.name}",
            "account": knobs.account,
            "partition": knobs.partition,
            "time": cluster.written(limit) if limit else None,
            "nodes": str(job.nodes),
            "ntasks-per-node": "1",
            "gpus-per-node": str(knobs.gpus) if knobs.gpus is not None else None,
            "signal": f"B:USR1@{knobs.signal_s}",
            "no-requeue": "",
            "output": str(logs / f"slurm-{job.name}-%j.log"),
            "open-mode": "append",
            "export": "ALL",
            "chdir": folder(self.recipe),
        }
        # sbatch gives a task one core unless it is told otherwise: several nodes, or nodes without
        # counted devices, are taken whole.
        if not any(name in knobs.options for name in CORES) and (
            knobs.gpus is None or job.nodes > 1
        ):
            options["exclusive"] = ""
        return [
            name if value == "" else f"{name}={_quoted(value)}"
            for name, value in {**options, **knobs.options}.items()
            if value is not None
        ]

    def _container(self) -> list[str]:
        """Flags of the pyxis plugin: the working folder and the run folder are seen under their own
        names.
        """
        if self._knobs.image is None:
            return []
        here = folder(self.recipe)
        root = Path(here, seen(self.recipe.folder.root))
        own = [here, *([] if root.is_relative_to(here) else [str(root)])]
        mounts = [*(f"{path}:{path}" for path in own), *self._knobs.mounts]
        return [
            f"--container-image={self._knobs.image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={here}",
        ]

    def submit(self, job: Job) -> Handle:
        """Submit it, unless the very same command runs already: whoever supervised that is gone,
        and it is taken over.

        Raises:
            WrongInput: the cluster cannot run it.
            Failed: the controller does not answer or refuses; another command of this run is queued
                or running.
        """
        if reasons := self._reasons(job):
            raise WrongInput(f"{job.name} cannot run on Slurm: {'; '.join(reasons)}")
        self._settle(job)
        if (old := self._runs_already(job)) is not None:
            return old
        meet = Path(job.meet or "")
        write_atomic(meet / "slurm.sh", self.render(job))
        self.recipe.folder.logs.mkdir(parents=True, exist_ok=True)
        for node in range(job.nodes if job.secrets else 0):
            leave_secrets(meet / f"secrets-{node}.json", secrets(job))
        about = {"meet": str(meet), "nodes": str(job.nodes), "token": f"ingot-{uuid.uuid4()}"}
        unsure = Handle(job.name, KIND, "", job.argv, time.time(), "", about)
        keep_recipe(self.recipe.folder.root, unsure, self.recipe)
        write_atomic(meet / TOKEN, unsure.to_json())
        return self._known(unsure, self._sbatch(job, meet, about["token"]))

    def _sbatch(self, job: Job, meet: Path, token: str) -> str:
        """The number of the job. A lost answer is looked for before it is asked again, so that
        there is one job and not two.
        """
        command = ("sbatch", "--parsable", f"--comment={token}", str(meet / "slurm.sh"))
        for _ in range(TRIES):
            try:
                return cluster.ask(*command, environ=self._environ(job)).strip().partition(";")[0]
            except Unanswered as error:
                told = str(error)
                say(f"warning: {told}")
            except IngotError:
                forget_secrets(meet)
                (meet / TOKEN).unlink()
                raise
            time.sleep(TRY_AGAIN_S)
            try:
                if (number := cluster.commented(token, getpass.getuser())) is not None:
                    return number
            except Failed as error:
                told = str(error)
                break
        # It may run all the same, and its nodes need the secrets then.
        raise Unanswered(
            f"{told}; whether {job.name} was submitted is unknown: the same command asks that first"
        )

    def _environ(self, job: Job) -> dict[str, str]:
        """Of sbatch: without secrets, for Slurm keeps in its spool folders what is exported, and
        without what would override the script.
        """
        ours = (option.partition("=")[0] for option in (*self._options(job, Path()), *OURS))
        without = {*job.secrets, *map(cluster.variable, ours)}
        return {name: value for name, value in os.environ.items() if name not in without}

    def _settle(self, job: Job) -> None:
        """Submissions of this verb whose answer was lost: the cluster is asked what became of them.
        Raises Unanswered as long as it does not say.
        """
        for path in Path(job.meet or "").parent.glob(f"{job.name}-*/{TOKEN}"):
            unsure = Handle.from_json(path.read_text(encoding="utf-8"))
            number = cluster.commented(unsure.about["token"], getpass.getuser())
            if number is not None:
                self._known(unsure, number)
            else:
                forget_secrets(path.parent)
                path.unlink()

    def _known(self, unsure: Handle, number: str) -> Handle:
        """Keep the handle of a job whose number we know now."""
        log = self.recipe.folder.logs.absolute() / f"slurm-{unsure.name}-{number}.log"
        handle = replace(unsure, id=number, log=str(log))
        try:
            store(self.recipe.folder.root, handle)
        except BaseException:
            self.cancel(handle)
            raise
        Path(handle.about["meet"], TOKEN).unlink(missing_ok=True)
        return handle

    def _runs_already(self, job: Job) -> Handle | None:
        """The job that does what is asked for already. Raises Failed where it does something
        else.
        """
        root = self.recipe.folder.root
        old = find(root, job.name, KIND)
        if old is not None and (old.about["meet"], old.argv) == (
            job.meet,
            job.argv,
        ):  # of this very start, whose answer was lost
            return old
        if old is None or (state := self.status(old)) in OVER:
            return None
        if old.argv != job.argv or "--fresh" in job.argv:
            differs = "other arguments"
        elif not does_the_work_of(root, old, self.recipe):
            differs = "another recipe"
        else:
            say(
                f"{job.name}: Slurm job {old.id}, submitted {duration(time.time() - old.started)}"
                f" ago, is {state} and is watched from here again"
            )
            return old
        raise Failed(
            f"{job.name} is {state} already as Slurm job {old.id} with {differs}; wait for it, or"
            f" `ingot launch cancel {root}`"
        )

    def status(self, handle: Handle) -> State:
        about = cluster.job(handle.id)
        # One that exits with 75 has failed by Slurm's word; the nodes know better. So they do when
        # it has forgotten the job.
        state = (
            "failed" if about is None else cluster.STATES.get(about.get("JobState", ""), "unknown")
        )
        if state == "failed":
            state = told_by_nodes(handle.about["meet"], int(handle.about["nodes"]))
        if state in OVER:
            forget_secrets(Path(handle.about["meet"]))
        return state

    def log(self, handle: Handle) -> Log:
        return FileLog(lambda: [Path(handle.log)])

    def signal(self, handle: Handle, number: int) -> None:
        Meeting(handle.about["meet"]).send(number)

    def cancel(self, handle: Handle) -> None:
        """scancel, and wait until the job is gone. Raises Failed where it does not go."""
        until, asked = time.monotonic() + GONE_S, False
        while time.monotonic() < until:
            with contextlib.suppress(Unanswered):
                if self.status(handle) in OVER:
                    return
                if not asked:
                    cluster.ask("scancel", handle.id)
                    asked = True
            time.sleep(0.5)
        raise Failed(
            f"Slurm job {handle.id} is not gone {GONE_S:g} s after scancel: see its state and nodes"
            f" (`scontrol show job {handle.id}`), and have a node whose processes cannot be ended"
            " set down (`scontrol update NodeName=... State=DOWN Reason=...`); then cancel once"
            " more"
        )


def _beyond(partition: Partition, nodes: int, limit_s: float | None) -> list[str]:
    """What a partition does not allow."""
    reasons = []
    most = min(partition.nodes, partition.most_nodes or partition.nodes)
    if nodes > most:
        reasons.append(
            f"launch.nodes={nodes} and partition {partition.name} gives {most}; lower it, or choose"
            " another launch.slurm.partition"
        )
    if limit_s is not None and partition.seconds is not None and limit_s > partition.seconds:
        reasons.append(
            f"launch.slurm.time {duration(limit_s)} is beyond the limit of partition"
            f" {partition.name}, {duration(partition.seconds)}"
        )
    return reasons


def _quoted(value: str) -> str:
    """As sbatch reads the rest of a line."""
    return shlex.quote(value) if any(character in value for character in " '\"\\#") else value
