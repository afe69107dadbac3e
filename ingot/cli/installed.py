"""What is installed here of the packages and programs that ingot needs, and whether it takes them
at their version.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

import ingot


def requirements() -> list[Requirement]:
    """What ingot requires without its extras: by its installation, or by pyproject.toml where it
    runs from a checkout that is not installed; empty if neither is there.
    """
    try:
        lines = importlib.metadata.requires("ingot") or []
    except importlib.metadata.PackageNotFoundError:
        lines = _of_checkout(Path(ingot.__file__).resolve().parents[1] / "pyproject.toml")
    found = (Requirement(line) for line in lines)
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def _of_checkout(path: Path) -> list[str]:
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return []
    return list(project["dependencies"]) if project["name"] == "ingot" else []


def installed_version(name: str) -> str | None:
    """None if the package is not installed."""
    try:
        # Without a version, or KeyError where the backport of this library is there, too: the rest
        # of an installation that was removed.
        return importlib.metadata.version(name) or None
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return None


def satisfies(version: str | None, wanted: Requirement) -> bool:
    """Whether a package of this version is one that ingot takes."""
    try:
        return version is not None and wanted.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False


@dataclass(frozen=True)
class Java:
    """The Java that Spark would start."""

    version: str

    @property
    def major(self) -> int:
        """17 of `17.0.9`, and 8 of `1.8.0_392`."""
        return int(re.findall(r"\d+", self.version.removeprefix("1."))[0])


def java() -> Java | None:
    """That of `JAVA_HOME`, else the first in the path; None if there is none that starts."""
    home = os.environ.get("JAVA_HOME")
    said = output_of([str(Path(home) / "bin" / "java") if home else "java", "-version"])
    # Before its version it may tell of options that it took from the environment.
    found = re.search(r'version "(\d[^"]*)"', said or "")
    return Java(found[1]) if found else None


def java_wanted() -> int:
    """The oldest Java that the Spark which is installed, or would be, runs on."""
    spark = installed_version("pyspark")
    return 8 if spark is not None and spark.startswith("3.") else 17


def output_of(command: list[str]) -> str | None:
    """What a program prints, on stderr too; None if it is missing or fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=20,
            check=True,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
