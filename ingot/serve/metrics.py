"""What the server counts, for Prometheus. A registry of its own, so that two servers in one process
do not mix.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """All metrics of one server; names begin with `ingot_`."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "ingot_requests", "HTTP requests", ["route", "status"], registry=self._registry
        )
        self.seconds = Histogram(
            "ingot_request_seconds",
            "Seconds from request to end of answer",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_token = Histogram(
            "ingot_first_token_seconds",
            "Seconds from queueing to first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.tokens = Counter(
            "ingot_tokens",
            "Tokens read (prompt) and generated (completion)",
            ["kind"],
            registry=self._registry,
        )
        self.cancelled = Counter(
            "ingot_cancelled", "Completions whose client went away", registry=self._registry
        )
        self.failures = Counter(
            "ingot_step_failures",
            "Steps of the model that raised an error",
            registry=self._registry,
        )
        self.waiting = Gauge(
            "ingot_waiting", "Completions that wait for a row of the batch", registry=self._registry
        )
        self.running = Gauge(
            "ingot_running", "Completions that have a row of the batch", registry=self._registry
        )
        self.rows = Histogram(
            "ingot_batch_rows",
            "Rows decoded together, by step",
            buckets=_ROWS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        """The page that Prometheus scrapes."""
        return generate_latest(self._registry)
