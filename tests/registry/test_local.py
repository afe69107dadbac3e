from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.base import storage
from ingot.base.errors import Failed, WrongInput
from ingot.base.runfolder import shared_lock
from ingot.registry import database
from ingot.registry.local import MARKER, LocalRegistry
from tests.patience import PATIENCE_S
from tests.registry.models import a_model, a_report

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def registry(tmp_path: Path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry.sqlite")


def add(registry: LocalRegistry, model: str, name: str = "words", value: float = 2.5) -> int:
    """Register a made-up model from a folder that is gone afterwards."""
    folder = a_model(registry.path.parent / f"run-{model}-{os.getpid()}", model)
    number = registry.add(name, folder, a_report(model, value), {"run": "r"}).number
    shutil.rmtree(folder)
    return number


def exported(folder: Path, model: str) -> Path:
    """A model folder with the record of its tensors that an export leaves."""
    made = a_model(folder, model) / "ingot.json"
    content = {"tensors": {"head": "its hash"}}
    made.write_text(json.dumps({**json.loads(made.read_bytes()), "content": content}))
    return folder


def test_an_empty_registry_knows_nothing_and_creates_nothing(registry: LocalRegistry) -> None:
    assert registry.names() == []
    assert registry.versions("words") == []
    assert registry.live("words") is None
    assert registry.history("words") == []
    assert list(registry.path.parent.iterdir()) == []
    with pytest.raises(
        WrongInput,
        match=r"nothing is registered as words .* it knows no name; run `ingot register` first",
    ):
        registry.version("words", 1)


def test_versions_count_up_per_name_and_come_back_whole(registry: LocalRegistry) -> None:
    assert [add(registry, "a"), add(registry, "b"), add(registry, "c", "other")] == [1, 2, 1]
    assert registry.names() == ["other", "words"]
    first, second = registry.versions("words")
    assert (first.number, first.model_hash, first.tokenizer_hash, first.lineage) == (
        1,
        "a",
        "tokenizer",
        {"run": "r"},
    )
    assert second.report == a_report("b")
    assert time.time() - second.created < 60
    assert second.folder == registry.path.parent / "registry" / "words" / "v2"
    assert (second.folder / "model.safetensors").read_bytes() == b"weights of b"
    with pytest.raises(WrongInput, match=r"words has no version 3 .* it has 1, 2"):
        registry.version("words", 3)


def test_a_version_can_be_registered_under_another_name(registry: LocalRegistry) -> None:
    """Its folder has a marker, which is none of the model's files."""
    add(registry, "a")
    first = registry.version("words", 1)
    registry.check(registry.add("other", first.folder, first.report, {}), checksums=True)


def test_the_same_model_again_makes_no_new_version_but_takes_its_new_report(
    registry: LocalRegistry,
) -> None:
    assert add(registry, "a") == add(registry, "a") == 1
    assert add(registry, "a", value=2.25) == 1
    assert registry.version("words", 1).report == a_report("a", 2.25)
    assert sorted(path.name for path in (registry.home / "words").iterdir()) == ["v1"]


def test_weights_are_shared_not_copied_and_an_export_cannot_change_a_version(
    registry: LocalRegistry, tmp_path: Path
) -> None:
    folder = exported(tmp_path / "model", "a")
    version = registry.add("words", folder, a_report("a"), {})
    assert (version.folder / "model.safetensors").samefile(folder / "model.safetensors")
    assert not (version.folder / "config.json").samefile(folder / "config.json")
    shutil.rmtree(folder)
    (a_model(folder, "b") / "config.json").write_text("{}")
    registry.check(version, checksums=True)
    assert (version.folder / "model.safetensors").read_bytes() == b"weights of a"


def test_what_another_tool_writes_into_its_weights_does_not_reach_a_version(
    registry: LocalRegistry, tmp_path: Path
) -> None:
    folder = a_model(tmp_path / "trainer_output", "a")
    (folder / "ingot.json").unlink()
    version = registry.add("words", folder, a_report("a"), {})
    (folder / "model.safetensors").write_bytes(b"weights of b")
    registry.check(version, checksums=True)
    assert (version.folder / "model.safetensors").read_bytes() == b"weights of a"


def test_links_as_in_the_hubs_cache_are_followed(registry: LocalRegistry, tmp_path: Path) -> None:
    blobs = a_model(tmp_path / "blobs", "a")
    (tmp_path / "snapshot").mkdir()
    for path in blobs.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    version = registry.add("words", tmp_path / "snapshot", a_report("a"), {})
    assert not any(path.is_symlink() for path in version.folder.iterdir())
    registry.check(version, checksums=True)


def test_a_missing_and_a_changed_file_of_a_version_are_named(registry: LocalRegistry) -> None:
    add(registry, "a")
    version = registry.version("words", 1)
    registry.check(version)
    (version.folder / "model.safetensors").write_bytes(b"weights of X")
    registry.check(version)
    with pytest.raises(
        WrongInput, match=r"words v1 is damaged: .*model\.safetensors does not match its checksum"
    ):
        registry.check(version, checksums=True)
    (version.folder / "model.safetensors").unlink()
    with pytest.raises(
        WrongInput, match=r"words v1 is damaged: .*model\.safetensors is missing; register it again"
    ):
        registry.check(version)
    shutil.rmtree(version.folder)
    with pytest.raises(WrongInput, match=rf"v1 has no {MARKER}"):
        registry.check(version)


def _damage(path: Path, data: bytes | None) -> None:
    """Put other bytes, or nothing, in the place of a file; those that share its bytes keep them."""
    path.unlink()
    if data is not None:
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("model.safetensors", b"wei"),
        ("model.safetensors", b"weights of X"),
        ("config.json", None),
        (MARKER, b"{"),
        (MARKER, None),
    ],
)
def test_a_damaged_version_is_mended_by_registering_it_again(
    registry: LocalRegistry, tmp_path: Path, name: str, data: bytes | None
) -> None:
    folder = a_model(tmp_path / "model", "a")
    version = registry.add("words", folder, a_report("a"), {})
    registry.point("words", 1, "first")
    _damage(version.folder / name, data)
    with pytest.raises(WrongInput, match="words v1 is damaged"):
        registry.check(version, checksums=True)
    assert registry.add("words", folder, a_report("a"), {}) == version
    registry.check(version, checksums=True)
    assert (version.folder / "model.safetensors").read_bytes() == b"weights of a"
    assert registry.live("words") == version
    assert len(registry.versions("words")) == len(registry.history("words")) == 1
    assert [path.name for path in (registry.home / "words").iterdir()] == ["v1"]


