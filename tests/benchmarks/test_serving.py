"""The benchmark of servers runs on a tiny model, beside transformers."""

from __future__ import annotations

import sys

import pytest

from benchmarks import serving


@pytest.mark.slow
def test_servers_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The greedy texts of all are transformers' in float32."""
    monkeypatch.setattr(sys, "argv", ["serving", "--quick", "--threads", "1"])
    serving.main()
    out = capsys.readouterr().out
    assert out.count("8 of 8") == 2
    for load in serving.LOADS:
        assert f"ingot serve is better than transformers generate {load.name}: time" in out
