"""Triton's repository, its Python model and our client. A stand-in plays the server;
`test_engines.py` has the real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.server import ask
from ingot.config.sections.deployment import Serve
from ingot.config.serving import answered, question, triton_route
from ingot.models.generation.request import Request
from ingot.serve.engines.triton import (
    TritonInstallation,
    assemble_backend,
    find_triton,
    triton_command,
)
from ingot.serve.engines.triton_backend import TritonBackend
from ingot.serve.native.model import LoadedModel
from ingot.serve.predict import predict
from ingot.serve.server import render, serve
from tests.cli.commands import clean_environment
from tests.patience import PATIENCE_S
from tests.serve.forked import Forks, Process, wait_until
from tests.serve.tiny import changed_config

STANDINS = Path(__file__).parent / "standins"
sys.path.append(str(STANDINS))  # where Triton's own module lies

import triton_python_backend_utils as utils  # noqa: E402


@pytest.fixture(scope="module")
def on_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the stand-in as `tritonserver`, to stand on PATH."""
    script = tmp_path_factory.mktemp("bin") / "tritonserver"
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH="{STANDINS}" exec "{sys.executable}"'
        f' "{STANDINS / "tritonserver.py"}" "$@"\n'
    )
    script.chmod(0o755)
    return str(script.parent)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    made = TritonBackend()
    made.utils = utils
    told = {
        "folder": str(folder),
        "max_batch": "2",
        "max_queue": "1",
        "max_tokens": "600",
        "any_template": "false",
        "compute": "auto",
        "pack": "true",
    }
    made.initialize(
        {
            "model_config": json.dumps(
                {"parameters": {key: {"string_value": value} for key, value in told.items()}}
            )
        }
    )
    yield made
    made.finalize()


def asked(model: Any, prompt: str, *, stream: bool | None = None, **sampling: Any) -> Any:
    inputs = {
        "text_input": np.array([prompt.encode()], dtype=np.object_),
        "sampling_parameters": np.array([json.dumps(sampling).encode()], dtype=np.object_),
    }
    request = utils.Request(inputs if stream is None else {**inputs, "stream": np.array([stream])})
    model.execute([request])
    return request.sender


def said(sender: Any) -> list[str]:
    """The texts of all responses, or their error."""
    return [
        str(answer.error) if answer.error else answer.tensors[0].as_numpy()[0].decode()
        for answer in iter(sender.said.get, None)
    ]


def test_answers_are_those_of_our_own_server_whole_and_streamed(
    model: Any, loaded: LoadedModel
) -> None:
    senders = [
        asked(model, prompt, stream=stream, max_tokens=20)
        for prompt, stream in (("fox", None), ("the quick", True), ("Straße", False))
    ]
    for prompt, sender in zip(("fox", "the quick", "Straße"), senders, strict=True):
        (expected,) = loaded.worker(1).run([Request(loaded.encode(prompt), 20)])
        parts = said(sender)
        assert "".join(parts) == expected.text
        assert (len(parts) > 5) == (prompt == "the quick")


def test_what_a_request_must_not_ask_for_is_told(model: Any) -> None:
    assert said(asked(model, "fox", max_tokens=601)) == [
        "max_tokens 601 is over this server's limit of 600; lower it, or raise serve.max_tokens"
    ]
    assert said(asked(model, "fox", temprature=1)) == [
        "sampling_parameters: `temprature` is not known to this server; remove it"
    ]
    assert "the prompt has" in said(asked(model, "fox " * 9000, max_tokens=5))[0]
    requests = [
        utils.Request(
            {
                "text_input": np.array([b"x"], dtype=np.object_),
                "sampling_parameters": np.array([parameters], dtype=np.object_),
            }
        )
        for parameters in (b"[" * 100_000, b"{")
    ]
    model.execute(requests)
    for request in requests:
        assert "sampling_parameters is not JSON" in said(request.sender)[0]


