from __future__ import annotations

import _imp
import contextlib
import importlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ingot.base import interruptible as this
from ingot.base.interruptible import interruptible
from ingot.cli.guard import SignalReceived, listen_to_signals
from ingot.train.interrupts import LeaveNow, StopSignals
from tests.patience import PATIENCE_S

BEGINS = """
import hashlib, signal
from ingot.base.errors import leave
from ingot.base.interruptible import interruptible
from ingot.tokenizers.bpe import train_bpe
signal.signal(signal.SIGINT, signal.default_int_handler)

def endless():
    # Minutes of C without a look at signals; a sleep would be woken by one.
    print("begins", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
    return "text"

try:
    {call}
except KeyboardInterrupt:
    leave(130)
"""


@pytest.mark.parametrize(
    "call",
    [
        "interruptible(endless)",
        "train_bpe((endless() for _ in range(1)), 300)",
    ],
)
def test_native_code_is_left_at_once(call: str) -> None:
    command = [sys.executable, "-c", BEGINS.format(call=call)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "begins\n"
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 130
    finally:
        child.kill()


def test_what_the_call_returns_or_raises() -> None:
    assert interruptible(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0)


def test_other_threads_make_the_call_themselves() -> None:
    names: list[str] = []
    thread = threading.Thread(
        target=lambda: interruptible(lambda: names.append(threading.current_thread().name)),
        name="another",
    )
    thread.start()
    thread.join()
    assert names == ["another"]


@contextlib.contextmanager
def a_verb() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    listen_to_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def a_start() -> Iterator[None]:
    signals = StopSignals(60)
    with signals:
        yield
    for number, handler in signals._before.items():
        signal.signal(number, handler)


def imported_until_a_signal(name: str) -> None:
    importlib.import_module(name)
    threading.Event().wait(60.0)


Listening = Callable[[], AbstractContextManager[None]]
both = pytest.mark.parametrize("listening", [a_verb, a_start])
STOPS = (SignalReceived, LeaveNow)


@both
def test_a_signal_within_an_import_leaves_no_lock_taken(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's import system sees to the lock's release one line after it has taken it."""
    take, sent = _imp.acquire_lock, []

    def acquire() -> None:
        take()
        if not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with listening():
        monkeypatch.setattr(_imp, "acquire_lock", acquire)
        with pytest.raises(STOPS):
            imported_until_a_signal("colorsys")
    taken = _imp.lock_held()
    while _imp.lock_held():
        _imp.release_lock()
    assert sent
    assert not taken


SWALLOWING = """
import signal
raised = True
try:
    signal.raise_signal(signal.SIGTERM)
    raised = False
except BaseException:
    pass
"""


@both
def test_a_signal_is_not_swallowed_by_an_import(
    listening: Listening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "swallowing.py").write_text(SWALLOWING)
    monkeypatch.delitem(sys.modules, "swallowing", raising=False)
    with listening(), pytest.raises(STOPS):
        imported_until_a_signal("swallowing")


def test_an_import_that_takes_for_ever_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "for_ever.py").write_text(SWALLOWING)
    monkeypatch.setattr(this, "IMPORT_PATIENCE_S", 0.0)
    with a_verb():
        assert importlib.import_module("for_ever").raised
