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
from tests.docs.typed import PROJECT, SHORT, SMALLEST, TUNED, blocks, page
from tests.patience import PATIENCE_S
from tests.ranks import free_port
from tests.small import write_documents

README = page("README.md")
TYPED = README + page("docs/tour.md")
"""Where a reader finds commands that are not a tutorial's (tests/docs/test_tutorials.py)."""


def commands() -> list[str]:
    """Each line that is typed, once."""
    lines = [line.strip() for block in blocks(TYPED, "bash") for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line))


def serving(name: str) -> str:
    """The command that serves a run."""
    (found,) = [each for each in commands() if "serve" in each.split() and name in each]
    return found


def asking(name: str) -> str:
    """The program that asks its server."""
    (found,) = [each for each in blocks(TYPED, "python") if f'model="{name}"' in each]
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, as one that the README is typed in: recipes come with the package."""
    return tmp_path_factory.mktemp("readme")


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
    write_documents(folder / "text")
    done = ingot("run", "quickstart", cwd=folder, COLUMNS="200", **SMALLEST)
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
        and command != "ingot run quickstart"
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


@pytest.mark.drawn("commands of the README", keep=5)
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
        assert done.returncode == 0, done.stdout + done.stderr  # a proof says there what fails
        out = done.stdout
    else:
        out = shell(command, smallest, **SMALLEST)
    if arguments[0] == "explain":
        assert "Peak learning rate" in out
    if arguments[0] in ("show", "predict", "doctor", "verify"):
        assert out.strip()


@pytest.mark.drawn("a proof as the README has it")
def test_serving_and_the_python_example_on_the_smallest_model(smallest: Path) -> None:
    serve_and_ask("quickstart", smallest, **SMALLEST)


@pytest.mark.drawn("a proof as the README has it")
def test_the_python_interface_on_the_smallest_model(smallest: Path) -> None:
    example = next(block for block in blocks(TYPED, "python") if "ingot.load" in block)
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=smallest,
        env=clean_environment(**SMALLEST),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loss, bits, answer = done.stdout.split("\n", 2)
    assert float(loss) > 0
    assert float(bits) > 0
    assert answer


def answers(port: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").is_success
    except httpx.HTTPError:
        return False


@pytest.mark.drawn
@pytest.mark.parametrize("recipe", ["adapt_smollm2", "chat_smollm2", "keeper_smollm2"])
def test_tuning_a_model_folder(recipe: str, tmp_path: Path) -> None:
    """The README's command and recipe as they are, but for the model: a tiny folder."""
    (tmp_path / "data").mkdir()
    lines = [{"text": f"Report {n}. The mould cooled slowly. " * 8} for n in range(40)]
    (tmp_path / "data/my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_chats(tmp_path / "data/chats.jsonl", 40)
    model = write_model(tmp_path / "model", special=["<|im_start|>", "<|im_end|>"])
    small = {**TUNED, "INGOT_MODEL__SOURCE": str(model), "INGOT_TOKENIZER__TEMPLATE": "chatml"}
    run = recipe.replace("_", "-")
    for command in commands():
        if (recipe in command or run in command) and "serve" not in command.split():
            done = ingot(*shlex.split(command)[1:], cwd=tmp_path, **small)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()
    assert (tmp_path / f"runs/{run}/model/config.json").exists()
    if recipe == "keeper_smollm2":
        serve_and_ask(run, tmp_path, **small)


def serve_and_ask(name: str, folder: Path, **variables: str) -> None:
    """Serve a run as the page says, and run its program that asks."""
    port = str(free_port())
    arguments = shlex.split(serving(name).replace("8080", port))[1:]
    server = start_ingot(*arguments, cwd=folder, stderr=subprocess.PIPE, **variables)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not answers(port):
            assert server.poll() is None, server.stderr.read() if server.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.1)
        result = subprocess.run(
            [sys.executable, "-c", asking(name).replace("8080", port)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    assert server.returncode == 0


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
        if {"serve", "pip"} & set(command.split()) or "smollm2" in command:
            continue
        said[command] = shell(command, place)
    table = said["ingot run quickstart"]
    assert all(
        step in table
        for step in ("ingest", "prepare", "train", "evaluate", "gate", "register", "serve")
    )
    assert "Peak learning rate" in said["ingot explain train.optimizer.lr"]
    assert any(out for command, out in said.items() if command.startswith("ingot predict"))
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
        shell("ingot run quickstart", place)
    port = str(free_port())
    command = serving("quickstart").replace("8080", port)
    server = subprocess.Popen(
        command.split(), cwd=place, env=environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not answers(port):
            assert server.poll() is None, server.stderr.read() if server.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.1)
        example = asking("quickstart")
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
    command = next(each for each in commands() if each.startswith("ingot run chat_smollm2"))
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
    screen = "".join(blocks(README, "console"))
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\$ make (\w+)", screen):
        assert f"\n{target}:" in makefile
    assert {"run", "test"} <= set(re.findall(r"\$ make (\w+)", screen))
