"""One run, one writer, on a bucket: an object that says who writes there, by the generation that
the service gives it.

The holder writes it anew every third of its life. Who finds one that was not written for the whole
of its life, or whose holder is a process
of this machine that is dead, writes over it, by a condition on its generation. Clocks of two
machines are never compared: when it was written and what time it is now are both the service's to
say.
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
"""Added to a life before it counts as over: the service is many machines with a clock each."""
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine sleeps


@contextlib.contextmanager
def lease(
    bucket: Bucket, owner: str, *, name: str = "lease", life_s: float = LIFE_S, wait: bool = False
) -> Iterator[Lease]:
    """Hold `name` in the bucket; `owner` is what another is told. `wait`: for the life of one that
    may be dead; a living one shows by then.

    Raises:
        Failed: somebody else holds it; names them.
    """
    held = Lease(bucket, owner, name, life_s)
    held.take(wait)
    renewing = threading.Thread(target=held.keep, name="lease", daemon=True)
    renewing.start()
    try:
        yield held
    finally:
        held.release()
        renewing.join()


class Lease:
    """Made by `lease`."""

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
        self._taken_by: str | None = None
        self._over, self._turn = threading.Event(), threading.Lock()

    @property
    def url(self) -> str:
        return self._bucket.url_of(self._name)

    @property
    def lost(self) -> bool:
        """Somebody else has it, or may have: it could not be renewed for the whole of its life."""
        return self._taken_by is not None or time.clock_gettime(_CLOCK) > self._sure_until

    def check(self) -> None:
        """Ask the service whether it is still ours.

        Raises:
            Failed: somebody else took it over, or nobody can say.
        """
        with self._turn:
            if self._taken_by is None:
                found = self._bucket.stat(self._name)
                if found is not None and (
                    found.generation == self._generation or self._is_ours(found)
                ):
                    return
                self._taken_by = self._holder()
        raise Failed(
            f"{self.url} was taken over by {self._taken_by} while this process stood still; nothing"
            " more is written there, stop one of the two"
        )

    def take(self, wait: bool) -> None:
        instead, seen = 0, 0  # generations: the one to write over, and the one that is waited for
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
                if left_s <= 0 or _dead(holder):
                    instead = found.generation
                elif not wait or (seen and found.generation != seen):
                    raise Failed(
                        f"{self._bucket.url} is in use by {_called(holder)}, which said so"
                        f" {max(0, age_s):.0f} s ago; stop it, or choose another address (if it"
                        f" died, this ends by itself in {left_s:.0f} s)"
                    ) from None
                else:
                    seen = found.generation
                    time.sleep(min(left_s, self._life_s / 3))

    def keep(self) -> None:
        """Renew it until it is released or taken; faults of the network are outlived as long as its
        life lasts, and after if nobody took it.
        """
        while not self._over.wait(self._life_s / 3):
            try:
                with self._turn:
                    self._renew()
            except Conflict:
                self._taken_by = self._holder()
                say(f"warning: {self.url} was taken over by {self._taken_by}")
                return
            except IngotError as error:
                say(f"warning: {self.url} could not be renewed: {error}")

    def release(self) -> None:
        self._over.set()
        with self._turn, contextlib.suppress(IngotError):  # who comes next outwaits it
            if self._taken_by is None:
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
        self._renewals += 1  # no content twice: what an earlier attempt wrote was written earlier
        text = json.dumps({**self._about, "renewal": self._renewals})
        self._generation = bucket.put(self._name, text.encode(), generation=generation).generation
        self._sure_until = began + self._life_s

    def _is_ours(self, found: Blob) -> bool:
        """Of another generation than we know, and ours all the same: the answer to a renewal was
        lost.
        """
        if self._read().get("token") != self._about["token"]:
            return False
        self._generation = found.generation
        return True

    def _read(self) -> dict[str, Any]:
        """What the present holder says of itself; {} where that is not to be understood."""
        try:
            about = json.loads(self._bucket.get(self._name))
        except (Missing, ValueError):
            return {}
        return about if isinstance(about, dict) else {}

    def _holder(self) -> str:
        with contextlib.suppress(IngotError):
            return _called(self._read())
        return "somebody"


def _called(holder: dict[str, Any]) -> str:
    return (
        f"{holder['owner']} (process {holder.get('pid', '?')} on {holder.get('host', '?')})"
        if "owner" in holder
        else "somebody"
    )


def _dead(holder: dict[str, Any]) -> bool:
    """The holder was a process of this machine, and is no more. False where only time can tell."""
    here = machine_id()
    return (
        here is not None
        and holder.get("machine") == here
        and bool(holder.get("started"))
        and start_ticks(holder["pid"]) != holder["started"]
    )
