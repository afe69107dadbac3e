"""A run folder and its replica in a bucket that fails, and whose writers are killed between any two
requests: the old state, or the new one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.remote import bucket as bucket_module
from ingot.base.remote import index as replicaindex
from ingot.base.remote import memory as replicamemory
from ingot.base.remote import replica
from ingot.base.remote import service as upload
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.replica import pull, push, replica_url
from tests.gcs import KEPT_BYTES, Fault, Server, crc32c, serving

CHUNK = 2 * KEPT_BYTES
URL = "gs://bucket/ingot/runs/one"
PREFIX = "ingot/runs/one/"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(upload, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(bucket_module, "WHOLE_BYTES", CHUNK)
    with serving(monkeypatch) as running:
        yield running


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    columns = {"data/columns/a.bin": b"a" * 1000, "data/columns/manifest.json": b"{}"}
    fill(
        root,
        {"recipe.yaml": b"name: one", **columns, "logs/train.log": b"", "metrics.jsonl": b"1\n"},
    )
    return root


def fill(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def content(root: Path) -> dict[str, bytes]:
    """All files but hidden ones."""
    paths = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    return {
        path.as_posix(): (root / path).read_bytes()
        for path in paths
        if not any(part.startswith(".") for part in path.parts)
    }


def age(root: Path, seconds: float = 60) -> None:
    """Let the files have been written a while ago."""
    for path in root.rglob("*"):
        if path.is_file():
            about = path.stat()
            os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns - int(seconds * 1e9)))


def objects(server: Server) -> list[str]:
    return sorted(name.removeprefix(PREFIX) for name in server.objects)


def test_the_address_of_a_run() -> None:
    assert replica_url("gs://bucket", "one") == replica_url("bucket", "one") == URL


def test_what_is_pushed_is_pulled_and_lies_under_its_own_path(
    server: Server, run: Path, tmp_path: Path
) -> None:
    fill(run, {"model/model.safetensors": os.urandom(3 * CHUNK + 5)})
    push(run, URL)
    assert objects(server) == sorted(["REPLICA.json", *content(run)])
    assert server.written[-1] == PREFIX + "REPLICA.json"
    assert pull(URL, tmp_path / "other") is True
    assert content(tmp_path / "other") == content(run)
    assert (tmp_path / "other/metrics.jsonl").stat().st_mtime_ns == (
        run / "metrics.jsonl"
    ).stat().st_mtime_ns
    index = json.loads(server.objects[PREFIX + "REPLICA.json"].data)
    assert index["schema"] == 1
    entry = next(entry for entry in index["files"] if entry["path"] == "metrics.jsonl")
    assert (entry["bytes"], entry["crc32c"]) == (2, server.objects[PREFIX + "metrics.jsonl"].crc32c)


def test_without_a_replica_nothing_is_pulled_nor_made(server: Server, tmp_path: Path) -> None:
    assert pull(URL, tmp_path / "other") is False
    assert not (tmp_path / "other").exists()


def test_an_empty_folder_has_a_replica_too(server: Server, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    push(tmp_path / "run", URL)
    assert pull(URL, tmp_path / "other") is True
    assert content(tmp_path / "other") == {}


def test_checkpoints_heartbeats_hidden_files_and_what_is_on_its_way_stay(
    server: Server, run: Path, tmp_path: Path
) -> None:
    kept = content(run)
    fill(run, {"checkpoints/step-1/x": b"x", "heartbeats/host": b"beat", "REPLICA.json": b"mine"})
    fill(run, {".lock": b"1", "data/.a.bin.partial-17": b"half", ".hidden/file": b"h"})
    push(run, URL)
    assert objects(server) == sorted(["REPLICA.json", *kept])
    push(run, URL, parts=["heartbeats", "checkpoints"])
    assert objects(server) == sorted(["REPLICA.json", "heartbeats/host", *kept])
    push(run, URL)
    assert pull(URL, tmp_path / "other")
    assert content(tmp_path / "other") == kept
    assert pull(URL, tmp_path / "other", parts=["heartbeats"])
    assert content(tmp_path / "other") == kept | {"heartbeats/host": b"beat"}


def test_checkpoints_of_trainings_that_were_set_aside_stay_too(server: Server, run: Path) -> None:
    kept = content(run) | {"earlier/abc/metrics.jsonl": b"1\n"}
    fill(
        run,
        {
            "earlier/abc/metrics.jsonl": b"1\n",
            "earlier/abc/checkpoints/step-00000001/x": b"x",
            "earlier/abc/heartbeats/host": b"beat",
        },
    )
    push(run, URL)
    push(run, URL, parts=["earlier"])
    assert objects(server) == sorted(["REPLICA.json", *kept])


def test_what_did_not_change_is_neither_read_nor_sent(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    fill(run, {f"data/{number % 7}/{number}": b"%d" % number for number in range(200)})
    age(run)
    push(run, URL)
    read: list[Path] = []

    def reading(path: Path) -> str:
        read.append(path)
        return bucket_module.crc32c(path)

    monkeypatch.setattr(replicamemory, "crc32c", reading)
    server.counts.clear()
    push(run, URL)
    assert read == []
    assert server.counts["insert"] == server.counts["start"] == server.counts["delete"] == 0
    assert server.counts.total() < 10
    (run / "data/3/10").write_bytes(b"10")  # the same again: read, and not sent
    (run / "data/4/11").write_bytes(b"12")  # of the same size, read and sent
    server.counts.clear()
    push(run, URL)
    assert sorted(read) == [run / "data/3/10", run / "data/4/11"]
    assert server.counts["insert"] == 2
    read.clear()
    assert pull(URL, tmp_path / "other")
    assert pull(URL, tmp_path / "other")
    assert read == []
    assert content(tmp_path / "other") == content(run)


def test_a_file_written_a_moment_ago_is_read_again_for_its_time_may_not_tell(
    server: Server, run: Path, tmp_path: Path
) -> None:
    push(run, URL)
    about = (run / "metrics.jsonl").stat()
    (run / "metrics.jsonl").write_bytes(b"2\n")
    os.utime(run / "metrics.jsonl", ns=(about.st_atime_ns, about.st_mtime_ns))
    push(run, URL)
    assert pull(URL, tmp_path / "other")
    assert (tmp_path / "other/metrics.jsonl").read_bytes() == b"2\n"


def test_what_changes_never_lies_over_what_the_index_names(
    server: Server, run: Path, tmp_path: Path
) -> None:
    path, seen = PREFIX + "metrics.jsonl", []
    for number in range(1, 6):
        (run / "metrics.jsonl").write_bytes(b"%d\n" % number)
        index = server.objects.get(PREFIX + "REPLICA.json")
        before = (
            {
                PREFIX + entry["key"]: server.objects[PREFIX + entry["key"]].generation
                for entry in json.loads(index.data)["files"]
            }
            if index
            else {}
        )
        written = len(server.written)
        push(run, URL)
        assert not before.keys() & set(server.written[written:]) - {PREFIX + "REPLICA.json"}
        seen.append(path in server.objects)
        assert pull(URL, tmp_path / "other")
        assert content(tmp_path / "other") == content(run)
        assert len(server.objects) == len(content(run)) + 1  # nothing of older states is left
    assert seen == [True, False, True, False, True]


def test_what_is_deleted_is_deleted_where_it_was_known_and_nothing_else(
    server: Server, run: Path, tmp_path: Path
) -> None:
    push(run, URL)
    other = tmp_path / "other"
    assert pull(URL, other)
    fill(other, {"notes.txt": b"mine", "data/columns/mine": b"mine"})
    (run / "data/columns/a.bin").unlink()
    (run / "logs/train.log").unlink()
    (run / "logs").rmdir()
    push(run, URL)
    assert "data/columns/a.bin" not in objects(server)
    assert pull(URL, other)
    assert content(other) == content(run) | {"notes.txt": b"mine", "data/columns/mine": b"mine"}
    assert not (other / "logs").exists()
    other.joinpath("metrics.jsonl").unlink()
    push(other, URL)  # and the other way round, from what it pulled
    assert pull(URL, run)
    assert content(run) == content(other)


def test_what_was_made_elsewhere_meanwhile_stays_as_it_is_there(
    server: Server, run: Path, tmp_path: Path
) -> None:
    """A launcher that did not fetch what a job made pushes, twice: neither the model, nor what
    changed, nor what was deleted is as it was here.
    """
    push(run, URL)
    other, third = tmp_path / "other", tmp_path / "third"
    pull(URL, other)
    fill(other, {"model/w": b"weights", "metrics.jsonl": b"1\n2\n", "logs/train.log": b"theirs"})
    (other / "data/columns/a.bin").unlink()
    push(other, URL)
    fill(run, {"recipe.yaml": b"name: two", "logs/train.log": b"mine"})
    for _ in range(2):
        push(run, URL)
        pull(URL, third)
        assert content(third) == content(other) | {
            "recipe.yaml": b"name: two",
            "logs/train.log": b"mine",
        }
    assert len(server.objects) == len(content(third)) + 1
    pull(URL, run)
    assert content(run) == content(third)


def test_only_what_a_folder_had_as_it_is_there_is_deleted_by_it(
    server: Server, run: Path, tmp_path: Path
) -> None:
    push(run, URL)
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        push(tmp_path / "empty", URL)
    other = tmp_path / "other"
    pull(URL, other)
    assert content(other) == content(run)
    fill(other, {"metrics.jsonl": b"1\n2\n"})
    push(other, URL)
    for name in ("metrics.jsonl", "recipe.yaml"):
        (run / name).unlink()
    push(run, URL)
    pull(URL, tmp_path / "third")
    assert content(tmp_path / "third") == {
        name: data for name, data in content(other).items() if name != "recipe.yaml"
    }


def test_without_an_index_a_folder_is_sent_whole_whatever_it_remembers(
    server: Server, run: Path, tmp_path: Path
) -> None:
    push(run, URL)
    del server.objects[PREFIX + "REPLICA.json"]
    push(run, URL)
    assert pull(URL, tmp_path / "other")
    assert content(tmp_path / "other") == content(run)


@pytest.mark.parametrize(
    "wrong",
    [
        {"known": ["recipe.yaml"]},
        {"known": {"recipe.yaml": 5}},
        {"known": {"recipe.yaml": [5]}},
        {"checksums": None},
        {"checksums": {"recipe.yaml": 5, "metrics.jsonl": []}, "known": None},
    ],
)
def test_a_memory_without_contents_deletes_nothing_there(
    wrong: dict[str, object], server: Server, run: Path, tmp_path: Path
) -> None:
    push(run, URL)
    memory = run / ".replica/memory.json"
    memory.write_text(json.dumps(json.loads(memory.read_text()) | wrong))
    (run / "recipe.yaml").unlink()
    fill(run, {"metrics.jsonl": b"2\n"})
    push(run, URL)
    pull(URL, tmp_path / "other")
    assert content(tmp_path / "other") == content(run) | {"recipe.yaml": b"name: one"}


def test_what_is_to_be_kept_is_neither_overwritten_nor_deleted_nor_forgotten(
    server: Server, run: Path, tmp_path: Path
) -> None:
    fill(run, {"jobs/a": b"1", "jobs/b": b"1", "jobs/c": b"1", "jobs/d": b"1"})
    push(run, URL)
    other = tmp_path / "other"
    pull(URL, other)
    fill(
        other,
        {
            "jobs/a": b"theirs",
            "jobs/d": b"theirs",
            "jobs/new": b"theirs",
            "metrics.jsonl": b"theirs",
        },
    )
    (other / "jobs/b").unlink()
    push(other, URL)
    fill(run, {"jobs/d": b"mine"})
    (run / "jobs/c").unlink()
    before = content(run)
    pull(URL, run, keep=lambda path: path.startswith("jobs/"))
    assert content(run) == before | {
        "jobs/c": b"1",
        "jobs/new": b"theirs",
        "metrics.jsonl": b"theirs",
    }
    push(run, URL)
    pull(URL, tmp_path / "third")
    assert content(tmp_path / "third") == content(other) | {
        "jobs/d": b"mine"
    }  # a and b did not change here


def test_a_file_becomes_a_folder_and_a_folder_a_file(
    server: Server, run: Path, tmp_path: Path
) -> None:
    fill(run, {"model": b"file", "reports/a/b": b"deep"})
    push(run, URL)
    assert pull(URL, tmp_path / "other")
    (run / "model").unlink()
    (run / "reports/a/b").unlink()
    (run / "reports/a").rmdir()
    fill(run, {"model/config.json": b"{}", "reports/a": b"file"})
    push(run, URL)
    assert pull(URL, tmp_path / "other")
    assert content(tmp_path / "other") == content(run)


def test_parts_leave_the_rest_as_it_is(server: Server, run: Path, tmp_path: Path) -> None:
    push(run, URL)
    fill(
        run,
        {
            "logs/train.log": b"said",
            "metrics.jsonl": b"1\n2\n",
            "data/columns/a.bin": b"new",
            "data/columns2/b": b"b",
        },
    )
    push(run, URL, parts=["logs", "metrics.jsonl"])
    other = tmp_path / "other"
    assert pull(URL, other, parts=["logs", "data/columns"])
    assert content(other) == {
        "logs/train.log": b"said",
        "data/columns/a.bin": b"a" * 1000,
        "data/columns/manifest.json": b"{}",
    }
    assert pull(URL, other)
    expected = content(run) | {"data/columns/a.bin": b"a" * 1000}
    del expected["data/columns2/b"]
    assert content(other) == expected
    (run / "logs/train.log").unlink()
    (run / "recipe.yaml").unlink()
    push(run, URL, parts=["logs"])
    assert pull(URL, other, parts=["logs"])
    assert not (other / "logs/train.log").exists()
    assert pull(URL, other)
    assert (other / "recipe.yaml").exists()


def test_objects_of_others_are_left_alone(server: Server, run: Path) -> None:
    theirs = open_bucket(URL)
    for name in (
        "checkpoints/step-00000001/COMMIT.json",
        "meet/node-0.json",
        "data/README",
        "lease",
    ):
        theirs.put(name, b"theirs")
    push(run, URL)
    (run / "metrics.jsonl").write_bytes(b"2\n")
    push(run, URL)
    assert {
        "checkpoints/step-00000001/COMMIT.json",
        "meet/node-0.json",
        "data/README",
        "lease",
    } <= set(objects(server))


def test_what_a_stopped_attempt_left_under_a_path_is_not_taken_for_other_content(
    server: Server, run: Path, tmp_path: Path
) -> None:
    open_bucket(URL).put("metrics.jsonl", b"of an attempt that was stopped")
    push(run, URL)
    assert pull(URL, tmp_path / "other")
    assert content(tmp_path / "other") == content(run)
    assert len(server.objects) == len(content(run)) + 1


def test_a_file_that_is_called_like_anothers_object_gets_one_of_its_own(
    server: Server, run: Path, tmp_path: Path
) -> None:
    push(run, URL)
    beside = base64.b64decode(crc32c(b"2\n")).hex()
    fill(run, {"metrics.jsonl": b"2\n", f"metrics.jsonl~{beside}-2": b"mine"})
    push(run, URL)
    assert pull(URL, tmp_path / "other")
    assert content(tmp_path / "other") == content(run)


def test_a_damaged_or_missing_object_is_named_and_the_next_push_mends_a_missing_one(
    server: Server, run: Path, tmp_path: Path
) -> None:
    push(run, URL)
    server.flip(PREFIX + "recipe.yaml")
    with pytest.raises(Failed, match=r"recipe\.yaml is damaged"):
        pull(URL, tmp_path / "other")
    assert content(tmp_path / "other") == {}
    del server.objects[PREFIX + "recipe.yaml"]
    with pytest.raises(Failed, match=r"recipe\.yaml.*push the run folder again"):
        pull(URL, tmp_path / "other")
    push(run, URL)
    assert pull(URL, tmp_path / "other")
    assert content(tmp_path / "other") == content(run)


def test_an_object_that_somebody_else_wrote_over_is_not_taken(
    server: Server, run: Path, tmp_path: Path
) -> None:
    push(run, URL)
    open_bucket(URL).put("recipe.yaml", b"name: two")
    with pytest.raises(Failed, match=r"recipe\.yaml has 9 bytes"):
        pull(URL, tmp_path / "other")
    assert content(tmp_path / "other") == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"{", "no index"),
        (b'{"schema": 1}', "no index"),
        (b'{"schema": 2}', "newer"),
        (b"[]", "no index"),
        (
            (
                b'{"schema": 1, "garbage": [], "files": [{"path": "../x", "key": "x", "bytes": 1,'
                b' "crc32c": "", "mtime_ns": 0}]}'
            ),
            "no file of a run",
        ),
        (
            (
                b'{"schema": 1, "garbage": [], "files": [{"path": "/etc/x", "key": "x", "bytes": 1,'
                b' "crc32c": "", "mtime_ns": 0}]}'
            ),
            "no file of a run",
        ),
    ],
)
def test_an_index_that_is_none_or_leads_outside_is_refused(
    text: bytes, told: str, server: Server, run: Path, tmp_path: Path
) -> None:
    open_bucket(URL).put("REPLICA.json", text)
    with pytest.raises((Failed, WrongInput), match=told):
        pull(URL, tmp_path / "other")
    with pytest.raises((Failed, WrongInput), match=told):
        push(run, URL)


def test_the_slower_of_two_writers_is_told_and_the_other_ones_state_stands(
    server: Server, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(run, URL)
    other = tmp_path / "other"
    pull(URL, other)
    fill(run, {"metrics.jsonl": b"slow"})
    fill(other, {"metrics.jsonl": b"quick", "logs/train.log": b"quick"})
    write = replicaindex.write_index

    def late(*arguments: object) -> None:
        monkeypatch.setattr(replica, "write_index", write)
        push(other, URL)
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(replica, "write_index", late)
    with pytest.raises(Failed, match="somebody else"):
        push(run, URL)
    third = tmp_path / "third"
    assert pull(URL, third)
    assert content(third) == content(other)
    assert pull(URL, run)
    assert content(run) == content(other)
    push(run, URL)
    assert len(server.objects) == len(content(run)) + 1


def test_a_writer_relies_on_nothing_that_another_is_deleting(
    server: Server, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content goes back to what it was while the object that had it is garbage, and goes a
    moment later.
    """
    push(run, URL)
    (run / "metrics.jsonl").write_bytes(b"2\n")
    sweep = replica._delete_garbage
    left: list[dict[str, int]] = []
    monkeypatch.setattr(replica, "_delete_garbage", lambda bucket, garbage: left.append(garbage))
    push(run, URL)
    assert left[0].keys() == {"metrics.jsonl"}
    (run / "metrics.jsonl").write_bytes(b"1\n")
    push(run, URL)
    sweep(open_bucket(URL), left[0])
    assert pull(URL, tmp_path / "other")
    assert content(tmp_path / "other") == content(run)
    monkeypatch.undo()


