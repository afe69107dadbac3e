"""Slurm's commands and the meaning of their answers: partitions, jobs, time limits; and the share
of a node that is requested. `slurm.py` adds everything else.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ingot.base.environment import holds_secret
from ingot.base.errors import Failed, WrongInput, differing
from ingot.base.masking import masked
from ingot.base.progress import duration, say
from ingot.config.sections.launch import Slurm
from ingot.config.values import PREFIX
from ingot.launch.job import JobState

COMMAND_TIMEOUT_S = 60.0
OLDEST = (20, 11)
"""Earlier versions assign cores and signals to a job's steps differently."""
STATES: Mapping[str, JobState] = {
    "PENDING": "queued",
    "CONFIGURING": "queued",
    "REQUEUED": "queued",
    "REQUEUE_FED": "queued",
    "REQUEUE_HOLD": "queued",
    "SPECIAL_EXIT": "queued",
    "RESV_DEL_HOLD": "queued",
    "RUNNING": "running",
    "COMPLETING": "running",
    "RESIZING": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "STOPPED": "suspended",
    "SUSPENDED": "suspended",
    "COMPLETED": "succeeded",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "FAILED": "failed",
    "OUT_OF_MEMORY": "failed",
    "BOOT_FAIL": "preempted",
    "NODE_FAIL": "preempted",
    "PREEMPTED": "preempted",
    "TIMEOUT": "preempted",
    "DEADLINE": "failed",
}
"""Slurm's job states mapped to ours."""
VARIABLES = {
    "time": "TIMELIMIT",
    "array": "ARRAY_INX",
    "mem": "MEM_PER_NODE",
    "switches": "REQ_SWITCH",
}
"""Options of sbatch whose environment variables have different names."""
CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")
"""Variables that tell Slurm's commands which cluster to ask. Not `SLURM_JWT`, by which a cluster
knows who asks: sbatch would store it with the job.
"""
CORE_OPTIONS = ("exclusive", "cpus-per-task", "cpus-per-gpu", "mincpus", "cores-per-socket")
"""Options of sbatch with which a user sets the cores per node."""
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
"""The same for memory. A job without either gets the cluster's default, which is often one core and
a few GB.
"""
CORES_PER_GPU, MEMORY_PER_CORE_GB = 8, 8
"""What is requested for a part of a node: a machine with eight GPUs has some 100 cores and 1 TB."""
NO_SUCH_JOB = "Invalid job id"
NO_ANSWER = (
    "timed out",
    "Unable to contact",
    "Zero Bytes were transmitted",
    "Communication",
    "Connection",
    "Unexpected message",
)
"""Error texts that mean that no answer arrived, whatever was done."""


class NoAnswer(Failed):
    """The controller gave no answer: the request may or may not have been executed."""


@dataclass(frozen=True)
class Partition:
    """`limit_s`: its longest time limit, None if unlimited."""

    name: str
    nodes: int
    max_nodes: int | None
    limit_s: float | None
    is_default: bool


def is_installed() -> bool:
    return shutil.which("sbatch") is not None


