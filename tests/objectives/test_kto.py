"""KTO against TRL: loss, KL and gradients on the same ids; its KL is one number of the global batch,
of answers to other prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.config.sections.layout import Parallel
from ingot.config.sections.objective import KTOSettings
from ingot.data.batches.loader import Batch, fixed_batches
from ingot.data.batches.rows import open_rows
from ingot.data.batches.samples import Samples, mismatched
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.models.hf.folder import load_model
from ingot.objectives.forward import first_pass, forward
from ingot.objectives.kto import KTO
from ingot.objectives.protocol import ObjectiveInputs, TwoPassObjective
from ingot.parallel.mesh import running_mesh
from ingot.parallel.rows import row_sharing
from ingot.train.step import take_first_pass
from tests import tolerances
from tests.models.tiny import make_reference
from tests.objectives.test_preferences import (
    assert_gradients_equal,
    filled_up,
    log_probabilities,
)
from tests.objectives.ways import make_ready, recipe_of
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def kto(reference: torch.Tensor, **knobs: Any) -> KTO:
    return KTO(KTOSettings(kind="kto", beta=0.3, **knobs), ObjectiveInputs(reference))


def rated(count: int = 4, time: int = 24, seed: int = 0) -> Batch:
    """Answers of unequal lengths, and behind each prompt the answer of the sample before as well;
    every third one is bad.
    """
    generator = torch.Generator().manual_seed(seed)

    def some(length: int) -> torch.Tensor:
        return torch.randint(1, 97, (length,), generator=generator)

    prompts, answers = [some(3 + n) for n in range(count)], [some(2 + 3 * n) for n in range(count)]
    tokens = torch.zeros(2 * count, time, dtype=torch.int64)
    labels = torch.full_like(tokens, -100)
    for sample, prompt in enumerate(prompts):
        for side, answer in enumerate((answers[sample], answers[sample - 1])):
            ids = torch.cat((prompt, answer))
            tokens[2 * sample + side, : len(ids)] = ids
            labels[2 * sample + side, len(prompt) - 1 : len(ids) - 1] = answer
    segments = (tokens != 0).long()
    positions = (segments.cumsum(1) - 1).clamp_min(0)
    ratings = torch.tensor([int(sample % 3 > 0) for sample in range(count)])
    return Batch(tokens, labels, positions, segments, torch.arange(count), ratings)


def of_rows(batch: Batch, *rows: int) -> Batch:
    """A micro-batch of some samples."""
    chosen = torch.tensor([2 * row + side for row in rows for side in range(2)])
    fields = (batch.tokens, batch.labels, batch.positions, batch.segments)
    own = (batch.rows[list(rows)], batch.ratings[list(rows)])
    return Batch(*(field[chosen] for field in fields), *own)


def losses(
    model: Any, objective: KTO, batches: Sequence[Batch]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The mean loss over micro-batches, with its graph, and metrics, as a training step has
    them.
    """
    targets = sum(map(objective.targets, batches))
    objective.finish_first_pass(first_pass(model, objective, batches, "fp32", CPU) / targets)
    total, metrics = torch.zeros(()), dict[str, float]()
    for batch in batches:
        loss, told = forward(model, objective, objective.second_rows(batch), "fp32", CPU)
        total = total + loss
        for name, value in told.items():
            metrics[name] = metrics.get(name, 0.0) + float(value) / targets
    return total / targets, metrics


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("kto")
    return make_reference(root / "policy", seed=0), make_reference(root / "reference", seed=1)


def trls(policy: Path, reference: Path, **knobs: Any) -> Any:
    """TRL's trainer as far as its loss goes: it holds the models and no data."""
    from collections import defaultdict

    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM
    from trl import KTOTrainer
    from trl.trainer.kto_trainer import add_fused_lm_head

    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (policy, reference)
    ]
    add_fused_lm_head(models[0], outputs=("log_probs", "entropy", "mean_logits"))
    add_fused_lm_head(models[1])
    kept = object.__new__(KTOTrainer)
    kept.__dict__ |= {
        "model": models[0].train(),
        "ref_model": models[1].eval(),
        "accelerator": Accelerator(cpu=True),
        "calculate_KL": True,
        "precompute_ref_logps": False,
        "aux_loss_enabled": False,
        "loss_type": "kto",
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        **knobs,
    }
    return kept


def as_trl(batch: Batch) -> dict[str, torch.Tensor]:
    made = {"label": batch.ratings.bool()}
    for prefix, rows in (("", batch.side(0)), ("KL_", batch.side(1))):
        mask = torch.zeros_like(rows.labels)
        mask[:, 1:] = (rows.labels[:, :-1] != -100).long()
        made |= {
            f"{prefix}input_ids": rows.tokens,
            f"{prefix}attention_mask": rows.segments,
            f"{prefix}completion_mask": mask,
        }
    return made


