"""Greedy generation by 1, 8 and 64 requests at once, bf16 weights, beside transformers' `generate`
and our own without CUDA graphs: tokens a second, those of one request behind a very long prompt,
and the time to the first token of a long one.
"""

from __future__ import annotations

import contextlib
import gc
import io
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.ceilings import wait
from benchmarks.gpu.record import Asked, Record
from benchmarks.gpu.steps import model_values
from ingot.models.device import graph_recorder
from ingot.models.generation.generator import Generator
from ingot.models.generation.request import Request
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.native.joined import join_layers
from ingot.models.parameters import init_weights

TOGETHER, PROMPT, NEW_TOKENS, LONG, DEEP = (1, 8, 64), 128, 128, 1000, 8000
TINY_TOGETHER, TINY_PROMPT, TINY_NEW_TOKENS = (1, 2), 4, 3


def run(asked: Asked, record: Record, *, preset: str) -> None:
    values = model_values(preset, None, tiny=asked.tiny)
    contenders: dict[str, Callable[[dict[str, Any], Asked], Work]] = {
        "ingot": ours,
        "transformers": theirs,
        "ingot_eager": partial(ours, recorded=False),
    }
    for name, make in contenders.items():
        with record.trying(name):
            work, said = make(values, asked), io.StringIO()
            with contextlib.redirect_stderr(said):
                measure(name, work, values["vocab_size"], asked, record)
            del work
            if name == "ingot" and asked.cuda:
                told = said.getvalue().strip()
                record.holds("ingot: steps are recorded", not told, told or "every step")
        gc.collect()


Work = Callable[[list[list[int]], int], None]
"""Continues prompts of equal length by so many tokens."""


def measure(name: str, work: Work, vocabulary: int, asked: Asked, record: Record) -> None:
    sizes = TINY_TOGETHER if asked.tiny else TOGETHER
    length, tokens = (TINY_PROMPT, TINY_NEW_TOKENS) if asked.tiny else (PROMPT, NEW_TOKENS)
    longest = TINY_PROMPT if asked.tiny else LONG
    draw = torch.Generator().manual_seed(0)
    if asked.cuda:
        # Without what the making of the model took.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def seconds(together: int, length: int, tokens: int) -> float:
        prompts = torch.randint(0, vocabulary, (together, length), generator=draw).tolist()
        wait(asked.device)
        began = time.perf_counter()
        work(prompts, tokens)
        wait(asked.device)
        return time.perf_counter() - began

    for together in sizes:
        seconds(together, length, 4)
        rate = together * tokens / seconds(together, length, tokens)
        record.figures(**{f"{name}_{together}_tokens_per_s": rate})
    seconds(1, longest, 1)
    record.figures(**{f"{name}_first_token_s": seconds(1, longest, 1)})
    deep = TINY_PROMPT if asked.tiny else DEEP
    seconds(1, deep, tokens)
    took = seconds(1, deep, tokens) - seconds(1, deep, 1)
    record.figures(**{f"{name}_1_deep_tokens_per_s": (tokens - 1) / took})
    if asked.cuda:
        record.figures(**{f"{name}_allocated_bytes": torch.cuda.max_memory_allocated()})


def ours(values: dict[str, Any], asked: Asked, *, recorded: bool = True) -> Work:
    model = Decoder(DecoderConfig.from_hf(values)).to(asked.device)
    init_weights(model, 0, quick=True)
    model = model.to(torch.bfloat16).eval()
    join_layers(model)
    record = graph_recorder(asked.device) if recorded else None
    generator = Generator(model, max_rows=max(TOGETHER), record=record)

    def work(prompts: list[list[int]], tokens: int) -> None:
        generator.run([Request(prompt, tokens, ignore_eos=True) for prompt in prompts])

    return work


def theirs(values: dict[str, Any], asked: Asked) -> Work:
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {name: value for name, value in values.items() if name != "architectures"}
    config = AutoConfig.for_model(**given, pad_token_id=0)
    config.eos_token_id = None
    with asked.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    @torch.no_grad()
    def work(prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts, device=asked.device)
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens)

    return work
