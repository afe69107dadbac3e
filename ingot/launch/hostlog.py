"""What several hosts say, each into a file of its own: shown as one, the host's name before each line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ingot.launch.remote import FileLog


class HostsLog:
    """`files`: name, file and how many of its bytes are of earlier starts; without a name the file is shown as it is."""

    def __init__(self, files: Sequence[tuple[str, Path, int]]) -> None:
        self._logs = [(name.encode(), FileLog(lambda path=path: [path], {path: at})) for name, path, at in files]  # type: ignore[misc]
        self._begun = [b""] * len(files)

    def read(self) -> bytes:
        said = b""
        for number, (name, log) in enumerate(self._logs):
            text = self._begun[number] + log.read()
            if not name:
                said += text
                continue
            *lines, self._begun[number] = text.split(b"\n")
            said += b"".join(name + b": " + line + b"\n" for line in lines)
        return said
