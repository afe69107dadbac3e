"""Behaves as `tritonserver` does with one model of the Python backend: arguments, repository, the
routes of HTTP, its words when a model does not load.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import sys
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as utils

KINDS: dict[str, Any] = {
    "TYPE_STRING": lambda value: np.array([value.encode()], dtype=np.object_),
    "TYPE_BOOL": lambda value: np.array([value]),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tritonserver")
    for name in (
        "model-repository",
        "http-address",
        "http-port",
        "allow-grpc",
        "allow-metrics",
        "allow-vertex-ai",
        "exit-timeout-secs",
        "log-info",
    ):
        parser.add_argument(f"--{name}", required=True)
    return parser.parse_args()


class Handler(BaseHTTPRequestHandler):
    """One model, `name`, whose inputs are `inputs`."""

    name: str
    inputs: dict[str, str]
    model: Any

    def do_GET(self) -> None:
        if self.path in ("/v2", "/v2/health/ready", f"/v2/models/{self.name}/ready"):
            self.answer(200, {"name": "triton"})
        else:
            self.answer(404, {"error": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or b"{}")
        if self.path == "/v2/repository/index":
            self.answer(200, [{"name": self.name, "version": "1", "state": "READY"}])
            return
        if self.path not in (
            f"/v2/models/{self.name}/generate",
            f"/v2/models/{self.name}/generate_stream",
        ):
            self.answer(404, {"error": "Not Found"})
            return
        request = utils.Request(
            {name: KINDS[self.inputs[name]](value) for name, value in body.items()}
        )
        assert self.model.execute([request]) is None
        answers = list(iter(request.sender.said.get, None))
        if self.path.endswith("_stream"):
            self.send_response(200)
            self.end_headers()
            for answer in answers:
                self.wfile.write(f"data: {json.dumps(told(answer))}\n\n".encode())
        elif len(answers) != 1:
            self.answer(400, {"error": "generate expects model to produce exactly 1 response"})
        else:
            self.answer(400 if answers[0].error else 200, told(answers[0]))

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def told(answer: utils.InferenceResponse) -> dict[str, Any]:
    if answer.error:
        return {"error": str(answer.error)}
    (tensor,) = answer.tensors
    return {"model_name": Handler.name, tensor.name: tensor.as_numpy()[0].decode()}


def main() -> None:
    options = arguments()
    (folder,) = Path(options.model_repository).iterdir()
    config = (folder / "config.pbtxt").read_text()
    assert f'name: "{folder.name}"' in config
    parameters = dict(
        re.findall(r'parameters \{ key: "(\w+)" value \{ string_value: "(.*?)" \} \}', config)
    )
    Handler.name, Handler.inputs = (
        folder.name,
        dict(re.findall(r'name: "(\w+)" data_type: (\w+) dims: \[ 1 \]', config)),
    )
    try:
        Handler.model = runpy.run_path(str(folder / "1" / "model.py"))["TritonPythonModel"]()
        Handler.model.initialize(
            {
                "model_config": json.dumps(
                    {
                        "parameters": {
                            key: {"string_value": value} for key, value in parameters.items()
                        }
                    }
                )
            }
        )
    except Exception as error:
        where = traceback.format_exc().replace("\n", "\\n")
        print(
            'E1122 04:02:43.814839 12669 backend_model.cc:692] "ERROR: Failed to create instance:'
            f' {type(error).__name__}: {error}\\n\\nAt:{where}"'
        )
        print("error: creating server: Internal - failed to load all models", flush=True)
        os._exit(1)
    ThreadingHTTPServer((options.http_address, int(options.http_port)), Handler).serve_forever()


if __name__ == "__main__":
    sys.exit(main())
