"""The command, variables, labels and paths of a node at any place; and why no place of a kind could
run a job. Nothing is sent from here.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.processes import own_python
from ingot.base.progress import duration
from ingot.cloud.instances import label, user_labels
from ingot.cloud.machines import accelerators_of, check_machine
from ingot.config.recipe import Recipe
from ingot.launch.handles import is_same_work, work_fingerprint
from ingot.launch.job import Job
from ingot.launch.rendezvous import Note

MODULE = "ingot.launch.node"
UNACCELERATED = ("ingest", "prepare", "gate", "register", "deploy")
"""Verbs that need no accelerator."""
RENDEZVOUS_SHARE = 0.9
"""Nodes wait for each other for this share of `launch.start_s`, so that they report which node did
not arrive before their silence counts as a hang.
"""
RUN, VERB, ATTEMPT, NODE, REPLICA, START, WORK = (
    "ingot-run",
    "ingot-verb",
    "ingot-attempt",
    "ingot-node",
    "ingot-replica",
    "ingot-start",
    "ingot-work",
)
"""Labels of cloud resources created for a job."""


# --- places whose nodes share our disk: ssh, Slurm


def working_folder(recipe: Recipe) -> str:
    """The working directory on the nodes."""
    return recipe.launch.folder or str(Path.cwd())


def path_on_nodes(path: str | Path) -> str:
    """A local path as the nodes see it: paths below our working directory map to paths below
    theirs.
    """
    absolute, here = Path(path).absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def interpreter(recipe: Recipe) -> str:
    return recipe.launch.python or sys.executable


def shared_disk_command(recipe: Recipe, job: Job, python: str, *options: str) -> list[str]:
    """The command line of a node that shares our disk, run in `working_folder`."""
    return [
        *own_python(python),
        "-m",
        MODULE,
        *_rendezvous_options(recipe, path_on_nodes(job.rendezvous)),
        "--run-folder",
        path_on_nodes(recipe.folder.root),
        *options,
        *_secret_options(recipe),
        "--",
        *job.argv,
    ]


def node_variables(recipe: Recipe, job: Job) -> dict[str, str]:
    """The variables of all nodes, without secrets and without PET_NODE_RANK and PET_MASTER_ADDR,
    which differ by node.
    """
    torchrun = {
        "PET_NNODES": str(job.nodes),
        "PET_NPROC_PER_NODE": str(job.processes),
        "PET_MASTER_PORT": str(recipe.launch.port),
    }
    values = {**job.environment, **torchrun}
    return {name: value for name, value in sorted(values.items()) if name not in job.secrets}


def with_named_secrets(recipe: Recipe, job: Job) -> Job:
    """The job with the secrets that its recipe names itself, where they are set here: the keys of
    servers that judge answers (`key_variable`), and references (`env:NAME`).
    """
    named = [name for name in _named_secrets(recipe.model_dump(mode="json")) if name in os.environ]
    return replace(job, secrets=tuple(dict.fromkeys([*job.secrets, *named])))


def _named_secrets(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _named_secrets(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _named_secrets(item, name)
    elif isinstance(value, str) and (name == "key_variable" or value.startswith("env:")):
        yield value.removeprefix("env:")


def secret_values(job: Job) -> dict[str, str]:
    """The secrets passed to nodes, which are never part of rendered text."""
    return {name: os.environ[name] for name in job.secrets if name in os.environ}


def write_secrets(path: Path, values: Mapping[str, str]) -> None:
    """Write secrets to a file for one node, which deletes it after reading."""
    path.unlink(missing_ok=True)
    with os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as stream:
        json.dump(dict(values), stream)


def remove_secrets(rendezvous: Path) -> None:
    for path in rendezvous.glob("secrets-*.json"):
        path.unlink(missing_ok=True)


def shared_disk_reasons(recipe: Recipe, job: Job) -> list[str]:
    """Why no place whose nodes share our disk could run `job`."""
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


# --- places that work from the run folder's replica


def container_command(recipe: Recipe, job: Job) -> list[str]:
    """The command in each node's container. Secrets are only named here; the node reads their
    values.
    """
    return [
        "python",
        "-m",
        MODULE,
        *_rendezvous_options(recipe, job.rendezvous),
        "--run-folder-url",
        job.run_folder_url,
        "--run-folder",
        str(Path(recipe.output) / recipe.name),
        *_secret_options(recipe),
        "--",
        *job.argv,
    ]


def job_labels(recipe: Recipe, verb: str, run_folder_url: str) -> dict[str, str]:
    """The labels of everything created for a run's verb, in every start. The replica's label
    distinguishes runs of the same name.
    """
    return {RUN: label(recipe.name), VERB: label(verb), REPLICA: fingerprint(run_folder_url)}


def start_labels(recipe: Recipe, job: Job) -> dict[str, str]:
    """The labels of one start: the user's own, the job's, and the number of the start."""
    return {
        **user_labels(recipe.cloud),
        **job_labels(recipe, job.name, job.run_folder_url),
        ATTEMPT: job.start_number,
    }


def work_label(recipe: Recipe, job: Job) -> dict[str, str]:
    """What a start does, for a place where it may be found by its labels alone."""
    return {WORK: work_fingerprint(recipe, job.argv)}


def other_work(recipe: Recipe, job: Job, id: str, labels: Mapping[str, str]) -> str | None:
    """Why what runs already, found by its labels alone, must not be taken for `job`: it was
    submitted with other arguments or another recipe. None if it may.
    """
    if is_same_work(recipe, job, labels.get(WORK)):
        return None
    return (
        f"{job.name} runs already as {recipe.launch.kind} job {id}, submitted elsewhere with"
        " another recipe or other arguments; wait for it, or cancel it there"
    )


def machine_reasons(recipe: Recipe, job: Job) -> list[str]:
    """Why no machine created for a job could run it, wherever it is created."""
    launch = recipe.launch
    reasons = check_machine(launch.machine)
    accelerators = accelerators_of(launch.machine)[1]
    if accelerators and job.processes > accelerators:
        reasons.append(
            f"{job.processes} processes share {accelerators} accelerators on each machine;"
            " lower launch.processes, or take larger machines"
        )
    if launch.code == "sync":
        reasons.append(
            "launch.code sync copies ingot to hosts that are there already; set it to image and"
            " build one with `ingot images build train`"
        )
    return [*reasons, *accelerators_in_vain(recipe, job.name), *bucket_reasons(job)]


def accelerators_in_vain(recipe: Recipe, verb: str) -> list[str]:
    """Refuse to run a verb that needs no accelerator on the machines of a training, unless the
    recipe names such machines for it.
    """
    own = {str(name): place.machine for name, place in recipe.pipeline.steps.items()}.get(verb)
    machine = recipe.launch.machine
    name, count = accelerators_of(machine)
    if verb not in UNACCELERATED or not count or own is not None:
        return []
    return [
        f"{verb} uses no accelerator, and launch.machine {machine.type} has {count} x {name}; set"
        f" pipeline.steps.{verb}.machine.type to one without, such as n2-standard-16, or"
        f" pipeline.steps.{verb}.launch to local"
    ]


def bucket_reasons(job: Job) -> list[str]:
    """Why a machine that does not share our disk could not run a job: its secrets, its bucket."""
    reasons = []
    if job.secrets:
        reasons.append(
            f"launch.secrets {job.secrets[0]} cannot be given to a machine without writing it"
            " down; put it into Secret Manager and name it in cloud.secrets:"
            f" {{{job.secrets[0]}: secret:NAME}}"
        )
    if not job.run_folder_url or not job.rendezvous.startswith("gs://"):
        reasons.append("the machines share no disk and need a bucket; set cloud.bucket")
    return reasons


def errors_of(*checks: Callable[[], object]) -> list[str]:
    """The messages of those checks that raise WrongInput."""
    reasons = []
    for check in checks:
        try:
            check()
        except WrongInput as error:
            reasons.append(str(error))
    return reasons


def boot_note_fields(job: Job) -> dict[str, Any]:
    """The variables of `notes.sh.jinja`: where a machine leaves notes before its container does."""
    bucket, _, folder = job.rendezvous.removeprefix("gs://").partition("/")
    return {"bucket": bucket, "folder": quote(folder, safe=""), "processes": job.processes}


def not_come_up(recipe: Recipe, id: str, node: int, boot: Note | None) -> str:
    """Why a job has failed whose machine is there and whose node has not arrived. `boot` is the
    machine's last note.
    """
    last = (
        f"the last that it did was {boot['phase']}" if boot else "its start-up script said nothing"
    )
    return (
        f"node {node} of {id} did not come up within {duration(recipe.launch.start_s)}: {last}; see"
        " its log, or raise launch.start_s"
    )


def script_template(name: str) -> jinja2.Template:
    """A template of a start-up script, with the filter `quote` for shell quoting."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ingot.launch.places", "."),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        comment_start_string="<#",
        comment_end_string="#>",
    )
    environment.filters["quote"] = shlex.quote
    return environment.get_template(name)


def _rendezvous_options(recipe: Recipe, place: str) -> list[str]:
    timeout_s = RENDEZVOUS_SHARE * recipe.launch.start_s
    return ["--rendezvous", place, "--rendezvous-timeout-s", f"{timeout_s:g}"]


def _secret_options(recipe: Recipe) -> list[str]:
    """The node option that names the secrets of all its ranks; only the node reads their values."""
    cloud = recipe.cloud
    if not cloud.secrets:
        return []
    knobs = {"project", "region", "secrets", "endpoint"}
    return ["--cloud", cloud.model_dump_json(include=knobs, exclude_none=True)]
