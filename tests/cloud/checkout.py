"""A small checkout of ingot: the project's own Dockerfiles and settings around a package of one
file, in git.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ingot.cloud import build_inputs as context

PROJECT = Path(__file__).resolve().parents[2]


def plain(root: Path) -> Path:
    """Without git."""
    (root / "ingot").mkdir(parents=True)
    (root / "ingot" / "__init__.py").write_text('__version__ = "0"\n')
    shutil.copytree(
        PROJECT / "images", root / "images", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, root / name)
    return root


def committed(root: Path) -> Path:
    plain(root)
    (root / ".gitignore").write_text("/runs/\n.env\n__pycache__/\n")
    for arguments in (
        ["init", "--quiet"],
        ["add", "--all"],
        ["commit", "--quiet", "--message", "all"],
    ):
        git(root, *arguments)
    return root


def git(root: Path, *arguments: str) -> str:
    who = [
        "-c",
        "user.name=test",
        "-c",
        "user.email=test@example.com",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "core.hooksPath=/dev/null",
    ]
    day = {
        "GIT_AUTHOR_DATE": "2026-01-02T03:04:05Z",
        "GIT_COMMITTER_DATE": "2026-01-02T03:04:05Z",
        "PATH": "/usr/bin:/bin:/usr/local/bin",
        "HOME": str(root),
    }
    return subprocess.run(
        ["git", *who, "-C", str(root), *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=day,
    ).stdout.strip()


def running_from(monkeypatch: pytest.MonkeyPatch, root: Path) -> Path:
    """Let the ingot that runs lie in `root`."""
    monkeypatch.setattr(context, "PACKAGE", root / "ingot")
    return root
