"""Models of transformers behind our face: its own loss and gradients, on the same ids, for each
model type.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.config.models.types import RELATIVE
from ingot.models.hf.config import read_hf_config
from ingot.models.hf.models import Encoder, HFModel, Seq2Seq
from ingot.models.hf.relative import NAME
from ingot.models.native import head
from ingot.models.native.head import IGNORE, LogitsView
from ingot.objectives.cross_entropy import CrossEntropy
from tests import tolerances
from tests.models.hf.tiny import (
    ALL,
    CPU,
    ENCODERS,
    LABELS,
    SEQ2SEQ,
    VOCAB,
    config,
    drawn,
    in_short,
    reference,
)

LENGTHS = (12, 5, 9, 1)
CLASSES = torch.tensor([0, 2, 1, 1])
POSITIONS = torch.arange(12).expand(4, 12)


def nll(view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
    return -view.log_probability(labels)


def sources() -> tuple[Tensor, Tensor]:
    """Tokens and segments `[4, 12]`; padding is 0, as batches have it, which is an ordinary token
    for some.
    """
    tokens = torch.randint(4, VOCAB - 2, (4, 12), generator=torch.Generator().manual_seed(1))
    segments = (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()
    return tokens * segments, segments


def targets() -> Tensor:
    labels = torch.randint(4, VOCAB - 2, (4, 7), generator=torch.Generator().manual_seed(2))
    labels[1, 4:], labels[2, 1:] = -100, -100
    return labels


def theirs(
    model: HFModel, folder: Path, labels: Tensor, **more: Any
) -> tuple[torch.nn.Module, Tensor]:
    """transformers' model and its loss, which is a mean."""
    opened = reference(model, folder, **more)
    tokens, segments = sources()
    loss: Tensor = opened(
        input_ids=tokens.masked_fill(segments == 0, model.config.pad),
        attention_mask=segments,
        labels=labels,
    ).loss
    return opened, loss * (labels >= 0).sum()


def assert_same_gradients(model: HFModel, opened: torch.nn.Module) -> None:
    named = dict(opened.named_parameters())
    wanted = {
        name: parameter.grad
        for name, parameter in model.inner.named_parameters()
        if parameter.requires_grad
    }
    whole = torch.cat(
        [gradient.flatten() for gradient in wanted.values() if gradient is not None]
    ).norm()
    for name, gradient in wanted.items():
        assert gradient is not None, (
            f"{name} has no part in the loss, and data parallel would wait for it"
        )
        other = named[name].grad
        assert other is not None
        assert (gradient - other).norm() / whole < tolerances.GRADIENTS_FP32, name