@pytest.mark.parametrize(
    "states", [1, 2], ids=["once", "twice, and the objects hold something else"]
)
def test_a_reader_that_a_writer_overtakes_gets_the_new_state_whole(
    states: int, server: Server, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(run, {f"data/{number}": b"old %d" % number for number in range(20)})
    push(run, URL)
    fetch, met, alone = replica._fetch, threading.Event(), threading.Lock()

    def overtaken(*arguments: object) -> None:
        with alone:  # nobody meets with what is half-way
            overtake()
        fetch(*arguments)  # type: ignore[arg-type]

    def overtake() -> None:
        if not met.is_set():
            met.set()
            for state in range(states):
                fill(
                    run, {f"data/{number}": b"new %d.%d" % (state, number) for number in range(20)}
                )
                push(run, URL)

    monkeypatch.setattr(replica, "_fetch", overtaken)
    assert pull(URL, tmp_path / "other")
    assert content(tmp_path / "other") == content(run)


def test_readers_see_whole_states_while_a_writer_pushes_on_and_on(
    server: Server, tmp_path: Path
) -> None:
    run, over, wrong = tmp_path / "run", threading.Event(), []
    names = [f"data/{number}" for number in range(6)]
    fill(run, dict.fromkeys(names, b"0"))
    push(run, URL)

    def write() -> None:
        for state in range(1, 12):
            fill(run, dict.fromkeys(names, b"%d" % state))
            push(run, URL)
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    states = set()
    while not over.is_set():
        with contextlib.suppress(Failed):  # the writer may be quicker, time and again
            pull(URL, tmp_path / "other")
        found = set(content(tmp_path / "other").values())
        states |= found
        if len(found) != 1:
            wrong.append(found)
    writer.join()
    assert not wrong
    assert len(states) > 1
    pull(URL, tmp_path / "other")
    assert content(tmp_path / "other") == content(run)


@pytest.mark.drawn(keep=6)
@pytest.mark.parametrize(
    "kind", ["insert", "start", "chunk", "status", "stat", "media", "list", "delete"]
)
@pytest.mark.parametrize(
    "fault",
    [{"code": 503}, {"code": 503, "lose": True}, {"cut": True}],
    ids=["refused", "lost", "cut"],
)
def test_a_service_that_fails_for_a_while(
    kind: str, fault: dict[str, object], server: Server, run: Path, tmp_path: Path
) -> None:
    fill(run, {"model/model.safetensors": os.urandom(2 * CHUNK + 5)})
    push(run, URL)
    fill(run, {"model/model.safetensors": os.urandom(2 * CHUNK + 9), "metrics.jsonl": b"2\n"})
    server.fault(kind, times=3, **fault)
    push(run, URL)
    server.fault(kind, times=3, **fault)
    assert pull(URL, tmp_path / "other")
    server.faults.clear()
    assert content(tmp_path / "other") == content(run)
    push(run, URL)
    assert len(server.objects) == len(content(run)) + 1


class Killed(Server):
    """Answers `left` more requests; from then on it is as if whoever asks were dead."""

    left = 10**9

    def next_fault(self, kind: str) -> Fault:
        with self.lock:
            self.counts[kind] += 1
            self.left -= 1
            return Fault() if self.left >= 0 else Fault(code=400, message="killed")


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Killed]:
    monkeypatch.setattr("tests.gcs.Server", Killed)
    monkeypatch.setattr(upload, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(bucket_module, "WHOLE_BYTES", CHUNK)
    with serving(monkeypatch) as running:
        assert isinstance(running, Killed)
        yield running


def requests_of(server: Killed, act: Callable[[], object]) -> int:
    before = server.counts.total()
    act()
    return server.counts.total() - before


@pytest.mark.drawn("a replica, killed")
def test_killed_between_any_two_requests_a_push_leaves_the_old_state_or_the_new_one(
    killed: Killed, tmp_path: Path
) -> None:
    run, large = tmp_path / "run", os.urandom(2 * CHUNK + 3)
    old = {
        "a": b"a",
        "data/b": b"b",
        "data/gone": b"gone",
        "data/same": b"same",
        "model/large": os.urandom(CHUNK + 1),
    }
    new = {
        "a": b"A",
        "data/b": b"B",
        "data/same": b"same",
        "data/more": b"more",
        "model/large": large,
    }
    fill(run, old)
    push(run, URL)
    saved = dict(killed.objects)
    seen, number = [], 0
    while True:
        killed.objects, killed.left = dict(saved), 10**9
        (run / ".replica/memory.json").unlink(missing_ok=True)
        fill(run, old)
        assert pull(URL, run)
        (run / "data/gone").unlink()
        fill(run, new)
        killed.left = number
        with contextlib.suppress(Failed, WrongInput):
            push(run, URL)
        over, killed.left = killed.left >= 0, 10**9
        reader = tmp_path / f"reader-{number}"
        assert pull(URL, reader)
        assert content(reader) in (old, new)
        seen.append(content(reader) == new)
        push(run, URL)
        assert pull(URL, reader)
        assert content(reader) == content(run) == new
        push(run, URL)
        assert len(killed.objects) == len(new) + 1  # no litter
        if over:
            break
        number += 1
    assert number > 15
    assert seen == sorted(seen)
    assert {True, False} == set(seen)


@pytest.mark.drawn("a replica, killed")
def test_killed_between_any_two_requests_a_pull_is_done_by_the_next(
    killed: Killed, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    old = {"a": b"a", "data/b": b"b", "data/gone": b"gone", "model/large": os.urandom(CHUNK + 1)}
    new = {
        "a": b"A",
        "data/b": b"B",
        "data/more": b"more",
        "model/large": os.urandom(2 * CHUNK + 3),
    }
    fill(run, old)
    push(run, URL)
    older = dict(killed.objects)
    (run / "data/gone").unlink()
    fill(run, new)
    push(run, URL)
    newer = dict(killed.objects)
    number = 0
    while True:
        reader = tmp_path / f"reader-{number}"
        killed.objects, killed.left = dict(older), 10**9
        assert pull(URL, reader)
        killed.objects, killed.left = dict(newer), number
        try:
            pull(URL, reader)
        except (Failed, WrongInput):
            assert content(reader) == old
        over, killed.left = killed.left >= 0, 10**9
        assert pull(URL, reader)
        assert content(reader) == new
        assert not (reader / ".replica/arriving").exists()
        if over:
            break
        number += 1
    assert number > 6


def test_what_an_attempt_that_was_stopped_sent_or_fetched_is_not_moved_again(
    killed: Killed, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    fill(run, {f"data/{number}": os.urandom(1000) for number in range(20)})
    needed = requests_of(killed, lambda: push(run, "gs://bucket/needed"))
    killed.left = needed - 3
    with pytest.raises((Failed, WrongInput)):
        push(run, URL)
    killed.left = 10**9
    sent = killed.counts["insert"]
    push(run, URL)
    assert killed.counts["insert"] - sent < 10
    killed.left = 30
    with pytest.raises((Failed, WrongInput)):
        pull(URL, tmp_path / "other")
    killed.left = 10**9
    read = killed.counts["media"]
    assert pull(URL, tmp_path / "other")
    assert killed.counts["media"] - read < 18
    assert content(tmp_path / "other") == content(run)


def test_a_log_that_grows_while_it_is_pushed_arrives_as_it_was_at_some_moment(
    server: Server, tmp_path: Path
) -> None:
    run, over = tmp_path / "run", threading.Event()
    line = b"%07d\n"
    fill(
        run,
        {
            "metrics.jsonl": b"",
            "logs/large.log": b"".join(line % number for number in range(CHUNK // 8 + 1000)),
        },
    )

    def write() -> None:
        number = 0
        with (
            (run / "metrics.jsonl").open("ab") as small,
            (run / "logs/large.log").open("ab") as large,
        ):
            while not over.is_set():
                number += 1
                for stream in (small, large):
                    stream.write(line % number)
                    stream.flush()
                time.sleep(0.0005)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            push(run, URL)
            assert pull(URL, tmp_path / "other")
            for name in ("metrics.jsonl", "logs/large.log"):
                there = (tmp_path / "other" / name).read_bytes()
                assert (run / name).read_bytes().startswith(there)
    finally:
        over.set()
        writer.join()
    push(run, URL)
    assert pull(URL, tmp_path / "other")
    assert content(tmp_path / "other") == content(run)


def test_a_file_that_goes_while_the_folder_is_read_is_no_error(
    server: Server, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = replica._send

    def gone(bucket: object, root: Path, local: replicamemory.LocalFile, *rest: object) -> object:
        if local.path == "metrics.jsonl":
            (root / local.path).unlink()
        return send(bucket, root, local, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(replica, "_send", gone)
    push(run, URL)
    assert pull(URL, tmp_path / "other")
    assert content(tmp_path / "other") == content(run)
    assert "metrics.jsonl" not in content(run)


def test_a_memory_that_is_damaged_or_of_another_address_costs_no_more_than_time(
    server: Server, run: Path, tmp_path: Path
) -> None:
    push(run, URL)
    (run / ".replica/memory.json").write_text("{")
    fill(run, {"metrics.jsonl": b"2\n"})
    push(run, URL)
    push(run, "gs://bucket/elsewhere")
    (run / "metrics.jsonl").unlink()
    push(run, "gs://bucket/elsewhere")
    assert pull(URL, run)
    assert (run / "metrics.jsonl").read_bytes() == b"2\n"
    assert pull("gs://bucket/elsewhere", run)
    assert (
        run / "metrics.jsonl"
    ).exists()  # that address never had it, as far as this folder's memory of it goes


def test_linked_folders_are_part_of_the_run_and_circles_end(
    server: Server, run: Path, tmp_path: Path
) -> None:
    fill(tmp_path / "disk", {"raw/part-0.parquet": b"rows"})
    (run / "data/raw").symlink_to(tmp_path / "disk/raw")
    (run / "data/self").symlink_to(run / "data")
    push(run, URL)
    assert pull(URL, tmp_path / "other")
    assert content(tmp_path / "other")["data/raw/part-0.parquet"] == b"rows"


def test_no_bucket_and_no_rights_are_told(server: Server, run: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match="no bucket nowhere"):
        push(run, "gs://nowhere/run")
    server.fault("stat", times=9, code=403)
    with pytest.raises(WrongInput, match="no right"):
        pull(URL, tmp_path / "other")


def test_what_is_in_the_way_is_named(server: Server, run: Path, tmp_path: Path) -> None:
    push(run, URL)
    fill(tmp_path / "other", {"data": b"a file"})
    with pytest.raises(WrongInput, match="in the way"):
        pull(URL, tmp_path / "other")


def test_checksums_in_the_index_are_the_services_own(server: Server, run: Path) -> None:
    push(run, URL)
    for entry in json.loads(server.objects[PREFIX + "REPLICA.json"].data)["files"]:
        assert len(base64.b64decode(entry["crc32c"])) == 4
        assert server.objects[PREFIX + entry["key"]].crc32c == entry["crc32c"]
