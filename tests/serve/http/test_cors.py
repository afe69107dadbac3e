"""Pages of other origins: none by default, those of `serve.cors` where it is set, also with a key."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from ingot.config.sections.deployment import Serve
from tests.serve.running import Running, running

ASKING = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-arch,x-stainless-lang",
}
"""As OpenAI's JavaScript client has a browser ask."""


def may(server: Running, origin: str) -> bool:
    """Whether a browser would let a page of this origin ask for a completion with a key."""
    with server.client() as client:
        answer = client.options("/v1/completions", headers={"Origin": origin, **ASKING})
        read = client.get("/v1/models", headers={"Origin": origin})
    allowed = [reply.headers.get("access-control-allow-origin") for reply in (answer, read)]
    assert len(set(allowed)) == 1, "what may be asked may be read"
    return answer.status_code == 200 and allowed[0] in (origin, "*")


def test_only_the_named_origins_with_a_key(server: Running, folder: Path) -> None:
    assert not may(server, "https://app.example.com")
    origins = ["https://app.example.com", "http://127.0.0.1:7000"]
    with running(folder, key="a key", cors=origins) as open_to_some:
        assert all(may(open_to_some, origin) for origin in origins)
        assert not may(open_to_some, "https://app.example.com.evil.org")
        with open_to_some.client() as client:
            assert client.get("/docs").status_code == 200
            assert "/v1/chat/completions" in client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("origin", ["app.example.com", "https://app.example.com/", "http://"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="is not an origin"):
        Serve(cors=(origin,))