def run_command(*command: str, environ: Mapping[str, str] | None = None) -> str:
    """The output of a command. Raises Failed with the command's own error, NoAnswer if the
    controller did not answer.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=COMMAND_TIMEOUT_S,
            env=environ,
            check=False,
        )
    except FileNotFoundError:
        raise WrongInput(
            f"{command[0]} is not installed here; log in to a node of the Slurm cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(
            f"{command[0]} did not answer within {COMMAND_TIMEOUT_S:g} s; see whether Slurm's"
            " controller is up (`scontrol ping`)"
        ) from None
    if done.returncode == 0:
        return done.stdout
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    error = lines[-1] if lines else f"exit {done.returncode}"
    for prefix in (f"{command[0]}: ", "error: ", "fatal: "):
        error = error.removeprefix(prefix)
    if any(text in done.stderr for text in NO_ANSWER):
        raise NoAnswer(
            f"{command[0]}: {error}; see whether Slurm's controller is up (`scontrol ping`)"
        )
    raise Failed(f"{command[0]}: {error}")


def version() -> tuple[int, int]:
    found = re.search(r"(\d+)\.(\d+)", run_command("sbatch", "--version"))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def environment_variable(option: str) -> str:
    """The environment variable that overrides an option of a script."""
    return f"SBATCH_{VARIABLES.get(option, option.upper().replace('-', '_'))}"


def is_of_this_job(name: str) -> bool:
    """Whether a variable describes the job that this process runs in, such as the nodes and memory
    of an interactive session. In a job submitted from there they would contradict its own.
    """
    return name.startswith(("SLURM_", "SRUN_")) and name not in CLUSTER_VARIABLES


def environment_of_job(options: Collection[str], secrets: Collection[str]) -> dict[str, str]:
    """This process's variables for sbatch, but for those that would override `options` of the
    script, and those of knobs, which stand in the job's recipe. `secrets` stay here, since Slurm
    keeps exported variables in its spool folders, and so does a variable named like one: ranks get
    it only through `launch.secrets`. A login or a key in an address is told: a job may need it, as
    that of a proxy.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    unasked = sorted(name for name in environ if holds_secret(name) and name not in secrets)
    if unasked:
        say(
            f"note: {', '.join(unasked)} stays here, since Slurm stores what a job is given; a job"
            f" that needs it gets it by launch.secrets=[{unasked[0]}]"
        )
    left_out = {*secrets, *unasked, *map(environment_variable, options)}
    given = {
        name: value
        for name, value in environ.items()
        if name not in left_out and not is_of_this_job(name)
    }
    if stored := sorted(name for name, value in given.items() if masked(value) != value):
        say(
            f"note: {', '.join(stored)} has a login or a key in an address, which Slurm stores with"
            f" the job; launch.secrets=[{stored[0]}] hands it on unseen"
        )
    return given


def partitions() -> list[Partition]:
    found = []
    for line in run_command("scontrol", "-o", "show", "partition").splitlines():
        fields = _fields(line)
        if "PartitionName" in fields:
            most = fields.get("MaxNodes", "UNLIMITED")
            found.append(
                Partition(
                    fields["PartitionName"],
                    int(fields.get("TotalNodes", "0")),
                    int(most) if most.isdecimal() else None,
                    parse_time(fields.get("MaxTime", "UNLIMITED")),
                    fields.get("Default") == "YES",
                )
            )
    return found


def cluster_reasons(partition: str | None, nodes: int, limit_s: float | None) -> list[str]:
    """Why this cluster could not run a job of this many nodes in `partition`; None is the partition
    of the environment, or the default one.
    """
    if (found := version()) < OLDEST:
        return [
            f"Slurm {found[0]}.{found[1]:02d} is too old; {OLDEST[0]}.{OLDEST[1]} or newer is"
            " needed"
        ]
    known = {each.name: each for each in partitions()}
    knob = "launch.slurm.partition" if partition else "SBATCH_PARTITION"
    default = next((each.name for each in known.values() if each.is_default), None)
    names = partition or os.environ.get("SBATCH_PARTITION") or default
    if names is None:
        return [
            "the cluster has no default partition; set launch.slurm.partition to one of"
            f" {', '.join(known)}"
        ]
    reasons = []
    for name in names.split(","):
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)
            reasons.append(
                f"{knob} {name} is unknown; there are"
                f" {', '.join(known)}{f'; nearest: {near[0]}' if near else ''}"
            )
        else:
            reasons += _partition_reasons(known[name], nodes, limit_s)
    return reasons


