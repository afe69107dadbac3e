"""The distillation loss against its formula in float64, chunked and whole, with gradients for the
student alone.
"""

from __future__ import annotations

import pytest
import torch

from ingot.config.sections.objective import DistillSettings
from ingot.data.batches.loader import Batch
from ingot.models.native import head
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.objectives.distill import Distill
from ingot.objectives.forward import forward
from ingot.objectives.protocol import ObjectiveInputs
from tests import tolerances

VOCAB, TIME = 41, 12
SIZES = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}


def decoder(hidden: int, seed: int) -> Decoder:
    model = Decoder(DecoderConfig.from_hf({**SIZES, "hidden_size": hidden}))
    init_weights(model, seed)
    return model


def distill(teacher: Decoder, temperature: float, alpha: float) -> Distill:
    settings = DistillSettings(
        kind="distill", teacher="given", temperature=temperature, alpha=alpha
    )
    return Distill(settings, ObjectiveInputs(teacher=teacher))


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (3, TIME), generator=generator)
    labels = tokens.roll(-1, 1).clone()
    labels[:, -1] = -100
    labels[1, 4:] = -100
    positions = torch.arange(TIME).repeat(3, 1)
    return Batch(tokens, labels, positions, torch.ones_like(tokens), rows=torch.arange(3))


def by_formula(
    student: Decoder, teacher: Decoder, given: Batch, temperature: float, alpha: float
) -> torch.Tensor:
    """In float64, token by token, as the paper writes it."""

    def logits(model: Decoder) -> torch.Tensor:
        model = model.double()
        return torch.nn.functional.linear(
            model.hidden(given.tokens, given.positions), model.head_weight
        )

    ours, theirs = logits(student), logits(teacher).detach()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(3):
        for place in range(TIME):
            label = int(given.labels[row, place])
            if label == -100:
                continue
            p_teacher, p_student = (
                (one[row, place] / temperature).softmax(-1) for one in (theirs, ours)
            )
            divergence = (p_teacher * (p_teacher.log() - p_student.log())).sum()
            cross_entropy = -ours[row, place].softmax(-1)[label].log()
            total = total + (1 - alpha) * cross_entropy + alpha * temperature**2 * divergence
    return total


@pytest.mark.parametrize(("temperature", "alpha"), [(2.0, 0.5), (1.0, 1.0), (4.0, 0.1)])
@pytest.mark.parametrize("chunk", [head.CHUNK_LOGITS, 5 * VOCAB])
def test_it_is_the_formula_in_float64(
    temperature: float, alpha: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CHUNK_LOGITS", chunk)
    student, teacher, given = decoder(16, 0), decoder(24, 1).eval().requires_grad_(False), batch()
    objective = distill(teacher, temperature, alpha)
    loss, _ = forward(student, objective, given, "fp32", torch.device("cpu"))
    loss.backward()
    found = {
        name: parameter.grad.double()
        for name, parameter in student.named_parameters()
        if parameter.grad is not None
    }
    assert objective.targets(given) == 2 * (TIME - 1) + 4
    assert all(parameter.grad is None for parameter in teacher.parameters())
    student.zero_grad()
    wanted = by_formula(student, teacher, given, temperature, alpha)
    wanted.backward()
    assert float(loss) == pytest.approx(float(wanted), rel=tolerances.LOSS_FP32)
    for name, parameter in student.named_parameters():
        assert parameter.grad is not None
        assert (
            float((found[name] - parameter.grad).norm() / parameter.grad.norm())
            < tolerances.GRADIENTS_FP32
        ), name


def test_a_teacher_that_is_the_student_leaves_the_cross_entropy_alone() -> None:
    student, given = decoder(16, 0), batch()
    twin = decoder(16, 0).eval()
    plain, _ = forward(student, distill(twin, 2.0, 1e-9), given, "fp32", torch.device("cpu"))
    half, _ = forward(student, distill(twin, 2.0, 0.5), given, "fp32", torch.device("cpu"))
    assert float(half) == pytest.approx(float(plain) / 2, rel=tolerances.LOSS_FP32)
