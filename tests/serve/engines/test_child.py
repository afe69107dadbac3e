"""Another engine as a process of ours: ready, signals, death, ports, keys. A stand-in plays vLLM;
`test_engines.py` has the real one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import uvicorn

from ingot.base.errors import Failed, WrongInput
from ingot.cli.model import serve_model
from ingot.config.sections.deployment import Serve
from ingot.models.device import accelerator
from ingot.serve.engines.child import GRACE_S, ServerCommand, run_server_process
from ingot.serve.engines.proxy import running_proxy
from ingot.serve.http.bodies import PromptBounds
from ingot.serve.http.listen import bound_socket, kept_port
from ingot.serve.predict import predict
from ingot.serve.server import render, serve
from tests.cli.commands import clean_environment, ingot
from tests.patience import PATIENCE_S
from tests.serve.forked import Forks, Process, wait_until
from tests.serve.tiny import changed_config

BOUNDS = PromptBounds(72, 512, 5000)
STANDINS = Path(__file__).parent / "standins"


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment in which the stand-in is installed as vLLM."""
    script = tmp_path_factory.mktemp("environment") / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{STANDINS}" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


@dataclass
class Started:
    """`ingot serve` over the stand-in; `told` is what the stand-in says of itself."""

    process: Process
    url: str
    told: dict[str, object]
    log: Path

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send(number)
        return self.process.wait()


