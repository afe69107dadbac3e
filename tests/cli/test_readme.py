"""Every command of the README, run as it stands there, in a folder of its own, on a training of a
few steps.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.cli.commands import clean_environment
from tests.ranks import free_port

PROJECT = Path(__file__).resolve().parents[2]
README = (PROJECT / "README.md").read_text(encoding="utf-8")
# The environment beats the recipe's file: the same commands, a training of seconds.
SHORT = {
    "INGOT_TRAIN__STEPS": "6",
    "INGOT_TRAIN__EVALUATE_EVERY": "3",
    "INGOT_TRAIN__EVALUATE_ROWS": "8",
    "INGOT_CHECKPOINT__EVERY": "4",
    "INGOT_EVALUATE__SAMPLE_TOKENS": "4",
    "INGOT_DATA__VALIDATION__FRACTION": "0.002",
    "INGOT_DATA__FRACTION": "0.05",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    return [line.strip() for block in blocks("bash") for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the clone from which the README is typed."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "recipes").symlink_to(PROJECT / "recipes")
    return folder


def environment(**more: str) -> dict[str, str]:
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return clean_environment(PATH=paths, COLUMNS="200", **SHORT, **more)


def shell(command: str, place: Path, **more: str) -> str:
    result = subprocess.run(
        command,
        shell=True,
        cwd=place,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stderr}"
    return result.stdout


@pytest.mark.timeout(900)
def test_the_tour(place: Path) -> None:
    said: dict[str, str] = {}
    for command in commands():
        if "serve" in command.split() or "smollm2" in command:
            continue
        said[command] = shell(command, place)
    table = said["ingot run recipes/quickstart.yaml"]
    assert all(
        step in table
        for step in ("ingest", "prepare", "train", "evaluate", "gate", "register", "serve")
    )
    assert "Peak learning rate" in said["ingot explain train.optimizer.lr"]
    assert said['ingot predict runs/quickstart "def main(" max_tokens=40']
    # What follows the first run had nothing to do, two processes included.
    events = [
        json.loads(line)
        for line in (place / "runs/quickstart/events.jsonl").read_text().splitlines()
    ]
    assert [event["kind"] for event in events].count("start") == 1
    assert (place / "runs/quickstart/reports/index.html").stat().st_size > 10_000


@pytest.mark.timeout(300)
def test_serving_and_the_python_example(place: Path) -> None:
    if not (place / "runs/quickstart/model").exists():
        shell("ingot run recipes/quickstart.yaml", place)
    port = str(free_port())
    command = next(command for command in commands() if "serve" in command.split()).replace(
        "8080", port
    )
    server = subprocess.Popen(
        command.split(), cwd=place, env=environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 90
        while True:
            assert server.poll() is None, server.stderr.read() if server.stderr else ""
            assert time.monotonic() < deadline
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        (example,) = blocks("python")
        result = subprocess.run(
            [sys.executable, "-c", example.replace("8080", port)],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    assert server.returncode == 0


@pytest.mark.timeout(900)
def test_adapting_a_real_model(place: Path, smollm2: Path) -> None:
    """The recipe as it is, but for the hub, which is not asked: the model is a folder."""
    (place / "data").mkdir(exist_ok=True)
    texts = (
        f"Report {number}. The mould was filled at {number} degrees and cooled slowly. " * 12
        for number in range(150)
    )
    (place / "data/my.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    command = next(command for command in commands() if "adapt_smollm2" in command)
    smaller = {
        "INGOT_TRAIN__GLOBAL_BATCH": "4",
        "INGOT_TRAIN__MICRO_BATCH": "2",
        "INGOT_DATA__SEQ_LEN": "64",
        "INGOT_DATA__VALIDATION__FRACTION": "0.05",
    }
    settings = {
        **smaller,
        "INGOT_DATA__FRACTION": "1.0",
        "INGOT_TRAIN__EPOCHS": "null",
        "INGOT_MODEL__SOURCE": str(smollm2),
    }
    result = subprocess.run(
        command,
        shell=True,
        cwd=place,
        env={**environment(), **settings},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = [
        json.loads(line)
        for line in (place / "runs/adapt-smollm2/metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0] - 0.3, "it must learn these texts"


@pytest.mark.timeout(900)
def test_tuning_a_real_model_on_chats(place: Path, smollm2: Path) -> None:
    """The recipe as it is, but for the hub, which is not asked: afterwards the model answers and
    stops.
    """
    (place / "data").mkdir(exist_ok=True)
    with (place / "data/chats.jsonl").open("w") as stream:
        for number in range(160):
            asked = {"role": "user", "content": f"What is {number} plus one?"}
            stream.write(
                json.dumps({"messages": [asked, {"role": "assistant", "content": "Ask a smith."}]})
                + "\n"
            )
    command = next(command for command in commands() if "chat_smollm2" in command)
    smaller = {
        "INGOT_TRAIN__GLOBAL_BATCH": "4",
        "INGOT_TRAIN__MICRO_BATCH": "2",
        "INGOT_DATA__SEQ_LEN": "96",
        "INGOT_DATA__VALIDATION__FRACTION": "0.05",
    }
    settings = {
        **smaller,
        "INGOT_DATA__FRACTION": "1.0",
        "INGOT_TRAIN__EPOCHS": "null",
        "INGOT_MODEL__SOURCE": str(smollm2),
        "INGOT_TRAIN__STEPS": "8",
        "INGOT_TRAIN__OPTIMIZER__LR": "3e-4",
    }
    result = subprocess.run(
        command,
        shell=True,
        cwd=place,
        env={**environment(), **settings},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads((place / "runs/chat-smollm2/reports/predict.json").read_text())
    assert answer["completion"].strip() == "Ask a smith."
    assert answer["finish_reason"] == "stop", "it has learnt to end its turn"


def test_the_first_screen_names_the_two_commands() -> None:
    (screen,) = blocks("console")
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\$ make (\w+)", screen):
        assert f"\n{target}:" in makefile
    assert {"run", "test"} <= set(re.findall(r"\$ make (\w+)", screen))
