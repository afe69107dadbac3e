"""In pytest's own process: what the program starts there as `python -m ingot ...`, and the server that
multiprocessing forks from, come from the fork server (tests/forks.py), as children of pytest like
any other; so do the workers of pytest-xdist. What tests start themselves is left alone.
"""

from __future__ import annotations

import ctypes
import inspect
import multiprocessing.util
import os
import pickle
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests import forkedmain, forks, workers

_DIES_WITH_PARENT = "preexec_die_with_parent.<locals>.<lambda>"
_SUBREAPER = 36
_original = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_original_spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
_signature = inspect.signature(_original)


def install() -> None:
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _spawn  # type: ignore[attr-defined]


def _spawn(path: str, args: Sequence[str], passed: Sequence[int]) -> int:
    if not forkedmain.is_forkserver(args) or not forks.can_fork(os.environ):
        return int(_original_spawn(path, args, passed))
    return start_child(
        (),
        forkedmain.Adoption(os.getpid(), "", None, 0),
        (0, 1, 2),
        call=pickle.dumps((forkedmain.be_forkserver, (args[-1],))),
        cwd=str(Path.cwd()),
        environment=dict(os.environ),
        passed=tuple(passed),
    )


def _execute_child(self: subprocess.Popen[Any], *given: Any) -> None:
    asked = _signature.bind(self, *given).arguments
    environment = {**os.environ} if asked["env"] is None else {**asked["env"]}
    worker = workers.is_worker(asked["args"])
    program = forkedmain.is_program(asked["args"]) and _is_of_the_program()
    if (
        not (worker or program)
        or not _is_understood(asked["preexec_fn"], asked["pass_fds"])
        or not forks.can_fork(environment)
    ):
        return _original(self, *given)
    streams = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    try:
        self.pid = start_child(
            () if worker else forkedmain.words(asked["args"])[1:],
            forkedmain.Adoption(
                os.getpid(),
                "" if worker else forkedmain.words(asked["args"])[0],
                None if asked["process_group"] == -1 else asked["process_group"],
                _death_signal(asked["preexec_fn"]),
            ),
            [number if stream == -1 else stream for number, stream in enumerate(streams)],
            call=pickle.dumps((workers.be_worker, ())) if worker else b"",
            cwd=str(asked["cwd"] or Path.cwd()),
            environment=environment,
            session=asked["start_new_session"],
            of_pytest=worker,
        )
        self._child_created = True
    finally:
        self._close_pipe_fds(*(asked[name] for name in _PIPES))  # type: ignore[attr-defined]
    return None


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _is_of_the_program() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "subprocess":
        frame = frame.f_back  # type: ignore[assignment]
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "ingot"


def _is_understood(preexec: Callable[[], None] | None, passed: Any) -> bool:
    return not passed and (preexec is None or preexec.__qualname__ == _DIES_WITH_PARENT)


def _death_signal(preexec: Callable[[], None] | None) -> int:
    return 0 if preexec is None else int(inspect.getclosurevars(preexec).nonlocals["signum"])


def start_child(
    arguments: Iterable[str], adoption: forkedmain.Adoption, streams: Iterable[int], **more: Any
) -> int:
    """The id of a forked child of this process, which waits for it; `more` as in a Request."""
    ours, theirs = socket.socketpair()
    with ours, theirs, os.fdopen(os.memfd_create("result"), "rb") as result:
        request = forks.Request(arguments=tuple(arguments), adoption=adoption, **more)
        # Only now: what is left behind by others is not ours.
        be_subreaper(True)
        try:
            told = (*streams, theirs.fileno(), result.fileno(), *request.passed)
            forks.server().send(request, told)
            theirs.close()
            assert select.select([ours], [], [], forks.START_S)[0], "the server forked no process"
            word = ours.recv(16)
        finally:
            be_subreaper(False)
    assert word, "the server of forks has ended, or the process before it was ours"
    return int(word)


def be_subreaper(whether: bool) -> None:
    ctypes.CDLL(None).prctl(_SUBREAPER, int(whether), 0, 0, 0)
