"""Files out of a bucket: whole and with the content that was asked for, or not at all."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed
from ingot.base.remote.bucket import Blob, Bucket, open_bucket
from ingot.base.remote.index import Index, KeyChooser, content_name
from ingot.base.remote.memory import LocalFile
from ingot.base.remote.service import Missing, given_up
from ingot.base.remote.transfer import OtherContent, fetch_file, in_parallel
from tests import gcs

URL = "gs://bucket/ingot/files"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with gcs.serving(monkeypatch):
        yield open_bucket(URL)


def test_a_file_that_two_fetch_at_once_is_whole(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one has of it is not the other's; and by the process, which stands last in its name, it
    is removed if that is killed.
    """
    blob, together = bucket.put("all.txt", b"all"), threading.Barrier(2)
    get_to_file = Bucket.get_to_file

    def slowly(self: Bucket, name: str, path: Path, **how: Any) -> Any:
        found = get_to_file(self, name, path, **how)
        together.wait(30)
        assert path.name.startswith(".there.txt.partial-")
        assert path.name.endswith(f"-{os.getpid()}")
        return found

    monkeypatch.setattr(Bucket, "get_to_file", slowly)
    content, path = (blob.bytes, blob.crc32c), tmp_path / "new" / "there.txt"
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(lambda _: fetch_file(bucket, "all.txt", path, content=content), range(2)),
        )
    assert path.read_text() == "all"
    assert os.listdir(path.parent) == ["there.txt"]


def test_what_is_there_stays_where_other_content_comes(bucket: Bucket, tmp_path: Path) -> None:
    blob, path = bucket.put("a", b"new"), tmp_path / "a"
    path.write_bytes(b"old")
    for wrong in (
        {"content": (3, "AAAAAA==")},
        {"content": (4, blob.crc32c)},
        {"sha256": hashlib.sha256(b"newer").hexdigest()},
    ):
        with pytest.raises(OtherContent, match="gs://bucket/ingot/files/a "):
            fetch_file(bucket, "a", path, **wrong)  # type: ignore[arg-type]
    with pytest.raises(Missing):
        fetch_file(bucket, "b", path)
    assert {found.name: found.read_bytes() for found in tmp_path.iterdir()} == {"a": b"old"}
    fetch_file(bucket, "a", path, sha256=hashlib.sha256(b"new").hexdigest(), mtime_ns=10**18)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (b"new", 10**18)


def test_several_at_once_keep_their_order_and_the_first_error_ends_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert in_parallel(lambda number: number * number, range(9)) == [n * n for n in range(9)]
    assert in_parallel(str, []) == []
    assert capsys.readouterr().err == ""
    failed, started = threading.Event(), list[int]()

    def act(number: int) -> None:
        started.append(number)
        if number == 1:
            failed.set()
            raise Failed("no")
        failed.wait(30)
        time.sleep(0.005)  # as long as a file takes, so that the error is seen among them

    with pytest.raises(Failed, match="no"):
        in_parallel(act, range(1000), title="push", sizes=[10**6] * 1000)
    assert len(started) < 1000


def test_what_is_under_way_when_nobody_waits_for_it_any_more_ends_too(
    bucket: Bucket, tmp_path: Path
) -> None:
    """Within a download, and before the next request of an upload."""
    bucket.put("large", bytes(1 << 20))
    together, ended = threading.Barrier(3), list[str]()

    class Slow:
        def update(self, data: bytes, /) -> None:
            together.wait(30)
            assert given_up._by is not None
            given_up._by.wait(30)

    def act(name: str) -> None:
        try:
            if name == "download":
                bucket.get_to_file("large", tmp_path / "large", digest=Slow)
            elif name == "upload":
                Slow().update(b"")
                bucket.put("small", b"")
        except Failed as error:
            ended.append(str(error))
            raise
        if name == "stop":
            together.wait(30)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_parallel(act, ["download", "upload", "stop"])
    assert ended == ["the transfer was given up"] * 2
    bucket.put("small", b"")  # by another thread, or later


def test_content_that_is_being_deleted_is_sent_again_under_another_name() -> None:
    """A push that was broken off left it there, the next state named it as garbage, and whoever
    deletes it does not ask who has begun to use it.
    """
    local = LocalFile("a.txt", 3, "AAAAAA==", 0)
    left = Blob("a.txt", 3, "AAAAAA==", 7, 0.0)
    doomed = KeyChooser(Index(garbage={"a.txt": 7}), {"a.txt": left}).choose(local)
    assert doomed == (content_name(local), True)
    written_since = KeyChooser(Index(garbage={"a.txt": 6}), {"a.txt": left}).choose(local)
    assert written_since == ("a.txt", False)
