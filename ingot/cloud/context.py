"""What goes to a build: ingot's source, as git knows it or as it is installed, and what of a run is
baked in. Archives of equal content are equal.

Only what the Dockerfiles copy: nothing untracked, no runs, no `.env`.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import io
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import ingot
from ingot.base.errors import Failed, WrongInput

PACKAGE = Path(ingot.__file__).resolve().parent
WANTED = ("images", "ingot", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
"""What the Dockerfiles copy, and they themselves."""
SHARED = "share/ingot"
"""Where an installed ingot has of these what is no package."""
TAG_LENGTH = 12


@dataclass(frozen=True)
class Source:
    """The source as a .tar.gz; `revision` is the commit, or of an installed ingot its version and a
    hash. `unsaved` files are not in it.
    """

    data: bytes
    revision: str
    unsaved: int = 0

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def source() -> Source:
    """The source of the ingot that runs: of a checkout what is committed, else the files that pip
    installed.

    Raises:
        WrongInput: neither is complete.
        Failed: git does not do its work.
    """
    root = PACKAGE.parent
    if (root / ".git").exists():
        return _committed(root)
    files = _beside(root) if (root / "images").is_dir() else _installed(PACKAGE)
    names = {name.split("/")[0] for name in files}
    if missing := [name for name in WANTED if name not in names]:
        raise WrongInput(
            f"this ingot lacks {', '.join(missing)}, of which images are built; install it anew, or"
            " build from a checkout"
        )
    stream = io.BytesIO()
    write_tar(files, stream)
    data = stream.getvalue()
    return Source(
        _zipped(data), f"{ingot.__version__}-{hashlib.sha256(data).hexdigest()[:TAG_LENGTH]}"
    )


def write_tar(files: Mapping[str, Path], stream: IO[bytes]) -> None:
    """Files by their names as a tar that tells nothing of who made it when."""
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            path = files[name]
            about = tarfile.TarInfo(name)
            about.size, about.mode = (
                path.stat().st_size,
                (0o755 if path.stat().st_mode & 0o100 else 0o644),
            )
            with path.open("rb") as content:
                tar.addfile(about, content)


def _committed(root: Path) -> Source:
    data = _git(root, "archive", "--format=tar", "HEAD", "--", *WANTED)
    revision = _git(root, "rev-parse", f"--short={TAG_LENGTH}", "HEAD").decode().strip()
    unsaved = _git(root, "status", "--porcelain", "--", *WANTED).decode().splitlines()
    return Source(_zipped(data), revision, len(unsaved))


def _git(root: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, check=True, timeout=120
        )
    except FileNotFoundError:
        raise WrongInput(
            f"{root} is a checkout, and git is not there to say what of it is committed;"
            " install git"
        ) from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()[-1:] or [
            "no reason given"
        ]
        raise Failed(
            f"git {arguments[0]} failed in {root}: {said[0]}; mend the checkout, then run the same"
            " command again"
        ) from None
    except subprocess.TimeoutExpired:
        raise Failed(
            f"git {arguments[0]} in {root} does not end; run the same command again"
        ) from None
    return done.stdout


def _beside(root: Path) -> dict[str, Path]:
    """Of a folder without git: all that lies there under the names that are wanted."""
    found = [root / name for name in WANTED if (root / name).exists()]
    return _named(
        root,
        (path for start in found for path in ([start] if start.is_file() else start.rglob("*"))),
    )


def _installed(package: Path) -> dict[str, Path]:
    files = {f"ingot/{name}": path for name, path in _named(package, package.rglob("*")).items()}
    try:
        recorded = importlib.metadata.files("ingot") or []
    except importlib.metadata.PackageNotFoundError:
        return files
    for record in recorded:
        name = PurePosixPath(record).as_posix()
        if f"{SHARED}/" in name:
            files[name.partition(f"{SHARED}/")[2]] = Path(str(record.locate()))
    return files


def _named(root: Path, paths: Iterable[Path]) -> dict[str, Path]:
    return {
        path.relative_to(root).as_posix(): path
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts
    }


def _zipped(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=6, mtime=0)
