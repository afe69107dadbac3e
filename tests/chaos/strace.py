"""Lists the system calls by which a process changes files, and kills it at one of them, by strace.

What is written through a mapping (`mmap`) is no system call and is not seen; ingot writes no file
that way but heartbeats, which hold nothing that must last.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.chaos.zygote import PATIENCE_S, Child

Moment = Literal["before", "after"]
MUTATING = (
    "write",
    "pwrite64",
    "writev",
    "pwritev",
    "pwritev2",
    "sendfile",
    "copy_file_range",
    "ftruncate",
    "truncate",
    "fallocate",
    "fsync",
    "fdatasync",
    "sync_file_range",
    "rename",
    "renameat",
    "renameat2",
    "link",
    "linkat",
    "symlink",
    "symlinkat",
    "unlink",
    "unlinkat",
    "mkdir",
    "mkdirat",
    "rmdir",
    "chmod",
    "fchmod",
    "fchmodat",
    "chown",
    "fchown",
    "creat",
)
OPENING = ("open", "openat", "openat2")
SEEN_BESIDE = ("lseek", "close", "dup", "dup2", "dup3", "fcntl", "read")
"""What changes no file, but says at which byte the next `write` lands."""
WRITING = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC")
LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (.*)")
STARTED = re.compile(r"(\d+) +(\w+)\((.*) <unfinished \.\.\.>")
RESUMED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)\) += (.*)")
QUOTED = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
ANNOTATED = re.compile(r"<((?:\\x[0-9a-f]{2})+)>")
HERE = "FOLDER"
HELD_US = 20_000_000


@dataclass(frozen=True)
class Call:
    """One system call, as strace tells it: strings and paths are hexadecimal, so that the text has
    no special characters in them.
    """

    process: int
    name: str
    text: str
    answer: str

    @property
    def failed(self) -> bool:
        return self.answer.startswith("-1") or self.answer.startswith("?")

    @property
    def strings(self) -> list[bytes]:
        """Quoted arguments, in order: paths, and for writes the bytes."""
        return [unhex(found) for found in QUOTED.findall(self.text)]

    @property
    def annotated(self) -> list[Path]:
        """Where the file descriptors among the arguments point; the working folder, for calls
        relative to it.
        """
        return [Path(os.fsdecode(unhex(found))) for found in ANNOTATED.findall(self.text)]

    @property
    def names(self) -> list[Path]:
        """The paths among the arguments, absolute."""
        if self.name in ("write", "pwrite64", "writev", "pwritev", "pwritev2"):
            return []
        folders = iter(self.annotated)
        at = self.name.endswith("at") or self.name in ("renameat2", "openat2")
        return [
            (next(folders, Path("/")) if at else Path("/")) / os.fsdecode(text)
            for text in self.strings
        ]

    @property
    def file(self) -> Path:
        """What the call is about, the new name of a rename."""
        return (self.names or self.annotated)[-1] if self.name != "sendfile" else self.annotated[0]

    @property
    def selectors(self) -> list[Path]:
        """The paths by which strace's own `-P` picks this call; of a plain rename it looks at the
        old name only.
        """
        given = (
            []
            if self.name.startswith(("write", "pwrite"))
            else [Path(os.fsdecode(text)) for text in self.strings]
        )
        if self.name == "rename":
            given = given[:1]
        return [*given, *(path for path in self.annotated if path != Path.cwd())]

    @property
    def changes(self) -> bool:
        return self.name in MUTATING or (
            self.name in OPENING and WRITING.search(self.text) is not None
        )

    def is_below(self, folder: Path) -> bool:
        return any(
            path == folder or folder in path.parents for path in [*self.annotated, *self.names]
        )

    def __str__(self) -> str:
        return f"{self.name} {self.file}"


@dataclass(frozen=True)
class Fault:
    """A kill at the `number`-th (from 1) call `name` of a thread that touches `path`; `about` says
    which call of the recording that is.

    In paths the folder in which the action works is called `HERE`. No path: the `number`-th call of
    whichever process comes to it first.
    """

    index: int
    name: str
    path: str
    number: int
    about: str


def required() -> None:
    """Skip where processes cannot be traced; in CI that is a failure."""
    reason = None
    if shutil.which("strace") is None:
        reason = "strace is not installed (apt-get install strace)"
    elif (
        tried := subprocess.run(
            ["strace", "-o", os.devnull, "true"], capture_output=True, text=True, check=False
        )
    ).returncode:
        reason = f"processes cannot be traced here: {tried.stderr.strip()}"
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


def record(child: Child, log: Path) -> list[Call]:
    """Let the child act undisturbed, and tell every call that it and its threads and children made,
    in order.
    """
    names = [*MUTATING, *OPENING, *SEEN_BESIDE]
    with _Attached(
        child,
        log,
        ["-xx", "-s", str(1 << 26), "-e", f"trace={','.join(f'?{name}' for name in names)}"],
    ):
        child.go()
        status, said = child.end()
    assert status == 0, said
    return read_log(log)


def kill(child: Child, fault: Fault, folder: Path, log: Path, moment: Moment) -> Call | None:
    """Let the child act and kill it at `fault`, before the call takes effect or right after. The
    call at which strace says it was; None for none.
    """
    how = "signal=SIGKILL" if moment == "before" else f"delay_exit={HELD_US}"
    where = ["-P", fault.path.replace(HERE, str(folder))] if fault.path else []
    knobs = [
        "-xx",
        *where,
        "-e",
        f"trace={fault.name}",
        "-e",
        f"inject={fault.name}:{how}:when={fault.number}",
    ]
    with _Attached(child, log, knobs) as strace:
        child.go()
        if moment == "after":
            _kill_when_held(child, log, strace)
        status, _ = child.end()
    calls = read_log(log)
    if moment == "after":
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        hit = [call for call in calls if killed and call.answer.endswith("(DELAYED)")]
    else:
        killed = " +++ killed by SIGKILL +++" in log.read_text()
        hit = [call for call in calls if killed and call.answer.startswith("?")]
    return hit[-1] if hit else None


def faults(calls: Sequence[Call], folder: Path) -> list[Fault]:
    """A fault for every call that changes something below `folder`, in order."""
    seen: Counter[tuple[int, str, Path]] = Counter()
    planned = []
    for index, call in enumerate(calls):
        for path in {*call.selectors}:
            seen[call.process, call.name, path] += 1
        if call.changes and not call.failed and call.is_below(folder):
            # The rarest of its paths: strace counts from the moment it is attached.
            path = min(
                call.selectors, key=lambda path: (seen[call.process, call.name, path], str(path))
            )
            planned.append(
                Fault(
                    index,
                    call.name,
                    here(path, folder),
                    seen[call.process, call.name, path],
                    here(call, folder),
                )
            )
    return planned


def faults_anywhere(calls: Sequence[Call], folder: Path) -> list[Fault]:
    """For each name of a call that changes something below `folder`: a fault for every number that
    a process comes to.
    """
    seen: Counter[tuple[int, str]] = Counter()
    planned: dict[tuple[str, int], Fault] = {}
    for index, call in enumerate(calls):
        seen[call.process, call.name] += 1
        number = seen[call.process, call.name]
        if call.changes and not call.failed and call.is_below(folder):
            planned.setdefault((call.name, number), Fault(index, call.name, "", number, call.name))
    return list(planned.values())


def renamed(text: str, old: int, new: int) -> str:
    """The same path or call in a process of another number, which is part of the names of what it
    writes.
    """
    return re.sub(rf"(?<=-){old}(?![0-9])", str(new), text.replace(f"{old:016d}", f"{new:016d}"))


def read_log(log: Path) -> list[Call]:
    """What strace wrote, in the order in which calls began; those that open a file, in which they
    ended.

    A descriptor is free as soon as its `close` has begun, and another thread's `open` that began
    before may be given it.
    """
    calls: list[Call] = []
    unfinished: dict[int, int] = {}
    opening: dict[int, Call] = {}
    for line in log.read_text().splitlines():
        if found := STARTED.fullmatch(line):
            call = Call(int(found[1]), found[2], found[3], "?")
            if call.name in OPENING:
                opening[call.process] = call
            else:
                unfinished[call.process] = len(calls)
                calls.append(call)
        elif found := RESUMED.fullmatch(line):
            process = int(found[1])
            if process in opening:
                calls.append(
                    Call(process, found[2], opening.pop(process).text + found[3], found[4])
                )
            else:
                number = unfinished.pop(process)
                calls[number] = Call(process, found[2], calls[number].text + found[3], found[4])
        elif found := LINE.fullmatch(line):
            calls.append(Call(int(found[1]), found[2], found[3].rstrip(), found[4]))
    return [*calls, *opening.values()]


def here(what: object, folder: Path) -> str:
    return str(what).replace(str(folder), HERE)


def unhex(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


class _Attached:
    """strace on all threads of a child and on whatever it starts; its counters begin at nothing."""

    def __init__(self, child: Child, log: Path, knobs: Iterable[str]) -> None:
        self._errors = log.with_suffix(".err")
        log.unlink(missing_ok=True)
        self._command = ["strace", "-f", "-y", "-o", str(log), *knobs, "-p", str(child.pid)]

    def __enter__(self) -> subprocess.Popen[bytes]:
        with self._errors.open("wb") as errors:
            self._strace = subprocess.Popen(self._command, stderr=errors)
        deadline = time.monotonic() + PATIENCE_S
        while b" attached" not in self._errors.read_bytes():
            if self._strace.poll() is not None or time.monotonic() > deadline:
                self._strace.kill()
                raise AssertionError(f"strace could not be attached: {self._errors.read_text()}")
            time.sleep(0.002)
        return self._strace

    def __exit__(self, *error: object) -> None:
        try:
            self._strace.wait(PATIENCE_S if error[0] is None else 5)
        except subprocess.TimeoutExpired:
            self._strace.kill()
            self._strace.wait()
            raise AssertionError(
                f"strace did not end with its process: {' '.join(self._command)}"
            ) from None


def _kill_when_held(child: Child, log: Path, strace: subprocess.Popen[bytes]) -> None:
    """Wait until strace holds a thread at the end of its call, and kill the process there; or until
    it has ended.

    strace itself goes, too: it would hand on the news of the death only after the time that it was
    told to hold the thread.
    """
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if log.exists() and "(DELAYED)" in log.read_text():
            os.kill(child.pid, signal.SIGKILL)
            strace.kill()
            return
        if child.has_ended:
            return
        time.sleep(0.002)
    raise AssertionError(f"strace held no call, and the process did not end in {PATIENCE_S:g} s")
