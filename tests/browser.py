"""A real Chromium through its DevTools protocol, over a pipe: no driver and no port. Tests that need
it are skipped where there is none; with CI=1 they fail there.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ANSWER_S = 60.0


def binary() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def require_browser() -> None:
    """Skip the test where there is no browser."""
    if binary() is None and not os.environ.get("CI"):
        pytest.skip("no Chromium here")


class Tab:
    """A page, its size and its colours. Exceptions of its scripts and errors of its console are
    collected in `complaints`.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    @property
    def complaints(self) -> list[str]:
        self.eval("0")
        return list(self._browser.complaints)

    def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Set the size of the window and the colours that its user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def eval(self, code: str) -> Any:
        """The value of an expression; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{code}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, code: str, timeout_s: float = PATIENCE_S) -> Any:
        """Wait until an expression is true."""
        until = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(AssertionError):
                if value := self.eval(code):
                    return value
            assert time.monotonic() < until, (
                f"never true: {code}; the page says {self.eval('document.body.innerText')[:600]!r};"
                f" {self._browser.complaints}"
            )
            time.sleep(0.03)

    def click(self, selector: str) -> None:
        """Click the first element that a CSS selector finds."""
        place = json.dumps(selector)
        self.wait(f"document.querySelector({place}) !== null")
        self.eval(f"document.querySelector({place}).click()")

    def text(self, selector: str = "body") -> str:
        return str(self.eval(f"document.querySelector({json.dumps(selector)}).innerText"))

    def drag(self, selector: str, start: float, end: float) -> None:
        """Drag over an element from one share of its width to another, with a real mouse."""
        box = self.eval(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)})"
            ".getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        left, top, width, height = box
        y = top + height / 2

        def mouse(kind: str, share: float) -> None:
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=left + share * width,
                y=y,
                button="left",
                buttons=0 if kind == "mouseReleased" else 1,
                clickCount=1,
            )

        mouse("mousePressed", start)
        for part in range(1, 6):
            mouse("mouseMoved", start + (end - start) * part / 5)
        mouse("mouseReleased", end)

    def shot(self, path: Path, *, whole: bool = True) -> Path:
        """A picture of the page, of all its height unless told."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    @property
    def sideways(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(
            self.eval("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        )


class Browser:
    """The process, and the two ends of the pipe."""

    def __init__(self, folder: Path) -> None:
        found = binary()
        assert found is not None, "CI needs Chromium; .ci/run installs it"
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        flags = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
            f" --disable-extensions --hide-scrollbars --remote-debugging-pipe"
            f" --user-data-dir={folder}"
        )
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {found} {flags} about:blank 3<&{to_read} 4>&{to_write}"],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._rest = 0, b""
        self.complaints: list[str] = []

    def tab(self) -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        return Tab(self, attached["sessionId"])

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + ANSWER_S
        while True:
            answer = self._read(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(until - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        told = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(str(details.get("exception", {}).get("description", details)))
        elif message.get("method") == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        return message

    def close(self) -> None:
        for end in (self._to, self._from):
            os.close(end)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


@contextlib.contextmanager
def browsing() -> Iterator[Tab]:
    """A tab of a browser of its own; one browser at a time, as two have kept each other waiting."""
    lock = FileLock(Path(tempfile.gettempdir()) / f"ingot-tests-browser-{os.getuid()}.lock")
    with lock, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(Path(folder))
        try:
            yield browser.tab()
        finally:
            browser.close()
