"""Answers of served models, as they are passed on to the playground."""

from __future__ import annotations

import asyncio
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ingot.base.errors import WrongInput
from ingot.ui.models import ServedModels, models_router
from tests.loopback import Loopback

VECTOR = b'{"data":[{"embedding":[0.1]}]}'


class Model(BaseHTTPRequestHandler):
    """Answers with a vector, or hangs up in the midst of it when it is told `torn`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        torn = self.rfile.read(int(self.headers["Content-Length"])) == b"torn"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(VECTOR)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(VECTOR[:20] if torn else VECTOR)

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""


def test_an_answer_that_is_not_streamed_is_passed_on_whole_or_is_an_error() -> None:
    with Loopback(Model) as model:
        app = FastAPI()
        app.include_router(models_router(ServedModels([model.address])))

        async def ask(body: bytes) -> httpx.Response:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://ui"
            ) as client:
                return await client.post("/api/models/0/embeddings", content=body)

        async def both() -> tuple[httpx.Response, httpx.Response]:
            return await ask(b"whole"), await ask(b"torn")

        whole, torn = asyncio.run(both())
        assert (whole.status_code, whole.content) == (200, VECTOR)
        assert whole.headers["content-type"] == "application/json"
        line = f"the answer of {model.address} broke off (RemoteProtocolError)"
        assert (torn.status_code, torn.json()) == (502, {"error": line})


def test_models_behind_https_are_told_by_the_certificates_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    ServedModels(["http://localhost:8000"])
    with pytest.raises(WrongInput, match=r"\$SSL_CERT_FILE names .*; mend or unset it"):
        ServedModels(["http://localhost:8000", "https://localhost:8443"])
