"""Wikipedia dumps: where one lies on the dump server, and its download, which goes on where it was
broken off.
"""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.progress import Progress, say
from ingot.base.storage import disk_errors, fsync_folder
from ingot.config.sections.data import SourceSettings
from ingot.data.cache import cache_folder, recall, remember
from ingot.data.sourcefile import SourceFile

SERVER = "https://dumps.wikimedia.org"
SERVER_VARIABLE = "WIKIPEDIA_DUMPS"
"""Environment variable with the address of a mirror."""
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60
TRIES = 5


def find_dump(source: SourceSettings, knob: str) -> SourceFile:
    """The dump that `wikipedia:LANG[:DATE]` names; its path is where the download goes to.

    Raises:
        WrongInput: it is no language or date, or the server has no such dump.
        Failed: the server cannot be reached, and never was for this source.
    """
    match = re.fullmatch(r"wikipedia:([a-z][a-z-]*)(?::(\d{8}|latest))?", source.source)
    if not match:
        raise WrongInput(
            f"{knob} {source.source}: write it as wikipedia:LANG or wikipedia:LANG:YYYYMMDD, such"
            " as wikipedia:en"
        )
    wiki, date = match[1].replace("-", "_") + "wiki", match[2] or "latest"
    name = f"{wiki}-{date}-pages-articles-multistream.xml.bz2"
    url = f"{os.environ.get(SERVER_VARIABLE) or SERVER}/{wiki}/{date}/{name}"
    try:
        stamp = _stamp(url, f"{knob} {source.source}")
        remember(url, stamp)
    except Failed:
        stamp = recall(url)
        if stamp is None:
            raise
        say(
            f"warning: the dump server cannot be reached; {source.source} is taken to be as it was"
            " when it last was"
        )
    path = cache_folder() / "wikipedia" / fingerprint(stamp) / name
    return SourceFile(str(path), name, "wikipedia", {**stamp, "path": source.source})


def _stamp(url: str, place: str) -> dict[str, Any]:
    """Size and version of what lies at `url`."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_S
        ) as answer:
            tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
            return {"url": url, "bytes": int(answer.headers.get("Content-Length") or 0), "tag": tag}
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise WrongInput(
                f"{place}: {url} is not there; see {url.rsplit('/', 2)[0]}/ for the dates that are"
            ) from error
        raise Failed(
            f"{place}: {url} answers {error.code} {error.reason}; try again later"
        ) from error
    except (OSError, HTTPException) as error:
        raise Failed(
            f"{place}: {url} cannot be reached ({error}); check the network, or give the path of a"
            " dump at hand"
        ) from error


def fetch_dump(file: SourceFile) -> None:
    """Download a dump to `file.path`, unless it is there; what an earlier try fetched is kept.

    Raises:
        Failed: the connection broke several times without anything gained, or the disk is full.
    """
    target, size = Path(file.path), file.bytes
    if target.is_file() and target.stat().st_size == size:
        return
    partial = target.with_name(target.name + ".partial")
    with disk_errors(target):
        partial.parent.mkdir(parents=True, exist_ok=True)
    have, tries = partial.stat().st_size if partial.exists() else 0, 0
    with Progress(
        f"fetch {file.name}", total=size // 10**6, unit="MB", done=have // 10**6
    ) as progress:
        while have < size:
            before, broken = have, _fetch(file, partial, have, progress)
            have = partial.stat().st_size if partial.exists() else 0
            tries = 0 if have > before else tries + 1
            if have < size and tries >= TRIES:
                raise Failed(
                    f"{file.stamp['url']} broke off at {have:,} of {size:,} bytes ({broken}); run"
                    " the same command again to go on"
                )
    if have > size:
        partial.unlink()
        raise Failed(
            f"{file.stamp['url']} changed while it was fetched; run the same command again"
        )
    with disk_errors(target):
        os.replace(partial, target)
        fsync_folder(target.parent)


def _fetch(file: SourceFile, partial: Path, have: int, progress: Progress) -> str:
    """Fetch from byte `have` on. Returns what broke it off, "" for nothing."""
    headers = (
        {"Range": f"bytes={have}-", "If-Range": file.stamp["tag"]}
        if have and file.stamp["tag"]
        else {}
    )
    try:
        with urllib.request.urlopen(
            urllib.request.Request(file.stamp["url"], headers=headers), timeout=TIMEOUT_S
        ) as answer:
            goes_on = answer.status == 206
            with disk_errors(partial), partial.open("ab" if goes_on else "wb") as stream:
                have = have if goes_on else 0
                while chunk := answer.read(CHUNK_BYTES):
                    stream.write(chunk)
                    have += len(chunk)
                    progress.update(have // 10**6)
                stream.flush()
                os.fsync(stream.fileno())
        return "the connection ended"
    except (OSError, HTTPException) as error:
        return str(error)
