"""Vertex AI's prediction protocol for custom containers.

The route is AIP_PREDICT_ROUTE, else /predict. Predictions come in the order of the instances: the
completion as a text, or a classifier's label with the probability of each class; of a reward model
its score; of a masked language model the text without masks, and what could stand at each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag
from pydantic.types import FailFast

from ingot.config.models.source import ModelKind
from ingot.models.generation.classifier import ClassScores
from ingot.models.generation.fillmask import TOP_K, MaskChoices
from ingot.serve.http.answers import completions, run_unless_disconnected
from ingot.serve.http.bodies import (
    PredictBody,
    PredictParameters,
    PromptInstances,
    RequestBody,
    Text,
    WholeNumber,
    check_count,
    text_as,
)
from ingot.serve.http.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    NONE,
    ChatMessage,
    ToolBody,
    template_tools,
)
from ingot.serve.http.service import Service
from ingot.serve.native.engine import Ticket
from ingot.serve.native.masks import fill, told
from ingot.serve.native.model import LoadedModel
from ingot.tokenizers.chats.chat import Chat

PREDICT_TOKENS = 64
MAX_CHOICES_OF_MASK = 100
MAX_BEAMS = 16


class SummaryParameters(PredictParameters):
    """`parameters` of a prediction request to a sequence-to-sequence model."""

    beams: Annotated[WholeNumber, Field(ge=1, le=MAX_BEAMS)] = 1


class SummaryBody(RequestBody):
    """Vertex AI's prediction request to a sequence-to-sequence model."""

    instances: PromptInstances
    parameters: SummaryParameters = SummaryParameters()


class TextInstance(RequestBody):
    """One text to be classified."""

    text: Text


class ChatInstance(RequestBody):
    """One chat to be scored, with its answers, and the tools that it may call."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS), FailFast()] = NONE

    def chat(self) -> Chat:
        """The chat as templates read it."""
        messages = [one.template_message() for one in self.messages]
        return Chat(messages, template_tools(self.tools) or None)


def _kind_of(instance: Any) -> str:
    return "Chat" if isinstance(instance, dict) and "messages" in instance else "Text"


class NoParameters(RequestBody):
    """`parameters` of a prediction request to a classifier: none."""


class ClassifyBody(RequestBody):
    """Vertex AI's prediction request to a classifier, or to a model that scores chats."""

    instances: Annotated[
        list[
            Annotated[
                Annotated[TextInstance, Tag("Text")] | Annotated[ChatInstance, Tag("Chat")],
                Discriminator(_kind_of),
                text_as("text", TextInstance | ChatInstance),
            ]
        ],
        Field(min_length=1),
        FailFast(),
    ]
    parameters: NoParameters = NoParameters()


class MaskParameters(RequestBody):
    """`parameters` of a prediction request to a masked language model."""

    top_k: Annotated[WholeNumber, Field(ge=1, le=MAX_CHOICES_OF_MASK)] = TOP_K


class MaskBody(RequestBody):
    """Vertex AI's prediction request to a masked language model."""

    instances: Annotated[
        list[Annotated[TextInstance, text_as("text", TextInstance)]],
        Field(min_length=1),
        FailFast(),
    ]
    parameters: MaskParameters = MaskParameters()


def router(service: Service, environ: Mapping[str, str]) -> APIRouter:
    """The prediction route; each kind of model has a request body of its own."""
    routes = APIRouter()

    async def predict(body: PredictBody, request: Request) -> dict[str, Any]:
        prompts = await service.encode([item.prompt for item in body.instances])
        ticket = service.submit(
            prompts,
            body.parameters,
            max_tokens=body.parameters.max_tokens or service.default_max_tokens(PREDICT_TOKENS),
        )
        return {"predictions": [answer.text for answer in await completions(ticket, request)]}

    async def generate(body: SummaryBody, request: Request) -> dict[str, Any]:
        sources = await service.encode([item.prompt for item in body.instances])
        ticket = service.submit(
            sources,
            body.parameters,
            max_tokens=body.parameters.max_tokens,
            beams=body.parameters.beams,
        )
        return {"predictions": [answer.text for answer in await completions(ticket, request)]}

    async def classify(body: ClassifyBody, request: Request) -> dict[str, Any]:
        check_count(len(body.instances), service.bounds.prompts)
        for number, item in enumerate(body.instances):
            if not isinstance(item, ChatInstance):
                service.bounds.check_characters(len(item.text), f"prompt {number}")
        texts = [
            await service.encode_whole_chat(item.chat())
            if isinstance(item, ChatInstance)
            else (await service.encode([item.text]))[0]
            for item in body.instances
        ]
        ticket = service.submit_classification(texts)
        return {
            "predictions": await run_unless_disconnected(
                ticket, request, _classifications(ticket, service.loaded.labels)
            )
        }

    async def fill_in(body: MaskBody, request: Request) -> dict[str, Any]:
        texts = await service.encode([item.text for item in body.instances])
        ticket = service.submit_masks(texts, body.parameters.top_k)
        return {
            "predictions": await run_unless_disconnected(
                ticket, request, _filled(ticket, texts, service.loaded)
            )
        }

    kinds: dict[ModelKind, Callable[..., Any]] = {
        "decoder": predict,
        "seq2seq": generate,
        "encoder": classify,
        "masked": fill_in,
    }
    routes.add_api_route(
        environ.get("AIP_PREDICT_ROUTE") or "/predict", kinds[service.loaded.kind], methods=["POST"]
    )
    return routes


async def _classifications(ticket: Ticket, labels: Sequence[str]) -> list[dict[str, Any]]:
    pieces = [piece for (piece,) in await ticket.parts()]
    return [
        {"label": piece.text, "scores": dict(zip(labels, piece.scores, strict=True))}
        for piece in pieces
        if isinstance(piece, ClassScores)
    ]


async def _filled(
    ticket: Ticket, texts: Sequence[Sequence[int]], loaded: LoadedModel
) -> list[dict[str, Any]]:
    """Each text with its masks filled, and what could stand at each of them."""
    found = [piece for (piece,) in await ticket.parts()]
    return [
        {"text": fill(loaded.tokenizer, ids, piece), "masks": told(loaded.tokenizer, piece)}
        for ids, piece in zip(texts, found, strict=True)
        if isinstance(piece, MaskChoices)
    ]
