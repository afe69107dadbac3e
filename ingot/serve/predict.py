"""`ingot predict`: one answer, from a model folder in this process or from a running server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ingot.base.environment import check_decoded
from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import say
from ingot.base.server import environment_for
from ingot.config.serving import answered, triton_question, triton_route
from ingot.models.generation.classifier import Classifier, ClassScores
from ingot.models.generation.fillmask import MaskChoices, MaskFiller
from ingot.models.generation.request import Request, special_in
from ingot.models.generation.sampling import Sampling
from ingot.models.generation.seq2seq import Seq2SeqRequest
from ingot.models.generation.seq2seq_generator import Seq2SeqGenerator
from ingot.serve.native.causal import TextEncoder
from ingot.serve.native.embedding import Embedder
from ingot.serve.native.masks import fill, told
from ingot.serve.native.model import LoadedModel, load
from ingot.tokenizers.chats.chat import Chat

TIMEOUT = httpx.Timeout(600.0, connect=10.0)
MAX_TOKENS = 64
SUMMARY_TOKENS = 1024


@dataclass(frozen=True)
class PredictOptions:
    """Generation options. `max_tokens` None: MAX_TOKENS for a decoder, the whole text for a
    sequence-to-sequence model.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    beams: int = 1
    chat: bool = False

    def __post_init__(self) -> None:
        """Raises WrongInput for what no model takes; bounds are those of a server's requests."""
        for name, most in (("temperature", 2), ("top_p", 1)):
            value: Any = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= most:
                raise WrongInput(f"{name} is {value!r}; give a number from 0 to {most}")
        for name in ("max_tokens", "seed", "beams"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise WrongInput(f"{name} is {value!r}; give a whole number")
        for text in self.stop:
            if not isinstance(text, str):
                raise WrongInput(f"stop has {text!r}; give texts")
            check_characters("stop", text)

    def check(self, kind: str) -> None:
        """Raises WrongInput for options that this kind of model does not have."""
        if self.chat and kind != "decoder":
            raise WrongInput("chat is for models that were trained on chats; leave it out")
        if self.beams != 1 and kind != "seq2seq":
            raise WrongInput(f"beams {self.beams} is for sequence-to-sequence models; leave it out")
        if kind in ("encoder", "masked") and self != PredictOptions():
            what = "a classifier" if kind == "encoder" else "a masked language model"
            raise WrongInput(
                f"{what} writes no text, so that settings of texts (max_tokens, temperature,"
                " ...) mean nothing; leave them out"
            )


def check_characters(what: str, value: object) -> None:
    """Raises WrongInput if a text, or one within messages, holds what no UTF-8 can say."""
    said = json.dumps(value, ensure_ascii=False, default=str)
    check_decoded(said, what)
    try:
        said.encode()
    except UnicodeEncodeError:
        raise WrongInput(f"{what} holds half of a surrogate pair; give whole characters") from None


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
    """The completion of `prompt` without the prompt, a sequence-to-sequence model's text, or a
    classifier's label, with the scores on stderr; of a reward model its score. To that, `prompt` is
    what a user says, or a chat with its answers as JSON: a list of messages. Of a masked language
    model the text with its masks (`[MASK]`) filled, with the likeliest tokens on stderr.

    `target`: a model folder, or the URL of a server. `chat`: the prompt is a user's message and
    goes through the model's chat template.

    Raises:
        WrongInput: no such model, a prompt that it cannot read, or a request that the server
            refuses.
        Failed: the server does not answer, or fails.
    """
    options = PredictOptions(max_tokens, temperature, top_p, seed, tuple(stop), beams, chat)
    if str(target).startswith(("http://", "https://")):
        return _predict_remotely(str(target), prompt, options, api_key)
    loaded = load(Path(target), any_template=not chat)
    options.check(loaded.kind)
    text, scores = predict_locally(loaded, prompt, options)
    if scores:
        say(_format_scores(scores))
    return text


def predict_locally(
    loaded: LoadedModel, prompt: str | Sequence[Mapping[str, Any]], options: PredictOptions
) -> tuple[str, dict[str, float]]:
    """Text and scores from the model in this process; `prompt` may be a list of messages where
    `options.chat` is set. Raises Failed where logits are not finite.
    """
    check_characters("the prompt", prompt)
    with loaded.fewest_threads():
        text, scores = _answer(loaded, prompt, options)
    if text is None:
        raise Failed(
            "the model's numbers are not finite on this prompt; it was not trained to the end, or"
            " its weights are damaged"
        )
    return text, scores


def _answer(
    loaded: LoadedModel, prompt: str | Sequence[Mapping[str, Any]], options: PredictOptions
) -> tuple[str | None, dict[str, float]]:
    if isinstance(loaded.model, TextEncoder):
        raise WrongInput(
            "this encoder has neither classes nor text to answer with; serve it (`ingot serve`) and"
            " ask POST /v1/embeddings"
        )
    worker, sampling = loaded.worker(1), Sampling(options.temperature, options.top_p, options.seed)
    if options.chat:
        messages = [_user_message(prompt)] if isinstance(prompt, str) else prompt
        ids = loaded.tokenizer.encode_chat(messages)
    elif loaded.scores_chats and (chat := _messages_in(prompt)) is not None:
        ids = loaded.encode_whole_chat(Chat(chat))
    elif isinstance(prompt, str):
        ids = loaded.encode(prompt)
    else:
        raise WrongInput("a list of messages is for chat; give a text")
    assert not isinstance(worker, Embedder)
    if isinstance(worker, Classifier):
        worker.add(Request(ids, 1))
        ((_, verdict),) = worker.step()
        assert isinstance(verdict, ClassScores)
        scores = dict(zip(loaded.labels, verdict.scores, strict=False))
        return None if verdict.finish == "error" else _verdict(verdict.text, scores), scores
    if isinstance(worker, MaskFiller):
        worker.add(Request(ids, 1))
        ((_, choices),) = worker.step()
        assert isinstance(choices, MaskChoices)
        if choices.finish == "error":
            return None, {}
        return fill(loaded.tokenizer, ids, choices), _choices(told(loaded.tokenizer, choices))
    special = special_in(options.stop, loaded.tokenizer.special_ids)
    if isinstance(worker, Seq2SeqGenerator):
        whole = min(SUMMARY_TOKENS, loaded.target_positions)
        tokens = whole if options.max_tokens is None else options.max_tokens
        asked = Seq2SeqRequest(ids, tokens, sampling, options.stop, options.beams, special=special)
        (answer,) = worker.run([asked])
    else:
        tokens = MAX_TOKENS if options.max_tokens is None else options.max_tokens
        (answer,) = worker.run([Request(ids, tokens, sampling, options.stop, special=special)])
    return None if answer.finish == "error" else answer.text, {}


def _choices(masks: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """The probabilities of a text's masks by token; of several masks with the number of each."""
    return {
        ("" if len(masks) == 1 else f"{number}: ") + str(one["token_str"]).strip(): one["score"]
        for number, mask in enumerate(masks, start=1)
        for one in mask
    }


def _verdict(label: str, scores: Mapping[str, float]) -> str:
    """The label; of a model with one output, that number."""
    return f"{scores[label]:.4f}" if len(scores) == 1 else label


def _messages_in(prompt: str | Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]] | None:
    """The messages of a chat, which may be given as JSON; None for any other text."""
    if not isinstance(prompt, str):
        return prompt
    try:
        found = json.loads(prompt)
    except ValueError:
        return None
    messages = isinstance(found, list) and all(
        isinstance(item, dict) and "role" in item for item in found
    )
    return found if messages and found else None


def _format_scores(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{label} {score:.4f}" for label, score in scores.items())


def _user_message(prompt: str) -> dict[str, str]:
    return {"role": "user", "content": prompt}


def _predict_remotely(url: str, prompt: str, options: PredictOptions, api_key: str | None) -> str:
    """Ask a server through OpenAI's routes, which other servers have too, for its first model;
    models that are no decoders through `/predict`.
    """
    base = url.rstrip("/").removesuffix("/v1")
    headers = {} if api_key is None else {b"Authorization": f"Bearer {api_key}".encode()}
    with httpx.Client(
        base_url=base, headers=headers, timeout=TIMEOUT, **environment_for(base)
    ) as client:
        if (triton := _triton_model(client)) is not None:
            return _triton(client, triton, prompt, options)
        models = _json(client, "GET", "/v1/models", None)
        try:
            model = models["data"][0]
            kind = model.get("kind", "decoder")
            options.check(kind)
            if kind != "decoder":
                return _predict_route(client, prompt, options, kind)
            body = {"model": model["id"], "max_tokens": MAX_TOKENS, **_options(options)}
            if options.chat:
                answer = _json(
                    client,
                    "POST",
                    "/v1/chat/completions",
                    {**body, "messages": [_user_message(prompt)]},
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
    """The first model of a Triton server; None where the server is no Triton, or does not
    answer.
    """
    try:
        if not client.get("/v2").is_success:
            return None
        return str(client.post("/v2/repository/index").json()[0]["name"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError):
        return None


def _triton(client: httpx.Client, model: str, prompt: str, options: PredictOptions) -> str:
    if options.chat or options.beams != 1:
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
            triton_question(prompt, {"max_tokens": MAX_TOKENS, **_options(options)}),
        ),
    )


def _predict_route(client: httpx.Client, prompt: str, options: PredictOptions, kind: str) -> str:
    parameters = (
        {} if kind in ("encoder", "masked") else {**_options(options), "beams": options.beams}
    )
    messages = _messages_in(prompt) if kind == "encoder" else None
    instance = prompt if messages is None else {"messages": messages}
    (prediction,) = _json(
        client, "POST", "/predict", {"instances": [instance], "parameters": parameters}
    )["predictions"]
    if kind == "masked":
        say(_format_scores(_choices(prediction["masks"])))
        return str(prediction["text"])
    if kind != "encoder":
        return str(prediction)
    say(_format_scores(prediction["scores"]))
    return _verdict(str(prediction["label"]), prediction["scores"])


def _options(options: PredictOptions) -> dict[str, Any]:
    given = {
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "stop": list(options.stop) or None,
    }
    return {
        "temperature": options.temperature,
        "top_p": options.top_p,
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
