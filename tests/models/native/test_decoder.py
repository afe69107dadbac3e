"""The decoder against transformers' on the same weights: logits, gradients, packed rows, and a
planted leak.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot.models.hf.folder import load_model
from ingot.models.native import attention, head
from ingot.models.native.decoder import Decoder
from ingot.models.native.head import LogitsView
from tests import tolerances
from tests.models.tiny import CASES, make_reference

CPU = torch.device("cpu")


def negative_log_likelihood(
    view: LogitsView, labels: torch.Tensor, extras: torch.Tensor | None = None
) -> torch.Tensor:
    return view.logsumexp() - view.gather(labels)


def both(folder: Path) -> tuple[Decoder, torch.nn.Module]:
    from transformers import AutoModelForCausalLM

    return (
        load_model(folder, device=CPU),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
    )


def tokens_and_positions(
    batch: int = 2, time: int = 50, vocab: int = 97
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab, (batch, time), generator=generator), torch.arange(time).expand(
        batch, time
    )


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    ours, theirs = both(make_reference(tmp_path, **CASES[case]))
    tokens, positions = tokens_and_positions()
    with torch.no_grad():
        mine, reference = ours.logits(ours.hidden(tokens, positions)), theirs(tokens).logits
    assert reference.std() > 0.3, "the reference must say something for equality to mean something"
    torch.testing.assert_close(mine, reference, atol=tolerances.LOGITS_FP32, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_transformers(case: str, tmp_path: Path) -> None:
    ours, theirs = both(make_reference(tmp_path, **CASES[case]))
    tokens, positions = tokens_and_positions()
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    values = ours(tokens, positions, None, labels, negative_log_likelihood)
    (values.sum() / (labels != -100).sum()).backward()
    theirs(tokens, labels=tokens).loss.backward()
    reference = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        difference = (parameter.grad - reference[name].grad).norm() / reference[name].grad.norm()
        assert difference < tolerances.GRADIENTS_FP32, name


def test_masked_tokens_have_no_value_and_no_gradient(tmp_path: Path) -> None:
    ours, _ = both(make_reference(tmp_path))
    tokens, positions = tokens_and_positions()
    labels = tokens.clone()
    labels[:, 10:] = -100
    values = ours(tokens, positions, None, labels, negative_log_likelihood)
    assert (values[:, 10:] == 0).all()
    assert (values[:, :10] > 0).all()
    values[:, 10:].sum().backward()
    assert all(
        parameter.grad is None or not parameter.grad.any() for parameter in ours.parameters()
    )


def test_chunked_head_gives_what_one_chunk_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = both(make_reference(tmp_path))
    tokens, positions = tokens_and_positions()

    def values_and_gradients() -> tuple[torch.Tensor, list[torch.Tensor]]:
        ours.zero_grad()
        values = ours(tokens, positions, None, tokens, negative_log_likelihood)
        (values * torch.linspace(0.5, 2, 100).view(2, 50)).sum().backward()
        return values.detach(), [
            parameter.grad.clone() for parameter in ours.parameters() if parameter.grad is not None
        ]

    whole, whole_gradients = values_and_gradients()
    monkeypatch.setattr(
        head, "CHUNK_LOGITS", 97 * 7
    )  # 100 tokens in chunks of 7: the last one is short
    pieces, piece_gradients = values_and_gradients()
    torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=0)
    for one, other in zip(piece_gradients, whole_gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def packed_row() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three documents of 7, 20 and 23 tokens in one row."""
    tokens, _ = tokens_and_positions(batch=1)
    lengths = (7, 20, 23)
    segments = torch.cat(
        [torch.full((length,), number + 1) for number, length in enumerate(lengths)]
    )[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return tokens, positions, segments


def largest_packing_difference(ours: Decoder) -> float:
    tokens, positions, segments = packed_row()
    with torch.no_grad():
        together = ours.logits(ours.hidden(tokens, positions, segments))
        worst = 0.0
        for number in (1, 2, 3):
            here = segments[0] == number
            alone = ours.logits(ours.hidden(tokens[:, here], positions[:, here]))
            worst = max(worst, float((together[:, here] - alone).abs().max()))
    return worst


def test_packed_documents_give_what_they_give_alone(tmp_path: Path) -> None:
    ours, _ = both(make_reference(tmp_path))
    assert largest_packing_difference(ours) < tolerances.PACKED


@pytest.mark.parametrize("leak", ["no mask", "mask without documents"])
def test_a_leak_between_documents_would_be_seen(
    leak: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = both(make_reference(tmp_path))
    right = attention.document_mask
    if leak == "no mask":
        monkeypatch.setattr(attention, "document_mask", lambda segments, window: None)
    else:
        monkeypatch.setattr(
            attention,
            "document_mask",
            lambda segments, window: right(torch.ones_like(segments), window),
        )
    assert largest_packing_difference(ours) > 100 * tolerances.PACKED


def test_padding_changes_nothing_before_it(tmp_path: Path) -> None:
    ours, _ = both(make_reference(tmp_path))
    tokens, positions = tokens_and_positions(batch=1)
    segments = torch.ones_like(tokens)
    segments[:, 30:] = 0
    with torch.no_grad():
        padded = ours.hidden(tokens, positions, segments)
        alone = ours.hidden(tokens[:, :30], positions[:, :30])
    assert torch.isfinite(padded).all()
    torch.testing.assert_close(padded[:, :30], alone, atol=tolerances.PACKED, rtol=0)
