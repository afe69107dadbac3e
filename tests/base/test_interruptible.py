from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from ingot.base.interruptible import interruptible

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
        child.communicate(timeout=30)
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
