"""Which version is live, and was before: one object of the bucket, written anew under a condition
on its generation.

Of two writers that saw the same state one is refused, which no alias of a model version could do:
aliases are set blindly. So this object alone decides, and the alias `live` follows it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.remote.bucket import Bucket, crc32c
from ingot.base.remote.service import Conflict, Missing
from ingot.registry.local import MARKER
from ingot.registry.versions import Turn

SCHEMA = 1
NAME = "live.json"


@dataclass(frozen=True)
class Pointer:
    """All turns of the pointer, each `{version, before, time, reason}`; `before` is the index of
    the turn that a rollback returns to.
    """

    turns: tuple[dict[str, Any], ...]
    generation: int

    @property
    def now(self) -> int | None:
        return self.turns[-1]["version"] if self.turns else None

    @property
    def previous(self) -> int | None:
        """The version that a rollback makes live."""
        before = self.turns[-1]["before"] if self.turns else None
        return None if before is None else self.turns[before]["version"]

    @property
    def history(self) -> list[Turn]:
        return [Turn(turn["version"], turn["time"], turn["reason"]) for turn in self.turns]


def read(bucket: Bucket) -> Pointer:
    """Raises WrongInput when a newer ingot wrote it, or it is not to be understood."""
    for _ in range(3):  # it may be written anew between the two requests
        found = bucket.stat(NAME)
        if found is None:
            return Pointer((), 0)
        try:
            value = json.loads(bucket.get(NAME))
        except Missing:
            continue
        except ValueError:
            raise WrongInput(
                f"{bucket.url_of(NAME)} is damaged; restore an older version of the object"
            ) from None
        if value.get("schema", 0) > SCHEMA:
            raise WrongInput(
                f"{bucket.url_of(NAME)} has schema {value['schema']}, newer than this ingot's"
                f" {SCHEMA}; upgrade ingot"
            )
        again = bucket.stat(NAME)
        if again is not None and again.generation == found.generation:
            return Pointer(tuple(value["turns"]), found.generation)
    raise Failed(
        f"{bucket.url_of(NAME)} does not stand still; see who else deploys, and run the same"
        " command again"
    )


def check(name: str, live: int | None, instead_of: int | None) -> None:
    """Raises WrongInput where another version is live than the one that was compared with; -1: any
    will do.
    """
    if instead_of not in (-1, live):
        now, then = (
            f"{name} v{version}" if version is not None else f"nothing as {name}"
            for version in (live, instead_of)
        )
        raise WrongInput(
            f"{now} went live while {then} was compared with the new model; run `ingot gate` again"
        )


def move(bucket: Bucket, pointer: Pointer, number: int, reason: str, *, back: bool = False) -> None:
    """Add a turn to version `number`; `back`: it is a rollback, and the next one goes further back.

    Raises:
        Failed: somebody else moved it since it was read.
    """
    last = len(pointer.turns) - 1
    before = (
        None
        if last < 0
        else pointer.turns[pointer.turns[last]["before"]]["before"]
        if back
        else last
    )
    turn = {"version": number, "before": before, "time": time.time(), "reason": reason}
    text = json.dumps(
        {"schema": SCHEMA, "turns": [*pointer.turns, turn]}, indent=1, ensure_ascii=False
    )
    try:
        bucket.put(NAME, text.encode(), generation=pointer.generation)
    except Conflict:
        raise Failed(
            f"another version went live at the same time ({bucket.url_of(NAME)} changed); run the"
            " same command again"
        ) from None


def put_files(folder: Path, bucket: Bucket) -> None:
    """The folder into the bucket, the marker last. Nothing is sent where all is as its marker says,
    else only what differs.
    """
    there = {blob.name: blob for blob in bucket.list()}
    if MARKER in there and _is_whole(bucket):
        return
    files = []
    for path in sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name != MARKER
    ):
        name, size, checksum = (
            path.relative_to(folder).as_posix(),
            path.stat().st_size,
            crc32c(path),
        )
        if name not in there or (there[name].bytes, there[name].crc32c) != (size, checksum):
            bucket.put(name, path)
        files.append({"path": name, "bytes": size, "crc32c": checksum})
    text = json.dumps({"schema": SCHEMA, "files": files}, indent=1)
    bucket.put(MARKER, text.encode(), generation=there[MARKER].generation if MARKER in there else 0)


def marked(bucket: Bucket) -> list[dict[str, Any]]:
    """The files that the marker vouches for. Raises WrongInput where there is none."""
    try:
        files: list[dict[str, Any]] = json.loads(bucket.get(MARKER))["files"]
    except (Missing, ValueError, KeyError):
        raise WrongInput(
            f"{bucket.url_of(MARKER)} is missing or damaged; register the model again"
        ) from None
    return files


def damaged(bucket: Bucket) -> list[str]:
    """Addresses of files that are missing or changed, by the checksums that the service keeps: no
    byte is read. Raises as `marked` does.
    """
    there = {blob.name: (blob.bytes, blob.crc32c) for blob in bucket.list()}
    return [
        bucket.url_of(file["path"])
        for file in marked(bucket)
        if there.get(file["path"]) != (file["bytes"], file["crc32c"])
    ]


def classifies(folder: Path) -> bool:
    """Does the model give labels rather than text?"""
    config = json.loads((folder / "config.json").read_bytes())
    return any("Classification" in name for name in config.get("architectures") or [])


def _is_whole(bucket: Bucket) -> bool:
    try:
        return not damaged(bucket)
    except WrongInput:
        return False
