"""What of a run goes into an image: found in its folder or fetched from its replica, and sent to
the bucket once.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, cast

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.replica import pull, replica_url
from ingot.cloud.builds import FOLDER, Baked
from ingot.cloud.clients import Google
from ingot.cloud.context import write_tar
from ingot.cloud.images import ImageKind
from ingot.config.recipe import Recipe

HOLDS: dict[ImageKind, dict[str, tuple[str, ...]]] = {
    "train": {"model": ("model",), "data": ("data/columns", "data/tokenizer")},
    "serve": {"model": ("model",)},
    "spark": {},
}
"""What an image of each kind can carry, as parts of a run folder."""
MADE_BY = {"model": "train", "data": "prepare"}


def carried(kinds: Sequence[ImageKind], what: Sequence[str]) -> dict[ImageKind, tuple[str, ...]]:
    """What of `what` (`model`, `data`) goes into which of the images.

    Raises:
        WrongInput: it is something else, or there is an image among them that takes none of it, or
            a part that none takes.
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
    google: Google, recipe: Recipe, wanted: Mapping[ImageKind, Sequence[str]], *, send: bool
) -> dict[ImageKind, Baked]:
    """An archive in the bucket for each image. Without `send` nothing is fetched and nothing sent.

    Raises:
        WrongInput: the run has not made it yet.
    """
    baked = {}
    for kind, what in wanted.items():
        files = {
            name: path
            for part in what
            for name, path in _files(google, recipe, kind, part, fetch=send).items()
        }
        hashed = _Hashed()
        write_tar(files, cast(IO[bytes], hashed))
        name = f"{FOLDER}/baked-{hashed.digest.hexdigest()[:16]}.tar"
        if send:
            _send(google, name, files)
        baked[kind] = Baked(recipe.name, name, hashed.bytes)
    return baked


def _files(
    google: Google, recipe: Recipe, kind: ImageKind, what: str, *, fetch: bool
) -> dict[str, Path]:
    """Names below the working folder of the image, where a run folder has the same relative place
    as here.
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


def _send(google: Google, name: str, files: Mapping[str, Path]) -> None:
    bucket = open_bucket(google.bucket)
    if bucket.stat(name) is not None:
        return
    with tempfile.TemporaryDirectory(prefix="ingot-baked-") as folder:
        archive = Path(folder) / "baked.tar"
        with archive.open("wb") as stream:
            write_tar(files, stream)
        say(f"sending {archive.stat().st_size / 1e9:.2f} GB to be baked in")
        bucket.put(name, archive)


class _Hashed:
    """Takes what is written to it for its hash alone."""

    def __init__(self) -> None:
        self.digest, self.bytes = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return len(data)

    def tell(self) -> int:
        return self.bytes
