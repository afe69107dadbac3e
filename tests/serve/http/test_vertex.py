"""Vertex AI's contract: its environment, its routes, its bodies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from ingot.base.errors import Failed, WrongInput
from ingot.config.sections.deployment import Serve
from ingot.serve.http.listen import fetched_model_folder, listen_address
from ingot.serve.native.model import LoadedModel, load
from tests.serve.conftest import AIP
from tests.serve.http.test_openai import expected
from tests.serve.running import Running


def test_predictions(strict: Running, loaded: LoadedModel) -> None:
    """Instances are texts or mappings; numbers may be floats, as protocol buffers send them."""
    prompts = ["the lazy", "Straße", "box"]
    wanted = [
        expected(loaded, loaded.tokenizer.encode_prompt(prompt), 12).text for prompt in prompts
    ]
    body = {
        "instances": [prompts[0], {"prompt": prompts[1]}, prompts[2]],
        "parameters": {
            "max_tokens": 12.0,
            "temperature": 0.0,
            "seed": 3.0,
            "stop_token_ids": [loaded.model.config.vocab_size - 1.0],
        },
    }
    with strict.client() as client:
        assert client.post(AIP["AIP_PREDICT_ROUTE"], json=body).json() == {"predictions": wanted}
        assert client.get(AIP["AIP_HEALTH_ROUTE"]).status_code == 200
        assert client.post("/predict", json=body).status_code == 404


def test_without_its_environment_the_routes_are_plain(server: Running, loaded: LoadedModel) -> None:
    with server.client() as client:
        answer = client.post("/predict", json={"instances": ["the"]})
        assert answer.json() == {
            "predictions": [expected(loaded, loaded.tokenizer.encode_prompt("the"), 64).text]
        }
        assert client.get("/health").json() == {"status": "ok", "model": "tiny"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"instances": []}, "`instances`"),
        ({"instances": [{"text": "the"}]}, "prompt` is missing"),
        ({"instances": [{"messages": []}]}, "instances.0.prompt` is missing"),
        ({"instances": [5]}, '`instances.0`: give a text, or an object such as {"prompt": "..."}'),
        (
            {"instances": ["the"], "parameters": {"max_tokens": 2.5}},
            "`parameters.max_tokens` is 2.5",
        ),
        (
            {"instances": ["the"], "parameters": {"max_tokens": 9000}},
            "max_tokens 9000 is over this server's limit of 8000",
        ),
        ({"instances": ["the"], "parameters": {"beams": 2}}, "`parameters.beams` is not known"),
        ({"instances": ["the"] * 4}, "4 prompts in one request; this server takes at most 3"),
        ({"prompt": "the"}, "`instances` is missing"),
    ],
)
def test_refusals(strict: Running, body: dict[str, Any], words: str) -> None:
    with strict.client() as client:
        response = client.post(AIP["AIP_PREDICT_ROUTE"], json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_the_port_comes_from_the_environment() -> None:
    settings = Serve(port=8000)
    assert listen_address(settings, {}) == ("127.0.0.1", 8000)
    assert listen_address(settings, {"AIP_HTTP_PORT": ""}) == ("127.0.0.1", 8000)
    assert listen_address(settings, {"AIP_HTTP_PORT": "8080"}) == ("0.0.0.0", 8080)
    assert listen_address(Serve(host="10.1.2.3"), {"AIP_HTTP_PORT": "8080"}) == ("10.1.2.3", 8080)
    for wrong in ("http", "-1", "70000"):
        with pytest.raises(WrongInput, match=r"\$AIP_HTTP_PORT"):
            listen_address(settings, {"AIP_HTTP_PORT": wrong})


def test_the_model_comes_from_its_storage(folder: Path, tmp_path: Path) -> None:
    storage = fsspec.filesystem("memory")
    storage.put(str(folder) + "/", "/vertex/artifacts/model/", recursive=True)
    with fetched_model_folder(
        tmp_path / "elsewhere", {"AIP_STORAGE_URI": "memory://vertex/artifacts/model"}
    ) as fetched:
        assert {path.name for path in fetched.iterdir()} == {path.name for path in folder.iterdir()}
        assert json.loads((fetched / "config.json").read_text()) == json.loads(
            (folder / "config.json").read_text()
        )
        load(fetched)
    assert not fetched.exists()
    with fetched_model_folder(tmp_path, {"AIP_STORAGE_URI": ""}) as given:
        assert given == tmp_path
    with fetched_model_folder(tmp_path, {"AIP_STORAGE_URI": str(folder)}) as given:
        assert given == folder


def test_storage_writes_nothing_outside_of_the_models_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of an object's name are no folders: `..` is one like any other."""
    storage = fsspec.filesystem("memory")
    for name in ("/vertex/climbs/config.json", "/vertex/climbs/../up"):
        monkeypatch.setitem(storage.store, name, MemoryFile(storage, name, b"{}"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with (
        pytest.raises(WrongInput, match=r"climbs/\.\./up, which would lie outside"),
        fetched_model_folder(Path("x"), {"AIP_STORAGE_URI": "memory://vertex/climbs"}),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_storage_that_holds_nothing_or_cannot_be_read(tmp_path: Path) -> None:
    with (
        pytest.raises(WrongInput, match=r"memory://vertex/empty holds no file"),
        fetched_model_folder(tmp_path, {"AIP_STORAGE_URI": "memory://vertex/empty"}),
    ):
        pass
    with (
        pytest.raises(Failed, match=r"nosuch://a/b cannot be read"),
        fetched_model_folder(tmp_path, {"AIP_STORAGE_URI": "nosuch://a/b"}),
    ):
        pass
