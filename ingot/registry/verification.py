"""Does a deployed model answer, and as its folder does?

Vertex AI's predict goes by the traffic, and nothing but an explanation can be asked of one deployed model by its id. But each answer says who made
it. So a new version is given a small share of the traffic, and predictions are asked until one of them is its.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed
from ingot.cloud import endpoints
from ingot.cloud.clients import Google

SHARE = 10
"""Percent of the traffic that a version gets to be asked, unless told otherwise."""
TOKENS = 8
_MISSED = 1e-6
"""How unlikely it may be that a version with its share of the traffic is not among those who answer."""
_ANSWER_S = 1800.0


@dataclass(frozen=True)
class Check:
    """What is asked, and what should come: `expected` is the folder's own answer, None where only the form can be judged."""

    prompt: str
    classifies: bool = False
    expected: str | None = None


def answer_of(folder: Path, prompt: str) -> str:
    """What the model in `folder` says to `prompt`, greedily, on this machine: by our own command line, in a process of its own.

    Raises:
        Failed: it says nothing.
    """
    command = [sys.executable, "-m", "ingot", "predict", str(folder), prompt, f"max_tokens={TOKENS}", "temperature=0"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"the model in {folder} gave no answer here within {_ANSWER_S:g} s; deploy without --verify") from None
    if done.returncode:
        raise Failed(f"the model in {folder} does not answer here ({done.stderr.strip()[-200:]}); mend it, or deploy without --verify")
    return done.stdout.removesuffix("\n")


def probe(google: Google, endpoint: str, deployed: str, share: int, check: Check) -> None:
    """Ask until the deployed model `deployed`, which has `share` percent of the traffic, has answered.

    Raises:
        WrongInput: a prediction is refused.
        Failed: it does not answer, or not as it should.
    """
    tries = 10 if share >= 100 else math.ceil(math.log(_MISSED) / math.log(1 - share / 100))
    parameters = {} if check.classifies else {"max_tokens": TOKENS, "temperature": 0}
    for _ in range(tries):
        answers, by = endpoints.predict(google, endpoint, [check.prompt], parameters)
        if by == deployed:
            if wrong := _wrong(answers, check):
                raise Failed(wrong)
            return
    raise Failed(f"of {tries} predictions none came from the new version, which has {share} % of the traffic")


def _wrong(answers: list[Any], check: Check) -> str | None:
    """What is wrong with the answer to one prompt."""
    answer = answers[0] if len(answers) == 1 else None
    if check.classifies:
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(answer, dict) or not isinstance(scores, dict) or answer.get("label") not in scores:
            return f"the new version answers {_shown(answers)}, not a label with the scores of all"
        answer = answer["label"]
    if not isinstance(answer, str):
        return f"the new version answers {_shown(answers)}, not one text for one prompt"
    if check.expected is not None and answer != check.expected:
        return f"the new version answers {_shown(answer)}, its folder here {_shown(check.expected)}"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
