"""The index of a replica: which object holds which file of a state, and which objects no state
needs any more.
"""

from __future__ import annotations

import base64
import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.remote.bucket import Blob, Bucket
from ingot.base.remote.memory import Content, LocalFile
from ingot.base.remote.service import Conflict, Missing
from ingot.base.runfolder import SET_ASIDE

INDEX = "REPLICA.json"
SCHEMA = 1
READ_ATTEMPTS = 10
"""How often a reader starts again when writers replace the state that it reads."""
NEVER_REPLICATED, ONLY_WHEN_NAMED = "checkpoints", "heartbeats"
"""Folders of a training: checkpoints are handled by `checkpoint.upload`, heartbeats concern one
machine only.
"""

PathFilter = Callable[[str], bool]


@dataclass(frozen=True)
class IndexEntry:
    """One file of a state; `key` is the name of its object below the replica's address."""

    path: str
    key: str
    bytes: int
    crc32c: str
    mtime_ns: int

    @property
    def content(self) -> Content:
        return self.bytes, self.crc32c

    def holds(self, bytes: int, crc32c: str) -> bool:
        return self.content == (bytes, crc32c)


@dataclass(frozen=True)
class Index:
    """One state: entries by path, and the objects that are being deleted with their generations.
    `generation` is 0 as long as there is no index.
    """

    entries: Mapping[str, IndexEntry] = field(default_factory=dict)
    garbage: Mapping[str, int] = field(default_factory=dict)
    generation: int = 0


def path_filter(parts: Collection[str] | None) -> PathFilter:
    """A test whether a path belongs to `parts` (top-level names or prefixes of folders), or to all
    that a replica holds where `parts` is None.
    """
    names = None if parts is None else [part.strip("/") for part in parts]

    def within(path: str) -> bool:
        top, *below = path.split("/")
        if top in (NEVER_REPLICATED, INDEX) or (
            top == SET_ASIDE and below[1:2] in ([NEVER_REPLICATED], [ONLY_WHEN_NAMED])
        ):
            return False
        if names is None:
            return top != ONLY_WHEN_NAMED
        return any(path == name or path.startswith(f"{name}/") for name in names)

    return within


def read_index(bucket: Bucket, name: str = INDEX) -> Index:
    """Read an index. Raises WrongInput if a newer ingot wrote it, Failed if it cannot be parsed."""
    for _ in range(READ_ATTEMPTS):
        try:
            with tempfile.NamedTemporaryFile() as file:
                about = bucket.get_to_file(name, Path(file.name))
                return _parse_index(
                    Path(file.name).read_bytes(), about.generation, bucket.url_of(name)
                )
        except Missing:
            if bucket.stat(name) is None:
                return Index()
    raise written_too_fast(bucket)


def write_index(bucket: Bucket, index: Index, name: str = INDEX) -> None:
    """Replace the index of the same generation (compare and set).

    Raises:
        Failed: somebody else replaced it meanwhile.
    """
    garbage = [
        {"key": key, "generation": generation} for key, generation in sorted(index.garbage.items())
    ]
    about = {
        "schema": SCHEMA,
        "files": [asdict(entry) for _, entry in sorted(index.entries.items())],
        "garbage": garbage,
    }
    try:
        bucket.put(name, (json.dumps(about, indent=1) + "\n").encode(), generation=index.generation)
    except Conflict as error:
        raise Failed(
            f"{bucket.url} was written by somebody else meanwhile and is as they left it; stop one"
            " of the two, run the command again"
        ) from error


def changed_remotely(
    index: Index, here: Mapping[str, LocalFile], known: Mapping[str, Content]
) -> set[str]:
    """Paths that were changed or deleted in the bucket, and not in the folder, since the two last
    agreed.

    Where both sides changed, the folder wins; but a file that the folder lacks is deleted only if
    the folder once had that very content.
    """
    ours, theirs = (
        {path: about.content for path, about in side.items()} for side in (here, index.entries)
    )
    seen = known if index.generation else {}

    def is_theirs(path: str) -> bool:
        mine, other, before = ours.get(path), theirs.get(path), seen.get(path)
        return mine != other and (mine == before or (mine is None and other != before))

    return {path for path in {*ours, *theirs} if is_theirs(path)}


def written_too_fast(bucket: Bucket) -> Failed:
    return Failed(
        f"{bucket.url} is written faster than it can be read; run the same command again when the"
        " run there is done"
    )


class KeyChooser:
    """Chooses object names for new content: never one that the index names, that is being deleted,
    or that holds other content.
    """

    def __init__(self, index: Index, listed: Mapping[str, Blob]) -> None:
        self._taken = {entry.key for entry in index.entries.values()}
        self._garbage, self._listed = index.garbage, listed

    def choose(self, local: LocalFile) -> tuple[str, bool]:
        """A name, and whether the content must still be sent: an interrupted push may have sent
        it.
        """
        for name in _candidate_keys(local):
            there = self._listed.get(name)
            doomed = there is not None and self._garbage.get(name) == there.generation
            if (
                name not in self._taken
                and not doomed
                and (there is None or is_content(there, local))
            ):
                self._taken.add(name)
                return name, there is None
        raise AssertionError("candidate keys are endless")


def is_content(blob: Blob | None, local: LocalFile) -> bool:
    return blob is not None and (blob.bytes, blob.crc32c) == (local.bytes, local.crc32c)


def find_garbage(
    index: Index,
    listed: Mapping[str, Blob],
    entries: Mapping[str, IndexEntry],
    known: Collection[str],
    within: PathFilter,
) -> dict[str, int]:
    """Objects that nothing needs once `entries` are the state: left by older states and by
    interrupted pushes.

    An object that was never written for one of the `known` paths belongs to somebody else and is
    not garbage.
    """
    used = {entry.key for entry in entries.values()}

    def ours(name: str) -> bool:
        path = re.sub(r"~[0-9a-f]{8}-\d+(-\d+)?$", "", name)
        return within(path) and (name != path or path in known)

    unused = {name: blob.generation for name, blob in listed.items() if name not in used}
    return {
        name: generation
        for name, generation in unused.items()
        if index.garbage.get(name) == generation or ours(name)
    }


def content_name(local: LocalFile) -> str:
    """The name of an object that holds this content of a file, and never another."""
    return f"{local.path}~{base64.b64decode(local.crc32c).hex()}-{local.bytes}"


def _candidate_keys(local: LocalFile) -> Iterator[str]:
    beside = content_name(local)
    yield from (local.path, beside)
    yield from (f"{beside}-{number}" for number in count(2))


def _parse_index(content: bytes, generation: int, url: str) -> Index:
    try:
        about: dict[str, Any] = json.loads(content)
        if about["schema"] > SCHEMA:
            raise WrongInput(
                f"{url} has schema {about['schema']}, newer than this ingot's {SCHEMA}; upgrade"
                " ingot"
            )
        entries = {entry["path"]: IndexEntry(**entry) for entry in about["files"]}
        left = {item["key"]: int(item["generation"]) for item in about["garbage"]}
    except (ValueError, TypeError, KeyError) as error:
        raise Failed(
            f"{url} is no index of a run folder ({error}); delete it there, and push the run folder"
            " again"
        ) from error
    for path in entries:
        parts = PurePosixPath(path).parts
        if (
            not parts
            or PurePosixPath(path).is_absolute()
            or any(part.startswith(".") for part in parts)
        ):
            raise Failed(
                f"{url} lists {path}, which is no file of a run folder; delete it there, and push"
                " the run folder again"
            )
    return Index(entries, left, generation)
