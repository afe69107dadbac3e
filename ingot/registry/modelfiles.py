"""The files of a model in the bucket: sent once, vouched for by a marker with sizes and checksums
that is written last, mended where they changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.base.bucket import Bucket, crc32c
from ingot.base.errors import WrongInput
from ingot.base.gcs import Missing
from ingot.registry.store import MARKER

SCHEMA = 1


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
