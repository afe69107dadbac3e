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
from ingot.launch.meeting import EXIT, HERE, Meeting
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
    counted, real = Counter[str](), Meeting._read

    def counting(self: Meeting, name: str) -> Any:
        counted[name] += 1
        return real(self, name)

    monkeypatch.setattr(Meeting, "_read", counting)
    return counted


def test_who_waits_for_all_reads_each_note_once(
    place: str, read: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.launch.meeting.LOOK_BUCKET_S", 0.01)
    theirs, ours, left = Meeting(place), Meeting(place), iter(range(NODES))

    def one_more_comes() -> None:
        theirs.leave(next(left), HERE, host="n")

    found = ours.wait_for(HERE, NODES, seconds=60, look_s=0.0, look=one_more_comes)
    assert sorted(found) == list(range(NODES))
    assert read == {f"here-{node}.json": 1 for node in range(NODES)}


def test_a_note_that_is_replaced_is_read_again(place: str, read: Counter[str]) -> None:
    theirs, ours = Meeting(place), Meeting(place)
    for code in (1, 0):
        theirs.leave(3, EXIT, code=code)
        for _ in range(2):
            assert ours.notes(EXIT)[3]["code"] == code
    assert read == {"exit-3.json": 2}


def test_who_does_not_come_is_named_and_what_to_do(tmp_path: Path) -> None:
    meeting = Meeting(str(tmp_path))
    meeting.leave(0, HERE)
    with pytest.raises(
        Failed, match=r"node 1, 2 did not come to .* within 0\.1 s; .*longer launch\.start_s"
    ):
        meeting.wait_for(HERE, 3, seconds=0.1)
