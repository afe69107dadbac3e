"""`ingot serve` in a process of its own, asked by `ingot predict` over HTTP, and stopped."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from ingot.serve.predict import predict
from tests.cli.commands import clean_environment, command, ingot


def test_a_served_folder_answers_as_predict_does_and_stops_cleanly(model_folder: Path) -> None:
    server = subprocess.Popen(
        command("serve", str(model_folder), "serve.port=0"),
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    greeting = server.stderr.readline()
    assert greeting.startswith("serving tiny at http://127.0.0.1:"), greeting
    address = greeting.split()[-1]
    try:
        for url in (address, f"{address}/v1"):
            done = ingot("predict", url, "the bright", "max_tokens=12")
            assert done.returncode == 0, done.stderr
            assert done.stdout == predict(model_folder, "the bright", max_tokens=12) + "\n"
        refused = ingot("predict", address, "the", "max_tokens=100000")
        assert refused.returncode == 2
        assert "100000" in refused.stderr
        taken = ingot("serve", str(model_folder), f"serve.port={address.rsplit(':', 1)[1]}")
        assert taken.returncode == 1
        assert "taken" in taken.stderr
        assert len(taken.stderr.splitlines()) == 1
    finally:
        server.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0
