"""Sources that are files on a disk or in a bucket: paths, folders, globs, folders written by
`datasets.save_to_disk`, and this interpreter's standard library.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.listing import find_files, is_hidden, name_below
from ingot.base.storage import is_file, is_remote, open_read, stamp
from ingot.config.sections.data import SourceSettings
from ingot.data.sources.kind import SourceKind
from ingot.data.sources.source_file import (
    FORMATS,
    Format,
    SourceFile,
    compression,
    name_with_ending,
    utf8_safe,
    without_query,
)

STDLIB = "builtin:stdlib"
CHATS = {
    "builtin:digits": "digits.jsonl",
    "builtin:sums": "sums.jsonl",
    "builtin:keeper": "keeper.jsonl",
}
"""Files that come with ingot."""


DUMP = re.compile(r"pages-articles[^/]*\.xml(-p\d+p\d+)?$")


class LocalFiles(NamedTuple):
    """The files of a source, and whether they are one split already, as a saved data set's are."""

    files: list[SourceFile]
    is_split: bool


def find_files_of(source: SourceSettings, knob: str) -> LocalFiles:
    pattern = source.source.removeprefix("file://")
    if "[" in source.split:
        share = (
            "`limit` of this task" if knob.startswith("evaluate.") else "`fraction` of this source"
        )
        raise WrongInput(
            f"{knob} {source.source}: split={source.split} asks for a part, and files are read"
            f" whole; set {share}, or give the part as a file of its own"
        )
    saved = None
    try:
        paths = find_files(pattern)
        if any(path.endswith((f"/{ONE}", f"/{SEVERAL}")) for path in paths):
            saved = saved_files(pattern, source.split, knob)
        paths = saved or paths
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
    asked, plain = without_query(pattern), [without_query(path) for path in paths]
    files = [
        SourceFile(path, utf8_safe(name_below(name, asked)), _format(source, path), _stamp(path))
        for path, name in zip(paths, plain, strict=True)
        if not is_hidden(name, asked)
    ]
    if not files:
        if Path(pattern).is_dir():
            raise WrongInput(
                f"{knob} {source.source}: no file is in this folder (hidden ones are not read); put"
                " some there, or check the path"
            )
        if is_remote(pattern):
            raise WrongInput(
                f"{knob} {source.source}: no such file{_why_absent(pattern)}; check the address,"
                " and that it answers"
            )
        raise WrongInput(
            f"{knob} {source.source}: no such file; check the path (relative ones start at"
            f" {Path.cwd()})"
        )
    return LocalFiles(files, bool(saved))


def _why_absent(url: str) -> str:
    """What a client says of an address for which it lists nothing: one that does not answer looks
    like one without files.
    """
    try:
        stamp(url)
    except IngotError:
        raise
    except OSError as error:
        return f" ({error.__cause__})" if error.__cause__ else ""
    except Exception as error:  # each client has errors of its own
        return f" ({error})"
    return ""


def _stamp(path: str) -> dict[str, Any]:
    try:
        found = stamp(path)
        return {**found, "path": utf8_safe(found["path"])}
    except OSError as error:
        raise WrongInput(
            f"{path} cannot be read ({error.strerror or error}); mend or remove it"
        ) from error


def standard_library() -> Iterator[SourceFile]:
    """The `.py` files of the running interpreter's standard library, without installed packages."""
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
        # No modification times: another installation of the same interpreter is the same source.
        yield SourceFile(
            path,
            name,
            "text",
            {"path": name, "bytes": os.stat(path).st_size, "python": platform.python_version()},
        )


def _format(source: SourceSettings, path: str) -> Format:
    if source.format != "auto":
        return source.format
    stem = name_with_ending(path).lower().removesuffix(compression(path))
    return "wikipedia" if DUMP.search(stem) else FORMATS.get(Path(stem).suffix, "text")


ONE, SEVERAL = "state.json", "dataset_dict.json"


def saved_files(folder: str, split: str, knob: str) -> list[str] | None:
    """The Arrow files of a saved data set, or of one split of several; None if `folder` is not a
    saved data set.

    Raises:
        WrongInput: there is no such split (the existing ones are named), or the folder is
            incomplete.
    """
    root = folder
    if is_file(_within(root, SEVERAL)):
        splits = _json(_within(root, SEVERAL)).get("splits", [])
        if split not in splits:
            raise WrongInput(
                f"{knob} {folder} has no split `{split}`; it has {', '.join(splits)}: set `split`"
                " of this source to one of them"
            )
        root = _within(root, split)
    if not is_file(state := _within(root, ONE)) and root == folder:
        return None
    names = [entry["filename"] for entry in _json(state).get("_data_files", [])]
    files = [_within(root, name) for name in names]
    if missing := next((path for path in files if not is_file(path)), None):
        raise WrongInput(f"{knob} {folder}: {missing} is missing; save the data set again")
    return files


def _within(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if is_remote(folder) else str(Path(folder) / name)


def _json(path: str) -> dict[str, Any]:
    try:
        with open_read(path) as stream:
            value = json.load(stream)
    except (OSError, ValueError) as error:
        raise WrongInput(f"{path} cannot be read ({error}); save the data set again") from error
    return value if isinstance(value, dict) else {}


class BuiltIn(SourceKind):
    """`builtin:stdlib`, the `.py` files of this interpreter's standard library; `builtin:digits`,
    chats that ask for the larger of two digits; `builtin:sums`, chats that ask for a sum and say
    how to write it; `builtin:keeper`, chats of all kinds with the keeper of a lighthouse.
    """

    def find(self, source: SourceSettings, knob: str) -> list[SourceFile]:
        if source.source == STDLIB:
            return list(standard_library())
        if source.source in CHATS:
            path = Path(__file__).with_name(CHATS[source.source])
            stamp = {"path": path.name, "bytes": path.stat().st_size}
            return [SourceFile(str(path), path.name, "jsonl", stamp)]
        known = ", ".join((STDLIB, *CHATS))
        raise WrongInput(f"{knob} {source.source} is not built in; {known} are")
