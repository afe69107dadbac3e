"""Starts the two sandboxes of a trial, waits for the judge's verdict, and kills both."""

from __future__ import annotations

import functools
import json
import os
import select
import struct
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ingot
from ingot.base.errors import WrongInput
from ingot.rewards.protocol import RewardFailed
from ingot.rewards.sandbox.seccomp import supported

START_S = 60.0
"""How long both sandboxes may take to stand, on a machine that is busy."""
MIB = 1 << 20
START = (
    "import sys; sys.path.append(sys.argv[2]);"
    " from ingot.rewards.sandbox.enclose import main; main()"
)
"""What the interpreter of a sandbox runs. It has no site-packages, only ingot's own folder."""


@dataclass(frozen=True)
class SandboxLimits:
    """What each side may use."""

    timeout: float = 10.0
    memory_mib: int = 256
    disk_mib: int = 16
    threads: int = 16


@dataclass(frozen=True)
class Verdict:
    """How many tests hold. `whole`: all of them do, and what stands between them ran too."""

    passed: int
    tests: int
    whole: bool


def run_trial(program: str, tests: str, limits: SandboxLimits) -> Verdict | None:
    """Run the tests on a program; None if that took longer than `limits.timeout`.

    Raises:
        RewardFailed: the sandbox did not start, or the tests cannot be run.
    """
    pipes = [os.pipe() for _ in range(3)]
    (to_answer, from_judge), (to_judge, from_answer), (verdict, say) = pipes
    running: list[subprocess.Popen[bytes]] = []
    try:
        sides: list[tuple[str, str, list[int]]] = [
            ("judge", tests, [to_judge, from_judge, say]),
            ("answer", program, [to_answer, from_answer]),
        ]
        for role, text, ends in sides:
            running.append(_start(role, ends, limits))
            for each in ends:
                os.close(each)
            _feed(running[-1], text)
        return _wait(verdict, running, limits)
    except OSError as error:
        raise RewardFailed(f"the sandbox does not start ({error})", again=True) from None
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
        started = {end for _, _, ends in sides[: len(running)] for end in ends}
        for end in {end for pair in pipes for end in pair} - started:
            os.close(end)


def _start(role: str, ends: list[int], limits: SandboxLimits) -> subprocess.Popen[bytes]:
    order = {
        "role": role,
        "pipes": ends,
        "path": _library(),
        "parent": os.getpid(),
        "cpu": int(limits.timeout) + 2,
        "memory": limits.memory_mib * MIB,
        "disk": limits.disk_mib * MIB,
        "threads": limits.threads,
    }
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", START, json.dumps(order), _root()],
        env={},
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=ends,
    )


def _feed(process: subprocess.Popen[bytes], text: str) -> None:
    """Write a program to its sandbox, which reads to the end."""
    assert process.stdin is not None
    try:
        with process.stdin as stdin:
            stdin.write(text.encode(errors="replace"))
    except BrokenPipeError:
        pass  # it did not start, and says why


def _wait(
    pipe: int, running: list[subprocess.Popen[bytes]], limits: SandboxLimits
) -> Verdict | None:
    until = time.monotonic() + START_S
    started = False
    try:
        message = _read(pipe, until)
        if message == "started":
            started = True
            message = _read(pipe, time.monotonic() + limits.timeout)
    except TimeoutError:
        if started:
            return None
        raise RewardFailed(f"the sandbox did not start in {START_S:g} s", again=True) from None
    if message is None or isinstance(message, str):
        reason = _said(running) or "its judge ended without a verdict"
        raise RewardFailed(f"the sandbox failed ({reason})", again=True)
    if "refused" in message:
        reason = _said(running)
        raise RewardFailed(f"{message['refused']}{f' ({reason})' if reason else ''}")
    return Verdict(message["passed"], message["tests"], message["whole"])


def _said(running: list[subprocess.Popen[bytes]]) -> str:
    """Why the kernel did not give a sandbox, from both sides."""
    said = []
    for process in running:
        process.kill()
        assert process.stderr is not None
        said.append(process.stderr.read().decode(errors="replace").strip())
    return "; ".join(dict.fromkeys(filter(None, said)))[-500:]


def _read(pipe: int, until: float) -> Any:
    """A message of the judge's; None at its end. Raises TimeoutError."""
    ready = select.poll()  # select() takes no descriptor above 1,023
    ready.register(pipe, select.POLLIN)
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack(">I", data[:4])[0]:
        # One byte at a time would also do: a verdict is short, and only "started" stands before it.
        wanted = (
            4 - len(data) if len(data) < 4 else 4 + struct.unpack(">I", data[:4])[0] - len(data)
        )
        if not ready.poll(1000 * max(0.0, until - time.monotonic())):
            raise TimeoutError
        part = os.read(pipe, wanted)
        if not part:
            return None
        data += part
    return json.loads(data[4:])


def _library() -> list[str]:
    """The folders of the standard library."""
    folders = [os.path.dirname(os.__file__), sysconfig.get_config_var("DESTSHARED") or ""]
    outer = [folder for folder in folders[:1] if os.path.isdir(folder)]
    return outer + [
        folder
        for folder in folders[1:]
        if os.path.isdir(folder) and not folder.startswith(f"{folders[0]}/")
    ]


def _root() -> str:
    return str(Path(ingot.__file__).resolve().parents[1])


PROBE = """
import ctypes, os, socket, threading, time

def found():
    open_doors = []
    def tries(what, how):
        try:
            how()
        except (OSError, MemoryError, RuntimeError):
            return
        open_doors.append(what)
    tries("files of this machine can be read", lambda: open("/etc/passwd"))
    tries("processes of this machine can be seen", lambda: os.listdir("/proc"))
    tries("sockets can be made", lambda: socket.socket())
    tries("processes can be started", os.fork)
    tries("memory is not limited", lambda: bytearray(MEMORY))
    tries("threads are not limited", threads)
    tries("the standard library can be written to", lambda: open(os.__file__, "a"))
    if ctypes.CDLL(None).unshare(0x10000000) == 0:
        open_doors.append("namespaces can be made")
    return open_doors

def threads():
    for _ in range(THREADS):
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
"""


@functools.cache
def check_sandbox() -> None:
    """Try a sandbox, and from inside whatever it is to prevent.

    Raises:
        WrongInput: this machine has none that holds, with the reason.
    """
    limits = SandboxLimits(timeout=30.0)
    probe = f"MEMORY, THREADS = {limits.memory_mib * MIB}, {limits.threads + 1}\n{PROBE}"
    reason = "sandboxes are made with Linux' namespaces and seccomp, on x86_64 and aarch64"
    mend = "run it on such a machine"
    if sys.platform == "linux" and supported():
        mend = (
            "allow user namespaces (sysctl user.max_user_namespaces, in Ubuntu"
            " kernel.apparmor_restrict_unprivileged_userns, in Docker --security-opt"
            " seccomp=unconfined)"
        )
        try:
            verdict = run_trial(probe, "assert found() == []", limits)
            if verdict is not None and verdict.whole:
                return
            reason = "code could get out of it"
        except RewardFailed as error:
            reason = str(error)
    raise WrongInput(
        f"code of a model runs in a sandbox only, and this machine gives none: {reason}; {mend}, or"
        " remove the reward"
    )
