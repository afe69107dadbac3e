"""A reward for code: the code block of the answer against the tests of the reference, in two
sandboxes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection

from ingot.config.sections.rewards import CodeReward
from ingot.rewards.protocol import RewardFailed, Sample
from ingot.rewards.sandbox.run import SandboxLimits, check_sandbox, run_trial

FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t\r]*$|\Z)", re.M | re.S)
PYTHON = ("", "python", "py", "python3")


class Code:
    """1 if the tests hold, or the share of them that does."""

    def __init__(self, settings: CodeReward) -> None:
        self._settings = settings

    @staticmethod
    def check(settings: CodeReward) -> None:
        """Raises WrongInput where the kernel gives no sandbox that holds."""
        check_sandbox()

    def __call__(self, sample: Sample) -> float:
        settings = self._settings
        program = code_of(sample.answer, settings.block)
        if program is None:
            return 0.0
        limits = SandboxLimits(
            settings.timeout, settings.memory_mib, settings.disk_mib, settings.threads
        )
        if sample.reference is None:
            raise RewardFailed("the sample has no reference; its tests should be in it")
        verdict = run_trial(program, sample.reference, limits)
        if verdict is None:
            return 0.0  # endless code is a wrong answer
        if settings.partial:
            return verdict.passed / verdict.tests
        return float(verdict.whole)


def code_of(answer: str, block: str) -> str | None:
    """The Python code of an answer: of its fenced blocks the first, the last, or all of them one
    after the other; the whole answer if `block` is `none`. None if there is no block.
    """
    if block == "none":
        return answer
    blocks = fenced_blocks(answer, PYTHON)
    if not blocks:
        return None
    return {"first": blocks[0], "last": blocks[-1]}.get(block, "\n".join(blocks))


def fenced_blocks(text: str, languages: Collection[str]) -> list[str]:
    """The contents of fenced code blocks that name one of the languages; the last may be cut
    off.
    """
    return [
        textwrap.dedent(code)
        for language, code in FENCE.findall(text)
        if language.lower() in languages
    ]
