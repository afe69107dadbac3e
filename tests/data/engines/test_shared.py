"""Workers that share no disk with the one who asks, only a bucket: Spark's and Beam's make the same
files as this machine alone.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed
from ingot.base.progress import Progress
from ingot.base.remote.replica import push
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.data.engines import shared
from ingot.data.engines.beam import _Bundle, _OnDisk
from ingot.data.engines.engine import Advance, Engine, result_of
from ingot.data.engines.local import LocalEngine
from ingot.data.engines.shared import SharedEngine, SharedPath, moved
from ingot.data.ingest import ingest
from tests.data.engines.places import BEAM, SPARK, needs_beam, needs_spark
from tests.data.engines.test_parity import CLEAN, reference, sources
from tests.data.small import everything, recipe
from tests.gcs import Server, serving
from tests.house.source import PROJECT

__all__ = ["reference", "sources"]  # fixtures
URL = "gs://bucket/ingot/runs/run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(shared, "_folders", {})
    with serving(monkeypatch) as running:
        yield running


@dataclass(frozen=True)
class Upper:
    """A stage that reads a file for each task, and writes one in upper case beside it."""

    folder: Path
    more: tuple[dict[str, Path], ...] = field(default_factory=tuple)

    def open(self) -> Callable[[str, Advance], tuple[str, bool, list[str]]]:
        shared_by_all = (self.folder / "in" / "all.txt").read_text()

        def do(task: str, advance: Advance) -> tuple[str, bool, list[str]]:
            text = (self.folder / "in" / f"{task}.txt").read_text()
            (self.folder / "out").mkdir(exist_ok=True)
            (self.folder / "out" / f"{task}.txt").write_text(shared_by_all + text.upper())
            names = sorted(path.name for path in (self.folder / "in").glob("*.txt"))
            return str(self.folder), os.path.exists(self.folder / "in" / "missing.txt"), names

        return do


def make(root: Path) -> Path:
    (root / "data/in").mkdir(parents=True)
    for name in ("all", "a", "b", "c"):
        (root / f"data/in/{name}.txt").write_text(name)
    return root / "data"


def run(engine: Engine, folder: Path, tasks: list[str]) -> list[tuple[str, bool, list[str]]]:
    with Progress("upper", None, "MB", quiet=True) as progress:
        return engine.run(Upper(folder), tasks, progress)


def test_workers_fetch_what_they_open_and_what_they_write_comes_back(
    server: Server, tmp_path: Path
) -> None:
    folder = make(tmp_path / "run")
    engine = SharedEngine(LocalEngine(1), tmp_path / "run", URL)
    done = run(engine, folder, ["a", "b"])
    there = Path(done[0][0])
    assert there != folder
    assert not there.is_relative_to(tmp_path)
    assert done[0][1:] == (False, ["a.txt", "all.txt", "b.txt", "c.txt"])
    assert {path.name: path.read_text() for path in (folder / "out").iterdir()} == {
        "a.txt": "allA",
        "b.txt": "allB",
    }
    assert not (there / "in/c.txt").exists(), "nobody opened it"
    assert {name.split("/")[3] for name in server.objects} == {"engine"}
    engine.close()
    assert not server.objects


def test_a_second_stage_reads_what_the_first_wrote_and_nothing_is_sent_twice(
    server: Server, tmp_path: Path
) -> None:
    folder = make(tmp_path / "run")
    engine = SharedEngine(LocalEngine(1), tmp_path / "run", URL)
    run(engine, folder, ["a", "b"])
    sent = server.counts["insert"]
    (folder / "in/b.txt").write_text("changed")
    run(engine, folder, ["b"])
    assert (folder / "out/b.txt").read_text() == "allCHANGED"
    assert server.counts["insert"] - sent == 3, (
        "the list, the changed file, and what the task wrote"
    )


def test_relative_paths_are_of_the_one_who_asks(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "run")
    monkeypatch.chdir(tmp_path)

    class Moving(LocalEngine):
        def run(self, *arguments: Any) -> Any:
            monkeypatch.chdir("/")  # where the worker stands
            return super().run(*arguments)

    run(SharedEngine(Moving(1), Path("run"), URL), Path("run/data"), ["a"])
    assert (tmp_path / "run/data/out/a.txt").read_text() == "allA"


def test_what_the_replica_has_is_not_sent_again(server: Server, tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    push(tmp_path / "run", URL)
    sent = len(server.written)
    engine = SharedEngine(LocalEngine(1), tmp_path / "run", URL)
    run(engine, folder, ["a"])
    names = [name.split("/", 3)[3].partition("~")[0] for name in server.written[sent:]]
    assert names == [names[0], "engine/files/data/out/a.txt"]
    engine.close()
    assert "ingot/runs/run/REPLICA.json" in server.objects
    assert not any("/engine/" in name for name in server.objects)


def test_a_worker_makes_room(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "KEPT_BYTES", 2)
    folder = make(tmp_path / "run")
    engine = SharedEngine(LocalEngine(1), tmp_path / "run", URL)
    there = Path(run(engine, folder, ["a", "b", "c"])[0][0])
    assert not list((there / "in").glob("a*"))
    assert (folder / "out/c.txt").read_text() == "allC"


def test_an_object_that_was_changed_in_between_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "run")
    engine = SharedEngine(LocalEngine(1), tmp_path / "run", URL)
    publish = engine._publish

    def spoilt() -> str:
        name = publish()
        key = next(key for key in server.objects if "in/a.txt" in key)
        server.write(key, b"other", {}, {})
        return name

    monkeypatch.setattr(engine, "_publish", spoilt)
    with pytest.raises(Failed, match=r"a\.txt.* has 5 bytes"):
        run(engine, folder, ["a"])


def test_a_stage_whose_list_is_gone_sees_no_empty_folder(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SharedEngine(LocalEngine(1), tmp_path / "run", URL)
    monkeypatch.setattr(engine, "_publish", lambda: "engine/stage-gone.json")
    with pytest.raises(Failed, match=r"engine/stage-gone\.json is missing; run the same"):
        run(engine, make(tmp_path / "run"), ["a"])


@dataclass(frozen=True)
class Bundles:
    """What Beam does in one process of a worker: a thread for each bundle, all at once."""

    folder: Path

    def run(self, work: Any, tasks: Sequence[Any], progress: Progress) -> list[Any]:
        outcomes, together = _OnDisk(self.folder), threading.Barrier(len(tasks))

        def bundle(numbered: tuple[int, Any]) -> None:
            together.wait(30)
            _Bundle(work, outcomes)([numbered])

        with ThreadPoolExecutor(len(tasks)) as pool:
            list(pool.map(bundle, enumerate(tasks)))
        return [result_of(pickle.loads(outcomes.get(number))) for number in range(len(tasks))]

    def close(self) -> None: ...


def test_threads_of_one_worker_make_the_same_files(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bucket that is slow to answer, and little room; and each task sends what it wrote
    itself, no more.
    """
    monkeypatch.setattr(shared, "KEPT_BYTES", 2)
    letters, sent = list("abcdefgh"), list[list[str]]()
    send_new = shared._WorkerFolder.send_new

    def noting(folder: Any) -> Any:
        entries = send_new(folder)
        sent.append([entry.path for entry in entries])
        return entries

    monkeypatch.setattr(shared._WorkerFolder, "send_new", noting)
    for name in ("alone", "threads"):
        for letter in letters:
            (make(tmp_path / name) if letter == "a" else tmp_path / name / "data").joinpath(
                f"in/{letter}.txt"
            ).write_text(letter)
    run(LocalEngine(1), tmp_path / "alone/data", letters)
    for kind in ("media", "insert"):
        server.fault(kind, times=1000, delay_s=0.02)
    engine = SharedEngine(Bundles(tmp_path / "outcomes"), tmp_path / "threads", URL)
    assert [names for _, _, names in run(engine, tmp_path / "threads/data", letters)] == [
        sorted(f"{name}.txt" for name in ("all", *letters))
    ] * 8
    assert everything(tmp_path / "threads/data/out") == everything(tmp_path / "alone/data/out")
    assert sorted(sent) == [[f"data/out/{letter}.txt"] for letter in letters]


