"""Weights of transformers' models: drawn, read from folders as they lie on the hub, written so that
transformers opens them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.config.sections.lora import Lora
from ingot.models.adapters.lora import add_lora, init_adapter
from ingot.models.adapters.peft import save_adapter
from ingot.models.hf.config import read_hf_config
from ingot.models.hf.loading import hf_weights, init_hf_model, load_hf_model
from ingot.models.hf.models import Encoder, HFModel, Seq2Seq
from ingot.models.kinds import open_model
from ingot.models.spec import ModelSpec, build_model
from tests.models.hf.test_models import POSITIONS, nll, sources, targets
from tests.models.hf.tiny import (
    ALL,
    CPU,
    ENCODERS,
    SEQ2SEQ,
    config,
    drawn,
    in_short,
    reference,
    write,
)


def loaded(
    model: HFModel, folder: Path, *, seed: int | None = None, dtype: torch.dtype = torch.float32
) -> HFModel:
    return load_hf_model(model.config, folder, device=CPU, dtype=dtype, seed=seed).eval()


def assert_equal(one: HFModel, other: HFModel) -> None:
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    buffers = dict(other.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in one.named_buffers())


def change(folder: Path, edit: Any) -> Path:
    """Rewrite the folder's tensors: `edit(tensors)` in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


