"""Notices that this machine will be taken away: a file that appears, or what Google's metadata
server says. Each counts as a SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path
from types import TracebackType

from ingot.base.progress import say

POLL_S = 1.0
WAIT_S = 60.0
"""How long the metadata server is asked to wait for a change before it answers; other failures are
tried again as seldom.
"""
PREEMPTED = "/computeMetadata/v1/instance/preempted"


class Notice:
    """While entered, a thread looks for the notice; it never stops a run by failing itself."""

    def __init__(self, where: str | None) -> None:
        self._where = where
        self._over = threading.Event()

    def __enter__(self) -> Notice:
        if self._where is not None:
            threading.Thread(target=self._look, name="notice", daemon=True).start()
        return self

    def _look(self) -> None:
        assert self._where is not None
        comes = (
            _told_by_server
            if self._where == "gce"
            else lambda over: _appears(Path(str(self._where)), over)
        )
        if comes(self._over) and not self._over.is_set():
            say(
                f"notice: this machine will be taken away, as {self._where} says"
                " (checkpoint.notice)"
            )
            os.kill(os.getpid(), signal.SIGTERM)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()


def _appears(path: Path, over: threading.Event) -> bool:
    """Waits until `path` is there."""
    while not path.exists():
        if over.wait(POLL_S):
            return False
    return True


def _told_by_server(over: threading.Event) -> bool:
    """Waits until the metadata server of Google Compute Engine says that the machine is being
    pre-empted.

    https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption;
    $GCE_METADATA_HOST is its address elsewhere.
    """
    url = f"http://{os.environ.get('GCE_METADATA_HOST', 'metadata.google.internal')}{PREEMPTED}"
    straight = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # no proxy knows this machine's own server
    request = urllib.request.Request(
        f"{url}?wait_for_change=true&timeout_sec={int(WAIT_S)}",
        headers={"Metadata-Flavor": "Google"},
    )
    warned = False
    while not over.is_set():
        began = time.monotonic()
        try:
            with straight.open(request, timeout=WAIT_S + 10) as answer:
                if answer.read().strip() == b"TRUE":
                    return True
            failed = ""
        except (OSError, HTTPException) as error:
            failed = str(error) or type(error).__name__
        if failed and not warned:
            warned = True
            say(f"warning: no notices of pre-emption from {url} ({failed}); trying on")
        # An answer that came at once, whatever it was, is not asked for again and again.
        over.wait(max(POLL_S - (time.monotonic() - began), WAIT_S if failed else 0.0))
    return False
