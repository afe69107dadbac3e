"""A small training on rewards: which of two digits is the larger."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from ingot.config.doors import BUILT_IN
from ingot.config.knobs import _all_knobs
from ingot.config.recipe import Recipe
from ingot.config.sections.rewards import RewardSettings
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.rewards.protocol import RewardFailed, Sample
from tests.small import copy_of, small_recipe

OBJECTIVE = {
    "kind": "grpo",
    "group": 4,
    "max_answer_tokens": 3,
    "rewards": [{"kind": "exact"}, {"kind": "odd", "name": "other", "weight": 0.5}],
}


class OddReward(RewardSettings):
    """1 for an odd number of odd characters: a model that knows nothing gets it half of the
    time.
    """

    implementation = "tests.train.rollout.digits:Odd"
    where = "here"
    kind: Literal["odd"]


class Odd:
    unjudged: ClassVar[set[str]] = set()
    """Prompts on whose answers it fails as a server does that answers with 500."""

    def __init__(self, settings: OddReward) -> None:
        pass

    def __call__(self, sample: Sample) -> float:
        if sample.prompt in self.unjudged:
            raise RewardFailed("status 500", again=True)
        return odd(sample.answer)


def odd(answer: str) -> float:
    return float(sum(map(ord, answer)) % 2)


@contextlib.contextmanager
def odd_known() -> Iterator[None]:
    """The kind `odd` is known to this process."""
    kinds = BUILT_IN["reward"]
    before = dict(kinds)
    kinds["odd"] = "tests.train.rollout.digits:OddReward"
    try:
        yield
    finally:
        kinds.clear()
        kinds.update(before)
        _all_knobs.cache_clear()


def write_pairs(root: Path) -> None:
    root.mkdir(parents=True)
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{one} {other}"},
                {"role": "assistant", "content": str(max(one, other))},
            ]
        }
        for one in range(10)
        for other in range(10)
        if one != other
    ]
    (root / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def digits_recipe(root: Path, objective: dict[str, Any] | None = None, **knobs: Any) -> Recipe:
    """Four answers to each of four prompts a step; the recipe's data lie in `root`."""
    given = {
        "data__train": [{"source": str(root / "pairs.jsonl")}],
        "data__validation__fraction": 0.2,
        "data__seq_len": 32,
        "tokenizer__template": "chatml",
        "tokenizer__vocab_size": 262,
        "train__global_batch": 16,
        "train__micro_batch": 4,
        "train__steps": 4,
        "precision__compute": "fp32",
        "precision__export": "fp32",
    }
    return small_recipe(root, objective={**OBJECTIVE, **(objective or {})}, **{**given, **knobs})


def made_ready(root: Path) -> Path:
    """`root` with the pairs ingested and prepared."""
    write_pairs(root)
    recipe = digits_recipe(root)
    ingest(recipe)
    prepare(recipe)
    return root


def apart(ready: Path, target: Path, *given: Any, **knobs: Any) -> Recipe:
    """A recipe whose run folder is its own, prepared as in `ready`."""
    return digits_recipe(copy_of(ready, target), *given, **knobs)
