"""What the tests of kills and crashes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos import strace
from tests.chaos.zygote import Zygote, zygote


@pytest.fixture(scope="session")
def forks() -> Iterator[Zygote]:
    """Processes that have imported everything, where they can be traced."""
    strace.required()
    with zygote() as server:
        yield server
