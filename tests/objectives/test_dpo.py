"""DPO against TRL: loss, rewards and gradients on the same ids; what fills a batch up counts
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from datasets import Dataset

from ingot.data.batches.loader import Batch, fixed_batches
from ingot.data.batches.rows import open_rows
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.models.hf.folder import load_model
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.objectives.dpo import DPO, answer_log_probabilities
from ingot.objectives.forward import forward
from tests import tolerances
from tests.models.tiny import make_reference
from tests.small import small_recipe
from tests.tokenizers.small import chatty

if TYPE_CHECKING:
    from trl import DPOTrainer

CPU = torch.device("cpu")


def pairs(count: int = 4, time: int = 24, seed: int = 0) -> Batch:
    """Chosen and rejected rows of unequal lengths behind prompts of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(2 * count, time, dtype=torch.int64)
    labels = torch.full_like(tokens, -100)
    for pair in range(count):
        prompt = torch.randint(1, 97, (3 + pair,), generator=generator)
        for side in range(2):
            answer = torch.randint(1, 97, (2 + 3 * pair + side,), generator=generator)
            ids = torch.cat((prompt, answer))
            tokens[2 * pair + side, : len(ids)] = ids
            labels[2 * pair + side, len(prompt) - 1 : len(ids) - 1] = answer
    segments = (tokens != 0).long()
    positions = (segments.cumsum(1) - 1).clamp_min(0)
    return Batch(tokens, labels, positions, segments, rows=torch.arange(count))


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
        return answer_log_probabilities(
            -model(
                batch.tokens, batch.positions, batch.segments, batch.labels, CrossEntropy().token
            ),
            lambda part: part,
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("dpo")
    return make_reference(root / "policy", seed=0), make_reference(root / "reference", seed=1)


# TRL smooths labels in `aot`, which for a single pair is conservative DPO.
@pytest.mark.parametrize(("smoothing", "kind", "count"), [(0.0, "sigmoid", 4), (0.2, "aot", 1)])
def test_loss_rewards_and_gradients_are_trls(
    folders: tuple[Path, Path], tmp_path: Path, smoothing: float, kind: str, count: int
) -> None:
    policy, reference = folders
    batch = pairs(count)
    theirs = trainer(
        policy, reference, tmp_path, beta=0.3, label_smoothing=smoothing, loss_type=[kind]
    )
    theirs.model.train()
    wanted = theirs.compute_loss(theirs.model, as_trl(batch))
    wanted.backward()
    model = load_model(policy, device=CPU).train()
    found, told = forward(
        model, DPO(0.3, smoothing, log_probabilities(reference, batch)), batch, "fp32", CPU
    )
    (found / count).backward()
    assert float(found) / count == pytest.approx(float(wanted), abs=tolerances.TRL)
    logged = {name: values[-1] for name, values in theirs._metrics["train"].items()}
    for ours, name in (
        ("chosen", "chosen"),
        ("rejected", "rejected"),
        ("accuracy", "accuracies"),
        ("margin", "margins"),
    ):
        assert float(told[f"rewards/{ours}"]) / count == pytest.approx(
            logged[f"rewards/{name}"], abs=tolerances.TRL
        ), name
    assert_gradients_equal(model, theirs)


def assert_gradients_equal(model: torch.nn.Module, theirs: DPOTrainer) -> None:
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
    loss, told = forward(model, DPO(0.1, 0.0, table), batch, "fp32", CPU)
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


def test_what_fills_a_batch_up_counts_nothing_even_where_the_reference_is_unknown(
    folders: tuple[Path, Path],
) -> None:
    policy, reference = folders
    batch = pairs(3)
    table = log_probabilities(reference, batch)
    filled = Batch(
        *(
            torch.cat((field, torch.full((2, field.shape[1]), filler)))
            for field, filler in (
                (batch.tokens, 0),
                (batch.labels, -100),
                (batch.positions, 0),
                (batch.segments, 0),
            )
        ),
        rows=torch.tensor([0, 1, 2, -1]),
    )
    results = []
    for given, known in (
        (batch, table),
        (filled, torch.cat((table, torch.full((1, 2), torch.nan)))),
    ):
        model = load_model(policy, device=CPU).train()
        objective = DPO(0.3, 0.1, known)
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
        model, DPO(0.5, 0.0, log_probabilities(folders[0], batch)), batch, "fp32", CPU
    )
    assert float(loss) / 4 == pytest.approx(0.6931471805599453, rel=tolerances.LOSS_FP32)
    assert float(told["rewards/margin"].abs()) < tolerances.TRL
