"""What all tests of rollouts share: a reward for odd answers, and prompts that are prepared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.rollout.digits import made_ready, odd_known


@pytest.fixture(autouse=True)
def _odd() -> Iterator[None]:
    with odd_known():
        yield


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with odd_known():
        return made_ready(tmp_path_factory.mktemp("digits") / "root")
