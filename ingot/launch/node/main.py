"""`python -m ingot.launch.node [options] -- VERB ...`: runs on each node of a job that has several
nodes, or no shared disk.

Torchrun's variables say which node this is (PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE,
PET_MASTER_ADDR, PET_MASTER_PORT). Torchrun's agent is not used to start the ranks: it hides their
exit codes and restarts them itself.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import ingot
from ingot.base.environment import NODE_VARIABLE, RESOLVED_VARIABLE, take_env_file
from ingot.base.errors import EXIT_DONE, EXIT_FAILED, Failed, IngotError, WrongInput
from ingot.base.processes import hear_of_children
from ingot.base.progress import open_closed_streams, outlive_reader, say
from ingot.cloud.clients import GoogleClients
from ingot.cloud.secrets import resolve_secrets
from ingot.config.sections.deployment import Cloud
from ingot.launch.attempt import AttemptExit, StopRequests, follow
from ingot.launch.job import Job
from ingot.launch.node.ranks import LocalRanks, NodePosition
from ingot.launch.node.watch import LAUNCHER, LauncherLease, NodeWatch, flush_heartbeats
from ingot.launch.rendezvous import ARRIVED, ENDED_BY, EXIT, Rendezvous
from ingot.launch.run_folder_sync import RunFolderPusher, pull_run_folder

RENDEZVOUS_TIMEOUT_S = 1800.0
"""How long the first node waits for the last one: machines of one job may start minutes apart."""
FOLDER_TIMEOUT_S = 20.0
"""How long a folder made by the launcher may take to become visible on a network disk."""
PORT_TIMEOUT_S = 5.0
"""How long the port of an earlier start may take to become free."""
EXIT_NOTES_TIMEOUT_S = 15.0
"""How long a failed node waits for the exit notes of the others, whose ranks have a few seconds
before they are terminated.
"""
CLUSTER_SPEC = "CLUSTER_SPEC"
"""The variable in which Vertex AI describes the workers of a custom job."""


def main() -> int:
    open_closed_streams()
    outlive_reader()
    hear_of_children()
    options = _parser().parse_args()
    argv = tuple(options.argv[1:] if options.argv[:1] == ["--"] else options.argv)
    try:
        if options.cluster_spec:
            os.environ.update(torchrun_variables(os.environ))
        job, position = job_and_position(
            argv, os.environ, rendezvous=options.rendezvous, run_folder_url=options.run_folder_url
        )
        if options.environment:
            file = Path(options.environment.replace("{node}", str(position.node)))
            os.environ.update(take_env_file(file))
        cloud = Cloud.model_validate_json(options.cloud or "{}")
        if cloud.secrets:
            os.environ.update(resolve_secrets(GoogleClients(cloud), cloud.secrets))
        lease = LauncherLease() if options.launcher_on_stdin else None
        if lease is not None:
            os.environ.update(lease.read_environment())
        root = Path(options.run_folder) if options.run_folder else None
        return run_node(job, position, root, lease=lease, timeout_s=options.rendezvous_timeout_s)
    except IngotError as error:
        say(f"error: {error}")
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ingot.launch.node", allow_abbrev=False)
    parser.add_argument(
        "--rendezvous", default="", help="folder or gs:// where the nodes of this start leave notes"
    )
    parser.add_argument(
        "--rendezvous-timeout-s",
        type=float,
        default=RENDEZVOUS_TIMEOUT_S,
        help="seconds that the nodes wait for each other",
    )
    parser.add_argument(
        "--run-folder-url",
        default="",
        help="gs:// address of the run folder's replica to work from",
    )
    parser.add_argument("--run-folder", help="the run folder on this node")
    parser.add_argument(
        "--environment",
        help=(
            "JSON file of variables, read and removed: secrets; {node} stands for this node's"
            " number"
        ),
    )
    parser.add_argument(
        "--cloud",
        help="JSON of the knobs of `cloud` by which this node reads the secrets of its ranks",
    )
    parser.add_argument(
        "--launcher-on-stdin",
        action="store_true",
        help="standard input holds such variables, then the launcher's heartbeats; end with it",
    )
    parser.add_argument(
        "--cluster-spec",
        action="store_true",
        help=f"take this node's position from ${CLUSTER_SPEC}, as in a custom job of Vertex AI",
    )
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- VERB ...")
    return parser


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Torchrun's variables derived from Vertex AI's description of the cluster: the only worker of
    pool 0 is node 0, those of pool 1 follow, and so on.

    Raises:
        WrongInput: there is no such description, or it is inconsistent.
    """
    try:
        about = json.loads(environ[CLUSTER_SPEC])
        pools = {name: list(hosts) for name, hosts in sorted(about["cluster"].items())}
        pool, index = about["task"]["type"], int(about["task"]["index"])
        before = sum(len(hosts) for name, hosts in pools.items() if name < pool)
        host, _, port = pools["workerpool0"][0].rpartition(":")
        _ = pools[pool][index]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise WrongInput(
            f"${CLUSTER_SPEC} does not say which worker this is ({type(error).__name__}: {error});"
            " this is for custom jobs of Vertex AI"
        ) from None
    return {
        "PET_NNODES": str(sum(len(hosts) for hosts in pools.values())),
        "PET_NODE_RANK": str(before + index),
        "PET_MASTER_ADDR": host,
        "PET_MASTER_PORT": port,
    }


