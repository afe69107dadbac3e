"""What a served model is called: a registered one by its name, with its version or without."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from ingot.config.sections.deployment import Serve
from ingot.serve.http.middleware import ServerMetrics
from ingot.serve.http.service import Service
from ingot.serve.native.engine import ServingEngine
from ingot.serve.native.model import LoadedModel
from ingot.serve.server import create_app


def asked(loaded: LoadedModel, name: str, version: int | None, model: str) -> list[Any]:
    """The list of models, the one of that name, and the answer of it."""
    metrics = ServerMetrics()
    engine = ServingEngine(loaded.worker(1), metrics, max_batch=1, max_queue=1)
    engine.start()
    app = create_app(Service(name, loaded, engine, Serve(), version), metrics, key=None, environ={})

    async def story() -> list[Any]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://a"
        ) as client:
            body = {"model": model, "prompt": "the", "max_tokens": 2}
            return [
                await client.get("/v1/models"),
                await client.get(f"/v1/models/{model}"),
                await client.post("/v1/completions", json=body),
            ]

    try:
        return asyncio.run(story())
    finally:
        engine.stop()


@pytest.mark.parametrize("name", ["fox", "fox@v2", "fox@2"])
@pytest.mark.parametrize("model", ["fox", "fox@v2", "fox@2"])
def test_a_version_answers_to_each_of_its_names(loaded: LoadedModel, name: str, model: str) -> None:
    all_, one, answer = asked(loaded, name, 2, model)
    (listed,) = all_.json()["data"]
    assert (listed["id"], listed["version"]) == (name, 2)
    assert one.json() == listed
    assert (answer.status_code, answer.json()["model"]) == (200, name)


@pytest.mark.parametrize("model", ["fox@v1", "fox@v22", "fo", "fox@", "hare@v2"])
def test_another_version_is_another_model(loaded: LoadedModel, model: str) -> None:
    _, one, answer = asked(loaded, "fox", 2, model)
    for response in (one, answer):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "model_not_found")
        assert error["message"].startswith(
            f"model `{model}` is not served here, only `fox`, version 2;"
        )


def test_a_folder_has_no_version(loaded: LoadedModel) -> None:
    all_, _, answer = asked(loaded, "a@b", None, "a")
    (listed,) = all_.json()["data"]
    assert (listed["id"], listed["version"], answer.status_code) == ("a@b", None, 404)
