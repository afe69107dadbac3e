"""The limit of open files."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from ingot.base.openfiles import WANTED, open_file_limit, raise_open_file_limit
from ingot.cli import app


@pytest.fixture
def reachable() -> Iterator[int]:
    """What the limit can be raised to, after it was made the usual one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_becomes_the_hard_one(reachable: int) -> None:
    assert open_file_limit() == 1024
    raise_open_file_limit()
    assert open_file_limit() == reachable
    raise_open_file_limit()
    assert open_file_limit() == reachable


def test_each_verb_may_open_as_many(reachable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks among them, which are started as verbs."""
    found = []
    monkeypatch.setattr(app, "listen_to_signals", lambda: None)
    monkeypatch.setattr(app, "guarded", lambda *_, **__: found.append(open_file_limit()))
    monkeypatch.setattr(app, "leave", lambda *_, **__: None)
    app.main()
    assert found == [reachable]
