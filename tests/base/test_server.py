"""What a server is started with."""

from __future__ import annotations

import sys

import pytest

from ingot.base.environment import RESOLVED_VARIABLE
from ingot.base.server import ask, running_server

SERVER = """
import http.server, json, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.do_GET()
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
