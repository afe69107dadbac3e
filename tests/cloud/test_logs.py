"""Entries of Cloud Logging, asked for piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.cloud.clients import GoogleClients
from ingot.cloud.logs import read_entries
from ingot.config.sections.deployment import Cloud
from tests.fakes import google, vertex_jobs

FILTER = 'resource.type="ml_job" AND resource.labels.job_id="7"'


@pytest.fixture
def place() -> Iterator[tuple[GoogleClients, vertex_jobs.State]]:
    server = google.Server()
    try:
        yield (
            GoogleClients(Cloud(project="proj", endpoint=server.address)),
            vertex_jobs.install(server),
        )
    finally:
        server.server_close()


def test_each_entry_is_told_once_in_order_over_several_pages(
    place: tuple[GoogleClients, vertex_jobs.State],
) -> None:
    google_, state = place
    assert read_entries(google_, FILTER) == ([], "")
    for number in range(5):
        state.say("7", f"line {number}", at=f"2026-11-22T04:00:0{number}.5Z")
    state.say("8", "of another job")
    first, after = read_entries(google_, FILTER)
    assert [line.text for line in first] == [f"line {number}" for number in range(5)]
    assert first[0].labels["task_name"] == "workerpool0-0"
    state.say("7", "more", at="2026-11-22T04:01:00Z")
    again, after = read_entries(google_, FILTER, after)
    assert [line.text for line in again] == ["more"]
    assert read_entries(google_, FILTER, after)[0] == []


def test_an_entry_that_comes_late_is_not_lost(
    place: tuple[GoogleClients, vertex_jobs.State],
) -> None:
    google_, state = place
    state.say("7", "second", at="2026-11-22T04:00:20.123456789Z")
    _, after = read_entries(google_, FILTER)
    state.say("7", "first", at="2026-11-22T04:00:10Z")
    state.say("7", "far too late", at="2026-11-22T03:00:00Z")
    late, after = read_entries(google_, FILTER, after)
    assert [line.text for line in late] == ["first"]
    assert read_entries(google_, FILTER, after)[0] == []


@pytest.mark.drawn
@pytest.mark.parametrize("apart", [1, 0])
def test_more_in_one_second_than_a_question_holds_does_not_freeze_it(
    apart: int, place: tuple[GoogleClients, vertex_jobs.State]
) -> None:
    """12,000 entries, a few microseconds apart or all at once, and one more a second later."""
    google_, state = place
    state.page = 1000
    for number in range(12_000):
        state.say("7", str(number), at=f"2026-11-22T04:00:00.{number * 10 * apart:06d}Z")
    told, after = read_entries(google_, FILTER)
    assert len(told) == 10_000
    state.say("7", "one more", at="2026-11-22T04:00:01Z")
    for _ in range(3):
        more, after = read_entries(google_, FILTER, after)
        told += more
    texts = [line.text for line in told]
    assert texts[-1] == "one more"
    assert len(set(texts)) == len(texts)
    assert len(texts) == (12_001 if apart else 10_001), (
        "of those at one moment what no question holds is given up"
    )
    state.say("7", "and another", at="2026-11-22T04:00:02Z")
    assert [line.text for line in read_entries(google_, FILTER, after)[0]] == ["and another"]


def test_payloads_of_every_kind_become_text(place: tuple[GoogleClients, vertex_jobs.State]) -> None:
    google_, state = place
    state.say("7", "", at="2026-11-22T04:00:00Z", textPayload="plain\n")
    state.say("7", "", at="2026-11-22T04:00:01Z", jsonPayload={"message": "said"})
    state.say("7", "", at="2026-11-22T04:00:02Z", jsonPayload={"step": 3})
    assert [line.text for line in read_entries(google_, FILTER)[0]] == [
        "plain",
        "said",
        '{"step": 3}',
    ]


def test_a_missing_right_and_too_many_questions_are_told_in_one_line(
    place: tuple[GoogleClients, vertex_jobs.State],
) -> None:
    google_, state = place

    def refuse(code: int, message: str) -> None:
        def handler(*_: object) -> dict[str, object]:
            raise google.Refused(code, message)

        state.server.raw[:] = []
        state.server.on_path("post", "/v2/entries:list", handler)

    refuse(403, "Permission denied for all log views")
    with pytest.raises(
        WrongInput, match=r"could not read Cloud Logging: .*Permission denied.*Logs Viewer"
    ):
        read_entries(google_, FILTER)
    refuse(429, "Quota exceeded for quota metric 'Read requests'")
    with pytest.raises(Failed, match="Quota exceeded"):
        read_entries(google_, FILTER)
