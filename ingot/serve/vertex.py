"""Vertex AI's contract for custom containers: where to listen, health, predictions, and where the
model's files lie.

Vertex sets AIP_HTTP_PORT, AIP_HEALTH_ROUTE, AIP_PREDICT_ROUTE and AIP_STORAGE_URI in the
container's environment; without them the routes are /health and /predict. A prediction, in the
order of the instances, is the completion as a text, or of a classifier the label and the
probability of each.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from fastapi import APIRouter, Request

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.storage import CHUNK_BYTES, atomic_file, find_files, is_remote, open_read
from ingot.config.place import Serve
from ingot.models.generation.classifier import Scored
from ingot.models.kinds import Kind
from ingot.serve.answers import awaited, completions
from ingot.serve.bodies import ClassifyBody, PredictBody, SummaryBody
from ingot.serve.engine import Ticket
from ingot.serve.service import Service

LOOPBACK, ANYWHERE = "127.0.0.1", "0.0.0.0"
PREDICT_TOKENS = 64


def address(settings: Serve, environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and port to listen on. Where Vertex sets the port, its proxy comes from outside, so
    loopback means everywhere.

    Raises:
        WrongInput: AIP_HTTP_PORT is not a port.
    """
    text = environ.get("AIP_HTTP_PORT")
    if not text:
        return settings.host, settings.port
    if not text.isdecimal() or int(text) > 65535:
        raise WrongInput(
            f"$AIP_HTTP_PORT is {text!r}, not a port; set it to a number from 0 to 65535 or"
            " unset it"
        )
    return (ANYWHERE if settings.host == LOOPBACK else settings.host), int(text)


def health_routes(environ: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(["/health", environ.get("AIP_HEALTH_ROUTE") or "/health"]))


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
            "predictions": await awaited(ticket, request, _verdicts(ticket, service.loaded.labels))
        }

    kinds: dict[Kind, Callable[..., Any]] = {
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
        if isinstance(piece, Scored)
    ]


@contextlib.contextmanager
def model_folder(target: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """The folder to serve: what AIP_STORAGE_URI names, downloaded for as long as the block lasts,
    else `target`.

    Raises:
        WrongInput: nothing lies there.
        Failed: the storage cannot be read.
    """
    uri = environ.get("AIP_STORAGE_URI", "")
    if not uri:
        yield target
    elif not is_remote(uri):
        yield Path(uri.removeprefix("file://"))
    else:
        with tempfile.TemporaryDirectory(prefix="ingot-model-") as folder:
            _download(uri, Path(folder))
            yield Path(folder)


def _download(uri: str, folder: Path) -> None:
    root = PurePosixPath(uri)
    try:
        files = find_files(uri)
        for file in files:
            with (
                open_read(file) as source,
                atomic_file(folder / PurePosixPath(file).relative_to(root)) as target,
            ):
                shutil.copyfileobj(source, target, CHUNK_BYTES)
    except IngotError:
        raise
    except Exception as error:  # each storage client raises its own kinds
        raise Failed(
            f"$AIP_STORAGE_URI {uri} cannot be read ({type(error).__name__}: {error}); check the"
            " bucket and the service account"
        ) from error
    if not files:
        raise WrongInput(
            f"$AIP_STORAGE_URI {uri} holds no file; give the folder that the model was uploaded to"
        )
