"""Vertex AI's contract for custom containers: where to listen, health, predictions, and where the
model's files lie.

Vertex sets AIP_HTTP_PORT, AIP_HEALTH_ROUTE, AIP_PREDICT_ROUTE and AIP_STORAGE_URI in the
container's environment; without them the routes are /health and /predict. A prediction, in the
order of the instances, is the completion as a text, or of a classifier the label and the
probability of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request

from ingot.models.generation.classifier import ClassScores
from ingot.models.kinds import ModelKind
from ingot.serve.http.bodies import ClassifyBody, PredictBody, SummaryBody
from ingot.serve.http.service import Service, completions, run_unless_disconnected
from ingot.serve.native.engine import Ticket

PREDICT_TOKENS = 64


def router(service: Service, environ: Mapping[str, str]) -> APIRouter:
    """The prediction route. Each kind of model takes a body of its own."""
    routes = APIRouter()

    async def predict(body: PredictBody, request: Request) -> dict[str, Any]:
        prompts = await service.encode(
            [item if isinstance(item, str) else item.prompt for item in body.instances]
        )
        ticket = service.submit(
            prompts,
            body.parameters,
            max_tokens=body.parameters.max_tokens or service.limit(PREDICT_TOKENS),
        )
        return {"predictions": [answer.text for answer in await completions(ticket, request)]}

    async def write(body: SummaryBody, request: Request) -> dict[str, Any]:
        sources = await service.encode(
            [item if isinstance(item, str) else item.prompt for item in body.instances]
        )
        ticket = service.submit(
            sources,
            body.parameters,
            max_tokens=body.parameters.max_tokens,
            beams=body.parameters.beams,
        )
        return {"predictions": [answer.text for answer in await completions(ticket, request)]}

    async def classify(body: ClassifyBody, request: Request) -> dict[str, Any]:
        texts = await service.encode(
            [item if isinstance(item, str) else item.text for item in body.instances]
        )
        ticket = service.judge(texts)
        return {
            "predictions": await run_unless_disconnected(
                ticket, request, _verdicts(ticket, service.loaded.labels)
            )
        }

    kinds: dict[ModelKind, Callable[..., Any]] = {
        "decoder": predict,
        "seq2seq": write,
        "encoder": classify,
    }
    routes.add_api_route(
        environ.get("AIP_PREDICT_ROUTE") or "/predict", kinds[service.loaded.kind], methods=["POST"]
    )
    return routes


async def _verdicts(ticket: Ticket, labels: Sequence[str]) -> list[dict[str, Any]]:
    pieces = [piece for (piece,) in await ticket.parts()]
    return [
        {"label": piece.text, "scores": dict(zip(labels, piece.scores, strict=True))}
        for piece in pieces
        if isinstance(piece, ClassScores)
    ]
