"""Error responses in the format of OpenAI's API, for every error of the application."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ingot.base.errors import WrongInput
from ingot.models.generation.request import TooLong

# Of many faults in one body the first few are named; what clients send is quoted up to MAX_QUOTED
# characters.
MAX_FAULTS, MAX_QUOTED = 4, 80
# Upper bound for any error message: a chat template may quote the whole chat that it refuses.
MAX_MESSAGE = 1200
REFUSED: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "What is wrong with the request",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "error": {
                            "type": "object",
                            "properties": {
                                "message": {"type": "string"},
                                "type": {"type": "string"},
                                "param": {"type": ["string", "null"]},
                                "code": {"type": ["string", "null"]},
                            },
                        }
                    },
                }
            }
        },
    }
}
"""What the routes say of errors in OpenAPI, in place of FastAPI's own 422, which is never sent."""
UNREADABLE = "There was an error parsing the body"
"""What FastAPI says of a body in which no JSON can be looked for."""
PROMPTS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/embeddings": "input",
}
"""The field of each route that can be too long; of the prediction route, wherever that is,
`instances`.
"""
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is answered with an HTTP error `status` and a `message` (the thing, its value,
    the next action).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        kind = _ERROR_TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        # The message may quote the client, and JSON can carry surrogates, which UTF-8 cannot.
        message, param = (
            text and short(text, MAX_MESSAGE).encode(errors="replace").decode()
            for text in (self.message, self.param)
        )
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), self.status, self.headers)


def short(text: str, most: int = MAX_QUOTED) -> str:
    """What a client sent, as an answer may quote it."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error of `app` in this format."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(WrongInput)
    async def wrong_input(request: Request, error: WrongInput) -> JSONResponse:
        return ApiError(400, str(error)).response()

    @app.exception_handler(TooLong)
    async def too_long(request: Request, error: TooLong) -> JSONResponse:
        # Clients that shorten what they send, or ask another model, know OpenAI's code and words.
        return ApiError(
            400,
            f"this model's maximum context length is {error.positions} tokens: {error}",
            param=PROMPTS.get(request.url.path.rstrip("/"), "instances"),
            code="context_length_exceeded",
        ).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        if error.body and "json" not in request.headers.get("content-type", ""):
            return ApiError(
                400, "the body must be JSON; send it with the header Content-Type: application/json"
            ).response()
        return validation_error(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if error.detail == UNREADABLE:
            return ApiError(400, "the body is not JSON in UTF-8; mend it").response()
        message = (
            f"{short(request.method)} {short(request.url.path)}: {str(error.detail).lower()}; see"
            " GET /openapi.json for what is served"
        )
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, "the server failed on this request; its log has the reason").response()


def _place(parts: Sequence[str | int]) -> str:
    """A field by its path; where it may be one of several objects, pydantic names ours, with a
    capital letter, of which clients know nothing.
    """
    own = [part for part in parts[:-1] if not str(part)[:1].isupper()]
    return short(".".join(short(str(part)) for part in (*own, *parts[-1:]) if part != "body"))


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """One 400 error for the validation errors of a body, each naming its field."""
    lines, param = [], None
    for error in errors[:MAX_FAULTS]:
        place = _place(error["loc"])
        match error["type"]:
            case "json_invalid":
                place = ""
                line = (
                    f"the body is not JSON ({error.get('ctx', {}).get('error', 'broken')} at"
                    f" byte {error['loc'][-1]}); mend it"
                )
            case "extra_forbidden":
                line = f"`{place}` is not known to this server; remove it"
            case "missing" if place:
                line = f"`{place}` is missing; give it"
            case "value_error":
                line = (
                    f"`{place}`: {error['ctx']['error']}" if place else str(error["ctx"]["error"])
                )
            case _ if not place:
                line = "the body is not a JSON object; send one"
            case _:
                sent = error.get("input")
                sent = short(sent) if isinstance(sent, str) else sent
                given = "" if isinstance(sent, dict | list) else f" is {sent!r:.60}"
                line = f"`{place}`{given}: {error['msg'][0].lower()}{error['msg'][1:]}"
        param = param or place or None
        lines.append(line)
    if len(errors) > MAX_FAULTS:
        lines.append(f"and {len(errors) - MAX_FAULTS:,} more faults")
    return ApiError(400, "; ".join(lines), param=param)
