"""The control groups of this process: in these folders the kernel tells what a container, a job of
Slurm or a service of systemd may use. Every group above one limits it as well.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")

_GROUP = re.compile(r"^\d+:([^:]*):(/.*)$", re.MULTILINE)
"""A line of `cgroup`: controllers, none for version 2, and the path of this process's group."""
_MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .* - cgroup(2?) \S* (\S+)$", re.MULTILINE)
"""A line of `mountinfo`: the group that is mounted, where, "2" for version 2, options."""


def own_groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's groups for `controller` (`memory`, `cpu`) in both versions of
    control groups, each before those above it, as far as they can be seen from here.

    `root` holds the `proc` and `sys` that are read.
    """
    paths = {
        name: path
        for names, path in _GROUP.findall(_text(root / "proc/self/cgroup"))
        for name in names.split(",")
    }
    for mounted, point, is_second, options in _MOUNT.findall(_text(root / "proc/self/mountinfo")):
        if not is_second and controller not in options.split(","):
            continue
        top = PurePosixPath(_unescaped(mounted))
        own = PurePosixPath(paths.get("" if is_second else controller, top))
        # In a container its own group may be what is mounted, and its path be told from outside.
        inside = own.is_relative_to(top) and ".." not in own.parts
        below = own.relative_to(top) if inside else PurePosixPath()
        for each in (below, *below.parents):
            yield root / _unescaped(point).lstrip("/") / each


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)


def _text(path: Path) -> str:
    """What is in a file of the kernel; nothing on a system without it."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    return ""
