"""The serving engine: a bounded queue between asyncio and the one thread that runs the model.

Routes submit requests and read their output; between two steps the thread moves waiting requests
into the running batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ingot.base.malloc import return_freed_memory
from ingot.base.progress import say
from ingot.models.generation.request import Completion, CompletionChunk, Request, join_chunks
from ingot.serve.http.bodies import check_count
from ingot.serve.http.errors import ApiError
from ingot.serve.http.middleware import ServerMetrics

# After this many consecutive failed steps the server reports itself unhealthy, so that its
# orchestrator can restart it.
MAX_FAILURES = 3
PROBE = Request([0], 1)
"""A request that any model can answer: if it fails too, the clients are not to blame."""
IDLE_S = 5.0
"""After so long without a request the memory of earlier ones goes back to the system. Between
requests that follow each other it would be asked for again.
"""


class BatchWorker(Protocol):
    """What the engine runs: it takes requests into a batch and computes it step by step. Only one
    thread calls it. A job is the worker's own handle of a request.
    """

    def add(self, request: Request) -> Any:
        """Queue a request and return its job."""
        ...

    def cancel(self, job: Any) -> None:
        """Drop a request; finished ones are ignored."""
        ...

    def clear(self) -> None:
        """Drop all requests."""
        ...

    def resume(self, job: Any) -> None:
        """Queue a request that `clear` has dropped again: it goes on behind the output that `step`
        has returned. Raises where it cannot.
        """
        ...

    def step(self) -> Sequence[tuple[Any, CompletionChunk]]:
        """Compute one step; returns new output by job, in order. A job's last output has its
        `finish`.
        """
        ...


@runtime_checkable
class InterruptibleWorker(Protocol):
    """A worker with long steps, which can drop a job while a step runs."""

    def interrupt(self, job: Any) -> None:
        """Drop a job; may be called from any thread."""
        ...


@dataclass(eq=False)
class _QueuedRequest:
    """One request of a ticket. `outputs`: since it joined the batch; `again`: it was dropped by a
    step that failed.
    """

    ticket: Ticket
    index: int
    request: Request
    since: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    done: bool = False
    started: bool = False
    generated: int = 0
    job: Any = None
    outputs: int = 0
    again: bool = False

    @property
    def doubtful(self) -> bool:
        """Whether a step may fail because of it: none has ended well that read its prompt and took
        it further.
        """
        return self.outputs < 2


_Delivery = tuple[_QueuedRequest, CompletionChunk | ApiError]


class Ticket:
    """The requests of one API call. Their output arrives in the event loop the ticket was made
    in.
    """

    def __init__(self, engine: ServingEngine, requests: Sequence[Request]) -> None:
        self._engine, self.loop = engine, asyncio.get_running_loop()
        self.entries = [
            _QueuedRequest(self, index, request) for index, request in enumerate(requests)
        ]
        self._arrived: asyncio.Queue[tuple[int, CompletionChunk | ApiError]] = asyncio.Queue()

    def put(self, index: int, item: CompletionChunk | ApiError) -> None:
        """Deliver output or an error; called in the ticket's event loop."""
        self._arrived.put_nowait((index, item))

    async def pieces(self) -> AsyncIterator[tuple[int, CompletionChunk]]:
        """(index of the request, output) as they arrive, until all requests are finished. Raises
        ApiError where one fails.
        """
        left = len(self.entries)
        while left:
            index, item = await self._arrived.get()
            if isinstance(item, ApiError):
                raise item
            if item.finish == "error":
                raise ApiError(
                    500,
                    "the model's numbers are not finite on this prompt, or its answer became too"
                    " complex for response_format or tools; try another prompt, schema or model",
                )
            left -= item.finish is not None
            yield index, item

    async def parts(self) -> list[list[CompletionChunk]]:
        """All output of each request, in the order of the requests."""
        parts: list[list[CompletionChunk]] = [[] for _ in self.entries]
        async for index, piece in self.pieces():
            parts[index].append(piece)
        return parts

    async def completions(self) -> list[Completion]:
        """All completions, in the order of the requests."""
        return [join_chunks(pieces) for pieces in await self.parts()]

    def cancel(self) -> None:
        """Cancel requests that are not finished."""
        self._engine.cancel(self)


