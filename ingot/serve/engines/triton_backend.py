"""Our own generation as a model of Triton's Python backend: one thread runs the batch, requests
join it between steps, and answers stream.

This runs inside Triton, which passes its own module as `utils`; the repository's `model.py` is
three lines. The tensors are those of Triton's vLLM backend: `text_input`, `sampling_parameters`
(JSON), `stream`; `text_output`.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from ingot.base.errors import IngotError
from ingot.base.progress import say
from ingot.models.generation.request import CompletionChunk, Request, special_in
from ingot.serve.http.bodies import PredictParameters
from ingot.serve.http.errors import ApiError, validation_error
from ingot.serve.native.engine import BatchWorker
from ingot.serve.native.model import LoadedModel, load_in_a_thread

PROMPT_TOKENS = 64
# Tokens between two checks whether the client has disconnected.
CANCEL_CHECK_TOKENS = 16


@dataclass(eq=False)
class _BackendRequest:
    """A request that waits or runs."""

    request: Request
    sender: Any
    stream: bool
    texts: list[str] = field(default_factory=list)
    tokens: int = 0


class TritonBackend:
    """A model of Triton's Python backend; `utils` is `triton_python_backend_utils`."""

    utils: Any = None

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model that the configuration names and start the thread."""
        parameters = {
            key: value["string_value"]
            for key, value in json.loads(args["model_config"])["parameters"].items()
        }
        self._loaded: LoadedModel = load_in_a_thread(
            Path(parameters["folder"]),
            any_template=parameters["any_template"] == "true",
            compute=parameters["compute"],
            pack=parameters.get("pack") == "true",
        )
        self._worker: BatchWorker = self._loaded.worker(
            int(parameters["max_batch"]),
            int(parameters.get("prefix_cache_mb", 0)),
            eager=parameters.get("eager") == "true",
        )
        self._limit, self._rows = int(parameters["max_tokens"]), int(parameters["max_batch"])
        self._most = self._rows + int(parameters["max_queue"])
        self._waiting: deque[_BackendRequest] = deque()
        self._running: dict[Any, _BackendRequest] = {}
        self._condition = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="ingot-triton", daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Queue requests; the thread sends their answers."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                row = self._read(request, sender)
                with self._condition:
                    if len(self._waiting) + len(self._running) >= self._most:
                        raise ApiError(
                            429,
                            f"{self._most} requests are running or waiting, and no more fit; try"
                            " again",
                        )
                    self._waiting.append(row)
                    self._condition.notify()
            except (ApiError, IngotError) as error:
                self._refuse(sender, str(error))

    def finalize(self) -> None:
        """Stop the thread, because Triton is stopping."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join(10.0)

    def _read(self, request: Any, sender: Any) -> _BackendRequest:
        text = self._text(request, "text_input") or ""
        try:
            options = PredictParameters.model_validate(
                json.loads(self._text(request, "sampling_parameters") or "{}")
            )
        except ValidationError as error:
            raise ApiError(
                400,
                "sampling_parameters:"
                f" {validation_error([dict(fault) for fault in error.errors()]).message}",
            ) from None
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"sampling_parameters is not JSON ({error}); mend it") from None
        tokens = options.max_tokens or min(PROMPT_TOKENS, self._limit)
        if tokens > self._limit:
            raise ApiError(
                400,
                f"max_tokens {tokens} is over this server's limit of {self._limit}; lower it, or"
                " raise serve.max_tokens",
            )
        special = special_in(options.stop, self._loaded.tokenizer.special_ids)
        made = options.request(self._loaded.encode(text), tokens, special=special)
        self._loaded.check(made)
        stream = self.utils.get_input_tensor_by_name(request, "stream")
        return _BackendRequest(
            made, sender, stream is not None and bool(stream.as_numpy().reshape(-1)[0])
        )

    def _text(self, request: Any, name: str) -> str | None:
        tensor = self.utils.get_input_tensor_by_name(request, name)
        if tensor is None:
            return None
        value = tensor.as_numpy().reshape(-1)[0]
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._running or self._stopping)
                if self._stopping:
                    return
                while self._waiting and len(self._running) < self._rows:
                    row = self._waiting.popleft()
                    self._running[self._worker.add(row.request)] = row
            try:
                for job, piece in self._worker.step():
                    self._give(job, piece)
            except Exception:
                say(f"a step of the model failed:\n{traceback.format_exc()}")
                self._worker.clear()
                for row in self._drop_all():
                    self._refuse(
                        row.sender,
                        "the model failed on this batch of requests; the server's log has the"
                        " reason",
                    )

    def _drop_all(self) -> list[_BackendRequest]:
        with self._condition:
            rows = list(self._running.values())
            self._running.clear()
        return rows

    def _give(self, job: Any, piece: CompletionChunk) -> None:
        row = self._running[job]
        row.texts.append(piece.text)
        row.tokens += 1
        if piece.finish:
            del self._running[job]
        if piece.finish == "error":
            self._refuse(
                row.sender,
                "the model's numbers are not finite on this prompt; try another prompt or model",
            )
        elif piece.finish:
            self._send(row.sender, piece.text if row.stream else "".join(row.texts), last=True)
        elif row.stream and piece.text:
            self._send(row.sender, piece.text)
        if not piece.finish and row.tokens % CANCEL_CHECK_TOKENS == 0 and row.sender.is_cancelled():
            self._worker.cancel(job)
            del self._running[job]
            self._refuse(row.sender, "the client disconnected")

    def _send(self, sender: Any, text: str, *, last: bool = False) -> None:
        tensor = self.utils.Tensor("text_output", np.array([text.encode()], dtype=np.object_))
        sender.send(
            self.utils.InferenceResponse([tensor]),
            flags=self.utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0,
        )

    def _refuse(self, sender: Any, message: str) -> None:
        failed = self.utils.InferenceResponse(error=self.utils.TritonError(message))
        sender.send(failed, flags=self.utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
