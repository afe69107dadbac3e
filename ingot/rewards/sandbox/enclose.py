"""Shuts this process in and then runs one side of a trial: user, mount, process, network, IPC and
host name namespaces of its own; a root folder that is a small tmpfs with the standard library, not
writable; no capability; limits; a filter of system calls. Started by `run.py` in an interpreter of
its own, without environment and site-packages; the standard library alone, no threads.

Two processes: the outer one, which `run.py` kills, and the first and only one of the new process
namespace, which the kernel kills with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.rewards.sandbox.answer import run_answer
from ingot.rewards.sandbox.judge import run_judge
from ingot.rewards.sandbox.seccomp import restrict
from ingot.rewards.sandbox.values import Channel

NEW_MOUNT, NEW_CGROUP, NEW_UTS, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXECUTION = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE = 32, 4096, 16384, 1 << 18
DETACH = 2
DEATH_SIGNAL, DROP_BOUND, NO_NEW_PRIVILEGES = 1, 24, 38
CAPABILITIES_V3 = 0x20080522
PIVOT_ROOT, CAPSET = {"x86_64": (155, 126), "aarch64": (41, 91)}.get(os.uname().machine, (0, 0))
NOBODY, INSIDE = 65534, 1000
ARENAS = -8
"""glibc: M_ARENA_MAX."""
DESCRIPTORS = 65536
"""None above is open here, but for a pipe that the trainer has there."""
TARGET = "/tmp"
"""Where the new root is put together; hidden by it from then on, for this process alone."""
LINKED = ("zlib", "_bz2", "_lzma", "_hashlib", "_decimal", "_struct", "_json", "_random", "math")
"""Modules loaded before the doors close, since some need libraries that are not inside."""

_libc = ctypes.CDLL(None, use_errno=True)


def _do(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError that names it."""
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def main() -> None:
    """`argv[1]` is the order of `run.py` as JSON, stdin the program. Exits with 1 and a line on
    stderr if the kernel refuses something.
    """
    os.umask(0o022)  # nobody is to read in the new root folder what root makes there
    order = json.loads(sys.argv[1])
    try:
        _do("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != order["parent"]:
            os._exit(1)
        program = sys.stdin.buffer.read().decode()
        for name in LINKED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        _enter_namespaces()
        # With other credentials the kernel had forgotten to tell of the parent's death for a while.
        if os.getppid() != order["parent"]:
            os._exit(1)
        child = _fork_first(order, program)
        # Only the child is to hold these, so that the judge sees when the answer is gone.
        for each in order["pipes"]:
            os.close(each)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0x7F)
    except OSError as error:
        os.write(2, f"{error.filename or 'system'}: {error.strerror}\n".encode())
        os._exit(1)