@pytest.mark.parametrize("name", ALL)
def test_what_is_written_comes_back(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = drawn(name)
    folder = write(model, tmp_path)
    capfd.readouterr()  # what libraries say that are imported for it
    assert_equal(loaded(model, folder), model)
    assert capfd.readouterr().err == ""
    names = [tensor for tensor, _ in hf_weights(model)]
    assert len(set(names)) == len(names)
    assert (
        sum(tensor.numel() for _, tensor in hf_weights(model))
        <= sum(tensor.numel() for tensor in model.parameters()) + 61
    )


@pytest.mark.drawn(keep=6)
@pytest.mark.parametrize("name", ALL)
def test_transformers_opens_what_is_written_and_gives_the_same_logits(
    name: str, tmp_path: Path
) -> None:
    model, (tokens, segments) = drawn(name), sources()
    opened = reference(model, tmp_path)
    filled = tokens.masked_fill(segments == 0, model.config.pad)
    with torch.no_grad():
        if isinstance(model, Seq2Seq):
            labels = targets().clamp_min(5)
            ours = model.project(model.hidden(tokens, segments, labels))
            assert torch.equal(
                ours, opened(input_ids=filled, attention_mask=segments, labels=labels).logits
            )
        else:
            assert torch.equal(
                model.logits(tokens, POSITIONS, segments),
                opened(input_ids=filled, attention_mask=segments).logits,
            )


@pytest.mark.parametrize("name", in_short(ALL))
def test_a_folder_that_transformers_wrote_is_read(name: str, tmp_path: Path) -> None:
    model = drawn(name)
    reference(model, tmp_path / "a").save_pretrained(tmp_path / "b")
    assert_equal(loaded(model, tmp_path / "b"), model)


@pytest.mark.parametrize("name", ["t5", "t5-1.1", "marian", "modernbert", "deberta-v2"])
def test_random_weights_are_transformers_own_for_a_seed(name: str) -> None:
    import transformers

    before = torch.get_rng_state()
    model = init_hf_model(config(name), 5, CPU)
    assert torch.equal(torch.get_rng_state(), before), (
        "whoever draws must not shift the others' random numbers"
    )
    assert_equal(init_hf_model(config(name), 5, CPU), model)
    other = dict(init_hf_model(config(name), 6, CPU).named_parameters())
    assert any(
        not torch.equal(parameter, other[key]) for key, parameter in model.named_parameters()
    )
    torch.manual_seed(5)
    parsed = transformers.AutoConfig.for_model(**config(name).to_hf())
    auto = (
        transformers.AutoModelForSeq2SeqLM
        if name in SEQ2SEQ
        else transformers.AutoModelForSequenceClassification
    )
    for key, tensor in auto.from_config(parsed, dtype=torch.float32).state_dict().items():
        assert torch.equal(model.inner.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", in_short(ALL))
def test_another_model_becomes_the_one_of_the_checkpoint(name: str) -> None:
    """What the constructor computes is there; two heads that are one stay one, and two stay two."""
    model, empty = drawn(name), init_hf_model(config(name), 0, CPU).eval()
    empty.load_state_dict(model.state_dict())
    assert_equal(empty, model)
    assert len(list(empty.parameters())) == len(list(model.parameters()))
    (tokens, segments), labels = (
        sources(),
        (targets() if name in SEQ2SEQ else torch.zeros(4, dtype=torch.int64)),
    )
    with torch.no_grad():
        assert torch.equal(
            empty(tokens, POSITIONS, segments, labels, nll),
            model(tokens, POSITIONS, segments, labels, nll),
        )


@pytest.mark.parametrize("name", ["marian", "bart", "bart-untied"])
def test_what_a_checkpoint_does_not_hold_comes_from_the_source(name: str, tmp_path: Path) -> None:
    """A resumed training gets its weights from a checkpoint, and these from nowhere else: a bias
    that is a buffer, embeddings that nobody reads.
    """
    model = drawn(name)
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    resumed = build_model(
        ModelSpec("seq2seq", model.config, write(model, tmp_path), random=False),
        99,
        filled=False,
    )
    left = {
        key: tensor
        for key, tensor in model.state_dict(keep_vars=True).items()
        if key not in trained
        and id(tensor)
        not in {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    }
    assert any(key.endswith("final_logits_bias") and bool(left[key].any()) for key in left)
    assert all(torch.equal(resumed.state_dict()[key], tensor) for key, tensor in left.items())


def test_tied_tensors_are_one_and_untied_ones_are_two() -> None:
    def count(name: str) -> int:
        return len(
            {
                id(parameter)
                for key, parameter in drawn(name).named_parameters(remove_duplicate=False)
                if "embed_tokens" in key or "lm_head" in key
            }
        )

    assert (count("t5"), count("bart"), count("t5-1.1"), count("mt5")) == (1, 1, 2, 2)
    assert "lm_head.weight" not in dict(hf_weights(drawn("t5")))
    assert {"shared.weight", "lm_head.weight"} <= dict(hf_weights(drawn("t5-1.1"))).keys()


def test_copies_of_tied_tensors_may_lie_in_the_folder(tmp_path: Path) -> None:
    model = drawn("t5")

    def spread(tensors: dict[str, Tensor]) -> None:
        for name in ("encoder.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors["shared.weight"]
        tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = (
            torch.zeros(32, 4)
        )  # as t5-small has it

    assert_equal(loaded(model, change(write(model, tmp_path / "many"), spread)), model)
    only = change(
        write(model, tmp_path / "other"),
        lambda tensors: tensors.update({"lm_head.weight": tensors.pop("shared.weight")}),
    )
    assert_equal(loaded(model, only), model)
    differing = change(
        write(model, tmp_path / "two"),
        lambda tensors: tensors.update({"lm_head.weight": tensors["shared.weight"] + 1}),
    )
    with pytest.raises(
        WrongInput,
        match=r"ties (shared|lm_head).weight to (lm_head|shared).weight, but the two differ",
    ):
        loaded(model, differing)


def test_every_difference_is_named_and_nothing_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = drawn("bert")

    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["bert.encoder.layer.1.output.dense.weight"]
        tensors["bert.encoder.layer.2.output.dense.weight"] = torch.zeros(2)
        tensors["classifier.weight"] = torch.zeros(2, 32)

    folder = change(write(model, tmp_path), spoil)
    monkeypatch.setattr(
        "ingot.models.hf.loading.stored_tensors",
        lambda folder: pytest.fail("read before it was checked"),
    )
    for seed in (None, 1):
        with pytest.raises(WrongInput) as caught:
            loaded(model, folder, seed=seed)
        for words in (
            "bert.encoder.layer.1.output.dense.weight is missing",
            "bert.encoder.layer.2.output.dense.weight is not part of this model",
            "classifier.weight is [2, 32], [3, 32] is wanted",
            "objective.labels",
        ):
            assert words in str(caught.value)


def test_half_a_head_is_an_error_and_not_drawn(tmp_path: Path) -> None:
    model = drawn("roberta")
    folder = change(write(model, tmp_path), lambda tensors: tensors.pop("classifier.out_proj.bias"))
    with pytest.raises(WrongInput, match=r"classifier.out_proj.bias is missing"):
        loaded(model, folder, seed=1)


@pytest.mark.parametrize(
    ("problem", "outputs"),
    [("multi_label_classification", 3), ("multi_label_classification", 1), ("regression", 3)],
)
def test_outputs_that_are_not_one_class_are_refused(
    problem: str, outputs: int, tmp_path: Path
) -> None:
    """A softmax over several independent answers is none of them. A recipe's own classes are a new
    head's.
    """
    folder = write(drawn("bert"), tmp_path)
    values = json.loads((folder / "config.json").read_text())
    names = {str(number): f"is {number}" for number in range(outputs)}
    values |= {"problem_type": problem, "id2label": names, "num_labels": outputs}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(WrongInput, match=rf"`{problem}` with {outputs} outputs is not supported"):
        open_model(folder, device=CPU)
    config = read_hf_config(values, "encoder", "here", labels=["no", "yes"])
    assert config.labels == ("no", "yes")


def test_an_adapter_brings_its_head_whatever_that_of_its_base_is_for(tmp_path: Path) -> None:
    model = drawn("bert")
    folder = write(model, tmp_path / "base")
    values = json.loads((folder / "config.json").read_text())
    values["problem_type"] = "multi_label_classification"
    (folder / "config.json").write_text(json.dumps(values))
    add_lora(model, Lora(rank=2), 0)
    init_adapter(model, 0)
    save_adapter(model, tmp_path / "adapter", base=str(folder), kind="encoder")
    assert open_model(tmp_path / "adapter", device=CPU).config.labels == model.config.labels


BASES: dict[str, tuple[str, str]] = {
    "bert": ("BertModel", ""),
    "roberta": ("RobertaForMaskedLM", "lm_head"),
    "distilbert": ("DistilBertForMaskedLM", "vocab_"),
    "electra": ("ElectraForPreTraining", "discriminator_predictions"),
    "deberta-v2": ("DebertaV2ForMaskedLM", "cls"),
    "modernbert": ("ModernBertForMaskedLM", "decoder"),
    "mpnet": ("MPNetModel", "pooler"),
    "xlm-roberta": ("XLMRobertaModel", "pooler"),
    "camembert": ("CamembertForMaskedLM", "lm_head"),
}


@pytest.mark.parametrize("name", BASES)
def test_a_pretrained_encoder_gets_a_head_from_the_seed(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As they lie on the hub: without a classifier, with the head of another task, names with the
    prefix or without.
    """
    import transformers

    kind, unused = BASES[name]
    torch.manual_seed(0)
    base = getattr(transformers, kind)(transformers.AutoConfig.for_model(**ALL[name]))
    base.save_pretrained(tmp_path)
    model = init_hf_model(config(name), 0, CPU)
    capfd.readouterr()
    first = loaded(model, tmp_path, seed=4)
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert "classifier" in told
    assert "drawn from seed 4" in told
    assert unused in told
    assert_equal(loaded(model, tmp_path, seed=4), first)
    heads = [
        dict(loaded(model, tmp_path, seed=seed).inner.named_parameters())[
            (
                "classifier.out_proj.weight"
                if "roberta" in name or name in ("electra", "mpnet", "camembert")
                else "classifier.weight"
            )
        ]
        for seed in (4, 5)
    ]
    assert not torch.equal(*heads)
    assert isinstance(first, Encoder)
    trunk, mine = base if kind.endswith("Model") else base.base_model, first.inner.base_model
    shared = [
        key for key in mine.state_dict() if not key.startswith("pooler") or kind.endswith("Model")
    ]
    assert len(shared) > 10
    assert all(torch.equal(mine.state_dict()[key], trunk.state_dict()[key]) for key in shared)
    with pytest.raises(WrongInput, match=r"classifier.* is missing"):
        loaded(model, tmp_path)


@pytest.mark.parametrize("prefix", ["bert.", ""])
def test_old_names_of_norms_and_stored_position_tables(prefix: str, tmp_path: Path) -> None:
    """sentence-transformers/all-MiniLM-L6-v2 has such a table, and no prefix."""
    model = drawn("bert")

    def age(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[
                name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                    "LayerNorm.bias", "LayerNorm.beta"
                )
            ] = tensors.pop(name)
        tensors[f"{prefix}embeddings.position_ids"] = torch.arange(66)[None]

    folder = change(write(model, tmp_path), age)
    assert any(name.endswith("gamma") for name in load_file(folder / "model.safetensors"))
    assert_equal(loaded(model, folder), model)


def test_a_bart_without_its_head_or_prefix(tmp_path: Path) -> None:
    """facebook/bart-base is such a one: a base model, and the projection is the embedding."""
    model = drawn("bart")
    model.inner.final_logits_bias.zero_()
    reference(model, tmp_path / "whole").model.save_pretrained(tmp_path / "base")
    names = load_file(tmp_path / "base" / "model.safetensors").keys()
    assert not any(name.startswith(("model.", "lm_head")) for name in names)
    assert_equal(loaded(model, tmp_path / "base"), model)


@pytest.mark.parametrize("name", ["t5", "bart", "modernbert"])
def test_half_precision_is_for_weights_alone(name: str, tmp_path: Path) -> None:
    model = loaded(drawn(name), write(drawn(name), tmp_path), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.bfloat16 not in {buffer.dtype for buffer in model.buffers()}
    (tokens, segments), labels = (
        sources(),
        (targets() if name in SEQ2SEQ else torch.zeros(4, dtype=torch.int64)),
    )
    with torch.no_grad():
        assert model(tokens, POSITIONS, segments, labels, nll).isfinite().all()


def test_generation_settings_are_the_folders_own(tmp_path: Path) -> None:
    model = drawn("bart")
    assert isinstance(model, Seq2Seq)
    folder = write(model, tmp_path)
    (folder / "generation_config.json").write_text(
        json.dumps({"no_repeat_ngram_size": 3, "eos_token_id": [2, 5], "decoder_start_token_id": 2})
    )
    opened = loaded(model, folder)
    assert isinstance(opened, Seq2Seq)
    settings = opened.inner.generation_config
    assert (settings.no_repeat_ngram_size, settings.eos_token_id) == (3, [2, 5])
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(WrongInput, match="is not a generation configuration"):
        loaded(model, folder)


def test_the_encoders_of_this_file_are_all_of_them() -> None:
    assert set(BASES) == set(ENCODERS)