@pytest.mark.drawn(keep=5)
@pytest.mark.parametrize("chunk", [2**25, 5 * VOCAB])
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_a_sequence_to_sequence_model_has_transformers_loss(
    name: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CHUNK_LOGITS", chunk)
    model, labels, rows = drawn(name), targets(), []
    assert isinstance(model, Seq2Seq)
    monkeypatch.setattr(
        model, "project", lambda hidden, own=model.project: rows.append(len(hidden)) or own(hidden)
    )
    opened, wanted = theirs(model, tmp_path, labels)
    tokens, segments = sources()
    values = model(tokens, POSITIONS, segments, labels, nll)
    assert values.shape == labels.shape
    assert (values[labels < 0] == 0).all()
    assert values.sum().item() == pytest.approx(wanted.item(), rel=tolerances.LOSS_FP32)
    values.sum().backward()
    wanted.backward()
    assert_same_gradients(model, opened)
    written = int((labels >= 0).sum())
    assert sum(rows[: -(-written // 5)] if chunk != 2**25 else rows) == written < labels.numel()
    assert max(rows) == (written if chunk == 2**25 else 5), "all at once only where they are few"


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_gradients_that_a_sequence_to_sequence_head_makes_in_forward_are_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where logits are one product, in chunks; a bias that is added to them goes the other way."""
    monkeypatch.setattr(head, "CHUNK_LOGITS", 5 * VOCAB)
    model, labels = drawn(name), targets()
    assert isinstance(model, Seq2Seq)
    assert (model.head_weight is not None) == (model.config.model_type in RELATIVE)
    opened, wanted = theirs(model, tmp_path, labels)
    tokens, segments = sources()
    values = model(tokens, POSITIONS, segments, labels, CrossEntropy().token)
    values.sum().backward()
    wanted.backward()
    assert values.sum().item() == pytest.approx(wanted.item(), rel=tolerances.LOSS_FP32)
    assert_same_gradients(model, opened)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_has_transformers_loss(name: str, tmp_path: Path) -> None:
    model = drawn(name)
    assert isinstance(model, Encoder)
    assert model.config.labels == LABELS
    opened, wanted = theirs(model, tmp_path, CLASSES)
    tokens, segments = sources()
    values = model(tokens, POSITIONS, segments, CLASSES, nll)
    assert values.shape == (4,)
    assert values.sum().item() == pytest.approx(wanted.item(), rel=tolerances.LOSS_FP32)
    values.sum().backward()
    wanted.backward()
    assert_same_gradients(model, opened)
    assert {index: str(label) for index, label in opened.config.id2label.items()} == dict(
        enumerate(LABELS)
    )


@pytest.mark.parametrize("name", in_short(ALL))
def test_padding_and_trimming_change_nothing(name: str) -> None:
    model, (tokens, segments), labels = drawn(name), sources(), targets()
    of_kind = labels if name in SEQ2SEQ else CLASSES
    with torch.no_grad():
        together = model(tokens, POSITIONS, segments, of_kind, nll)
        for row, length in enumerate(LENGTHS):
            cut, here = tokens[row : row + 1, :length], of_kind[row : row + 1]
            alone = model(
                cut,
                POSITIONS[:1, :length],
                None,
                here[here >= 0][None] if name in SEQ2SEQ else here,
                nll,
            )
            wanted = (
                together[row][here[0] >= 0][None] if name in SEQ2SEQ else together[row : row + 1]
            )
            torch.testing.assert_close(alone, wanted, rtol=0, atol=tolerances.LOGITS_FP32)


@pytest.mark.parametrize("name", in_short(ALL))
def test_rows_that_are_all_padding_have_no_part(name: str) -> None:
    model, (tokens, segments), labels = (
        drawn(name),
        sources(),
        targets() if name in SEQ2SEQ else CLASSES.clone(),
    )
    few = model(tokens[:3], POSITIONS[:3], segments[:3], labels[:3], nll)
    few.sum().backward()
    wanted = {
        key: parameter.grad.clone()
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    tokens[3], segments[3], labels[3] = 0, 0, -100
    masks: list[Tensor] = []
    reads = model.inner.get_encoder() if name in SEQ2SEQ else model.inner
    hook = reads.register_forward_pre_hook(
        lambda module, given, named: masks.append(named["attention_mask"]), with_kwargs=True
    )
    values = model(tokens, POSITIONS, segments, labels, nll)
    hook.remove()
    assert masks[0].sum(dim=1).tolist() == [
        12,
        5,
        9,
        1,
    ], "a softmax over nothing is not a number with every kernel"
    torch.testing.assert_close(values[:3], few, rtol=0, atol=tolerances.LOGITS_FP32)
    assert not values[3].any()
    values.sum().backward()
    whole = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm()
    for key, parameter in model.named_parameters():
        assert (
            parameter.grad is None
            or (parameter.grad - wanted[key]).norm() / whole < tolerances.GRADIENTS_FP32
        ), key


@pytest.mark.parametrize("name", in_short(ALL))
def test_fast_attention_is_plain_attention(name: str) -> None:
    """Where transformers has a fast one: T5's adds its relative positions to the scores in both."""
    model, (tokens, segments) = drawn(name), sources()
    labels = targets() if name in SEQ2SEQ else CLASSES
    with torch.no_grad():
        fast = model(tokens, POSITIONS, segments, labels, nll)
        if name not in ("deberta-v2", "mpnet"):
            wanted = NAME if model.config.model_type in RELATIVE else "sdpa"
            assert model.inner.config._attn_implementation == wanted
        model.inner.set_attn_implementation("eager")
        torch.testing.assert_close(
            model(tokens, POSITIONS, segments, labels, nll),
            fast,
            rtol=0,
            atol=tolerances.LOGITS_FP32,
        )


def test_a_classifier_s_function_sees_all_texts_of_a_part_filled_batch() -> None:
    """Predictions are kept by row, also where three of four rows are padding."""
    model, (tokens, segments), labels = drawn("bert"), sources(), CLASSES.clone()
    labels[1:] = IGNORE
    seen: list[Tensor] = []

    def chosen(view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        seen.append(view.logits().argmax(-1))
        return nll(view, labels, extras)

    values = model(tokens, POSITIONS, segments, labels, chosen)
    assert [len(one) for one in seen] == [len(tokens)]
    assert not values[1:].any()


def test_extras_are_cut_as_tokens_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_LOGITS", 4 * VOCAB)
    model, (tokens, segments), labels = drawn("t5"), sources(), targets()
    extras = torch.arange(28.0).view(4, 7)
    values = model(
        tokens,
        POSITIONS,
        segments,
        labels,
        lambda view, labels, extras: extras + 0 * view.logsumexp(),
        extras,
    )
    torch.testing.assert_close(values, torch.where(labels >= 0, extras, 0.0))


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        (
            {"model_type": "bort"},
            "seq2seq",
            r"`bort` is not supported as a sequence-to-sequence model \(nearest: `bart`\);",
        ),
        (
            {"model_type": "bert"},
            "seq2seq",
            "`bert` is not supported as a sequence-to-sequence model",
        ),
        (
            {"model_type": "marian"},
            "encoder",
            r"`marian` is not supported as an encoder .*; `ingot show models` names",
        ),
        ({}, "encoder", "model_type `None` is not supported"),
        (
            {**ALL["bart"], "decoder_start_token_id": 99},
            "seq2seq",
            "decoder_start_token_id 99 is not in the vocabulary of 61 tokens",
        ),
        (
            {**ALL["marian-two"], "decoder_vocab_size": 70},
            "seq2seq",
            r"another vocabulary \(70 tokens\) than the encoder \(61\)",
        ),
        ({**ALL["t5"], "pad_token_id": None}, "seq2seq", "pad_token_id is missing"),
        (
            {**ALL["bert"], "hidden_size": "wide"},
            "encoder",
            "transformers does not take this configuration",
        ),
        (
            {**ALL["bert"], "quantization_config": {"bits": 4}},
            "encoder",
            "quantised weights are not supported",
        ),
    ],
)
def test_configurations_that_are_refused(values: dict[str, Any], kind: str, words: str) -> None:
    with pytest.raises(WrongInput, match=f"^here: .*{words}"):
        read_hf_config(values, kind, "here")


def test_positions_are_what_a_text_may_have() -> None:
    assert (
        config("roberta").max_position_embeddings == config("mpnet").max_position_embeddings == 64
    ), "two of 66 are for what padding has"
    assert config("bert").max_position_embeddings == 66
    assert (
        config("t5").max_position_embeddings
        == config("t5", n_positions=512).max_position_embeddings
        == 8192
    )
    assert config("t5", n_positions=10_000).max_position_embeddings == 10_000
    long = {"max_position_embeddings": 128, "original_max_position_embeddings": 16}
    factors = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}
    phi: dict[str, Any] = {"model_type": "phi3", **sizes, **long, "rope_scaling": factors}
    read = read_hf_config(phi, "encoder", "phi3", LABELS)
    assert read.max_position_embeddings == 16, "beyond them texts of a batch change each other"
    model = drawn("roberta")
    assert isinstance(model, Encoder)
    tokens = torch.randint(4, VOCAB, (1, 64), generator=torch.Generator().manual_seed(3))
    assert model.logits(tokens, torch.arange(64)[None]).isfinite().all()


def test_labels_come_from_the_recipe_or_the_folder() -> None:
    named = read_hf_config(config("bert").to_hf(), "encoder", "here")
    assert named.labels == LABELS
    assert read_hf_config(named.to_hf(), "encoder", "here", ("no", "yes")).labels == ("no", "yes")
    assert read_hf_config(ALL["bert"], "encoder", "here").labels == ("LABEL_0", "LABEL_1")
    written = named.to_hf()
    assert written["problem_type"] == "single_label_classification"
    assert written["architectures"] == ["BertForSequenceClassification"]
    assert config("t5").to_hf()["architectures"] == ["T5ForConditionalGeneration"]


@pytest.mark.drawn("an interpreter of its own")
def test_importing_the_face_loads_no_transformers() -> None:
    code = "import sys, ingot.models.hf.loading; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_half_precision_computes_in_it_and_answers_in_float32() -> None:
    for name in ("t5", "bart", "roberta", "modernbert"):
        model, (tokens, segments) = drawn(name), sources()
        labels = targets() if name in SEQ2SEQ else CLASSES
        with torch.no_grad(), torch.autocast(CPU.type, torch.bfloat16):
            values = model(tokens, POSITIONS, segments, labels, nll)
        assert values.dtype == torch.float32
        assert values.isfinite().all()
