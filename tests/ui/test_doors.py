"""Who is let in, and what nobody sees."""

from __future__ import annotations

import dataclasses
import http.client
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from ingot.base.errors import WrongInput
from ingot.base.reports import EvaluationReport, read_report
from ingot.registry.local import LocalRegistry
from ingot.ui.runs import RunsFolder
from tests.patience import PATIENCE_S
from tests.report.made_up import made_up_run
from tests.ui.serving import Shown, showing

OUTSIDE = "secret outside of the runs"


def test_only_this_server_s_names_are_answered(shown: Shown) -> None:
    port = httpx.URL(shown.url).port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}"):
        assert shown.get("/api/runs", Host=host).status_code == 200
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "[::2]"):
        refused = shown.get("/api/runs", Host=host)
        assert refused.status_code == 403, host
        assert "runs" not in refused.json()
    assert shown.get("/", Host="evil.example").status_code == 403


def test_other_origins_are_refused(shown: Shown) -> None:
    own = shown.url
    assert shown.get("/api/runs", Origin=own).status_code == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "https://localhost"):
        assert shown.get("/api/runs", Origin=origin).status_code == 403, origin
    for site in ("cross-site", "same-site"):
        assert shown.get("/api/runs", **{"Sec-Fetch-Site": site}).status_code == 403
        # A link from elsewhere may lead here.
        assert shown.get("/", **{"Sec-Fetch-Site": site}).status_code == 200
    answer = shown.get("/api/runs", Origin=own)
    assert "access-control-allow-origin" not in answer.headers
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_it_only_shows_unless_told(shown: Shown) -> None:
    assert shown.token is None
    for path in ("/api/registry/promote", "/api/registry/rollback", "/api/runs"):
        refused = shown.post(path, {"name": "first"})
        assert refused.status_code == 403
        assert "--allow-actions" in refused.json()["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/%2e%2e/__init__.py",
        "/playground/..%2f..%2fserver.py",
        "/static//etc/passwd",
        "/..%2f..%2f..%2fetc/passwd",
    ],
)
def test_no_path_leads_out_of_the_package_s_files(shown: Shown, path: str) -> None:
    connection = http.client.HTTPConnection(
        httpx.URL(shown.url).netloc.decode(), timeout=PATIENCE_S
    )
    connection.request("GET", path)  # as it stands, which httpx would tidy
    answer = connection.getresponse()
    assert answer.status in (404, 405), answer.read()
    connection.close()


@pytest.mark.parametrize(
    "name", ["../outside", "..", "/etc", "first/../../outside", "", "first/reports", "%2e%2e"]
)
def test_a_run_is_one_that_was_found(shown: Shown, runs: Path, name: str) -> None:
    outside = runs.parent / "outside"
    if not outside.exists():
        made_up_run(runs.parent, "outside", steps=5)
    for route in ("run", "curves", "compare", "data"):
        with shown.client() as client:
            answer = client.get(f"/api/{route}", params={"run": name, "key": "train/loss"})
        assert answer.status_code == 404, (route, answer.text)


def linked_out(runs: Path, link: str) -> None:
    """A run `linked` of which one file, or a folder, is a link to a place outside of `runs`."""
    place, outside = made_up_run(runs, "linked", steps=5).root / link, runs.parent / "outside"
    if place.is_dir():
        place.rename(outside)
    else:
        outside.write_text(f"name: {OUTSIDE}\n")
        place.unlink()
    place.symlink_to(outside)


@pytest.mark.parametrize(
    "link", ["recipe.yaml", "reports/gate.json", "metrics.jsonl", "model/ingot.json", "reports"]
)
def test_links_out_of_the_folder_are_not_followed(tmp_path: Path, link: str) -> None:
    linked_out(tmp_path / "runs", link)
    made_up_run(tmp_path / "runs", "whole", steps=5)
    runs = RunsFolder(tmp_path / "runs")
    rows = {row["id"]: row for row in runs.rows()}
    assert rows["linked"]["state"] == "refused"
    assert "a link out of" in rows["linked"]["error"]
    assert rows["whole"]["state"] != "refused"
    for read in (runs.view, runs.metrics, runs.tokens_a_step):
        with pytest.raises(WrongInput, match="a link out of"):
            read("linked")


