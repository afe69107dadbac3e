"""A lease on a bucket, so that a run has one writer: an object that names its holder, written under
a condition on its generation.

The holder renews it every third of its life. Another process may overwrite a lease that was not
renewed for its whole life, or whose holder is a dead process of this machine. Clocks of two
machines are never compared: the time of the last renewal and the current time are both the
service's.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from ingot.base.errors import Failed, IngotError
from ingot.base.processes import machine_id, start_ticks
from ingot.base.progress import say
from ingot.base.remote.bucket import Blob, Bucket
from ingot.base.remote.service import Conflict, Missing

LIFE_S = 60.0
MARGIN_S = 1.0
"""Added to a lease's life before it counts as expired: the service is many machines, each with a
clock of its own.
"""
READ_TRIES = 3
"""A renewal may replace what is being read, which is missing then."""
_CLOCK = getattr(
    time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC
)  # does not stop while the machine sleeps


@contextlib.contextmanager
def lease(
    bucket: Bucket, owner: str, *, name: str = "lease", life_s: float = LIFE_S, wait: bool = False
) -> Iterator[Lease]:
    """Hold the lease `name` in the bucket.

    Args:
        owner: what other processes are told about the holder.
        wait: if there is a lease already, wait for its life to expire: a live holder renews it.

    Raises:
        Failed: another process holds it; the message names it.
    """
    held = Lease(bucket, owner, name, life_s)
    held.acquire(wait)
    renewing = threading.Thread(target=held.renew_until_released, name="lease", daemon=True)
    renewing.start()
    try:
        yield held
    finally:
        held.release()
        renewing.join()


class Lease:
    """A held lease; made by `lease`."""

    def __init__(self, bucket: Bucket, owner: str, name: str, life_s: float) -> None:
        self._bucket, self._name, self._life_s = bucket, name, life_s
        self._renewer = bucket.patient(life_s / 3)
        self._about = {
            "owner": owner,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "life_s": life_s,
            "token": uuid.uuid4().hex,
            "machine": machine_id(),
            "started": start_ticks(os.getpid()),
        }
        self._renewals, self._generation, self._sure_until = 0, 0, 0.0
        self._new_holder: str | None = None
        self._over, self._turn = threading.Event(), threading.Lock()

    @property
    def url(self) -> str:
        return self._bucket.url_of(self._name)

    @property
    def lost(self) -> bool:
        """Whether another process has the lease, or may have it: it was not renewed for its whole
        life.
        """
        return self._new_holder is not None or time.clock_gettime(_CLOCK) > self._sure_until

    def check(self) -> None:
        """Ask the service whether this process still holds the lease.

        Raises:
            Failed: somebody else took it over, or the service cannot be reached.
        """
        with self._turn:
            if self._new_holder is None:
                found = self._bucket.stat(self._name)
                if found is not None and (
                    found.generation == self._generation or self._is_ours(found)
                ):
                    return
                self._new_holder = self._holder()
        raise Failed(
            f"{self.url} was taken over by {self._new_holder} while this process stood still;"
            " nothing more is written there, stop one of the two"
        )

    def acquire(self, wait: bool) -> None:
        instead, seen = 0, 0  # generations: the one to overwrite, and the one that is waited for
        while True:
            try:
                self._write(self._bucket, instead)
                return
            except Conflict as conflict:
                found = self._bucket.stat(self._name)
                instead = 0
                if found is None:
                    continue
                holder = self._read()
                age_s = (
                    conflict.service_s - found.updated if conflict.service_s is not None else 0.0
                )
                left_s = holder.get("life_s", LIFE_S) + MARGIN_S - age_s
                if left_s <= 0 or _is_dead(holder):
                    instead = found.generation
                elif not wait or (seen and found.generation != seen):
                    raise Failed(
                        f"{self._bucket.url} is in use by {_describe(holder)}, which said so"
                        f" {max(0, age_s):.0f} s ago; stop it, or choose another address (if it"
                        f" died, this ends by itself in {left_s:.0f} s)"
                    ) from None
                else:
                    seen = found.generation
                    time.sleep(min(left_s, self._life_s / 3))

    def renew_until_released(self) -> None:
        """Renew the lease until it is released or taken over. Network errors are tolerated for the
        lease's life, and longer if nobody took it over.
        """
        while not self._over.wait(self._life_s / 3):
            try:
                with self._turn:
                    self._renew()
            except Conflict:
                self._new_holder = self._holder()
                say(f"warning: {self.url} was taken over by {self._new_holder}")
                return
            except IngotError as error:
                say(f"warning: {self.url} could not be renewed: {error}")

    def release(self) -> None:
        self._over.set()
        with self._turn, contextlib.suppress(IngotError):  # it expires by itself
            if self._new_holder is None:
                self._renewer.delete(self._name, generation=self._generation)

    def _renew(self) -> None:
        try:
            self._write(self._renewer, self._generation)
        except Conflict:
            found = self._renewer.stat(self._name)
            if found is None or not self._is_ours(found):
                raise
            self._write(self._renewer, self._generation)

    def _write(self, bucket: Bucket, generation: int) -> None:
        began = time.clock_gettime(_CLOCK)
        self._renewals += (
            1  # never the same content twice, so that an earlier attempt is recognised
        )
        text = json.dumps({**self._about, "renewal": self._renewals})
        self._generation = bucket.put(self._name, text.encode(), generation=generation).generation
        self._sure_until = began + self._life_s

    def _is_ours(self, found: Blob) -> bool:
        """Whether an unknown generation is ours after all: the answer to a renewal was lost."""
        if self._read().get("token") != self._about["token"]:
            return False
        self._generation = found.generation
        return True

    def _read(self) -> dict[str, Any]:
        """What the present holder wrote about itself; {} if it is gone or cannot be parsed."""
        for _ in range(READ_TRIES):
            try:
                about = json.loads(self._bucket.get(self._name))
            except Missing:
                continue
            except ValueError:
                return {}
            return about if isinstance(about, dict) else {}
        return {}

    def _holder(self) -> str:
        with contextlib.suppress(IngotError):
            return _describe(self._read())
        return "somebody"


def _describe(holder: dict[str, Any]) -> str:
    return (
        f"{holder['owner']} (process {holder.get('pid', '?')} on {holder.get('host', '?')})"
        if "owner" in holder
        else "somebody"
    )


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine that has ended. False where only the lease's
    age can tell.
    """
    here = machine_id()
    return (
        here is not None
        and holder.get("machine") == here
        and bool(holder.get("started"))
        and start_ticks(holder["pid"]) != holder["started"]
    )
