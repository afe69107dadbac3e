"""Opens the registry's SQLite file: tables, transactions, and SQLite's errors as our own. Knows
nothing about models.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path

from ingot.base.errors import Failed, WrongInput
from ingot.base.storage import disk_errors

SCHEMA = 1
WAIT_S = 60.0
"""How long a connection waits for another process's lock."""
_TABLES = (
    "CREATE TABLE registry (id TEXT NOT NULL)",
    """CREATE TABLE versions (
        name TEXT NOT NULL, version INTEGER NOT NULL, model_hash TEXT NOT NULL,
        tokenizer_hash TEXT NOT NULL, folder TEXT NOT NULL, report TEXT NOT NULL,
        lineage TEXT NOT NULL, created REAL NOT NULL,
        PRIMARY KEY (name, version), UNIQUE (name, model_hash, tokenizer_hash))""",
    # Changes of the live pointer, append-only. `before` is the row a rollback returns to.
    """CREATE TABLE turns (
        id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, version INTEGER NOT NULL,
        before INTEGER REFERENCES turns (id), time REAL NOT NULL, reason TEXT NOT NULL,
        FOREIGN KEY (name, version) REFERENCES versions (name, version))""",
)


@contextlib.contextmanager
def open_database(path: Path, *, writing: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection to the registry. With `writing`, the block is one exclusive transaction,
    committed at its end.

    A missing file is created only for writing; for reading it counts as an empty registry.

    Raises:
        Failed: the disk is full, could not be read, another process holds the file for longer than
            WAIT_S, or one left it half written and it may not be written here.
        WrongInput: the file is not a registry, is damaged, was written by a newer ingot, or cannot
            be opened.
    """
    with _translated_errors(path):
        if writing:
            with disk_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            _create(path)
        db = sqlite3.connect(
            path if writing or path.exists() else ":memory:", timeout=WAIT_S, isolation_level=None
        )
        try:
            _prepare(db, path)
            if writing:
                db.execute("BEGIN IMMEDIATE")
            yield db
            if writing:
                db.execute("COMMIT")
        finally:
            db.close()  # rolls back what is not committed


def _create(path: Path) -> None:
    """Make a missing file with the permissions that the user's umask gives, so that a group may
    share it: SQLite's own are 0644 at most, and its journal's are the file's. What hinders that
    SQLite tells. A file that exists is never opened: to close it would end the locks of all its
    connections in this process.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Create the tables in a new file, which several processes may do at once.

    The journal is SQLite's default: a write-ahead log needs memory that all its processes share,
    so that machines could not have one registry, and leave to write, so that a reader needed it.
    """
    if db.execute("PRAGMA user_version").fetchone()[0] == 0:
        db.execute("BEGIN IMMEDIATE")
        if db.execute("PRAGMA user_version").fetchone()[0] == 0:
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise WrongInput(
                    f"{path} is a database of something else; set registry.path to another file"
                )
            for table in _TABLES:
                db.execute(table)
            db.execute("INSERT INTO registry VALUES (?)", (uuid.uuid4().hex,))
            db.execute(f"PRAGMA user_version = {SCHEMA}")
        db.execute("COMMIT")
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if found > SCHEMA:
        raise WrongInput(
            f"{path} has schema {found}, newer than this ingot's {SCHEMA}; upgrade ingot"
        )
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA synchronous = EXTRA")  # the deleted journal stays so without power


@contextlib.contextmanager
def _translated_errors(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as Failed (worth a retry) or WrongInput."""
    try:
        yield
    except sqlite3.OperationalError as error:
        code = error.sqlite_errorcode & 0xFF  # the primary code of the extended one
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN) and _is_half_written(path):
            raise Failed(
                f"{path} was left half written by a process that died, and only who may write it"
                f" and {path.parent} can undo that; let them run this command once, then run it"
                " again"
            ) from error
        if code == sqlite3.SQLITE_FULL:
            raise Failed(
                f"disk full while writing {path}; make space and run the same command again"
            ) from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise Failed(
                f"{path} was in use by another process for {WAIT_S:g} s; run the same command again"
            ) from error
        if code == sqlite3.SQLITE_IOERR:
            raise _unread(path, error) from error
        raise WrongInput(
            f"{path} cannot be used as a registry ({error}); check its permissions, or set"
            " registry.path"
        ) from error
    except sqlite3.IntegrityError as error:
        raise Failed(
            f"{path} refused what was written ({error}); run the same command again"
        ) from error
    except sqlite3.DatabaseError as error:
        if _is_whole(path):
            raise _unread(path, error) from error
        raise WrongInput(
            f"{path} is damaged or no registry ({error}); keep a copy of it and put a backup in its"
            " place, or set registry.path"
        ) from error


def _unread(path: Path, error: sqlite3.Error) -> Failed:
    return Failed(
        f"{path} could not be read or written ({error}); run the same command again, and look after"
        " its disk if that does not help"
    )


def _is_whole(path: Path) -> bool:
    """Whether SQLite finds nothing wrong with the file when it reads it once more: it calls one
    damaged of which the disk gave nothing, or something else, a single time.
    """
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=WAIT_S)) as db:
            return bool(db.execute("PRAGMA quick_check").fetchone() == ("ok",))
    except sqlite3.Error:
        return False


def _is_half_written(path: Path) -> bool:
    """Whether the journal of a transaction is there, by which whoever opens the file next undoes
    what its writer did not commit.
    """
    try:
        return path.with_name(f"{path.name}-journal").stat().st_size > 0
    except OSError:
        return False
