"""Losses on pairs against TRL: loss, rewards and gradients on the same ids, and against their
definitions in float64; what fills a batch up counts nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from datasets import Dataset

from ingot.config.sections.objective import DPOSettings, IPOSettings, ORPOSettings, SimPOSettings
from ingot.data.batches.loader import Batch, fixed_batches
from ingot.data.batches.rows import open_rows
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.models.hf.folder import load_model
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.objectives.forward import forward
from ingot.objectives.preferences import (
    DPO,
    IPO,
    ORPO,
    Answers,
    PairObjective,
    SimPO,
    answer_sums,
)
from ingot.objectives.protocol import ObjectiveInputs
from tests import tolerances
from tests.models.tiny import make_reference
from tests.small import small_recipe
from tests.tokenizers.small import chatty

if TYPE_CHECKING:
    from trl import DPOTrainer

CPU = torch.device("cpu")


def pairs(count: int = 4, time: int = 24, seed: int = 0, prompt_length: int = 3) -> Batch:
    """Chosen and rejected rows of unequal lengths behind prompts of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(2 * count, time, dtype=torch.int64)
    labels = torch.full_like(tokens, -100)
    for pair in range(count):
        prompt = torch.randint(1, 97, (prompt_length + pair,), generator=generator)
        for side in range(2):
            answer = torch.randint(1, 97, (2 + 3 * pair + side,), generator=generator)
            ids = torch.cat((prompt, answer))
            tokens[2 * pair + side, : len(ids)] = ids
            labels[2 * pair + side, len(prompt) - 1 : len(ids) - 1] = answer
    segments = (tokens != 0).long()
    positions = (segments.cumsum(1) - 1).clamp_min(0)
    return Batch(tokens, labels, positions, segments, rows=torch.arange(count))


def dpo(reference: torch.Tensor, **knobs: Any) -> DPO:
    return DPO(DPOSettings(kind="dpo", **knobs), ObjectiveInputs(reference))


def ipo(reference: torch.Tensor, **knobs: Any) -> IPO:
    return IPO(IPOSettings(kind="ipo", beta=0.3, **knobs), ObjectiveInputs(reference))


def filled_up(batch: Batch) -> Batch:
    """With one sample more, of two rows, that only fills the batch up."""
    fillers = {"tokens": 0, "labels": -100, "positions": 0, "segments": 0}
    longer = {
        name: torch.cat((one := getattr(batch, name), torch.full((2, one.shape[1]), filler)))
        for name, filler in fillers.items()
    }
    rows = torch.cat((batch.rows, torch.tensor([-1])))
    rated = torch.zeros(min(len(batch.ratings), 1), dtype=torch.int64)
    return replace(batch, **longer, rows=rows, ratings=torch.cat((batch.ratings, rated)))


def as_trl(batch: Batch) -> dict[str, torch.Tensor]:
    """TRL has all chosen ones first, and marks the tokens of answers rather than what predicts
    them.
    """
    order = torch.cat(
        (torch.arange(0, len(batch.tokens), 2), torch.arange(1, len(batch.tokens), 2))
    )
    mask = torch.zeros_like(batch.labels)
    mask[:, 1:] = (batch.labels[:, :-1] != -100).long()
    return {
        "input_ids": batch.tokens[order],
        "attention_mask": batch.segments[order],
        "completion_mask": mask[order],
    }


def trainer(folder: Path, reference: Path, tmp_path: Path, **knobs: Any) -> DPOTrainer:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    made = DPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        **knobs,
    )
    words = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    chatty().save(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    policy, other = (
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)
        for one in (folder, reference)
    )
    return DPOTrainer(
        model=policy, ref_model=other, args=made, train_dataset=words, processing_class=tokenizer
    )


