"""The servers that most tests share: an open one, and one as strict as Vertex would run it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ingot.serve.native.model import LoadedModel, load
from tests.serve.forked import Forks, forks
from tests.serve.running import Running, running
from tests.serve.tiny import make_folder

AIP = {
    "AIP_HTTP_PORT": "0",
    "AIP_HEALTH_ROUTE": "/v1/endpoints/7/deployedModels/9",
    "AIP_PREDICT_ROUTE": "/v1/endpoints/7/deployedModels/9:predict",
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("serve") / "model")


@pytest.fixture(scope="session")
def loaded(folder: Path) -> LoadedModel:
    """The served model in this process, to know what the answers must be."""
    torch.set_num_threads(1)
    return load(folder)


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Running]:
    with running(folder, max_tokens=8000) as made:
        yield made


@pytest.fixture(scope="session")
def strict(folder: Path) -> Iterator[Running]:
    """One row, two places in the queue, a key, small bodies, Vertex's environment."""
    with running(
        folder,
        environ=AIP,
        key="söme key",
        max_batch=1,
        max_queue=2,
        max_body_bytes=3000,
        max_tokens=8000,
    ) as made:
        yield made


@pytest.fixture(scope="session")
def forked() -> Iterator[Forks]:
    with forks() as made:
        yield made
