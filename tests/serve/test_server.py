"""Starting and stopping: what cannot be served is one line, a signal lets running requests
finish.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.config.sections.deployment import Serve
from ingot.serve.server import serve
from tests.forks import start_call
from tests.serve.running import running, serve_tiny
from tests.serve.tiny import make_folder


@pytest.mark.drawn("a server that is asked to stop")
def test_a_signal_lets_requests_finish_and_the_exit_is_clean(folder: Path) -> None:
    """One streams, one waits in the queue, one connection is idle: all end well, and nothing new is
    taken.
    """
    with (
        running(folder, max_tokens=8000, max_batch=1, finish_s=60) as server,
        server.client() as client,
        server.client() as idle,
    ):
        assert idle.get("/health").status_code == 200
        waited: list[httpx.Response] = []

        def wait() -> None:
            with server.client() as other:
                waited.append(
                    other.post("/v1/completions", json={"prompt": "fox", "max_tokens": 5})
                )

        thread = threading.Thread(target=wait)
        with client.stream(
            "POST", "/v1/completions", json={"prompt": "the", "max_tokens": 1000, "stream": True}
        ) as response:
            lines = response.iter_lines()
            next(lines)
            thread.start()
            server.wait_for("ingot_waiting", 1)
            server.process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert (
            json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        )
        thread.join(30)
        assert [answer.status_code for answer in waited] == [200]
        assert server.process.wait(60) == 0
        assert server.log.read_text().splitlines() == [
            f"serving tiny at {server.url}",
            "the server has ended",
        ]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


@pytest.mark.drawn("a server that is asked to stop")
def test_what_takes_too_long_after_a_signal_is_told_so(folder: Path) -> None:
    body = {"prompt": "the", "max_tokens": 8000}
    with (
        running(folder, max_tokens=8000, finish_s=0.5) as server,
        server.client() as client,
        server.client() as other,
    ):
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(other.post("/v1/completions", json=body))
        )
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            thread.start()
            server.wait_for("ingot_running", 2)
            server.process.send_signal(signal.SIGINT)
            events = [line for line in lines if line]
        assert (
            "the server is stopping"
            in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
        )
        thread.join(30)
        assert [(answer.status_code, answer.json()["error"]["type"]) for answer in answers] == [
            (503, "server_error")
        ]
        assert server.process.wait(60) == 0


def test_a_taken_port_is_one_line(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            Failed,
            match=f"port {port} on 127.0.0.1 is taken; stop what listens there, or set serve.port",
        ):
            serve(folder, Serve(port=port), "tiny")
        log = tmp_path / "log"
        assert start_call(serve_tiny, folder, {"port": port}, log).wait(120) == 1
    assert len(log.read_text().splitlines()) == 1


def test_two_servers_that_load_at_the_same_time_do_not_share_a_port(
    folder: Path, tmp_path: Path
) -> None:
    """Neither listens while it loads, so both may hold the port then; the second one to listen must
    see it.
    """
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        log = tmp_path / "log"
        process = start_call(serve_tiny, folder, {"port": port}, log)
        other.listen()
        code = process.wait(120)
    assert (code, log.read_text()) == (
        1,
        (
            f"port {port} on 127.0.0.1 is taken; stop what listens there, or set serve.port (0"
            " takes a free one)\n"
        ),
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "no.such.host.invalid"}, "serve.host no.such.host.invalid is no address"),
        ({"host": "192.0.2.1"}, "192.0.2.1:0 cannot be listened on"),
        ({"api_key": "env:INGOT_NO_SUCH_KEY"}, r"\$INGOT_NO_SUCH_KEY is not set"),
        ({"api_key": "env:AN_EMPTY_KEY"}, "env:AN_EMPTY_KEY, which is empty"),
    ],
)
def test_settings_that_cannot_be(
    folder: Path, settings: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AN_EMPTY_KEY", " ")
    with pytest.raises(WrongInput, match=words):
        serve(folder, Serve(port=0, **settings), "tiny")  # type: ignore[arg-type]


def test_folders_that_cannot_be_served(folder: Path, tmp_path: Path) -> None:
    settings = Serve(port=0)
    with pytest.raises(WrongInput, match="is an empty folder; give a Hugging Face folder"):
        serve(tmp_path, settings, "tiny")
    bare = make_folder(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(WrongInput, match=r"has no tokenizer.json"):
        serve(bare, settings, "tiny")
    small = make_folder(tmp_path / "small", vocab_size=300)
    with pytest.raises(
        WrongInput, match=r"the tokenizer has \d+ tokens, the model's vocabulary 300"
    ):
        serve(small, settings, "tiny")


def test_a_pretrained_model_without_a_tokenizer(test_data: Path) -> None:
    with pytest.raises(WrongInput, match="tokenizer"):
        serve(test_data / "stories260K" / "hf", Serve(port=0), "stories")
