"""Every proved model type of transformers, as a small random model: its own loss and gradients, its
answers, its files in both directions, and that neither padding nor other rows change a text.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.config.models.source import check_model_type
from ingot.config.models.types import (
    BEHIND_PADDING,
    ENDS_AT_EOS,
    LEARNED_POSITIONS,
    LIKE_BART,
    POSITIONED,
    PROVED,
    RELATIVE,
    UNFIT,
    HFKind,
    installed_types,
)
from ingot.config.sections.lora import Lora
from ingot.models.adapters.lora import add_lora, lora_layers
from ingot.models.generation.classifier import classify
from ingot.models.hf.config import read_hf_config
from ingot.models.hf.loading import init_hf_model, load_hf_model
from ingot.models.hf.models import Encoder, HFModel, MaskedLM, Seq2Seq
from tests import tolerances
from tests.models.generation.answers import generate
from tests.models.hf.shrunk import EOS, OWN, VOCAB, shrunk
from tests.models.hf.test_models import assert_same_gradients, nll
from tests.models.hf.tiny import CPU, LABELS, reference, write

LENGTHS = (12, 5, 9, 1)
POSITIONS = torch.arange(12).expand(4, 12)
CASES: list[tuple[HFKind, str]] = [
    (kind, case)
    for kind, types in PROVED.items()
    for name in types
    for case in (name, *(own for own in OWN if own.rpartition("-")[0] == name))
    if kind == "seq2seq" or case == name
]
ALWAYS: set[tuple[HFKind, str]] = {
    ("seq2seq", "umt5"),
    ("seq2seq", "mbart"),
    ("encoder", "xlnet"),
    ("encoder", "albert"),
    ("encoder", "t5"),
    ("encoder", "gpt2"),
    ("masked", "modernbert"),
}
"""Types that go ways of their own; of the others a commit tries one of each family."""


def family(kind: HFKind, case: str) -> str:
    """What a commit tries one of."""
    model_type = case if case in PROVED[kind] else case.rpartition("-")[0]
    groups = {
        "t5": RELATIVE,
        "like-bart": LIKE_BART,
        "at-eos": ENDS_AT_EOS,
        "positioned": POSITIONED,
        "behind-padding": BEHIND_PADDING,
    }
    of_kind = {"t5": RELATIVE, "like-bart": LIKE_BART} if kind == "seq2seq" else groups
    named = [name for name, types in of_kind.items() if model_type in types]
    place = PROVED[kind].index(model_type)
    first_decoder = PROVED["encoder"].index("llama")
    return f"{kind} {named[-1] if named else 'decoder' if place >= first_decoder else 'other'}"


def made(kind: HFKind, case: str, seed: int = 3) -> HFModel:
    config = read_hf_config(shrunk(case, kind), kind, case, LABELS if kind == "encoder" else ())
    model = init_hf_model(config, seed, CPU)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        if model.config.own_head:
            head = model.inner.lm_head.weight
            head.copy_(0.3 * torch.randn(head.shape, generator=generator))
    return model.eval()


def rows() -> tuple[Tensor, Tensor]:
    """Tokens and segments `[4, 12]`, each text with one `eos` at its end."""
    tokens = torch.randint(4, VOCAB - 6, (4, 12), generator=torch.Generator().manual_seed(1))
    length = torch.tensor(LENGTHS)[:, None]
    tokens = tokens.scatter(1, length - 1, EOS)
    segments = (torch.arange(12) < length).long()
    return tokens * segments, segments


def labels_of(kind: HFKind) -> Tensor:
    if kind == "encoder":
        return torch.tensor([0, 2, 1, 1])
    if kind == "masked":
        there = rows()[1] == 1
        asked = there & (torch.arange(48).view(4, 12) % 5 < 2)
        asked[3, 0] = True
        drawn = torch.randint(4, VOCAB - 6, (4, 12), generator=torch.Generator().manual_seed(2))
        return torch.where(asked, drawn, -100)
    labels = torch.randint(4, VOCAB - 6, (4, 7), generator=torch.Generator().manual_seed(2))
    labels[1, 4:], labels[2, 1:] = -100, -100
    return labels


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(
            kind,
            case,
            marks=[pytest.mark.drawn(f"hf types {family(kind, case)}")]
            * ((kind, case) not in ALWAYS),
        )
        for kind, case in CASES
    ],
)
def test_a_type_is_transformers_own(kind: HFKind, case: str, tmp_path: Path) -> None:
    model, (tokens, segments), labels = made(kind, case), rows(), labels_of(kind)
    learned = [
        name
        for name, tensor in model.inner.named_parameters()
        if tensor.requires_grad and re.search(r"(position|\bwpe\b)\w*\.weight$", name)
    ]
    assert bool(learned) == (model.config.model_type in LEARNED_POSITIONS), learned
    opened = reference(model, tmp_path / "ours")
    filled = tokens.masked_fill(segments == 0, model.config.pad)
    if model.config.model_type == "xlnet":  # its tokenizer pads before the text
        order = (torch.arange(12) + segments.sum(1, keepdim=True)) % 12
        filled, mask = filled.gather(1, order), segments.gather(1, order)
    else:
        mask = segments
    wanted = opened(input_ids=filled, attention_mask=mask, labels=labels).loss
    wanted = wanted * (labels >= 0).sum()
    values = model(tokens, POSITIONS, segments, labels, nll)
    assert values.sum().item() == pytest.approx(wanted.item(), rel=tolerances.LOSS_FP32)
    values.sum().backward()
    wanted.backward()
    assert_same_gradients(model, opened)
    _alone_as_in_a_batch(model, tokens, segments, labels, values.detach())
    _answers_alike(model, opened, tokens)
    opened.save_pretrained(tmp_path / "theirs")
    back = load_hf_model(
        model.config, tmp_path / "theirs", device=CPU, dtype=torch.float32, seed=None
    ).eval()
    with torch.no_grad():
        again = back(tokens, POSITIONS, segments, labels, nll)
    torch.testing.assert_close(again, values.detach(), rtol=0, atol=tolerances.LOGITS_FP32)


def _alone_as_in_a_batch(
    model: HFModel, tokens: Tensor, segments: Tensor, labels: Tensor, together: Tensor
) -> None:
    """Without padding, without other rows, and beside a row that is all padding."""
    with torch.no_grad():
        for row, length in enumerate(LENGTHS):
            own = slice(length) if model.config.kind == "masked" else slice(None)
            alone = model(
                tokens[row : row + 1, :length],
                POSITIONS[:1, :length],
                None,
                labels[row : row + 1, own] if labels.ndim == 2 else labels[row : row + 1],
                nll,
            )[0]
            beside_others = together[row, own] if together.ndim == 2 else together[row]
            torch.testing.assert_close(alone, beside_others, rtol=0, atol=tolerances.LOGITS_FP32)
        empty = segments.clone()
        empty[3] = 0
        left_out = labels.clone()
        left_out[3] = -100
        beside = model(tokens * empty, POSITIONS, empty, left_out, nll)
    assert not beside[3].any()
    torch.testing.assert_close(beside[:3], together[:3], rtol=0, atol=tolerances.LOGITS_FP32)


def _answers_alike(model: HFModel, opened: Any, tokens: Tensor) -> None:
    texts = [tokens[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    if isinstance(model, Encoder):
        scores = [opened(input_ids=torch.tensor([text])).logits.softmax(-1) for text in texts]
        torch.testing.assert_close(
            torch.tensor(classify(model, texts)),
            torch.cat(scores).detach(),
            rtol=0,
            atol=tolerances.LOGITS_FP32,
        )
        return
    if isinstance(model, MaskedLM):
        for text in texts:
            ids = torch.tensor([text])
            with torch.no_grad():
                torch.testing.assert_close(
                    model.logits(ids, POSITIONS[:1, : len(text)]),
                    opened(input_ids=ids).logits,
                    rtol=0,
                    atol=tolerances.LOGITS_FP32,
                )
        return
    wrote = generate(model, texts, 6, eos=[VOCAB - 1])
    opened.generation_config = type(opened.generation_config)()
    for text, ours in zip(texts, wrote, strict=True):
        theirs = opened.generate(
            torch.tensor([text]),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=VOCAB - 1,
            pad_token_id=model.config.pad,
            decoder_start_token_id=model.inner.config.decoder_start_token_id,
        )[0, 1:].tolist()
        assert ours == (theirs[: theirs.index(VOCAB - 1)] if VOCAB - 1 in theirs else theirs)


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "albert", "electra", "modernbert"])
def test_a_masked_model_becomes_a_classifier(name: str, tmp_path: Path) -> None:
    """Its trunk is loaded whole, its head left, another one drawn."""
    model = made("masked", name)
    write(model, tmp_path)
    config = read_hf_config(shrunk(name, "encoder"), "encoder", name, LABELS)
    classifier = load_hf_model(config, tmp_path, device=CPU, dtype=torch.float32, seed=0)
    trunk = dict(classifier.inner.base_model.named_parameters())
    own = dict(model.inner.base_model.named_parameters())
    shared = trunk.keys() & own.keys()
    assert len(shared) >= len(own) - 2, "poolers are drawn"
    assert all(torch.equal(trunk[part], own[part]) for part in shared)


def test_a_text_as_long_as_there_are_positions_is_read() -> None:
    """One of each way in which positions are counted; the next token has none."""
    for name in ("albert", "data2vec-text", "longformer", "gpt2", "xlm-roberta-xl", "opt"):
        model = made("encoder", name)
        assert isinstance(model, Encoder)
        longest = model.config.max_position_embeddings
        assert longest == (64 if name in BEHIND_PADDING else 66), name
        tokens = torch.full((1, longest + 1), 7)
        assert model.logits(tokens[:, 1:], torch.arange(longest)[None]).isfinite().all()
    led = made("seq2seq", "led").config
    assert (led.max_position_embeddings, led.target_positions) == (66, 66)


def test_the_tables_are_those_of_the_installed_transformers() -> None:
    from transformers.models.auto import modeling_auto

    for kind, table in (
        ("seq2seq", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("encoder", modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        ("masked", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ):
        assert installed_types(kind) == dict(table)  # type: ignore[arg-type]
        known = {*PROVED[kind], *UNFIT[kind]}  # type: ignore[index]
        assert known <= table.keys()
        assert not {*PROVED[kind]} & {*UNFIT[kind]}  # type: ignore[index]


@pytest.mark.parametrize("name", ["convbert", "fnet", "nystromformer", "yoso"])
def test_a_type_whose_answer_changes_with_padding_is_refused(name: str) -> None:
    """And rightly: transformers' own answers to a text differ."""
    import transformers

    with pytest.raises(WrongInput, match=f"`{name}` is not supported .*changes with the padding"):
        check_model_type({"model_type": name}, "encoder", "here", unproved=True)
    torch.manual_seed(0)
    values = {key: value for key, value in shrunk(name, "encoder").items() if key != "model_type"}
    parsed = transformers.AutoConfig.for_model(name, **values)
    model = transformers.AutoModelForSequenceClassification.from_config(parsed).eval()
    tokens, segments = rows()
    with torch.no_grad():
        padded = model(input_ids=tokens[1:2], attention_mask=segments[1:2]).logits
        alone = model(input_ids=tokens[1:2, :5], attention_mask=segments[1:2, :5]).logits
    assert (padded - alone).abs().max() > 100 * tolerances.LOGITS_FP32


