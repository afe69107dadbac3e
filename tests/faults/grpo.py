"""Faults in training on rewards: the estimator, the sampler, and what they must agree about."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = [
    Fault(
        "ratio-without-temperature",
        "ingot/objectives/grpo.py",
        "1.0 if extras is None else self._temperature",
        "1.0",
        "the trainer forgets the temperature that the sampler had, and every ratio is wrong",
        by="tests/objectives/test_grpo.py",
    ),
    Fault(
        "sampler-tells-other-log-probabilities",
        "ingot/models/generation/policy.py",
        "chosen = logprobs.gather",
        "chosen = logits.float().log_softmax(dim=-1).gather",
        "the old log-probabilities are not those of the distribution that was drawn from",
        by="tests/models/generation/test_policy.py",
    ),
    Fault(
        "rounding-becomes-an-advantage",
        "ingot/objectives/grpo.py",
        "equal = (rewards == rewards[:, :1]).all(dim=1)",
        "equal = (rewards == rewards.mean(dim=1, keepdim=True)).all(dim=1)",
        "what rounding leaves of equal rewards is divided by its own deviation",
        by="tests/objectives/test_grpo.py",
    ),
    Fault(
        "divided-by-what-was-kept",
        "ingot/train/rollout/answers.py",
        "divisor = count * settings.max_answer_tokens",
        "divisor = int(answers.lengths.sum())",
        "the loss is divided by a number that depends on the answers, which biases it",
        by="tests/objectives/test_grpo.py",
    ),
    Fault(
        "divided-on-every-rank",
        "ingot/train/rollout/answers.py",
        "shares.divisor if data.is_main and index == 0 else 0",
        "shares.divisor if index == 0 else 0",
        "with more ranks the gradient is smaller",
        by="tests/train/rollout/test_rollout.py",
    ),
    Fault(
        "answers-a-token-late",
        "ingot/train/rollout/answers.py",
        "at = slice(len(prompt.ids) - 1, len(prompt.ids) - 1 + length)",
        "at = slice(len(prompt.ids), len(prompt.ids) + length)",
        "each token of an answer is trained where the one after it is predicted",
        by="tests/train/rollout/test_rollout.py",
    ),
    Fault(
        "ranks-draw-the-same-numbers",
        "ingot/train/rollout/rollout.py",
        "for one in range(mine.start, mine.stop)",
        "for one in range(mine.stop - mine.start)",
        "what is sampled depends on the number of ranks",
        by="tests/train/rollout/test_rollout.py",
    ),
    Fault(
        "every-step-draws-the-same-numbers",
        "ingot/train/rollout/rollout.py",
        "answer_draws(setup.recipe.seed, numbers, ",
        "answer_draws(setup.recipe.seed, [(a % self._count, b) for a, b in numbers], ",
        "a prompt that comes again is answered with the same random numbers",
        by="tests/train/rollout/test_rollout.py",
    ),
    Fault(
        "clipping-on-both-sides",
        "ingot/objectives/grpo.py",
        "gain = torch.minimum(ratio * given.advantage, clipped * given.advantage)",
        "gain = clipped * given.advantage",
        "an answer that has become too unlikely for its worth no longer gets its probability back",
        by="tests/objectives/test_grpo.py",
    ),
    Fault(
        "reference-of-another-temperature",
        "ingot/train/rollout/rollout.py",
        "self._objective.token,\n                there.values,",
        "self._objective.token,\n                None,",
        "the penalty compares distributions of two temperatures",
        by="tests/train/rollout/test_rollout.py",
    ),
    Fault(
        "answers-from-weights-of-yesterday",
        "ingot/train/rollout/policy.py",
        "        self._compare(copy)\n",
        "",
        "nobody notices that answers are sampled from other weights than those in training",
        by="tests/train/rollout/test_layouts.py",
    ),
    Fault(
        "a-prompt-that-ranks-do-not-share-evenly",
        "ingot/train/rollout/answers.py",
        "count * (mesh.rank + 1) // mesh.world)",
        "count * mesh.rank // mesh.world + count // mesh.world)",
        "with a number of answers that the ranks do not divide, the last of them are never given",
        by="tests/train/rollout/test_layouts.py",
    ),
]