def _enter_namespaces() -> None:
    """Root becomes nobody outside, in whose name limits of processes hold; others stay who they
    are.
    """
    outer, user, group = os.getpid(), os.geteuid(), os.getegid()
    ready, entered = os.pipe()
    mapper = os.fork()
    if mapper == 0:  # stays outside, where ids can be mapped
        os.close(entered)
        if os.read(ready, 1):
            _map_ids(outer, user, group)
        os._exit(0)
    _do(
        "unshare",
        NEW_USER | NEW_MOUNT | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS | NEW_CGROUP,
    )
    os.write(entered, b"x")
    os.close(entered)
    os.close(ready)
    if os.waitpid(mapper, 0)[1]:
        raise OSError(1, "the kernel does not let ids be mapped", "uid_map")
    _do("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _map_ids(process: int, user: int, group: int) -> None:
    for name, own in (("uid", user), ("gid", group)):
        lines = f"0 {own} 1\n"
        if user == 0:
            lines += f"{INSIDE} {NOBODY} 1\n"
        elif name == "gid":
            Path(f"/proc/{process}/setgroups").write_text("deny", encoding="ascii")
        try:
            Path(f"/proc/{process}/{name}_map").write_text(lines, encoding="ascii")
        except OSError:
            os._exit(1)


def _fork_first(order: dict[str, Any], program: str) -> int:
    """Fork the process that is shut in; the id of it. In it, this does not return."""
    root = os.getuid() == 0 and _has_mapping(INSIDE)
    done, report = os.pipe()
    go, let = os.pipe()
    child = os.fork()
    if child:
        os.close(report)
        os.close(go)
        if os.read(done, 1):
            os.write(let, b"x")
        return child
    status = 1
    try:
        _build_root(order["path"], order["disk"])
        _drop(INSIDE if root else None)
        _do("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os.write(report, b"x")
        os.close(let)
        if os.read(go, 1):  # else its parent died before the kernel was asked to tell
            # Before the limit, above which not every kernel closes some and keeps others.
            _close_all_but(order["pipes"])
            _limit(order)
            restrict()
            _mute()
            status = 0
    except OSError as error:
        os.write(2, f"{error.filename or 'system'}: {error.strerror}\n".encode())
    if status == 0:
        _run(order, program)
    os._exit(status)


def _has_mapping(inside: int) -> bool:
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    return any(int(line.split()[0]) == inside for line in lines)


def _build_root(paths: list[str], disk: int) -> None:
    """Make a tmpfs with the standard library the root folder, and let go of all others."""
    sources = {path: os.open(path, os.O_PATH) for path in (*paths, "/dev/null")}
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", TARGET, "tmpfs", NO_SUID | NO_DEVICES, f"size={disk},nr_inodes=1k,mode=755")
    for path, file in sources.items():
        target = TARGET + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        _mount(f"/proc/self/fd/{file}", target, None, BIND)
        device = path == "/dev/null"
        # Flags of the mount that it came from cannot be taken off it.
        kept = os.statvfs(target).f_flag & (NO_EXECUTION | NO_SUID | NO_DEVICES)
        _mount(None, target, None, REMOUNT | BIND | READ_ONLY | NO_SUID | kept)
        if not device:
            for hidden in ("site-packages", "dist-packages"):
                if os.path.isdir(f"{target}/{hidden}"):
                    _mount("tmpfs", f"{target}/{hidden}", "tmpfs", READ_ONLY, "size=4k")
    os.mkdir(TARGET + "/tmp")
    os.chmod(TARGET + "/tmp", 0o1777)
    os.chdir(TARGET)
    if _libc.syscall(PIVOT_ROOT, b".", b".") < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "pivot_root")
    _do("umount2", b".", DETACH)
    os.chdir("/tmp")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [None if each is None else each.encode() for each in (source, target, kind, options)]
    try:
        _do("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"mount of {target}") from None


def _drop(user: int | None) -> None:
    """Give up every capability, and root's id if there is another one."""
    for capability in range(64):
        if _libc.prctl(DROP_BOUND, capability, 0, 0, 0) < 0:
            break
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    if _libc.syscall(CAPSET, ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "capset")
    _do("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def _limit(order: dict[str, Any]) -> None:
    # A thread with an arena of its own takes 64 MiB of addresses, which the limit of memory counts.
    _libc.mallopt(ARENAS, 1)
    for which, most in (
        (resource.RLIMIT_CPU, order["cpu"]),
        (resource.RLIMIT_AS, order["memory"]),
        (resource.RLIMIT_FSIZE, order["disk"]),
        (resource.RLIMIT_NPROC, order["threads"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(which, (most, most))


def _close_all_but(pipes: list[int]) -> None:
    """A descriptor of a folder outside would be a way out."""
    for first, end in gaps([0, 1, 2, *pipes]):
        os.closerange(first, end)


def gaps(kept: Sequence[int]) -> list[tuple[int, int]]:
    """The descriptors between these and above them, as ranges for `os.closerange`. None is empty:
    asked to close nothing, Python 3.13 may close all that follows.
    """
    lower = sorted(kept)
    pairs = zip(lower, [*lower[1:], DESCRIPTORS], strict=True)
    return [(each + 1, above) for each, above in pairs if each + 1 < above]


def _mute() -> None:
    """The last to be done, so that whatever was refused before could still be told on stderr."""
    empty = os.open("/dev/null", os.O_RDWR)
    for each in (0, 1, 2):
        os.dup2(empty, each)
    os.close(empty)


def _run(order: dict[str, Any], program: str) -> None:
    """Under the filter: run one side until it ends."""
    inbox, outbox, *verdict = order["pipes"]
    with contextlib.suppress(BaseException):
        if order["role"] == "judge":
            run_judge(Channel(inbox, outbox), program, Channel(inbox, verdict[0]))
        else:
            run_answer(Channel(inbox, outbox), program)
