"""The benchmark of `/health` runs, and its bodies are within what the server reads."""

from __future__ import annotations

import sys

import pytest

from benchmarks import health
from ingot.config.sections.deployment import Serve


@pytest.mark.slow
def test_health_is_measured_under_each_body(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = health.bodies()
    assert all(len(request) < Serve().max_body_bytes for request in made.values())
    names = ["lists", "long prompt"]
    asked = ["health", "--rounds", "1", "--seconds", "0.5", "--only", *names]
    monkeypatch.setattr(sys, "argv", asked)
    health.main()
    table = capsys.readouterr().out.splitlines()
    assert [line[:24].strip() for line in table] == ["body", "idle", *names]
