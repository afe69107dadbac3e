"""`ingot predict`: one completion, from a model folder in this process or from a running server over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from ingot.base.errors import Failed, WrongInput
from ingot.models.generate import Request
from ingot.models.sampling import Sampling
from ingot.serve.loaded import load

TIMEOUT = httpx.Timeout(600.0, connect=10.0)


def predict(
    target: str | Path, prompt: str, *, max_tokens: int = 64, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None,
    stop: Sequence[str] = (), chat: bool = False, api_key: str | None = None,
) -> str:
    """The completion of `prompt`, without the prompt. `target`: a model folder, or the URL of a server.

    `chat`: the prompt is a user's message, and the model's chat template is put around it.

    Raises:
        WrongInput: no such model, a prompt that it cannot read, or a request that the server refuses.
        Failed: the server does not answer, or fails.
    """
    if str(target).startswith(("http://", "https://")):
        sampling = {"temperature": temperature, "top_p": top_p} | ({} if seed is None else {"seed": seed})
        return _ask(str(target), prompt, {"max_tokens": max_tokens, **sampling} | ({"stop": list(stop)} if stop else {}), chat, api_key)
    loaded = load(Path(target), any_template=not chat)
    ids = loaded.tokenizer.encode_chat([_message(prompt)]) if chat else loaded.tokenizer.encode_prompt(prompt)
    request = Request(ids, max_tokens, Sampling(temperature, top_p, seed), tuple(stop))
    (completion,) = loaded.generator(1).run([request])
    if completion.finish == "error":
        raise Failed(f"{target}: the model's numbers are not finite on this prompt; it was not trained to the end, or its weights are damaged")
    return completion.text


def _message(prompt: str) -> dict[str, str]:
    return {"role": "user", "content": prompt}


def _ask(url: str, prompt: str, options: dict[str, Any], chat: bool, api_key: str | None) -> str:
    """Through OpenAI's routes, which other servers have too; the model is the first that the server names."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {} if api_key is None else {b"Authorization": f"Bearer {api_key}".encode()}
    with httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT) as client:
        models = _json(client, "GET", "/v1/models", None)
        try:
            body = {"model": models["data"][0]["id"], **options}
            if chat:
                answer = _json(client, "POST", "/v1/chat/completions", {**body, "messages": [_message(prompt)]})
                return str(answer["choices"][0]["message"]["content"])
            return str(_json(client, "POST", "/v1/completions", {**body, "prompt": prompt})["choices"][0]["text"])
        except (KeyError, IndexError, TypeError):
            raise Failed(f"{base} does not answer as an OpenAI server does; check the URL") from None


def _json(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None) -> Any:
    try:
        response = client.request(method, path, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Failed(f"{client.base_url} does not answer ({error or type(error).__name__}); start it with `ingot serve`, or check the URL") from None
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if response.is_success:
        return answer
    try:
        reason = answer["error"]["message"]
    except (KeyError, TypeError):
        reason = response.reason_phrase
    message = f"{client.base_url} refuses with {response.status_code}: {reason}"
    raise WrongInput(message) if 400 <= response.status_code < 500 and response.status_code != 429 else Failed(message)
