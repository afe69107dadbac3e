"""Every command of the README, run as it stands there, in a folder of its own: on the smallest model
and data that it works on, and (slow) as a reader would, on a training of a few steps.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.cli.commands import clean_environment, ingot, start_ingot
from tests.cli.tiny_model import write_model
from tests.ranks import free_port
from tests.small import TINY_MODEL, write_documents

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
SMALLEST = {
    **SHORT,
    "INGOT_DATA__VALIDATION__FRACTION": "0.1",
    "INGOT_DATA__FRACTION": "1.0",
    "INGOT_DATA__TRAIN": "[{source: text}]",
    "INGOT_DATA__SEQ_LEN": "32",
    "INGOT_DATA__ENGINE__WORKERS": "1",
    "INGOT_TOKENIZER__VOCAB_SIZE": "320",
    "INGOT_MODEL__CONFIG": json.dumps(TINY_MODEL),
    "INGOT_TRAIN__GLOBAL_BATCH": "4",
    "INGOT_TRAIN__MICRO_BATCH": "2",
    "INGOT_TRACK__TENSORBOARD": "false",
    "OMP_NUM_THREADS": "1",
}
# Two steps instead of six, on a model that the test makes.
TUNED = {
    "INGOT_TRAIN__GLOBAL_BATCH": "2",
    "INGOT_TRAIN__MICRO_BATCH": "2",
    "INGOT_TRAIN__STEPS": "2",
    "INGOT_TRAIN__EPOCHS": "null",
    "INGOT_DATA__SEQ_LEN": "96",
    "INGOT_DATA__FRACTION": "1.0",
    "INGOT_DATA__VALIDATION__FRACTION": "0.1",
    "INGOT_DATA__ENGINE__WORKERS": "1",
    "INGOT_EVALUATE__SAMPLE_TOKENS": "4",
    "INGOT_TRACK__TENSORBOARD": "false",
    "OMP_NUM_THREADS": "1",
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
    return clean_environment(PATH=paths, COLUMNS="200", **{**SHORT, **more})


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


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with documents of ours; the first command of all has been run."""
    folder = tmp_path_factory.mktemp("smallest")
    (folder / "recipes").symlink_to(PROJECT / "recipes")
    write_documents(folder / "text")
    done = ingot("run", "recipes/quickstart.yaml", cwd=folder, COLUMNS="200", **SMALLEST)
    assert done.returncode == 0, done.stderr
    steps = ("ingest", "prepare", "train", "evaluate", "gate", "register", "serve")
    assert all(step in done.stdout for step in steps)
    return folder


def quick_commands() -> list[str]:
    return [
        command
        for command in commands()
        if command.startswith(("ingot ", "torchrun "))
        and "serve" not in command.split()
        and "smollm2" not in command
        and command != "ingot run recipes/quickstart.yaml"
    ]


PROVED_ELSEWHERE = {
    # By tests/verify/test_resume.py on a smaller training.
    "ingot verify resume": pytest.mark.slow,
    "ingot verify layout": pytest.mark.drawn("a proof as the README has it"),
    "ingot verify export": pytest.mark.drawn("a proof as the README has it"),
    "ingot bench": pytest.mark.drawn("bench"),
    "torchrun": pytest.mark.drawn("ranks of torchrun"),
}
"""Commands that take long, and whose work other tests prove."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            command,
            marks=[mark for begin, mark in PROVED_ELSEWHERE.items() if command.startswith(begin)],
        )
        for command in quick_commands()
    ],
)
def test_a_command_on_the_smallest_model(command: str, smallest: Path) -> None:
    program, *arguments = shlex.split(command)
    if program == "ingot":
        variables = dict(SMALLEST)
        if arguments[0] == "submit":
            # A pipeline elsewhere takes no data of this machine, and has eight processes.
            del variables["INGOT_DATA__TRAIN"]
            variables["INGOT_TRAIN__GLOBAL_BATCH"] = "16"
        done = ingot(*arguments, cwd=smallest, COLUMNS="200", **variables)
        assert done.returncode == 0, done.stderr
        out = done.stdout
    else:
        out = shell(command, smallest, **SMALLEST)
    if arguments[0] == "explain":
        assert "Peak learning rate" in out
    if arguments[0] in ("show", "predict", "doctor", "verify"):
        assert out.strip()


def test_serving_and_the_python_example_on_the_smallest_model(smallest: Path) -> None:
    (command,) = [command for command in commands() if "serve" in command.split()]
    port = str(free_port())
    arguments = shlex.split(command.replace("8080", port))[1:]
    server = start_ingot(*arguments, cwd=smallest, stderr=subprocess.PIPE, **SMALLEST)
    try:
        deadline = time.monotonic() + 90
        while not answers(port):
            assert server.poll() is None, server.stderr.read() if server.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (example,) = blocks("python")
        result = subprocess.run(
            [sys.executable, "-c", example.replace("8080", port)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    assert server.returncode == 0


def answers(port: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").is_success
    except httpx.HTTPError:
        return False


@pytest.mark.drawn
@pytest.mark.parametrize("recipe", ["adapt_smollm2", "chat_smollm2"])
def test_tuning_a_model_folder(recipe: str, tmp_path: Path) -> None:
    """The README's command and recipe as they are, but for the model: a tiny folder."""
    (tmp_path / "recipes").symlink_to(PROJECT / "recipes")
    (tmp_path / "data").mkdir()
    lines = [{"text": f"Report {n}. The mould cooled slowly. " * 8} for n in range(40)]
    (tmp_path / "data/my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_chats(tmp_path / "data/chats.jsonl", 40)
    model = write_model(tmp_path / "model", special=["<|im_start|>", "<|im_end|>"])
    (command,) = [command for command in commands() if recipe in command]
    done = ingot(*shlex.split(command)[1:], cwd=tmp_path, **TUNED, INGOT_MODEL__SOURCE=str(model))
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").glob("*smollm2")
    assert (run / "model/config.json").exists()


def write_chats(path: Path, count: int) -> None:
    with path.open("w") as stream:
        for number in range(count):
            asked = {"role": "user", "content": f"What is {number} plus one?"}
            answer = {"role": "assistant", "content": "Ask a smith."}
            stream.write(json.dumps({"messages": [asked, answer]}) + "\n")


@pytest.mark.slow
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


@pytest.mark.slow
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
        while not answers(port):
            assert server.poll() is None, server.stderr.read() if server.stderr else ""
            assert time.monotonic() < deadline
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tuning_a_real_model_on_chats(place: Path, smollm2: Path) -> None:
    """The recipe as it is, but for the hub, which is not asked: afterwards the model answers and
    stops.
    """
    (place / "data").mkdir(exist_ok=True)
    write_chats(place / "data/chats.jsonl", 160)
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
