"""Files of a run folder that come from its replica when they are needed: whole and as they were
prepared, or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.base.errors import Failed
from ingot.base.remote.bucket import Bucket
from ingot.base.remote.deferred import (
    HIDDEN,
    DeferredFiles,
    UnusableReplica,
    defer_files,
    deferred_files_of,
    forget_deferred,
)
from ingot.base.remote.replica import pull, push
from tests import gcs

URL = "gs://bucket/ingot/runs/one"
COLUMNS = "data/columns"
NAME = "train.tokens-00000.bin"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    with gcs.serving(monkeypatch) as running:
        yield running


@pytest.fixture
def sent(tmp_path: Path, server: gcs.Server) -> Path:
    """A run folder with two parts, pushed."""
    root = tmp_path / "run"
    (root / COLUMNS).mkdir(parents=True)
    for number in range(2):
        (root / COLUMNS / f"train.tokens-0000{number}.bin").write_bytes(bytes([number]) * 5000)
    (root / "recipe.yaml").write_text("name: one")
    push(root, URL)
    return root


@pytest.fixture
def node(tmp_path: Path, sent: Path) -> Path:
    """A run folder that was pulled without the parts."""
    root = tmp_path / "node"
    pull(URL, root, leave=lambda path: path.endswith(".bin"))
    defer_files(root, COLUMNS, URL)
    return root


def those(node: Path) -> DeferredFiles:
    found = deferred_files_of(node / COLUMNS)
    assert found is not None
    return found


def sha256(number: int = 0) -> str:
    return hashlib.sha256(bytes([number]) * 5000).hexdigest()


def test_a_file_comes_when_it_is_asked_for_and_goes_again(node: Path, server: gcs.Server) -> None:
    assert not list((node / COLUMNS).glob("*.bin"))
    files = those(node)
    assert server.counts["media"] == 2  # the index, the recipe
    assert files.bring(NAME, sha256()) is True
    assert (files.folder / NAME).read_bytes() == bytes(5000)
    assert server.counts["media"] == 4
    assert files.bring(NAME, sha256()) is True
    assert files.bring("train.tokens-00001.bin", sha256(1)) is True
    assert server.counts["media"] == 5
    opened = (files.folder / NAME).open("rb")
    files.drop(NAME)
    files.drop(NAME)
    assert not (files.folder / NAME).exists()
    assert opened.read() == bytes(5000)
    opened.close()
    assert files.bring(NAME, sha256()) is True
    forget_deferred(node, COLUMNS)
    assert deferred_files_of(node / COLUMNS) is None
    assert not (node / COLUMNS / HIDDEN).exists()


def test_what_is_left_there_is_never_taken_for_deleted(
    node: Path, sent: Path, server: gcs.Server, tmp_path: Path
) -> None:
    """Whatever comes and goes on a node, its pushes leave the columns in the bucket alone."""
    before = dict(server.objects)
    files = those(node)
    files.bring(NAME, sha256())
    (node / "metrics.jsonl").write_text("1\n")
    push(node, URL)
    files.drop(NAME)
    push(node, URL)
    (node / "metrics.jsonl").write_text("2\n")
    push(node, URL)
    assert not [
        name
        for name in before
        if name.endswith(".bin") and server.objects.get(name) is not before[name]
    ]
    assert pull(URL, tmp_path / "third")
    assert (tmp_path / "third" / COLUMNS / NAME).read_bytes() == bytes(5000)


def test_a_folder_that_once_had_them_and_lost_them_deletes_nothing(
    node: Path, server: gcs.Server
) -> None:
    """An earlier start of this folder fetched all; what is gone since, and left for later now,
    stays in the bucket.
    """
    pull(URL, node)
    for path in (node / COLUMNS).glob("*.bin"):
        path.unlink()
    pull(URL, node, leave=lambda path: path.endswith(".bin"))
    push(node, URL)
    assert f"ingot/runs/one/{COLUMNS}/{NAME}" in server.objects
    assert not list((node / COLUMNS).glob("*.bin"))


def test_what_is_here_is_compared_all_the_same(node: Path) -> None:
    pull(URL, node)
    (node / COLUMNS / NAME).write_bytes(b"changed")
    pull(URL, node, leave=lambda path: path.endswith(".bin"))
    assert (node / COLUMNS / NAME).read_bytes() == bytes(5000)


def test_other_content_than_was_prepared_is_refused(node: Path, sent: Path) -> None:
    files = those(node)
    files.bring("train.tokens-00001.bin", sha256(1))  # so that it knows the index
    (sent / COLUMNS / NAME).write_bytes(b"prepared anew" * 100)
    push(sent, URL)
    with pytest.raises(
        UnusableReplica,
        match=(
            rf"{NAME} cannot be used: it is not what was prepared for this training; prepare and"
            r" launch again"
        ),
    ):
        files.bring(NAME, sha256())
    (sent / COLUMNS / NAME).unlink()
    push(sent, URL)
    with pytest.raises(UnusableReplica, match="cannot be used"):
        those(node).bring(NAME, sha256())
    assert not [
        path
        for path in files.folder.iterdir()
        if path.name.startswith(NAME) and path.suffix != ".lock"
    ]


def test_the_same_content_under_another_object_is_found(
    node: Path, sent: Path, server: gcs.Server
) -> None:
    """A writer has put it elsewhere since the index was read."""
    files = those(node)
    files.bring("train.tokens-00001.bin", sha256(1))
    path = sent / COLUMNS / NAME
    for content in (b"something else", bytes(5000)):
        path.write_bytes(content)
        push(sent, URL)
    assert files.bring(NAME, sha256()) is True
    assert (files.folder / NAME).read_bytes() == bytes(5000)


def test_of_several_only_one_fetches(node: Path, server: gcs.Server) -> None:
    files = [those(node) for _ in range(4)]
    files[0]._index(anew=True)
    for one in files:
        one._entries = files[0]._entries
    server.fault("media", times=1, delay_s=0.3)
    before = server.counts["media"]
    threads = [threading.Thread(target=one.bring, args=(NAME, sha256())) for one in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert server.counts["media"] == before + 1
    assert (files[0].folder / NAME).read_bytes() == bytes(5000)


def test_without_waiting_what_another_one_fetches_is_left_to_it(node: Path) -> None:
    files = those(node)
    descriptor = os.open(files.folder / f"{NAME}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert files.bring(NAME, sha256(), wait=False) is False
    os.close(descriptor)
    assert files.bring(NAME, sha256(), wait=False) is True


def test_a_fetch_that_was_killed_is_done_again(node: Path) -> None:
    files = those(node)
    (files.folder / f"{NAME}.partial").write_bytes(b"half")
    assert files.bring(NAME, sha256()) is True
    assert (files.folder / NAME).read_bytes() == bytes(5000)


def test_half_a_file_does_not_stay(
    node: Path, server: gcs.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of an attempt that failed nor, once the file is of no more use, of one that was
    killed.
    """
    files = those(node)
    files.bring("train.tokens-00001.bin", sha256(1))

    def full(self: Bucket, name: str, path: Path, *, digest: object = None) -> None:
        path.write_bytes(b"half")
        raise Failed("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "get_to_file", full)
        with pytest.raises(Failed, match="the disk is full"):
            files.bring(NAME, sha256())
    half = files.folder / f"{NAME}.partial"
    assert not half.exists()
    half.write_bytes(b"half")
    files.drop(NAME)
    assert not half.exists()
