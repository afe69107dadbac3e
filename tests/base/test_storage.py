from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest

from ingot.base import storage
from ingot.base.errors import Failed, WrongInput
from ingot.base.listing import find_files, is_hidden
from ingot.base.processes import process_scope
from ingot.base.runfolder import folder_lock
from ingot.base.runlog import append_line
from ingot.base.storage import (
    atomic_file,
    atomic_folder,
    disk_errors,
    is_remote,
    open_read,
    remove_partials_of,
    sha256_file,
    stamp,
    write_atomic,
)
from tests.nobody import as_nobody, open_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail_after(written: int) -> None:
    raise KeyError(written)


def test_a_written_file_holds_what_was_written_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "file.txt"
    write_atomic(target, "Größe")
    assert target.read_bytes() == "Größe".encode()
    write_atomic(target, b"second")
    assert target.read_bytes() == b"second"
    assert names(target.parent) == ["file.txt"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed and renamed, in order."""
    seen: list[str] = []
    flush, replace, exchange = os.fsync, os.replace, storage._exchange

    def flushed(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append(f"flush {'folder' if path.is_dir() else 'file'}")
        flush(descriptor)

    def replaced(source: Path, target: Path) -> None:
        seen.append("rename")
        replace(source, target)

    def exchanged(one: Path, other: Path) -> bool:
        done = exchange(one, other)
        seen.append("exchange" if done else "not here")
        return done

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(storage, "_exchange", exchanged)
    return seen


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, calls: list[str]) -> None:
    target = tmp_path / "file.txt"
    target.write_text("old")
    with target.open() as reader:
        write_atomic(target, "new")
        assert reader.read() == "old", "what is being read is not written over"
    assert calls == ["flush file", "rename", "flush folder"]


def test_the_folders_that_are_made_for_a_file_are_there_to_stay(
    tmp_path: Path, calls: list[str]
) -> None:
    write_atomic(tmp_path / "runs" / "small" / "file.txt", "new")
    assert calls == ["flush folder"] * 2 + ["flush file", "rename", "flush folder"]
    with folder_lock(tmp_path / "others" / "small"):
        assert calls[5:] == ["flush folder"] * 2


def test_a_folder_that_is_replaced_is_never_missing(tmp_path: Path, calls: list[str]) -> None:
    for _ in range(2):
        with atomic_folder(tmp_path / "model") as partial:
            (partial / "a").write_text("1")
    if "not here" in calls:
        pytest.skip("this disk cannot exchange two folders")
    made = ["flush file", "flush folder"]
    assert calls == [*made, "rename", "flush folder", *made, "exchange", "flush folder"]


def test_an_error_while_writing_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    write_atomic(target, "old")
    with pytest.raises(KeyError), atomic_file(target) as stream:
        fail_after(stream.write(b"half"))
    assert target.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


def test_a_folder_appears_all_at_once_and_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_folder(target) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "a").write_text("1")
        assert not target.exists()
    assert (target / "inner" / "a").read_text() == "1"
    with pytest.raises(KeyError), atomic_folder(target) as partial:
        fail_after((partial / "b").write_text("half"))
    assert names(target) == ["inner"]
    with atomic_folder(target) as partial:
        (partial / "b").write_text("2")
    assert names(target) == ["b"]
    assert names(tmp_path) == ["model"]


KILLED_WRITER = """
import os, sys, time
from ingot.base.storage import atomic_folder
with atomic_folder(sys.argv[1]) as partial:
    (partial / "weights").write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_writer_left_is_removed_by_the_next_and_never_taken_for_complete(
    tmp_path: Path,
) -> None:
    target = tmp_path / "model"
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED_WRITER, str(target)], stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"writing\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert not target.exists()
    assert names(tmp_path) == [f".model.partial-{process_scope()}-{writer.pid}"]
    alive = f".model.partial-{process_scope()}-{os.getppid()}"
    (tmp_path / alive).mkdir()  # one that lives is left alone
    with atomic_folder(target) as partial:
        (partial / "weights").write_bytes(b"whole")
    assert names(tmp_path) == [alive, "model"]


