"""Checkpoints in a bucket that fails: sent once, whole or not at all, and what comes back is what
was written.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import COMMIT, FileEntry, entry_of, problems, read_marker, write_marker
from ingot.base.remote import bucket
from ingot.base.remote import service as upload
from ingot.base.remote.service import EMULATOR
from ingot.base.runfolder import RunFolder
from ingot.base.storage import sha256_file
from ingot.checkpoints.mirror import BucketMirror, Damaged, fetch_due, fetch_newer, send_newest
from ingot.checkpoints.saver import Saver
from ingot.checkpoints.store import (
    CommittedCheckpoint,
    committed,
    newest_valid,
    recommit,
    step_folder,
)
from ingot.parallel.mesh import running_mesh
from ingot.train.resume import FIELDS, find_start
from tests.checkpoints.states import assert_equal, flip_bit, load, state_of, train, trained
from tests.gcs import KEPT_BYTES, Server, crc32c, serving
from tests.patience import PATIENCE_S
from tests.ranks import run_ranks

URL = "gs://bucket/runs/one"
FILES = ["__0_0.distcp", "__1_0.distcp", "extra/state.json", ".metadata"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(upload, "CHUNK_BYTES", KEPT_BYTES)
    monkeypatch.setattr(bucket, "WHOLE_BYTES", KEPT_BYTES)
    with serving(monkeypatch) as running:
        yield running


@pytest.fixture
def mirror(server: Server) -> BucketMirror:
    return BucketMirror(URL)


@pytest.fixture
def impatient(mirror: BucketMirror) -> BucketMirror:
    """One that soon gives up what keeps failing."""
    mirror.bucket = mirror.bucket.patient(5.0)
    return mirror


def checkpoint(checkpoints: Path, step: int, seed: int = 0, **payload: object) -> Path:
    """As two ranks would have written it: the first file is large, and one has no bytes."""
    folder, made = step_folder(checkpoints, step), random.Random(step + 1000 * seed)
    for name, size in zip(FILES, (3 * KEPT_BYTES + 5, 100, 20, 0), strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(made.randbytes(size))
    write_marker(
        folder, COMMIT, {"step": step, **payload}, [entry_of(folder, name) for name in FILES]
    )
    return folder


def send(mirror: BucketMirror, folder: Path) -> None:
    mirror.put(folder, FILES[:1])
    mirror.put(folder, FILES[1:])
    mirror.commit(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def stored(server: Server) -> dict[str, bytes]:
    return {
        name.removeprefix("runs/one/"): found.data for name, found in sorted(server.objects.items())
    }


def test_a_checkpoint_goes_there_and_comes_back(
    server: Server, mirror: BucketMirror, tmp_path: Path
) -> None:
    assert mirror.newest() is None
    folder = checkpoint(tmp_path / "here", 3)
    send(mirror, folder)
    assert stored(server) == {
        f"{folder.name}/{name}": data for name, data in contents(folder).items()
    }
    assert server.written[-1].endswith(COMMIT)
    assert mirror.newest() == 3
    fetched = mirror.fetch(3, tmp_path / "there")
    assert fetched == step_folder(tmp_path / "there", 3)
    assert contents(fetched) == contents(folder)
    assert os.listdir(tmp_path / "there") == [fetched.name]


def test_it_is_sent_once(server: Server, mirror: BucketMirror, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 3)
    send(mirror, folder)
    assert len(server.written) == len(FILES) + 1
    assert server.counts["list"] == 1
    received = server.received
    send(BucketMirror(URL), folder)
    assert len(server.written) == len(FILES) + 1
    assert server.received < received + 2000, "the marker at most"


@pytest.mark.parametrize(
    "fault",
    [{"code": 503}, {"code": 429}, {"code": 503, "lose": True}, {"cut": True}],
    ids=["fails", "slow", "loses", "breaks off"],
)
@pytest.mark.parametrize("kind", ["insert", "start", "chunk"])
def test_faults_on_the_way_there(
    kind: str, fault: dict[str, object], server: Server, mirror: BucketMirror, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path, 3)
    for _ in range(3):
        server.fault(kind, **fault)
    send(mirror, folder)
    assert stored(server) == {
        f"{folder.name}/{name}": data for name, data in contents(folder).items()
    }
    assert len(server.written) == len(FILES) + 1
    assert not any(server.faults.values())


@pytest.mark.parametrize(
    "fault",
    [{"code": 503}, {"cut": True}, {"short": True}, {"delay_s": 0.2}],
    ids=["fails", "breaks off", "half", "delays"],
)
def test_faults_on_the_way_back(
    fault: dict[str, object], server: Server, mirror: BucketMirror, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "here", 3)
    send(mirror, folder)
    for _ in range(4):
        server.fault("media", **fault)
    assert contents(mirror.fetch(3, tmp_path / "there")) == contents(folder)


def test_what_is_torn_is_never_whole(
    server: Server, impatient: BucketMirror, tmp_path: Path
) -> None:
    mirror = impatient
    whole, torn = checkpoint(tmp_path / "here", 3), checkpoint(tmp_path / "here", 4)
    send(mirror, whole)
    server.fault("chunk")
    server.fault("chunk", 10**6, code=503)
    with pytest.raises(
        Failed, match=r"could not write gs://bucket/runs/one/step-00000004/__0_0\.distcp"
    ):
        mirror.put(torn, FILES)
    server.faults.clear()
    assert mirror.newest() == 3
    with pytest.raises(Failed, match=r"step-00000004/__0_0\.distcp has no bytes, \d+ were sent"):
        mirror.commit(torn)
    with pytest.raises(Damaged, match=r"step-00000004/COMMIT\.json is missing"):
        mirror.fetch(4, tmp_path / "there")
    server.counts.clear()
    send(mirror, torn)
    assert server.counts["start"] == 0, "it went on where it broke"
    assert mirror.newest() == 4
    assert contents(mirror.fetch(4, tmp_path / "there")) == contents(torn)


def test_a_marker_goes_before_a_file_is_replaced(
    server: Server, mirror: BucketMirror, tmp_path: Path
) -> None:
    """A step that is done once more, otherwise; killed halfway it is no checkpoint, and not a
    mixture of two.
    """
    send(mirror, checkpoint(tmp_path, 3))
    folder = checkpoint(tmp_path, 3, seed=1)
    mirror.put(folder, FILES[1:2])
    assert mirror.newest() is None
    mirror.put(folder, FILES)
    mirror.commit(folder)
    assert contents(mirror.fetch(3, tmp_path / "there")) == contents(folder)


def test_the_same_step_done_once_more_is_the_same_checkpoint(
    server: Server, mirror: BucketMirror, tmp_path: Path
) -> None:
    send(mirror, checkpoint(tmp_path, 3, time=1.0))
    folder = checkpoint(tmp_path, 3, time=2.0)
    send(mirror, folder)
    assert len(server.written) == len(FILES) + 2
    assert contents(mirror.fetch(3, tmp_path / "there")) == contents(folder)


def test_two_runs_that_write_to_one_place_are_told_so(
    server: Server, mirror: BucketMirror, tmp_path: Path
) -> None:
    """Though there be no lease: what was put meanwhile is not written over."""
    ours, theirs = checkpoint(tmp_path / "ours", 3), checkpoint(tmp_path / "theirs", 3, seed=1)
    mirror.put(ours, FILES)
    mirror.bucket.put(f"{ours.name}/{COMMIT}", (theirs / COMMIT).read_bytes())
    with pytest.raises(
        Failed,
        match=(
            r"step-00000003/COMMIT\.json is there, of another checkpoint: two runs write to one"
            r" place"
        ),
    ):
        mirror.commit(ours)
    assert stored(server)[f"{ours.name}/{COMMIT}"] == (theirs / COMMIT).read_bytes()


def test_a_marker_that_says_more_takes_the_place_of_its_own_alone(
    server: Server, mirror: BucketMirror, tmp_path: Path
) -> None:
    """Not of one that another machine wrote, which is whole as it is."""
    folder = checkpoint(tmp_path / "here", 3, finished=False)
    mirror.recommit(folder)
    assert mirror.newest() is None
    send(mirror, folder)
    (found,) = committed(folder.parent)
    recommit(found, {"finished": True})
    mirror.recommit(folder)
    assert stored(server)[f"{folder.name}/{COMMIT}"] == (folder / COMMIT).read_bytes()
    assert newest_valid(folder.parent) == replace(found, commit=read_marker(folder, COMMIT) or {})
    before = stored(server)
    mirror.recommit(checkpoint(tmp_path / "other", 3, seed=1))
    assert stored(server) == before


def test_a_run_that_lost_its_lease_writes_nothing_more(
    server: Server, mirror: BucketMirror, tmp_path: Path
) -> None:
    first, second = checkpoint(tmp_path, 3), checkpoint(tmp_path, 4)
    with mirror.lease("one", life_s=1000.0):
        with pytest.raises(Failed, match="in use by one"), BucketMirror(URL).lease("two"):
            pass
        send(mirror, first)
        mirror.put(second, FILES)
        server.ahead_s += 2000
        server.objects["runs/one/lease"].data = other = b'{"owner": "two", "host": "far", "pid": 7}'
        server.objects["runs/one/lease"].crc32c, server.objects["runs/one/lease"].generation = (
            crc32c(other),
            9999,
        )
        before = stored(server)
        acts = (
            lambda: mirror.put(checkpoint(tmp_path, 5), FILES),
            lambda: mirror.commit(second),
            lambda: mirror.retain({first.name, second.name}),
        )
        for act in acts:
            with pytest.raises(
                Failed,
                match=(
                    r"runs/one/lease was taken over by two \(process 7 on far\) while this process"
                    r" stood still"
                ),
            ):
                act()
    assert stored(server) == before, "their lease stays, too"


def test_retention(
    server: Server, mirror: BucketMirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [checkpoint(tmp_path, step) for step in range(1, 6)]
    for folder in folders[:4]:
        send(mirror, folder)
    mirror.put(folders[4], FILES[:1])
    mirror.bucket.put("unrelated/file", b"not ours to delete")
    mirror.retain({folders[0].name, folders[3].name})
    assert list(mirror.steps()) == [4, 1]
    assert mirror.bucket.folders() == [
        folders[0].name,
        folders[3].name,
        folders[4].name,
        "unrelated",
    ], "what others are uploading stays"
    assert contents(mirror.fetch(1, tmp_path / "there")) == contents(folders[0])
    mirror.retain({folders[4].name})
    assert list(mirror.steps()) == [4, 1], "no whole one would be left"
    assert (
        f"nothing is deleted in {URL}: no checkpoint that is kept (step-00000005) is whole there"
        in capsys.readouterr().err
    )
    mirror.put(folders[4], FILES)
    mirror.commit(folders[4])
    mirror.retain({folders[4].name})
    assert list(mirror.steps()) == [5]


def test_retention_takes_the_marker_first(
    server: Server, impatient: BucketMirror, tmp_path: Path
) -> None:
    mirror = impatient
    old, new = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    send(mirror, old)
    send(mirror, new)
    server.fault("delete")
    server.fault("delete", 10**6, code=503)
    with pytest.raises(Failed, match=r"could not delete gs://bucket/runs/one/step-00000001/"):
        mirror.retain({new.name})
    server.faults.clear()
    assert list(mirror.steps()) == [2]
    assert f"{old.name}/{FILES[0]}" in stored(server)
    mirror.retain({new.name})
    assert mirror.bucket.folders() == [new.name]


@pytest.mark.parametrize("where", ["data", "data and checksum", "marker", "lost"])
def test_damage_in_the_bucket_is_named_and_an_older_one_taken(
    where: str,
    server: Server,
    mirror: BucketMirror,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, new = checkpoint(tmp_path / "here", 3), checkpoint(tmp_path / "here", 4)
    send(mirror, old)
    send(mirror, new)
    damaged = f"{new.name}/{COMMIT if where == 'marker' else FILES[0]}"
    found = server.objects[f"runs/one/{damaged}"]
    if where == "lost":
        del server.objects[f"runs/one/{damaged}"]
    else:
        server.flip(f"runs/one/{damaged}", 40)
        if where != "data":
            found.crc32c = crc32c(found.data)
    with pytest.raises(Damaged, match=f"{URL}/{damaged}"):
        mirror.fetch(4, tmp_path / "there")
    assert newest_valid(tmp_path / "there") is None
    fetch_newer(mirror, tmp_path / "there")
    assert f"{URL}/{damaged}" in capsys.readouterr().err
    newest = newest_valid(tmp_path / "there")
    assert newest is not None
    assert newest.step == 3
    assert contents(newest.folder) == contents(old)
    server.flip(f"runs/one/{old.name}/{FILES[0]}")
    fetch_newer(mirror, tmp_path / "there")
    with pytest.raises(
        Failed, match=f"no checkpoint in {URL} is whole; restore one, or start over"
    ):
        fetch_newer(mirror, tmp_path / "empty")


def test_what_was_fetched_is_kept_when_fetching_breaks(
    server: Server, mirror: BucketMirror, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "here", 3)
    send(mirror, folder)
    data = server.objects.pop(f"runs/one/{folder.name}/{FILES[1]}")
    with pytest.raises(Damaged, match=FILES[1]):
        mirror.fetch(3, tmp_path / "there")
    assert newest_valid(tmp_path / "there") is None
    server.objects[f"runs/one/{folder.name}/{FILES[1]}"] = data
    server.counts.clear()
    staged = tmp_path / "there" / f".{folder.name}.fetch"
    kept = [name for name in FILES if (staged / name).exists()]
    assert FILES[0] in kept
    assert contents(mirror.fetch(3, tmp_path / "there")) == contents(folder)
    assert server.counts["media"] <= 1 + len(FILES) - len(kept)
    assert not staged.exists()


def test_what_lies_outside_of_the_folder_is_not_written(
    server: Server, mirror: BucketMirror, tmp_path: Path
) -> None:
    write_marker(tmp_path, COMMIT, {"step": 3}, [FileEntry("../../escaped", 1, "0")])
    mirror.bucket.put(f"step-00000003/{COMMIT}", (tmp_path / COMMIT).read_bytes())
    with pytest.raises(Damaged, match=r"lists \.\./\.\./escaped, which lies outside"):
        mirror.fetch(3, tmp_path / "there")


def test_only_what_is_newer_is_fetched(
    server: Server, mirror: BucketMirror, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    fetch_newer(mirror, there)
    send(mirror, checkpoint(here, 3))
    checkpoint(there, 4)
    fetch_newer(mirror, there)
    assert server.counts["media"] == 0
    (step_folder(there, 4) / FILES[1]).unlink()
    fetch_newer(mirror, there)
    assert sorted(path.name for path in there.iterdir()) == ["step-00000003", "step-00000004"]
    send(mirror, checkpoint(here, 5))
    fetch_newer(mirror, there)
    newest = newest_valid(there)
    assert newest is not None
    assert newest.step == 5


def test_what_is_damaged_here_is_fetched(
    server: Server, mirror: BucketMirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though no file of it is missing or short."""
    folder = checkpoint(tmp_path, 3)
    whole = contents(folder)
    send(mirror, folder)
    checkpoint(tmp_path, 2)
    flip_bit(folder / FILES[0], 100)
    found = fetch_newer(mirror, tmp_path)
    assert found is not None
    assert (found.step, contents(found.folder)) == (3, whole)
    assert re.search(r"__0_0\.distcp does not match its checksum\)", capsys.readouterr().err)
    flip_bit(checkpoint(tmp_path, 4) / FILES[0], 100)
    assert fetch_newer(mirror, tmp_path) == found, "nobody has a whole one of step 4"


