"""`ingot predict`: one answer, from a model folder in this process or from a running server over
HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import say
from ingot.config.serving import answered, triton_question, triton_route
from ingot.models.generation.classifier import Classifier, ClassScores
from ingot.models.generation.request import Request
from ingot.models.generation.sampling import Sampling
from ingot.models.generation.seq2seq import Seq2SeqGenerator, Seq2SeqRequest
from ingot.serve.native.model import LoadedModel, load

TIMEOUT = httpx.Timeout(600.0, connect=10.0)
MAX_TOKENS = 64
SUMMARY_TOKENS = 1024


@dataclass(frozen=True)
class PredictOptions:
    """How to answer. `max_tokens` None: MAX_TOKENS of a decoder, of a sequence-to-sequence model
    the whole text.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    beams: int = 1
    chat: bool = False

    def check(self, kind: str) -> None:
        """Raises WrongInput for what this kind of model cannot do."""
        if self.chat and kind != "decoder":
            raise WrongInput("chat is for models that were trained on chats; leave it out")
        if self.beams != 1 and kind != "seq2seq":
            raise WrongInput(f"beams {self.beams} is for sequence-to-sequence models; leave it out")
        if kind == "encoder" and self != PredictOptions():
            raise WrongInput(
                "a classifier writes no text, so that settings of texts (max_tokens, temperature,"
                " ...) mean nothing; leave them out"
            )


def predict(
    target: str | Path,
    prompt: str,
    *,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: Sequence[str] = (),
    beams: int = 1,
    chat: bool = False,
    api_key: str | None = None,
) -> str:
    """The completion of `prompt`, without the prompt; a sequence-to-sequence model's text for it; a
    classifier's label, its scores on stderr.

    `target`: a model folder, or the URL of a server. `chat`: the prompt is a user's message, and
    the model's chat template is put around it.

    Raises:
        WrongInput: no such model, a prompt that it cannot read, or a request that the server
            refuses.
        Failed: the server does not answer, or fails.
    """
    wish = PredictOptions(max_tokens, temperature, top_p, seed, tuple(stop), beams, chat)
    if str(target).startswith(("http://", "https://")):
        return _ask(str(target), prompt, wish, api_key)
    loaded = load(Path(target), any_template=not chat)
    wish.check(loaded.kind)
    text, scores = _here(loaded, prompt, wish)
    if text is None:
        raise Failed(
            f"{target}: the model's numbers are not finite on this prompt; it was not trained to"
            " the end, or its weights are damaged"
        )
    if scores:
        say(_spelled(scores))
    return text


def _here(
    loaded: LoadedModel, prompt: str, wish: PredictOptions
) -> tuple[str | None, dict[str, float]]:
    """Text and scores by the model in this process; None for numbers that are not finite."""
    worker, sampling = loaded.worker(1), Sampling(wish.temperature, wish.top_p, wish.seed)
    if isinstance(worker, Classifier):
        worker.add(Request(loaded.encode(prompt), 1))
        ((_, verdict),) = worker.step()
        return _text(verdict), dict(zip(loaded.labels, verdict.scores, strict=False))
    if isinstance(worker, Seq2SeqGenerator):
        whole = min(SUMMARY_TOKENS, loaded.model.config.max_position_embeddings)
        tokens = whole if wish.max_tokens is None else wish.max_tokens
        (answer,) = worker.run(
            [Seq2SeqRequest(loaded.encode(prompt), tokens, sampling, wish.stop, wish.beams)]
        )
    else:
        ids = (
            loaded.tokenizer.encode_chat([_message(prompt)]) if wish.chat else loaded.encode(prompt)
        )
        (answer,) = worker.run(
            [
                Request(
                    ids,
                    MAX_TOKENS if wish.max_tokens is None else wish.max_tokens,
                    sampling,
                    wish.stop,
                )
            ]
        )
    return None if answer.finish == "error" else answer.text, {}


def _text(verdict: ClassScores) -> str | None:
    return None if verdict.finish == "error" else verdict.text


def _spelled(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{label} {score:.4f}" for label, score in scores.items())


def _message(prompt: str) -> dict[str, str]:
    return {"role": "user", "content": prompt}


def _ask(url: str, prompt: str, wish: PredictOptions, api_key: str | None) -> str:
    """Through OpenAI's routes, which other servers have too; the model is the first that the server
    names. Other kinds than decoders by `/predict`.
    """
    base = url.rstrip("/").removesuffix("/v1")
    headers = {} if api_key is None else {b"Authorization": f"Bearer {api_key}".encode()}
    with httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT) as client:
        if (triton := _triton_model(client)) is not None:
            return _triton(client, triton, prompt, wish)
        models = _json(client, "GET", "/v1/models", None)
        try:
            model = models["data"][0]
            kind = model.get("kind", "decoder")
            wish.check(kind)
            if kind != "decoder":
                return _predicted(client, prompt, wish, kind)
            body = {"model": model["id"], "max_tokens": MAX_TOKENS, **_options(wish)}
            if wish.chat:
                answer = _json(
                    client, "POST", "/v1/chat/completions", {**body, "messages": [_message(prompt)]}
                )
                return str(answer["choices"][0]["message"]["content"])
            return str(
                _json(client, "POST", "/v1/completions", {**body, "prompt": prompt})["choices"][0][
                    "text"
                ]
            )
        except (KeyError, IndexError, TypeError, AttributeError):
            raise Failed(
                f"{base} does not answer as an OpenAI server does; check the URL"
            ) from None


def _triton_model(client: httpx.Client) -> str | None:
    """The model that a Triton serves first; None where the server is no Triton, or does not
    answer.
    """
    try:
        if not client.get("/v2").is_success:
            return None
        return str(client.post("/v2/repository/index").json()[0]["name"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError):
        return None


def _triton(client: httpx.Client, model: str, prompt: str, wish: PredictOptions) -> str:
    if wish.chat or wish.beams != 1:
        raise WrongInput(
            f"{client.base_url} is a Triton, which goes on from texts and knows neither chat nor"
            " beams; leave them out"
        )
    return answered(
        "triton",
        _json(
            client,
            "POST",
            triton_route(model),
            triton_question(prompt, {"max_tokens": MAX_TOKENS, **_options(wish)}),
        ),
    )


def _predicted(client: httpx.Client, prompt: str, wish: PredictOptions, kind: str) -> str:
    parameters = {} if kind == "encoder" else {**_options(wish), "beams": wish.beams}
    (prediction,) = _json(
        client, "POST", "/predict", {"instances": [prompt], "parameters": parameters}
    )["predictions"]
    if kind != "encoder":
        return str(prediction)
    say(_spelled(prediction["scores"]))
    return str(prediction["label"])


def _options(wish: PredictOptions) -> dict[str, Any]:
    given = {"max_tokens": wish.max_tokens, "seed": wish.seed, "stop": list(wish.stop) or None}
    return {
        "temperature": wish.temperature,
        "top_p": wish.top_p,
        **{name: value for name, value in given.items() if value is not None},
    }


def _json(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None) -> Any:
    try:
        response = client.request(method, path, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Failed(
            f"{client.base_url} does not answer ({error or type(error).__name__}); start it with"
            " `ingot serve`, or check the URL"
        ) from None
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if response.is_success:
        return answer
    try:
        reason = answer["error"] if isinstance(answer["error"], str) else answer["error"]["message"]
    except (KeyError, TypeError):
        reason = response.reason_phrase
    message = f"{client.base_url} refuses with {response.status_code}: {reason}"
    raise (
        WrongInput(message)
        if 400 <= response.status_code < 500 and response.status_code != 429
        else Failed(message)
    )
