"""Places whose nodes see our disk (ssh, Slurm): what a node runs, with which variables, and paths
as the nodes see them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ingot.base.errors import EXIT_STOPPED
from ingot.config.recipe import Recipe
from ingot.launch.attempt import WELL
from ingot.launch.job import Job, State
from ingot.launch.meeting import EXIT, Meeting
from ingot.launch.stops import SIGNALS

MEET_SHARE = 0.9
"""Nodes wait for each other so much of `launch.start_s`: their word who did not come is said before
their silence counts as a hang.
"""


def folder(recipe: Recipe) -> str:
    """The working folder on the nodes."""
    return recipe.launch.folder or str(Path.cwd())


def seen(path: str | Path) -> str:
    """A path of ours as the nodes see it: what lies below our working folder lies below theirs."""
    absolute, here = Path(path).absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def node_argv(recipe: Recipe, job: Job, python: str, *options: str) -> list[str]:
    """The command line of a node; it runs in `folder`."""
    meet = [
        "--meet",
        seen(job.meet or ""),
        "--meet-s",
        f"{MEET_SHARE * recipe.launch.start_s:g}",
        "--root",
        seen(recipe.folder.root),
    ]
    return [
        python,
        "-m",
        "ingot.launch.node",
        *meet,
        *options,
        *where_secrets_are(recipe),
        "--",
        *job.argv,
    ]


def where_secrets_are(recipe: Recipe) -> list[str]:
    """The option of a node that reads the secrets of all its ranks. They are named there, and read
    by it alone.
    """
    cloud = recipe.cloud
    return (
        [
            "--cloud",
            cloud.model_dump_json(
                include={"project", "region", "secrets", "endpoint"}, exclude_none=True
            ),
        ]
        if cloud.secrets
        else []
    )


def interpreter(recipe: Recipe) -> str:
    return recipe.launch.python or sys.executable


def variables(recipe: Recipe, job: Job) -> dict[str, str]:
    """What all nodes get, without secrets; PET_NODE_RANK and PET_MASTER_ADDR are not among them."""
    ours = {
        "PET_NNODES": str(job.nodes),
        "PET_NPROC_PER_NODE": str(job.processes),
        "PET_MASTER_PORT": str(recipe.launch.port),
    }
    return {
        name: value
        for name, value in sorted({**job.environment, **ours}.items())
        if name not in job.secrets
    }


def secrets(job: Job) -> dict[str, str]:
    """The values that are handed to nodes and never written into what is rendered."""
    return {name: os.environ[name] for name in job.secrets if name in os.environ}


def leave_secrets(path: Path, values: Mapping[str, str]) -> None:
    """In a file for one node, which removes it when it has read it."""
    path.unlink(missing_ok=True)
    with os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as stream:
        json.dump(dict(values), stream)


def forget_secrets(meet: Path) -> None:
    for path in meet.glob("secrets-*.json"):
        path.unlink(missing_ok=True)


def told_by_nodes(place: str, nodes: int) -> State:
    """How a job that is over has ended, by its nodes' notes; a node that left none was killed."""
    meeting = Meeting(place)
    codes = [int(note["code"]) for note in meeting.notes(EXIT).values()]
    stopped = [code for code in codes if code == EXIT_STOPPED or code - 128 in SIGNALS]
    if len(codes) < nodes or any(code not in (*WELL, *stopped) for code in codes):
        return "failed"
    if not stopped:
        return "succeeded"
    asked = [
        each for each in meeting.signals(set()) if each.get("number") in SIGNALS
    ]  # and not for their stacks
    if asked and not any("by" in each for each in asked):
        return "cancelled"  # by a person, maybe before there was anything to save
    return "preempted" if all(code in WELL for code in codes) else "failed"


def refused(recipe: Recipe, job: Job) -> list[str]:
    """Why no place of this kind could run `job`."""
    reasons = [
        f"launch.secrets names {name}, which is not set here; export it first"
        for name in job.secrets
        if name not in os.environ
    ]
    if recipe.launch.folder is not None and not Path(recipe.launch.folder).is_absolute():
        reasons.append(
            f"launch.folder {recipe.launch.folder} is not absolute; give the whole path as the"
            " nodes see it"
        )
    return reasons