def test_neither_links_nor_secrets_are_shown(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    linked_out(runs, "recipe.yaml")
    made_up_run(tmp_path / "elsewhere", "other", steps=5)
    own = made_up_run(runs, "own", steps=5)
    with own.recipe.open("a") as stream:
        stream.write("launch:\n  environment: {HF_TOKEN: hf_verysecret}\n")
    (runs / "out").symlink_to(tmp_path / "elsewhere" / "other")
    (runs / "in").symlink_to(runs / "own")
    with showing(runs) as server:
        rows = server.get("/api/runs").json()["runs"]
        assert {row["id"] for row in rows} == {"own", "in", "linked"}
        assert server.get("/api/run?run=out").status_code == 404
        for route in ("run", "curves", "compare", "data"):
            answer = server.get(f"/api/{route}?run=linked&key=train/loss")
            assert answer.status_code == 409, route
            assert OUTSIDE not in answer.text
        for path in ("/api/run?run=own", "/api/compare?run=own", "/api/runs"):
            answer = server.get(path)
            assert answer.status_code == 200
            assert "hf_verysecret" not in answer.text


def test_acting_needs_the_token(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    registry = LocalRegistry(runs / "registry.sqlite")
    for number in (1, 2):
        run = made_up_run(runs, f"run{number}", steps=5, bits=2.0 + number / 10)
        report = read_report(run.reports / "evaluate.json")
        registry.add("python", run.model, _other(report, number), {"run": run.root.name})
    registry.point("python", 1, "first")
    with showing(runs, "--allow-actions") as server:
        assert server.token is not None
        body = {"name": "python", "version": 2}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": server.token}):
            assert server.post("/api/registry/promote", body, **headers).status_code == 401
        token = {"Authorization": f"Bearer {server.token}"}
        evil = {**token, "Origin": "http://evil.example"}
        assert server.post("/api/registry/promote", body, **evil).status_code == 403
        assert _live(server) == 1
        assert server.post("/api/registry/promote", body, **token).json() == {"live": 2}
        assert _live(server) == 2
        back = server.post("/api/registry/rollback", {"name": "python"}, **token)
        assert back.json() == {"live": 1}
        assert _live(server) == 1
        # Somebody else made version 2 live since this page was drawn.
        registry.point("python", 2, "gate: better")
        for path, asked in (("rollback", {}), ("promote", {"version": 1})):
            stale = {"name": "python", "instead_of": 1, **asked}
            refused = server.post(f"/api/registry/{path}", stale, **token)
            assert refused.status_code == 409
            assert "v2 is live as python by now" in refused.json()["error"]
        assert _live(server) == 2
        assert server.post(
            "/api/registry/rollback", {"name": "python", "instead_of": 2}, **token
        ).json() == {"live": 1}
        unknown = server.post("/api/registry/promote", {**body, "version": 9}, **token)
        assert unknown.status_code == 409
        assert "no version 9" in unknown.json()["error"]
        (name,) = server.get("/api/registry").json()["names"]
        assert [version["number"] for version in name["versions"]] == [2, 1]


def _other(report: EvaluationReport, number: int) -> EvaluationReport:
    return dataclasses.replace(report, model_hash=f"hash{number}")


def _live(server: Shown) -> int:
    (name,) = server.get("/api/registry").json()["names"]
    return int(name["live"])


def test_on_a_network_reading_needs_the_token_too(runs: Path) -> None:
    with showing(runs, "--host", "0.0.0.0") as server:
        assert server.token is not None
        assert server.get("/").status_code == 200
        assert server.get("/api/runs").status_code == 401
        token = {"Authorization": f"Bearer {server.token}"}
        assert server.get("/api/runs", **token).status_code == 200
        assert server.get("/api/runs", **token, Host="evil.example").status_code == 403
        for path in ("/openapi.json", "/docs", "/redoc"):
            assert server.get(path).status_code == 404
        assert server.get("/api/runs", **token, Host="10.1.2.3:80").status_code == 200


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ingot", "ui", str(tmp_path / "none")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 2
    assert done.stderr.strip() == (
        f"error: {tmp_path}/none is no folder; give the folder that runs lie in"
    )