def test_a_whole_version_is_left_alone(registry: LocalRegistry, tmp_path: Path) -> None:
    folder = a_model(tmp_path / "model", "a")
    before = registry.add("words", folder, a_report("a"), {}).folder.stat().st_ino
    assert registry.add("words", folder, a_report("a"), {}).folder.stat().st_ino == before


def test_a_version_is_not_mended_from_what_is_damaged_itself(
    registry: LocalRegistry, tmp_path: Path
) -> None:
    """Weights lie on the disk once for the run and the registry."""
    folder = exported(tmp_path / "model", "a")
    version = registry.add("words", folder, a_report("a"), {})
    os.truncate(version.folder / "model.safetensors", 3)
    with pytest.raises(
        WrongInput,
        match=(
            r"model/model\.safetensors is damaged, and words v1 with it; remove .*model and run"
            r" `ingot train` again"
        ),
    ):
        registry.add("words", folder, a_report("a"), {})
    with pytest.raises(WrongInput, match="words v1 is damaged"):
        registry.add("words", version.folder, a_report("a"), {})
    with pytest.raises(WrongInput, match="words v1 is damaged"):
        registry.check(version)
    shutil.rmtree(folder)
    registry.add("words", a_model(folder, "a"), a_report("a"), {})
    registry.check(version, checksums=True)