class Start:
    """Starts `ingot serve` with the stand-in for vLLM."""

    def __init__(self, forked: Forks, place: Path, python: str) -> None:
        self._forked, self._place, self._python = forked, place, python

    @contextlib.contextmanager
    def __call__(
        self, folder: Path, *settings: str, grace_s: float = GRACE_S, **environ: str
    ) -> Iterator[Started]:
        told, log = self._place / "told.json", self._place / "log"
        arguments = [
            "serve",
            str(folder),
            "serve.engine=vllm",
            f"serve.python={self._python}",
            "serve.port=0",
            *settings,
        ]
        with self._forked.running(
            arguments, clean_environment(STANDIN_TOLD=str(told), **environ), log, grace_s
        ) as process:
            wait_until(lambda: "serving " in log.read_text() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            url = log.read_text().split("serving ")[1].split()[-1].replace("0.0.0.0", "127.0.0.1")
            yield Started(process, url, json.loads(told.read_text()), log)


@pytest.fixture
def start(forked: Forks, tmp_path: Path, python: str) -> Start:
    return Start(forked, tmp_path, python)


def gone(*pids: object) -> bool:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may go while it is looked at
            if psutil.Process(int(str(pid))).status() != psutil.STATUS_ZOMBIE:
                return False
    return True


@pytest.mark.drawn("a server's child")
def test_it_tells_when_it_is_ready_answers_and_ends_with_a_signal(
    folder: Path, start: Start
) -> None:
    with start(folder, "serve.max_batch=3", "serve.max_tokens=50") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert (
            client.completions.create(model="model", prompt="fox", max_tokens=5).choices[0].text
            == 'fox|{"max_tokens": 5}'
        )
        argv = server.told["argv"]
        assert isinstance(argv, list)
        given = dict(itertools.pairwise(argv))
        assert given["--model"] == str(folder)
        assert given["--max-num-seqs"] == "3"
        on_cpu = accelerator() is None
        assert (given["--dtype"], "--enforce-eager" in argv) == (
            "float32" if on_cpu else "auto",
            on_cpu,
        )
        assert json.loads(given["--override-generation-config"]) == {"max_new_tokens": 50}
        assert f"http://{given['--host']}:{given['--port']}" == server.url
        assert server.told["level"] == "WARNING"
        assert predict(server.url, "fox", max_tokens=5).startswith('fox|{"max_tokens": 5')
        assert server.stop() == 0
        assert gone(server.told["pid"], server.told["worker"])
        assert server.log.read_text().splitlines() == [
            "vLLM is loading; this may take minutes",
            f"serving model at {server.url}",
        ]


@pytest.mark.drawn("a server's child")
def test_one_that_does_not_listen_to_signals_is_killed_with_all_its_processes(
    folder: Path, start: Start
) -> None:
    with start(folder, STANDIN="deaf", grace_s=1.0) as server:
        assert server.stop(signal.SIGINT) == 0
        assert gone(server.told["pid"], server.told["worker"])


@pytest.mark.drawn("a server's child")
@pytest.mark.parametrize("manner", ["", "deaf"])
def test_it_does_not_outlive_a_parent_that_is_killed(
    folder: Path, start: Start, manner: str
) -> None:
    with start(folder, STANDIN=manner, grace_s=1.0) as server:
        server.stop(signal.SIGKILL)
        wait_until(
            lambda: gone(server.told["pid"], server.told["worker"]),
            "the engine outlived its parent",
        )


def test_death_while_loading_is_one_line_with_the_first_cause_and_a_log(
    folder: Path, python: str
) -> None:
    done = ingot(
        "serve",
        str(folder),
        "serve.engine=vllm",
        f"serve.python={python}",
        "serve.port=0",
        STANDIN="die",
    )
    first, line = done.stderr.splitlines()
    assert (done.returncode, done.stdout, first) == (
        1,
        "",
        "vLLM is loading; this may take minutes",
    )
    assert line.startswith(
        "error: vLLM ended while loading (exit 1): ValueError: the cache does not fit into 3.1 GiB;"
        " its whole log is "
    )
    log = Path(line.rpartition(" ")[2])
    assert "Engine core initialization failed" in log.read_text()
    log.unlink()


def test_a_stranger_who_answers_at_the_port_is_not_taken_for_the_engine(tmp_path: Path) -> None:
    """The engine lives until the stranger has answered twice."""
    done = tmp_path / "done"

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            if len(asked) == 2:
                done.touch()

        def log_message(self, *_: object) -> None:
            pass

    asked: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        engine = ServerCommand(
            "vLLM",
            ("/bin/sh", "-c", f"while [ ! -e '{done}' ]; do sleep 0.1; done; exit 3"),
            f"http://127.0.0.1:{stranger.server_port}/health",
        )
        with pytest.raises(
            Failed,
            match=r"vLLM ended while loading \(exit 3\): it printed nothing; its whole log is .*",
        ) as failed:
            run_server_process(engine, "serving")
        Path(str(failed.value).rpartition(" ")[2]).unlink()
        assert len(asked) >= 2
        stranger.shutdown()


@pytest.mark.drawn("a server's child")
def test_death_while_serving_is_told(folder: Path, start: Start) -> None:
    with start(folder, STANDIN="crash") as server:
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{server.url}/v1/completions", json={"model": "model", "prompt": "fox"})
        assert server.process.wait() == 1
        assert (
            server.log.read_text().splitlines()[-1]
            == "error: vLLM died (exit 7): RuntimeError: the device is lost; its log stands above,"
            " start it again"
        )
        assert gone(server.told["worker"])


def test_the_key_goes_by_the_environment_and_is_asked_for(folder: Path, start: Start) -> None:
    with start(folder, "serve.api_key=env:THE_KEY", THE_KEY="sesame") as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert (
            httpx.get(
                f"{server.url}/v1/models", headers={"Authorization": "Bearer sesame"}
            ).status_code
            == 200
        )
        assert "sesame" not in json.dumps(server.told)
        assert "sesame" not in " ".join(psutil.Process(int(str(server.told["pid"]))).cmdline())
        assert "sesame" not in server.log.read_text()


AIP = {
    "AIP_HTTP_PORT": "0",
    "AIP_HEALTH_ROUTE": "/v1/endpoints/7",
    "AIP_PREDICT_ROUTE": "/v1/endpoints/7:predict",
}


@pytest.mark.drawn("a server's child")
def test_under_vertex_the_front_speaks_its_contract_and_hands_openais_routes_through(
    folder: Path, start: Start
) -> None:
    settings = ("serve.max_body_bytes=2000", "serve.api_key=env:THE_KEY")
    key = {"Authorization": "Bearer sesame"}
    with (
        start(folder, *settings, **AIP, THE_KEY="sesame") as server,
        httpx.Client(base_url=server.url, headers=key, timeout=PATIENCE_S) as client,
    ):
        for route in ("/v1/endpoints/7:predict", "/v1/completions"):
            assert httpx.post(f"{server.url}{route}", json={"instances": ["a"]}).status_code == 401
        assert httpx.get(f"{server.url}/v1/endpoints/7").status_code == 200
        assert client.get("/v1/endpoints/7").json() == {"status": "ok", "model": "model"}
        answer = client.post(
            "/v1/endpoints/7:predict",
            json={
                "instances": ["a", {"prompt": "b"}],
                "parameters": {"max_tokens": 5.0, "stop": ["x"]},
            },
        )
        wishes = '{"max_tokens": 5, "stop": ["x"], "temperature": 0.0, "top_p": 1.0}'
        assert answer.json() == {"predictions": [f"a|{wishes}", f"b|{wishes}"]}
        assert client.post("/v1/endpoints/7:predict", json={"instances": []}).status_code == 400
        assert (
            "serve.max_tokens"
            in client.post(
                "/v1/endpoints/7:predict",
                json={"instances": ["a"], "parameters": {"max_tokens": 5000}},
            ).text
        )
        assert (
            client.post("/v1/endpoints/7:predict", json={"instances": ["a" * 3000]}).status_code
            == 413
        )
        assert client.get("/v1/models").json()["data"][0]["id"] == "model"
        wrong = client.post("/v1/completions", json={"model": "other", "prompt": "a"})
        assert (wrong.status_code, wrong.json()["error"]["message"]) == (
            404,
            "The model `other` does not exist.",
        )
        with client.stream(
            "POST", "/v1/completions", json={"model": "model", "prompt": "a", "stream": True}
        ) as response:
            lines = (line for line in response.iter_lines() if line)
            assert '"one "' in next(lines)
            assert client.get("/v1/heard").status_code == 200  # only then comes the rest
            assert list(lines)[-1] == "data: [DONE]"
        os.kill(int(str(server.told["pid"])), signal.SIGSTOP)
        try:  # its threads stop one after another, after the signal was sent
            wait_until(lambda: client.get("/v1/endpoints/7", timeout=30).status_code == 503)
        finally:
            os.kill(int(str(server.told["pid"])), signal.SIGCONT)
        assert server.stop() == 0


def test_a_limit_below_the_default_is_what_is_meant_where_nobody_says_how_many(
    folder: Path, start: Start
) -> None:
    with start(folder, "serve.max_tokens=8", **AIP) as server:
        answer = httpx.post(
            f"{server.url}/v1/endpoints/7:predict", json={"instances": ["a"]}, timeout=60
        )
        assert (answer.status_code, answer.json()) == (
            200,
            {"predictions": ['a|{"max_tokens": 8, "stop": [], "temperature": 0.0, "top_p": 1.0}']},
        )
        asked = {"instances": ["a"], "parameters": {"max_tokens": 9}}
        assert (
            httpx.post(
                f"{server.url}/v1/endpoints/7:predict", json=asked, timeout=PATIENCE_S
            ).status_code
            == 400
        )


def test_the_front_takes_connections_from_the_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even while its thread does not run yet."""
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: None)
    with (
        bound_socket("127.0.0.1", 0) as listener,
        bound_socket("127.0.0.1", listener.getsockname()[1]) as late,
    ):
        with running_proxy(listener, "http://127.0.0.1:9", Serve(), "model", BOUNDS, None, {}):
            socket.create_connection(listener.getsockname()).close()
        with (
            pytest.raises(Failed, match="is taken"),
            running_proxy(late, "http://127.0.0.1:9", Serve(), "model", BOUNDS, None, {}),
        ):
            pass


def test_vertex_says_where_the_model_lies_and_the_target_need_not_be_there(
    folder: Path, start: Start
) -> None:
    with start(Path("/nowhere/fox"), **AIP, AIP_STORAGE_URI=str(folder)) as server:
        assert httpx.get(f"{server.url}/v1/endpoints/7").json() == {"status": "ok", "model": "fox"}


def refused(words: str, folder: Path, python: str | None, port: int = 0) -> None:
    with pytest.raises((WrongInput, Failed), match=words):
        serve(folder, Serve(engine="vllm", python=python, port=port), "model")


def test_what_cannot_be_is_refused_before_anything_is_started(
    folder: Path, python: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    refused("is an empty folder; give a Hugging Face folder", tmp_path, python)
    refused(
        "is a sequence-to-sequence model, and serve.engine vllm answers with decoders alone; set"
        " serve.engine=native",
        changed_config(folder, tmp_path / "summarizer", is_encoder_decoder=True),
        python,
    )
    refused(
        r"serve.python /nowhere/python cannot be run \(No such file or directory\); give the"
        r" interpreter",
        folder,
        "/nowhere/python",
    )
    refused(
        f"there is no vllm in the environment of {sys.executable}; set serve.python", folder, None
    )
    bare = changed_config(folder, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    refused("has no model.safetensors", bare, python)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(f"port {port} on 127.0.0.1 is taken", folder, python, port)
    assert capfd.readouterr() == ("", "")


def test_another_template_than_the_trained_one_is_refused_as_by_our_own_server(
    folder: Path, python: str, tmp_path: Path
) -> None:
    changed = changed_config(folder, tmp_path / "changed")
    (changed / "ingot.json").write_text(json.dumps({"schema": 1, "template": "another"}))
    refused("is not the one that the model was trained with", changed, python)
    assert "--model" in render(
        changed, Serve(engine="vllm", python=python, any_template=True), "model"
    )


def test_a_dry_run_prints_the_command_and_no_key(
    folder: Path, python: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("THE_KEY", "sesame")
    assert (
        serve_model(
            str(folder),
            ["serve.engine=vllm", f"serve.python={python}", "serve.api_key=env:THE_KEY"],
            dry_run=True,
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert (
        f"{python} -m vllm.entrypoints.openai.api_server --model {folder} --served-model-name model"
        " --host 127.0.0.1 --port 8080" in out
    )
    assert 'VLLM_API_KEY="$THE_KEY"' in out
    assert "sesame" not in out + err
    serve_model(str(folder), [], dry_run=True)
    assert (
        capsys.readouterr().out
        == f"# nothing is started: this process would serve model, a decoder in {folder}, at"
        " http://127.0.0.1:8080\n"
    )


def test_a_port_for_a_child_is_given_to_nobody_else_meanwhile() -> None:
    port = kept_port("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
