"""Serves any causal model through transformers' `generate`, with the interface of `Generator`: the
same sampling, stop strings, streaming and log-probabilities.

transformers runs the model and its cache; the next token is chosen here, as for our own decoder. A
batch runs until its last answer ends; requests that arrive meanwhile wait for the next batch.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.models.generation.generator import GenerationJob
from ingot.models.generation.request import (
    Completion,
    CompletionChunk,
    Decode,
    Request,
    check_request,
    join_chunks,
)
from ingot.models.generation.sampling import sample_tokens

# Positions assumed for models whose configuration gives no number: those with relative positions or
# a recurrent state.
DEFAULT_POSITIONS = 8192


@dataclass(frozen=True)
class CausalLimits:
    """The limits that requests are checked against."""

    vocab_size: int
    max_position_embeddings: int


@dataclass(frozen=True)
class CausalModel:
    """A causal model of transformers, in evaluation mode."""

    inner: Any
    config: CausalLimits

    def parameters(self) -> Iterator[Tensor]:
        """All weights."""
        return iter(self.inner.parameters())


def load_causal_model(folder: Path, *, device: torch.device, dtype: torch.dtype) -> CausalModel:
    """Load the model in `folder` with transformers; code in the folder is never run.

    Raises:
        WrongInput: transformers does not support it as a causal model, or its tensors do not fit.
    """
    library = _library()
    library.utils.logging.disable_progress_bar()
    try:
        inner, info = library.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # each model class has exceptions of its own
        reason = " ".join(str(error).split())[:300]
        raise WrongInput(
            f"{folder} does not open in transformers as a causal model ({reason}); give another"
            " model, or another serve.engine"
        ) from None
    if wrong := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
        raise WrongInput(
            f"{folder}: {', '.join(wrong[:4])} missing, or of another shape than its config.json"
            " says; fetch the model again"
        )
    inner = inner.to(device).eval()
    # Lengths, sampling and end tokens come from each request, never from the folder.
    inner.generation_config = type(inner.generation_config)()
    config = inner.config.get_text_config()
    return CausalModel(
        inner,
        CausalLimits(
            int(config.vocab_size),
            int(getattr(config, "max_position_embeddings", None) or DEFAULT_POSITIONS),
        ),
    )


class TransformersGenerator:
    """Generates for up to `max_rows` requests together, one token of each per step.

    Args:
        eos: tokens that end an answer.
        decode: ids to text.
    """

    def __init__(
        self, model: CausalModel, *, eos: Collection[int], decode: Decode, max_rows: int = 8
    ) -> None:
        self._model, self._eos, self._decode, self._max_rows = (
            model,
            frozenset(eos),
            decode,
            max_rows,
        )
        self._pending: deque[GenerationJob] = deque()
        self._group: _GenerateCall | None = None

    @property
    def busy(self) -> int:
        """The number of unfinished requests."""
        return len(self._pending) + (len(self._group.left) if self._group else 0)

    def add(self, request: Request) -> GenerationJob:
        """Queue a request. Raises WrongInput where it cannot be served."""
        sizes: Any = self._model.config
        check_request(request, sizes)
        job = GenerationJob(request, self._decode)
        self._pending.append(job)
        return job

    def cancel(self, job: GenerationJob) -> None:
        """Drop a request; finished ones are ignored."""
        if job in self._pending:
            self._pending.remove(job)
        elif self._group:
            self._group.drop(job)

    def clear(self) -> None:
        """Drop all requests; to be called after `step` raised."""
        self._pending.clear()
        if self._group:
            for job in list(self._group.left):
                self._group.drop(job)
            self._group = None

    def step(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        """The next token of each request of the running batch; starts a batch where none runs."""
        if self._group is None and self._pending:
            jobs = [self._pending.popleft() for _ in range(min(self._max_rows, len(self._pending)))]
            self._group = _GenerateCall(self._model, jobs, self._eos)
        if self._group is None:
            return []
        pieces = self._group.next()
        if pieces is None:
            self._group = None
            return []
        return pieces

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """Answer `requests` and nothing else; in their order."""
        jobs = [self.add(request) for request in requests]
        parts: dict[GenerationJob, list[CompletionChunk]] = {job: [] for job in jobs}
        while self.busy:
            for job, piece in self.step():
                parts[job].append(piece)
        return [join_chunks(parts[job]) for job in jobs]


class _GenerateCall:
    """One call of `generate` in a thread of its own, whose tokens are read one by one.

    The thread runs ahead of the reader: `left` are the jobs whose end is not read yet, `_growing`
    those the thread still generates for.
    """

    def __init__(
        self, model: CausalModel, jobs: Sequence[GenerationJob], eos: Collection[int]
    ) -> None:
        self._model, self._jobs, self._eos = model, jobs, eos
        self.left, self._growing = set(jobs), set(jobs)
        self._output: queue.SimpleQueue[
            list[tuple[GenerationJob, CompletionChunk]] | Exception | None
        ] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="ingot-generate", daemon=True).start()

    def next(self) -> list[tuple[GenerationJob, CompletionChunk]] | None:
        """Pieces of the next token; None after the last one."""
        output = self._output.get()
        if isinstance(output, Exception):
            raise output
        if output is None:
            return None
        pieces = [(job, piece) for job, piece in output if job in self.left]
        self.left.difference_update(job for job, piece in pieces if piece.finish)
        return pieces

    def drop(self, job: GenerationJob) -> None:
        """Stop generating for a job."""
        self.left.discard(job)
        self._growing.discard(job)

    def _work(self) -> None:
        try:
            self._generate()
            self._output.put(None)
        except Exception as error:
            self._output.put(error)

    @torch.inference_mode()
    def _generate(self) -> None:
        device = next(self._model.parameters()).device
        prompts = [list(job.request.prompt) for job in self._jobs]
        longest = max(map(len, prompts))
        # Shorter prompts are padded on the left, so that all continue at the same position.
        tokens = torch.tensor(
            [[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device
        )
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device
        )
        self._model.inner.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=max(job.request.max_tokens for job in self._jobs),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            logits_processor=[self._choose],
            stopping_criteria=[self._done],
        )

    def _choose(self, ids: Tensor, scores: Tensor) -> Tensor:
        """A logits processor: choose tokens from scores `[B, V]` and set all others to -inf."""
        choices = sample_tokens(
            scores.float(),
            [job.request.sampling for job in self._jobs],
            [job.dice.roll() for job in self._jobs],
        )
        pieces = []
        for job, choice in zip(self._jobs, choices, strict=True):
            if job in self._growing:
                room = (
                    self._model.config.max_position_embeddings
                    - len(job.request.prompt)
                    - job.generated
                    - 1
                )
                piece = job.accept(choice, self._eos, room)
                pieces.append((job, piece))
                if piece.finish:
                    self._growing.discard(job)
        self._output.put(pieces)
        chosen = torch.tensor([[choice.token] for choice in choices], device=scores.device)
        return torch.full_like(scores, float("-inf")).scatter(1, chosen, 0.0)

    def _done(self, ids: Tensor, scores: object, **_: object) -> Tensor:
        """A stopping criterion: which rows `[B]` have ended."""
        return torch.tensor([job not in self._growing for job in self._jobs], device=ids.device)


def _library() -> Any:
    import transformers

    return transformers
