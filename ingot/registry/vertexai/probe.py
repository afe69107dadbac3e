"""Does a deployed model answer, and as its folder does?

Vertex AI's predictions go by the traffic, and nothing but an explanation can be asked of one
deployed model by its id. But each answer says who made it. So a new version is given a small share
of the traffic, and predictions are asked until one of them is its.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed
from ingot.cloud.clients import GoogleClients
from ingot.cloud.vertex import endpoints
from ingot.config.serving import RAW, answered, question

SHARE = 10
"""Percent of the traffic that a version gets to be asked, unless told otherwise."""
TOKENS = 8
_MISSED = 1e-6
"""How unlikely it may be that a version with its share of the traffic is not among those who
answer.
"""
SPREAD_S, PAUSE_S = 60.0, 1.0
"""How long a new share of the traffic may take to be kept to, and how long is waited between two
questions once they should have been enough.
"""
_ANSWER_S = 1800.0


@dataclass(frozen=True)
class Check:
    """What is asked, and what should come: `expected` is the folder's own answer, None where only
    the form can be judged.

    `engine` is what answers, and `name` what it calls the model.
    """

    prompt: str
    classifies: bool = False
    expected: str | None = None
    engine: str = "native"
    name: str = ""


def answer_of(folder: Path, prompt: str) -> str:
    """What the model in `folder` says to `prompt`, greedily, on this machine: by our own command
    line, in a process of its own.

    Raises:
        Failed: it says nothing.
    """
    command = [
        sys.executable,
        "-m",
        "ingot",
        "predict",
        str(folder),
        prompt,
        f"max_tokens={TOKENS}",
        "temperature=0",
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(
            f"the model in {folder} gave no answer here within {_ANSWER_S:g} s; deploy without"
            " --verify"
        ) from None
    if done.returncode:
        raise Failed(
            f"the model in {folder} does not answer here ({done.stderr.strip()[-200:]}); mend it,"
            " or deploy without --verify"
        )
    return done.stdout.removesuffix("\n")


def probe(google: GoogleClients, endpoint: str, deployed: str, share: int, check: Check) -> None:
    """Ask until the deployed model `deployed`, which has `share` percent of the traffic, has
    answered.

    Raises:
        WrongInput: a prediction is refused.
        Failed: it does not answer, or not as it should, or nobody says who answered.
    """
    enough = 10 if share >= 100 else math.ceil(math.log(_MISSED) / math.log(1 - share / 100))
    tries, deadline = 0, time.monotonic() + SPREAD_S
    while tries < enough or time.monotonic() < deadline:
        if tries >= enough:
            time.sleep(PAUSE_S)
        tries += 1
        answers = _asked(google, endpoint, deployed, check)
        if answers is not None:
            if wrong := _wrong(answers, check):
                raise Failed(wrong)
            return
    raise Failed(
        f"of {tries} predictions none came from the new version, which has {share} % of the traffic"
    )


def _asked(google: GoogleClients, endpoint: str, deployed: str, check: Check) -> list[Any] | None:
    """The answers to one prompt; None where they are another deployed model's, whose words may be
    others.
    """
    if check.engine not in RAW:
        parameters = {} if check.classifies else {"max_tokens": TOKENS, "temperature": 0}
        answers, by = endpoints.predict(google, endpoint, [check.prompt], parameters)
        return answers if by == deployed else None
    answer, said_by = endpoints.raw_predict(
        google, endpoint, question(check.engine, check.name, check.prompt, TOKENS)
    )
    if said_by is None:
        raise Failed(
            "the endpoint does not say which of its models answered; deploy without --canary and"
            " --verify (serve.canary, serve.verify)"
        )
    return [answered(check.engine, answer)] if said_by == deployed else None


def _wrong(answers: list[Any], check: Check) -> str | None:
    """What is wrong with the answer to one prompt."""
    answer = answers[0] if len(answers) == 1 else None
    if check.classifies:
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if (
            not isinstance(answer, dict)
            or not isinstance(scores, dict)
            or answer.get("label") not in scores
        ):
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
