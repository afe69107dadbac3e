"""The real vLLM and the real Triton beside our own server: the same prompts, the same words. `make
engines` makes their environments and runs this.

VLLM_PYTHON, TRITON_PYTHON: their interpreters. ENGINES_MODEL: a model folder to use instead of a
tiny one drawn here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from ingot.base.server import running_server
from ingot.checkpoints.compressed import export_compressed
from ingot.serve.predict import predict
from tests.cli.commands import clean_environment, command, ingot
from tests.patience import PATIENCE_S
from tests.serve.tiny import make_folder

pytestmark = [pytest.mark.slow, pytest.mark.engines, pytest.mark.timeout(900)]
PROMPTS = [
    "the quick brown fox",
    "The capital of France is",
    "def main(",
    "Straße, ",
    "five wizards",
    "1, 2, 3,",
    "Once upon a time",
    "naïvely",
]


def interpreter(engine: str) -> str:
    name = f"{engine.upper()}_PYTHON"
    if name not in os.environ:
        pytest.skip(f"no environment for {engine} (${name} is not set); run `make engines`")
    return os.environ[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's attention on a CPU wants heads of 32 or more; and it ends at the tokenizer's own end
    (id 1), whatever a folder names beside it.
    """
    if given := os.environ.get("ENGINES_MODEL"):
        return Path(given)
    return make_folder(
        tmp_path_factory.mktemp("engines") / "model",
        eos=[1],
        hidden_size=128,
        intermediate_size=192,
        max_position_embeddings=512,
    )


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """Our own server's answers."""
    with serving(folder, "native") as url:
        return answers(url)


@contextlib.contextmanager
def serving(folder: Path, engine: str, *settings: str) -> Iterator[str]:
    where = [] if engine in ("native", "transformers") else [f"serve.python={interpreter(engine)}"]
    with running_server(
        command("serve", str(folder), f"serve.engine={engine}", "serve.port=0", *where, *settings)
    ) as url:
        yield url


def answers(url: str, key: str | None = None) -> list[str]:
    return [predict(url, prompt, max_tokens=24, api_key=key) for prompt in PROMPTS]


def test_transformers_says_what_our_decoder_says(folder: Path, expected: list[str]) -> None:
    with serving(folder, "transformers") as url:
        assert answers(url) == expected


def test_vllm_says_what_our_decoder_says(
    folder: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 on a CPU, word for word; chats, streams, stop strings, its key and refusals as
    OpenAI's client sees them.
    """
    with serving(folder, "native") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        chat = client.chat.completions.create(
            model=folder.name,
            messages=[{"role": "user", "content": "fox"}],
            max_tokens=8,
            temperature=0,
        )
    monkeypatch.setenv("THE_KEY", "sesame")
    with serving(folder, "vllm", "serve.api_key=env:THE_KEY") as url:
        assert answers(url, "sesame") == expected
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="sesame")
        parts = client.completions.create(
            model=folder.name, prompt=PROMPTS[0], max_tokens=24, temperature=0, stream=True
        )
        texts = [part.choices[0].text for part in parts if part.choices]
        assert ("".join(texts), len(texts) > 5) == (expected[0], True)
        stop = expected[0][6:9]
        stopped = client.completions.create(
            model=folder.name, prompt=PROMPTS[0], max_tokens=24, temperature=0, stop=[stop]
        ).choices[0]
        assert (stopped.text, stopped.finish_reason) == (expected[0].split(stop)[0], "stop")
        theirs = client.chat.completions.create(
            model=folder.name,
            messages=[{"role": "user", "content": "fox"}],
            max_tokens=8,
            temperature=0,
        )
        assert theirs.choices[0].message.content == chat.choices[0].message.content
        assert client.models.list().data[0].id == folder.name
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=folder.name, prompt=PROMPTS[0], temperature=-1)


@pytest.mark.parametrize("kind", ["w4a16", "w8a8"])
def test_vllm_answers_in_few_bits(folder: Path, kind: str, tmp_path: Path) -> None:
    """vLLM computes four bits in bf16, and rounds inputs where products are of integers: its words
    begin as ours, from the same numbers in float32, for most prompts.
    """
    export_compressed(folder, tmp_path / kind, kind, overwrite=False)
    with serving(tmp_path / kind, "native") as url:
        ours = answers(url)
    with serving(tmp_path / kind, "vllm") as url:
        theirs = answers(url)
    alike = sum(one[:2] == other[:2] for one, other in zip(ours, theirs, strict=True))
    assert alike >= len(PROMPTS) - 2, list(zip(ours, theirs, strict=True))


def test_triton_says_what_our_decoder_says(folder: Path, expected: list[str]) -> None:
    with serving(folder, "triton") as url:
        assert answers(url) == expected
        route = f"{url}/v2/models/{folder.name}"
        body = {
            "text_input": PROMPTS[0],
            "stream": True,
            "sampling_parameters": '{"max_tokens": 24}',
        }
        streamed = httpx.post(f"{route}/generate_stream", json=body, timeout=PATIENCE_S)
        texts = [
            json.loads(line.removeprefix("data: "))["text_output"]
            for line in streamed.text.splitlines()
            if line
        ]
        assert ("".join(texts), len(texts) > 5) == (expected[0], True)
        refused = httpx.post(
            f"{route}/generate",
            json={"text_input": "x", "sampling_parameters": '{"max_tokens": 5000}'},
        )
        assert (refused.status_code, "serve.max_tokens" in refused.json()["error"]) == (400, True)


@pytest.mark.parametrize("engine", ["vllm", "triton"])
def test_they_die_in_one_line_and_leave_nothing(folder: Path, engine: str, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    torn.mkdir()
    for file in folder.iterdir():
        data = file.read_bytes()
        (torn / file.name).write_bytes(
            data[: len(data) // 2] if file.suffix == ".safetensors" else data
        )
    done = ingot(
        "serve",
        str(torn),
        f"serve.engine={engine}",
        f"serve.python={interpreter(engine)}",
        "serve.port=0",
        timeout_s=600,
    )
    lines = [line for line in done.stderr.splitlines() if "is still loading" not in line]
    assert (done.returncode, len(lines)) == (1, 2), done.stderr
    assert "ended while loading (exit 1): " in lines[1]
    assert "safetensor" in lines[1].split("; its whole log")[0].lower()


@pytest.mark.parametrize("engine", ["vllm", "triton"])
def test_they_end_with_us_even_when_we_are_killed(folder: Path, engine: str) -> None:
    arguments = command(
        "serve",
        str(folder),
        f"serve.engine={engine}",
        f"serve.python={interpreter(engine)}",
        "serve.port=0",
    )
    process = subprocess.Popen(
        arguments, env=clean_environment(), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert any(line.startswith("serving ") for line in process.stderr)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not alive
