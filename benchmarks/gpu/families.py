"""A tiny model of every family on the device against the same on the CPU, float32: logits, loss and
gradients.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.attention import relative
from benchmarks.gpu.record import Asked, Record
from ingot.models.hf.folder import load_model
from ingot.models.native.decoder import Decoder
from ingot.models.native.head import LogitsView
from tests import tolerances
from tests.models.tiny import FAMILY, make_member

CPU, VOCAB, LENGTH = torch.device("cpu"), 331, 40
FEW = ("llama3.2", "qwen3-window", "gpt_oss")
"""In miniature: plain, windowed, a mixture with sinks."""


def run(asked: Asked, record: Record) -> None:
    torch._dynamo.config.recompile_limit = 64
    for case in FEW if asked.tiny else FAMILY:
        with record.trying(case), tempfile.TemporaryDirectory() as folder:
            model = load_model(make_member(Path(folder) / case, case, vocab_size=VOCAB), device=CPU)
            compare(case, model, asked, record)


def compare(case: str, model: Decoder, asked: Asked, record: Record) -> None:
    here, there = computed(model, CPU), computed(copy.deepcopy(model), asked.device)
    logits, loss, gradients = here
    record.within(
        f"{case}: logits",
        float((there[0] - logits).abs().max()),
        tolerances.LOGITS_FP32,
    )
    record.within(f"{case}: loss", abs(there[1] - loss) / loss, tolerances.LOSS_FP32)
    # A bias on keys has almost no gradient: it is held against the others'.
    scale = max(float(gradient.norm()) for gradient in gradients.values())
    worst = 0.0
    for name, gradient in gradients.items():
        least = 1e-2 * scale
        difference = relative(there[2][name], gradient)
        if float(gradient.norm()) < least:
            difference = float((there[2][name] - gradient).norm()) / least
        worst = max(worst, difference)
    record.within(f"{case}: gradients", worst, tolerances.GRADIENTS_FP32)


def computed(model: Decoder, device: torch.device) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits, loss and gradients, on the CPU."""
    model = model.to(device).train()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=generator).to(device)
    positions = torch.arange(LENGTH, device=device).expand_as(tokens)
    with torch.no_grad():
        logits = model.logits(model.hidden(tokens, positions))
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100, device=device)), 1)
    values = model(tokens, positions, None, labels, nll)
    loss = values.sum() / (labels != -100).sum()
    loss.backward()
    gradients = {
        name: parameter.grad.float().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return logits.float().cpu(), float(loss.detach()), gradients


def nll(view: LogitsView, labels: Tensor, extras: Tensor | None = None) -> Tensor:
    """Negative log-likelihood of each label."""
    return view.logsumexp() - view.gather(labels)
