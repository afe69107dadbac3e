"""The last step of `ingot run`: start the server, ask it one thing over HTTP, stop it. No server
outlives this.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from ingot.base.environment import secret
from ingot.base.fingerprint import fingerprint
from ingot.base.server import ask, running_server
from ingot.base.steprecord import Outcome, sizes
from ingot.base.storage import write_atomic
from ingot.config.recipe import Recipe
from ingot.config.serving import answered, question, triton_route
from ingot.launch.job import Job
from ingot.launch.local import command


def serve_and_ask(recipe: Recipe, arguments: Sequence[str]) -> Outcome:
    """Serve the run's model on a free port and send `serve.prompt`; the answer goes to
    `reports/predict.json`.

    `arguments` are those of `ingot run`, of which the options go on to the server. Files and
    overrides are in the run's resolved recipe already, and the first of them need not be the TARGET
    that `serve` wants there.

    Raises:
        Failed: the server did not come up, or did not answer as it should.
    """
    run = recipe.folder
    headers = (
        {"Authorization": f"Bearer {secret(recipe.serve.api_key, 'serve.api_key')}"}
        if recipe.serve.api_key
        else {}
    )
    options = [argument for argument in arguments if argument.startswith("--")]
    began = time.monotonic()
    with running_server(
        command(Job("serve", ("serve", str(run.recipe), "serve.port=0", *options)))
    ) as url:
        up = time.monotonic()
        answer = ask(url, *_question(recipe), headers)
        answered = time.monotonic()
    completion, more = _said(answer)
    about = {
        "schema": 1,
        "prompt": recipe.serve.prompt,
        "completion": completion,
        **more,
        "seconds": {"start": round(up - began, 3), "answer": round(answered - up, 3)},
    }
    path = run.reports / "predict.json"
    write_atomic(path, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return Outcome(
        f"answered in {answered - up:.1f} s",
        str(path),
        fingerprint([recipe.serve.prompt, completion]),
        sizes(run.root, [path]),
    )


def _question(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """The route and the request: a model that was tuned on chats is asked as in a chat, a decoder
    of texts to go on, the others for a whole text or a label.
    """
    tokens = min(recipe.serve.prompt_tokens, recipe.serve.max_tokens)
    if recipe.documents in ("pair", "labelled"):
        return "/predict", {"instances": [recipe.serve.prompt]}
    if recipe.serve.engine == "triton":
        return triton_route(recipe.name), question(
            "triton", recipe.name, recipe.serve.prompt, tokens
        )
    request = {"model": recipe.name, "max_tokens": tokens, "temperature": 0}
    if recipe.documents in ("chat", "preference"):
        return "/v1/chat/completions", {
            **request,
            "messages": [{"role": "user", "content": recipe.serve.prompt}],
        }
    return "/v1/completions", {**request, "prompt": recipe.serve.prompt}


def _said(answer: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What the server answered, as a text, and what it told beside."""
    if "predictions" in answer:
        prediction = answer["predictions"][0]
        return (
            (prediction, {})
            if isinstance(prediction, str)
            else (prediction["label"], {"scores": prediction["scores"]})
        )
    if "choices" not in answer:
        return answered("triton", answer), {}
    choice = answer["choices"][0]
    completion = choice["message"]["content"] if "message" in choice else choice["text"]
    return completion, {"finish_reason": choice.get("finish_reason"), "usage": answer.get("usage")}
