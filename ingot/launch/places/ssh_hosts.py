"""Hosts reached by ssh: command lines, checks of a host, copying this ingot to it, and the nodes of
a start that still run there.
"""

from __future__ import annotations

import hashlib
import io
import json
import shlex
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import ingot
from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.processes import safe_path
from ingot.base.progress import say
from ingot.launch.job import Handle
from ingot.launch.rendezvous import ARRIVED, EXIT, Rendezvous

CONNECT_S, ALIVE_S, ALIVE_COUNT = 10, 5, 6
"""Seconds to connect; a connection that stays silent for 5 seconds six times in a row is closed."""
SCRIPT_TIMEOUT_S = 120.0
CODE = '"${XDG_CACHE_HOME:-$HOME/.cache}"/ingot/code/'
PARALLEL_HOSTS = 32
NO_FOLDER, NO_PYTHON, OLD_PYTHON, NO_DISK, NO_LINUX = 91, 92, 93, 94, 95
"""Exit codes of scripts that look at a host."""
# Nothing else ends ranks with their node, or tells which process is a node.
ON_LINUX = f'test "$(uname)" = Linux || exit {NO_LINUX}; '
NO_CONNECTION = 255
END_TIMEOUT_S = 10.0
"""How long nodes whose connections were closed may take to end their ranks before they are killed
over a new connection.
"""

Answer = TypeVar("Answer")


def ssh_command(config: str | None, host: str, script: str) -> list[str]:
    """The command line that runs a POSIX shell script on a host, whatever its login shell."""
    options = [
        "BatchMode=yes",
        f"ConnectTimeout={CONNECT_S}",
        f"ServerAliveInterval={ALIVE_S}",
        f"ServerAliveCountMax={ALIVE_COUNT}",
        "ControlPath=none",
        "ClearAllForwardings=yes",
    ]
    return [
        "ssh",
        *(["-F", config] if config else []),
        "-T",
        *(part for option in options for part in ("-o", option)),
        host,
        f"exec sh -c {shlex.quote(script)}",
    ]


