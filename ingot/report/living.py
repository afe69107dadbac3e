"""A run's page while a verb is at work on the run: written again and again, for a small share of a
core. What draws it is imported when it is first drawn.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.base.lazy import lazy_import
from ingot.base.progress import say
from ingot.base.runfolder import RunFolder
from ingot.report.metrics import MetricsFile

if TYPE_CHECKING:
    from ingot.report import page
else:
    page = lazy_import("ingot.report.page")

REFRESH_S = 5.0
MOST_SHARE = 0.002
"""The share of a core that refreshing may take: a page that takes 50 ms is written every 25 s."""


def keep_page(run: RunFolder, doing: str, over: threading.Event) -> None:
    """Write the page again and again until `over`; for a thread. Not at once: a training that
    begins, or begins again, would wait for it.
    """
    metrics, wait = MetricsFile(run.metrics), REFRESH_S
    while not over.wait(wait):
        began = time.thread_time()
        show_page(run, doing, metrics)
        wait = max(REFRESH_S, (time.thread_time() - began) / MOST_SHARE)


def show_page(run: RunFolder, doing: str = "", metrics: MetricsFile | None = None) -> None:
    """Write the page. Where that fails nothing stops, and where no verb is at work any more, it is
    warned of.
    """
    try:
        page.write_page(run, doing, metrics)
    except Exception as error:
        if not doing:
            say(
                f"warning: the page of {run.root} cannot be written"
                f" ({type(error).__name__}: {error}); the run goes on without it"
            )


def renew_page(run: RunFolder, record: Path) -> None:
    """Write the page if the process that wrote `record`, of a step that is done, was killed before
    it could say so on the page.
    """
    with contextlib.suppress(OSError):
        written = run.reports / "index.html"
        if not written.exists() or written.stat().st_mtime_ns < record.stat().st_mtime_ns:
            show_page(run)
