"""Compares the server with transformers: it is started as a process, gets requests with held-out
documents, and is stopped in every case.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.base.processes import own_python
from ingot.base.server import ask, running_server
from ingot.config.recipe import Recipe
from ingot.data.batches.masking import mask_token
from ingot.data.cleaning.documents import read_documents
from ingot.data.columns.manifest import prefix_of
from ingot.data.documents.kinds import said
from ingot.data.documents.preferences import from_preference
from ingot.models.device import Compute
from ingot.models.generation.request import REPLACEMENT, GeneratedToken
from ingot.serve.http.logprobs import LogprobFormatter
from ingot.tokenizers.chats.chat import Chat
from ingot.tokenizers.chats.encode import whole_chat_ids
from ingot.tokenizers.sentinels import SENTINEL, decoder_for, encode_with_sentinels
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.verify.export.transformers import TransformersModel
from ingot.verify.proof import Check

SERVER = "server"
DOCUMENTS = 4
"""The number of held-out documents in requests to the server."""
NEW_TOKENS = 16
CANDIDATES = 32
"""The number of most likely tokens among which the server's token is searched by its text."""


def server(folder: Path, compute: Compute) -> AbstractContextManager[str]:
    """A context manager with the URL of a server of the model in `folder` that computes in
    `compute`. Raises Failed if it does not start.
    """
    knobs = ("host=127.0.0.1", "port=0", "api_key=null", f"compute={compute}")
    arguments = ["serve", str(folder), *(f"serve.{knob}" for knob in knobs)]
    return running_server([*own_python(), "-m", "ingot", *arguments])


@dataclass(frozen=True)
class _ServedToken:
    """A token that the server generated: how far its log-probability is from transformers' own, and
    its place for messages.
    """

    gap: float
    behind: float
    """By how many nats transformers prefers another token."""
    place: str


def check_decoder(
    url: str,
    model: TransformersModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    bound: float,
) -> Check:
    """Check greedy completions of `prompts`: each token's log-probability against transformers'
    log-softmax at that position.
    """
    body = {
        "prompt": [list(prompt) for prompt in prompts],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "logprobs": 0,
    }
    choices = ask(url, "/v1/completions", body)["choices"]
    steps: list[_ServedToken] = []
    for number, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
        spelled, given = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
        if len(spelled) < NEW_TOKENS and choice["finish_reason"] == "length":
            return Check(
                SERVER,
                False,
                f"completion {number} ends after {len(spelled)} of {NEW_TOKENS} tokens and says"
                " that this is its length",
            )
        ids, after = list(prompt), _NextTokenLogprobs(model, prompt)
        for text, logprob in zip(spelled, given, strict=True):
            likely = after(ids)
            found = _find_token(text, likely, tokenizer, ids)
            place = f"completion {number}, token {len(ids) - len(prompt)}"
            if found is None:
                wanted = tokenizer.token(int(likely.argmax()))
                return Check(
                    SERVER,
                    False,
                    f"{place} is {text!r}, and {wanted!r} is transformers' likeliest; serve this"
                    " very folder, or export it again",
                )
            steps.append(
                _ServedToken(
                    abs(float(likely[found]) - float(logprob)),
                    float(likely.max() - likely[found]),
                    f"{place}, {text!r}",
                )
            )
            ids.append(found)
        if choice["finish_reason"] == "stop":
            likely = after(ids)
            behind = float(likely.max()) - max(
                (float(likely[token]) for token in model.stops), default=-torch.inf
            )
            steps.append(
                _ServedToken(
                    0.0,
                    behind,
                    f"completion {number}, the end after {len(ids) - len(prompt)} tokens",
                )
            )
    return _decoder_check(steps, len(prompts), bound)


