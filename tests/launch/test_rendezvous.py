"""Notes of the nodes of one start, in a folder and in a bucket: read once, read anew when they are
replaced, and waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed
from ingot.launch.rendezvous import ARRIVED, EXIT, Rendezvous
from tests.gcs import serving

NODES = 20


@pytest.fixture(params=["folder", "bucket"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path)
        return
    with serving(monkeypatch):
        yield "gs://bucket/runs/one/jobs/train-1"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each note is read."""
    counted, real = Counter[str](), Rendezvous._read

    def counting(self: Rendezvous, name: str) -> Any:
        counted[name] += 1
        return real(self, name)

    monkeypatch.setattr(Rendezvous, "_read", counting)
    return counted


def test_who_waits_for_all_reads_each_note_once(
    place: str, read: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.launch.rendezvous.BUCKET_POLL_S", 0.01)
    theirs, ours, left = Rendezvous(place), Rendezvous(place), iter(range(NODES))

    def one_more_comes() -> None:
        theirs.leave(next(left), ARRIVED, host="n")

    found = ours.wait_for(ARRIVED, NODES, timeout_s=60, poll_s=0.0, check=one_more_comes)
    assert sorted(found) == list(range(NODES))
    assert read == {f"here-{node}.json": 1 for node in range(NODES)}


def test_a_note_that_is_replaced_is_read_again(place: str, read: Counter[str]) -> None:
    theirs, ours = Rendezvous(place), Rendezvous(place)
    for code in (1, 0):
        theirs.leave(3, EXIT, code=code)
        for _ in range(2):
            assert ours.notes(EXIT)[3]["code"] == code
    assert read == {"exit-3.json": 2}


def test_who_does_not_come_is_named_and_what_to_do(tmp_path: Path) -> None:
    meeting = Rendezvous(str(tmp_path))
    meeting.leave(0, ARRIVED)
    with pytest.raises(
        Failed, match=r"node 1, 2 did not come to .* within 0\.1 s; .*longer launch\.start_s"
    ):
        meeting.wait_for(ARRIVED, 3, timeout_s=0.1)