def address_of(config: str | None, host: str) -> str:
    """The address that ssh's configuration gives for `host`; does not connect."""
    done = subprocess.run(
        ["ssh", *(["-F", config] if config else []), "-G", host],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    names = [
        line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("hostname ")
    ]
    if done.returncode or not names:
        raise WrongInput(
            f"ssh cannot tell where host {host} is ({_last_line(done.stderr)}); see"
            " launch.ssh.config"
        )
    return names[0]


def on_each_host(hosts: Sequence[str], query: Callable[[str], Answer]) -> list[Answer]:
    """Run `query` for all hosts concurrently. Raises the first error, with the number of the
    others.
    """

    def one(host: str) -> Answer | IngotError:
        try:
            return query(host)
        except IngotError as error:
            return error

    with ThreadPoolExecutor(PARALLEL_HOSTS) as pool:
        answers = list(pool.map(one, hosts))
    errors = [answer for answer in answers if isinstance(answer, IngotError)]
    if errors:
        others = f" (and {len(errors) - 1} more hosts have trouble)" if len(errors) > 1 else ""
        raise type(errors[0])(f"{errors[0]}{others}")
    return [answer for answer in answers if not isinstance(answer, IngotError)]


def run_script(
    config: str | None, host: str, script: str, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run a script on a host and wait. Raises Failed if the host cannot be reached; the caller
    interprets the script's own exit code.
    """
    try:
        done = subprocess.run(
            ssh_command(config, host, script),
            input=stdin,
            capture_output=True,
            timeout=SCRIPT_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise WrongInput("ssh is not installed here; install OpenSSH's client") from None
    except subprocess.TimeoutExpired:
        raise Failed(
            f"host {host} does not answer within {SCRIPT_TIMEOUT_S:g} s; see whether it is up and"
            " its disks work"
        ) from None
    if done.returncode == NO_CONNECTION:
        raise Failed(connection_error(host, done.stderr.decode(errors="replace")))
    return done


def connection_error(host: str, output: str) -> str:
    """Why ssh could not connect, and what to do about it."""
    if "Host key verification failed" in output or "IDENTIFICATION HAS CHANGED" in output:
        return (
            f"host {host}: its host key is unknown, or has changed; run `ssh {host}` once by hand,"
            " compare the fingerprint, then run the same command again"
        )
    if "Permission denied" in output:
        return (
            f"host {host} refuses the login ({_last_line(output)}); put your public key into"
            " ~/.ssh/authorized_keys there, or name its key in launch.ssh.config"
        )
    if "Could not resolve hostname" in output:
        return f"host {host} is unknown ({_last_line(output)}); correct launch.ssh.hosts"
    return (
        f"host {host} cannot be reached ({_last_line(output)}); see whether it is up and"
        f" `ssh {host}` works"
    )


def _last_line(output: str) -> str:
    lines = [
        line.strip()
        for line in output.splitlines()
        if line.strip() and not line.startswith("Warning: Permanently added")
    ]
    return lines[-1] if lines else "ssh says nothing"


def python_path(code: str | None, given: str) -> str:
    """PYTHONPATH for the remote shell: the copied ingot, then the recipe's."""
    return ":".join(
        [*([f"{CODE}{code}"] if code else []), *([shlex.quote(given)] if given else [])]
    )


def check_host(
    config: str | None, host: str, *, folder: str, python: str, rendezvous: str, path: str
) -> None:
    """Raises WrongInput, naming the knob, if a node could not run on this host, and Failed if it
    cannot be reached.
    """
    export = f"export PYTHONPATH={path}; " if path else ""
    # An interpreter that is too old to run ingot would not say so of `-P`.
    export += "".join(f"export {name}={value}; " for name, value in safe_path().items())
    probe = "import sys; sys.version_info < (3, 11) and sys.exit(93); import ingot.launch.node.main"
    script = (
        f"{ON_LINUX}cd {shlex.quote(folder)} 2>/dev/null || exit {NO_FOLDER}; command -v"
        f" {shlex.quote(python)} >/dev/null || exit {NO_PYTHON}; "
        # A new folder may become visible late on a network disk.
        f"for i in 1 2 3 4 5 6; do test -d {shlex.quote(rendezvous)} && break; test $i = 6 && exit"
        f" {NO_DISK}; sleep 1; done; {export}{shlex.quote(python)} -c {shlex.quote(probe)}"
    )
    done = run_script(config, host, script)
    if done.returncode == 0:
        return
    messages = {
        NO_LINUX: _not_linux(host),
        NO_FOLDER: (
            f"host {host} has no folder {folder}; set launch.folder to the working folder as"
            " the hosts see it"
        ),
        NO_PYTHON: f"host {host} has no interpreter {python}; set launch.python",
        OLD_PYTHON: (
            f"host {host}: {python} is older than Python 3.11; set launch.python to a newer one"
        ),
        NO_DISK: (
            f"host {host} does not see {Path(folder, rendezvous)}: the hosts must share the disk of"
            " the run folder with this machine; put `output` on one that all see"
        ),
    }
    other = (
        f"host {host}: {python} cannot run ingot"
        f" ({_last_line(done.stderr.decode(errors='replace'))}); install it there, set"
        " launch.python, or set launch.code=sync"
    )
    raise WrongInput(messages.get(done.returncode, other))


def _not_linux(host: str) -> str:
    return (
        f"host {host} does not run Linux, without which ranks would outlive a node that is killed;"
        " take it out of launch.ssh.hosts"
    )


def packed_code() -> tuple[str, bytes]:
    """This ingot as a tar file, and a name derived from its content."""
    root, stream = Path(ingot.__file__).parent, io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                entry = tarfile.TarInfo(f"ingot/{path.relative_to(root)}")
                content = path.read_bytes()
                entry.size, entry.mode = len(content), 0o644
                tar.addfile(entry, io.BytesIO(content))
    return hashlib.sha256(stream.getvalue()).hexdigest()[:16], stream.getvalue()


def copy_code(config: str | None, host: str, name: str, content: bytes) -> None:
    """Copy this ingot to the user's cache folder on a host, unless it is there. Raises WrongInput
    if the host does not run Linux.
    """
    target = f"{CODE}{name}"
    there = run_script(config, host, f"{ON_LINUX}test -d {target}").returncode
    if there == NO_LINUX:
        raise WrongInput(_not_linux(host))
    if there == 0:
        return
    script = (
        f'set -e; mkdir -p {CODE}; new=$(mktemp -d {CODE}.new-XXXXXX); tar -xf - -C "$new"; chmod'
        f' 755 "$new"; mv -T "$new" {target} || test -d {target}'
    )
    done = run_script(config, host, script, content)
    if done.returncode:
        raise Failed(
            f"host {host}: ingot could not be copied there"
            f" ({_last_line(done.stderr.decode(errors='replace'))}); see its disk, or install ingot"
            " on it"
        )


def hosts_of(handle: Handle) -> list[str]:
    return list(json.loads(handle.about["hosts"]))


def nodes_with_exit_note(rendezvous: Rendezvous) -> set[int]:
    """Nodes that left an exit note themselves."""
    return {node for node, note in rendezvous.notes(EXIT).items() if "by" not in note}


def running_nodes(rendezvous: Rendezvous) -> list[tuple[int, int]]:
    """Nodes that have arrived and left no exit note, each with its process id on its host."""
    ended = nodes_with_exit_note(rendezvous)
    return [
        (node, int(note["process"]))
        for node, note in sorted(rendezvous.notes(ARRIVED).items())
        if node not in ended
    ]


def is_node_alive(config: str | None, handle: Handle, node: int, process: int) -> bool:
    """Raises Failed when the node's host cannot be reached."""
    return run_script(config, hosts_of(handle)[node], _is_our_node(handle, process)).returncode == 0


def end_nodes(config: str | None, handle: Handle, processes: int) -> None:
    """Wait for the nodes of a start to end, then kill them. `processes`: ranks of each node. Raises
    Failed for a host that cannot be reached: its ranks may still run.
    """
    rendezvous, deadline = Rendezvous.of(handle), time.monotonic() + END_TIMEOUT_S
    while (running := running_nodes(rendezvous)) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = hosts_of(handle)
    for node, process in running:
        # The kernel kills the ranks with it.
        script = (
            f"for i in 1 2 3 4 5 6 7 8 9; do {_is_our_node(handle, process)} || exit 0; kill -9"
            f" {process}; sleep 1; done; exit 1"
        )
        if run_script(config, names[node], script).returncode:
            raise Failed(
                f"host {names[node]}: process {process} of an earlier start cannot be ended;"
                " see to that, then run the same command again"
            )
        rendezvous.leave(
            node,
            EXIT,
            rank=node * processes,
            code=-int(signal.SIGKILL),
            how=f"the node on {names[node]} was ended",
        )
    if running:
        killed = ", ".join(names[node] for node, _ in running)
        say(f"{handle.name}: what was left of {handle.id} on {killed} is gone")


def _is_our_node(handle: Handle, process: int) -> str:
    """A shell command that checks whether a process is a node of this start: its command line
    contains the rendezvous.
    """
    place = "/".join(Path(handle.about["meet"]).parts[-3:])
    return f"tr '\\0' ' ' </proc/{process}/cmdline 2>/dev/null | grep -qF {shlex.quote(place)}"
