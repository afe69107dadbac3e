"""Folders of a user: with a home, with folders of their own, and without either."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from ingot.base.userfolders import cache_folder, config_folder, home
from tests.base.homeless import homeless

BOTH = ((cache_folder, "XDG_CACHE_HOME", ".cache"), (config_folder, "XDG_CONFIG_HOME", ".config"))


def test_a_variable_counts_before_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder, variable, below in BOTH:
        monkeypatch.delenv(variable, raising=False)
        assert folder() == tmp_path / below / "ingot"
        monkeypatch.setenv(variable, "/there")
        assert folder() == Path("/there/ingot")


def test_a_user_without_a_home_has_a_folder_that_nobody_else_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homeless(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert home() is None
    own = tmp_path / f"ingot-{os.getuid()}"
    for folder, _, below in BOTH:
        assert folder() == own / below / "ingot"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    theirs = own.rename(tmp_path / f"ingot-{other}")
    found = cache_folder()
    assert found.is_relative_to(tmp_path)
    assert not found.is_relative_to(theirs)
