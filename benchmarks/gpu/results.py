"""The file of results: a line of JSON for each row that was done, on disk as soon as it is. Imports
no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Row
from ingot.base.environment import usable_cores

ROOT = Path(__file__).parents[2]
DONE = ("measured", "failed", "out of memory", "not run")
CUT_OFF = "cut off"
MORE_TIME = 1.5
"""How much longer than it was given a row is expected to take that was cut off."""


def source_id() -> str:
    """The commit; where there is none, or files were changed since, a hash of what is measured."""
    git = ["git", "-C", str(ROOT)]
    if shutil.which("git") and (ROOT / ".git").exists():
        told = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "ingot", "benchmarks"],
            capture_output=True,
            text=True,
        )
        if told.returncode == 0 and not changed.stdout.strip():
            return told.stdout.strip()[:12]
    total = hashlib.sha256()
    for folder in ("ingot", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            total.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return f"files-{total.hexdigest()[:12]}"


def nvidia() -> dict[str, str]:
    """Name, driver and memory of the first GPU; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return {}
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True)
    if told.returncode or not told.stdout.strip():
        return {}
    name, driver, memory = (part.strip() for part in told.stdout.splitlines()[0].split(","))
    return {"device": name, "driver": driver, "memory": memory}


def head(device: str) -> dict[str, Any]:
    """Where rows were measured, and of what."""
    found = nvidia() if device == "cuda" else {}
    return {
        "device": "CPU",
        **found,
        **{name: version(name) for name in ("torch", "transformers", "triton", "torchao")},
        "python": sys.version.partition(" ")[0],
        "commit": source_id(),
        "cores": usable_cores(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


@dataclass
class Results:
    """What is known of rows: of this commit, and of others (`also`), but for checks that failed
    there.
    """

    path: Path
    head: dict[str, Any]
    also: Sequence[str] = ()
    planned: str = "cpu"
    """The device that plans are made for, which may be another machine's."""
    only_read: bool = False
    lines: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        if self.path.exists():
            self.lines = [line for line in read(self.path) if "row" in line]
        if not self.only_read:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"head": self.head})

    def add(self, row: Row, outcome: dict[str, Any]) -> dict[str, Any]:
        line = {
            "row": row.name,
            "kind": row.kind,
            "about": row.about,
            "commit": self.head["commit"],
            "device": self._device(row),
            **outcome,
        }
        with self._lock:
            self.lines.append(line)
            self._append(line)
        return line

    def _device(self, row: Row) -> str:
        return f"plan for {self.planned}" if row.beside else str(self.head["device"])

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def of(self, row: Row) -> dict[str, Any] | None:
        """The newest outcome of a row that counts: the same work, code and device."""
        with self._lock:
            found = [
                line
                for line in self.lines
                if (line["row"], line["about"]) == (row.name, row.about)
                and self._counts(line)
                and line["device"] == self._device(row)
            ]
        done = [line for line in found if line["status"] in DONE]
        return done[-1] if done else found[-1] if found else None

    def _counts(self, line: Mapping[str, Any]) -> bool:
        if self.only_read or line["commit"] == self.head["commit"]:
            return True
        failed = any(check["holds"] is False for check in line.get("checks", ()))
        return line["commit"] in self.also and not failed

    def is_done(self, row: Row) -> bool:
        known = self.of(row)
        return known is not None and known["status"] in DONE

    def estimate_s(self, row: Row) -> float:
        """By what it took before, if it was cut off."""
        known = self.of(row)
        if known is None or known["status"] != CUT_OFF:
            return row.estimate_s
        return max(row.estimate_s, MORE_TIME * float(known["seconds"]))


def kept(path: Path) -> Results:
    """All that a file holds, of whatever commits, as of the machine that it names last.

    Raises:
        SystemExit: it holds nothing.
    """
    lines = read(path) if path.exists() else []
    heads = [line["head"] for line in lines if "head" in line]
    if not heads:
        raise SystemExit(f"{path} holds no results; `python -m benchmarks.gpu` makes them")
    on_gpu = [head for head in heads if head["device"] != "CPU"]
    commits = [line["commit"] for line in lines if "row" in line]
    return Results(path, (on_gpu or heads)[-1], commits, only_read=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; a last one that was not written whole is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
