"""The local registry: one SQLite file with versions, reports, lineage and the live pointer, and a
folder for each version beside it.

A version is a copy of the model folder with a marker that lists sizes and checksums. Weights that
ingot exported are hard links where the disk allows: an export replaces files and never writes into
one, so that it cannot change what is registered.
Several processes may write; one that is killed leaves nothing half registered.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.markers import entry_of, problems, read_marker, write_marker
from ingot.base.reports import EvaluationReport, parse_report
from ingot.base.runfolder import shared_lock
from ingot.base.storage import atomic_folder, disk_errors, fsync_folder
from ingot.config.models.content import tensor_digests
from ingot.config.models.lineage import read_lineage
from ingot.registry.database import open_database
from ingot.registry.versions import (
    LiveChange,
    LocalVersion,
    another_live,
    no_earlier,
    stale_decision,
    unknown_version,
)

MARKER = "VERSION.json"
STAGED = ".incoming-"
"""Prefix of folders that are being copied in or removed, and are not registered."""
_COLUMNS = "name, version, model_hash, tokenizer_hash, folder, report, lineage, created"


class LocalRegistry:
    """The registry in the SQLite file `path`, which is created with the first registration.

    Each method opens the file anew, so that one object may be used from several threads and after a
    fork.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.home = path.with_suffix("") if path.suffix else path.with_name(f"{path.name}-versions")

    @property
    def place(self) -> str:
        return str(self.path)

    @property
    def knob(self) -> str:
        return f" registry.path={self.path}"

    def names(self) -> list[str]:
        with open_database(self.path) as db:
            found = db.execute("SELECT DISTINCT name FROM versions ORDER BY name")
            return [name for (name,) in found]

    def versions(self, name: str) -> list[LocalVersion]:
        """All versions of `name`, oldest first."""
        with open_database(self.path) as db:
            return [
                self._version(row)
                for row in db.execute(
                    f"SELECT {_COLUMNS} FROM versions WHERE name = ? ORDER BY version", (name,)
                )
            ]

    def version(self, name: str, number: int) -> LocalVersion:
        """One version. Raises WrongInput, naming the existing versions, where it is unknown."""
        known = self.versions(name)
        found = next((version for version in known if version.number == number), None)
        if found is None:
            raise unknown_version(self, name, number, [version.number for version in known])
        return found

    def live(self, name: str) -> LocalVersion | None:
        """The version that is live under `name`."""
        with open_database(self.path) as db:
            change = _current_change(db, name)
        return None if change is None else self.version(name, change[1])

    def find(self, name: str, report: EvaluationReport) -> LocalVersion | None:
        """The version of the model that `report` measured, or None."""
        with open_database(self.path) as db:
            return self._find(db, name, report)

    def history(self, name: str) -> list[LiveChange]:
        """All changes of the live pointer, oldest first."""
        with open_database(self.path) as db:
            return [
                LiveChange(*row)
                for row in db.execute(
                    "SELECT version, time, reason FROM turns WHERE name = ? ORDER BY id", (name,)
                )
            ]

    def add(
        self,
        name: str,
        folder: Path,
        report: EvaluationReport,
        lineage: Mapping[str, Any],
        copied: Callable[[], None] = lambda: None,
    ) -> LocalVersion:
        """Register the model in `folder` with its report. A model that is registered already keeps
        its version number and gets the new report.

        If the files of its version are damaged, they are replaced atomically from `folder`; the
        live pointer does not change meanwhile. `copied` is called once `folder` is copied, and may
        raise. Raises WrongInput where the files in `folder` are damaged as well.
        """
        with open_database(self.path, writing=True) as db:
            known = self._update_report(db, name, report)
            identity = str(db.execute("SELECT id FROM registry").fetchone()[0])
        if known is not None:
            self._mend(known, folder, identity, copied)
            return known
        with (
            disk_errors(self.home),
            self._staged(name, folder, identity, copied) as staged,
            open_database(self.path, writing=True) as db,
        ):
            # Another process may have registered it meanwhile.
            known = self._update_report(db, name, report)
            if known is not None:
                return known
            newest = "SELECT coalesce(max(version), 0) FROM versions WHERE name = ?"
            (last,) = db.execute(newest, (name,)).fetchone()
            target = self.home / name / f"v{last + 1}"
            self._clear(target, identity)
            os.replace(staged, target)
            fsync_folder(target.parent)
            self._insert(db, name, last + 1, report, lineage)
        return self.version(name, last + 1)

    def point(self, name: str, number: int, reason: str, *, instead_of: int | None = -1) -> None:
        """Make version `number` live, unless it is already.

        `instead_of`: the version (None: none) that must be live now; by default any.

        Raises:
            WrongInput: there is no such version, or another one went live meanwhile.
        """
        self.version(name, number)
        with open_database(self.path, writing=True) as db:
            change = _current_change(db, name)
            now = None if change is None else change[1]
            if now == number:
                return
            if instead_of not in (-1, now):
                raise stale_decision(name, now, instead_of)
            db.execute(
                "INSERT INTO turns (name, version, before, time, reason) VALUES (?, ?, ?, ?, ?)",
                (name, number, change and change[0], time.time(), reason),
            )

    def previous(self, name: str) -> LocalVersion:
        """The previously live version.

        Raises:
            WrongInput: nothing is live, or nothing was live before.
        """
        with open_database(self.path) as db:
            row = self._previous_change(db, name)
        return self.version(name, row[0])

    def rollback(self, name: str, reason: str) -> LocalVersion:
        """Make the previously live version live again; repeated calls go further back.

        Raises:
            WrongInput: nothing is live, nothing was live before, or its files are damaged.
            Failed: another version went live meanwhile.
        """
        before = self.previous(name)
        self.check(before, checksums=True)
        with open_database(self.path, writing=True) as db:
            row = self._previous_change(db, name)
            if row[0] != before.number:
                raise another_live(name)
            db.execute(
                "INSERT INTO turns (name, version, before, time, reason) VALUES (?, ?, ?, ?, ?)",
                (name, row[0], row[1], time.time(), reason),
            )
        return before

    def check(self, version: LocalVersion, *, checksums: bool = False) -> None:
        """Raises WrongInput when files of a registered version are missing or changed."""
        marker = read_marker(version.folder, MARKER)
        found = (
            [f"{version.folder} has no {MARKER}"]
            if marker is None
            else problems(version.folder, marker, checksums=checksums)
        )
        if found:
            raise WrongInput(
                f"{version.name} v{version.number} is damaged: {'; '.join(found[:3])};"
                " register it again, or deploy another version"
            )

    def fetch(self, version: LocalVersion) -> Path:
        """The version's folder, once its files are checked."""
        self.check(version)
        return version.folder

    def _previous_change(self, db: sqlite3.Connection, name: str) -> tuple[int, int | None]:
        """The version to roll back to, and the row that a further rollback returns to."""
        change = _current_change(db, name)
        if change is None:
            raise no_earlier(self, name, None)
        asked = "SELECT version, before FROM turns WHERE id = ?"
        row: tuple[int, int | None] | None = db.execute(asked, (change[2],)).fetchone()
        if row is None:
            raise no_earlier(self, name, change[1])
        return row

    def _version(self, row: tuple[Any, ...]) -> LocalVersion:
        name, number, model_hash, tokenizer_hash, folder, report, lineage, created = row
        where = f"{self.path}: {name} v{number}"
        return LocalVersion(
            name,
            number,
            model_hash,
            tokenizer_hash,
            self.home / folder,
            parse_report(report, where),
            json.loads(lineage),
            created,
        )

    def _find(
        self, db: sqlite3.Connection, name: str, report: EvaluationReport
    ) -> LocalVersion | None:
        query = (
            f"SELECT {_COLUMNS} FROM versions WHERE name = ? AND model_hash = ? AND"
            " tokenizer_hash = ?"
        )
        row = db.execute(query, (name, report.model_hash, report.tokenizer_hash)).fetchone()
        return None if row is None else self._version(row)

    def _update_report(
        self, db: sqlite3.Connection, name: str, report: EvaluationReport
    ) -> LocalVersion | None:
        """Store `report` for the version of this model, which may have been evaluated on a new set;
        returns the version, or None where the model is not registered.
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
    def _staged(
        self, name: str, folder: Path, identity: str, copied: Callable[[], None]
    ) -> Iterator[Path]:
        """A complete copy of `folder` under a temporary name; removed at the end unless it was
        moved.
        """
        parent = self.home / name
        parent.mkdir(parents=True, exist_ok=True)
        staged = parent / f"{STAGED}{uuid.uuid4().hex}"
        with shared_lock(self.home, f"{name}.writers", lambda: _remove_leftovers(parent)):
            try:
                with atomic_folder(staged) as partial, contextlib.ExitStack() as stack:
                    stack.callback(copied)  # also where a file is gone that was there before
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

    def _mend(
        self, version: LocalVersion, folder: Path, identity: str, copied: Callable[[], None]
    ) -> None:
        """Replace the files of a damaged version by those of `folder`."""
        marker = read_marker(version.folder, MARKER)
        if marker is not None and not problems(version.folder, marker, checksums=True):
            return
        if version.folder.exists() and folder.exists() and version.folder.samefile(folder):
            self.check(version, checksums=True)
        for entry in marker["files"] if marker is not None else ():
            mine, other = version.folder / entry["path"], folder / entry["path"]
            # Hard links to one file, so damaged under both names: a new marker must not list it.
            if (
                mine.exists()
                and other.exists()
                and mine.samefile(other)
                and problems(version.folder, {"files": [entry]}, checksums=True)
            ):
                called = f"{version.name} v{version.number}"
                raise WrongInput(
                    f"{other} is damaged, and {called} with it; remove {folder} and run `ingot"
                    " train` again, which exports it anew"
                )
        with (
            disk_errors(self.home),
            self._staged(version.name, folder, identity, copied) as staged,
            open_database(self.path, writing=True),
            atomic_folder(version.folder) as partial,
        ):
            os.replace(staged, partial)

    def _clear(self, target: Path, identity: str) -> None:
        """Remove a folder that a killed process left before its row was written; refuse to touch a
        folder of another registry.
        """
        if not target.exists():
            return
        marker = read_marker(target, MARKER)
        if marker is None or marker.get("registry") != identity:
            raise WrongInput(
                f"{target} exists and does not belong to {self.path}; move it away, or set"
                " registry.path"
            )
        # Renamed first: while files are being removed, its marker may be gone, and with it the
        # proof of which registry it belongs to.
        doomed = target.with_name(f"{STAGED}{uuid.uuid4().hex}")
        os.replace(target, doomed)
        fsync_folder(target.parent)
        shutil.rmtree(doomed, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove copies that killed processes left unfinished."""
    for path in folder.glob(f".*{STAGED.removeprefix('.')}*"):
        shutil.rmtree(path, ignore_errors=True)


def _current_change(db: sqlite3.Connection, name: str) -> tuple[int, int, int | None] | None:
    """The live pointer: the id of its row, the version, and the row a rollback returns to."""
    row: tuple[int, int, int | None] | None = db.execute(
        "SELECT id, version, before FROM turns WHERE name = ? ORDER BY id DESC LIMIT 1", (name,)
    ).fetchone()
    return row


def _copy(source: Path, target: Path) -> list[str]:
    """Copy files, following symbolic links, and return their relative paths. Weights are linked
    where the disk allows, but not another tool's, which may write into them.
    """
    exported = bool(tensor_digests(read_lineage(source)))
    paths = sorted(
        path.relative_to(source)
        for path in source.rglob("*")
        if path.is_file() and path.name != MARKER
    )
    for path in paths:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        if exported and path.suffix == ".safetensors":
            with contextlib.suppress(OSError):
                os.link((source / path).resolve(), target / path)
                continue
        shutil.copyfile(source / path, target / path)
    return [str(path) for path in paths]


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
