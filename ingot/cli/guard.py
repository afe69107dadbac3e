"""The outermost layer of the program: turns signals and errors into one line on stderr and an exit
code. Tracebacks only with `--debug`.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType

from ingot.base.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_WRONG_INPUT,
    NO_ROOM,
    IngotError,
    one_line,
)
from ingot.base.interruptible import ImportsFirst
from ingot.base.progress import say

# Being stopped by a user or a scheduler is not an error.
STOPPED = (EXIT_STOPPED, 128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)


class SignalReceived(BaseException):
    """A signal asked this process to stop. Not an Exception, so that no handler takes it for a
    failure.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def _quiet_libraries() -> None:
    """Silence import-time log messages of libraries: transformers imports torchao, which looks for
    hardware of other vendors and registers its types in a way that torch deprecates.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def split_debug(arguments: list[str]) -> tuple[bool, list[str]]:
    """Whether `--debug` is given anywhere before `--`, and the arguments with it moved to the
    front.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]
    others = [argument for argument in arguments[:end] if argument != "--debug"]
    return debug, ["--debug"] * debug + others + arguments[end:]


def listen_to_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP raise SignalReceived, so that unfinished work is cleaned up;
    verbs may install their own handlers.
    """
    here, imports = os.getpid(), ImportsFirst()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != here:
            os._exit(128 + number)  # a forked worker: its parent reports it
        if not imports.put_off(number, frame):
            raise SignalReceived(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def write_any_text() -> None:
    """Where stdout's encoding lacks a character, as Latin-1 lacks what a model wrote or a table is
    drawn with, write its number instead of failing: on stderr Python does so by itself. In the C
    locale Python lets pass what it could not decode in a file's name, and nothing else.
    """
    failing = ("strict", "surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in failing:
        sys.stdout.reconfigure(errors="backslashreplace")


def guarded(call: Callable[[], int | None], *, debug: bool) -> int:
    """Run `call` and return its exit code; an exception is reported in one line, or several if it
    has several causes.
    """
    if not debug:
        _quiet_libraries()
    try:
        code = call() or 0
        sys.stdout.flush()
        return code
    except SignalReceived as stop:
        return _tell(
            f"stopped by {signal.Signals(stop.signum).name}", 128 + stop.signum, debug=debug
        )
    except KeyboardInterrupt:
        return _tell("stopped by SIGINT", 128 + signal.SIGINT, debug=debug)
    except BrokenPipeError:
        # The reader of our output has closed it (`ingot show knobs | head`).
        _write_no_more()
        return 128 + signal.SIGPIPE
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _write_no_more()  # Typer and rich leave so where their write had no reader
        return 128 + signal.SIGPIPE
    except IngotError as error:
        stopped = error.exit_code in STOPPED
        return _tell(f"{error}" if stopped else f"error: {error}", error.exit_code, debug=debug)
    except OSError as error:
        _write_no_more()
        code = EXIT_WRONG_INPUT if error.errno == errno.ENAMETOOLONG else EXIT_FAILED
        return _tell(f"error: {_os_error(error)}", code, debug=debug)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            if told := getattr(error, "message", ""):  # empty where rich has drawn the help
                print(told)
            return EXIT_DONE
        if _is_usage(error):
            return _tell(f"error: {_usage(error)}", EXIT_WRONG_INPUT, debug=debug)
        return _tell(
            f"error: {type(error).__name__}: {_first_line(error)}; run again with --debug to see"
            " where",
            EXIT_FAILED,
            debug=debug,
        )


def _write_no_more() -> None:
    """Prevent the interpreter from writing the rest of stdout's buffer at exit, after a write has
    failed.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(line: str, code: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    rank = os.environ.get("RANK", "0")
    say(line if rank == "0" else f"rank {rank}: {line}")
    return code


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


def _os_error(error: OSError) -> str:
    """Operating-system errors that users can do something about, as a message."""
    of = f" ({error.filename})" if error.filename else ""
    if said := NO_ROOM.get(error.errno or 0):
        return f"{said.format(of)} and run the same command again"
    if error.errno in (errno.EACCES, errno.EPERM) and of:
        return f"this user may not read or write {error.filename}; ask its owner, or chmod"
    if error.errno == errno.ENAMETOOLONG and of:
        return (
            f"{one_line(error.filename, 80)}... is too long for the name of a file; check what was"
            " given, and in which order"
        )
    if error.errno == errno.EADDRINUSE:
        return f"port taken{of}; choose another with serve.port=..., or 0 for a free one"
    return f"{type(error).__name__}: {error}; run again with --debug to see where"


def _is_usage(error: Exception) -> bool:
    """Whether this is Typer's error about a command line; its class moved between versions, but
    this method stayed.
    """
    return hasattr(error, "format_message")


def _usage(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "ingot"
    if option := getattr(error, "option_name", None):
        from ingot.cli.arguments import knob_for_option
        from ingot.cli.model import PREDICT

        own = PREDICT if sys.argv[1:2] == ["predict"] else ()
        if instead := knob_for_option(option, sys.argv[1:], own):
            return f"No such option: {option}; settings have no dashes: `{instead}`"
    said = error.format_message().replace("Value error, ", "")  # type: ignore[attr-defined]
    return f"{one_line(said).rstrip('.')}; see `{command} --help`"
