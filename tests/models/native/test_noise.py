"""NEFTune: the noise is uniform within alpha / sqrt(L * D), a function of the token's place alone,
and there in training only.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ingot.data.batches.loader import Batch
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.native.noise import EmbeddingNoise
from ingot.models.parameters import init_weights
from tests import tolerances
from tests.exhaustive import some_of
from tests.parallel.wrapped_run import Case, run_case, run_cases
from tests.ranks import run_ranks
from tests.train.test_step import CONFIG, distance, global_batch

WIDTH, ALPHA = 256, 5.0


def packed() -> Batch:
    """Two rows of 24: 10 and 14 tokens, and 24; then 20 with 4 of padding."""
    batch = global_batch(0)
    segments, positions = batch.segments[:3].clone(), batch.positions[:3].clone()
    segments[2, 20:], positions[2, 20:] = 0, 0
    segments[2, :20], positions[2, :20] = 1, torch.arange(20)
    return replace(batch, segments=segments, positions=positions)


def noise_of(batch: Batch, rows: list[int], step: int = 0, seed: int = 0) -> Tensor:
    """The noise alone, `[R, T, WIDTH]`."""
    noise = EmbeddingNoise(ALPHA, seed)
    noise.begin_batch(step, torch.tensor(rows), batch.segments)
    return noise.add(torch.zeros(*batch.segments.shape, WIDTH), batch.positions, batch.segments)


def test_each_document_has_the_bound_of_its_own_length() -> None:
    found = noise_of(packed(), [3, 4, 5])
    parts = {10: found[0, :10], 14: found[0, 10:], 24: found[1], 20: found[2, :20]}
    for length, part in parts.items():
        bound = ALPHA / (length * WIDTH) ** 0.5
        assert 0.99 * bound < float(part.abs().max()) <= bound
        # Of some thousands of uniform numbers: mean 0 and standard deviation bound / sqrt(3).
        assert abs(float(part.mean())) < 0.05 * bound
        assert float(part.std()) == pytest.approx(bound / 3**0.5, rel=0.03)
        assert float(part.norm(dim=-1).mean()) == pytest.approx(
            ALPHA / (3 * length) ** 0.5, rel=0.03
        )
    assert not found[2, 20:].any(), "padding has none"


def test_it_is_a_function_of_seed_step_row_and_place() -> None:
    batch = packed()
    found = noise_of(batch, [3, 4, 5])
    swapped = replace(batch, segments=batch.segments[[2, 0]], positions=batch.positions[[2, 0]])
    assert torch.equal(noise_of(swapped, [5, 3]), found[[2, 0]])
    for other in (
        noise_of(batch, [3, 4, 6])[2, :20],
        noise_of(batch, [3, 4, 5], step=1)[2, :20],
        noise_of(batch, [3, 4, 5], seed=1)[2, :20],
        found[0, 10:] * (14 / 20) ** 0.5,
        found[2, 1:20],
    ):
        both = torch.stack((other.flatten(), found[2, : len(other)].flatten()))
        assert abs(float(both.corrcoef()[0, 1])) < 0.1
    documents = torch.stack((found[0, :10].flatten(), found[0, 10:20].flatten()))
    assert abs(float(documents.corrcoef()[0, 1])) < 0.1, "two at the same places of one row"
    noise = EmbeddingNoise(ALPHA, 0)
    alone = replace(batch, segments=batch.segments[1:2], positions=batch.positions[1:2])
    noise.begin_batch(0, torch.tensor([4]), alone.segments)
    zeros = torch.zeros(1, 24, WIDTH)
    assert torch.equal(noise.add(zeros, alone.positions, None)[0], found[1])
    half = noise.add(zeros.bfloat16(), alone.positions, None)
    assert torch.equal(half[0], found[1].bfloat16())


def test_a_model_is_noisy_in_training_only() -> None:
    model = Decoder(DecoderConfig.from_hf(CONFIG))
    init_weights(model, 0)
    batch = global_batch(0)
    fields = (batch.tokens, batch.positions, batch.segments)
    silent = model.eval().hidden(*fields)
    model.noise = EmbeddingNoise(ALPHA, 0)
    assert torch.equal(model.hidden(*fields), silent)
    with pytest.raises(AssertionError, match="call begin_batch"):
        model.train().hidden(*fields)
    model.noise.begin_batch(0, torch.arange(8), batch.segments)
    assert distance({"": model.hidden(*fields).detach()}, {"": silent.detach()}) > 0.05


ON_RANKS = {
    "replicate": Case({"replicate": 2}),
    "shard": Case({"shard": 2}, {"recompute": {"kind": "full"}}),
    "sequence": Case({"tensor": 2}),
    "tensor": Case({"tensor": 2, "sequence": False}, micro_batch=3),
    "ring": Case({"context": 2}, {"recompute": {"kind": "selective"}}),
    "ulysses": Case({"context": 2, "context_by": "ulysses"}),
    "pipeline": Case({"pipeline": 2}, {"recompute": {"kind": "full"}}, micro_batch=1),
    "zero bubble": Case({"pipeline": 2, "virtual": 2, "schedule": "zero_bubble"}),
}
ON_FOUR = {
    "sequence and context": Case({"tensor": 2, "context": 2}),
    "sequence and pipeline": Case({"tensor": 2, "pipeline": 2}),
    "shard and context": Case({"shard": 2, "context": 2}),
}


def assert_as_alone(world: int, cases: dict[str, Case]) -> None:
    noisy = [replace(case, noise=ALPHA, steps=2) for case in cases.values()]
    alone = run_case(Case(noise=ALPHA, steps=2, micro_batch=8))
    silent = run_case(Case(steps=2, micro_batch=8))
    assert distance(alone.weights, silent.weights) > 0.01
    found = run_ranks(world, run_cases, noisy, timeout_s=240)
    for number, name in enumerate(cases):
        print(name)  # shown where it fails
        for of_rank in found:
            result = of_rank[number]
            held = {key: alone.weights[key] for key in result.weights}
            assert distance(result.weights, held) < tolerances.SPLIT_WEIGHTS
            assert result.losses == pytest.approx(alone.losses, rel=tolerances.LOSS_FP32)
            assert result.norms == pytest.approx(alone.norms, rel=tolerances.SPLIT_LOSS)


@pytest.mark.drawn("two ranks, noise")
def test_two_ranks_and_any_micro_batch_have_the_noise_of_one() -> None:
    from ingot.parallel.schedules import ZERO_BUBBLE_SINCE  # torch's pipelining is slow to import

    # In sequence parallelism ranks have other parts of a row and the same weights.
    tried = {"sequence", *some_of([*ON_RANKS], 3, "noise")}
    cases = {name: case for name, case in ON_RANKS.items() if name in tried}
    if torch.__version__ < ZERO_BUBBLE_SINCE:
        cases.pop("zero bubble", None)  # refused: tests/parallel/test_old_torch.py
    assert_as_alone(2, cases)


@pytest.mark.slow
def test_four_ranks_have_the_noise_of_one() -> None:
    assert_as_alone(4, ON_FOUR)