ELSEWHERE = """
import os, sys
from ingot.base import storage
storage.process_scope = lambda: "0badc0de"
os.getpid = lambda: int(sys.argv[3])
with getattr(storage, sys.argv[1])(sys.argv[2]) as partial:
    print("writing", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["atomic_file", "atomic_folder"])
def test_what_a_process_of_another_container_writes_is_left_alone_while_it_lives(
    kind: str, tmp_path: Path
) -> None:
    """Its id is that of a process of ours, or of none; only one that is dead has left anything."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    for process in (os.getpid(), ended.pid):
        target = tmp_path / str(process) / "model"
        target.parent.mkdir()
        writer = subprocess.Popen(
            [sys.executable, "-c", ELSEWHERE, kind, str(target), str(process)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        theirs = f".model.partial-0badc0de-{process}"

        def write(target: Path = target) -> list[str]:
            with getattr(storage, kind)(target):
                remove_partials_of(target)
            return names(target.parent)

        assert write() == [theirs, "model"]
        writer.kill()
        writer.communicate()
        assert write() == ["model"]


def test_an_unwritable_place_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WrongInput, match=r"file.* in the way"):
        write_atomic(tmp_path / "file" / "inner.txt", "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(WrongInput, match=r"/folder is in the way"):
        write_atomic(tmp_path / "folder", "x")


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (errno.ENOSPC, Failed, "disk full while writing /x/y; make space"),
        (errno.EDQUOT, Failed, "disk full"),
        (errno.EFBIG, Failed, "no file may grow so large while writing /x/y; lift the limit"),
        (errno.EROFS, WrongInput, "choose another place, for a run by `output`"),
        (errno.EACCES, WrongInput, "^/x/y cannot be written .*; make it writable for this user"),
        (errno.EIO, OSError, "Input/output"),
    ],
)
def test_refusals_of_the_operating_system_become_one_line(
    code: int, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words), disk_errors("/x/y"):
        raise OSError(code, os.strerror(code))


def test_what_may_not_be_written_is_named_and_not_the_folder_that_it_is_in() -> None:
    def write(root: Path) -> None:
        with pytest.raises(WrongInput, match=r"/run/\.lock cannot be written"):
            folder_lock(root / "run").__enter__()
        with pytest.raises(WrongInput, match=r"/run/kept/x cannot be written"):
            write_atomic(root / "run" / "kept" / "x", "x")

    with open_folder() as root:
        (root / "run" / "kept").mkdir(parents=True)
        (root / "run" / ".lock").touch(0o444)
        (root / "run" / "kept").chmod(0o555)
        as_nobody(write, root)
        (root / "run" / "kept").chmod(0o755)


def test_a_folder_is_made_where_one_may_write_and_not_look() -> None:
    with open_folder() as root:
        (root / "drop").mkdir()
        (root / "drop").chmod(0o1733 if os.getuid() == 0 else 0o333)
        as_nobody(lambda: write_atomic(root / "drop" / "run" / "x", "x"))
        (root / "drop").chmod(0o755)
        assert (root / "drop" / "run" / "x").read_text() == "x"


def test_what_another_user_writes_in_another_container_is_left_alone() -> None:
    with open_folder() as root:
        root.chmod(0o777)
        theirs = root / ".x.partial-0badc0de-1"
        theirs.touch(0o600)
        as_nobody(lambda: remove_partials_of(root / "x"))
        assert theirs.exists() == (os.getuid() == 0)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux has such a file system")
