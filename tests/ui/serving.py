"""`ingot ui` in a process of its own, as it is typed."""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.cli.commands import start_ingot
from tests.patience import PATIENCE_S

START_S = 120.0


@dataclass(frozen=True)
class Shown:
    """A server that listens at `url`; `token` is what it said at its start."""

    url: str
    token: str | None

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S, trust_env=False)

    def get(self, path: str, **headers: str) -> httpx.Response:
        with self.client(**headers) as client:
            return client.get(path)

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        with self.client(**headers) as client:
            return client.post(path, json=body)


@contextlib.contextmanager
def showing(folder: Path, *options: str) -> Iterator[Shown]:
    """Start a server on a free port, and stop it afterwards."""
    process = start_ingot("ui", str(folder), "--port", "0", *options, stderr=subprocess.PIPE)
    assert process.stderr is not None
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stderr or ():
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    try:
        said, token = "", None
        while not (found := re.search(r"^showing .* at (http://\S+)/$", said, re.MULTILINE)):
            line = lines.get(timeout=START_S)
            assert line, said
            said += line
        if told := re.search(r"#token=(\S+)", said):
            token = told[1]
        yield Shown(re.sub(r"//[^:/]+", "//127.0.0.1", found[1]), token)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
