"""Which files a source of the recipe means, and what tells cheaply whether they changed. Reads no
content.
"""

from __future__ import annotations

import glob
import os
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.storage import find_files, is_remote, stamp
from ingot.config.recipe import Recipe
from ingot.config.sections.data import SourceSettings, ValidationShare
from ingot.data.compression import ENDINGS
from ingot.data.dumps import fetch_dump, find_dump
from ingot.data.hubsets import find_hub
from ingot.data.megatron import find_columns
from ingot.data.queries import find_query, warn_of_query
from ingot.data.saved import saved_files
from ingot.data.sourcefile import Format, SourceFile, writable

Split = Literal["train", "validation"]
STDLIB = "builtin:stdlib"
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".arrow": "arrow",
}
DUMP = re.compile(r"pages-articles[^/]*\.xml(-p\d+p\d+)?$")
SCHEMES = ("hf", "wikipedia", "bigquery", "megatron")


def recipe_sources(recipe: Recipe) -> dict[Split, list[SourceSettings]]:
    """The sources of each split that has sources of its own."""
    splits: dict[Split, list[SourceSettings]] = {"train": list(recipe.data.train)}
    if not isinstance(recipe.data.validation, ValidationShare):
        splits["validation"] = list(recipe.data.validation)
    return splits


def source_files(recipe: Recipe) -> dict[Split, list[list[SourceFile]]]:
    """The files of every source, by split; names are made distinct where two sources have files of
    the same name.

    Raises:
        WrongInput: a source matches no file, with its place in the recipe.
    """
    taken: set[str] = set()
    found: dict[Split, list[list[SourceFile]]] = {}
    for split, sources in recipe_sources(recipe).items():
        found[split] = []
        for number, source in enumerate(sources):
            files = find_source(source, f"data.{split}[{number}].source")
            files = [
                replace(file, project=recipe.cloud.project) if file.format == "bigquery" else file
                for file in _distinct(files)
            ]
            while any(file.name in taken for file in files):
                files = [replace(file, name=f"{split}{number}/{file.name}") for file in files]
            taken.update(file.name for file in files)
            found[split].append(files)
    return found


def _distinct(files: list[SourceFile]) -> list[SourceFile]:
    """Files of one source have different names, but for what of a name is no text."""
    counts, made = Counter(file.name for file in files), list[SourceFile]()
    if len(counts) == len(files):
        return files
    for number, file in enumerate(files):
        made.append(file if counts[file.name] == 1 else replace(file, name=f"{file.name}~{number}"))
    return made


def source_stamps(recipe: Recipe) -> dict[Split, list[dict[str, Any]]]:
    """Size and modification time of every source file, by split: what `ingest` reads, to see
    cheaply whether it changed.
    """
    return {
        split: [file.stamp for files in sources for file in files]
        for split, sources in source_files(recipe).items()
    }


def find_source(source: SourceSettings, knob: str = "source") -> list[SourceFile]:
    """The files of one source in the order in which they are read; hidden files are left out.

    Raises:
        WrongInput: nothing is there.
        Failed: the storage cannot be reached.
    """
    if source.source == STDLIB:
        return list(_stdlib())
    scheme = _scheme(source)
    if scheme == "hf":
        return find_hub(source, knob)
    if scheme == "wikipedia":
        return [find_dump(source, knob)]
    if scheme == "bigquery":
        return find_query(source)
    if scheme == "megatron":
        return find_columns(source, knob)
    if scheme:
        known = ", ".join(f"{name}:" for name in SCHEMES)
        raise WrongInput(
            f"{knob} {source.source} is no source that this version reads; give a path, a folder, a"
            f" glob, {known} or {STDLIB}"
        )
    return _find_files(source, knob)


def is_local(source: SourceSettings) -> bool:
    """Whether a source is files on this machine, or the folder of a data set: what can be looked at
    cheaply at any time.
    """
    return (
        _scheme(source) in ("", "megatron")
        and not is_remote(source.source)
        and source.source != STDLIB
    )


def _scheme(source: SourceSettings) -> str:
    """What stands before the colon of a source that is no file; "" for one that is."""
    match = re.match(r"([a-z]+):(?!//)", source.source)
    return match[1] if match and not Path(source.source).exists() else ""


def prepare_files(files: Iterable[SourceFile]) -> None:
    """What must be done before files are read: fetch a dump, warn of what stamps cannot show."""
    for file in files:
        if file.format == "bigquery":
            warn_of_query(file)
        elif "url" in file.stamp:
            fetch_dump(file)


def _find_files(source: SourceSettings, knob: str) -> list[SourceFile]:
    pattern = source.source.removeprefix("file://")
    try:
        paths = saved_files(pattern, source.split, knob) or find_files(pattern)
    except ImportError as error:
        extra = (
            "pip install 'ingot[gcp]'" if pattern.startswith(("gs://", "gcs://")) else "install it"
        )
        raise WrongInput(
            f"{knob} {source.source} needs a package that is not installed ({error}); {extra}"
        ) from error
    except IngotError:
        raise
    except Exception as error:  # a bucket's client raises errors of its own
        raise Failed(
            f"{knob} {source.source} cannot be listed ({error}); check the address and your"
            " credentials"
        ) from error
    names = [writable(_name(path, pattern)) for path in paths]
    files = [
        SourceFile(path, name, _format(source, path), _stamp(path))
        for path, name in zip(paths, names, strict=True)
        if not _is_hidden(name)
    ]
    if not files:
        raise WrongInput(
            f"{knob} {source.source}: no such file; check the path (relative ones start at"
            f" {Path.cwd()})"
        )
    return files


def _stamp(path: str) -> dict[str, Any]:
    try:
        found = stamp(path)
        return {**found, "path": writable(found["path"])}
    except OSError as error:
        raise WrongInput(
            f"{path} cannot be read ({error.strerror or error}); mend or remove it"
        ) from error


def _stdlib() -> Iterator[SourceFile]:
    """The `.py` files of the running interpreter's standard library, without what was installed
    beside it.
    """
    root = sysconfig.get_path("stdlib")
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in ("site-packages", "dist-packages", "__pycache__")
        ]
        found += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(found):
        name = "stdlib/" + Path(path).relative_to(root).as_posix()
        # Another installation of the same interpreter is the same source: no modification times.
        yield SourceFile(
            path,
            name,
            "text",
            {"path": name, "bytes": os.stat(path).st_size, "python": platform.python_version()},
        )


def _format(source: SourceSettings, path: str) -> Format:
    if source.format != "auto":
        return source.format
    stem = path.lower()
    for ending in ENDINGS:
        stem = stem.removesuffix(ending)
    return "wikipedia" if DUMP.search(stem) else FORMATS.get(Path(stem).suffix, "text")


def _name(path: str, pattern: str) -> str:
    """A file's name relative to its source: to the folder that the source is, or that stands before
    its first wildcard.
    """
    parts = _without_scheme(pattern).split("/")
    plain = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root, full = "/".join(parts[:plain]).rstrip("/"), _without_scheme(path)
    if full == root or not full.startswith(root):
        return full.rpartition("/")[2]
    return full[len(root) :].lstrip("/")


def _without_scheme(path: str) -> str:
    return path.rpartition("://")[2].lstrip("/")


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