def log_probabilities(folder: Path, batch: Batch) -> torch.Tensor:
    model = load_model(folder, device=CPU)
    with torch.no_grad():
        return answer_sums(
            -model(
                batch.tokens, batch.positions, batch.segments, batch.labels, CrossEntropy().token
            ),
            lambda part: part,
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("dpo")
    return make_reference(root / "policy", seed=0), make_reference(root / "reference", seed=1)


# TRL smooths labels in `aot`, which for a single pair is conservative DPO, and its `sft` averages
# over the tokens of a whole micro-batch, which for a single pair is the mean of its answer.
@pytest.mark.parametrize(
    ("kind", "theirs_knobs", "ours_knobs", "count"),
    [
        ("sigmoid", {}, {}, 4),
        ("aot", {"label_smoothing": 0.2}, {"label_smoothing": 0.2}, 1),
        ("sigmoid_norm", {}, {"normalize_length": True}, 4),
        ("sigmoid sft", {"loss_weights": [1.0, 0.7]}, {"sft_weight": 0.7}, 1),
        ("ipo", {}, {"ipo": True}, 4),
    ],
)
def test_loss_rewards_and_gradients_are_trls(
    folders: tuple[Path, Path],
    tmp_path: Path,
    kind: str,
    theirs_knobs: dict[str, Any],
    ours_knobs: dict[str, Any],
    count: int,
) -> None:
    policy, reference = folders
    batch = pairs(count)
    theirs = trainer(policy, reference, tmp_path, beta=0.3, loss_type=kind.split(), **theirs_knobs)
    theirs.model.train()
    wanted = theirs.compute_loss(theirs.model, as_trl(batch))
    wanted.backward()
    model = load_model(policy, device=CPU).train()
    known = log_probabilities(reference, batch)
    objective: PairObjective = (
        ipo(known) if "ipo" in ours_knobs else dpo(known, beta=0.3, **ours_knobs)
    )
    found, told = forward(model, objective, batch, "fp32", CPU)
    (found / count).backward()
    assert float(found) / count == pytest.approx(float(wanted), abs=tolerances.TRL)
    logged = {name: values[-1] for name, values in theirs._metrics["train"].items()}
    # TRL logs rewards of whole answers where it compares means.
    for ours, name in (
        (
            ("chosen", "chosen"),
            ("rejected", "rejected"),
            ("accuracy", "accuracies"),
            ("margin", "margins"),
        )
        if kind not in ("sigmoid_norm", "ipo")
        else ()
    ):
        assert float(told[f"rewards/{ours}"]) / count == pytest.approx(
            logged[f"rewards/{name}"], abs=tolerances.TRL
        ), name
    assert_gradients_equal(model, theirs)


def without_reference(kind: str, folder: Path, **knobs: Any) -> Any:
    """TRL's trainer of CPO or ORPO as far as its loss goes: it holds the model and no data."""
    import importlib

    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    module = importlib.import_module(f"trl.experimental.{kind}.{kind}_trainer")
    kept = object.__new__(getattr(module, f"{kind.upper()}Trainer"))
    kept.__dict__ |= {
        "model": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train(),
        "accelerator": Accelerator(cpu=True),
        "is_encoder_decoder": False,
        "padding_value": 0,
        "pad_token_id": 0,
        "aux_loss_enabled": False,
        "label_smoothing": 0.0,
        **knobs,
    }
    return kept


def as_cpo(batch: Batch) -> dict[str, torch.Tensor]:
    """The batch of TRL's CPO and ORPO: labels stand at their own tokens."""
    labels = torch.full_like(batch.labels, -100)
    labels[:, 1:] = batch.labels[:, :-1]
    fields = {"input_ids": batch.tokens, "attention_mask": batch.segments, "labels": labels}
    return {
        f"{side}_{name}": field[number::2]
        for number, side in enumerate(("chosen", "rejected"))
        for name, field in fields.items()
    }


# TRL's cross-entropy is the mean over a whole micro-batch, prompts included: of one pair whose
# prompt is one token it is the mean over the answer.
@pytest.mark.parametrize(
    ("kind", "theirs_knobs", "objective", "count"),
    [
        (
            "cpo",
            {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 0.8, "alpha": 0, "cpo_alpha": 0},
            SimPO(SimPOSettings(kind="simpo", beta=2.5, margin=0.8), ObjectiveInputs()),
            4,
        ),
        (
            "cpo",
            {
                **{"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 0.8, "alpha": 0},
                **{"cpo_alpha": 0.3, "label_smoothing": 0.1},
            },
            SimPO(
                SimPOSettings(
                    kind="simpo", beta=2.5, margin=0.8, sft_weight=0.3, label_smoothing=0.1
                ),
                ObjectiveInputs(),
            ),
            1,
        ),
        ("orpo", {"beta": 0.4}, ORPO(ORPOSettings(kind="orpo", beta=0.4), ObjectiveInputs()), 1),
    ],
    ids=("simpo", "simpo and cross-entropy", "orpo"),
)
def test_loss_and_gradients_without_a_reference_are_trls(
    folders: tuple[Path, Path],
    kind: str,
    theirs_knobs: dict[str, Any],
    objective: PairObjective,
    count: int,
) -> None:
    batch = pairs(count, prompt_length=1)
    theirs = without_reference(kind, folders[0], **theirs_knobs)
    wanted, logged = theirs.get_batch_loss_metrics(theirs.model, as_cpo(batch))
    wanted.backward()
    model = load_model(folders[0], device=CPU).train()
    found, told = forward(model, objective, batch, "fp32", CPU)
    (found / count).backward()
    assert float(found) / count == pytest.approx(float(wanted), abs=tolerances.TRL)
    assert float(told["rewards/margin"]) / count == pytest.approx(
        logged["rewards/margins"], abs=tolerances.TRL
    )
    assert_gradients_equal(model, theirs)


def test_formulas_hold_in_float64() -> None:
    """Written down once more from the papers, without logarithms where these have none."""
    generator = torch.Generator().manual_seed(3)
    log_p = -20 * torch.rand(6, 2, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 9, (6, 2), generator=generator).double()
    reference = -20 * torch.rand(6, 2, generator=generator, dtype=torch.float64)
    answers = Answers(log_p, lengths, torch.arange(6))
    cases = [
        (
            dpo(reference, beta=0.3, label_smoothing=0.1, normalize_length=True, sft_weight=0.5),
            "dpo",
        ),
        (ipo(reference, normalize_length=False), "ipo"),
        (SimPO(SimPOSettings(kind="simpo", beta=2, margin=0.7), ObjectiveInputs()), "simpo"),
        (ORPO(ORPOSettings(kind="orpo", beta=0.4), ObjectiveInputs()), "orpo"),
    ]
    for objective, name in cases:
        found = objective.compare(answers)[0]
        for pair in range(6):
            (w, x), (n, m) = log_p[pair].tolist(), lengths[pair].tolist()
            rw, rl = reference[pair].tolist()
            preferred = 1 / (1 + math.exp(-0.3 * ((w - rw) / n - (x - rl) / m)))
            per_token = 1 / (1 + math.exp(-(2 * w / n - 2 * x / m - 0.7)))
            p, q = math.exp(w / n), math.exp(x / m)
            odds = (p / (1 - p)) / (q / (1 - q))
            wanted = {
                "dpo": -0.9 * math.log(preferred) - 0.1 * math.log(1 - preferred) - 0.5 * w / n,
                "ipo": ((w - rw) - (x - rl) - 1 / 0.6) ** 2,
                "simpo": -math.log(per_token),
                "orpo": -w / n - 0.4 * math.log(odds / (1 + odds)),
            }[name]
            assert float(found[pair]) == pytest.approx(wanted, rel=tolerances.EXACT), name


def test_an_answer_that_is_certain_has_finite_odds() -> None:
    log_p = torch.tensor([[0.0, -3.0], [-3.0, 0.0]], requires_grad=True)
    answers = Answers(log_p, torch.ones(2, 2), torch.arange(2))
    loss = ORPO(ORPOSettings(kind="orpo", beta=1.0), ObjectiveInputs()).compare(answers)[0]
    loss.sum().backward()
    assert log_p.grad is not None
    assert torch.isfinite(loss).all()
    assert torch.isfinite(log_p.grad).all()


def assert_gradients_equal(model: torch.nn.Module, theirs: Any) -> None:
    gradients = {
        name.removeprefix("module."): parameter.grad
        for name, parameter in theirs.model.named_parameters()
    }
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert gradients[name] is not None
        assert (
            float((parameter.grad - gradients[name]).norm() / gradients[name].norm())
            < tolerances.TRL
        ), name


REAL = {
    "sharegpt": "llamafactory_demo/dpo_en_demo.json",
    "hh": "hh-rlhf/harmless-base.test.jsonl.gz",
}


@pytest.mark.drawn
@pytest.mark.parametrize("layout", REAL)
def test_real_pairs_give_trls_numbers(
    layout: str, test_data: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Read, encoded, masked and cut by us; padded by us to the micro-batch, by TRL not at all."""
    recipe = small_recipe(
        tmp_path,
        objective__kind="dpo",
        data__train=[{"source": str(test_data / REAL[layout])}],
        data__validation__fraction=0.1,
        data__seq_len=256,
        tokenizer__template="chatml",
        tokenizer__vocab_size=400,
    )
    ingest(recipe)
    prepare(recipe)
    rows = open_rows(recipe.folder.columns, "train", 256, pack="none", pad_last=False)
    (batch,) = fixed_batches(rows, range(6), 6)
    made = [
        make_reference(tmp_path / str(seed), seed=seed, vocab_size=400, max_position_embeddings=256)
        for seed in (0, 1)
    ]
    theirs = trainer(made[0], made[1], tmp_path, beta=0.1)
    theirs.model.train()
    wanted = theirs.compute_loss(theirs.model, as_trl(batch))
    table = torch.zeros(len(rows), 2)
    table[:6] = log_probabilities(made[1], batch)
    wanted.backward()
    model = load_model(made[0], device=CPU).train()
    loss, told = forward(model, dpo(table, beta=0.1), batch, "fp32", CPU)
    (loss / 6).backward()
    assert_gradients_equal(model, theirs)
    assert float(loss.detach()) / 6 == pytest.approx(float(wanted.detach()), abs=tolerances.TRL)
    logged = theirs._metrics["train"]
    assert float(told["rewards/chosen"]) / 6 == pytest.approx(
        logged["rewards/chosen"][-1], abs=tolerances.TRL
    )
    assert float(told["rewards/rejected"]) / 6 == pytest.approx(
        logged["rewards/rejected"][-1], abs=tolerances.TRL
    )


@pytest.mark.parametrize("kind", ["dpo", "ipo", "simpo", "orpo"])
def test_what_fills_a_batch_up_counts_nothing_even_where_the_reference_is_unknown(
    folders: tuple[Path, Path], kind: str
) -> None:
    policy, reference = folders
    batch = pairs(3)
    table = log_probabilities(reference, batch)
    moved = replace(batch, rows=batch.rows + 1)  # a fill-up is looked up as row 0
    results = []
    unknown = torch.full((1, 2), torch.nan)
    for given, known in ((batch, table), (filled_up(moved), torch.cat((unknown, table)))):
        model = load_model(policy, device=CPU).train()
        objective: PairObjective = {
            "dpo": lambda known: dpo(known, beta=0.3, label_smoothing=0.1),
            "ipo": ipo,
            "simpo": lambda known: SimPO(SimPOSettings(kind="simpo"), ObjectiveInputs()),
            "orpo": lambda known: ORPO(ORPOSettings(kind="orpo"), ObjectiveInputs()),
        }[kind](known)
        loss, told = forward(model, objective, given, "fp32", CPU)
        loss.backward()
        gradient = torch.cat(
            [
                parameter.grad.flatten()
                for parameter in model.parameters()
                if parameter.grad is not None
            ]
        )
        results.append(
            (objective.targets(given), float(loss), float(told["rewards/accuracy"]), gradient)
        )
    assert results[0][0] == results[1][0] == 3
    assert results[1][1] == pytest.approx(results[0][1], rel=tolerances.LOSS_FP32)
    assert results[1][2] == results[0][2]
    assert (
        float((results[1][3] - results[0][3]).norm() / results[0][3].norm())
        < tolerances.GRADIENTS_FP32
    )


def test_a_policy_that_is_its_reference_starts_at_log_2(folders: tuple[Path, Path]) -> None:
    batch = pairs(4)
    model = load_model(folders[0], device=CPU)
    loss, told = forward(
        model, dpo(log_probabilities(folders[0], batch), beta=0.5), batch, "fp32", CPU
    )
    assert float(loss) / 4 == pytest.approx(0.6931471805599453, rel=tolerances.LOSS_FP32)
    assert float(told["rewards/margin"].abs()) < tolerances.TRL
