"""What the process of one row writes: a line of JSON for each check and figure as soon as it is
known, so that a row that is cut off keeps what it had.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ingot.train.micro_batch.memory import is_out_of_memory

MAX_REASON_CHARS = 300


class Refused(Exception):
    """A row cannot be measured here, and why."""


@dataclass(frozen=True)
class Asked:
    """Where a row runs, and whether in miniature, which shows that everything runs."""

    device: torch.device
    tiny: bool
    steps: int = 10
    """Of training, that count."""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclass
class Record:
    """The checks and figures of one row. Without a file they stay here."""

    into: Path | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)

    def _write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if self.into is not None:
            with self.into.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")

    def figures(self, **values: Any) -> None:
        """Numbers of the row by their names, which carry the unit."""
        self._write({"figures": values})

    def within(self, what: str, value: float, bound: float) -> None:
        """A difference that must not be above a bound; NaN is above it."""
        self._write({"check": what, "holds": value <= bound, "value": value, "bound": bound})

    def holds(self, what: str, condition: bool, detail: str = "") -> None:
        self._write({"check": what, "holds": bool(condition), "detail": detail})

    def not_run(self, what: str, reason: str = "needs CUDA") -> None:
        self._write({"check": what, "holds": None, "detail": f"not run: {reason}"})

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """A part whose failure is a check that fails; the parts after it run. Not memory that runs
        out: nothing after it can be trusted.
        """
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{reason_of(error)} ({Path(place.filename).name}:{place.lineno})"
            self.holds(what, False, detail)


def reason_of(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"[:MAX_REASON_CHARS]
