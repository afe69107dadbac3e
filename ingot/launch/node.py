"""`python -m ingot.launch.node [--meet PLACE] [--mirror URL] -- VERB ...`: what runs on each node
of a job that has several, or no shared disk.

Which node this is say torchrun's own variables (PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE,
PET_MASTER_ADDR, PET_MASTER_PORT). The ranks are started by us and not by torchrun's agent, which
hides their exit codes and restarts by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import ingot
from ingot.base.environment import take_env_file
from ingot.base.errors import EXIT_DONE, EXIT_FAILED, Failed, IngotError, WrongInput
from ingot.base.progress import say
from ingot.cloud.clients import Google
from ingot.cloud.secrets import resolve
from ingot.config.sections.deployment import Cloud
from ingot.launch.attempt import Exit, follow
from ingot.launch.job import Job
from ingot.launch.meeting import EXIT, HERE, Meeting
from ingot.launch.nodewatch import LAUNCHER, NodeWatch, flushing
from ingot.launch.ranks import LocalRanks, Node
from ingot.launch.sending import Sending, bring
from ingot.launch.stops import Stops
from ingot.launch.tie import Tie

MEET_S = 1800.0
"""How long the first node waits for the last: machines of one job may come up minutes apart."""
SEEN_S = 20.0
"""How long a folder that the launcher has made may take to be seen here."""
PORT_S = 5.0
"""How long the port of an earlier start may take to be free."""
LAST_WORDS_S = 15.0
"""How long a node that failed waits for the last words of the others, whose ranks have some seconds
before they are ended.
"""
BECAUSE = "because"


def main() -> int:
    parser = argparse.ArgumentParser(prog="ingot.launch.node", allow_abbrev=False)
    parser.add_argument("--meet", help="folder or gs:// where the nodes of this start leave notes")
    parser.add_argument(
        "--meet-s", type=float, default=MEET_S, help="seconds that the nodes wait for each other"
    )
    parser.add_argument("--mirror", help="gs:// replica of the run folder to work from")
    parser.add_argument("--root", help="the run folder")
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
        "--tied",
        action="store_true",
        help="standard input holds such variables and signs of life; end when it does",
    )
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- VERB ...")
    options = parser.parse_args()
    argv = tuple(options.argv[1:] if options.argv[:1] == ["--"] else options.argv)
    try:
        job, node = placed(argv, os.environ, meet=options.meet, mirror=options.mirror)
        if options.environment:
            os.environ.update(
                take_env_file(Path(options.environment.replace("{node}", str(node.number))))
            )
        cloud = Cloud.model_validate_json(options.cloud or "{}")
        if cloud.secrets:
            os.environ.update(resolve(Google(cloud), cloud.secrets))
        tie = Tie() if options.tied else None
        if tie is not None:
            os.environ.update(tie.environment())
        return run(
            job, node, Path(options.root) if options.root else None, tie=tie, meet_s=options.meet_s
        )
    except IngotError as error:
        say(f"error: {error}")
        return error.exit_code


def placed(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    meet: str | None = None,
    mirror: str | None = None,
) -> tuple[Job, Node]:
    """The job and the node that torchrun's variables tell of. Raises WrongInput when they say
    nothing sensible.
    """
    if not argv:
        raise WrongInput("no verb is given; write it after --, such as -- train recipe.yaml")
    names = ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_PORT")
    texts = [
        environ.get(name, default)
        for name, default in zip(names, ("1", "0", "1", "29500"), strict=True)
    ]
    try:
        nodes, number, processes, port = (int(text) for text in texts)
    except ValueError:
        raise WrongInput(f"{', '.join(names)} must be integers, not {', '.join(texts)}") from None
    if not (0 <= number < nodes and processes > 0):
        raise WrongInput(
            f"node {number} of {nodes} with {processes} processes makes no sense; see"
            " PET_NODE_RANK, PET_NNODES, PET_NPROC_PER_NODE"
        )
    address = environ.get("PET_MASTER_ADDR", "")
    if nodes > 1 and not address:
        raise WrongInput("PET_MASTER_ADDR is not set: give the address of node 0")
    return Job(argv[0], tuple(argv), processes, nodes, meet=meet, mirror=mirror), Node(
        number, address, port if nodes > 1 else 0
    )


def run(
    job: Job,
    node: Node,
    root: Path | None = None,
    *,
    tie: Tie | None = None,
    meet_s: float = MEET_S,
) -> int:
    """This node's share of a job, to its end: its exit code, as a shell shows it."""
    meeting = _meeting(job.meet, node) if job.meet else None
    end, because, how = Exit(0, EXIT_FAILED), None, ""
    with Stops() as stops:
        watch = NodeWatch(job, node.number, stops, tie)
        try:
            with _handing_on(watch):
                if job.mirror and root is not None:
                    bring(job.mirror, root, job.name)
                _meet(job, node, meeting, watch, meet_s)
                with _shown(job, node, root):
                    watch.ranks = LocalRanks(job, results=sys.stdout, node=node)
                    end = follow(watch.ranks, stops, watch.look)
            because = watch.because
        except IngotError as error:
            end, how, because = Exit(0, error.exit_code), str(error), watch.because
            raise
        finally:
            if meeting is not None:
                about = {} if because is None else {BECAUSE: because}
                meeting.leave(
                    node.number,
                    EXIT,
                    rank=node.number * job.processes + end.rank,
                    code=end.code,
                    how=how,
                    **about,
                )
                if end.code != EXIT_DONE and watch.because != LAUNCHER:
                    _wait_for_last_words(job, meeting)
    if because is not None:
        say(f"{watch.told}, and the ranks of node {node.number} were ended")
    return end.shown if because is None else EXIT_FAILED


