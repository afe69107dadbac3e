"""A user whom neither the environment nor the list of users gives a home."""

from __future__ import annotations

import pwd

import pytest


def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be one, as in a container that runs under any id."""

    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for variable in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
