"""The part of Triton's module for Python models that ours uses, with Triton's own strictness about
types.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonError(Exception):
    """A message for the client."""


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: Any) -> None:
        assert isinstance(array, np.ndarray)
        self.name, self._array = name, array

    def as_numpy(self) -> Any:
        return self._array


class InferenceResponse:
    """Tensors, or an error."""

    def __init__(
        self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None
    ) -> None:
        assert all(isinstance(tensor, Tensor) for tensor in output_tensors)
        assert error is None or isinstance(error, TritonError)
        self.tensors, self.error = output_tensors, error


class Sender:
    """Collects responses until the final one; nothing may come after it."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[InferenceResponse | None] = queue.SimpleQueue()
        self.cancelled = self.ended = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.ended, "a response after the final one"
        if response is not None:
            self.said.put(response)
        if flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.ended = True
            self.said.put(None)

    def is_cancelled(self) -> bool:
        return self.cancelled


class Request:
    """Named inputs of one request."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs, self.sender = inputs, Sender()

    def get_response_sender(self) -> Sender:
        return self.sender


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    return Tensor(name, request.inputs[name]) if name in request.inputs else None
