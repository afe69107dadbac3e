"""Cross-entropy against transformers' own loss on the same ids and labels: packed or not, masked as
a chat is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot.data.batches.loader import Batch
from ingot.models.hf.folder import load_model
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.objectives.forward import forward
from tests import tolerances
from tests.models.tiny import make_reference

CPU = torch.device("cpu")
TIME = 20


def batch(lengths: tuple[int, ...], trained_from: tuple[int, ...]) -> Batch:
    """One record a row, padded; trained from some token on."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.zeros(len(lengths), TIME, dtype=torch.int64)
    labels = torch.full_like(tokens, -100)
    segments = torch.zeros_like(tokens)
    for row, (length, begin) in enumerate(zip(lengths, trained_from, strict=True)):
        tokens[row, :length] = torch.randint(0, 97, (length,), generator=generator)
        labels[row, begin - 1 : length - 1] = tokens[row, begin:length]
        segments[row, :length] = 1
    return Batch(
        tokens,
        labels,
        (segments.cumsum(1) - 1).clamp_min(0),
        segments,
        rows=torch.arange(len(lengths)),
    )


@pytest.mark.parametrize("trained_from", [(1, 1, 1), (9, 3, 12)])
def test_the_loss_of_chats_and_texts_is_transformers(
    tmp_path: Path, trained_from: tuple[int, ...]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_reference(tmp_path / "model")
    given = batch((TIME, 7, 13), trained_from)
    loss, _ = forward(load_model(folder, device=CPU), CrossEntropy(), given, "fp32", CPU)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    labels = torch.full_like(given.labels, -100)
    labels[:, 1:] = given.labels[:, :-1]  # transformers shifts by itself
    wanted = theirs(input_ids=given.tokens, attention_mask=given.segments, labels=labels).loss
    assert float(loss) / CrossEntropy().targets(given) == pytest.approx(
        float(wanted), rel=tolerances.REAL_LOSS
    )
