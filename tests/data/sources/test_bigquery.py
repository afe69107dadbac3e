"""A query as a source of documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.cloud.bigquery import EMULATOR
from ingot.data.ingest import ingest
from ingot.data.raw.store import open_raw
from ingot.data.sources.find import source_stamps
from tests.cloud.bigquery_server import Server
from tests.data.small import recipe, sentences, write_jsonl
from tests.data.test_ingest import documents
from tests.lazy import require

require("google.cloud.bigquery", reason="google-cloud-bigquery is not installed")
SQL = "bigquery:SELECT body FROM d.t ORDER BY id"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server([{"body": text} for text in ["one", None, "", "four", *sentences(10)]])
    monkeypatch.setenv(EMULATOR, server.address)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "p")
    yield server
    server.server_close()


def test_rows_become_documents(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    small = recipe(
        tmp_path,
        {"source": SQL, "text": "body", "weight": 3.0},
        write_jsonl(tmp_path / "a.jsonl", ["x"]),
    )
    ingest(small)
    source = open_raw(small).splits["train"][0]
    assert (source.documents, source.bad) == (12, {"null `body`": 1, "empty text": 1})
    found = documents(small.folder.raw)
    name = next(iter(found)).partition(":")[0]
    assert [found[f"{name}:{row}"] for row in (1, 4)] == ["one", "four"]
    told = capsys.readouterr().err
    assert "changed tables behind a bigquery: source are not seen" in told
    assert "has no ORDER BY" not in told
    ingest(recipe(tmp_path, {"source": "bigquery:SELECT body FROM t", "text": "body"}))
    assert "has no ORDER BY" in capsys.readouterr().err


def test_the_recipes_project_pays_and_is_no_part_of_the_identity(
    tmp_path: Path, server: Server
) -> None:
    theirs, ours = (
        recipe(tmp_path, {"source": SQL, "text": "body"}),
        recipe(tmp_path, {"source": SQL, "text": "body"}, cloud__project="ours"),
    )
    ingest(theirs)
    ingest(ours)
    assert server.projects == ["p", "ours"]
    assert source_stamps(theirs) == source_stamps(ours)
    open_raw(theirs, unchanged=True)


def test_the_query_is_its_identity(tmp_path: Path, server: Server) -> None:
    one, two = (
        source_stamps(recipe(tmp_path, f"bigquery:SELECT {column} FROM t")) for column in ("a", "b")
    )
    assert one != two
    assert not server.queries, "nothing is asked before it is read"


def test_a_missing_column(tmp_path: Path, server: Server) -> None:
    with pytest.raises(
        WrongInput, match="the result of the query has no column `text`; it has body"
    ):
        ingest(recipe(tmp_path, SQL))
