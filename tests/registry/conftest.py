from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.registry.vertex_place import Place, opened


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A project of Google Cloud with a bucket, as far as the registry needs it."""
    with opened(tmp_path, monkeypatch) as found:
        yield found