class ServingEngine:
    """Runs a worker in a thread. At most `max_batch` requests run and `max_queue` wait.

    A step that fails empties the batch. Its requests join again one by one, each once the one
    before it has got output; the one with which a step fails once more is answered with 500.
    """

    def __init__(
        self, worker: BatchWorker, metrics: ServerMetrics, *, max_batch: int, max_queue: int
    ) -> None:
        self._worker, self._metrics = worker, metrics
        self._max_batch, self._capacity = max_batch, max_batch + max_queue
        self._condition = threading.Condition()
        self._waiting: deque[_QueuedRequest] = deque()
        self._running: dict[Any, _QueuedRequest] = {}
        self._stopping = False
        self._failures = 0
        self._mean_s = 1.0
        self._thread = threading.Thread(target=self._work, name="ingot-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the thread runs and its steps succeed."""
        return self._thread.is_alive() and self._failures < MAX_FAILURES

    def submit(self, requests: Sequence[Request]) -> Ticket:
        """Queue requests, all or none; call it in an event loop. They must have passed
        `LoadedModel.check`.

        Raises:
            ApiError: 429 where the queue is full, 400 where so many requests can never fit, 503
                while the server is stopping.
        """
        check_count(len(requests), self._capacity, "answers")
        ticket = Ticket(self, requests)
        with self._condition:
            if self._stopping:
                raise _stopping()
            busy = len(self._waiting) + len(self._running)
            if busy + len(requests) > self._capacity:
                wait = min(
                    60, math.ceil(self._mean_s * max(1.0, len(self._waiting) / self._max_batch))
                )
                message = (
                    f"{busy} requests are running or waiting, {self._capacity} fit; try again in"
                    f" {wait} s"
                )
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(wait)})
            self._waiting.extend(ticket.entries)
            self._metrics.waiting.set(len(self._waiting))
            self._condition.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Drop waiting requests at once, and running ones before the next step."""
        with self._condition:
            dropped = [entry for entry in ticket.entries if not entry.done and not entry.cancelled]
            for entry in dropped:
                self._mark_cancelled(entry)
                if entry in self._waiting:
                    self._waiting.remove(entry)
            self._metrics.cancelled.inc(len(dropped))
            self._metrics.waiting.set(len(self._waiting))
            self._condition.notify()

    def abort(self) -> None:
        """Answer all unfinished requests with 503 and accept no more."""
        with self._condition:
            self._stopping = True
            entries = [*self._waiting, *self._running.values()]
            self._waiting.clear()
            for entry in entries:
                self._mark_cancelled(entry)
            self._condition.notify()
        self._deliver([(entry, _stopping()) for entry in entries])

    def stop(self, timeout_s: float = 10.0) -> None:
        """Abort, and wait for the thread to finish its step."""
        self.abort()
        self._thread.join(timeout_s)

    def _mark_cancelled(self, entry: _QueuedRequest) -> None:
        """Mark a request as cancelled. The caller holds the lock."""
        entry.cancelled = True
        if entry.job is not None and isinstance(self._worker, InterruptibleWorker):
            self._worker.interrupt(entry.job)

    def _work(self) -> None:
        while True:
            with self._condition:
                self._wait_for_work()
                if (
                    self._stopping
                    and not self._waiting
                    and all(entry.cancelled for entry in self._running.values())
                ):
                    return
                refused = self._fill_batch()
            try:
                self._deliver(refused)
                self._deliver(self._run_step())
                self._failures = 0
            except BaseException:  # a library's panic is no Exception
                # Whatever the error (out of memory, a device failure), running requests must get an
                # answer, and later ones a chance.
                self._failures += 1
                self._metrics.failures.inc()
                say(f"a step of the model failed:\n{traceback.format_exc()}")
                self._recover()
                if self._failures >= MAX_FAILURES and not self._waiting:
                    self._probe()

    def _wait_for_work(self) -> None:
        """Wait for a request, or the end. The caller holds the lock."""

        def is_there() -> bool:
            return bool(self._waiting or self._running or self._stopping)

        if not self._condition.wait_for(is_there, IDLE_S):
            return_freed_memory()
            self._condition.wait_for(is_there)

    def _fill_batch(self) -> list[_Delivery]:
        """Drop cancelled requests and fill free rows from the queue; returns the errors of those
        that the worker does not take. The caller holds the lock.
        """
        refused: list[_Delivery] = []
        for job in [job for job, entry in self._running.items() if entry.cancelled]:
            self._worker.cancel(job)
            del self._running[job]
        while self._waiting and len(self._running) < self._max_batch:
            if any(entry.again and entry.doubtful for entry in self._running.values()):
                break  # should a step fail now, it is known because of which one
            entry = self._waiting.popleft()
            try:
                self._join(entry)
            except Exception:
                say(f"a request could not join the batch:\n{traceback.format_exc()}")
                refused.append(self._failed(entry))
        self._metrics.waiting.set(len(self._waiting))
        self._metrics.running.set(len(self._running))
        return refused

    def _join(self, entry: _QueuedRequest) -> None:
        """Hand a request to the worker."""
        if entry.again:
            self._worker.resume(entry.job)
        else:
            entry.job = self._worker.add(entry.request)
            self._metrics.tokens.labels("prompt").inc(len(entry.request.prompt))
        entry.outputs = 0
        self._running[entry.job] = entry

    def _run_step(self) -> list[_Delivery]:
        """Run one step of the worker; returns its output."""
        if not self._running:
            return []
        self._metrics.rows.observe(len(self._running))
        pieces = self._worker.step()
        now = time.monotonic()
        deliveries: list[_Delivery] = []
        with self._condition:
            for job, piece in pieces:
                entry = self._running[job]
                self._metrics.tokens.labels("completion").inc(piece.generated - entry.generated)
                entry.generated = piece.generated
                entry.outputs += 1
                if not entry.started:
                    entry.started = True
                    if piece.cached is not None:
                        self._metrics.prefix_queries.inc(len(entry.request.prompt))
                        self._metrics.prefix_hits.inc(piece.cached)
                    self._metrics.first_token.observe(now - entry.since)
                if piece.finish:
                    entry.done = True
                    del self._running[job]
                    self._mean_s += 0.2 * (now - entry.since - self._mean_s)
                deliveries.append((entry, piece))
            self._metrics.running.set(len(self._running))
        return deliveries

    def _recover(self) -> None:
        """After a failed step: fail the request that caused it, if it is known; let the others wait
        at the head of the queue, in their order.
        """
        with self._condition:
            running = [entry for entry in self._running.values() if not entry.cancelled]
            self._running.clear()
            self._worker.clear()
            doubtful = running if len(running) == 1 else [one for one in running if one.doubtful]
            causes = doubtful if len(doubtful) == 1 else []
            kept = [entry for entry in running if entry not in causes]
            for entry in kept:
                entry.again = True
            self._waiting.extendleft(reversed(kept))
            failed = [self._failed(entry) for entry in causes]
        self._deliver(failed)

    def _probe(self) -> None:
        """Ask the idle model itself, since one bad request that its client repeats is no reason to
        start a server again.
        """
        try:
            self._worker.add(PROBE)
            while not any(piece.finish for _, piece in self._worker.step()):
                pass
            self._failures = 0
        except BaseException:
            say(f"the model fails on any request:\n{traceback.format_exc()}")
            self._worker.clear()

    def _failed(self, entry: _QueuedRequest) -> _Delivery:
        """The error of a request that made a step fail. The caller holds the lock."""
        entry.done = True
        error = ApiError(500, "the model failed on this request; the server's log has the reason")
        return entry, error

    def _deliver(self, deliveries: Sequence[_Delivery]) -> None:
        """Hand output to the event loops, waking each of them once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Delivery]] = {}
        for entry, item in deliveries:
            by_loop.setdefault(entry.ticket.loop, []).append((entry, item))
        for loop, items in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any more
                loop.call_soon_threadsafe(_put_all, items)


def _stopping() -> ApiError:
    """The error for requests while the server stops."""
    return ApiError(
        503,
        "the server is stopping; send the request again to another one",
        headers={"Retry-After": "5"},
    )


def _put_all(items: Sequence[_Delivery]) -> None:
    for entry, item in items:
        entry.ticket.put(entry.index, item)
