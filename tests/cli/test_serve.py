"""`ingot serve` in a process of its own, asked by `ingot predict` over HTTP, and stopped."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from ingot.base.reports import EvaluationReport, Metric
from ingot.registry.local import LocalRegistry
from ingot.serve.predict import predict
from tests.cli.commands import clean_environment, command, ingot
from tests.patience import PATIENCE_S


@pytest.mark.drawn("served folders and names")
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


@pytest.mark.drawn("served folders and names")
def test_a_registered_model_is_served_by_its_name_and_says_its_version(
    model_folder: Path, tmp_path: Path
) -> None:
    registry = LocalRegistry(tmp_path / "runs/registry.sqlite")
    loss = {"loss/loss": Metric(1.0, 0.9, 1.1, "lower", 3, "set")}
    for number in (1, 2):
        registry.add("fox", model_folder, EvaluationReport(f"model{number}", "t", loss), {})
    with subprocess.Popen(
        command("serve", "fox@v2", "serve.port=0"),
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as server:
        assert server.stderr is not None
        greeting = server.stderr.readline()
        try:
            assert greeting.startswith("serving fox@v2 at http://"), greeting
            with httpx.Client(base_url=greeting.split()[-1], timeout=PATIENCE_S) as client:
                (model,) = client.get("/v1/models").json()["data"]
                assert (model["id"], model["version"]) == ("fox@v2", 2)
                body = {"model": "fox", "prompt": "the", "max_tokens": 2}
                assert client.post("/v1/completions", json=body).status_code == 200
        finally:
            server.send_signal(signal.SIGTERM)
