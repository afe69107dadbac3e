"""Folders as the kernel shows them where it keeps control groups, and groups that it really keeps."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"


def machine(root: Path, own: str, mounts: str, files: Mapping[str, str]) -> Path:
    """A folder with the `cgroup` and `mountinfo` of a process and files of groups below
    `/sys/fs/cgroup`.
    """
    for name, text in {
        "proc/self/cgroup": own,
        "proc/self/mountinfo": f"23 1 8:1 / / rw,relatime - ext4 /dev/root rw\n{mounts}",
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@contextlib.contextmanager
def real_group(controller: str, limit: str) -> Iterator[Path]:
    """A new group below the machine's topmost one, limited: `limit` is a line for a file of version
    2 or one of version 1, `memory.max=1 or memory.limit_in_bytes=1`. Skips where none can be made.
    """
    top = Path("/sys/fs/cgroup")
    files = dict(each.split("=") for each in limit.split(" or "))
    with contextlib.ExitStack() as made:
        for parent in (top / controller, top):
            group = parent / f"ingot-test-{uuid.uuid4().hex}"
            with contextlib.suppress(OSError):
                group.mkdir()
                made.callback(group.rmdir)
                for name in files:
                    if (group / name).exists():
                        (group / name).write_text(files[name])
                        yield group
                        return
        pytest.skip(f"no control group that limits {controller} can be made here")


def said_inside(group: Path, code: str) -> str:
    """What a program prints that begins in a group."""
    enter = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
    return subprocess.run(
        [sys.executable, "-c", enter + code],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    ).stdout.strip()