def _partition_reasons(partition: Partition, nodes: int, limit_s: float | None) -> list[str]:
    reasons = []
    most = min(partition.nodes, partition.max_nodes or partition.nodes)
    if nodes > most:
        reasons.append(
            f"launch.nodes={nodes} and partition {partition.name} gives {most}; lower it, or choose"
            " another launch.slurm.partition"
        )
    if limit_s is not None and partition.limit_s is not None and limit_s > partition.limit_s:
        asked, most_s = differing(limit_s, partition.limit_s, duration, "{:g}s".format)
        reasons.append(
            f"launch.slurm.time {asked} is beyond the limit of partition {partition.name}, {most_s}"
        )
    return reasons


def share_reasons(knobs: Slurm, processes: int) -> list[str]:
    """Reasons why the resources requested per node are inconsistent."""
    said = (("cpus", knobs.cpus, CORE_OPTIONS), ("memory", knobs.memory, MEMORY_OPTIONS))
    reasons = [
        f"launch.slurm.{knob} {value} and launch.slurm.options.{name} say the same thing; remove"
        " one"
        for knob, value, others in said
        for name in others
        if value is not None and name in knobs.options
    ]
    if knobs.cpus is not None and knobs.cpus < processes:
        reasons.append(
            f"launch.slurm.cpus {knobs.cpus} is fewer than the {processes} processes of a node;"
            " raise it"
        )
    return reasons


def node_share(knobs: Slurm, nodes: int) -> dict[str, str | None]:
    """Options for cores and memory of each node that `launch.slurm.options` does not set: the share
    of the requested GPUs on one node, and otherwise whole nodes.
    """
    cores, whole = knobs.cpus, "exclusive" in knobs.options
    share = CORES_PER_GPU * (knobs.gpus or 0)
    if cores is None and not any(name in knobs.options for name in CORE_OPTIONS):
        whole = nodes > 1 or not share
        cores = None if whole else share
    memory = knobs.memory
    if memory is None and not any(name in knobs.options for name in MEMORY_OPTIONS):
        # --exclusive takes all cores of a node, but not its memory.
        gigabytes = MEMORY_PER_CORE_GB * (cores or share)
        memory = "0" if whole else f"{gigabytes}G" if gigabytes else None
    return {
        "exclusive": "" if whole else None,
        "cpus-per-task": str(cores) if cores is not None else None,
        "mem": memory,
    }


def job_fields(number: str) -> dict[str, str] | None:
    """What the controller knows of a job; None if it no longer knows it."""
    try:
        return _fields(run_command("scontrol", "-o", "show", "job", number).splitlines()[0])
    except NoAnswer:
        raise
    except (Failed, IndexError) as error:
        if NO_SUCH_JOB in str(error) or isinstance(error, IndexError):
            return None
        raise


def job_with_comment(comment: str, user: str) -> str | None:
    """The number of the job that was submitted with this comment."""
    for line in run_command(
        "squeue", "--noheader", "--states=all", f"--user={user}", "--format=%A|%k"
    ).splitlines():
        number, _, text = line.partition("|")
        if text.strip() == comment:
            return number.strip()
    return None


def parse_time(limit: str) -> float | None:
    """Seconds of a time in Slurm's format `D-HH:MM:SS`; None for `UNLIMITED`."""
    days, _, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts):
        return None
    numbers = [int(part) for part in parts]
    if days:  # D-HH, D-HH:MM, D-HH:MM:SS
        numbers += [0] * (3 - len(numbers))
    elif len(numbers) == 1:
        numbers = [0, *numbers, 0]
    hours, minutes, rest = [0] * (3 - len(numbers)) + numbers
    return int(days or 0) * 86_400.0 + hours * 3600 + minutes * 60 + rest


def format_time(limit_s: float) -> str:
    """The inverse of `parse_time`. Slurm counts whole minutes, rounded up."""
    whole = round(limit_s)
    return (
        f"{whole // 86_400}-{whole % 86_400 // 3600:02d}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    )


def _fields(line: str) -> dict[str, str]:
    pairs: Sequence[tuple[str, str]] = re.findall(
        r"(?:^|\s)([A-Za-z/:_]+)=(.*?)(?=\s[A-Za-z/:_]+=|\s*$)", line
    )
    return dict(pairs)
