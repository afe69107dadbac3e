"""Google's own client against a server of the tests: all pages come, one after the other, and
faults are told in words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.cloud import bigquery
from ingot.cloud.bigquery import EMULATOR, PAGE_ROWS, query_rows
from tests.cloud.bigquery_server import PAGE, Server
from tests.lazy import require

require("google.cloud.bigquery", reason="google-cloud-bigquery is not installed")
ROWS = [{"text": f"row {number}", "lang": "en" if number % 2 else None} for number in range(10)]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(
        rows: list[dict[str, Any]], fault: tuple[int, str] | None = None, *how: Any
    ) -> Server:
        servers.append(Server(rows, fault, *how))
        monkeypatch.setenv(EMULATOR, servers[-1].address)
        return servers[-1]

    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "p")
    yield start
    for server in servers:
        server.server_close()


def test_all_pages_one_by_one(serve: Callable[..., Server]) -> None:
    server = serve(ROWS)
    rows = query_rows("SELECT text, lang FROM d.t")
    first = [next(rows) for _ in range(PAGE)]
    assert server.pages == 1, "the next page is asked for when it is needed"
    assert first + list(rows) == ROWS
    assert server.queries == ["SELECT text, lang FROM d.t"]
    assert server.pages == 4, "the service ends a page where it likes"
    assert max(server.page_sizes) == PAGE_ROWS


def test_the_project_that_is_given_pays_else_that_of_the_environment(
    serve: Callable[..., Server],
) -> None:
    server = serve(ROWS)
    list(query_rows("SELECT 1", project="mine"))
    list(query_rows("SELECT 1"))
    assert server.projects == ["mine", "p"]


def test_no_rows(serve: Callable[..., Server]) -> None:
    serve([])
    assert list(query_rows("SELECT 1")) == []


def test_a_wrong_query_is_told(serve: Callable[..., Server]) -> None:
    serve(ROWS, (400, "Syntax error: Unexpected keyword FORM at [1:10]"))
    with pytest.raises(
        WrongInput, match=r"BigQuery refuses the query \(400: .*Unexpected keyword FORM at \[1:10\]"
    ):
        list(query_rows("SELECT * FORM t"))
    serve(ROWS, (403, "Access Denied: Table d.t"))
    with pytest.raises(WrongInput, match=r"403: .*Access Denied"):
        list(query_rows("SELECT * FROM d.t"))


@pytest.mark.parametrize("late", [None, "rows", "job"])
def test_a_result_that_is_too_large_is_told_with_the_way_out(
    late: str | None, serve: Callable[..., Server]
) -> None:
    """It is known only when the query has run, and been paid for."""
    serve(
        ROWS,
        (
            403,
            (
                "Response too large to return. Consider specifying a destination table in your job"
                " configuration."
            ),
        ),
        "responseTooLarge",
        late,
    )
    with pytest.raises(
        WrongInput,
        match=(
            r"larger than BigQuery hands out \(10 GB, .*EXPORT DATA .*give gs://\S+\.parquet as the"
            r" source$"
        ),
    ) as told:
        list(query_rows("SELECT text FROM d.t"))
    assert "\n" not in str(told.value)


def test_a_service_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigquery, "RETRY_S", 0.5)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "p")
    monkeypatch.setenv(EMULATOR, "http://127.0.0.1:9")
    with pytest.raises(Failed, match="BigQuery cannot be reached or broke down"):
        list(query_rows("SELECT 1"))


def test_no_credentials_and_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EMULATOR, raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    with pytest.raises(
        WrongInput,
        match=r"no credentials for BigQuery .*key\.json.*gcloud auth application-default login",
    ):
        list(query_rows("SELECT 1"))
    monkeypatch.setitem(sys.modules, "google.cloud.bigquery", None)
    with pytest.raises(WrongInput, match=r"pip install 'ingot\[gcp\]'"):
        list(query_rows("SELECT 1"))
