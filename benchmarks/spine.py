"""The spine against the usual libraries on this machine: a training step, generation."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.comparison import Comparison
from benchmarks.turns import Contender, Turn, Work
from ingot.config.models.presets import preset
from ingot.config.sections.training import AdamW
from ingot.data.batches.loader import Batch
from ingot.models.device import computing_in, resolve_compute
from ingot.models.generation.generator import Generator
from ingot.models.generation.request import Request
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.parallel.apply import WrapSettings, compute_weights_dtype
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import running_mesh
from ingot.train.optim.optimizers import make_optimizer
from ingot.train.step import StepContext, StepControl, train_step

TRANSFORMERS = ("transformers.models.llama.modeling_llama", "transformers.generation")
OPTIMIZER = ("torch._dynamo",)  # every optimizer of torch loads it when it is made


def random_model(name: str) -> Decoder:
    """The preset with random weights, the same in every process."""
    model = Decoder(DecoderConfig.from_hf(preset(name)))
    init_weights(model, 0)
    return model


def random_rows(name: str, rows: int, seq_len: int, seed: int = 0) -> torch.Tensor:
    """Random tokens [rows, seq_len]."""
    return torch.randint(
        0,
        preset(name)["vocab_size"],
        (rows, seq_len),
        generator=torch.Generator().manual_seed(seed),
    )


def train_ours(name: str, rows: int, seq_len: int) -> Work:
    """Our optimizer step, one micro-batch."""
    stack = running_mesh()
    mesh = stack.__enter__()  # lives as long as the process
    torch.set_num_threads(
        int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
    )  # as it was asked: the mesh takes all cores
    model = random_model(name).to(mesh.device).train()
    compute = resolve_compute("auto", mesh.device)
    masters = Masters(
        model, mesh, working=compute_weights_dtype(model, WrapSettings(compute=compute))
    )
    optimizer = make_optimizer(AdamW(), masters)
    tokens = random_rows(name, rows, seq_len)
    labels = torch.cat((tokens[:, 1:], torch.full((rows, 1), -100)), dim=1)
    batch = Batch(
        tokens,
        labels,
        torch.arange(seq_len).expand(rows, seq_len).contiguous(),
        torch.ones_like(tokens),
    )

    context = StepContext(
        model,
        CrossEntropy(),
        masters,
        optimizer,
        mesh,
        StepControl(lambda step: [batch]),
        compute=compute,
        clip_norm=1.0,
    )

    def work() -> Turn:
        outcome = train_step(context)
        return Turn(rows * seq_len, float(outcome.loss))  # waits for the device

    return work


def train_transformers(name: str, rows: int, seq_len: int) -> Work:
    """What transformers' Trainer does in a step: forward with labels, backward, clip, fused
    AdamW.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = preset(name)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            **{key: value for key, value in config.items() if key != "architectures"}
        )
    )
    model.load_state_dict(random_model(name).state_dict(), strict=not config["tie_word_embeddings"])
    model.to(device).train()
    knobs = AdamW()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=knobs.lr,
        betas=knobs.betas,
        eps=knobs.eps,
        weight_decay=knobs.weight_decay,
        fused=True,
    )
    tokens = random_rows(name, rows, seq_len).to(device)
    compute = resolve_compute("auto", device)

    def work() -> Turn:
        with computing_in(compute, device):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Turn(rows * seq_len, float(loss.detach()))

    return work


def generate_ours(name: str, together: int, prompt: int, tokens: int) -> Work:
    """Our continuous batching, greedy."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(name).to(device).eval()
    prompts = random_rows(name, together, prompt).tolist()

    def work() -> Turn:
        with computing_in(resolve_compute("auto", device), device):
            answers = Generator(model, max_rows=together).run(
                [Request(ids, tokens) for ids in prompts]
            )
        return Turn(sum(answer.generated for answer in answers))

    return work


def generate_transformers(name: str, together: int, prompt: int, tokens: int) -> Work:
    """transformers' `generate` on a batch of equally long prompts, greedy."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.for_model(
        **{key: value for key, value in preset(name).items() if key != "architectures"},
        pad_token_id=0,
    )
    config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config).to(device).eval()
    model.load_state_dict(random_model(name).state_dict(), strict=not config.tie_word_embeddings)
    prompts = random_rows(name, together, prompt).to(device)

    def work() -> Turn:
        with torch.no_grad(), computing_in(resolve_compute("auto", device), device):
            made = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                max_new_tokens=tokens,
            )
        return Turn(made[:, prompt:].numel())

    return work


def training(name: str, rows: int, seq_len: int) -> Comparison:
    arguments = (name, rows, seq_len)
    contenders = [
        Contender("ingot", train_ours, arguments, OPTIMIZER),
        Contender("transformers", train_transformers, arguments, (*TRANSFORMERS, *OPTIMIZER)),
    ]
    return Comparison(
        f"training step, {name}, {rows} x {seq_len} tokens",
        "tokens",
        contenders,
        [("ingot", "transformers")],
    )


def generating(name: str, prompt: int, tokens: int) -> Comparison:
    sizes = (1, 8)
    contenders = [
        Contender(f"ingot, {n} together", generate_ours, (name, n, prompt, tokens)) for n in sizes
    ]
    contenders += [
        Contender(
            f"transformers, {n} together",
            generate_transformers,
            (name, n, prompt, tokens),
            TRANSFORMERS,
        )
        for n in sizes
    ]
    ratios = [
        ("ingot, 8 together", "ingot, 1 together"),
        ("ingot, 1 together", "transformers, 1 together"),
        ("ingot, 8 together", "transformers, 8 together"),
    ]
    notes = ["eight together take 8 / (the first ratio) times as long as one alone"]
    return Comparison(
        f"generation, {name}, {prompt} + {tokens} tokens, greedy",
        "tokens",
        contenders,
        ratios,
        notes,
    )


COMPARISONS: dict[str, Callable[[bool, Path], Comparison]] = {
    "train-3m": lambda quick, root: training("llama-3m", 2 if quick else 8, 32 if quick else 256),
    "train-56m": lambda quick, root: training("llama-56m", 1 if quick else 2, 32 if quick else 512),
    "generate": lambda quick, root: generating(
        "llama-3m" if quick else "llama-56m", 4 if quick else 64, 3 if quick else 64
    ),
}
"""Name -> the comparison; the first argument asks for tiny sizes that only show that everything
runs.
"""