def test_a_version_that_is_mended_is_never_missing(
    registry: LocalRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed right before the new files take the place of the old ones, these still lie there."""
    folder = a_model(tmp_path / "model", "a")
    version = registry.add("words", folder, a_report("a"), {})
    _damage(version.folder / "model.safetensors", b"wei")
    with monkeypatch.context() as patched:
        patched.setattr(
            storage, "_exchange", lambda one, other: os.kill(os.getpid(), signal.SIGKILL)
        )
        killed = FORK.Process(target=registry.add, args=("words", folder, a_report("a"), {}))
        killed.start()
        killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    assert (version.folder / "model.safetensors").read_bytes() == b"wei"
    registry.add("words", folder, a_report("a"), {})
    registry.check(version, checksums=True)
    assert [path.name for path in (registry.home / "words").iterdir()] == ["v1"]


def test_the_live_pointer_moves_and_rolls_back_further_each_time(registry: LocalRegistry) -> None:
    for model in "abc":
        registry.point("words", add(registry, model), f"deploy {model}")
    live = registry.live("words")
    assert live is not None
    assert live.number == 3
    registry.point("words", 3, "again")  # changes nothing, so that a rollback still goes to 2
    assert [registry.rollback("words", "bad").number for _ in range(2)] == [2, 1]
    with pytest.raises(
        WrongInput,
        match=(
            "nothing was live before words v1; `ingot deploy words --version 3"
            f" registry.path={registry.path}` takes another one"
        ),
    ):
        registry.rollback("words", "bad")
    registry.point("words", 3, "better after all")
    assert registry.rollback("words", "no").number == 1
    assert [(turn.version, turn.reason) for turn in registry.history("words")] == [
        (1, "deploy a"),
        (2, "deploy b"),
        (3, "deploy c"),
        (2, "bad"),
        (1, "bad"),
        (3, "better after all"),
        (1, "no"),
    ]


def test_the_pointer_moves_only_from_where_it_was_seen(registry: LocalRegistry) -> None:
    for model in "abc":
        add(registry, model)
    registry.point("words", 1, "first", instead_of=None)
    with pytest.raises(
        WrongInput,
        match=(
            "words v1 went live since the gate compared the new model with nothing; run `ingot"
            " gate` again"
        ),
    ):
        registry.point("words", 2, "stale", instead_of=None)
    registry.point("words", 2, "seen", instead_of=1)
    with pytest.raises(
        WrongInput, match="words v2 went live since the gate compared the new model with words v1"
    ):
        registry.point("words", 3, "stale", instead_of=1)
    with pytest.raises(WrongInput, match="words has no version 9"):
        registry.point("words", 9, "no such")
    assert [turn.version for turn in registry.history("words")] == [1, 2]


def test_nothing_live_cannot_be_rolled_back(registry: LocalRegistry) -> None:
    add(registry, "a")
    with pytest.raises(
        WrongInput,
        match=r"nothing is live as words .* `ingot deploy words --version 1 registry\.path=\S+` makes",
    ):
        registry.rollback("words", "x")
    with pytest.raises(WrongInput, match=r"nothing is registered as other in .*; it knows words"):
        registry.rollback("other", "x")
    registry.point("words", 1, "first")
    with pytest.raises(WrongInput, match=r"nothing was live before words v1; it has no other"):
        registry.rollback("words", "x")


@pytest.mark.drawn("a registry, disturbed")
@settings(max_examples=40, deadline=None)
@given(moves=st.lists(st.integers(1, 3) | st.none(), max_size=12))
def test_rollback_is_a_stack_whatever_happened(moves: list[int | None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        registry = LocalRegistry(Path(folder, "r.sqlite"))
        for model in "abc":
            add(registry, model)
        stack: list[int] = []
        for move in moves:
            if move is not None:
                registry.point("words", move, "")
                stack += [move] if stack[-1:] != [move] else []
            elif len(stack) > 1:
                stack.pop()
                assert registry.rollback("words", "").number == stack[-1]
            else:
                with pytest.raises(WrongInput):
                    registry.rollback("words", "")
            live = registry.live("words")
            assert (live.number if live else None) == (stack[-1] if stack else None)


def _register_many(path: Path, writer: int, start: Any, count: int) -> None:
    registry = LocalRegistry(path)
    start.wait()
    for number in range(count):
        # Every second model is one that the other writer registers too.
        model = f"shared-{number}" if number % 2 else f"writer-{writer}-{number}"
        registry.point("words", add(registry, model), model)


@pytest.mark.drawn("a registry, disturbed")
def test_two_processes_that_register_at_once_lose_nothing_and_count_without_gaps(
    registry: LocalRegistry,
) -> None:
    count = 40
    start = FORK.Barrier(2)
    writers = [
        FORK.Process(target=_register_many, args=(registry.path, writer, start, count))
        for writer in range(2)
    ]
    for process in writers:
        process.start()
    for process in writers:
        process.join(timeout=PATIENCE_S)
        assert process.exitcode == 0
    versions = registry.versions("words")
    assert [version.number for version in versions] == list(range(1, count + count // 2 + 1))
    assert len({version.model_hash for version in versions}) == len(versions)
    for version in versions:
        registry.check(version, checksums=True)
        assert (
            version.folder / "model.safetensors"
        ).read_text() == f"weights of {version.model_hash}"
    assert sorted(path.name for path in (registry.home / "words").iterdir()) == sorted(
        f"v{version.number}" for version in versions
    )
    live = registry.live("words")
    assert live is not None
    assert live.number == registry.history("words")[-1].version


DIE = """
import os, signal, sys
from pathlib import Path
from ingot.registry import local
from tests.registry.models import a_report
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "before":
    local.os.replace = die
else:
    local.LocalRegistry._insert = die
local.LocalRegistry(Path(sys.argv[1])).add("words", Path(sys.argv[2]), a_report("b"), {})
"""


@pytest.mark.drawn("a registry, disturbed")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_between_copy_and_insert_leaves_nothing_registered_and_the_next_register_is_right(
    registry: LocalRegistry, tmp_path: Path, when: str
) -> None:
    """Killed before or after the copy got its final name."""
    add(registry, "a")
    folder = a_model(tmp_path / "model", "b")
    killed = subprocess.run(
        [sys.executable, "-c", DIE, str(registry.path), str(folder), when], check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    assert (registry.home / "words" / "v2").exists() == (when == "after")
    assert [version.number for version in registry.versions("words")] == [1]
    assert add(registry, "c") == 2
    assert (
        registry.version("words", 2).folder / "model.safetensors"
    ).read_bytes() == b"weights of c"
    assert registry.add("words", folder, a_report("b"), {}).number == 3
    for version in registry.versions("words"):
        registry.check(version, checksums=True)


def test_what_a_killed_writer_left_is_removed_when_nobody_else_writes(
    registry: LocalRegistry,
) -> None:
    add(registry, "a")
    left = [registry.home / "words" / name for name in (".incoming-b", "..incoming-c.partial-1")]
    for folder in left:
        folder.mkdir()
    with shared_lock(registry.home, "words.writers", lambda: None):
        add(registry, "b")
        assert all(folder.exists() for folder in left), "they may be another writer's"
    add(registry, "c")
    assert not any(folder.exists() for folder in left)


def test_a_folder_of_a_lost_registry_is_never_overwritten(registry: LocalRegistry) -> None:
    add(registry, "a")
    for path in registry.path.parent.glob("registry.sqlite*"):
        path.unlink()
    with pytest.raises(
        WrongInput, match=r"v1 exists and does not belong to .*registry\.sqlite; move it away"
    ):
        add(registry, "b")
    assert (registry.home / "words" / "v1" / "model.safetensors").read_bytes() == b"weights of a"
    assert registry.versions("words") == []


def test_a_moved_registry_still_finds_its_models(registry: LocalRegistry, tmp_path: Path) -> None:
    add(registry, "a")
    (tmp_path / "elsewhere").mkdir()
    for path in [*tmp_path.glob("registry*")]:
        path.rename(tmp_path / "elsewhere" / path.name)
    moved = LocalRegistry(tmp_path / "elsewhere" / "registry.sqlite")
    moved.check(moved.version("words", 1), checksums=True)
    assert LocalRegistry(tmp_path / "models").home == tmp_path / "models-versions"


def test_readers_do_not_wait_for_what_a_writer_has_not_committed(registry: LocalRegistry) -> None:
    add(registry, "a")
    with database.open_database(registry.path, writing=True) as db:
        db.execute("UPDATE versions SET created = 0")
        assert registry.version("words", 1).created > 0
    assert registry.version("words", 1).created == 0


def test_it_can_be_read_by_whoever_may_not_write(registry: LocalRegistry) -> None:
    add(registry, "a")
    registry.point("words", 1, "the first")

    def read(shared: Path) -> None:
        if os.getuid() == 0:
            os.setuid(65534)  # nobody; root may write anywhere
        assert not os.access(shared, os.W_OK)
        version = LocalRegistry(shared / registry.path.name).live("words")
        assert version is not None
        assert version.number == 1

    with tempfile.TemporaryDirectory() as folder:  # what pytest makes, only its owner may enter
        shared = Path(folder)
        shutil.copy(registry.path, shared)
        shared.chmod(0o555)
        reader = FORK.Process(target=read, args=(shared,))
        reader.start()
        reader.join()
        shared.chmod(0o755)
        assert reader.exitcode == 0
        assert [path.name for path in shared.iterdir()] == [registry.path.name]


def test_a_group_may_share_it_where_the_umask_says_so(registry: LocalRegistry) -> None:
    before = os.umask(0o002)
    try:
        with database.open_database(registry.path, writing=True) as db:
            db.execute("UPDATE registry SET id = 'another'")
            journal = registry.path.with_name(f"{registry.path.name}-journal")
            modes = [path.stat().st_mode & 0o777 for path in (registry.path, journal)]
    finally:
        os.umask(before)
    assert modes == [0o664, 0o664]


def test_what_a_dead_writer_left_half_done_is_told_to_whoever_may_not_undo_it(
    registry: LocalRegistry,
) -> None:
    add(registry, "a")

    def die(path: Path) -> None:
        with database.open_database(path, writing=True) as db:
            db.execute("PRAGMA cache_size = 1")  # so that pages go to the file before the end
            db.execute("UPDATE versions SET report = ?", ("x" * 200_000,))
            os.kill(os.getpid(), signal.SIGKILL)

    def read(path: Path) -> None:
        if os.getuid() == 0:
            os.setuid(65534)  # nobody; root may write anywhere
        with pytest.raises(Failed, match=r"half written by a process that died, .* let them run"):
            LocalRegistry(path).versions("words")

    with tempfile.TemporaryDirectory() as folder:  # what pytest makes, only its owner may enter
        path = Path(folder, registry.path.name)
        shutil.copy(registry.path, path)
        for work, code in ((die, -signal.SIGKILL), (read, 0)):
            process = FORK.Process(target=work, args=(path,))
            process.start()
            process.join()
            assert process.exitcode == code
            path.parent.chmod(0o555)
        path.parent.chmod(0o755)
        assert [one.number for one in LocalRegistry(path).versions("words")] == [1]


def test_an_error_inside_a_transaction_changes_nothing(registry: LocalRegistry) -> None:
    add(registry, "a")
    with pytest.raises(KeyError), database.open_database(registry.path, writing=True) as db:
        raise KeyError(db.execute("DELETE FROM versions").rowcount)
    assert len(registry.versions("words")) == 1


def test_a_file_that_is_no_registry_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("not a database at all, but long enough to look at" * 10)
    with pytest.raises(
        WrongInput, match=r"text\.sqlite is damaged or no registry .* set registry\.path"
    ):
        LocalRegistry(tmp_path / "text.sqlite").names()
    with sqlite3.connect(tmp_path / "other.sqlite") as db:
        db.execute("CREATE TABLE things (a)")
    with pytest.raises(WrongInput, match=r"other\.sqlite is a database of something else"):
        add(LocalRegistry(tmp_path / "other.sqlite"), "a")
    (tmp_path / "folder.sqlite").mkdir()
    with pytest.raises(WrongInput, match=r"folder\.sqlite cannot be used as a registry"):
        LocalRegistry(tmp_path / "folder.sqlite").names()
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(WrongInput, match="in the way"),
        database.open_database(tmp_path / "file" / "r.sqlite", writing=True),
    ):
        pass


def test_a_registry_that_could_not_be_read_is_not_called_damaged(registry: LocalRegistry) -> None:
    """The disk gives zeros once, or an error: whoever moved the file away would lose what is live."""
    add(registry, "a")
    whole = registry.path.read_bytes()

    def reading(after: bytes) -> None:
        with database.open_database(registry.path) as db:
            registry.path.write_bytes(whole[:100] + bytes(len(whole) - 100))
            try:
                db.execute("SELECT * FROM versions").fetchall()
            finally:
                registry.path.write_bytes(after)

    with pytest.raises(Failed, match=r"could not be read or written .*malformed.*again"):
        reading(whole)
    with pytest.raises(WrongInput, match=r"is damaged or no registry .* put a backup in its place"):
        reading(whole[:4096] + bytes(len(whole) - 4096))
    registry.path.write_bytes(whole)
    failed = sqlite3.OperationalError("disk I/O error")
    failed.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
    with (
        pytest.raises(Failed, match=r"could not be read or written \(disk I/O error\)"),
        database.open_database(registry.path),
    ):
        raise failed
    assert len(registry.versions("words")) == 1


def test_a_newer_registry_is_refused_in_words(registry: LocalRegistry) -> None:
    add(registry, "a")
    with sqlite3.connect(registry.path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(WrongInput, match=r"schema 99, newer than .* upgrade ingot"):
        registry.names()


def test_a_writer_that_holds_the_file_is_waited_for_and_then_named(
    registry: LocalRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(registry, "a")
    monkeypatch.setattr(database, "WAIT_S", 0.2)
    with (
        database.open_database(registry.path, writing=True),
        pytest.raises(Failed, match=r"was in use by another process for 0\.2 s"),
    ):
        add(registry, "b")


def test_a_full_disk_is_named_and_nothing_is_registered(registry: LocalRegistry) -> None:
    add(registry, "a")
    with database.open_database(registry.path) as db:
        pages = db.execute("PRAGMA page_count").fetchone()[0]

    def fill(db: sqlite3.Connection) -> None:
        db.execute(f"PRAGMA max_page_count = {pages}")
        db.execute("UPDATE versions SET report = ?", ("x" * 1_000_000,))

    with (
        pytest.raises(Failed, match=r"disk full while writing .*registry"),
        database.open_database(registry.path, writing=True) as db,
    ):
        fill(db)
    assert len(registry.versions("words")) == 1
