"""The runs that lie in a folder, also where this user may not read all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ingot.base.progress import say
from ingot.base.runfolder import RunFolder

Value = TypeVar("Value")


def runs_in(output: Path) -> list[RunFolder]:
    """The run folders in `output`, by name, and those that may be some: nobody lets us look."""
    folders = sorted(output.iterdir()) if output.is_dir() else []
    return [
        RunFolder(path)
        for path in filter(os.path.isdir, folders)
        if not os.access(path, os.X_OK) or (path / "recipe.yaml").is_file()
    ]


def each_of(runs: Iterable[RunFolder], read: Callable[[RunFolder], Value]) -> list[Value]:
    """What `read` makes of each run. Of one that this user may not read a line tells, and the
    others are read.
    """
    found = []
    for run in runs:
        try:
            run.recipe.stat()
            found.append(read(run))
        except FileNotFoundError:  # removed meanwhile
            continue
        except PermissionError as error:
            say(
                f"{run.root} is left out: this user may not read {error.filename}; ask its owner,"
                " or chmod"
            )
    return found
