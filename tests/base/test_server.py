"""What a server is started with."""

from __future__ import annotations

import sys
from pathlib import Path

import certifi
import httpx
import pytest

from ingot.base import server
from ingot.base.environment import RESOLVED_VARIABLE
from ingot.base.errors import Failed, WrongInput
from ingot.base.server import ask, environment_for, running_server

SERVER = """
import http.server, json, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.do_GET()
        if self.path == "/page":
            self.wfile.write(b"<html>")
            return
        self.wfile.write(json.dumps(dict(os.environ)).encode())

    def log_message(self, *words):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"serving its environment at http://127.0.0.1:{server.server_port}", file=sys.stderr)
server.serve_forever()
"""


def test_a_server_is_set_by_its_command_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_HTTP_PORT", "1")
    monkeypatch.setenv("HF_TOKEN", "hush")
    with running_server([sys.executable, "-c", SERVER]) as url:
        variables = ask(url, "/", {})
    assert RESOLVED_VARIABLE in variables, "what was typed over `.env` would be set once more"
    assert "AIP_HTTP_PORT" not in variables
    assert variables["HF_TOKEN"] == "hush"


def test_no_proxy_is_asked_for_a_server_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot reach it, and would read what it is asked and the key."""
    monkeypatch.setattr(server, "START_TIMEOUT_S", 20.0)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with running_server([sys.executable, "-c", SERVER]) as url:
        assert ask(url, "/", {})["http_proxy"]
        with pytest.raises(Failed, match=r"answered no JSON on /page \(<html>\)"):
            ask(url, "/page", {})


@pytest.mark.parametrize(
    ("url", "heeds"),
    [
        ("http://127.0.0.1:8000", False),
        ("http://localhost/v1", False),
        ("http://[::1]:80", False),
        ("http://10.0.0.7:8000", True),
        ("https://scores.example.org", True),
    ],
)
def test_other_servers_may_be_behind_a_proxy(url: str, heeds: bool) -> None:
    assert environment_for(url)["trust_env"] is heeds


def test_a_server_of_this_machine_shows_a_certificate_of_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = Path(certifi.where()).read_text(encoding="utf-8")
    end = "-----END CERTIFICATE-----\n"
    (tmp_path / "own.pem").write_text(certificates.partition(end)[0] + end, encoding="utf-8")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "own.pem"))
    verify = environment_for("https://localhost:8443")["verify"]
    assert len(verify.get_ca_certs()) == 1


@pytest.mark.parametrize("host", ["localhost", "scores.example.org"])
def test_a_file_of_certificates_that_is_none_is_named(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "none.pem"
    monkeypatch.setenv("SSL_CERT_FILE", str(named))
    for _ in ("is not there", "is something else"):
        with pytest.raises(WrongInput, match=rf"\$SSL_CERT_FILE names {named}, which is no file"):
            ask(f"https://{host}:1", "/", {})
        named.write_text("no certificate")
    plain = environment_for(f"http://{host}:1")
    with httpx.Client(**plain):
        assert plain["verify"].cert_store_stats()["x509"] == 0, "it needs none"
