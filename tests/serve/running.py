"""A server in a process of its own, as `ingot serve` runs it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.forks import Process, start_call
from tests.patience import PATIENCE_S

START_S = 120.0


@dataclass(frozen=True)
class Running:
    """A server that listens."""

    url: str
    process: Process
    log: Path
    key: str | None

    def client(self, **more: Any) -> httpx.Client:
        headers = {} if self.key is None else {b"Authorization": f"Bearer {self.key}".encode()}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S, **more)

    @contextlib.contextmanager
    def asked(self, path: str, body: dict[str, Any]) -> Iterator[None]:
        """A request on its way, until the block ends: then its client hangs up, whether there was
        an answer or not.
        """
        key = {} if self.key is None else {"Authorization": f"Bearer {self.key}".encode()}
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE_S)
        connection.request(
            "POST", path, json.dumps(body), {"Content-Type": "application/json", **key}
        )
        try:
            yield
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of one metric that have these labels."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        chosen = [
            line
            for line in lines
            if re.match(rf"{name}(\{{|\s)", line)
            and all(f'{key}="{value}"' in line for key, value in labels.items())
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in chosen)

    def wait_for(self, name: str, value: float, timeout_s: float = PATIENCE_S) -> None:
        """Wait until a metric has a value."""
        until = time.monotonic() + timeout_s
        while (now := self.metric(name)) != value:
            assert time.monotonic() < until, f"{name} is {now}, not {value}"
            time.sleep(0.05)


@contextlib.contextmanager
def running(
    folder: Path,
    *,
    environ: dict[str, str] | None = None,
    key: str | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """Start a server on a free port and stop it afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        if key is not None:
            environ, settings = (
                {**(environ or {}), "THE_KEY": key},
                {
                    **settings,
                    "api_key": "env:THE_KEY",
                },
            )
        process = start_call(serve_tiny, folder, {"port": 0, **settings}, log, environment=environ)
        try:
            yield Running(_address(process, log), process, log, key)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def _address(process: Process, log: Path) -> str:
    until = time.monotonic() + START_S
    while True:
        text = log.read_text() if log.exists() else ""
        if found := re.search(r"^serving tiny at (\S+)$", text, re.MULTILINE):
            return found[1].replace("0.0.0.0", "127.0.0.1")
        assert process.poll() is None, text
        assert time.monotonic() < until, f"not listening after {START_S} s: {text}"
        time.sleep(0.05)


def serve_tiny(folder: Path, settings: dict[str, Any], log: Path) -> None:
    """The server's process; it ends as `ingot serve` does, and says so."""
    from ingot.base.errors import IngotError
    from ingot.config.sections.deployment import Serve
    from ingot.serve import server

    with log.open("wb") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    try:
        server.serve(folder, Serve(**settings), "tiny")
    except IngotError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print("the server has ended", file=sys.stderr)