def _decoder_check(steps: Sequence[_ServedToken], prompts: int, bound: float) -> Check:
    if not steps:
        return Check(SERVER, False, f"the server wrote nothing to {prompts} prompts")
    worst = max(steps, key=lambda step: max(step.gap, step.behind / 2))
    # If two tokens are equally likely up to rounding, either may be generated.
    fits = worst.gap <= bound and worst.behind <= 2 * bound
    what = (
        f"{len(steps)} generated tokens of {prompts} beginnings: log-probabilities differ by up to"
        f" {worst.gap:.1e} (bound {bound:.1e})"
    )
    if fits:
        return Check(SERVER, True, what)
    other = (
        f", and transformers finds another token likelier by {worst.behind:.1e}"
        if worst.behind > 2 * bound
        else ""
    )
    return Check(SERVER, False, f"{what} at {worst.place}{other}")


class _NextTokenLogprobs:
    """transformers' log-probabilities `[V]` of the next token; one forward pass for a whole
    completion as long as it is the expected one.
    """

    def __init__(self, model: TransformersModel, prompt: Sequence[int]) -> None:
        self._model, self._end = model, len(prompt) + NEW_TOKENS
        self._read: list[int] = []

    def __call__(self, ids: list[int]) -> torch.Tensor:
        if self._read[: len(ids)] != ids:
            self._read = [*ids, *self._model.written(ids, max(1, self._end - len(ids)))]
            self._values = self._model.logits(self._read).log_softmax(dim=-1)
        return self._values[len(ids) - 1]


def _find_token(
    text: str, likely: torch.Tensor, tokenizer: Tokenizer, before: Sequence[int]
) -> int | None:
    """The most likely token that the server would write as `text` after `before`: answers identify
    tokens by their text only.
    """
    for token in likely.topk(min(CANDIDATES, len(likely))).indices.tolist():
        if LogprobFormatter(tokenizer, before).completions([GeneratedToken(token, 0, 0.0)])[
            "tokens"
        ] == [text]:
            return int(token)
    return None


def check_seq2seq(
    url: str, model: TransformersModel, tokenizer: Tokenizer, sources: Sequence[str], prefix: str
) -> Check:
    """Check greedily generated texts for `sources` against transformers'."""
    body = {
        "instances": list(sources),
        "parameters": {"max_tokens": NEW_TOKENS, "temperature": 0, "beams": 1},
    }
    answers = ask(url, "/predict", body)["predictions"]
    for source, answer in zip(sources, answers, strict=True):
        ids = encode_with_sentinels(tokenizer, prefix + source)
        wanted = decoder_for(tokenizer, ids)(model.written(ids, NEW_TOKENS))
        # At the end of an answer a server drops what may be a part of a character.
        if answer.rstrip(REPLACEMENT) != wanted.rstrip(REPLACEMENT):
            return Check(
                SERVER,
                False,
                f"to {source[:40]!r} it writes {answer[:60]!r}, transformers {wanted[:60]!r}",
            )
    return Check(
        SERVER,
        True,
        f"{len(answers)} texts of up to {NEW_TOKENS} tokens, the same as transformers generates",
    )


def check_encoder(
    url: str, model: TransformersModel, tokenizer: Tokenizer, texts: Sequence[str], bound: float
) -> Check:
    """Check labels and their probabilities against transformers'."""
    answers = ask(url, "/predict", {"instances": list(texts)})["predictions"]
    largest, where = 0.0, ""
    for text, answer in zip(texts, answers, strict=True):
        wanted = dict(
            zip(
                model.labels,
                model.logits(tokenizer.encode_alone(text))[0].softmax(dim=-1).tolist(),
                strict=True,
            )
        )
        if answer["scores"].keys() != wanted.keys():
            return Check(
                SERVER,
                False,
                f"its labels are {', '.join(answer['scores'])}, transformers' {', '.join(wanted)}",
            )
        gap = max(abs(score - wanted[label]) for label, score in answer["scores"].items())
        if wanted[answer["label"]] < max(wanted.values()) - 2 * bound:
            return Check(
                SERVER,
                False,
                f"it calls {text[:40]!r} {answer['label']}, transformers"
                f" {max(wanted, key=lambda label: wanted[label])}",
            )
        if gap >= largest:
            largest, where = gap, text
    return _bounded(f"{len(answers)} texts", largest, bound, where)