def test_each_checkpoint_here_is_read_once(
    server: Server, mirror: BucketMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whom it is found; a training that begins from it does not read it again."""
    run = RunFolder(tmp_path)
    known: dict[str, object] = {**dict.fromkeys(FIELDS), "identity": {"train.global_batch": 4}}
    folder = checkpoint(run.checkpoints, 3, **known)
    read: list[str] = []

    def reading(path: Path) -> str:
        read.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr("ingot.base.markers.sha256_file", reading)
    newest = fetch_newer(mirror, run.checkpoints)
    found = find_start(run, {"train.global_batch": 4}, fresh=False, newest=newest)
    assert found is not None
    assert found.folder == folder
    assert sorted(read) == sorted(Path(name).name for name in FILES)


@pytest.mark.parametrize("damaged", [FILES[0], COMMIT])
def test_a_damaged_one_of_a_mean_is_passed_over(
    damaged: str,
    server: Server,
    mirror: BucketMirror,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Training needs none of them to go on."""
    for step in range(1, 7):
        send(mirror, checkpoint(tmp_path / "here", step, due=step != 4))
    server.flip(f"runs/one/step-00000003/{damaged}")
    fetch_due(mirror, tmp_path / "there", 6, 2)
    assert sorted(path.name for path in (tmp_path / "there").glob("step-*")) == [
        "step-00000002",
        "step-00000005",
    ]
    told = capsys.readouterr().err
    assert "the mean of train.average goes without step 3" in told
    assert f"step-00000003/{damaged}" in told


def newest_here(checkpoints: Path) -> CommittedCheckpoint:
    found = newest_valid(checkpoints)
    assert found is not None
    return found


def test_what_a_killed_run_could_not_send_is_sent_by_the_next(
    server: Server, mirror: BucketMirror, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path, 3)
    flip_bit(checkpoint(tmp_path, 4) / FILES[0], 100)
    send_newest(mirror, newest_here(tmp_path))
    assert stored(server) == {
        f"{folder.name}/{name}": data for name, data in contents(folder).items()
    }
    server.counts.clear()
    send_newest(mirror, newest_here(tmp_path))
    assert server.counts["insert"] == server.counts["start"] == 0


def the_run(checkpoints: Path) -> None:
    mirror = BucketMirror(URL)
    with mirror.lease("the run"):
        send_newest(mirror, newest_here(checkpoints))


@pytest.mark.parametrize(
    ("kind", "number"), [("start", 1), ("chunk", 1), ("chunk", 3), ("insert", 3), ("insert", 5)]
)
def test_a_run_killed_while_it_sends_does_so_again(
    kind: str, number: int, server: Server, tmp_path: Path
) -> None:
    """Killed where it waits for the answer to its NUMBERth request of a kind; then the same command
    once more.
    """
    folder = checkpoint(tmp_path, 3)
    for _ in range(number - 1):
        server.fault(kind)
    server.fault(kind, delay_s=30)
    process = get_context("fork").Process(target=the_run, args=(tmp_path,))
    process.start()
    until(lambda: server.counts[kind] >= number)
    process.kill()
    process.join()
    assert f"{folder.name}/{COMMIT}" not in stored(server)
    assert "lease" in stored(server), "nobody released it"
    the_run(tmp_path)
    assert stored(server) == {
        f"{folder.name}/{name}": data
        for name, data in contents(folder).items()
        if not name.endswith(".upload")
    }
    assert not problems(folder, read_marker(folder, COMMIT) or {}, checksums=True)
    assert sorted(contents(folder)) == sorted([*FILES, COMMIT]), "no note is left"


def until(condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.drawn("what a saver mirrors")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_a_saver_saves_is_there_and_loads_elsewhere(
    asynchronous: bool, server: Server, mirror: BucketMirror, tmp_path: Path
) -> None:
    """Steps of a real optimizer, saved while the bucket fails now and then; what is kept here is
    kept there, and nothing else.
    """
    with running_mesh() as mesh, mirror.lease("the run"):
        masters, optimizer = trained(0)
        saver = Saver(tmp_path / "here", mesh, asynchronous=asynchronous, mirror=mirror)
        for step in range(1, 4):
            server.fault("insert", code=503, lose=True)
            train(masters, optimizer, step)
            saver.save(step, masters, optimizer, {"samples": step}, keep=2, best=None)
        saver.wait()
        written = state_of(masters, optimizer)
        saver.close()
    assert list(mirror.steps()) == [3, 2]
    sent = [name for name in server.written if not name.endswith("lease")]
    assert len(sent) == len(set(sent)), "each object once"
    fetch_newer(mirror, tmp_path / "there")
    assert contents(step_folder(tmp_path / "there", 3)) == contents(
        step_folder(tmp_path / "here", 3)
    )
    assert_equal(load(tmp_path / "there"), written)


def two_ranks(address: str, checkpoints: Path) -> list[str]:
    """What this rank has put."""
    os.environ[EMULATOR] = address
    put: list[str] = []

    class Listening(BucketMirror):
        def put(self, folder: Path, names: Sequence[str]) -> None:
            put.extend(names)
            super().put(folder, names)

    with running_mesh() as mesh:
        masters, optimizer = trained(0)
        saver = Saver(checkpoints, mesh, asynchronous=True, mirror=Listening(URL))
        saver.save(1, masters, optimizer, {}, keep=1, best=None)
        saver.wait()
        saver.close()
    return put


@pytest.mark.drawn("what a saver mirrors")
def test_each_rank_sends_its_own_files(
    server: Server, mirror: BucketMirror, tmp_path: Path
) -> None:
    first, second = run_ranks(2, two_ranks, server.address, tmp_path / "here")
    assert first
    assert second
    assert not set(first) & set(second)
    assert sorted(server.written) == sorted(
        f"runs/one/step-00000001/{name}" for name in [*first, *second, COMMIT]
    )
    assert server.counts["list"] <= 2, "one to commit, one to retain, none of the ranks' own"
    fetch_newer(mirror, tmp_path / "there")
    assert_equal(load(tmp_path / "there"), state_of(*trained(0)))


@pytest.mark.drawn("what a saver mirrors")
def test_an_upload_that_fails_is_an_error_of_the_save(
    server: Server, impatient: BucketMirror, tmp_path: Path
) -> None:
    """The checkpoint itself stays on disk, and goes up when somebody tries once more."""
    mirror = impatient
    with running_mesh() as mesh:
        masters, optimizer = trained(0)
        saver = Saver(tmp_path, mesh, asynchronous=True, mirror=mirror)
        server.fault("insert", 10**6, code=503)
        saver.save(1, masters, optimizer, {}, keep=2, best=None)
        with pytest.raises(Failed, match=r"could not write gs://bucket/runs/one/step-00000001/"):
            saver.wait()
        saver.close()
    assert mirror.newest() is None
    server.faults.clear()
    send_newest(mirror, newest_here(tmp_path))
    assert mirror.newest() == 1


def test_a_place_that_is_none(server: Server) -> None:
    with pytest.raises(WrongInput, match="there is no bucket nowhere to list gs://nowhere/x"):
        BucketMirror("gs://nowhere/x").newest()
    with pytest.raises(WrongInput, match="names no bucket"):
        BucketMirror("runs/one")