def _wait_for_last_words(job: Job, meeting: Meeting) -> None:
    """Many a place ends all nodes when one of them ends with a failure: so none does before the
    others have said how they ended.
    """
    until = time.monotonic() + LAST_WORDS_S
    with contextlib.suppress(IngotError):
        while len(meeting.notes(EXIT)) < len(meeting.notes(HERE)) and time.monotonic() < until:
            time.sleep(0.2)


def _meeting(place: str, node: Node) -> Meeting:
    """Raises WrongInput where this node does not see what the launcher has made for all."""
    meeting, until = Meeting(place), time.monotonic() + SEEN_S
    while meeting.is_folder and not Path(place).is_dir():
        if time.monotonic() > until:
            raise WrongInput(
                f"node {node.number} ({socket.gethostname()}) does not see"
                f" {Path(place).absolute()}: the nodes and the machine that launches must share the"
                " disk of the run folder; set `output` to a place that all see, and launch.folder"
                " where it is mounted elsewhere"
            )
        time.sleep(0.5)
    return meeting


@contextlib.contextmanager
def _shown(job: Job, node: Node, root: Path | None) -> Iterator[None]:
    """While entered, whoever watches sees this node's signs of life and what it has to show."""
    if root is None:
        yield
        return
    with Sending(job, root, node.number) if job.mirror else flushing(root):
        yield


def _meet(job: Job, node: Node, meeting: Meeting | None, watch: NodeWatch, meet_s: float) -> None:
    """Wait for all nodes, and refuse to go on where they run different code."""
    if meeting is None:
        return
    _check_port(job, node)
    about = {
        "host": socket.gethostname(),
        "version": ingot.__version__,
        "code": code_hash(),
        "python": platform.python_version(),
        "process": os.getpid(),
    }
    meeting.leave(node.number, HERE, **about)
    if job.nodes == 1:
        return
    notes = meeting.wait_for(HERE, job.nodes, seconds=meet_s, look=watch.look_while_meeting)
    kinds = {
        (note["version"], note["code"]): number
        for number, note in sorted(notes.items(), reverse=True)
    }
    if len(kinds) > 1:
        told = ", ".join(
            f"node {number} ({notes[number]['host']}) has ingot {version} ({code})"
            for (version, code), number in kinds.items()
        )
        raise WrongInput(
            f"the nodes run different code: {told}; install one version on all, or set"
            " launch.code=sync"
        )


def _check_port(job: Job, node: Node) -> None:
    """On node 0: whether its ranks can be met. Raises Failed when something else listens there."""
    if node.number or not node.port:
        return
    until = time.monotonic() + PORT_S
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", node.port))
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise Failed(
                        f"port {node.port} of node 0 ({socket.gethostname()}) cannot be used"
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
def _handing_on(watch: NodeWatch) -> Iterator[None]:
    """SIGUSR2 asks ranks for their stacks; a rank that has not said that it can would be ended by
    it, and is left alone.
    """

    def hand_on(number: int, frame: FrameType | None) -> None:
        watch.hand_on(number, None)

    before = signal.signal(signal.SIGUSR2, hand_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


if __name__ == "__main__":
    sys.exit(main())