def check_masks(
    url: str, model: TransformersModel, tokenizer: Tokenizer, texts: Sequence[str], bound: float
) -> Check:
    """Check what stands at a mask in each text, and how likely it is, against transformers'. Every
    text is asked about a token of its middle.
    """
    largest, where = 0.0, ""
    mask, own = mask_token(tokenizer), str(tokenizer.named["mask_token"])
    asked = [_with_mask(text, own) for text in texts]
    answers = ask(url, "/predict", {"instances": asked})["predictions"]
    for text, answer in zip(asked, answers, strict=True):
        ids = tokenizer.encode_masked(text)
        wanted = model.logits(ids)[ids.index(mask)].softmax(dim=-1)
        (choices,) = answer["masks"]
        gap = max(abs(one["score"] - float(wanted[one["token"]])) for one in choices)
        gap = max(gap, float(wanted.max()) - choices[0]["score"])
        if gap >= largest:
            largest, where = gap, text
    return _bounded(f"{len(asked)} masks", largest, bound, where)


def _bounded(what: str, largest: float, bound: float, where: str) -> Check:
    """The check of probabilities that differ by `largest` at most, in the text `where`."""
    detail = f"{what}: probabilities differ by up to {largest:.1e} (bound {bound:.1e})"
    if largest <= bound:
        return Check(SERVER, True, detail)
    return Check(SERVER, False, f"{detail} at {where[:40]!r}")


def _with_mask(text: str, mask: str) -> str:
    """A text with a mask in place of the word in its middle."""
    words = text.split()
    return " ".join([*words[: len(words) // 2], mask, *words[len(words) // 2 + 1 :]])


def check_scores(
    url: str,
    model: TransformersModel,
    tokenizer: Tokenizer,
    chats: Sequence[Chat],
    bound: float,
) -> Check:
    """Check the scores of chats against transformers', which finds their last token by the id of
    padding: all of them in one batch.
    """
    if not chats:
        return Check(SERVER, None, "no held-out preference is short enough to ask about")
    asked = [{"messages": chat.messages, "tools": chat.tools or []} for chat in chats]
    answers = ask(url, "/predict", {"instances": asked})
    found = [answer["scores"][answer["label"]] for answer in answers["predictions"]]
    wanted = model.scores([whole_chat_ids(tokenizer, chat) for chat in chats])
    gap = max(abs(one - other) for one, other in zip(found, wanted, strict=True))
    detail = f"{len(chats)} chats: scores differ by up to {gap:.1e} (bound {bound:.1e})"
    return Check(SERVER, gap <= bound, detail)


def held_out_chats(recipe: Recipe, tokenizer: Tokenizer) -> list[Chat]:
    """Both answers to some held-out prompts that fit without truncation."""
    documents = (document.text for document in read_documents(recipe, recipe.data.examples_split))
    chats = (side for text in documents for side in from_preference(text).sides)

    def fits(chat: Chat) -> bool:
        return len(whole_chat_ids(tokenizer, chat)) <= recipe.data.seq_len

    return list(itertools.islice(filter(fits, chats), 2 * DOCUMENTS))


def held_out_texts(recipe: Recipe, tokenizer: Tokenizer) -> list[str]:
    """Some held-out sources of pairs, labelled or plain texts, that fit without truncation; of
    plain texts the beginnings of those that do not.
    """
    documents = (document.text for document in read_documents(recipe, recipe.data.examples_split))
    if recipe.documents == "masked":
        words = max(1, recipe.data.seq_len // 8)
        found = (" ".join(text.split()[:words]) for text in documents)
        if recipe.objective.spans is not None:
            found = (_with_mask(text, SENTINEL) for text in found)
    else:
        found = (said(recipe.documents, text)[0] for text in documents)
    prefix, most = prefix_of(recipe), recipe.data.seq_len
    return list(
        itertools.islice(
            (text for text in found if len(tokenizer.encode_framed(prefix + text)) <= most),
            DOCUMENTS,
        )
    )
