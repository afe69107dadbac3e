"""Rewards whose code may hang or crash: each thread that scores has a process of its own, which is
killed when it takes too long and started anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.processes import own_python
from ingot.config.sections.rewards import RewardSettings
from ingot.rewards.protocol import RewardFailed, Sample

START_S = 120.0
"""How long a process may take to import what it needs."""
MOST_BYTES = 1 << 20


class ScoringProcess:
    """A process that computes one kind of reward, a sample at a time (`worker.py`). It is killed
    when the thread that made it ends.
    """

    def __init__(self, settings: RewardSettings) -> None:
        reads, writes = os.pipe()
        found = os.pathsep.join(path for path in sys.path if path)
        try:
            self._process = subprocess.Popen(
                [*own_python(), "-m", "ingot.rewards.worker", str(writes)],
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": found},
                pass_fds=[writes],
                start_new_session=True,
            )
        except BaseException:
            os.close(reads)
            raise
        finally:
            os.close(writes)
        self._reads = reads
        order = {"settings": settings.model_dump(mode="json"), "parent": os.getpid()}
        try:
            reply = self.ask(order, START_S)
        except RewardFailed as error:
            self.kill()
            raise RewardFailed(f"its process does not start: {error}", again=True) from None
        if "wrong" in reply:
            self.kill()
            raise WrongInput(str(reply["wrong"]))

    def ask(self, message: Any, timeout: float) -> dict[str, Any]:
        """Send a message and wait for the reply.

        Raises:
            RewardFailed: there is none in time, or the process died.
        """
        assert self._process.stdin is not None
        until = time.monotonic() + timeout
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise RewardFailed(f"its process died ({self._ended()})", again=True) from None
        ready = select.poll()  # select() takes no descriptor above 1,023
        ready.register(self._reads, select.POLLIN)
        data = b""
        while not data.endswith(b"\n"):
            left = max(0.0, until - time.monotonic())
            if not ready.poll(1000 * left):
                raise RewardFailed(f"it took more than {timeout:g} s and was stopped")
            part = os.read(self._reads, 1 << 16)
            if not part:
                raise RewardFailed(f"its process died ({self._ended()})", again=True)
            data += part
            if len(data) > MOST_BYTES:
                raise RewardFailed("its process writes without end")
        reply: dict[str, Any] = json.loads(data)
        return reply

    def _ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(5)
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return "closed its pipe"

    def kill(self) -> None:
        """End it, and whatever it started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._process.wait()
        if self._reads >= 0:
            os.close(self._reads)
            self._reads = -1


def _has_descriptor(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False


class ScoresInProcesses:
    """A reward in a process for each thread that asks for one."""

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._all: list[ScoringProcess] = []

    def __call__(self, sample: Sample) -> float:
        process = self.process()
        try:
            reply = process.ask(asdict(sample), self._settings.timeout)
        except BaseException:
            self._forget(process)
            raise
        if "failed" in reply:
            raise RewardFailed(str(reply["failed"]), again=bool(reply.get("again")))
        return float(reply["value"])

    def process(self) -> ScoringProcess:
        """The process of this thread, started if there is none.

        Raises:
            RewardFailed: it does not start.
            WrongInput: the reward's code refuses its settings, or cannot be imported.
        """
        found: ScoringProcess | None = getattr(self._mine, "process", None)
        if found is None:
            found = self._mine.process = ScoringProcess(self._settings)
            with self._lock:
                self._all.append(found)
        return found

    def _forget(self, process: ScoringProcess) -> None:
        process.kill()
        self._mine.process = None
        with self._lock:
            self._all.remove(process)

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            for process in self._all:
                process.kill()
            self._all.clear()
