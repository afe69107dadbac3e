from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import RemoteEntryNotFoundError

from ingot.base.errors import Failed, WrongInput
from ingot.base.hub import ask_tokenizer, fetch_config, fetch_model

fetch_tokenizer = partial(fetch_model, tokenizer_only=True)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cached folder of `org/tiny`, of which nothing but the configuration has been fetched, and
    no network.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_a_model_in_the_cache_is_found_without_a_network_and_another_is_named(cached: Path) -> None:
    with pytest.raises(Failed, match="hf:org/tiny cannot be fetched"):
        fetch_model("org/tiny")
    (cached / "model.safetensors").write_bytes(b"")
    assert fetch_model("org/tiny") == cached
    with pytest.raises(Failed, match=r"org/other cannot .*; check the network, or give a folder"):
        fetch_model("org/other")


@pytest.mark.parametrize("fetch", [fetch_tokenizer, ask_tokenizer])
@pytest.mark.parametrize(
    "files",
    [
        ["tokenizer.json", "tokenizer_config.json"],
        ["tokenizer.model"],
        ["spiece.model"],
        ["vocab.json", "merges.txt"],
    ],
)
def test_a_tokenizer_in_the_cache_is_found_without_a_network(
    cached: Path, files: list[str], fetch: Callable[[str], Path]
) -> None:
    (cached / "model.safetensors").write_bytes(b"")
    for name in files:
        with pytest.raises(Failed, match="hf:org/tiny cannot be fetched"):
            fetch("org/tiny")
        (cached / name).write_bytes(b"")
    assert fetch("org/tiny") == cached
    with pytest.raises(Failed, match="hf:org/other cannot be fetched"):
        fetch("org/other")


@pytest.mark.parametrize("fetch", [fetch_tokenizer, ask_tokenizer])
def test_a_tokenizer_without_settings_is_whole_once_the_hub_has_said_so(
    cached: Path, fetch: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (cached / "tokenizer.json").write_bytes(b"")
    noted = cached.parents[1] / ".no_exist" / cached.name / "tokenizer_config.json"

    there = SimpleNamespace(sha=cached.name, siblings=[SimpleNamespace(rfilename="tokenizer.json")])
    answer_of_hub: Any = SimpleNamespace(headers={}, request=None)

    def answer(name: str, file: str, **_: object) -> None:
        noted.parent.mkdir(parents=True)
        noted.touch()
        raise RemoteEntryNotFoundError(file, response=answer_of_hub)

    with monkeypatch.context() as reachable:
        reachable.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: there)
        reachable.setattr("huggingface_hub.hf_hub_download", answer)
        assert fetch("org/tiny") == cached
    assert noted.exists()
    assert fetch("org/tiny") == cached


@pytest.mark.parametrize("name", ["a/b/c", "org/", "with space", "../up"])
def test_what_cannot_be_a_name_on_the_hub_is_refused(name: str) -> None:
    with pytest.raises(WrongInput, match="is not a name on the hub; write it as hf:ORG/NAME"):
        fetch_model(name)


def test_what_may_be_an_adapter_needs_no_configuration_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = SimpleNamespace(siblings=[SimpleNamespace(rfilename="adapter_config.json")])
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: there)
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda _, file, **__: str(tmp_path / file)
    )
    with pytest.raises(WrongInput, match=r"hf:org/nosuch-adapter has no config\.json"):
        fetch_config("org/nosuch-adapter")
    assert fetch_config("org/nosuch-adapter", adapters=True) == tmp_path


def test_an_adapter_is_told_though_its_bases_configuration_lies_beside_it(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetch_config("org/tiny", adapters=True) == cached, "the hub does not answer"
    names = ["config.json", "adapter_config.json"]
    there = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: there)
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda _, file, **__: str(tmp_path / file / file)
    )
    for name in ("org/new", "org/tiny"):
        fetched = fetch_config(name, adapters=True)
        assert fetched == tmp_path / "adapter_config.json", "the kind is seen when it is measured"
    assert fetch_config("org/new") == tmp_path / "config.json"
    (cached / "adapter_config.json").write_text("{}")
    assert fetch_config("org/tiny", adapters=True) == cached