def test_where_nothing_can_be_made_it_is_the_asked_for_name_that_is_told() -> None:
    for write in (
        lambda: write_atomic("/proc/x.yaml", "x"),
        lambda: atomic_folder("/proc/x.yaml").__enter__(),
    ):
        with pytest.raises(WrongInput, match=r"^/proc/x\.yaml cannot be made there"):
            write()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_disk_without_locks_is_told_with_what_to_mount(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre without `flock`, NFS without a lock daemon."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    with (
        pytest.raises(WrongInput, match=r"/\.lock cannot be locked .* the option `flock`"),
        folder_lock(tmp_path),
    ):
        pass
    with pytest.raises(WrongInput, match=r"/lines cannot be locked"):
        append_line(tmp_path / "lines", {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_disk_that_is_really_full() -> None:
    with (
        pytest.raises(Failed, match="disk full"),
        disk_errors("/dev/full"),
        Path("/dev/full").open("wb", buffering=0) as stream,
    ):
        stream.write(b"x")


def test_files_are_found_by_path_folder_and_glob(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert find_files(str(tmp_path / "a.txt")) == [str(tmp_path / "a.txt")]
    assert find_files(f"file://{tmp_path}/a.txt") == find_files(str(tmp_path / "a.txt"))
    assert find_files(str(tmp_path / "*.txt")) == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert find_files(str(tmp_path)) == [
        str(tmp_path / name) for name in ("a.txt", "b.txt", "deep/er/c.txt")
    ]
    assert find_files(str(tmp_path / "**" / "*.txt")) == find_files(str(tmp_path))
    for pattern in ("*", "**", "**/*"):  # the last two match files and each folder above them
        assert find_files(str(tmp_path / pattern)) == find_files(str(tmp_path))
    assert find_files(str(tmp_path / "none*")) == []
    assert find_files(str(tmp_path / "none")) == []
    for folder in ("run1", "run[1]"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x").touch()
    for pattern in ("run[1]", "run[1]/*", "run[1]/[x]"):
        assert find_files(str(tmp_path / pattern)) == [str(tmp_path / "run[1]" / "x")]


@pytest.mark.parametrize("root", ["data", "./data", "/home/me/.cache/data", "gs://bucket/.data"])
def test_hidden_is_what_a_pattern_does_not_spell_out(root: str) -> None:
    for name in (".DS_Store", ".git/config", "deep/.ipynb_checkpoints/a.txt"):
        for pattern in (root, f"{root}/", f"{root}/**", f"{root}/*/*"):
            assert is_hidden(f"{root}/{name}", pattern)
        assert not is_hidden(f"{root}/{name}", f"{root}/{name}")
    assert not is_hidden(f"{root}/.git/config", f"{root}/.git")
    assert not is_hidden(f"{root}/.run[1]/x", f"{root}/.run[1]")
    assert not is_hidden(f"{root}/deep/a.b", f"{root}/**")


def test_object_storage_goes_through_the_same_calls() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/er/d.txt"):
        memory.pipe(f"/stored/{name}", name.encode())
    assert find_files("memory://stored/*.txt") == [
        "memory:///stored/a.txt",
        "memory:///stored/b.txt",
    ]
    assert len(find_files("memory://stored")) == 4
    for pattern in ("*", "**", "**/*"):
        assert find_files(f"memory://stored/{pattern}") == find_files("memory://stored")
    for name in ("run1/x", "run[1]/x"):
        memory.pipe(f"/literal/{name}", b"")
    for pattern in ("run[1]", "run[1]/*"):
        assert find_files(f"memory://literal/{pattern}") == ["memory:///literal/run[1]/x"]
    with open_read("memory://stored/a.txt") as stream:
        assert stream.read() == b"a.txt"
    assert sha256_file("memory://stored/a.txt") == hashlib.sha256(b"a.txt").hexdigest()
    assert stamp("memory://stored/a.txt")["bytes"] == 5
    assert is_remote("gs://bucket/x")
    assert not is_remote("file:///x")
    assert not is_remote("/x/y")


def test_a_changed_file_has_another_stamp(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    before = stamp(str(path))
    assert stamp(str(path)) == before
    time.sleep(0.01)
    path.write_text("two")
    assert stamp(str(path)) != before


def test_the_checksum_reads_more_than_one_chunk(tmp_path: Path) -> None:
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "big").write_bytes(data)
    assert sha256_file(tmp_path / "big") == hashlib.sha256(data).hexdigest()
