"""Code that tries to get out of its sandbox: every attempt is a real one, against the real kernel."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.rewards.sandbox import run
from ingot.rewards.sandbox.run import SandboxLimits, run_trial
from tests.patience import PATIENCE_S
from tests.rewards.sandbox.kernel import kernel_isolates

if not kernel_isolates():
    pytest.skip("the kernel gives no namespaces; not root, or a container", allow_module_level=True)

ATTEMPTS = """
import ctypes, os, resource, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def system(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def read(path):
    with open(path, "rb") as file:
        return file.read()

def descriptors():
    found = []
    for each in range(1024):
        for path in ("etc/passwd", *("../" * n + "etc/passwd" for n in range(1, 9))):
            try:
                found.append(os.read(os.open(path, os.O_RDONLY, dir_fd=each), 9))
            except OSError:
                pass
        try:
            os.fchdir(each)
            found.append(each)
        except OSError:
            pass
    assert found

def link(path):
    os.symlink(path, "link")
    return read("link")

def huge():
    with open("huge", "wb") as file:
        while True:
            file.write(bytes(1 << 20))

def many_files():
    for n in range(100_000):
        open(str(n), "w").close()

def library():
    if os.statvfs(os.__file__).f_flag & os.ST_RDONLY:
        raise OSError("read only")

def write(path):
    open(path, "w").write("written")

def threads():
    for _ in range(10_000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

def limits():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)

def environment():
    return os.environ["PATH"] + read("/proc/self/environ")

def outcome(attempt):
    try:
        return "done: " + repr(attempt())[:80]
    except MemoryError:
        return "no memory"
    except Exception as error:
        return type(error).__name__

def everything():
    return {name: outcome(attempt) for name, attempt in ATTEMPTS.items()}

ATTEMPTS = {
    "read /etc/passwd": lambda: read("/etc/passwd"),
    "read a secret file": lambda: read(SECRET),
    "read it by way of a link": lambda: link(SECRET),
    "read through open descriptors": descriptors,
    "list the files of this machine": lambda: [os.listdir("/home"), os.listdir("/root")],
    "see other processes": lambda: os.listdir("/proc"),
    "read the parent's environment": lambda: read(f"/proc/{os.getppid()}/environ"),
    "have an environment": environment,
    "write outside": lambda: write(OUTSIDE),
    "write into the root folder": lambda: write("/etc-passwd"),
    "write into the standard library": lambda: write(os.__file__),
    "have a library mounted for writing": library,
    "go up from the root": lambda: read("/../etc/passwd"),
    "write a huge file": huge,
    "write very many files": many_files,
    "connect to the loopback": lambda: socket.create_connection(("127.0.0.1", PORT), 5),
    "make a Unix socket": lambda: socket.socketpair(),
    "make a socket by number": lambda: system(SOCKET, 2, 1, 0),
    "fork": os.fork,
    "fork by number": lambda: system(CLONE, 17, 0, 0, 0, 0),
    "clone3 by number": lambda: system(435, 0, 0),
    "run a program": lambda: os.execv(sys.executable, ["python"]),
    "start a program": lambda: os.posix_spawn("/bin/sh", ["sh"], {}),
    "start very many threads": threads,
    "take much memory": lambda: len(bytearray(10**10)),
    "take memory in a file": lambda: os.memfd_create("much"),
    "take shared memory": lambda: system(SHMGET, 0, 10**9, 0o1600),
    "raise its limits": limits,
    "signal its parent": lambda: os.kill(os.getppid(), 9),
    "signal everybody": lambda: os.kill(-1, 9),
    "signal by a descriptor": lambda: system(72, 1, 8, 1) or write("/not/there"),
    "trace its parent": lambda: system(PTRACE, 16, os.getppid(), 0, 0),
    "read another process' memory": lambda: system(VM_READ, 1, 0, 0, 0, 0, 0),
    "outlive its parent": lambda: system(PRCTL, 1, 0, 0, 0, 0),
    "make a namespace": lambda: system(UNSHARE, 0x10000000),
    "mount": lambda: system(MOUNT, b"proc", b"/tmp", b"proc", 0, 0),
    "change its root": lambda: os.chroot("/tmp"),
    "become root": lambda: os.setuid(0) or read("/etc/shadow"),
    "load a kernel program": lambda: system(BPF, 0, 0, 0),
    "write to disks of all": lambda: system(SYNC),
}
"""
X86, ARM = 0, 1
NUMBERS = {
    "SOCKET": (41, 198),
    "CLONE": (56, 220),
    "SHMGET": (29, 194),
    "PTRACE": (101, 117),
    "VM_READ": (310, 270),
    "PRCTL": (157, 167),
    "UNSHARE": (272, 97),
    "MOUNT": (165, 40),
    "BPF": (321, 280),
    "SYNC": (162, 81),
}
ATTEMPTED = [
    line.split('"')[1]
    for line in ATTEMPTS.partition("\nATTEMPTS = {")[2].splitlines()
    if '"' in line
]
REFUSED = (
    *("OSError", "PermissionError", "FileNotFoundError", "KeyError", "RuntimeError", "no memory"),
    *("AssertionError", "ValueError", "TypeError"),
)
SHORT = SandboxLimits(timeout=30, disk_mib=4, memory_mib=256)


def names(**given: Any) -> str:
    column = X86 if os.uname().machine == "x86_64" else ARM
    given |= {name: numbers[column] for name, numbers in NUMBERS.items()}
    return "\n".join(f"{name} = {value!r}" for name, value in given.items()) + ATTEMPTS


class Outcomes:
    """What became of every attempt, told over a trial: the judge compares, the test bisects."""

    def __init__(self, program: str) -> None:
        self.program = program

    def hold(self, test: str, limits: SandboxLimits = SHORT) -> bool:
        verdict = run_trial(self.program, test, limits)
        return verdict is not None and verdict.whole


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, bool], Path, bool]]:
    """By attempt whether it was refused; the folder it was to write to; whether it connected."""
    folder = tmp_path_factory.mktemp("outside")
    folder.chmod(0o777)
    secret = folder / "secret"
    secret.write_text("the secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        program = names(
            SECRET=str(secret), OUTSIDE=str(folder / "out"), PORT=server.getsockname()[1]
        )
        # One trial for all: each assert is one attempt, and a partial verdict would not say which
        # failed, so that the outcomes are told apart by what the judge may see.
        tests = "found = everything()\n" + "\n".join(
            f"assert found[{name!r}] in {REFUSED!r}" for name in ATTEMPTED
        )
        verdict = run_trial(program, tests, SHORT)
        refused = dict.fromkeys(ATTEMPTED, True)
        if verdict is None or not verdict.whole:
            outcomes = Outcomes(program)
            for name in ATTEMPTED:
                refused[name] = outcomes.hold(f"assert outcome(ATTEMPTS[{name!r}]) in {REFUSED!r}")
        try:
            server.accept()
            connected = True
        except TimeoutError:
            connected = False
        yield refused, folder, connected


@pytest.mark.parametrize("attempt", ATTEMPTED)
def test_it_cannot(tried: tuple[dict[str, bool], Path, bool], attempt: str) -> None:
    assert tried[0][attempt]


def test_nothing_came_out(tried: tuple[dict[str, bool], Path, bool]) -> None:
    _, folder, connected = tried
    assert not connected
    assert [path.name for path in folder.iterdir()] == ["secret"]


def test_the_attempts_would_succeed_outside(tmp_path: Path) -> None:
    """So that a refusal is the sandbox's, not that of a mistyped attempt."""
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = names(
            SECRET=str(secret), OUTSIDE=str(tmp_path / "out"), PORT=server.getsockname()[1]
        )
        harmless = (
            *("read /etc/passwd", "read a secret file", "see other processes", "write outside"),
            *("connect to the loopback", "make a Unix socket", "make a socket by number"),
            *("have an environment", "take memory in a file", "outlive its parent"),
        )
        code = f"{program}\nimport json\nprint(json.dumps({{name: outcome(ATTEMPTS[name])"
        code += f" for name in {harmless!r}}}))"
        code = code.replace('os.environ["PATH"] + read', 'os.environ["PATH"].encode() + read')
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert all(outcome.startswith("done") for outcome in found.values()), found
    assert (tmp_path / "out").read_text() == "written"


def alive(marker: int) -> list[int]:
    """The processes of sandboxes whose limit of disk is the marker."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                line = (each / "cmdline").read_bytes()
            except OSError:
                continue
            if f'"disk": {marker << 20},'.encode() in line and b"ingot.rewards.sandbox" in line:
                found.append(int(each.name))
    return found


def shut_in(marker: int) -> list[int]:
    """Those of them that are in a process namespace of their own, one a sandbox."""
    found = []
    for each in alive(marker):
        try:
            status = Path(f"/proc/{each}/status").read_text()
        except OSError:
            continue
        ids = next(line for line in status.splitlines() if line.startswith("NSpid:"))
        if len(ids.split()) > 2:
            found.append(each)
    return found


def gone(marker: int) -> bool:
    until = time.monotonic() + PATIENCE_S
    while alive(marker) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(marker)


ENDLESS = {
    "a loop": "while True: pass",
    "output": "while True: print('x' * 100_000)",
    "output to every descriptor": """
import os, threading
def shout(each):
    while True:
        try: os.write(each, b"x" * 4096)
        except OSError: return
for each in range(32): threading.Thread(target=shout, args=(each,)).start()
""",
    "ignored signals": """
import signal
for each in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(each, signal.SIG_IGN)
while True:
    try:
        while True: pass
    except BaseException: pass
""",
    "memory in pieces": "held = []\nwhile True:\n    try: held.append(bytearray(1 << 16))\n"
    "    except MemoryError: pass",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_ended_whole(name: str) -> None:
    marker = 10 + list(ENDLESS).index(name)
    limits = SandboxLimits(timeout=1.0, disk_mib=marker, memory_mib=128)
    began = time.monotonic()
    # Wrong, if it is ever reached: threads shout beside a function that may be asked.
    verdict = run_trial(ENDLESS[name] + "\ndef f(): return 2", "assert f() == 1", limits)
    assert verdict is None or not verdict.passed
    assert time.monotonic() - began < 60
    assert gone(marker)


def test_a_killed_trainer_leaves_no_code_running() -> None:
    marker = 37
    code = (
        "from ingot.rewards.sandbox.run import SandboxLimits, run_trial\n"
        f"run_trial('while True: pass', 'assert f()', SandboxLimits(timeout=600, disk_mib={marker}))"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code])
    try:
        until = time.monotonic() + PATIENCE_S
        # Helpers that map ids come and go; what is shut in stays.
        while len(shut_in(marker)) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(shut_in(marker)) == 2, "one sandbox each for program and tests"
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    assert gone(marker)


WITHOUT = """
from ingot.base.errors import WrongInput
from ingot.config.sections.rewards import CodeReward
from ingot.rewards.build import build_rewards
try:
    build_rewards([CodeReward(kind="code")])
except WrongInput as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="not root, so that a kernel cannot be set to refuse")
def test_a_kernel_without_isolation_is_refused_before_the_start() -> None:
    """The kernel does refuse: in this namespace, and for what is started in it."""
    limit = "echo 0 > /proc/sys/user/max_user_namespaces"
    done = subprocess.run(
        ["unshare", "-U", "-r", "sh", "-c", f'{limit}; exec "$0" -c "$1"', sys.executable, WITHOUT],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("reward code: code of a model runs in a sandbox only")
    assert "unshare: No space left on device" in done.stdout
    assert "remove the reward" in done.stdout


def test_a_sandbox_with_an_open_door_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PROBE", "def found(): return ['files of this machine can be read']")
    with pytest.raises(WrongInput, match="code could get out of it"):
        run.check_sandbox.__wrapped__()


def test_a_server_whose_files_are_private_has_the_same_sandbox() -> None:
    """Its umask would keep the sandbox's own folders from nobody, who runs the code inside."""
    code = "import os; os.umask(0o077)\n"
    code += "from ingot.rewards.sandbox.run import check_sandbox\n"
    code += "check_sandbox(); print('it holds')"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert found.stdout == "it holds\n", found.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="not root, so that it cannot become another user")
def test_a_user_without_rights_has_the_same_sandbox() -> None:
    """With the system's own interpreter where the tests' lies in root's home."""
    code = "import sys; sys.path.append(sys.argv[1])\n"
    code += "from ingot.rewards.sandbox.run import check_sandbox\n"
    code += "check_sandbox(); print('it holds')"
    found = None
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            found = subprocess.run(
                [python, "-c", code, str(Path.cwd())],
                user=12345,
                group=12345,
                extra_groups=[],
                cwd="/",
                capture_output=True,
                text=True,
                check=False,
            )
        except (PermissionError, FileNotFoundError):
            continue
        if "No module named 'ingot'" in found.stderr:
            pytest.skip("another user cannot read this checkout")
        break
    if found is None:
        pytest.skip("another user cannot run any interpreter of this machine")
    assert found.stdout == "it holds\n", found.stderr
