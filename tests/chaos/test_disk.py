"""The model of a disk follows threads whose calls overlap."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.disk import Disk
from tests.chaos.strace import read_log


def test_a_descriptor_that_one_thread_gives_back_and_another_is_given(tmp_path: Path) -> None:
    """The second thread's `open` begins first; were it followed there, the first one's line would
    land in the second one's file.
    """

    def hexed(text: object) -> str:
        return "".join(f"\\x{byte:02x}" for byte in str(text).encode())

    start, folder, log = tmp_path / "start", tmp_path / "run", tmp_path / "log"
    start.mkdir()
    for name in ("lines", "other"):
        (start / name).write_text(f"{name}\n")
    lines, other, here = hexed(folder / "lines"), hexed(folder / "other"), hexed(tmp_path)
    log.write_text(
        f'1 openat(AT_FDCWD<{here}>, "{lines}", O_RDWR|O_APPEND) = 5<{lines}>\n'
        f'2 openat(AT_FDCWD<{here}>, "{other}", O_RDONLY <unfinished ...>\n'
        f'1 write(5<{lines}>, "{hexed("more")}", 4) = 4\n'
        f"1 close(5<{lines}> <unfinished ...>\n"
        f"2 <... openat resumed>) = 5<{other}>\n"
        "1 <... close resumed>) = 0\n"
        f"2 fsync(5<{other}>) = 0\n"
        f"2 close(5<{other}>) = 0\n",
        encoding="utf-8",
    )
    disk = Disk(start, folder)
    for call in read_log(log):
        disk.do(call)
    assert disk.all_done() == {"lines": b"lines\nmore", "other": b"other\n"}
