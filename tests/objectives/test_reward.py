"""Reward models against TRL's trainer (loss, metrics and gradients on the same ids) and against
their definition in float64; where the score is read; one run to its evaluation and to transformers.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.config.load import load_recipe
from ingot.config.sections.lora import Lora
from ingot.config.sections.objective import RewardModelSettings
from ingot.data.batches.loader import Batch
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.evaluate.evaluate import evaluate
from ingot.models.adapters.lora import add_lora
from ingot.models.adapters.peft import save_adapter
from ingot.models.hf.config import read_hf_config
from ingot.models.hf.loading import load_hf_model
from ingot.models.hf.models import Encoder
from ingot.models.kinds import open_model
from ingot.objectives.forward import forward
from ingot.objectives.protocol import ObjectiveInputs
from ingot.objectives.reward import RewardModel
from ingot.serve.native.model import load
from ingot.serve.predict import PredictOptions, predict_locally
from ingot.tokenizers.load import load_tokenizer
from ingot.train.trainer import train
from ingot.verify.export import proof as export
from ingot.verify.export.proof import verify_export
from tests import tolerances
from tests.models.tiny import make_reference
from tests.objectives.test_preferences import filled_up, pairs
from tests.objectives.ways import make_ready, recipe_of, write_all
from tests.tokenizers.small import CHATML, bpe_files
from tests.verify.serving import served_here

CPU = torch.device("cpu")


def objective(**knobs: float) -> RewardModel:
    return RewardModel(RewardModelSettings(kind="reward", **knobs), ObjectiveInputs())


def opened(folder: Path, *, by_place: bool = True) -> Encoder:
    values = json.loads((folder / "config.json").read_text())
    config = replace(read_hf_config(values, "encoder", str(folder)), reads_last_place=by_place)
    model = load_hf_model(config, folder, device=CPU, dtype=torch.float32, seed=None)
    assert isinstance(model, Encoder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a score, made by transformers."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = LlamaConfig(**sizes, **heads, num_labels=1, pad_token_id=0)
    target = tmp_path_factory.mktemp("reward") / "model"
    LlamaForSequenceClassification(config).save_pretrained(target)
    return target


def in_trl(folder: Path, batch: Batch, margin: float, center: float) -> tuple[Any, Any]:
    """Its trainer as far as the loss goes: it holds the model and no data."""
    from accelerate import Accelerator
    from transformers import AutoModelForSequenceClassification
    from trl import RewardTrainer
    from trl.trainer.reward_trainer import DataCollatorForPreference

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    trainer = object.__new__(RewardTrainer)
    trainer.__dict__ |= {
        "model": model.train(),
        "accelerator": Accelerator(cpu=True),
        "args": SimpleNamespace(center_rewards_coefficient=center or None),
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "_metrics": {"train": defaultdict(list)},
    }
    rows = [row[seen == 1].tolist() for row, seen in zip(batch.tokens, batch.segments, strict=True)]
    given = [
        {"chosen_ids": one, "rejected_ids": two, **({"margin": margin} if margin else {})}
        for one, two in zip(rows[::2], rows[1::2], strict=True)
    ]
    inputs = DataCollatorForPreference(pad_token_id=0)(given)
    return trainer, trainer.compute_loss(trainer.model, inputs)


@pytest.mark.parametrize(("margin", "center"), [(0.0, 0.0), (0.3, 0.05)])
def test_loss_metrics_and_gradients_are_trls(folder: Path, margin: float, center: float) -> None:
    batch = pairs(4)
    trainer, wanted = in_trl(folder, batch, margin, center)
    wanted.backward()
    model = opened(folder).train()
    found, told = forward(model, objective(margin=margin, center=center), batch, "fp32", CPU)
    (found / 4).backward()
    assert float(found) / 4 == pytest.approx(float(wanted), abs=tolerances.TRL)
    theirs = trainer._metrics["train"]
    for name in ("accuracy", "margin"):
        (value,) = theirs[name]
        assert float(told[f"rewards/{name}"]) / 4 == pytest.approx(value, abs=tolerances.TRL)
    mean = float(told["rewards/chosen"] + told["rewards/rejected"]) / 8
    assert mean == pytest.approx(theirs["mean_reward"][0], abs=tolerances.TRL)
    gradients = {name: one.grad for name, one in trainer.model.named_parameters()}
    for name, parameter in model.inner.named_parameters():
        assert parameter.grad is not None, name
        gap = (parameter.grad - gradients[name]).norm() / gradients[name].norm()
        assert float(gap) < tolerances.TRL, name


def test_formula_holds_in_float64() -> None:
    """Written down once more, without logarithms of a sigmoid."""
    scores = torch.tensor([2.0, -1.0, 0.5, 0.75, -3.0, 4.0], dtype=torch.float64)
    batch = Batch(*[torch.zeros(6, 1, dtype=torch.int64)] * 4, rows=torch.arange(3))
    loss, told = objective(margin=0.4, center=0.1).reduce(scores, batch, lambda part: part)
    wanted = 0.0
    for one, two in scores.view(-1, 2).tolist():
        wanted += -math.log(1 / (1 + math.exp(-(one - two - 0.4)))) + 0.1 * (one + two) ** 2
    assert float(loss) == pytest.approx(wanted, rel=tolerances.EXACT)
    assert float(told["rewards/accuracy"]) == 1
    assert float(told["rewards/margin"]) == pytest.approx(3.0 - 0.25 - 7.0)


def test_what_fills_a_batch_up_counts_nothing(folder: Path) -> None:
    found = []
    for batch in (pairs(3), filled_up(pairs(3))):
        model = opened(folder).train()
        loss, told = forward(model, objective(center=0.1), batch, "fp32", CPU)
        loss.backward()
        assert objective().targets(batch) == 3
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append((float(loss), {name: float(one) for name, one in told.items()}, gradients))
    (loss, told, gradients), (other, also, others) = found
    assert other == pytest.approx(loss, rel=tolerances.SPLIT_LOSS)
    assert also == pytest.approx(told, rel=tolerances.SPLIT_LOSS)
    for one, two in zip(gradients, others, strict=True):
        assert one is not None
        assert torch.allclose(one, two, atol=1e-6)


def test_the_score_is_read_where_a_text_ends_whatever_its_last_id_is(folder: Path) -> None:
    """With an id of padding that ends the texts, too, transformers would read the one before."""
    texts = [[5, 8, 13, 0], [21, 0], [3, 1, 4, 1, 5, 0]]
    tokens = torch.tensor([[*text, *[0] * (6 - len(text))] for text in texts])
    lengths = torch.tensor([len(text) for text in texts])[:, None]
    places = torch.arange(6)
    segments, positions = (places < lengths).long(), places.expand(3, 6)
    model = opened(folder).eval()
    with torch.no_grad():
        found = model.logits(tokens, positions, segments)
        for text, score in zip(texts, found, strict=True):
            states = model.inner.model(torch.tensor([text])).last_hidden_state
            wanted = model.inner.score(states[0, -1])
            assert float(score) == pytest.approx(float(wanted), abs=tolerances.LOGITS_FP32)
        early = opened(folder, by_place=False).eval().logits(tokens, positions, segments)
    assert float((early - found).abs().min()) > 0.01


def test_a_run_scores_as_transformers_does_in_padded_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a tokenizer that pads with the token that ends a chat: the run takes another one, and
    writes it where transformers looks for it.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    write_all(tmp_path)
    (tmp_path / "tokenizer").mkdir()
    ends_chat = CHATML.replace("'<|im_end|>\n'", "'<|im_end|>'")
    names = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    for name, text in bpe_files(ends_chat, **names).items():
        (tmp_path / "tokenizer" / name).write_text(text)
    knobs = {"tokenizer__source": str(tmp_path / "tokenizer"), "tokenizer__vocab_size": None}
    given = {**knobs, "tokenizer__template": None, "data__seq_len": 192}
    recipe = recipe_of(tmp_path, "reward", **given, precision__export="fp32", train__steps=3)
    ingest(recipe)
    prepare(recipe)
    train(recipe)
    assert load_tokenizer(recipe.folder.model).named["pad_token"] == "<|pad|>"
    outcome = evaluate(recipe)
    assert "preference/accuracy" in outcome.result
    report = json.loads((recipe.folder.reports / "evaluate.json").read_text())
    metric = report["metrics"]["preference/accuracy"]
    assert metric["ci_low"] <= metric["value"] <= metric["ci_high"]
    assert metric["n"] > 5
    monkeypatch.setattr(export, "server", served_here)
    proof = verify_export(recipe)
    assert proof.holds, proof.checks
    assert all(check.passed for check in proof.checks), proof.checks
    chats = [
        [{"role": "user", "content": "copper?"}, {"role": "assistant", "content": answer}]
        for answer in ("rings", "cools slowly and rings true", "no")
    ]
    tokenizer = AutoTokenizer.from_pretrained(recipe.folder.model)
    model = AutoModelForSequenceClassification.from_pretrained(recipe.folder.model)
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    padded = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
    assert int(padded["attention_mask"].sum(dim=1).min()) < padded["input_ids"].shape[1]
    wanted = model(**padded).logits[:, 0].tolist()
    loaded = load(recipe.folder.model)
    for chat, score in zip(chats, wanted, strict=True):
        text, scores = predict_locally(loaded, json.dumps(chat), PredictOptions())
        assert scores["score"] == pytest.approx(score, abs=tolerances.LOGITS_FP32)
        assert text == f"{scores['score']:.4f}"


def test_an_adapter_is_read_where_a_text_ends_whatever_its_base_pads_with(tmp_path: Path) -> None:
    base = make_reference(tmp_path / "base", seed=0)
    values = json.loads((base / "config.json").read_text())
    config = read_hf_config({**values, "pad_token_id": 5}, "encoder", "base", labels=["score"])
    config = replace(config, reads_last_place=True)
    model = load_hf_model(config, base, device=CPU, dtype=torch.float32, seed=1).eval()
    add_lora(model, Lora(rank=2), 3)
    save_adapter(model, tmp_path / "adapter", base=str(base), kind="encoder")
    (tmp_path / "adapter" / "ingot.json").write_text('{"schema": 1, "objective": "reward"}')
    row = torch.tensor([[7, 8, 5, 0]])
    seen, places = torch.tensor([[1, 1, 1, 0]]), torch.arange(4)[None]
    for pad in (None, 5):
        (base / "config.json").write_text(json.dumps({**values, "pad_token_id": pad}))
        found = open_model(tmp_path / "adapter", device=CPU)
        with torch.no_grad():
            score = found.logits(row, places, seen)  # type: ignore[union-attr, call-arg, arg-type]
            wanted = model.logits(row, places, seen)  # type: ignore[call-arg, arg-type]
        assert torch.allclose(score, wanted, atol=tolerances.LOGITS_FP32)


@pytest.mark.slow
def test_an_adapter_holds_the_score_and_opens_in_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_ready(tmp_path / "root", ["reward-lora"])
    recipe = recipe_of(root, "reward-lora", train__steps=4)
    train(recipe)
    about = json.loads((recipe.folder.adapter / "adapter_config.json").read_text())
    assert about["modules_to_save"] == ["score"]
    monkeypatch.setattr(export, "server", served_here)
    proof = verify_export(recipe)
    assert all(check.passed for check in proof.checks), proof.checks
    chat = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "copper"}]
    found = [
        predict_locally(load(folder), chat, PredictOptions())[1].values()
        for folder in (recipe.folder.model, recipe.folder.adapter)
    ]
    assert [*found[0]] == pytest.approx([*found[1]], rel=0.01)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parallel.context": 2}, "shared by replicate and shard only"),
    ({"parallel.tensor": 2}, "shared by replicate and shard only"),
    ({"parallel.pipeline": 2}, "shared by replicate and shard only"),
    ({"evaluate.tasks": [{"kind": "loss"}]}, "take kind preference"),
    ({"train.sample_every": 2}, "for models that write"),
]


@pytest.mark.parametrize(("knobs", "message"), REFUSED, ids=str)
def test_what_a_score_cannot_do_is_refused(knobs: dict[str, Any], message: str) -> None:
    given = {"name": "r", "data.train": [{"source": "x"}], "objective.kind": "reward", **knobs}
    with pytest.raises(Exception, match=message):
        load_recipe([], [f"{name}={json.dumps(value)}" for name, value in given.items()])