def test_a_full_queue_refuses_and_who_goes_away_makes_room(
    model: Any, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, step = threading.Event(), model._worker.step
    monkeypatch.setattr(
        model._worker, "step", lambda: step() if gate.wait(60) else []
    )  # nothing ends before the queue was seen full
    running = [asked(model, "fox", stream=True, max_tokens=600) for _ in range(3)]
    assert said(asked(model, "fox", max_tokens=1)) == [
        "3 requests are running or waiting, and no more fit; try again"
    ]
    for sender in running:
        sender.cancelled = True
    gate.set()
    assert [said(sender)[-1] for sender in running][-1] == "the client disconnected"
    until = time.monotonic() + PATIENCE_S
    while (answer := said(asked(model, "fox", max_tokens=1))) and "no more fit" in answer[0]:
        assert time.monotonic() < until
    (expected,) = loaded.worker(1).run([Request(loaded.encode("fox"), 1)])
    assert answer == [expected.text]


def test_a_failing_step_answers_and_the_next_request_is_tried(
    model: Any, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patched:
        patched.setattr(model._worker, "step", broken)
        assert said(asked(model, "fox", max_tokens=3)) == [
            "the model failed on this batch of requests; the server's log has the reason"
        ]
    (expected,) = loaded.worker(1).run([Request(loaded.encode("fox"), 3)])
    assert said(asked(model, "fox", max_tokens=3)) == [expected.text]


@contextlib.contextmanager
def served(forked: Forks, folder: Path, on_path: str, log: Path) -> Iterator[Process]:
    environment = clean_environment(PATH=f"{on_path}:{os.environ['PATH']}")
    with forked.running(
        ["serve", str(folder), "serve.engine=triton", "serve.port=0"], environment, log
    ) as process:
        yield process


@pytest.mark.drawn("Triton's server")
def test_served_asked_by_predict_and_stopped(
    folder: Path, loaded: LoadedModel, on_path: str, forked: Forks, tmp_path: Path
) -> None:
    (expected,) = loaded.worker(1).run([Request(loaded.encode("fox"), 12)])
    with served(forked, folder, on_path, tmp_path / "log") as process:
        wait_until(
            lambda: "serving " in (tmp_path / "log").read_text() or process.poll() is not None
        )
        url = (tmp_path / "log").read_text().split()[-1]
        assert (
            answered(
                "triton", ask(url, triton_route("model"), question("triton", "model", "fox", 12))
            )
            == expected.text
        )
        assert predict(url, "fox", max_tokens=12) == expected.text
        with pytest.raises(
            WrongInput,
            match=r"refuses with 400: max_tokens 5000 is over this server's limit of 1024",
        ):
            predict(url, "fox", max_tokens=5000)
        with pytest.raises(
            WrongInput,
            match="is a Triton, which goes on from texts and knows neither chat nor beams",
        ):
            predict(url, "fox", chat=True)
        streamed = httpx.post(
            f"{url}/v2/models/model/generate_stream",
            json={"text_input": "fox", "stream": True},
            timeout=PATIENCE_S,
        ).text
        assert streamed.count("data: ") > 5
        children = psutil.Process(process.pid).children(recursive=True)
        process.send(signal.SIGTERM)
        assert process.wait() == 0
        assert not [
            child
            for child in children
            if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        ]


@pytest.mark.drawn("Triton's server")
def test_a_model_that_does_not_load_is_one_line(
    folder: Path, tmp_path: Path, on_path: str, forked: Forks
) -> None:
    torn = changed_config(folder, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes(b"torn")
    with served(forked, torn, on_path, tmp_path / "log") as process:
        assert process.wait() == 1
    _, line = (tmp_path / "log").read_text().splitlines()
    assert "error: Triton ended while loading (exit 1): " in line
    assert "model.safetensors is torn or not safetensors" in line


def test_what_cannot_be_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(
        WrongInput,
        match=(
            r"there is no Triton in the environment of .*, and no tritonserver on PATH; set"
            r" serve.python"
        ),
    ):
        serve(folder, Serve(engine="triton", port=0), "model")
    with pytest.raises(WrongInput, match="Triton checks no key; remove it"):
        serve(folder, Serve(engine="triton", api_key="env:KEY"), "model")
    with pytest.raises(WrongInput, match=r"serve\.engine triton answers with decoders alone"):
        render(
            changed_config(folder, tmp_path / "summarizer", is_encoder_decoder=True),
            Serve(engine="triton"),
            "model",
        )
    gone = str(tmp_path / "gone" / "python")
    for act in (render, serve):
        with pytest.raises(
            WrongInput,
            match=(
                rf"serve\.python {gone} cannot be run \(No such file or directory\); give the"
                r" interpreter of an environment"
            ),
        ):
            act(folder, Serve(engine="triton", python=gone, port=0), "model")
    with pytest.raises(WrongInput, match=f"serve.python {gone} cannot be run"):
        find_triton(gone)
    shown = render(folder, Serve(engine="triton"), "a model")
    assert "# PLACE/models/a-model/config.pbtxt" in shown
    assert f'string_value: "{folder}"' in shown
    assert (
        "tritonserver --model-repository=PLACE/models --http-address=127.0.0.1 --http-port=8080"
        in shown
    )
    assert not Path("PLACE").exists()


def test_the_wheel_of_triton_is_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nvidia-pytriton lays it out."""
    packages = tmp_path / "site-packages"
    root = packages / "pytriton" / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for path in (
        "bin/tritonserver",
        "backends/python/libtriton_python.so",
        "backends/python/triton_python_backend_utils.py",
        f"python_backend_stubs/{version}/triton_python_backend_stub",
        "python_backend_stubs/3.8/triton_python_backend_stub",
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho \'["{packages}", "/lib/of/python", "{version}"]\'\n')
    python.chmod(0o755)
    found = find_triton(str(python))
    assert found.program == root / "bin" / "tritonserver"
    assemble_backend(found, tmp_path / "place" / "backends" / "python")
    made = {
        file.name: file.stat().st_mode & 0o111
        for file in (tmp_path / "place" / "backends" / "python").iterdir()
    }
    assert sorted(made) == [
        "libtriton_python.so",
        "triton_python_backend_stub",
        "triton_python_backend_utils.py",
    ]
    assert made["triton_python_backend_stub"] == 0o111
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    started = triton_command(str(python), found, tmp_path / "place", "m", "0.0.0.0", 5)
    assert f"--backend-directory={tmp_path / 'place' / 'backends'}" in started.argv
    assert (
        started.environment["LD_LIBRARY_PATH"]
        == f"{packages}/nvidia_pytriton.libs:/lib/of/python:/mine"
    )
    assert started.environment["PATH"].startswith(f"{python.parent}:")
    assert started.health == "http://127.0.0.1:5/v2/models/m/ready"
    (root / "python_backend_stubs" / version / "triton_python_backend_stub").unlink()
    with pytest.raises(
        WrongInput, match=rf"has no Python backend for Python {version} \(only .*3.8"
    ):
        find_triton(str(python))
    assert (
        triton_command(
            "python", TritonInstallation(Path("tritonserver")), tmp_path, "m", "::", 5
        ).health
        == "http://[::1]:5/v2/models/m/ready"
    )


def test_a_server_that_is_neither_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failed, match="does not answer"):
        predict("http://127.0.0.1:9", "fox")
