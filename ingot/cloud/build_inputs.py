"""The inputs of the images that Cloud Build makes: ingot's source, from git or as installed, and
parts of a run. Archives of equal content are identical.

The source contains only what the Dockerfiles copy: nothing untracked, no runs, no `.env`. Parts of
a run are taken from its folder or fetched from its replica, and uploaded to the bucket once.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

import ingot
from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import say
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.replica import pull, replica_url
from ingot.cloud.builds import FOLDER, BakedParts
from ingot.cloud.clients import GoogleClients
from ingot.cloud.images import ImageKind
from ingot.config.models.lineage import tell_earlier_model
from ingot.config.recipe import Recipe

PACKAGE = Path(ingot.__file__).resolve().parent
WANTED = ("images", "ingot", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
"""The Dockerfiles and what they copy."""
SHARED = "share/ingot"
"""Where an installed ingot keeps those of these files that are not in the package."""
TAG_LENGTH = 12


@dataclass(frozen=True)
class BuildSource:
    """The source as a .tar.gz; `revision` is the commit, or for an installed ingot its version with
    a hash. `unsaved` counts uncommitted files, which are not included.
    """

    data: bytes
    revision: str
    unsaved: int = 0

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def ingot_source() -> BuildSource:
    """The source of the running ingot: the committed files of a checkout, else the files that pip
    installed.

    Raises:
        WrongInput: files are missing.
        Failed: git failed.
    """
    root = PACKAGE.parent
    if (root / ".git").exists():
        return _committed(root)
    files = _files_without_git(root) if (root / "images").is_dir() else _installed(PACKAGE)
    names = {name.split("/")[0] for name in files}
    if missing := [name for name in WANTED if name not in names]:
        raise WrongInput(
            f"this ingot lacks {', '.join(missing)}, of which images are built; install it anew, or"
            " build from a checkout"
        )
    stream = io.BytesIO()
    write_tar(files, stream)
    data = stream.getvalue()
    return BuildSource(
        _zipped(data), f"{ingot.__version__}-{hashlib.sha256(data).hexdigest()[:TAG_LENGTH]}"
    )


def write_tar(files: Mapping[str, Path], stream: IO[bytes]) -> None:
    """Write files under the given names as a tar without owners and times."""
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            path = files[name]
            about = tarfile.TarInfo(name)
            about.size = path.stat().st_size
            about.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            with path.open("rb") as content:
                tar.addfile(about, content)


def _committed(root: Path) -> BuildSource:
    data = _git(root, "archive", "--format=tar", "HEAD", "--", *WANTED)
    revision = _git(root, "rev-parse", f"--short={TAG_LENGTH}", "HEAD").decode().strip()
    unsaved = _git(root, "status", "--porcelain", "--", *WANTED).decode().splitlines()
    return BuildSource(_zipped(data), revision, len(unsaved))


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


def _files_without_git(root: Path) -> dict[str, Path]:
    """The wanted files in a folder without git."""
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
        # pip records what it compiles too, which differs each time.
        if f"{SHARED}/" in name and "__pycache__" not in record.parts:
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


HOLDS: dict[ImageKind, dict[str, tuple[str, ...]]] = {
    "train": {"model": ("model",), "data": ("data/columns", "data/tokenizer")},
    "serve": {"model": ("model",)},
    "spark": {},
}
"""The parts of a run folder that an image of each kind can contain."""
MADE_BY = {"model": "train", "data": "prepare"}


def parts_by_image(
    kinds: Sequence[ImageKind], what: Sequence[str]
) -> dict[ImageKind, tuple[str, ...]]:
    """Which of the parts in `what` (`model`, `data`) go into which image.

    Raises:
        WrongInput: an unknown part, an image that takes none of the parts, or a part that no image
            takes.
    """
    known = {name for parts in HOLDS.values() for name in parts}
    if wrong := [name for name in what if name not in known]:
        raise WrongInput(
            f"--with {wrong[0]} is nothing that an image can carry; it is"
            f" {' or '.join(sorted(known))}"
        )
    taken = {kind: tuple(name for name in what if name in HOLDS[kind]) for kind in kinds}
    if lonely := [kind for kind in kinds if what and not taken[kind]]:
        raise WrongInput(
            f"an image for {lonely[0]} carries no {' and no '.join(what)}; build it in a command of"
            " its own, without --with"
        )
    if left := [name for name in what if not any(name in names for names in taken.values())]:
        raise WrongInput(f"no image of {', '.join(kinds)} carries {left[0]}; build train too")
    return {kind: names for kind, names in taken.items() if names}


def bake(
    google: GoogleClients, recipe: Recipe, wanted: Mapping[ImageKind, Sequence[str]], *, send: bool
) -> dict[ImageKind, BakedParts]:
    """Put an archive in the bucket for each image. With `send` False nothing is fetched or sent.

    Raises:
        WrongInput: the run has not produced a part yet.
    """
    baked = {}
    for kind, what in wanted.items():
        files = {
            name: path
            for part in what
            for name, path in _files(google, recipe, kind, part, fetch=send).items()
        }
        hashed = _HashingSink()
        write_tar(files, cast(IO[bytes], hashed))
        name = f"{FOLDER}/baked-{hashed.digest.hexdigest()[:16]}.tar"
        if send:
            _send(google, name, files)
        baked[kind] = BakedParts(recipe.name, name, hashed.bytes)
    return baked


def _files(
    google: GoogleClients, recipe: Recipe, kind: ImageKind, what: str, *, fetch: bool
) -> dict[str, Path]:
    """Files by their names below the image's working folder, where the run folder has the same
    relative path as here.
    """
    root, parts = recipe.folder.root, HOLDS[kind][what]
    if not all((root / part).is_dir() for part in parts) and fetch:
        pull(replica_url(google.bucket, recipe.name), root, parts=parts)
    if absent := [part for part in parts if not (root / part).is_dir()]:
        where = (
            f"nor in {replica_url(google.bucket, recipe.name)}"
            if fetch
            else "and a dry run fetches nothing from the bucket"
        )
        raise WrongInput(
            f"{root / absent[0]} is not there, {where}; run `ingot {MADE_BY[what]}` first"
        )
    if what == "model":
        tell_earlier_model(recipe.folder)
    place = PurePosixPath() if kind == "serve" else _inside(recipe)
    found = (
        path
        for part in parts
        for path in (root / part).rglob("*")
        if path.is_file() and not path.name.startswith(".")
    )
    return {(place / path.relative_to(root).as_posix()).as_posix(): path for path in found}


def _inside(recipe: Recipe) -> PurePosixPath:
    output = PurePosixPath(recipe.output)
    if output.is_absolute() or ".." in output.parts:
        raise WrongInput(
            f"output {recipe.output} is no folder below the working folder, where a container would"
            " look for it; give a relative one"
        )
    return output / recipe.name


def _send(google: GoogleClients, name: str, files: Mapping[str, Path]) -> None:
    bucket = open_bucket(google.bucket)
    if bucket.stat(name) is not None:
        return
    with tempfile.TemporaryDirectory(prefix="ingot-baked-") as folder:
        archive = Path(folder) / "baked.tar"
        with archive.open("wb") as stream:
            write_tar(files, stream)
        say(f"sending {archive.stat().st_size / 1e9:.2f} GB to be baked in")
        bucket.put(name, archive)


class _HashingSink:
    """A writable stream that only computes a hash."""

    def __init__(self) -> None:
        self.digest, self.bytes = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return len(data)

    def tell(self) -> int:
        return self.bytes