def job_and_position(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    rendezvous: str = "",
    run_folder_url: str = "",
) -> tuple[Job, NodePosition]:
    """The job, and this node's position in it, from torchrun's variables. Raises WrongInput if they
    are inconsistent.
    """
    if not argv:
        raise WrongInput("no verb is given; write it after --, such as -- train recipe.yaml")
    names = ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_PORT")
    texts = [
        environ.get(name, default)
        for name, default in zip(names, ("1", "0", "1", "29500"), strict=True)
    ]
    try:
        nodes, node, processes, port = (int(text) for text in texts)
    except ValueError:
        raise WrongInput(f"{', '.join(names)} must be integers, not {', '.join(texts)}") from None
    if not (0 <= node < nodes and processes > 0):
        raise WrongInput(
            f"node {node} of {nodes} with {processes} processes makes no sense; see"
            " PET_NODE_RANK, PET_NNODES, PET_NPROC_PER_NODE"
        )
    address = environ.get("PET_MASTER_ADDR", "")
    if nodes > 1 and not address:
        raise WrongInput("PET_MASTER_ADDR is not set: give the address of node 0")
    job = Job(
        argv[0],
        tuple(argv),
        processes,
        nodes,
        rendezvous=rendezvous,
        run_folder_url=run_folder_url,
    )
    return job, NodePosition(node, address, port if nodes > 1 else 0)


def run_node(
    job: Job,
    position: NodePosition,
    root: Path | None = None,
    *,
    lease: LauncherLease | None = None,
    timeout_s: float = RENDEZVOUS_TIMEOUT_S,
) -> int:
    """Run this node's share of a job to its end; returns its exit code as a shell reports it."""
    rendezvous = _open_rendezvous(job.rendezvous, position) if job.rendezvous else None
    end, ended_by, reason = AttemptExit(0, EXIT_FAILED), None, ""
    with StopRequests() as stops:
        watch = NodeWatch(job, position.node, stops, lease)
        try:
            with _forwarding_stack_requests(watch):
                if job.run_folder_url and root is not None:
                    pull_run_folder(job.run_folder_url, root, job.name)
                _meet(job, position, rendezvous, watch, timeout_s)
                of_node = {
                    **job.environment,
                    NODE_VARIABLE: str(position.node),
                    RESOLVED_VARIABLE: "1",
                }
                with _publishing(job, position, root):
                    ranks = replace(job, environment=of_node)
                    watch.ranks = LocalRanks(ranks, results=sys.stdout, position=position)
                    end = follow(watch.ranks, stops, watch.check)
            ended_by = watch.ended_by
        except IngotError as error:
            end, reason = AttemptExit(0, error.exit_code), str(error)
            ended_by = watch.ended_by
            raise
        finally:
            if rendezvous is not None:
                rendezvous.leave(
                    position.node,
                    EXIT,
                    rank=position.node * job.processes + end.rank,
                    code=end.code,
                    how=reason,
                    **({} if ended_by is None else {ENDED_BY: ended_by}),
                )
                if end.code != EXIT_DONE and watch.ended_by != LAUNCHER:
                    _wait_for_exit_notes(rendezvous)
    if ended_by is not None:
        say(f"{watch.reason}, and the ranks of node {position.node} were ended")
    return end.shell_code if ended_by is None else EXIT_FAILED


