"""Loads a model folder for serving: weights, tokenizer, end-of-text tokens."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.config.models.family import is_native
from ingot.config.models.lineage import read_lineage
from ingot.config.models.source import CONFIG, ModelKind, model_config
from ingot.models.device import Compute, graph_recorder, pick_device
from ingot.models.generation.classifier import Classifier
from ingot.models.generation.fillmask import MaskFiller
from ingot.models.generation.generator import Generator
from ingot.models.generation.prefixes import PrefixStore, memory_is_short
from ingot.models.generation.request import Request, check_request
from ingot.models.generation.seq2seq import Seq2SeqRequest, check_seq2seq_request, check_text
from ingot.models.generation.seq2seq_generator import Seq2SeqGenerator
from ingot.models.hf.folder import holds_bf16, stored_shapes
from ingot.models.hf.models import Encoder, MaskedLM, Seq2Seq
from ingot.models.kinds import AnyModel, open_model
from ingot.models.native.decoder import Decoder
from ingot.models.native.joined import join_layers
from ingot.models.native.packed import pack_weights
from ingot.models.packed_folder import open_packed
from ingot.serve.native.causal import (
    CAUSAL_CLASSES,
    CausalModel,
    TextEncoder,
    TransformersGenerator,
    answer_ends,
    is_bare_encoder,
    load_causal_model,
    load_text_encoder,
)
from ingot.serve.native.compute import ONE_THREAD_WEIGHTS, one_thread, serving_compute
from ingot.serve.native.embedding import (
    Embedder,
    EmbeddingRequest,
    EmbeddingWorker,
    Pooling,
    embeds,
    read_pooling,
)
from ingot.serve.native.folder import (
    CheckedFolder,
    check_decoder_folder,
    check_model_folder,
    check_vocabulary,
    most_characters,
)
from ingot.serve.native.masks import encode_with_masks
from ingot.tokenizers.chats.chat import Chat
from ingot.tokenizers.chats.encode import whole_chat_ids
from ingot.tokenizers.sentinels import decoder_for, encode_with_sentinels
from ingot.tokenizers.tokenizer import Tokenizer

MB = 1_000_000

InProcessEngine = Literal["native", "transformers"]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to answer requests.

    `created`: when the folder was made, seconds since the epoch. `prefix` is put before every
    source of a sequence-to-sequence model, as in training. `packed`: see `pack_weights`. `base`:
    as in `CheckedFolder`. `compute`: what answers are computed in. `one_thread`: it is so small
    that one thread answers soonest; how many there are is for the owner of the process to set.
    """

    model: AnyModel | CausalModel
    tokenizer: Tokenizer
    eos: frozenset[int]
    created: int
    kind: ModelKind = "decoder"
    prefix: str = ""
    packed: bool = False
    base: Path | None = None
    compute: Compute = "fp32"
    one_thread: bool = False

    @functools.cached_property
    def most_characters(self) -> int:
        """Characters of the longest text that the model could read."""
        return most_characters(self.tokenizer, self.model.config.max_position_embeddings)

    @property
    def labels(self) -> tuple[str, ...]:
        """The class names of a classifier, in the order of its scores."""
        return self.model.config.labels if isinstance(self.model, Encoder) else ()

    @property
    def tasks(self) -> list[str]:
        """What the model can be asked for, the usual first."""
        if isinstance(self.model, MaskedLM):
            asked = ["masks"]
        elif isinstance(self.model, Encoder):
            asked = ["score" if self.model.config.scores else "classes"]
        elif isinstance(self.model, TextEncoder):
            asked = []
        else:
            talks = self.kind == "decoder" and self.tokenizer.template is not None
            asked = ["chat", "completions"] if talks else ["completions"]
        return [*asked, *(["embeddings"] if embeds(self.model) else [])]

    @property
    def target_positions(self) -> int:
        """How many tokens an answer of a sequence-to-sequence model may have."""
        assert isinstance(self.model, Seq2Seq)
        return self.model.config.target_positions

    def fewest_threads(self) -> contextlib.AbstractContextManager[None]:
        """To be entered while the model answers in a process that has other work, too."""
        return one_thread() if self.one_thread else contextlib.nullcontext()

    def generator(
        self, max_rows: int, prefix_cache_mb: int = 0, *, eager: bool = False
    ) -> Generator:
        """The generator of a decoder; for other kinds use `worker`."""
        assert isinstance(self.model, Decoder)
        return Generator(
            self.model,
            eos=self.eos,
            decode=self.tokenizer.decode,
            max_rows=max_rows,
            prefixes=PrefixStore(prefix_cache_mb * MB, memory_is_short)
            if prefix_cache_mb
            else None,
            record=None if eager else graph_recorder(self.model.head_weight.device),
        )

    def worker(
        self, max_rows: int, prefix_cache_mb: int = 0, *, eager: bool = False
    ) -> Generator | TransformersGenerator | Seq2SeqGenerator | Classifier | MaskFiller | Embedder:
        """The worker for this kind of model, with batches of up to `max_rows`. What prompts have in
        common is kept in `prefix_cache_mb`, where it is one of ingot's own decoders; `eager` as in
        `serve.eager`.
        """
        eos, decode = self.eos, self.tokenizer.decode
        if isinstance(self.model, TextEncoder):
            return Embedder(self.model, max_rows=max_rows)
        if isinstance(self.model, CausalModel):
            return TransformersGenerator(self.model, eos=eos, decode=decode, max_rows=max_rows)
        if isinstance(self.model, Decoder):
            return self.generator(max_rows, prefix_cache_mb, eager=eager)
        if isinstance(self.model, Seq2Seq):
            decode_for = functools.partial(decoder_for, self.tokenizer)
            return Seq2SeqGenerator(
                self.model, eos=eos, decode=decode, max_rows=max_rows, decode_for=decode_for
            )
        if isinstance(self.model, MaskedLM):
            return MaskFiller(self.model, self.tokenizer.mask, max_rows=max_rows)
        assert isinstance(self.model, Encoder)
        return Classifier(self.model, max_rows=max_rows)

    @property
    def scores_chats(self) -> bool:
        """Whether the model gives chats one number, as a reward model does."""
        one_output = isinstance(self.model, Encoder) and self.model.config.scores
        return one_output and self.tokenizer.template is not None

    def serving_worker(
        self, max_rows: int, prefix_cache_mb: int = 0, *, eager: bool = False
    ) -> Any:
        """`worker`, which also embeds texts where the model can."""
        worker = self.worker(max_rows, prefix_cache_mb, eager=eager)
        if isinstance(worker, Embedder) or not embeds(self.model):
            return worker
        return EmbeddingWorker(worker, Embedder(self.model, max_rows=max_rows))

    @functools.cached_property
    def pooling(self) -> Pooling:
        """How texts become vectors. Raises WrongInput for a folder that asks for what is not known
        here.
        """
        return Pooling() if self.base is None else read_pooling(self.base)

    def encode_to_embed(self, text: str) -> list[int]:
        """Token ids of a text as the model's own library frames it."""
        return self.tokenizer.encode_alone(self.pooling.read(text))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens this kind of model expects. To a model that
        scores chats, a text is what a user says.
        """
        if self.kind == "decoder":
            return self.tokenizer.encode_prompt(text)
        if self.scores_chats:
            return self.encode_whole_chat(Chat([{"role": "user", "content": text}]))
        if self.kind == "masked":
            return encode_with_masks(self.tokenizer, text)
        if self.kind == "seq2seq":
            return encode_with_sentinels(self.tokenizer, self.prefix + text)
        return self.tokenizer.encode_alone(text)

    def encode_whole_chat(self, chat: Chat) -> list[int]:
        """Token ids of a chat with its answers, as a model that scores chats was trained on them.

        Raises:
            WrongInput: the model scores no chats, or the template refuses this one.
        """
        if not self.scores_chats:
            raise WrongInput(
                "messages with their answers are for models that score chats; give a text"
            )
        return whole_chat_ids(self.tokenizer, chat)

    def check(self, request: Request) -> None:
        """Raises WrongInput where the model cannot serve the request."""
        if isinstance(request, EmbeddingRequest):
            check_text(request.prompt, self.model.config)
            return
        if request.prompt_logprobs is not None and not isinstance(self.model, Decoder):
            raise WrongInput(
                "log-probabilities of the prompt are known of ingot's own decoders alone; leave"
                " prompt_logprobs, or echo with logprobs, out"
            )
        if isinstance(self.model, Decoder | CausalModel):
            check_request(request, self.model.config)
        elif isinstance(request, Seq2SeqRequest):
            check_seq2seq_request(request, self.model.config)
        else:
            check_text(request.prompt, self.model.config)


def load(
    folder: Path,
    *,
    any_template: bool = False,
    engine: InProcessEngine = "native",
    compute: Compute | Literal["auto"] = "auto",
    pack: bool = False,
) -> LoadedModel:
    """Load `folder` on this machine's accelerator, else on the CPU, to compute as `serving_compute`
    says.

    `native`: our own decoder where it supports the model, else transformers. `transformers`: causal
    models always through its `generate`. `pack`: see `pack_weights` and, on a GPU, `join_layers`.
    Packing takes a second or two per 100 million weights, which a server earns back and a single
    answer does not.

    Raises:
        WrongInput: not a model folder, no tokenizer in it, one that does not fit the model, or,
            unless `any_template`, another chat template than the model was trained with.
    """
    # The tokenizer is checked first, so that a missing one is an error before minutes of loading.
    checked = check_model_folder(folder, any_template=any_template)
    device = pick_device()
    decodes = pack and checked.kind == "decoder"
    pack, join = decodes and device.type == "cpu", decodes and device.type == "cuda"
    compute = serving_compute(compute, folder, device, pack=pack)
    dtype = torch.bfloat16 if compute == "bf16" else torch.float32
    model: AnyModel | CausalModel | None = None
    if is_bare_encoder(checked.folder):
        model = load_text_encoder(folder, device=device, dtype=dtype)
    elif _by_transformers(checked, engine):
        model = load_causal_model(folder, device=device, dtype=dtype)
    elif pack and checked.base == folder and holds_bf16(folder):
        model = open_packed(folder, compute)
    packed = isinstance(model, Decoder)
    if model is None:
        model = open_model(folder, device=device, dtype=dtype)
        packed = pack and isinstance(model, Decoder) and pack_weights(model, compute=compute)
        if join and isinstance(model, Decoder):
            join_layers(model)
    check_vocabulary(checked, model.config.vocab_size)
    counts = (
        map(math.prod, stored_shapes(checked.base).values())  # packed ones are no parameters
        if packed
        else (parameter.numel() for parameter in model.parameters())
    )
    is_small = device.type == "cpu" and sum(counts) < ONE_THREAD_WEIGHTS
    return LoadedModel(
        model,
        checked.tokenizer,
        answer_ends(checked.base, checked.tokenizer, model),
        int((checked.base / CONFIG).stat().st_mtime),
        checked.kind,
        str((read_lineage(folder) or {}).get("prefix", "")),
        packed,
        checked.base,
        compute,
        is_small,
    )


def load_in_a_thread(folder: Path, **options: Any) -> LoadedModel:
    """`load` in a thread that ends, for engines that answer in a thread of their own.

    Each thread that has computed keeps helpers of its own. Where they and the engine's are more
    than the cores, OpenMP lets none wait actively for work, so that every one of the hundreds of
    small products of a token begins with a thread that has to wake up.
    """
    outcome: Future[LoadedModel] = Future()

    def work() -> None:
        try:
            loaded = load(folder, **options)
            if loaded.one_thread:
                torch.set_num_threads(1)  # the process has no other work
            outcome.set_result(loaded)
        except BaseException as error:
            outcome.set_exception(error)

    loader = threading.Thread(target=work, name="ingot-load", daemon=True)
    loader.start()
    loaded = outcome.result()  # a signal may end this wait
    loader.join()
    return loaded


def _by_transformers(checked: CheckedFolder, engine: InProcessEngine) -> bool:
    """Whether transformers runs a decoder. Raises WrongInput for an adapter, which only our own
    decoder loads.
    """
    if checked.kind != "decoder":
        return False
    config = model_config(checked.base)
    if engine == "native":
        causal = any(
            str(name).endswith(CAUSAL_CLASSES) for name in config.get("architectures") or ()
        )
        if is_native(config.get("model_type")) or not causal:
            return False
        say(
            f"{checked.folder}: model_type {config.get('model_type')} is not one of ingot's own"
            " decoders, so transformers generates"
        )
    check_decoder_folder(checked.folder, "transformers", any_template=True)
    return True
