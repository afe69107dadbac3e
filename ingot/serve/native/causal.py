"""Serves any causal model of transformers as `Generator` serves ours: the same sampling, stop
strings, streaming and log-probabilities.

transformers prepares and runs the model and its cache; the decoding loop is the one of our own
decoder, in the caller's thread.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.base.errors import WrongInput, one_line
from ingot.base.progress import say
from ingot.config.models.content import check_content
from ingot.config.models.family import is_native, longrope_turn
from ingot.config.models.source import model_config
from ingot.config.models.types import check_own_code, installed_types
from ingot.models.adapters.peft_config import is_adapter
from ingot.models.generation.generator import eos_ids
from ingot.models.generation.loop import DecodingLoop, GenerationJob
from ingot.models.generation.request import CompletionChunk, Decode, ModelLimits
from ingot.models.generation.seq2seq_rows import prepared
from ingot.models.hf.config import read_hf_config
from ingot.models.hf.models import TextReader
from ingot.models.kinds import AnyModel
from ingot.models.native.decoder import Decoder
from ingot.serve.native.masks import fills_masks
from ingot.tokenizers.tokenizer import Tokenizer

# Suffixes of the names of transformers' causal model classes.
CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel")
# Those of encoders without classes.
BARE_CLASSES = ("Model", "ForMaskedLM", "ForPreTraining")
# Names of the number of positions in configurations; the latter is MPT's.
POSITIONS = ("max_position_embeddings", "max_seq_len")
# Positions assumed for models whose configuration gives no number, or -1: those with relative
# positions or a recurrent state.
DEFAULT_POSITIONS = 8192
# Tokens of the two prompts that are decoded together to see whether they mix: one is shorter than
# the convolutions of recurrent models, one longer.
TRIED = (2, 6)


@dataclass(frozen=True)
class CausalModel:
    """A causal model of transformers, in evaluation mode."""

    inner: Any
    config: ModelLimits

    def parameters(self) -> Iterator[Tensor]:
        """All weights."""
        return iter(self.inner.parameters())

    @functools.cached_property
    def keeps_rows_apart(self) -> bool:
        """Whether requests of one batch get the logits that each gets alone, within rounding; said
        where they do not. Tried, since a type that reads padding, or its neighbours, reports no
        error.
        """
        mixed = _how_rows_mix(self)
        if mixed is not None:
            say(
                f"transformers' {type(self.inner).__name__} does not compute requests together as"
                f" alone ({mixed}); each is answered by itself, and others wait"
            )
        return mixed is None

    @functools.cached_property
    def turns_at(self) -> int | None:
        """The tokens from which on LongRoPE computes a whole batch otherwise; None: it is not
        used.
        """
        return longrope_turn(self.inner.config.get_text_config().to_dict())


class TextEncoder(CausalModel):
    """An encoder of transformers without a head, in evaluation mode: for vectors of texts."""


def load_causal_model(folder: Path, *, device: torch.device, dtype: torch.dtype) -> CausalModel:
    """Load the model in `folder` with transformers; code in the folder is never run.

    Raises:
        WrongInput: transformers does not support it as a causal model, or its tensors do not fit or
            changed since their export.
    """
    inner = _load(folder, "AutoModelForCausalLM", device, dtype)
    # Lengths, sampling and end tokens come from each request, never from the folder.
    inner.generation_config = type(inner.generation_config)()
    config = inner.config.get_text_config()
    named = [getattr(config, name, None) or 0 for name in POSITIONS]
    positions = next((int(count) for count in named if count > 0), DEFAULT_POSITIONS)
    return CausalModel(inner, ModelLimits(int(config.vocab_size), positions))


def is_bare_encoder(folder: Path) -> bool:
    """Whether a folder holds an encoder without classes, as sentence-transformers keep them."""
    if is_adapter(folder):
        return False
    config = model_config(folder)
    kind = config.get("model_type")
    return (
        not fills_masks(folder, config)
        and any(
            str(name).endswith(BARE_CLASSES) and not str(name).endswith(CAUSAL_CLASSES)
            for name in config.get("architectures") or ()
        )
        and not is_native(kind)
        and not config.get("is_encoder_decoder")
        and kind in installed_types("encoder")
    )


def load_text_encoder(folder: Path, *, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Load the encoder in `folder`, its heads left out. Raises as `load_causal_model` does."""
    read = read_hf_config(model_config(folder), "encoder", str(folder), unproved=True)
    inner = _load(folder, "AutoModel", device, dtype)
    return TextEncoder(inner, ModelLimits(read.vocab_size, read.max_position_embeddings))


