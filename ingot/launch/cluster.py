"""Slurm's own commands: asked, and their answers understood. No policy here."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.base.errors import Failed, WrongInput
from ingot.launch.job import State

ASK_S = 60.0
OLDEST = (20, 11)
"""Earlier ones give the steps of a job other cores and signals."""
STATES: Mapping[str, State] = {
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
    "STOPPED": "running",
    "SUSPENDED": "running",
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
"""Slurm's states of a job, as ours."""
VARIABLES = {
    "time": "TIMELIMIT",
    "array": "ARRAY_INX",
    "mem": "MEM_PER_NODE",
    "switches": "REQ_SWITCH",
}
"""Options of sbatch whose variables have other names than they."""
NO_SUCH_JOB = "Invalid job id"
LOST = (
    "timed out",
    "Unable to contact",
    "Zero Bytes were transmitted",
    "Communication",
    "Connection",
    "Unexpected message",
)
"""What says that no answer came, and nothing about what was done."""


class Unanswered(Failed):
    """The controller gave no answer: it may have done what it was asked, or not."""


@dataclass(frozen=True)
class Partition:
    """`seconds`: its longest time limit, None for none."""

    name: str
    nodes: int
    most_nodes: int | None
    seconds: float | None
    is_default: bool


def installed() -> bool:
    return shutil.which("sbatch") is not None


def version() -> tuple[int, int]:
    found = re.search(r"(\d+)\.(\d+)", ask("sbatch", "--version"))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def ask(*command: str, environ: Mapping[str, str] | None = None) -> str:
    """What a command prints. Raises Failed with its own words, Unanswered where the controller did
    not answer.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=ASK_S,
            env=environ,
            check=False,
        )
    except FileNotFoundError:
        raise WrongInput(
            f"{command[0]} is not installed here; log in to a node of the Slurm cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise Unanswered(
            f"{command[0]} did not answer within {ASK_S:g} s; see whether Slurm's controller is up"
            " (`scontrol ping`)"
        ) from None
    if done.returncode == 0:
        return done.stdout
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    words = (
        (said[-1] if said else f"exit {done.returncode}")
        .removeprefix(f"{command[0]}: ")
        .removeprefix("error: ")
        .removeprefix("fatal: ")
    )
    if any(lost in done.stderr for lost in LOST):
        raise Unanswered(
            f"{command[0]}: {words}; see whether Slurm's controller is up (`scontrol ping`)"
        )
    raise Failed(f"{command[0]}: {words}")


def variable(option: str) -> str:
    """The variable by which a person's environment overrides an option of a script."""
    return f"SBATCH_{VARIABLES.get(option, option.upper().replace('-', '_'))}"


def partitions() -> list[Partition]:
    found = []
    for line in ask("scontrol", "-o", "show", "partition").splitlines():
        about = _fields(line)
        if "PartitionName" in about:
            most = about.get("MaxNodes", "UNLIMITED")
            found.append(
                Partition(
                    about["PartitionName"],
                    int(about.get("TotalNodes", "0")),
                    int(most) if most.isdecimal() else None,
                    seconds(about.get("MaxTime", "UNLIMITED")),
                    about.get("Default") == "YES",
                )
            )
    return found


def job(number: str) -> dict[str, str] | None:
    """What the controller knows of a job; None when it has forgotten it."""
    try:
        return _fields(ask("scontrol", "-o", "show", "job", number).splitlines()[0])
    except Unanswered:
        raise
    except (Failed, IndexError) as error:
        if NO_SUCH_JOB in str(error) or isinstance(error, IndexError):
            return None
        raise


def commented(comment: str, user: str) -> str | None:
    """The number of the job that was submitted with this comment."""
    for line in ask(
        "squeue", "--noheader", "--states=all", f"--user={user}", "--format=%A|%k"
    ).splitlines():
        number, _, words = line.partition("|")
        if words.strip() == comment:
            return number.strip()
    return None


def seconds(limit: str) -> float | None:
    """Slurm's way to write a time: `D-HH:MM:SS`, or `UNLIMITED`."""
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


def written(limit_s: float) -> str:
    """The same the other way; whole minutes are all that Slurm counts, so that less than one is
    rounded up by it.
    """
    whole = round(limit_s)
    return (
        f"{whole // 86_400}-{whole % 86_400 // 3600:02d}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    )


def _fields(line: str) -> dict[str, str]:
    pairs: Sequence[tuple[str, str]] = re.findall(
        r"(?:^|\s)([A-Za-z/:_]+)=(.*?)(?=\s[A-Za-z/:_]+=|\s*$)", line
    )
    return dict(pairs)
