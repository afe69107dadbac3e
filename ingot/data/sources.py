"""Which files a source of the recipe means, and what tells cheaply whether they changed. Reads no content."""

from __future__ import annotations

import glob
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ingot.base.errors import Failed, WrongInput
from ingot.base.storage import find_files, stamp
from ingot.config.recipe import Recipe
from ingot.config.work import Source, ValidationShare

Format = Literal["jsonl", "json", "parquet", "csv", "tsv", "text"]
Split = Literal["train", "validation"]
STDLIB = "builtin:stdlib"
ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "tsv",
}
COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. `name` stands in document identities: relative to the source, so that data may move."""

    path: str
    name: str
    format: Format
    stamp: dict[str, Any]

    @property
    def bytes(self) -> int:
        return int(self.stamp["bytes"])


def recipe_sources(recipe: Recipe) -> dict[Split, list[Source]]:
    """The sources of each split that has sources of its own."""
    splits: dict[Split, list[Source]] = {"train": list(recipe.data.train)}
    if not isinstance(recipe.data.validation, ValidationShare):
        splits["validation"] = list(recipe.data.validation)
    return splits


def source_files(recipe: Recipe) -> dict[Split, list[list[SourceFile]]]:
    """The files of every source, by split; names are made distinct where two sources have files of the same name.

    Raises:
        WrongInput: a source matches no file, with its place in the recipe.
    """
    taken: set[str] = set()
    found: dict[Split, list[list[SourceFile]]] = {}
    for split, sources in recipe_sources(recipe).items():
        found[split] = []
        for number, source in enumerate(sources):
            files = find_source(source, f"data.{split}[{number}].source")
            if any(file.name in taken for file in files):
                files = [replace(file, name=f"{split}{number}/{file.name}") for file in files]
            taken.update(file.name for file in files)
            found[split].append(files)
    return found


def source_stamps(recipe: Recipe) -> dict[Split, list[dict[str, Any]]]:
    """Size and modification time of every source file, by split: what `ingest` reads, to see cheaply whether it changed."""
    return {split: [file.stamp for files in sources for file in files] for split, sources in source_files(recipe).items()}


def find_source(source: Source, knob: str = "source") -> list[SourceFile]:
    """The files of one source in the order in which they are read; hidden files are left out.

    Raises:
        WrongInput: nothing is there.
        Failed: the storage cannot be reached.
    """
    if source.source == STDLIB:
        return list(_stdlib())
    if re.match(r"[a-z]+:(?!//)", source.source) and not Path(source.source).exists():
        raise WrongInput(f"{knob} {source.source} is no source that this version reads; give a path, a folder, a glob or {STDLIB}")
    pattern = source.source.removeprefix("file://")
    try:
        paths = find_files(pattern)
    except ImportError as error:
        raise WrongInput(f"{knob} {source.source} needs a package that is not installed ({error})") from error
    except OSError as error:
        raise Failed(f"{knob} {source.source} cannot be listed ({error}); check the address and your credentials") from error
    names = [writable(_name(path, pattern)) for path in paths]
    files = [SourceFile(path, name, _format(source, path), _stamp(path)) for path, name in zip(paths, names, strict=True)
             if not _is_hidden(name)]
    if not files:
        raise WrongInput(f"{knob} {source.source}: no such file; check the path (relative ones start at {Path.cwd()})")
    return files


def _stamp(path: str) -> dict[str, Any]:
    try:
        found = stamp(path)
        return {**found, "path": writable(found["path"])}
    except OSError as error:
        raise WrongInput(f"{path} cannot be read ({error.strerror or error}); mend or remove it") from error


def _stdlib() -> Iterator[SourceFile]:
    """The `.py` files of the running interpreter's standard library, without what was installed beside it."""
    root = sysconfig.get_path("stdlib")
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages", "__pycache__")]
        found += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(found):
        name = "stdlib/" + Path(path).relative_to(root).as_posix()
        # Another installation of the same interpreter is the same source: no modification times.
        yield SourceFile(path, name, "text", {"path": name, "bytes": os.stat(path).st_size, "python": platform.python_version()})


def _format(source: Source, path: str) -> Format:
    if source.format != "auto":
        return source.format
    stem = path.lower()
    for ending in COMPRESSED:
        stem = stem.removesuffix(ending)
    return ENDINGS.get(Path(stem).suffix, "text")


def _name(path: str, pattern: str) -> str:
    """A file's name relative to its source: to the folder that the source is, or that stands before its first wildcard."""
    parts = _without_scheme(pattern).split("/")
    plain = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root, full = "/".join(parts[:plain]).rstrip("/"), _without_scheme(path)
    if full == root or not full.startswith(root):
        return full.rpartition("/")[2]
    return full[len(root):].lstrip("/")


def _without_scheme(path: str) -> str:
    return path.rpartition("://")[2].lstrip("/")


def writable(text: str) -> str:
    """A text that UTF-8 can hold: names on a disk, and keys in JSON, may be no text at all."""
    return text.encode("utf-8", "replace").decode()


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
