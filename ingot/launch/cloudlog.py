"""What machines of Compute Engine say: from Cloud Logging, or, as long as nothing has come there,
what their start-up script says on the serial port.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from ingot.cloud import instances
from ingot.cloud.clients import Google
from ingot.cloud.instances import Found
from ingot.cloud.logs import Line, entries

LOOK_S = 10.0
"""Between two questions: a project may ask sixty times a minute."""
SCRIPT = "startup-script"
"""In the lines on the serial port that our script says; the others are the system's."""


class CloudLog:
    """`ids` are Compute Engine's numbers of the machines, by node. `machines` tells those that
    there are now, `last_words` what they said at last.
    """

    def __init__(
        self,
        google: Google,
        ids: Mapping[int, str],
        machines: Callable[[], Collection[Found]],
        last_words: Callable[[], str],
    ) -> None:
        self._google, self._nodes, self._machines, self._last_words = (
            google,
            {id: node for node, id in ids.items()},
            machines,
            last_words,
        )
        self._next, self._after = 0.0, ""
        self._serial: dict[str, int] = {}
        self._has_logged = self._has_told = False

    def read(self) -> bytes:
        now = time.monotonic()
        if now < self._next and not self._last_words():
            return b""
        self._next = now + LOOK_S
        said = self._entries() if self._nodes else ""
        if not self._has_logged:
            said += self._on_serial_ports()
            if not self._has_told and (words := self._last_words()):
                self._has_told, said = True, said + words
        return said.encode()

    def _entries(self) -> str:
        """Those that were not seen yet."""
        which = " OR ".join(f'"{id}"' for id in self._nodes)
        wanted = (
            f'resource.type="gce_instance" AND resource.labels.instance_id=({which}) AND'
            f' logName="projects/{self._google.project}/logs/cos_containers"'
        )
        found, self._after = entries(self._google, wanted, self._after)
        self._has_logged = self._has_logged or bool(found)
        return "".join(f"{self._who(line)}{line.text}\n" for line in found)

    def _who(self, line: Line) -> str:
        node = self._nodes.get(line.labels.get("instance_id", ""))
        return f"[node {node}] " if len(self._nodes) > 1 else ""

    def _on_serial_ports(self) -> str:
        said = []
        for one in self._machines():
            text, self._serial[one.name] = instances.serial_port(
                self._google, one, self._serial.get(one.name, 0)
            )
            said += [
                f"[{one.name}] {line.rpartition(f'{SCRIPT}: ')[2]}\n"
                for line in text.splitlines()
                if SCRIPT in line
            ]
        return "".join(said)
