"""The last step of `ingot run`: start the server, ask it one thing over HTTP, stop it. No server outlives this."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

import httpx

from ingot.base.environment import secret
from ingot.base.errors import Failed
from ingot.base.fingerprint import fingerprint
from ingot.base.processes import tied_to_me
from ingot.base.steprecord import Outcome, sizes
from ingot.base.storage import write_atomic
from ingot.config.recipe import Recipe
from ingot.launch.job import Job
from ingot.launch.local import command

_LISTENS = re.compile(r"^serving \S+ at (http://\S+)")
START_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 15.0


def serve_and_ask(recipe: Recipe, arguments: Sequence[str]) -> Outcome:
    """Serve the run's model on a free port and send `serve.prompt`; the answer goes to `reports/predict.json`.

    `arguments` are the recipe files and overrides as they were typed.

    Raises:
        Failed: the server did not come up, or did not answer as it should.
    """
    run = recipe.folder
    headers = {"Authorization": f"Bearer {secret(recipe.serve.api_key, 'serve.api_key')}"} if recipe.serve.api_key else {}
    began = time.monotonic()
    with _server(Job("serve", ("serve", *arguments, "serve.port=0"))) as url:
        up = time.monotonic()
        route, request = _question(recipe)
        try:
            response = httpx.post(f"{url}{route}", json=request, headers=headers, timeout=ANSWER_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise Failed(f"the server at {url} did not answer ({type(error).__name__}: {error}); run the same command again") from error
        answered = time.monotonic()
    if response.status_code != httpx.codes.OK:
        raise Failed(f"the server answered {response.status_code}: {response.text[:300]}; mend `serve` in the recipe")
    completion, more = _said(response.json())
    about = {"schema": 1, "prompt": recipe.serve.prompt, "completion": completion, **more,
             "seconds": {"start": round(up - began, 3), "answer": round(answered - up, 3)}}
    path = run.reports / "predict.json"
    write_atomic(path, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return Outcome(f"answered in {answered - up:.1f} s", str(path), fingerprint([recipe.serve.prompt, completion]), sizes(run.root, [path]))


def _question(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """The route and the request: a model that was tuned on chats is asked as in a chat, a decoder of texts to go on, the others for a whole text or a label."""
    if recipe.documents in ("pair", "labelled"):
        return "/predict", {"instances": [recipe.serve.prompt]}
    request = {"model": recipe.name, "max_tokens": recipe.serve.prompt_tokens, "temperature": 0}
    if recipe.documents in ("chat", "preference"):
        return "/v1/chat/completions", {**request, "messages": [{"role": "user", "content": recipe.serve.prompt}]}
    return "/v1/completions", {**request, "prompt": recipe.serve.prompt}


def _said(answer: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What the server answered, as a text, and what it told beside."""
    if "predictions" in answer:
        prediction = answer["predictions"][0]
        return (prediction, {}) if isinstance(prediction, str) else (prediction["label"], {"scores": prediction["scores"]})
    choice = answer["choices"][0]
    completion = choice["message"]["content"] if "message" in choice else choice["text"]
    return completion, {"finish_reason": choice.get("finish_reason"), "usage": answer.get("usage")}


@contextlib.contextmanager
def _server(job: Job) -> Iterator[str]:
    """A running server's address. It is stopped at the end of the block, and by the kernel if this process is killed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AIP_")}
    process = subprocess.Popen(
        command(job), env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE,
        process_group=0, preexec_fn=tied_to_me(),
    )
    try:
        assert process.stderr is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_relay, args=(process.stderr, lines), daemon=True).start()
        url = _address(process, lines)
        _wait_for_health(process, url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except BaseException:  # it hangs, or a second Ctrl-C: either way no server may stay
            process.kill()
            process.wait()
            raise


def _relay(stream: IO[bytes], lines: queue.SimpleQueue[str | None]) -> None:
    """The server's messages go on to our stderr, line by line, and to whoever waits for its address."""
    for line in stream:
        text = line.decode(errors="replace")
        print(text, end="", file=sys.stderr, flush=True)
        lines.put(text)
    lines.put(None)


def _address(process: subprocess.Popen[bytes], lines: queue.SimpleQueue[str | None]) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            line = lines.get(timeout=min(left, 0.5))
            if line is None:
                raise Failed(f"the server ended before it listened (exit {process.wait()}); its message stands above")
            if match := _LISTENS.match(line):
                return match[1]
    raise Failed(f"the server did not listen within {START_TIMEOUT_S:g} s; try `ingot serve` with the same recipe")


def _wait_for_health(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Failed(f"the server ended (exit {process.returncode}); its message stands above")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5.0).status_code == httpx.codes.OK:
                return
        time.sleep(0.05)
    raise Failed(f"the server at {url} was not ready within {START_TIMEOUT_S:g} s; try `ingot serve` with the same recipe")