@pytest.mark.parametrize("swapped", [False, True])
def test_loss_kl_and_gradients_are_trls(folders: tuple[Path, Path], swapped: bool) -> None:
    """With the models one way round the KL is below 0, and taken as 0."""
    policy, reference = reversed(folders) if swapped else folders
    batch = rated()
    theirs = trls(policy, reference, beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)
    wanted = theirs.compute_loss(theirs.model, as_trl(batch))
    wanted.backward()
    model = load_model(policy, device=CPU).train()
    objective = kto(
        log_probabilities(reference, batch), desirable_weight=1.5, undesirable_weight=0.7
    )
    found, told = losses(model, objective, [batch])
    found.backward()
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), abs=tolerances.TRL)
    assert told["kl"] == pytest.approx(theirs._metrics["train"]["kl"][-1], abs=tolerances.TRL)
    assert (told["kl"] > 0.01) == swapped
    assert_gradients_equal(model, theirs)


def test_its_kl_is_of_a_model_without_dropout_which_has_it_again_for_the_loss(
    folders: tuple[Path, Path],
) -> None:
    batch, modes = rated(), list[bool]()
    model = load_model(folders[0], device=CPU).train()
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    losses(model, kto(log_probabilities(folders[1], batch)), [batch])
    assert modes == [False, True]


def kl_of_two_ranks(folders: tuple[Path, Path]) -> float:
    """The KL that a rank has, whose share of the batch is smaller than the other's."""
    batch = rated(5)
    with running_mesh(Parallel(replicate=2)) as mesh:
        mine = of_rows(batch, *((0, 1), (2, 3, 4))[mesh.data.rank])
        context: Any = SimpleNamespace(
            mesh=mesh,
            module=load_model(folders[0], device=CPU),
            compute="fp32",
            row_sharing=row_sharing(mesh),
        )
        objective = kto(log_probabilities(folders[1], batch))
        (rows,) = take_first_pass(context, objective, [mine], 5)
        _, told = forward(context.module, objective, rows, "fp32", CPU)
        return float(told["kl"]) / len(mine.rows)


def test_its_kl_is_one_number_however_the_batch_is_split(folders: tuple[Path, Path]) -> None:
    policy, reference = folders
    batch = rated(5)
    table = log_probabilities(reference, batch)
    found = []
    for parts in (((0, 1, 2, 3, 4),), ((0,), (1, 2), (3, 4)), ((4, 0), (1,), (2, 3))):
        model = load_model(policy, device=CPU).train()
        objective = kto(table)
        loss, told = losses(model, objective, [of_rows(batch, *rows) for rows in parts])
        loss.backward()
        gradient = torch.cat(
            [one.grad.flatten() for one in model.parameters() if one.grad is not None]
        )
        found.append((float(loss.detach()), told["kl"], gradient))
    assert found[0][1] > 0.01, "below 0 it would be 0 however it is summed"
    assert run_ranks(2, kl_of_two_ranks, folders) == pytest.approx(
        [found[0][1]] * 2, rel=tolerances.NLL_FP32
    )
    for loss, kl, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=tolerances.LOSS_FP32)
        assert kl == pytest.approx(found[0][1], rel=tolerances.NLL_FP32)
        assert (
            float((gradient - found[0][2]).norm() / found[0][2].norm()) < tolerances.GRADIENTS_FP32
        )


def test_the_formula_holds_in_float64() -> None:
    """Equation 8 of the paper, less its constant: lambda - v(x, y)."""
    generator = torch.Generator().manual_seed(3)
    log_p = -9 * torch.rand(6, generator=generator, dtype=torch.float64)
    reference = -9 * torch.rand(6, 2, generator=generator, dtype=torch.float64)
    batch = Batch(*(torch.zeros(6, 1),) * 4, torch.arange(6), torch.tensor([1, 0, 0, 1, 0, 1]))
    for kl in (0.8, -0.4):
        objective = kto(reference, desirable_weight=1.5, undesirable_weight=0.7)
        objective.finish_first_pass(torch.tensor(kl, dtype=torch.float64))
        found, _ = objective.reduce(log_p[:, None], batch, lambda part: part)
        wanted = 0.0
        for own, (known, _), good in zip(
            log_p.tolist(), reference.tolist(), batch.ratings, strict=True
        ):
            z = max(0.0, kl)
            value = 0.3 * ((own - known) - z) * (1 if good else -1)
            wanted += (1.5 if good else 0.7) * (1 - 1 / (1 + math.exp(-value)))
        assert float(found) == pytest.approx(wanted, rel=tolerances.EXACT)


