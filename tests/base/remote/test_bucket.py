"""Google's own client against a bucket of the tests that fails, delays and returns half: what
arrives is whole, or it is told.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.remote import bucket as bucket_module
from ingot.base.remote import service as upload
from ingot.base.remote.bucket import Bucket, open_bucket
from ingot.base.remote.service import EMULATOR, Conflict, Corrupt, Missing, google_packages
from ingot.base.remote.transfer import fetch_file
from tests.gcs import KEPT_BYTES, Fault, Server, crc32c, serving
from tests.patience import PATIENCE_S

CHUNK = 2 * KEPT_BYTES


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(upload, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(bucket_module, "WHOLE_BYTES", CHUNK)
    with serving(monkeypatch) as running:
        yield running


@pytest.fixture
def bucket(server: Server) -> Bucket:
    return open_bucket("gs://bucket/runs/one", patience_s=60)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Three chunks and a half."""
    path = tmp_path / "large"
    path.write_bytes(os.urandom(3 * CHUNK + CHUNK // 2 + 17))
    return path


def test_what_is_put_comes_back(
    server: Server, bucket: Bucket, large: Path, tmp_path: Path
) -> None:
    small, digest = bucket.put("a/small", b"some bytes"), hashlib.sha256()
    assert bucket.put("a/large", large).bytes == large.stat().st_size
    assert bucket.put("empty", b"").bytes == 0
    assert bucket.get("a/small") == b"some bytes"
    assert bucket.get("empty") == b""
    assert bucket.get_to_file("a/large", tmp_path / "back", digest=lambda: digest).crc32c == crc32c(
        large.read_bytes()
    )
    assert (tmp_path / "back").read_bytes() == large.read_bytes()
    assert digest.hexdigest() == hashlib.sha256(large.read_bytes()).hexdigest()
    assert bucket.stat("a/small") == small
    assert bucket.stat("a") is None
    assert abs(small.updated - time.time()) < 60
    assert sorted(server.objects) == ["runs/one/a/large", "runs/one/a/small", "runs/one/empty"]
    assert server.counts["chunk"] == 4
    assert server.counts["insert"] == 2


@pytest.mark.parametrize("page", [1, 2, 1000])
def test_lists_and_folders_of_many_pages(page: int, server: Server, bucket: Bucket) -> None:
    for name in ("a/1", "a/2", "a-b/1", "b/deep/1", "c"):
        bucket.put(name, name.encode())
    server.page = page
    assert [(blob.name, blob.bytes) for blob in bucket.list()] == [
        ("a-b/1", 5),
        ("a/1", 3),
        ("a/2", 3),
        ("b/deep/1", 8),
        ("c", 1),
    ]
    assert [blob.name for blob in bucket.list("a/")] == ["a/1", "a/2"]
    assert bucket.folders() == ["a", "a-b", "b"]
    bucket.delete("a/1")
    bucket.delete("a/1")
    assert [blob.name for blob in bucket.list("a/")] == ["a/2"]
    assert open_bucket("gs://bucket").folders() == ["runs"]


def test_conditions_hold(server: Server, bucket: Bucket) -> None:
    first = bucket.put("x", b"one", generation=0)
    with pytest.raises(Conflict, match=r"gs://bucket/runs/one/x was written by somebody else"):
        bucket.put("x", b"two", generation=0)
    second = bucket.put("x", b"two", generation=first.generation)
    assert second.generation > first.generation
    with pytest.raises(Conflict) as caught:
        bucket.put("x", b"three", generation=first.generation)
    assert caught.value.service_s is not None
    assert abs(caught.value.service_s - server.now()) < 2
    with pytest.raises(Conflict):
        bucket.delete("x", generation=first.generation)
    assert bucket.get("x") == b"two"
    bucket.delete("x", generation=second.generation)
    bucket.delete("x", generation=second.generation)
    assert bucket.stat("x") is None


def test_a_condition_is_asked_of_a_large_file_too(
    server: Server, bucket: Bucket, large: Path
) -> None:
    bucket.put("x", b"other")
    with pytest.raises(Conflict):
        bucket.put("x", large, generation=0)
    assert bucket.get("x") == b"other"
    assert server.counts["chunk"] == 0, "nothing of it is sent"


@pytest.mark.parametrize("kind", ["insert", "start", "chunk", "stat", "media", "list", "delete"])
def test_a_service_that_fails_for_a_while(
    kind: str, server: Server, bucket: Bucket, large: Path, tmp_path: Path
) -> None:
    for code in (408, 429, 500, 502, 503, 504):
        server.fault(kind, code=code)
    bucket.put("small", b"small", generation=0)
    bucket.put("large", large, generation=0)
    bucket.get_to_file("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == large.read_bytes()
    assert [blob.name for blob in bucket.list()] == ["large", "small"]
    bucket.delete("small")
    assert list(server.objects) == ["runs/one/large"]
    assert not any(server.faults.values()), "the fault happened"


@pytest.mark.parametrize("kind", ["insert", "chunk"])
def test_a_lost_answer_to_a_conditional_put_is_no_conflict(
    kind: str, server: Server, bucket: Bucket, large: Path
) -> None:
    """The repeated request meets the object that the first one made."""
    for _ in range(4 if kind == "chunk" else 1):
        server.fault(kind, code=503, lose=True)
    content = large if kind == "chunk" else b"small"
    blob = bucket.put("x", content, generation=0)
    assert server.written == ["runs/one/x"]
    assert blob == bucket.stat("x")
    server.fault("delete", code=503, lose=True)
    bucket.delete("x", generation=blob.generation)
    assert not server.objects


def test_a_break_in_a_large_upload_costs_only_the_rest(
    server: Server, bucket: Bucket, large: Path
) -> None:
    size = large.stat().st_size
    for _ in range(3):
        server.fault("chunk", cut=True)
    bucket.put("x", large)
    assert server.objects["runs/one/x"].data == large.read_bytes()
    assert server.counts["start"] == 1
    assert server.received == size, "half of each broken chunk was kept, and nothing is sent twice"


def test_what_the_service_did_not_keep_of_a_chunk_is_sent_again(
    server: Server, bucket: Bucket, large: Path
) -> None:
    server.fault("chunk", code=503)
    bucket.put("x", large)
    assert server.objects["runs/one/x"].data == large.read_bytes()
    assert server.received == large.stat().st_size + CHUNK


UPLOADER = """
import sys
from pathlib import Path
from ingot.base.remote import bucket, service
service.CHUNK_BYTES, bucket.WHOLE_BYTES = int(sys.argv[2]), int(sys.argv[2])
bucket.open_bucket("gs://bucket/runs/one").put("x", Path(sys.argv[1]), generation=0, note=Path(sys.argv[1] + ".note"))
"""


def test_a_killed_upload_is_gone_on_with_by_another_process(
    server: Server, bucket: Bucket, large: Path
) -> None:
    note = Path(f"{large}.note")
    server.fault("chunk")
    server.fault("chunk", delay_s=60)
    with subprocess.Popen([sys.executable, "-c", UPLOADER, str(large), str(CHUNK)]) as process:
        until = time.monotonic() + PATIENCE_S
        while server.counts["chunk"] < 2 and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not server.objects
    assert note.stat().st_mode & 0o077 == 0, "its address is a key"
    server.counts.clear()
    server.received = 0
    bucket.put("x", large, generation=0, note=note)
    assert server.objects["runs/one/x"].data == large.read_bytes()
    assert server.counts["start"] == 0
    assert server.received <= large.stat().st_size - CHUNK
    assert not note.exists()


def test_a_note_of_another_file_or_of_an_upload_that_is_forgotten_does_no_harm(
    server: Server, bucket: Bucket, large: Path
) -> None:
    note = Path(f"{large}.note")
    patient = bucket.patient(0.2)
    for number in range(2):
        server.fault("chunk")
        server.fault("chunk", 1000, code=503)
        with pytest.raises(Failed, match=r"could not write gs://bucket/runs/one/x within 0\.2 s"):
            patient.put("x", large, generation=0, note=note)
        server.faults.clear()
        assert note.exists()
        if number:
            server.sessions.clear()
        else:
            large.write_bytes(os.urandom(large.stat().st_size))
        bucket.put("x", large, generation=0, note=note)
        assert server.objects.pop("runs/one/x").data == large.read_bytes()


def test_an_answer_that_breaks_off_or_is_short_is_completed(
    server: Server, bucket: Bucket, large: Path, tmp_path: Path
) -> None:
    bucket.put("x", large)
    server.fault("media", cut=True)
    server.fault("media", short=True)
    server.fault("media", code=503)
    bucket.get_to_file("x", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == large.read_bytes()
    assert server.counts["media"] == 4


def test_a_download_that_takes_longer_than_patience_goes_on_as_long_as_something_comes(
    server: Server, bucket: Bucket, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No break is waited for within patience here: each uses it up."""
    for pause in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(bucket_module, pause, 1e9)
    bucket.put("x", large)
    server.fault("media", 3, cut=True)
    bucket.get_to_file("x", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == large.read_bytes()
    server.fault("media", cut=True)
    server.fault("media", code=503)
    with pytest.raises(Failed, match="could not read gs://bucket/runs/one/x within 60 s"):
        bucket.get_to_file("x", tmp_path / "back")


@pytest.mark.parametrize("reader", ["get", "get_to_file", "fetch_file"])
@pytest.mark.parametrize("whim", ["page", "flip"])
def test_one_bad_answer_is_no_damage(
    server: Server, bucket: Bucket, tmp_path: Path, reader: str, whim: str
) -> None:
    """What stands in the bucket is whole: read anew, it comes as it is."""
    data, back = os.urandom(5000), tmp_path / "back"
    bucket.put("x", data)
    server.fault("media", **{whim: True})
    if reader == "get":
        assert bucket.get("x") == data
        return
    if reader == "get_to_file":
        bucket.get_to_file("x", back)
    else:
        fetch_file(bucket, "x", back, sha256=hashlib.sha256(data).hexdigest())
    assert back.read_bytes() == data


def test_an_object_that_changes_while_it_is_read_is_not_mixed(
    server: Server, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_fault = server.next_fault

    def changed_before_the_second(kind: str) -> Fault:
        if kind == "media" and server.counts[kind] == 1:
            bucket.put("x", b"b" * 1000)
        return next_fault(kind)

    bucket.put("x", b"a" * 1000)
    server.fault("media", cut=True)
    server.fault("media", code=503)
    monkeypatch.setattr(server, "next_fault", changed_before_the_second)
    with pytest.raises(Missing, match="is not there any more"):
        bucket.get("x")
    assert bucket.get("x") == b"b" * 1000


def test_a_bit_that_turned_over_is_named(
    server: Server, bucket: Bucket, large: Path, tmp_path: Path
) -> None:
    bucket.put("x", large)
    server.flip("runs/one/x", large.stat().st_size // 2)
    with pytest.raises(Corrupt, match=r"gs://bucket/runs/one/x is damaged: it has CRC32C"):
        bucket.get_to_file("x", tmp_path / "back")


def test_a_file_that_turns_while_it_is_sent_is_refused_by_the_service(
    server: Server, bucket: Bucket, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "crc32c", lambda path: crc32c(b"as it was before"))
    with pytest.raises(
        Failed, match=r"could not write gs://bucket/runs/one/x \(400: Provided CRC32C"
    ):
        bucket.put("x", large)
    assert not server.objects


def test_a_service_that_delays_is_not_waited_for_for_ever(server: Server, bucket: Bucket) -> None:
    server.fault("insert", delay_s=30.0)
    began = time.monotonic()
    with pytest.raises(
        Failed, match=r"could not write gs://bucket/runs/one/x within 0\.2 s .*[Tt]imed out"
    ):
        bucket.patient(0.2).put("x", b"late")
    assert time.monotonic() - began < 20


def test_patience_ends(server: Server, bucket: Bucket) -> None:
    server.fault("list", 10000, code=503, message="out of order")
    with pytest.raises(
        Failed,
        match=(
            r"could not list gs://bucket/runs/one within 0\.3 s .*out of order.*; see what is wrong"
            r" there"
        ),
    ):
        bucket.patient(0.3).list()
    assert server.counts["list"] > 3


def test_nobody_there(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EMULATOR, "http://127.0.0.1:9")
    with pytest.raises(
        Failed, match=r"could not look at gs://bucket/x/y within 0\.3 s \(.*refused"
    ):
        open_bucket("gs://bucket/x", patience_s=0.3).stat("y")


def test_what_no_repeating_mends_is_told_at_once(
    server: Server, bucket: Bucket, large: Path, tmp_path: Path
) -> None:
    nowhere = open_bucket("gs://nowhere/x")
    for act in (lambda: nowhere.put("y", b""), nowhere.list, lambda: nowhere.put("y", large)):
        with pytest.raises(
            WrongInput,
            match=(
                r"there is no bucket nowhere .*The specified bucket does not exist.*create it, or"
                r" mend the address"
            ),
        ):
            act()
    for kind, act in {
        "insert": lambda: bucket.put("y", b""),
        "start": lambda: bucket.put("y", large),
        "chunk": lambda: bucket.put("y", large),
        "stat": lambda: bucket.stat("y"),
        "list": bucket.folders,
        "delete": lambda: bucket.delete("y"),
    }.items():
        server.fault(kind, code=403, message="run@x does not have storage.objects access")
        with pytest.raises(
            WrongInput,
            match=(
                r"no right to .* gs://bucket/runs/one.*\(403: run@x does not have .*; give this"
                r" account the role"
            ),
        ):
            act()
    with pytest.raises(Missing, match="gs://bucket/runs/one/none is not there"):
        bucket.get_to_file("none", tmp_path / "none")
    for wrong in ("bucket/x", "s3://bucket/x", "gs://", "gs:///x"):
        with pytest.raises(WrongInput, match="names no bucket; write gs://BUCKET/FOLDER"):
            open_bucket(wrong)


def test_a_full_disk_is_told_and_not_repeated(server: Server, bucket: Bucket) -> None:
    bucket.put("x", b"x" * 100_000)
    with pytest.raises(Failed, match=r"disk full while writing /dev/full"):
        bucket.get_to_file("x", Path("/dev/full"))
    assert server.counts["media"] == 1


def test_no_credentials_and_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EMULATOR, raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    with pytest.raises(
        WrongInput,
        match=(
            r"no credentials for gs://bucket/x .*key\.json.*gcloud auth application-default login"
        ),
    ):
        open_bucket("gs://bucket/x")
    google_packages.cache_clear()
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    with pytest.raises(WrongInput, match=r"pip install 'ingot\[gcp\]'"):
        open_bucket("gs://bucket/x")