def test_a_type_that_is_not_proved_needs_leave(tmp_path: Path) -> None:
    values = shrunk("switch_transformers", "seq2seq")
    words = r"`switch_transformers` is not proved: .* model.unproved=true"
    with pytest.raises(WrongInput, match=words):
        read_hf_config(values, "seq2seq", "here")
    config = read_hf_config(values, "seq2seq", "here", unproved=True)
    model = init_hf_model(config, 3, CPU).eval()
    assert isinstance(model, Seq2Seq)
    opened = reference(model, tmp_path)
    (tokens, segments), labels = rows(), labels_of("seq2seq")
    wanted = opened(input_ids=tokens, attention_mask=segments, labels=labels).loss
    values_ = model(tokens, POSITIONS, segments, labels, nll)
    assert values_.sum().item() == pytest.approx(
        wanted.item() * int((labels >= 0).sum()), rel=tolerances.LOSS_FP32
    )
    with pytest.raises(WrongInput, match="it hears, and only text is trained"):
        check_model_type({"model_type": "voxtral"}, "seq2seq", "here", unproved=True)


def test_answers_begin_with_the_language_that_training_said() -> None:
    config = read_hf_config(shrunk("m2m_100", "seq2seq"), "seq2seq", "here")
    spoken = dataclasses.replace(config, learnt_start={"forced_bos_token_id": 9})
    model = init_hf_model(spoken, 3, CPU).eval()
    assert isinstance(model, Seq2Seq)
    assert [text[0] for text in generate(model, [[5, 6, EOS], [7, EOS]], 4)] == [9, 9]


def test_an_adapter_is_where_something_learns() -> None:
    """GPT-2's layers are not linear layers to torch, and LED reads some for other inputs alone."""
    with pytest.raises(WrongInput, match="GPT2ForSequenceClassification has no linear layer"):
        add_lora(made("encoder", "gpt2"), Lora(), 0)
    model = made("seq2seq", "led")
    add_lora(model, Lora(rank=2), 0)
    assert lora_layers(model)
    assert not any("_global" in name for name in lora_layers(model))
    (tokens, segments), labels = rows(), labels_of("seq2seq")
    model(tokens, POSITIONS, segments, labels, nll).sum().backward()
    read = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None for parameter in read)