def test_what_fills_a_batch_up_counts_nothing(folders: tuple[Path, Path]) -> None:
    batch = rated(3)
    # A fill-up is looked up as row 0, whose reference nobody may have computed.
    table = torch.cat((torch.full((1, 2), torch.nan), log_probabilities(folders[1], batch)))
    moved = replace(batch, rows=batch.rows + 1)
    results = []
    for given in (moved, filled_up(moved)):
        model = load_model(folders[0], device=CPU).train()
        loss, told = losses(model, kto(table), [given])
        results.append((float(loss.detach()), told["kl"], told["rewards/accuracy"]))
    assert results[1] == pytest.approx(results[0], rel=tolerances.NLL_FP32)


def test_each_prompt_meets_the_answer_of_another(tmp_path: Path) -> None:
    """From prepared columns: the same one in every batch, the answer as it is prepared."""
    root = make_ready(tmp_path / "root", ["kto"])
    recipe = recipe_of(root, "kto")
    rows = open_rows(recipe.folder.columns, "train", 64, pack="none", pad_last=False)
    assert isinstance(rows, Samples)
    (whole,) = fixed_batches(rows, range(len(rows)), len(rows))
    single = list(fixed_batches(rows, range(len(rows)), 1))
    assert 0 < int(whole.ratings.sum()) < len(rows)
    answers, others, prompts = [], [], []
    for row in range(len(rows)):
        for side, into in ((0, answers), (1, others)):
            labels = whole.labels[2 * row + side]
            into.append(labels[labels != -100].tolist())
            alone = single[row].labels[side]
            assert alone[alone != -100].tolist() == into[-1]
        begin = int((whole.labels[2 * row] != -100).int().argmax())
        prompts.append(whole.tokens[2 * row, :begin].tolist())
        assert whole.tokens[2 * row + 1, :begin].tolist() == prompts[-1]
        assert int(single[row].ratings) == int(whole.ratings[row])
    assert sorted(others) == sorted(answers)
    assert sum(one == other for one, other in zip(answers, others, strict=True)) < len(rows) // 4
    assert isinstance(kto(torch.zeros(1, 2)), TwoPassObjective)


def test_a_mixed_row_is_a_prompt_and_an_answer() -> None:
    ids, mask = mismatched(
        np.array([1, 2, 3, 4]), np.array([0, 0, 1, 1]), np.array([5, 6, 7]), np.array([0, 1, 0])
    )
    assert ids.tolist() == [1, 2, 6, 7]
    assert mask.tolist() == [0, 0, 1, 0]


def test_pairs_are_refused_in_words(tmp_path: Path) -> None:
    source = tmp_path / "pairs.jsonl"
    source.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 9)
    root = tmp_path / "root"
    root.mkdir()
    (root / "rated.jsonl").write_text("")
    with pytest.raises(WrongInput, match=r"has no rated \(layout auto\) in its columns"):
        ingest(recipe_of(root, "kto", data__train=[{"source": str(source)}]))


def test_the_layouts_of_rated_answers() -> None:
    from ingot.data.documents.rated import Rated, from_rated, to_rated
    from ingot.data.documents.records import ParsedDocument

    user, bot = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    for record, columns in (
        ({"prompt": "q", "completion": "a", "label": True}, {}),
        ({"prompt": [user], "completion": [bot], "label": 1}, {}),
        ({"prompt": [user], "completion": [user, bot], "label": "true"}, {}),
        ({"messages": [user, bot], "kto_tag": True}, {"label": "kto_tag"}),
        (
            {
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
                "label": 1,
            },
            {},
        ),
        ({"instruction": "q", "output": "a", "label": 1}, {}),
    ):
        found = to_rated(1, record, "auto", columns)
        assert isinstance(found, ParsedDocument), (record, found)
        assert from_rated(found.text) == Rated([user], [bot], 1)
    for record, reason in (
        ({"prompt": "q", "completion": "a"}, "no rated answer columns"),
        ({"prompt": "q", "completion": "a", "label": "good"}, "label is not true or false"),
        ({"prompt": "q", "completion": " ", "label": 0}, "empty answer"),
        ({"completion": "a", "label": 0}, "no rated answer columns"),
        ({"messages": [bot], "label": 0}, "no prompt"),
        ({"messages": [bot, user], "label": 0}, "no answer of the assistant"),
    ):
        assert getattr(to_rated(1, record, "auto", {}), "reason", None) == reason
    with pytest.raises(WrongInput, match="layout hh is not for rated answers"):
        to_rated(1, {}, "hh", {})


def test_real_rated_answers_are_read(test_data: Path, tmp_path: Path) -> None:
    from tests.small import small_recipe

    recipe = small_recipe(
        tmp_path,
        objective__kind="kto",
        data__train=[{"source": str(test_data / "llamafactory_demo/kto_en_demo.json")}],
        data__validation__fraction=0.1,
        data__seq_len=256,
        tokenizer__template="chatml",
        tokenizer__vocab_size=400,
    )
    ingest(recipe)
    prepare(recipe)
    rows = open_rows(recipe.folder.columns, "train", 256, pack="none", pad_last=False)
    assert len(rows) > 100
