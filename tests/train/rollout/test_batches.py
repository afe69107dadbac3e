"""Micro-batches hold what was sampled: its ids as they were drawn, as many of them as there are, at
the policy's own probabilities. Trainers have read masks from padding, tokenised text again, and
left out what the model does to its logits.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ingot.base.environment import Ranks
from ingot.config.sections.grpo import GRPOSettings
from ingot.data.batches.prompts import Prompt
from ingot.data.batches.rows import IGNORE
from ingot.parallel.mesh import Mesh
from ingot.train.rollout.answers import RolloutAnswers, make_batches, unequal_first
from ingot.train.trainer import train
from tests import tolerances
from tests.objectives.test_every_way import logged
from tests.parallel.proving import MODELS
from tests.train.rollout.digits import apart, made_ready, odd_known

PROMPT = [0, 7, 7]


def prompts(rows: Sequence[int]) -> list[Prompt]:
    return [Prompt(row, PROMPT, "", None) for row in rows]


def test_ids_and_masks_are_those_of_the_sampler() -> None:
    """Answers of the id that rows are filled up with, in themselves, at their ends and alone: every
    token is trained and none behind it, with its own log-probability.
    """
    sampled = [[0, 0, 5], [3, 0], [0], [4, 6, 0]]
    longest = max(map(len, sampled))
    ids = np.array([[*one, *[9] * (longest - len(one))] for one in sampled])
    answers = RolloutAnswers(
        prompts=np.array([0, 1]),
        ids=ids,
        lengths=np.array([len(one) for one in sampled]),
        logprobs=-np.arange(1, ids.size + 1, dtype=np.float32).reshape(ids.shape),
        old=-100 - np.arange(1, ids.size + 1, dtype=np.float32).reshape(ids.shape),
        finished=np.array([True] * 4),
        rewards=np.array([0.0, 1.0, 1.0, 0.0]),
        each=np.array([[0.0], [1.0], [1.0], [0.0]]),
    )
    settings = GRPOSettings(
        kind="grpo", group=2, max_answer_tokens=longest, rewards=[{"kind": "exact"}]
    )
    alone = Mesh(Ranks(), torch.device("cpu"))
    found = {}
    batches = make_batches(answers, settings, prompts, 16, 3, alone)
    assert sum(batch.text_tokens for batch in batches) == sum(len(PROMPT) + len(a) for a in sampled)
    for batch in batches:
        assert batch.values is not None
        for row in range(len(batch.tokens)):
            number = int(batch.rows[row])
            place = torch.nonzero(batch.labels[row] != IGNORE)[:, 0]
            if number < 0:
                assert not len(place)
                assert not batch.segments[row].any()
                continue
            begin, length = len(PROMPT), len(sampled[number])
            # Experts are balanced by what is text; causal attention sees no padding behind it.
            assert torch.nonzero(batch.segments[row])[:, 0].tolist() == list(range(begin + length))
            assert batch.single_documents
            assert place.tolist() == list(range(begin - 1, begin - 1 + length))
            assert batch.tokens[row, : begin + length].tolist() == PROMPT + sampled[number]
            assert batch.labels[row, place].tolist() == sampled[number]
            assert (
                batch.values[row, place, 1].tolist() == answers.logprobs[number, :length].tolist()
            )
            assert batch.values[row, place, 2].tolist() == answers.old[number, :length].tolist()
            found[number] = sum(batch.values[row, place, 0].tolist()) / length
    assert found == {0: -0.5, 1: 0.5, 2: 0.5, 3: -0.5}


@pytest.mark.parametrize("model", ["gemma3", "granite"])
def test_what_a_model_does_to_its_logits_is_in_the_policy(model: str, tmp_path: Path) -> None:
    """Soft caps and divisors come before the temperature, in the sampler as in the trainer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**MODELS[model], "vocab_size": 262}))
    knobs: dict[str, Any] = {"model__source": str(folder), "model__config": None}
    with odd_known():
        ready = made_ready(tmp_path / "ready")
        recipe = apart(
            ready,
            tmp_path / "run",
            {"temperature": 0.7},
            model__init="random",
            train__steps=1,
            **knobs,
        )
        train(recipe)
    (error,) = logged(recipe, "train/policy/ratio_error")
    assert error < tolerances.FIRST_RATIO


def of_rewards(rewards: npt.NDArray[np.float64]) -> RolloutAnswers:
    """Answers of a token, a row of rewards for each prompt."""
    count = rewards.size
    return RolloutAnswers(
        prompts=np.arange(len(rewards)),
        ids=np.arange(count)[:, None],
        lengths=np.ones(count, np.int64),
        logprobs=np.zeros((count, 1), np.float32),
        old=np.zeros((count, 1), np.float32),
        finished=np.ones(count, np.bool_),
        rewards=rewards.reshape(-1),
        each=rewards.reshape(-1, 1),
    )


def test_groups_of_unequal_rewards_come_first_in_the_order_of_the_data() -> None:
    rewards = np.array([[0.1, 0.1], [0, 1], [2, 2], [1, 0], [1, 3]], np.float64)
    answers = of_rewards(rewards)
    for count, kept in ((2, [1, 3]), (3, [1, 3, 4]), (4, [0, 1, 3, 4])):
        found = unequal_first(answers, count)
        assert found.prompts.tolist() == kept
        assert found.ids[:, 0].tolist() == [
            number for one in kept for number in (2 * one, 2 * one + 1)
        ]
        assert found.rewards.tolist() == rewards[kept].reshape(-1).tolist()


@pytest.mark.parametrize("flag", [{}, {"allow_pickle": False}])
def test_a_checkpoint_keeps_answers_with_every_numpy(
    flag: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before 2.2 take whatever has a name for an array. Checkpoints have a flag among the
    arrays that an earlier ingot gave them.
    """

    def save(file: IO[bytes], **named: Any) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, value in (flag | named).items():
                with archive.open(f"{name}.npy", "w") as stream:
                    np.lib.format.write_array(stream, np.asanyarray(value), allow_pickle=False)

    monkeypatch.setattr(np, "savez_compressed", save)
    answers = of_rewards(np.array([[0.5, np.nan], [1, 0]]))
    found = asdict(RolloutAnswers.unpack(answers.pack()))
    for name, value in asdict(answers).items():
        np.testing.assert_array_equal(found[name], value, strict=True)