def test_paths_move_wherever_they_stand_and_others_stay() -> None:
    work = Upper(Path("/run/data"), ({"x": Path("/run/data/y"), "z": Path("/elsewhere")},))
    other = moved(work, Path("/run"), SharedPath("/there"))
    assert other == Upper(
        Path("/there/data"), ({"x": Path("/there/data/y"), "z": Path("/elsewhere")},)
    )
    assert isinstance(other.folder / "in" / "x", SharedPath)
    assert work.folder == Path("/run/data")


def prepared_elsewhere(made: Recipe, tmp_path: Path) -> None:
    """By a command of its own: Spark's processes keep the environment, and with it the bucket's
    address, that they were started with.
    """
    written, place = tmp_path / "recipe.yaml", tmp_path / "place"
    written.write_text(dump_recipe(made), encoding="utf-8")
    place.mkdir()
    command = [sys.executable, "-m", "ingot", "prepare", str(written)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )
    assert done.returncode == 0, done.stderr


def workers_wrote(server: Server) -> bool:
    """The columns came by the bucket: this machine never sends what it makes itself after the last
    stage.
    """
    return any(
        "/engine/files/data/columns.new/train.tokens-00000.bin~" in name for name in server.written
    )


@needs_spark
@pytest.mark.slow  # its short sibling is the batch that really runs, tests/launch/places/test_dataproc.py
@pytest.mark.parametrize(
    "master", ["local[2]", pytest.param("local-cluster[2,1,700]", id="two executors")]
)
def test_spark_with_a_bucket_alone_makes_the_same_files(
    master: str, server: Server, sources: list[Path], tmp_path: Path, reference: dict[str, str]
) -> None:
    """The executors of a cluster run in folders of their own, as on other machines."""
    engine = {
        "kind": "spark",
        "master": master,
        "conf": {**SPARK, "spark.executor.memory": "512m"},
        "shared": URL,
    }
    made = recipe(tmp_path, *sources, data__engine__workers=None, data__engine=engine, **CLEAN)
    ingest(made)
    prepared_elsewhere(made, tmp_path)
    assert everything(made.folder.columns) == reference
    assert workers_wrote(server)
    assert not server.objects, "nothing is left in the bucket"


@pytest.mark.drawn("another engine, the same files")
@needs_beam
def test_beam_with_a_bucket_alone_makes_the_same_files(
    server: Server, sources: list[Path], tmp_path: Path, reference: dict[str, str]
) -> None:
    engine = {"kind": "beam", "python": str(BEAM), "shared": URL}
    made = recipe(tmp_path, *sources, data__engine__workers=None, data__engine=engine, **CLEAN)
    ingest(made)
    prepared_elsewhere(made, tmp_path)
    assert everything(made.folder.columns) == reference
    assert workers_wrote(server)
    assert not server.objects
