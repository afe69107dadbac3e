"""Where a user's own folders are. A container may run under an id that no user has, without HOME:
such a user has a folder among the temporary ones instead.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def home() -> Path | None:
    """None if neither HOME nor the list of users tells one."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def cache_folder() -> Path:
    """ingot's folder for what can be made anew, in the one that `XDG_CACHE_HOME` names."""
    return _own("XDG_CACHE_HOME", ".cache")


def config_folder() -> Path:
    """ingot's folder for what it measured and learned, in the one that `XDG_CONFIG_HOME` names."""
    return _own("XDG_CONFIG_HOME", ".config")


def _own(variable: str, default: str) -> Path:
    base = os.environ.get(variable) or (home() or _temporary()) / default
    return Path(base) / "ingot"


def _temporary() -> Path:
    """A folder of this user alone: compiled code lies in it, which nobody else is to plant."""
    folder = Path(tempfile.gettempdir()) / f"ingot-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        return Path(tempfile.mkdtemp(prefix="ingot-"))
    return folder
