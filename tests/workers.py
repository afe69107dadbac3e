"""`--workers N`: the tests are shared out among N processes that are forked when all have been
collected, since collecting (what test modules import, above all) is most of what a process of tests
costs before its first one. The tests of a file stay together; the slowest files come first.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing.connection
import os
import signal
import sys
import warnings
from collections import deque
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest

from ingot.base.processes import die_with_parent
from tests import forkedmain
from tests.session import file_of, known_times, slowest_first

END_S = 30
"""How long a worker has for its exit handlers."""


class Workers:
    """A plugin of the process that collects: it hands out files, and tells what workers report."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._waiting: deque[range] = deque()
        self._started = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = slowest_first({file_of(item.nodeid) for item in items}, known_times())
        items.sort(key=lambda item: order[file_of(item.nodeid)])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        option = session.config.option
        if session.testsfailed or option.collectonly or option.usepdb:
            return None
        self._waiting.extend(shares(session.items))
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
            reporter.showfspath = False
        workers: list[_Worker] = []
        try:
            for _ in range(min(self._count, len(self._waiting))):
                workers.append(self._start(session))
            while workers:
                self._listen(session, workers)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for worker in workers:
                worker.interrupt()
        return True

    def _start(self, session: pytest.Session) -> _Worker:
        self._started += 1
        return _Worker(session, self._started)

    def _listen(self, session: pytest.Session, workers: list[_Worker]) -> None:
        ready = wait([part for worker in workers for part in (worker.pipe, worker.end)])
        for worker in [each for each in workers if each.pipe in ready or each.end in ready]:
            try:
                while worker.pipe.poll():
                    self._hear(session, worker, *worker.pipe.recv())
                over = worker.end in ready and not worker.pipe.poll()
            except (EOFError, ConnectionResetError):
                over = True
            if over:
                workers.remove(worker)
                code = worker.wait()
                if worker.claimed:
                    self._waiting.extendleft(reversed(worker.left(session, code)))
                    workers.append(self._start(session))

    def _hear(self, session: pytest.Session, worker: _Worker, word: str, said: Any) -> None:
        hook = session.config.hook
        if word == "next":
            share = self._waiting.popleft() if self._waiting else None
            if share is not None:
                worker.claimed.append(share)
            with contextlib.suppress(BrokenPipeError):
                worker.pipe.send(share)
        elif word == "begin":
            worker.begin(said)
        elif word == "end":
            item = session.items[worker.finish()]
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            for data in said:
                report = hook.pytest_report_from_serializable(config=session.config, data=data)
                hook.pytest_runtest_logreport(report=report)
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        else:
            hook.pytest_warning_recorded.call_historic(kwargs=said)


def shares(items: list[pytest.Item]) -> list[range]:
    """The places of each file's tests, which follow each other."""
    found, first = [], 0
    for _, group in groupby(items, key=lambda item: file_of(item.nodeid)):
        stop = first + len(list(group))
        found.append(range(first, stop))
        first = stop
    return found


class _Worker:
    """A forked process as its parent sees it."""

    def __init__(self, session: pytest.Session, number: int) -> None:
        self.claimed: deque[range] = deque()
        self._running: int | None = None
        self.pipe, theirs = multiprocessing.connection.Pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            die_with_parent(parent, signal.SIGINT)
            _be_worker(session, number, theirs)
        theirs.close()
        self.end = os.pidfd_open(self._pid)

    def begin(self, place: int) -> None:
        self._running = place
        while place not in self.claimed[0]:
            self.claimed.popleft()

    def finish(self) -> int:
        place = self._running
        assert place is not None
        self._running = None
        done = self.claimed.popleft()
        if place + 1 < done.stop:
            self.claimed.appendleft(range(place + 1, done.stop))
        return place

    def left(self, session: pytest.Session, code: int) -> list[range]:
        """What a process that died has not run; the test that it ran has failed."""
        assert self._running is not None, f"a worker ended with {code} outside any test"
        item, hook = session.items[self._running], session.config.hook
        said = f"the process that ran it ended with {code}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        self.finish()
        return list(self.claimed)

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self.pipe.close()
        os.close(self.end)
        return code

    def interrupt(self) -> None:
        os.kill(self._pid, signal.SIGINT)
        if not wait([self.end], END_S):
            os.kill(self._pid, signal.SIGKILL)
        self.wait()


def _be_worker(session: pytest.Session, number: int, pipe: Connection) -> NoReturn:
    config = session.config
    forkedmain.forget_exit_handlers()
    os.environ["TEST_WORKER"] = str(number)
    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture.is_globally_capturing():  # into files that its parent has open too
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    config.get_terminal_writer()._file = io.StringIO()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"worker{number}"
    factory._basetemp.mkdir(mode=0o700)
    config.pluginmanager.register(_Teller(config, pipe))
    forkedmain.run(lambda: _run(session, pipe))


def _run(session: pytest.Session, pipe: Connection) -> None:
    def claim() -> range | None:
        pipe.send(("next", None))
        share: range | None = pipe.recv()
        return share

    share = claim()
    try:
        while share is not None:
            following = None
            for place in share:
                last = place + 1 == share.stop
                if last:  # what its fixtures of a session are kept for
                    following = claim()
                after = place + 1 if not last else following[0] if following else None
                item = session.items[place]
                pipe.send(("begin", place))
                item.config.hook.pytest_runtest_protocol(
                    item=item, nextitem=None if after is None else session.items[after]
                )
            share = following
    except KeyboardInterrupt:
        session._setupstate.teardown_exact(None)
        sys.exit(130)


class _Teller:
    """A plugin of a worker: what happens goes to its parent, a test's reports together."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe
        self._reports: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._reports.append(hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self) -> None:
        self._pipe.send(("end", self._reports))
        self._reports = []

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        told = warnings.WarningMessage(
            UserWarning(f"{warning_message.category.__name__}: {warning_message.message}"),
            UserWarning,
            warning_message.filename,
            warning_message.lineno,
        )
        said = {"warning_message": told, "when": when, "nodeid": nodeid, "location": location}
        self._pipe.send(("warning", said))
