"""How a forked process of the tests runs `python -m ingot ...`: its own, and what it starts. The
launcher's ranks, the steps of a pipeline and servers are forked from the process that starts them,
which has imported all they need, where the program starts new interpreters.

Such a child is a real one (process group, death with its parent, exit code), with streams, folder
and environment as subprocess gives them. Signal handlers, exit handlers, descriptors and finalizers
of its parent do not reach it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing.forkserver
import multiprocessing.util
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ingot.base.processes import die_with_parent
from tests.patience import PATIENCE_S

FIXED = ("PYTHON", "LD_", "HF_", "TRANSFORMERS_", "MKL_", "KMP_", "TORCH_", "CUDA_", "TMPDIR")
"""Beginnings of names of variables that libraries read when they are imported."""
_PROGRAM, _PROGRAMS = "ingot", ("ingot", "benchmarks")
_FORKSERVER = "from multiprocessing.forkserver import main;"
_original_init = subprocess.Popen.__init__
_original_spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Adoption:
    """For a process that is to be a child of `parent`, the server's client: what it runs, its
    process group as subprocess has it, and the signal that it gets when its parent dies.
    """

    parent: int
    module: str
    group: int | None
    death_signal: int


def be_adopted(adoption: Adoption) -> None:
    until = time.monotonic() + PATIENCE_S
    while os.getppid() != adoption.parent:
        if time.monotonic() > until:
            os._exit(1)
        time.sleep(0.001)
    if adoption.death_signal:
        die_with_parent(adoption.parent, adoption.death_signal)
    if adoption.group is not None:
        os.setpgid(0, adoption.group)


def install() -> None:
    """From now on this process and its children fork what would be `python -m ingot...`, and the
    server that multiprocessing forks from.
    """
    subprocess.Popen.__init__ = _init  # type: ignore[method-assign, assignment]
    multiprocessing.util.spawnv_passfds = _spawn  # type: ignore[attr-defined]


def _init(self: subprocess.Popen[Any], args: Any, *rest: Any, **named: Any) -> None:
    if not rest and _is_ours(args, named.get("env")):
        named["preexec_fn"] = functools.partial(
            _instead_of_exec,
            words(args),
            named.get("env"),
            named.get("preexec_fn"),
            named.get("pass_fds", ()),
        )
    _original_init(self, args, *rest, **named)


def _is_ours(args: Any, environment: Mapping[str, str] | None) -> bool:
    return is_program(args) and (environment is None or fixed(environment) == fixed(os.environ))


def is_program(args: Any) -> bool:
    """Whether a command is `python -m ingot...` or `python -m benchmarks...`."""
    return bool(asked := words(args)) and asked[0].partition(".")[0] in _PROGRAMS


def words(args: Any) -> list[str]:
    """The module that a command runs (`python -m MODULE`, with or without -P) and its arguments;
    none of another command.
    """
    given = list(map(str, args)) if isinstance(args, list | tuple) else []
    options = given[1:3] if given[1:2] == ["-P"] else given[1:2]
    asked = given[1 + len(options) :]
    return asked if given[:1] == [sys.executable] and options[-1:] == ["-m"] else []


def fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """Of an environment that which only a new interpreter can have; more of what is on the path
    already is nothing new.
    """
    found = {name: value for name, value in environment.items() if name.startswith(FIXED)}
    if set(found.get("PYTHONPATH", "").split(os.pathsep)) <= {"", *sys.path}:
        found.pop("PYTHONPATH", None)
    return found


def is_forkserver(args: Sequence[str]) -> bool:
    """Whether a command is the server that multiprocessing forks from."""
    return args[-2] == "-c" and args[-1].startswith(_FORKSERVER)


def be_forkserver(source: str) -> None:
    # The process that asks for it holds the lock of its own.
    multiprocessing.forkserver._forkserver.__init__()  # type: ignore[attr-defined, misc]
    exec(source, {})


def _spawn(path: str, args: Sequence[str], passed: Sequence[int]) -> int:
    if not is_forkserver(args):
        return int(_original_spawn(path, args, passed))
    pid = os.fork()
    if pid == 0:
        _leave_the_parents_things(passed)
        run(lambda: be_forkserver(args[-1]))
    return pid


def _instead_of_exec(
    args: list[str],
    environment: Mapping[str, str] | None,
    before: Callable[[], object] | None,
    passed: Collection[int],
) -> NoReturn:
    """In the child, where subprocess is about to execute the new program."""
    try:
        if before is not None:
            before()
        _leave_the_parents_things(passed)
        if environment is not None:
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)
        sys.argv = args
    except BaseException:
        traceback.print_exc()
        os._exit(255)
    run(lambda: run_module(args[0]))


def _leave_the_parents_things(passed: Collection[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(RuntimeError):  # what faulthandler.enable is for
            faulthandler.unregister(number)
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Closed would be worse: objects of the parent, when they go, would close what has taken the
    # number since.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in passed:
            with contextlib.suppress(OSError):  # the one of the listing itself
                os.fstat(descriptor)
                os.dup2(null, descriptor, inheritable=False)
    open_streams()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit._clear()
    for function in (weakref.finalize._exitfunc, multiprocessing.util._exit_function):  # type: ignore[attr-defined]
        atexit.register(function)
    random.seed()
    gc.enable()  # subprocess has switched it off


def open_streams() -> None:
    """The standard streams of this process, which may be of another kind than the parent's were."""
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, encoding="utf-8", closefd=False, buffering=1, errors=errors)
        for number, mode, errors in (
            (0, "r", "strict"),
            (1, "w", "strict"),
            (2, "w", "backslashreplace"),
        )
    )


def run_module(name: str) -> None:
    """As `python -m name` does, with sys.argv[1:]."""
    if name == _PROGRAM:
        # Processes that multiprocessing starts from here look for the main module.
        main = importlib.import_module(f"{_PROGRAM}.__main__")
        sys.modules["__main__"] = main
        main.main()
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def run(work: Callable[[], object]) -> NoReturn:
    """`work`, then the end. Threads are waited for and exit handlers run as at an interpreter's end;
    only taking all imported modules apart, which costs more than most commands, is left out.
    """
    code = 0
    try:
        work()
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1
