from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.tiny_model import write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model and its tokenizer."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")
