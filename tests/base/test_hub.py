from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.base.hub import fetch_model

FETCH = """
import sys
from ingot.base.errors import IngotError
from ingot.base import hub
hub.fetch_tokenizer = lambda name: hub.fetch_model(name, tokenizer_only=True)
try:
    print(getattr(hub, sys.argv[2])(sys.argv[1]))
except IngotError as error:
    print(type(error).__name__, error)
"""


def fetch_offline(cache: Path, name: str, how: str = "fetch_model") -> str:
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", FETCH, name, how],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.strip()


def test_a_model_in_the_cache_is_found_without_a_network_and_another_is_named(
    tmp_path: Path,
) -> None:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("a" * 40)
    assert "hf:org/tiny cannot be fetched" in fetch_offline(tmp_path, "org/tiny"), "no weights"
    (snapshot / "model.safetensors").write_bytes(b"")
    assert "hf:org/tiny cannot be fetched" in fetch_offline(tmp_path, "org/tiny", "fetch_tokenizer")
    for name in ("tokenizer.model", "spiece.model"):
        (snapshot / name).write_bytes(b"")
        assert fetch_offline(tmp_path, "org/tiny", "fetch_tokenizer") == str(snapshot)
        (snapshot / name).unlink()
    assert fetch_offline(tmp_path, "org/tiny") == str(snapshot)
    assert "hf:org/other cannot be fetched" in (said := fetch_offline(tmp_path, "org/other"))
    assert said.startswith("Failed ")
    assert "check the network, or give a folder" in said
    assert fetch_offline(tmp_path, "org/tiny", "ask_tokenizer").startswith("Failed "), "not whole"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).write_text("{}")
    assert fetch_offline(tmp_path, "org/tiny", "fetch_tokenizer") == str(snapshot)


@pytest.mark.parametrize("name", ["a/b/c", "org/", "with space", "../up"])
def test_what_cannot_be_a_name_on_the_hub_is_refused(name: str) -> None:
    with pytest.raises(WrongInput, match="is not a name on the hub; write it as hf:ORG/NAME"):
        fetch_model(name)
