"""What all tests share: where the real data lies, and small models made on the spot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real data that does not belong to the project; tests that need it skip where it is missing."""
    folder = Path(os.environ.get("TEST_DATA", "../shared/data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set TEST_DATA to its folder")
    return folder.resolve()
