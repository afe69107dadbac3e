"""Hosts as ssh reaches them: the command lines, what a host lacks to run a node, and this ingot
copied there.
"""

from __future__ import annotations

import hashlib
import io
import shlex
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import ingot
from ingot.base.errors import Failed, IngotError, WrongInput

CONNECT_S, ALIVE_S, ALIVE_COUNT = 10, 5, 6
"""Seconds to connect; a connection that says nothing for 5 seconds six times in a row is given up.
"""
ASK_S = 120.0
CODE = '"${XDG_CACHE_HOME:-$HOME/.cache}"/ingot/code/'
AT_ONCE = 32
NO_FOLDER, NO_PYTHON, OLD_PYTHON, NO_DISK = 91, 92, 93, 94
NO_CONNECTION = 255

Answer = TypeVar("Answer")


def ssh(config: str | None, host: str, script: str) -> list[str]:
    """The command line that runs a POSIX shell script on a host, whatever shell the person has
    there.
    """
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


def address(config: str | None, host: str) -> str:
    """Where ssh goes for `host`, by its configuration; asks nobody."""
    said = subprocess.run(
        ["ssh", *(["-F", config] if config else []), "-G", host],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    names = [
        line.split(" ", 1)[1] for line in said.stdout.splitlines() if line.startswith("hostname ")
    ]
    if said.returncode or not names:
        raise WrongInput(
            f"ssh cannot tell where host {host} is ({_last(said.stderr)}); see launch.ssh.config"
        )
    return names[0]


def each(hosts: Sequence[str], ask: Callable[[str], Answer]) -> list[Answer]:
    """`ask` of all hosts at once. Raises the first error, with how many others there are."""

    def one(host: str) -> Answer | IngotError:
        try:
            return ask(host)
        except IngotError as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(one, hosts))
    errors = [answer for answer in answers if isinstance(answer, IngotError)]
    if errors:
        raise type(errors[0])(
            f"{errors[0]}{f' (and {len(errors) - 1} more hosts have trouble)' if len(errors) > 1 else ''}"
        )
    return [answer for answer in answers if not isinstance(answer, IngotError)]


def run(
    config: str | None, host: str, script: str, given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run a script on a host and wait. Raises Failed when it cannot be reached; what else goes
    wrong is the caller's to judge.
    """
    try:
        done = subprocess.run(
            ssh(config, host, script), input=given, capture_output=True, timeout=ASK_S, check=False
        )
    except FileNotFoundError:
        raise WrongInput("ssh is not installed here; install OpenSSH's client") from None
    except subprocess.TimeoutExpired:
        raise Failed(
            f"host {host} does not answer within {ASK_S:g} s; see whether it is up and its disks"
            " work"
        ) from None
    if done.returncode == NO_CONNECTION:
        raise Failed(no_connection(host, done.stderr.decode(errors="replace")))
    return done


def no_connection(host: str, said: str) -> str:
    """Why ssh came to no connection, and what to do about it."""
    if "Host key verification failed" in said or "IDENTIFICATION HAS CHANGED" in said:
        return (
            f"host {host}: its host key is unknown, or has changed; run `ssh {host}` once by hand,"
            " compare the fingerprint, then run the same command again"
        )
    if "Permission denied" in said:
        return (
            f"host {host} refuses the login ({_last(said)}); put your public key into"
            " ~/.ssh/authorized_keys there, or name its key in launch.ssh.config"
        )
    if "Could not resolve hostname" in said:
        return f"host {host} is unknown ({_last(said)}); correct launch.ssh.hosts"
    return (
        f"host {host} cannot be reached ({_last(said)}); see whether it is up and `ssh {host}`"
        " works"
    )


def _last(said: str) -> str:
    lines = [
        line.strip()
        for line in said.splitlines()
        if line.strip() and not line.startswith("Warning: Permanently added")
    ]
    return lines[-1] if lines else "ssh says nothing"


def python_path(code: str | None, given: str) -> str:
    """PYTHONPATH for a shell there: ingot as it was copied, then what the recipe says."""
    return ":".join(
        [*([f"{CODE}{code}"] if code else []), *([shlex.quote(given)] if given else [])]
    )


def check(config: str | None, host: str, *, folder: str, python: str, meet: str, path: str) -> None:
    """Raises WrongInput, naming the knob, where a node could not run on this host, and Failed where
    it cannot be reached.
    """
    where = f"export PYTHONPATH={path}; " if path else ""
    probe = "import sys; sys.version_info < (3, 11) and sys.exit(93); import ingot.launch.node"
    script = (
        f"cd {shlex.quote(folder)} 2>/dev/null || exit {NO_FOLDER}; command -v"
        f" {shlex.quote(python)} >/dev/null || exit {NO_PYTHON}; "
        # A network disk may show a new folder late.
        f"for i in 1 2 3 4 5 6; do test -d {shlex.quote(meet)} && break; test $i = 6 && exit"
        f" {NO_DISK}; sleep 1; done; {where}{shlex.quote(python)} -c {shlex.quote(probe)}"
    )
    done = run(config, host, script)
    if done.returncode == 0:
        return
    raise WrongInput(
        {
            NO_FOLDER: (
                f"host {host} has no folder {folder}; set launch.folder to the working folder as"
                " the hosts see it"
            ),
            NO_PYTHON: f"host {host} has no interpreter {python}; set launch.python",
            OLD_PYTHON: (
                f"host {host}: {python} is older than Python 3.11; set launch.python to a newer one"
            ),
            NO_DISK: (
                f"host {host} does not see {Path(folder, meet)}: the hosts must share the disk of"
                " the run folder with this machine; put `output` on one that all see"
            ),
        }.get(
            done.returncode,
            f"host {host}: {python} cannot run ingot"
            f" ({_last(done.stderr.decode(errors='replace'))}); install it there, set"
            " launch.python, or set launch.code=sync",
        )
    )


def packed() -> tuple[str, bytes]:
    """This ingot as a tar file, and a name for it that only the same content has."""
    root, stream = Path(ingot.__file__).parent, io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                entry = tarfile.TarInfo(f"ingot/{path.relative_to(root)}")
                content = path.read_bytes()
                entry.size, entry.mode = len(content), 0o644
                tar.addfile(entry, io.BytesIO(content))
    return hashlib.sha256(stream.getvalue()).hexdigest()[:16], stream.getvalue()


def sync(config: str | None, host: str, name: str, content: bytes) -> None:
    """Have this ingot on a host, in a folder of the person's cache there; sent only where it is
    missing.
    """
    there = f"{CODE}{name}"
    if run(config, host, f"test -d {there}").returncode == 0:
        return
    script = (
        f'set -e; mkdir -p {CODE}; new=$(mktemp -d {CODE}.new-XXXXXX); tar -xf - -C "$new"; chmod'
        f' 755 "$new"; mv -T "$new" {there} || test -d {there}'
    )
    done = run(config, host, script, content)
    if done.returncode:
        raise Failed(
            f"host {host}: ingot could not be copied there"
            f" ({_last(done.stderr.decode(errors='replace'))}); see its disk, or install ingot"
            " on it"
        )
