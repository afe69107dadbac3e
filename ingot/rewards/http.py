"""A reward that a server computes."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import asdict
from typing import Any

import httpx

from ingot.base.errors import WrongInput
from ingot.base.server import environment_for
from ingot.config.sections.rewards import HttpReward
from ingot.rewards.protocol import RewardFailed, Sample

MOST_BYTES = 1 << 20
"""Of a reply."""
BUSY = (408, 425, 429)
"""Refusals that may not last."""


class Http:
    """Asks the server. One event loop in a thread of its own sends all requests, so that a request
    can be given up as a whole: a server may send a byte a second for ever.
    """

    def __init__(self, settings: HttpReward) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._client = httpx.AsyncClient(
            timeout=settings.timeout,
            limits=httpx.Limits(max_connections=settings.at_once),
            headers=_headers(settings),
            **environment_for(settings.url),
        )
        self._thread.start()

    @staticmethod
    def check(settings: HttpReward) -> None:
        """Raises WrongInput where the key or the certificates are missing. The server may be
        started later.
        """
        _headers(settings)
        environment_for(settings.url)

    def __call__(self, sample: Sample) -> float:
        return asyncio.run_coroutine_threadsafe(self._ask(sample), self._loop).result()

    async def _ask(self, sample: Sample) -> float:
        url, limit = self._settings.url, self._settings.timeout
        try:
            async with (
                asyncio.timeout(limit),
                self._client.stream("POST", url, json=asdict(sample)) as response,
            ):
                data = b""
                async for part in response.aiter_bytes():
                    data += part
                    if len(data) > MOST_BYTES:
                        raise RewardFailed(f"{url} answers with more than {MOST_BYTES:,} bytes")
        except TimeoutError:
            raise RewardFailed(f"{url} gives no answer in {limit:g} s", again=True) from None
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise RewardFailed(f"{url} does not answer ({why})", again=True) from None
        if not response.is_success:
            again = response.status_code in BUSY or response.is_server_error
            raise RewardFailed(f"{url} answers with status {response.status_code}", again=again)
        return self._value(response, data)

    def _value(self, response: httpx.Response, data: bytes) -> float:
        try:
            reply: Any = httpx.Response(200, content=data).json()
            value = reply[self._settings.field] if isinstance(reply, dict) else reply
        except (ValueError, KeyError, RecursionError):
            raise RewardFailed(
                f"{self._settings.url} answers with {data[:80]!r}, not with a number or an object"
                f" with the key {self._settings.field}"
            ) from None
        if isinstance(value, str) or value is None:
            raise RewardFailed(f"{self._settings.url} answers with {value!r:.80}, not a number")
        return float(value)

    def close(self) -> None:
        """Hang up."""
        asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def _headers(settings: HttpReward) -> dict[str, str]:
    if settings.key_variable is None:
        return {}
    key = os.environ.get(settings.key_variable)
    if not key:
        raise WrongInput(
            f"key_variable {settings.key_variable} is not set in the environment; set it to the"
            " server's key"
        )
    return {"Authorization": f"Bearer {key}"}