def _wait_for_exit_notes(rendezvous: Rendezvous) -> None:
    """Many places end all nodes when one of them fails, so a failed node only exits after the
    others have left their exit notes.
    """
    deadline = time.monotonic() + EXIT_NOTES_TIMEOUT_S
    with contextlib.suppress(IngotError):
        while (
            len(rendezvous.notes(EXIT)) < len(rendezvous.notes(ARRIVED))
            and time.monotonic() < deadline
        ):
            time.sleep(0.2)


def _open_rendezvous(place: str, position: NodePosition) -> Rendezvous:
    """Raises WrongInput if this node does not see the folder that the launcher made."""
    rendezvous, deadline = Rendezvous(place), time.monotonic() + FOLDER_TIMEOUT_S
    while rendezvous.is_folder and not Path(place).is_dir():
        if time.monotonic() > deadline:
            raise WrongInput(
                f"node {position.node} ({socket.gethostname()}) does not see"
                f" {Path(place).absolute()}: the nodes and the machine that launches must share the"
                " disk of the run folder; set `output` to a place that all see, and launch.folder"
                " where it is mounted elsewhere"
            )
        time.sleep(0.5)
    return rendezvous


@contextlib.contextmanager
def _publishing(job: Job, position: NodePosition, root: Path | None) -> Iterator[None]:
    """While entered, the supervisor can read this node's heartbeats and progress."""
    if root is None:
        yield
    elif job.run_folder_url:
        with RunFolderPusher(job.run_folder_url, root, position.node):
            yield
    else:
        with flush_heartbeats(root):
            yield


def _meet(
    job: Job,
    position: NodePosition,
    rendezvous: Rendezvous | None,
    watch: NodeWatch,
    timeout_s: float,
) -> None:
    """Wait for all nodes to arrive. Raises WrongInput if they run different code."""
    if rendezvous is None:
        return
    _check_port(position)
    rendezvous.leave(
        position.node,
        ARRIVED,
        host=socket.gethostname(),
        version=ingot.__version__,
        code=code_hash(),
        python=platform.python_version(),
        process=os.getpid(),
    )
    if job.nodes == 1:
        return
    notes = rendezvous.wait_for(
        ARRIVED, job.nodes, timeout_s=timeout_s, check=watch.check_while_waiting
    )
    versions = {
        (note["version"], note["code"]): node for node, note in sorted(notes.items(), reverse=True)
    }
    if len(versions) > 1:
        described = ", ".join(
            f"node {node} ({notes[node]['host']}) has ingot {version} ({code})"
            for (version, code), node in versions.items()
        )
        raise WrongInput(
            f"the nodes run different code: {described}; install one version on all, or set"
            " launch.code=sync"
        )


def _check_port(position: NodePosition) -> None:
    """On node 0: raises Failed when another process listens on the port of the process group."""
    if position.node or not position.port:
        return
    deadline = time.monotonic() + PORT_TIMEOUT_S
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", position.port))
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise Failed(
                        f"port {position.port} of node 0 ({socket.gethostname()}) cannot be used"
                        f" ({error.strerror}); set launch.port to another"
                    ) from None
        time.sleep(0.5)


def code_hash() -> str:
    """A short hash of ingot's own files: two installations of one version may differ."""
    root = Path(ingot.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def _forwarding_stack_requests(watch: NodeWatch) -> Iterator[None]:
    """While entered, SIGUSR2 is forwarded to the ranks that have installed a handler for it (it
    writes their stacks); other ranks would be killed by it.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        watch.forward(number, None)

    previous = signal.signal(signal.SIGUSR2, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, previous)
