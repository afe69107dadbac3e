"""What was learnt or downloaded from the network, kept between runs in the user's cache folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ingot.base.errors import IngotError
from ingot.base.markers import fingerprint
from ingot.base.storage import write_atomic


def cache_folder() -> Path:
    """`ingot` in the user's cache folder, which `XDG_CACHE_HOME` moves."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ingot"


def remember(key: str, value: Any) -> None:
    """Keep a small JSON value; a cache that cannot be written costs nothing but its use."""
    try:
        write_atomic(_path(key), json.dumps({"key": key, "value": value}))
    except (IngotError, OSError):
        return


def recall(key: str) -> Any:
    """The value that was last remembered; None where there is none."""
    try:
        return json.loads(_path(key).read_bytes())["value"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(key: str) -> Path:
    return cache_folder() / "seen" / f"{fingerprint(key)}.json"
