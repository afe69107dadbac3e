"""Behaves as vLLM's server process does: the arguments that it takes (and no others), a log, a slow
start, its key, its routes, its processes.

STANDIN: `die` while loading, `crash` at the first question, `deaf` to SIGTERM. The second half of a
stream comes once somebody has asked for /v1/heard: that the first was heard.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODE = os.environ.get("STANDIN", "")
DEATH = """(VllmWorker-0 pid=7) ERROR 11-22 03:57:03 [multiproc_executor.py:953] Traceback (most recent call last):
(VllmWorker-0 pid=7) ERROR 11-22 03:57:03 [multiproc_executor.py:953]   File "cpu_worker.py", line 83, in __init__
(VllmWorker-0 pid=7) ERROR 11-22 03:57:03 [multiproc_executor.py:953] ValueError: the cache does not fit into 3.1 GiB
(EngineCore pid=6) ERROR 11-22 03:57:06 [core.py:1510] Exception: WorkerProc initialization failed due to an exception in a background process.
(APIServer pid=5) ERROR 11-22 03:57:07 [launcher.py:41] RuntimeError: the engine is gone
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="api_server.py")
    for name in (
        "model",
        "served-model-name",
        "host",
        "dtype",
        "generation-config",
        "override-generation-config",
        "max-model-len",
    ):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "max-num-seqs", "shutdown-timeout"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--disable-uvicorn-access-log", action="store_true")
    return parser.parse_args()


class Handler(BaseHTTPRequestHandler):
    """`options` are the server's."""

    options: argparse.Namespace
    heard = threading.Event()
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/heard":
            self.heard.set()
        if self.path == "/health":
            self.answer(200, None)
        elif self.permitted():
            self.answer(
                200,
                (
                    {"object": "list", "data": [{"id": self.options.served_model_name}]}
                    if self.path == "/v1/models"
                    else None
                ),
            )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if MODE == "crash":
            print(
                "(EngineCore pid=6) ERROR 11-22 04:00:00 [core.py:1] RuntimeError: the device is"
                " lost",
                flush=True,
            )
            os._exit(7)
        if not self.permitted():
            return
        if self.path != "/v1/completions":
            self.answer(404, {"detail": "Not Found"})
        elif body.get("model") != self.options.served_model_name:
            self.answer(
                404,
                {
                    "error": {
                        "message": f"The model `{body.get('model')}` does not exist.",
                        "type": "NotFoundError",
                        "code": 404,
                    }
                },
            )
        elif body.get("stream"):
            self.stream(body)
        else:
            prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
            choices = [
                {"index": index, "text": said(prompt, body), "finish_reason": "length"}
                for index, prompt in enumerate(prompts)
            ]
            self.answer(200, {"choices": choices[::-1]})

    def stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for part in ("one ", "two"):
            self.wfile.write(
                f"data: {json.dumps({'choices': [{'index': 0, 'text': part}]})}\n\n".encode()
            )
            self.wfile.flush()
            if not self.heard.wait(30.0):
                return
        self.wfile.write(b"data: [DONE]\n\n")

    def permitted(self) -> bool:
        key = os.environ.get("VLLM_API_KEY")
        if key and self.headers.get("authorization") != f"Bearer {key}":
            self.answer(401, {"error": "Unauthorized"})
            return False
        return True

    def answer(self, status: int, body: object) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Without words about clients that hang up."""

    def handle_error(self, *_: object) -> None:
        pass


def said(prompt: str, body: dict[str, Any]) -> str:
    return f"{prompt}|" + json.dumps(
        {key: value for key, value in sorted(body.items()) if key not in ("prompt", "model")}
    )


def main() -> None:
    options = arguments()
    print("(APIServer pid=5) INFO 11-22 03:56:26 [api_utils.py:347] a long banner", flush=True)
    if MODE == "die":
        print(DEATH, flush=True)
        sys.exit(1)
    if not (Path(options.model) / "config.json").exists():
        sys.exit("OSError: no config.json")
    worker = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"]
    )  # vLLM's engine is a process of its own, too
    if MODE == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(
            signal.SIGTERM,
            lambda *_: (worker.kill(), print("shut down in order", flush=True), os._exit(0)),
        )
    if told := os.environ.get("STANDIN_TOLD"):
        Path(told).write_text(
            json.dumps(
                {
                    "argv": sys.argv[1:],
                    "worker": worker.pid,
                    "pid": os.getpid(),
                    "level": os.environ.get("VLLM_LOGGING_LEVEL"),
                }
            )
        )
    time.sleep(0.5)
    Handler.options = options
    Server((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
