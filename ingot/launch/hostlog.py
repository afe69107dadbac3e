"""What several hosts say, each into a file of its own: shown as one, the host's name before each
line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ingot.launch.remote import FileLog


class HostsLog:
    """`files`: name, file and how many of its bytes are of earlier starts; without a name the file
    is shown as it is.

    Lines are shown whole, so that two hosts' do not mix; `over` says whether nobody will end one
    any more.
    """

    def __init__(self, files: Sequence[tuple[str, Path, int]], over: Callable[[], bool]) -> None:
        self._logs = [
            (name.encode(), FileLog(partial(list[Path], [path]), {path: at}))
            for name, path, at in files
        ]
        self._begun = [b""] * len(files)
        self._over = over

    def read(self) -> bytes:
        said = self._lines()
        if any(self._begun) and self._over():
            said += self._lines()  # what was said before it was over
            said += b"".join(
                name + b": " + line + b"\n"
                for (name, _), line in zip(self._logs, self._begun, strict=True)
                if line
            )
            self._begun = [b""] * len(self._logs)
        return said

    def _lines(self) -> bytes:
        said = b""
        for number, (name, log) in enumerate(self._logs):
            text = self._begun[number] + log.read()
            if not name:
                said += text
                continue
            *lines, self._begun[number] = text.split(b"\n")
            said += b"".join(name + b": " + line + b"\n" for line in lines)
        return said
