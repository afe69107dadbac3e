"""What trainings taught about a type of device: how much longer or shorter their steps took than
its coefficients say. Kept beside its calibration, as long as that counts. Imports no torch.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.runfolder import lock_in_turn
from ingot.base.storage import write_atomic
from ingot.base.userfolders import config_folder
from ingot.plan.ranges import Range

SCHEMA = 1


@dataclass(frozen=True)
class Correction:
    """What one training taught. factor: seconds that its steps took, in units of what the
    coefficients said; basis: names those coefficients; run: the training, of which the newest
    correction counts.
    """

    run: str
    date: str
    basis: str
    factor: Range


def folder() -> Path:
    """Where measured coefficients and corrections are stored."""
    return config_folder() / "devices"


def corrections(name: str) -> list[Correction]:
    """What was learned about the device of this name, in the order of learning.

    Raises:
        WrongInput: the file holds no corrections.
    """
    path = _file(name)
    try:
        content = json.loads(path.read_bytes())
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}")
        return [_read(row) for row in content["runs"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise WrongInput(
            f"{path} holds no corrections of a device ({error}); take it away with"
            f" `ingot plan --forget {name}`"
        ) from None


def learned_factor(name: str, basis: str) -> Range | None:
    """By how much the coefficients called `basis` are to be corrected: the median over trainings,
    within all of their ranges; None if nothing was learned.
    """
    factors = [one.factor for one in corrections(name) if one.basis == basis]
    if not factors:
        return None
    return Range(
        min(one.low for one in factors),
        statistics.median(one.likely for one in factors),
        max(one.high for one in factors),
        "learned",
    )


def keep(name: str, found: Correction) -> Path:
    """Store a correction, in place of an earlier one of the same training."""
    path, waiting = _file(name), f"waiting for another process that learns about {name}"
    with lock_in_turn(path.parent, f"{path.name}.lock", waiting):  # else its correction is lost
        others = [one for one in corrections(name) if one.run != found.run]
        rows = [{**asdict(one), "factor": _ends(one.factor)} for one in (*others, found)]
        write_atomic(path, json.dumps({"schema": SCHEMA, "runs": rows}, indent=1) + "\n")
    return path


def forget(name: str) -> bool:
    """Take away all that was learned about a device; whether there was something."""
    try:
        _file(name).unlink()
    except FileNotFoundError:
        return False
    return True


def known_names() -> list[str]:
    """The devices about which something was learned."""
    return sorted(
        path.name.removesuffix(".learned.json") for path in folder().glob("*.learned.json")
    )


def _file(name: str) -> Path:
    if not name or Path(name).name != name:
        raise WrongInput(f"{name} is not the name of a device; `ingot plan --learn` told it")
    return folder() / f"{name}.learned.json"


def _read(row: dict[str, Any]) -> Correction:
    return Correction(
        str(row["run"]), str(row["date"]), str(row["basis"]), Range.of(row["factor"], "learned")
    )


def _ends(one: Range) -> list[float]:
    return [one.low, one.likely, one.high]
