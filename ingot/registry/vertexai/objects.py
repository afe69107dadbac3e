"""What the registry keeps in the bucket: the live pointer, and the files of each model.

The pointer is one object that is replaced under a generation condition, so that of two writers that
read the same state one fails. Aliases of model versions offer no such condition; the alias `live`
only follows the pointer. A model's files are listed with sizes and checksums in a marker written
last.
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
from ingot.base.remote.transfer import MarkedFolder, fetch_file, in_parallel
from ingot.base.storage import stays_inside
from ingot.registry.local import MARKER
from ingot.registry.versions import LiveChange, stale_decision

SCHEMA = 1
POINTER = "live.json"


@dataclass(frozen=True)
class LivePointer:
    """All changes of the pointer, each `{version, before, time, reason}`; `before` is the index of
    the change that a rollback returns to.
    """

    turns: tuple[dict[str, Any], ...]
    generation: int

    @property
    def now(self) -> int | None:
        """The live version, or None."""
        return self.turns[-1]["version"] if self.turns else None

    @property
    def previous(self) -> int | None:
        """The version that a rollback makes live, or None."""
        before = self.turns[-1]["before"] if self.turns else None
        return None if before is None else self.turns[before]["version"]

    @property
    def history(self) -> list[LiveChange]:
        """All changes, oldest first."""
        return [LiveChange(turn["version"], turn["time"], turn["reason"]) for turn in self.turns]


def read_pointer(bucket: Bucket) -> LivePointer:
    """The pointer as it stands. Raises WrongInput where it is damaged or a newer ingot wrote it."""
    for _ in range(3):  # it may be replaced between the requests
        found = bucket.stat(POINTER)
        if found is None:
            return LivePointer((), 0)
        try:
            value = json.loads(bucket.get(POINTER))
        except Missing:
            continue
        except ValueError:
            raise WrongInput(
                f"{bucket.url_of(POINTER)} is damaged; restore an older version of the object"
            ) from None
        if value.get("schema", 0) > SCHEMA:
            raise WrongInput(
                f"{bucket.url_of(POINTER)} has schema {value['schema']}, newer than this ingot's"
                f" {SCHEMA}; upgrade ingot"
            )
        again = bucket.stat(POINTER)
        if again is not None and again.generation == found.generation:
            return LivePointer(tuple(value["turns"]), found.generation)
    raise Failed(
        f"{bucket.url_of(POINTER)} keeps changing; see who else deploys, and run the same"
        " command again"
    )


def check_expected_live(name: str, live: int | None, instead_of: int | None) -> None:
    """Raises WrongInput unless version `instead_of` is live (None: none; -1: any)."""
    if instead_of not in (-1, live):
        raise stale_decision(name, live, instead_of)


def move_pointer(
    bucket: Bucket, pointer: LivePointer, number: int, reason: str, *, back: bool = False
) -> None:
    """Make version `number` live. `back`: this is a rollback, so that the next one goes further
    back.

    Raises:
        Failed: somebody else changed the pointer after it was read.
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
        bucket.put(POINTER, text.encode(), generation=pointer.generation)
    except Conflict:
        raise Failed(
            f"another version went live at the same time ({bucket.url_of(POINTER)} changed);"
            " run the same command again"
        ) from None


def upload_files(folder: Path, bucket: Bucket) -> None:
    """Upload a model folder, its marker last. Only files that differ are sent, none where all match
    the marker.
    """
    if _is_whole(bucket):
        return
    marked, files = MarkedFolder(bucket, "", MARKER), []
    for path in sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name != MARKER
    ):
        name = path.relative_to(folder).as_posix()
        marked.put(folder, name)
        files.append({"path": name, "bytes": path.stat().st_size, "crc32c": crc32c(path)})
    text = json.dumps({"schema": SCHEMA, "files": files}, indent=1)
    marked.commit(text.encode(), may_replace=lambda _: True)


def listed_files(bucket: Bucket) -> list[dict[str, Any]]:
    """The entries of the marker. Raises WrongInput where there is none, or it is damaged or lists
    what lies elsewhere.
    """
    try:
        files: list[dict[str, Any]] = json.loads(bucket.get(MARKER))["files"]
    except (Missing, ValueError, KeyError):
        raise WrongInput(
            f"{bucket.url_of(MARKER)} is missing or damaged; register the model again"
        ) from None
    if outside := next((file["path"] for file in files if not stays_inside(file["path"])), None):
        raise WrongInput(
            f"{bucket.url_of(MARKER)} lists {outside}, which lies outside of the model; register"
            " the model again"
        )
    return files


def fetch_files(bucket: Bucket, files: list[dict[str, Any]], folder: Path) -> None:
    """Fetch files, as `listed_files` returns them. Raises Missing where one is not what the marker
    says.
    """
    in_parallel(
        lambda file: fetch_file(
            bucket, file["path"], folder / file["path"], content=(file["bytes"], file["crc32c"])
        ),
        files,
    )


def damaged_files(bucket: Bucket) -> list[str]:
    """URLs of files that are missing or changed, by the checksums the service keeps; nothing is
    downloaded. Raises as `listed_files` does.
    """
    stored = {blob.name: (blob.bytes, blob.crc32c) for blob in bucket.list()}
    return [
        bucket.url_of(file["path"])
        for file in listed_files(bucket)
        if stored.get(file["path"]) != (file["bytes"], file["crc32c"])
    ]


def is_classifier(folder: Path) -> bool:
    """Whether the model in `folder` is a classifier of texts, or of what is masked in them."""
    config = json.loads((folder / "config.json").read_bytes())
    names = config.get("architectures") or []
    return any("Classification" in name or name.endswith("ForMaskedLM") for name in names)


def _is_whole(bucket: Bucket) -> bool:
    try:
        return not damaged_files(bucket)
    except WrongInput:
        return False
