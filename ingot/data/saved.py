"""Folders that `datasets.save_to_disk` wrote: which Arrow files of them are the data, in which
order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput

ONE, SEVERAL = "state.json", "dataset_dict.json"


def saved_files(folder: str, split: str, knob: str) -> list[str] | None:
    """The Arrow files of a saved data set, or of one split of several; None where `folder` is none.

    Raises:
        WrongInput: the split is not there (those that are are named), or the folder is not whole.
    """
    root = Path(folder)
    if (root / SEVERAL).is_file():
        splits = _json(root / SEVERAL).get("splits", [])
        if split not in splits:
            raise WrongInput(
                f"{knob} {folder} has no split `{split}`; it has {', '.join(splits)}: set `split`"
                " of this source to one of them"
            )
        root = root / split
    if not (root / ONE).is_file():
        return None
    files = [str(root / entry["filename"]) for entry in _json(root / ONE).get("_data_files", [])]
    missing = next((path for path in files if not Path(path).is_file()), None)
    if missing:
        raise WrongInput(f"{knob} {folder}: {missing} is missing; save the data set again")
    return files


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise WrongInput(f"{path} cannot be read ({error}); save the data set again") from error
    return value if isinstance(value, dict) else {}