def _load(folder: Path, kind: str, device: torch.device, dtype: torch.dtype) -> Any:
    check_content(folder)
    what = "an encoder" if kind == "AutoModel" else "a causal model"
    library = _library()
    library.utils.logging.disable_progress_bar()
    try:
        inner, info = getattr(library, kind).from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # each model class has exceptions of its own
        check_own_code(model_config(folder), str(folder))
        reason = one_line(error)
        raise WrongInput(
            f"{folder} does not open in transformers as {what} ({reason}); give another"
            " model, or another serve.engine"
        ) from None
    # A pooler on top of an encoder is not read, and folders of masked models have none.
    missing = [name for name in info["missing_keys"] if "pooler" not in name]
    if wrong := sorted(map(str, [*missing, *info["mismatched_keys"]])):
        check_own_code(model_config(folder), str(folder))
        raise WrongInput(
            f"{folder}: {', '.join(wrong[:4])} missing, or of another shape than its config.json"
            " says; fetch the model again"
        )
    return inner.to(device).eval()


class TransformersGenerator(DecodingLoop):
    """Generates for up to `max_rows` requests together, one token of each per step. A batch runs
    until its last answer ends; requests that arrive meanwhile wait for the next batch, since caches
    of transformers' many kinds of models take no rows in. Where a model does not keep rows apart, a
    batch is one request.

    Args:
        eos: tokens that end an answer.
        decode: ids to text.
    """

    def __init__(
        self, model: CausalModel, *, eos: Collection[int], decode: Decode, max_rows: int = 8
    ) -> None:
        super().__init__(model.config, eos=eos, decode=decode, max_rows=max_rows)
        self._model = model
        self._reset()

    @property
    def rows(self) -> int:
        """Requests of the running batch that are not finished."""
        return len(self._running)

    def _drop(self, job: GenerationJob) -> None:
        self._running.discard(job)
        if not self._running:
            self._reset()

    def _reset(self) -> None:
        self._jobs: list[GenerationJob] = []  # by their row, the finished ones too
        self._running: set[GenerationJob] = set()
        self._logits: Generator[Tensor, list[int] | None, None] | None = None
        self._begun = False  # whether the first of them are given

    def _admit(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        self._make_room()
        if not self._running and self._pending:
            self._jobs = [self._pending.popleft() for _ in range(self._together())]
            self._running = set(self._jobs)
            self._logits = next_logits(
                self._model.inner,
                [job.request.prompt for job in self._jobs],
                max(job.request.max_tokens - job.generated for job in self._jobs),
            )
        return []

    def _together(self) -> int:
        """How many of the waiting requests are computed in one batch, as each would be alone."""
        count = min(self._max_rows, len(self._pending))
        if count > 1 and not self._model.keeps_rows_apart:
            count = 1
        if (turn := self._model.turns_at) is not None:
            jobs = [self._pending[index] for index in range(count)]
            while count > 1 and not _on_one_side(jobs[:count], turn):
                count -= 1
        return count

    def _make_room(self) -> None:
        """Begin the batch again with the requests that run, once it fills the model's positions.

        Rows that are finished go on beside the others, and padding takes places: behind the last
        position there is none in the model's tables, and the step would fail for all.
        """
        longest = max((len(job.request.prompt) for job in self._jobs), default=0)
        written = max((len(job.written) for job in self._running), default=0)
        if longest + written < self._limits.max_position_embeddings:
            return
        left = [job for job in self._jobs if job in self._running]
        self._reset()
        for job in left:
            job.begin_again()
        self._pending.extendleft(reversed(left))

    def _advance(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        if self._logits is None:
            return []
        logits = self._logits.send([job.last for job in self._jobs] if self._begun else None)
        self._begun = True
        rows = [row for row, job in enumerate(self._jobs) if job in self._running]
        pieces = self._accept([self._jobs[row] for row in rows], logits[rows])
        self._running.difference_update(job for job, piece in pieces if piece.finish)
        if not self._running:
            self._reset()
        return pieces


def _on_one_side(jobs: Sequence[GenerationJob], turn: int) -> bool:
    """Whether no row of a batch comes to more than `turn` tokens, or all begin with more. Finished
    rows go on beside the others.
    """
    lengths = [len(job.request.prompt) for job in jobs]
    written = max(job.request.max_tokens - job.generated for job in jobs)
    return max(lengths) + written <= turn or min(lengths) > turn


def next_logits(
    inner: Any, prompts: Sequence[Sequence[int]], max_tokens: int
) -> Generator[Tensor, list[int] | None, None]:
    """Logits `[B, V]` for the token after each prompt; sent the token chosen for each row, those
    for the one after it, and so on. Computed in the thread that asks.

    transformers' `generate` prepares inputs, mask and cache, as each kind of model needs them; the
    loop itself, which `generate` would run to its end, is the caller's.
    """
    device = inner.device
    longest = max(map(len, prompts))
    # Shorter prompts are padded on the left, so that all continue at the same position.
    tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    ids, _, state = inner.generate(
        tokens.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        custom_generate=prepared,
    )
    outputs = inner(
        **inner.prepare_inputs_for_generation(ids, is_first_iteration=True, **state),
        return_dict=True,
    )
    with inner._optimize_model_for_decode():
        while True:
            state = inner._update_model_kwargs_for_generation(outputs, state)
            chosen = yield outputs.logits[:, -1].float()
            assert chosen is not None
            ids = torch.cat([ids, torch.tensor(chosen, device=device)[:, None]], dim=1)
            inputs = inner.prepare_inputs_for_generation(
                ids, next_sequence_length=1 if state["use_cache"] else None, **state
            )
            outputs = inner(**inputs, return_dict=True)


def _how_rows_mix(model: CausalModel) -> str | None:
    """What goes wrong where a short and a longer prompt are decoded together; None if nothing does.

    Rounding may take half of the digits of how much the logits of both differ: what rows take from
    each other, or from padding, is about as much as that.
    """
    vocabulary = model.config.vocab_size
    ids = [1 + index * (vocabulary - 1) // TRIED[1] for index in range(TRIED[1])]
    prompts = [ids[-TRIED[0] :], ids]
    try:
        alone = torch.cat([_tried_logits(model.inner, [prompt], ids) for prompt in prompts])
        together = _tried_logits(model.inner, prompts, ids)
    except Exception as error:  # each model class has exceptions of its own
        return one_line(error, 200, kind=True)
    rounding = torch.finfo(model.inner.dtype).eps ** 0.5
    apart, differ = ((alone - other).abs().max() for other in (together, alone.flip(0)))
    return None if apart <= rounding * differ else "its logits change with those beside it"


def _tried_logits(inner: Any, prompts: Sequence[Sequence[int]], ids: Sequence[int]) -> Tensor:
    """Logits `[B, 3, V]` behind prompts, and behind two more tokens, the same for all."""
    steps = next_logits(inner, prompts, 3)
    first = next(steps)
    more = [steps.send([token] * len(prompts)) for token in ids[:2]]
    return torch.stack([first, *more], dim=1)


def _library() -> Any:
    import transformers

    return transformers


def answer_ends(
    folder: Path, tokenizer: Tokenizer, model: AnyModel | CausalModel
) -> frozenset[int]:
    """The tokens that end an answer. What the model cannot write is none, and is told."""
    if isinstance(model, TextReader | TextEncoder):
        return frozenset()
    said, size = eos_ids(folder, tokenizer.special.eos), model.config.vocab_size
    named = frozenset(token for token in said if 0 <= token < size)
    if unknown := sorted(said - named):
        say(
            f"{folder}: eos_token_id names {', '.join(map(str, unknown))}, which no answer can end"
            f" with, since the vocabulary has {size:,} tokens; mend generation_config.json"
        )
    if isinstance(model, Decoder | CausalModel):
        return named
    # Targets end as the tokenizer frames them. An id from the configuration may be an ordinary
    # token of a tokenizer that was trained here.
    special = set(tokenizer.special_ids.values())
    ends = tokenizer.target_frame[1][-1:]
    return frozenset([*(token for token in named if token in special), *ends])
