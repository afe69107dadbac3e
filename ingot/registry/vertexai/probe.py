"""Checks that a deployed model answers, and gives the same answer as its local folder.

Vertex AI routes predictions by the traffic split; a request cannot name one deployed model. But
each answer names the model that made it. So the new version gets a small share of the traffic, and
predictions are requested until one of them is its.
"""

from __future__ import annotations

import math
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, differing
from ingot.base.processes import own_python
from ingot.cloud.clients import GoogleClients
from ingot.cloud.vertex import endpoints
from ingot.config.serving import RAW, answered, question

SHARE = 10
"""Percent of the traffic that a version gets for the check, by default."""
TOKENS = 8
_MISS_PROBABILITY = 1e-6
"""The accepted probability that a working version is in none of the answers."""
SPREAD_S, PAUSE_S = 60.0, 1.0
"""How long a new traffic split may take to be applied, and the seconds between two requests once
their number should have sufficed.
"""
_ANSWER_S = 1800.0


@dataclass(frozen=True)
class AnswerCheck:
    """The prediction to request, and its expected answer. `expected` is the local folder's answer,
    None where only the form of the answer is checked.

    `engine` is the serving engine, `name` its name of the model.
    """

    prompt: str
    classifies: bool = False
    expected: str | None = None
    engine: str = "native"
    name: str = ""


def local_answer(folder: Path, prompt: str, classifies: bool) -> str:
    """The greedy answer of the model in `folder` to `prompt` on this machine, from `ingot predict`
    in a process of its own; of one that `classifies` its label, or the text with its masks filled.

    Raises:
        Failed: it gives no answer.
    """
    settings = [] if classifies else [f"max_tokens={TOKENS}", "temperature=0"]
    # Behind `--` a prompt may begin with a dash.
    asked = ["predict", "--", str(folder), prompt, *settings]
    command = [*own_python(), "-m", "ingot", *asked]
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


def probe_endpoint(
    google: GoogleClients, endpoint: str, deployed: str, share: int, check: AnswerCheck
) -> None:
    """Request predictions until the deployed model `deployed`, which has `share` percent of the
    traffic, has answered, and check its answer.

    Raises:
        WrongInput: a prediction is refused.
        Failed: it does not answer, its answer is wrong, or answers do not name their model.
    """
    enough = (
        10 if share >= 100 else math.ceil(math.log(_MISS_PROBABILITY) / math.log(1 - share / 100))
    )
    tries, deadline = 0, time.monotonic() + SPREAD_S
    while tries < enough or time.monotonic() < deadline:
        if tries >= enough:
            time.sleep(PAUSE_S)
        tries += 1
        answers = _predict(google, endpoint, deployed, check)
        if answers is not None:
            if error := _find_error(answers, check):
                raise Failed(error)
            return
    raise Failed(
        f"of {tries} predictions none came from the new version, which has {share} % of the traffic"
    )


def _predict(
    google: GoogleClients, endpoint: str, deployed: str, check: AnswerCheck
) -> list[Any] | None:
    """The answers to one prompt; None where another deployed model gave them."""
    if check.engine not in RAW:
        parameters = {} if check.classifies else {"max_tokens": TOKENS, "temperature": 0}
        answers, model = endpoints.predict(google, endpoint, [check.prompt], parameters)
        return answers if model == deployed else None
    answer, answered_by = endpoints.raw_predict(
        google, endpoint, question(check.engine, check.name, check.prompt, TOKENS)
    )
    if answered_by is None:
        raise Failed(
            "the endpoint does not say which of its models answered; deploy without --canary and"
            " --verify (serve.canary, serve.verify)"
        )
    return [answered(check.engine, answer)] if answered_by == deployed else None


def _find_error(answers: list[Any], check: AnswerCheck) -> str | None:
    """What is wrong with the answers to one prompt; None where they are right."""
    answer = answers[0] if len(answers) == 1 else None
    if check.classifies and isinstance(answer, dict) and "masks" in answer:
        answer = answer.get("text")
    elif check.classifies:
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if (
            not isinstance(answer, dict)
            or not isinstance(scores, dict)
            or answer.get("label") not in scores
        ):
            return f"the new version answers {_shown(answers)}, not a label with the scores of all"
        if len(scores) == 1:
            return None  # a reward model's only score: a number, which depends on the machine
        answer = answer["label"]
    if not isinstance(answer, str):
        return f"the new version answers {_shown(answers)}, not one text for one prompt"
    if check.expected is not None and answer != check.expected:
        theirs, ours = differing(answer, check.expected, _shown)
        return f"the new version answers {theirs}, its folder here {ours}"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
