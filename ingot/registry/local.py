"""The local registry: one SQLite file with versions, reports, lineage and the live pointer, and
beside it a folder for each version.

A version is a copy (hard links where the disk allows) with a marker that vouches for its files, so
that a run which exports its model anew cannot change what is registered. Safe with several writers;
a writer that dies leaves nothing registered.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.lock import shared_lock
from ingot.base.markers import entry_of, problems, read_marker, write_marker
from ingot.base.reports import EvaluationReport, parse_report
from ingot.base.storage import atomic_folder, disk_errors, fsync_folder
from ingot.registry.database import opened
from ingot.registry.versions import Turn, Version

MARKER = "VERSION.json"
STAGED = ".incoming-"
"""Begins the name of a copy that is not registered yet, or of what is on its way out."""
_COLUMNS = "name, version, model_hash, tokenizer_hash, folder, report, lineage, created"


class Registry:
    """The registry in the SQLite file `path`; nothing is created before something is registered.

    Every method opens the file for itself, so that one object may be used from several threads and
    after a fork.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.home = path.with_suffix("") if path.suffix else path.with_name(f"{path.name}-versions")

    @property
    def place(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        with opened(self.path) as db:
            return [
                name for (name,) in db.execute("SELECT DISTINCT name FROM versions ORDER BY name")
            ]

    def versions(self, name: str) -> list[Version]:
        """All versions of `name`, oldest first."""
        with opened(self.path) as db:
            return [
                self._version(row)
                for row in db.execute(
                    f"SELECT {_COLUMNS} FROM versions WHERE name = ? ORDER BY version", (name,)
                )
            ]

    def version(self, name: str, number: int) -> Version:
        """Raises WrongInput naming the versions that there are."""
        known = self.versions(name)
        if not known:
            raise WrongInput(
                f"nothing is registered as {name} in {self.path}; it knows"
                f" {', '.join(self.names()) or 'no name'}; run `ingot register` first"
            )
        found = next((version for version in known if version.number == number), None)
        if found is None:
            raise WrongInput(
                f"{name} has no version {number} in {self.path}; it has"
                f" {', '.join(str(version.number) for version in known)}"
            )
        return found

    def live(self, name: str) -> Version | None:
        """The version that is live under `name`."""
        with opened(self.path) as db:
            turn = _turn(db, name)
        return None if turn is None else self.version(name, turn[1])

    def find(self, name: str, report: EvaluationReport) -> Version | None:
        """The version with the model that `report` is about."""
        with opened(self.path) as db:
            return self._find(db, name, report)

    def history(self, name: str) -> list[Turn]:
        """All moves of the live pointer, oldest first."""
        with opened(self.path) as db:
            return [
                Turn(*row)
                for row in db.execute(
                    "SELECT version, time, reason FROM turns WHERE name = ? ORDER BY id", (name,)
                )
            ]

    def add(
        self, name: str, folder: Path, report: EvaluationReport, lineage: Mapping[str, Any]
    ) -> Version:
        """Register the model in `folder` with its report. A model that is registered already keeps
        its version and takes the new report.

        Where its files are damaged they are put there anew, all at once; whatever is live stays so
        meanwhile.

        Raises:
            WrongInput: they are damaged, and so are those in `folder`.
        """
        with opened(self.path, writing=True) as db:
            known = self._refreshed(db, name, report)
            identity = str(db.execute("SELECT id FROM registry").fetchone()[0])
        if known is not None:
            self._mend(known, folder, identity)
            return known
        with (
            disk_errors(self.home),
            self._staged(name, folder, identity) as staged,
            opened(self.path, writing=True) as db,
        ):
            known = self._refreshed(db, name, report)  # another writer may have been faster
            if known is not None:
                return known
            (last,) = db.execute(
                "SELECT coalesce(max(version), 0) FROM versions WHERE name = ?", (name,)
            ).fetchone()
            target = self.home / name / f"v{last + 1}"
            self._clear(target, identity)
            os.replace(staged, target)
            fsync_folder(target.parent)
            self._insert(db, name, last + 1, report, lineage)
        return self.version(name, last + 1)

    def point(self, name: str, number: int, reason: str, *, instead_of: int | None = -1) -> None:
        """Make version `number` live; nothing happens when it is already.

        `instead_of` is the version (None: nothing) that must be live now; any may be when it is not
        given.

        Raises:
            WrongInput: there is no such version, or another one went live meanwhile.
        """
        self.version(name, number)
        with opened(self.path, writing=True) as db:
            turn = _turn(db, name)
            now = None if turn is None else turn[1]
            if now == number:
                return
            if instead_of not in (-1, now):
                raise WrongInput(
                    f"{_called(name, now)} went live while {_called(name, instead_of)} was compared"
                    " with the new model; run `ingot gate` again"
                )
            db.execute(
                "INSERT INTO turns (name, version, before, time, reason) VALUES (?, ?, ?, ?, ?)",
                (name, number, turn and turn[0], time.time(), reason),
            )

    def rollback(self, name: str, reason: str) -> Version:
        """Make the version live that was live before this one; again goes one further back.

        Raises:
            WrongInput: nothing is live, or nothing was live before.
        """
        with opened(self.path, writing=True) as db:
            turn = _turn(db, name)
            if turn is None:
                raise WrongInput(
                    f"nothing is live as {name} in {self.path}; `ingot deploy {name}` makes the"
                    " newest version live"
                )
            row = db.execute(
                "SELECT version, before FROM turns WHERE id = ?", (turn[2],)
            ).fetchone()
            if row is None:
                raise WrongInput(
                    f"nothing was live before {_called(name, turn[1])}; `ingot deploy {name}"
                    " --version V` takes another one"
                )
            db.execute(
                "INSERT INTO turns (name, version, before, time, reason) VALUES (?, ?, ?, ?, ?)",
                (name, row[0], row[1], time.time(), reason),
            )
        return self.version(name, row[0])

    def check(self, version: Version, *, checksums: bool = False) -> None:
        """Raises WrongInput when files of a registered version are missing or changed."""
        marker = read_marker(version.folder, MARKER)
        found = (
            [f"{version.folder} has no {MARKER}"]
            if marker is None
            else problems(version.folder, marker, checksums=checksums)
        )
        if found:
            raise WrongInput(
                f"{_called(version.name, version.number)} is damaged: {'; '.join(found[:3])};"
                " register it again, or deploy another version"
            )

    def fetch(self, version: Version) -> Path:
        """The version's folder; its files were never elsewhere."""
        self.check(version)
        return version.folder

    def _version(self, row: tuple[Any, ...]) -> Version:
        name, number, model_hash, tokenizer_hash, folder, report, lineage, created = row
        where = f"{self.path}: {_called(name, number)}"
        return Version(
            name,
            number,
            model_hash,
            tokenizer_hash,
            self.home / folder,
            parse_report(report, where),
            json.loads(lineage),
            created,
        )

    def _find(self, db: sqlite3.Connection, name: str, report: EvaluationReport) -> Version | None:
        query = (
            f"SELECT {_COLUMNS} FROM versions WHERE name = ? AND model_hash = ? AND"
            " tokenizer_hash = ?"
        )
        row = db.execute(query, (name, report.model_hash, report.tokenizer_hash)).fetchone()
        return None if row is None else self._version(row)

    def _refreshed(
        self, db: sqlite3.Connection, name: str, report: EvaluationReport
    ) -> Version | None:
        """The version of this model with `report` in place of the one it had: the model may have
        been measured on a new set.
        """
        known = self._find(db, name, report)
        if known is not None and known.report != report:
            db.execute(
                "UPDATE versions SET report = ? WHERE name = ? AND version = ?",
                (_json(asdict(report)), name, known.number),
            )
            known = self._find(db, name, report)
        return known

    def _insert(
        self,
        db: sqlite3.Connection,
        name: str,
        number: int,
        report: EvaluationReport,
        lineage: Mapping[str, Any],
    ) -> None:
        values = (
            name,
            number,
            report.model_hash,
            report.tokenizer_hash,
            f"{name}/v{number}",
            _json(asdict(report)),
            _json(dict(lineage)),
            time.time(),
        )
        db.execute(f"INSERT INTO versions ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)

    @contextlib.contextmanager
    def _staged(self, name: str, folder: Path, identity: str) -> Iterator[Path]:
        """A complete copy of `folder` under a name of its own, not registered yet; gone at the end
        unless it was moved.
        """
        place = self.home / name
        place.mkdir(parents=True, exist_ok=True)
        staged = place / f"{STAGED}{uuid.uuid4().hex}"
        with shared_lock(self.home, f"{name}.writers", lambda: _sweep(place)):
            try:
                with atomic_folder(staged) as partial:
                    files = _copy(folder, partial)
                    write_marker(
                        partial,
                        MARKER,
                        {"registry": identity},
                        [entry_of(partial, file) for file in files],
                    )
                yield staged
            finally:
                shutil.rmtree(staged, ignore_errors=True)

    def _mend(self, version: Version, folder: Path, identity: str) -> None:
        """Put the files of a damaged version there anew from `folder`."""
        marker = read_marker(version.folder, MARKER)
        if marker is not None and not problems(version.folder, marker, checksums=True):
            return
        if version.folder.exists() and folder.exists() and version.folder.samefile(folder):
            self.check(version, checksums=True)
        for entry in marker["files"] if marker is not None else ():
            mine, other = version.folder / entry["path"], folder / entry["path"]
            # One file with two names, and so damaged under both: it must not be vouched for.
            if (
                mine.exists()
                and other.exists()
                and mine.samefile(other)
                and problems(version.folder, {"files": [entry]}, checksums=True)
            ):
                called = _called(version.name, version.number)
                raise WrongInput(
                    f"{other} is damaged, and {called} with it; remove {folder} and run `ingot"
                    " train` again, which exports it anew"
                )
        with (
            disk_errors(self.home),
            self._staged(version.name, folder, identity) as staged,
            opened(self.path, writing=True),
            atomic_folder(version.folder) as partial,
        ):
            os.replace(staged, partial)

    def _clear(self, target: Path, identity: str) -> None:
        """Remove the folder of a writer that died before its row was written; never one of another
        registry.
        """
        if not target.exists():
            return
        marker = read_marker(target, MARKER)
        if marker is None or marker.get("registry") != identity:
            raise WrongInput(
                f"{target} exists and does not belong to {self.path}; move it away, or set"
                " registry.path"
            )
        # Out of the way at once: without its marker nobody would know any more whose it is.
        gone = target.with_name(f"{STAGED}{uuid.uuid4().hex}")
        os.replace(target, gone)
        fsync_folder(target.parent)
        shutil.rmtree(gone, ignore_errors=True)


def _sweep(place: Path) -> None:
    """Remove what writers that died were copying."""
    for left in place.glob(f".*{STAGED.removeprefix('.')}*"):
        shutil.rmtree(left, ignore_errors=True)


def _turn(db: sqlite3.Connection, name: str) -> tuple[int, int, int | None] | None:
    """The live pointer: its row's id, the version, and the row that a rollback returns to."""
    row: tuple[int, int, int | None] | None = db.execute(
        "SELECT id, version, before FROM turns WHERE name = ? ORDER BY id DESC LIMIT 1", (name,)
    ).fetchone()
    return row


def _copy(source: Path, target: Path) -> list[str]:
    """Weights as hard links, where the disk allows, everything else as copies; symbolic links are
    followed. Relative paths back.
    """
    paths = sorted(
        path.relative_to(source)
        for path in source.rglob("*")
        if path.is_file() and path.name != MARKER
    )
    for path in paths:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            with contextlib.suppress(OSError):
                os.link((source / path).resolve(), target / path)
                continue
        shutil.copyfile(source / path, target / path)
    return [str(path) for path in paths]


def _called(name: str, number: int | None) -> str:
    return f"{name} v{number}" if number is not None else f"nothing as {name}"


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
