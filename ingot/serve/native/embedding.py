"""Texts as vectors: the final hidden states of a decoder or an encoder, pooled over each text's own
tokens and normalised; and the worker that computes them beside a model's other requests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional

from ingot.base.errors import WrongInput
from ingot.models.device import kernels_for_any_length
from ingot.models.generation.classifier import TextBatches, TextJob
from ingot.models.generation.request import CompletionChunk, Request
from ingot.models.hf.models import TextReader
from ingot.models.kinds import AnyModel
from ingot.models.native.decoder import Decoder
from ingot.serve.native.causal import CausalModel

Mode = Literal["mean", "cls", "lasttoken", "max"]
MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
TRANSFORMER = "sentence_*_config.json"
"""The settings of the model itself; older folders name its architecture."""


@dataclass(frozen=True)
class Pooling:
    """How a text's hidden states become one vector. `prefix` is put before every text; both are
    read in lower case where `lower` is set.
    """

    mode: Mode = "mean"
    prefix: str = ""
    lower: bool = False

    def read(self, text: str) -> str:
        """The text as the model reads it."""
        text = self.prefix + text
        # Letter by letter, as tokenizers do it: a capital sigma at the end of a word is no other.
        return "".join(map(str.lower, text)) if self.lower else text


@dataclass(frozen=True)
class EmbeddingRequest(Request):
    """A text to embed: `prompt`, framed as the model reads it; generation's fields are ignored."""

    pooling: Pooling = field(default=Pooling(), kw_only=True)


@dataclass(frozen=True)
class Embedding(CompletionChunk):
    """A text's vector, of length 1."""

    vector: tuple[float, ...] = ()


def read_pooling(folder: Path) -> Pooling:
    """What a sentence-transformers folder says; the mean where it says nothing.

    Raises:
        WrongInput: modules or settings that are not known here.
    """
    modules = _json(folder / MODULES) or []
    mode: Any = "mean"
    lower = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise _unknown(folder, f"a module {kind}")
        if kind == "Transformer":
            files = sorted((folder / module.get("path", "")).glob(TRANSFORMER))
            lower = lower or any((_json(file) or {}).get("do_lower_case") for file in files)
        if kind == "Pooling":
            settings = _json(folder / module.get("path", "") / "config.json") or {}
            if settings.get("include_prompt") is False:
                raise _unknown(folder, "include_prompt false")
            mode = settings.get("pooling_mode") or [
                name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
                for name, on in settings.items()
                if name.startswith("pooling_mode_") and on
            ]
            mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
    if mode not in get_args(Mode):
        raise _unknown(folder, f"pooling by {mode}")
    asked = _json(folder / PROMPTS) or {}
    prefix = (asked.get("prompts") or {}).get(asked.get("default_prompt_name"), "")
    return Pooling(cast("Mode", mode), str(prefix), bool(lower))


def _unknown(folder: Path, what: str) -> WrongInput:
    return WrongInput(
        f"{folder} asks for {what}, which this server does not compute; embed with"
        " sentence-transformers, or take a model with mean, cls, lasttoken or max"
    )


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes()) if path.exists() else None


def embeds(model: AnyModel | CausalModel) -> bool:
    """Whether the model's last hidden states belong to the tokens of one text."""
    if isinstance(model, TextReader):
        return not getattr(model.inner.config, "is_encoder_decoder", False)
    return isinstance(model, Decoder | CausalModel)


@kernels_for_any_length
@torch.inference_mode()
def embed(
    model: AnyModel | CausalModel, texts: Sequence[Sequence[int]], poolings: Sequence[Pooling]
) -> list[list[float]]:
    """The vector of each text (framed ids), computed in one batch; padding is in none of them."""
    device = next(iter(model.parameters())).device
    longest = max(len(text) for text in texts)
    # Some encoders count positions by their padding; `TextReader` puts its own.
    pad = model.inner.config.pad_token_id or 0 if isinstance(model, CausalModel) else 0
    tokens = torch.tensor([[*text, *[pad] * (longest - len(text))] for text in texts])
    lengths = torch.tensor([len(text) for text in texts], device=device)
    mask = (torch.arange(longest, device=device) < lengths[:, None]).long()  # [B, T]
    hidden, mask = _hidden(model, tokens.to(device), mask)
    vectors = [
        _pooled(row[seen], pooling.mode)
        for row, seen, pooling in zip(hidden.float(), mask.bool(), poolings, strict=True)
    ]
    pooled: list[list[float]] = functional.normalize(torch.stack(vectors), dim=-1).tolist()
    return pooled


def _pooled(states: Tensor, mode: Mode) -> Tensor:
    """One vector `[D]` of a text's hidden states `[T, D]`."""
    match mode:
        case "mean":
            return states.mean(dim=0)
        case "cls":
            return states[0]
        case "lasttoken":
            return states[-1]
        case "max":
            return states.amax(dim=0)


def _hidden(model: AnyModel | CausalModel, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Final hidden states `[B, T, D]`, and which of them are those of tokens."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if isinstance(model, Decoder):
        return model.hidden(tokens, positions, None if bool(mask.all()) else mask), mask
    if isinstance(model, TextReader):
        return model.hidden(tokens, positions, mask)
    assert isinstance(model, CausalModel)
    return model.inner.base_model(tokens, attention_mask=mask).last_hidden_state, mask


class Embedder(TextBatches):
    """Embeds up to `max_rows` waiting texts in each step."""

    def __init__(self, model: AnyModel | CausalModel, *, max_rows: int = 8) -> None:
        # LongRoPE computes all texts of a batch as its longest.
        alone = isinstance(model, CausalModel) and model.turns_at is not None
        super().__init__(model.config, max_rows=1 if alone else max_rows)
        self._model = model

    def _answers(self, requests: Sequence[Request]) -> list[CompletionChunk]:
        poolings = [
            request.pooling if isinstance(request, EmbeddingRequest) else Pooling()
            for request in requests
        ]
        vectors = embed(self._model, [request.prompt for request in requests], poolings)
        return [
            Embedding("", (), 0, "stop", tuple(vector))
            if all(map(math.isfinite, vector))
            else Embedding("", (), 0, "error")
            for vector in vectors
        ]


class EmbeddingWorker:
    """A worker with an embedder beside it: texts to embed join whatever else is computed."""

    def __init__(self, worker: Any, embedder: Embedder) -> None:
        self._worker, self._embedder = worker, embedder

    def add(self, request: Request) -> Any:
        """Queue a request with the one of the two that it is for."""
        own = isinstance(request, EmbeddingRequest)
        return self._embedder.add(request) if own else self._worker.add(request)

    def cancel(self, job: Any) -> None:
        """Drop a request."""
        self._embedder.cancel(job)
        self._worker.cancel(job)

    def clear(self) -> None:
        """Drop all requests."""
        self._embedder.clear()
        self._worker.clear()

    def resume(self, job: Any) -> None:
        """Queue a dropped request again with the one of the two that it is for."""
        own = isinstance(job, TextJob) and isinstance(job.request, EmbeddingRequest)
        (self._embedder if own else self._worker).resume(job)

    def step(self) -> list[tuple[Any, CompletionChunk]]:
        """One step of each."""
        return [*self._embedder.step(), *self._worker.step()]
