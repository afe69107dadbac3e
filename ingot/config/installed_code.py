"""A fingerprint of the code that an installed package brings: an edit of it under the same version
makes another package of it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import stat
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

from ingot.base.markers import fingerprint
from ingot.base.storage import sha256_file

SETTLED_NS = 2_000_000_000
"""A file that was changed within this time is read anew: clocks of file systems are coarse, and
another change may leave the same time.
"""


def code_digest(entry: EntryPoint) -> str:
    """A fingerprint of all files of the package that an entry point is in, chat templates and word
    lists among them, and of the modules beside it that are of the same distribution.

    Left out are what Python compiled and names that begin with a dot, such as an editor's.
    """
    own = _located(entry.module)
    if own is None:
        return fingerprint({})
    places, begin = {own, *_beside(entry, own.parent)}, len(str(own.parent))
    # Of ten thousand files, as texts: paths would take ten times as long as to look at them.
    return fingerprint({file[begin:]: _digest(file) for at in places for file in _files_of(at)})


def _located(module: str) -> Path | None:
    """The folder of the package that a module is in, or its file if it is in none. A namespace is
    passed over: others share it.
    """
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        try:
            spec = importlib.util.find_spec(".".join(parts[:count]))
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        if spec.has_location and spec.origin is not None:
            file = Path(spec.origin)
            return file.parent if file.name == "__init__.py" else file
    return None


def _beside(entry: EntryPoint, folder: Path) -> Iterator[Path]:
    """What the distribution of an entry point has in `folder`, by its list of files; of one that is
    installed from where it lies, which lists none of them, by the names of its modules.
    """
    if entry.dist is None:
        return
    for file in entry.dist.files or ():
        path = Path(os.path.normpath(str(entry.dist.locate_file(file))))
        if path.is_relative_to(folder) and path != folder:
            name = path.relative_to(folder).parts[0]
            if not name.endswith((".dist-info", ".egg-info")):
                yield folder / name
    for name in (entry.dist.read_text("top_level.txt") or "").split():
        yield from (folder / name, folder / f"{name}.py")


def _files_of(place: Path) -> Iterator[str]:
    if place.is_file():
        yield str(place)
    for folder, inner, names in os.walk(place):
        inner[:] = [name for name in inner if _is_own(name)]
        yield from (os.path.join(folder, name) for name in names if _is_own(name))


def _is_own(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__" and not name.endswith(".pyc")


def _digest(file: str) -> str | None:
    """The hash of a file as it is now; None of what cannot be read."""
    try:
        now = os.stat(file)
        if not stat.S_ISREG(now.st_mode):
            return None
        if time.time_ns() - now.st_mtime_ns < SETTLED_NS:
            return sha256_file(file)
        return _digest_at(file, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
    except OSError:
        return None


@functools.cache
def _digest_at(file: str, size: int, *times: int) -> str:
    """The hash of a file of this size and these times: a recipe asks for it at every verb."""
    return sha256_file(file)
