"""What the routes share: from a checked body to a ticket of the engine, and the limits on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.config.place import Serve
from ingot.models.generate import Request, check
from ingot.models.sampling import Sampling
from ingot.serve.bodies import Options
from ingot.serve.engine import Engine, Ticket
from ingot.serve.loaded import Loaded
from ingot.serve.refused import Refused


@dataclass(frozen=True)
class Service:
    """One served model."""

    name: str
    loaded: Loaded
    engine: Engine
    settings: Serve

    def check_model(self, asked: str | None) -> None:
        """Clients name the model; another name is more likely a mistake than a wish."""
        if asked is not None and asked != self.name:
            raise Refused(404, f"model `{asked}` is not served here, only `{self.name}`; see GET /v1/models", param="model", code="model_not_found")

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Ids of prompts; in a thread, since a long text takes a while and others wait for the event loop."""
        encode = self.loaded.tokenizer.encode_prompt
        return await asyncio.to_thread(lambda: [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts])

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a chat by the model's template."""
        if self.loaded.tokenizer.template is None:
            raise Refused(400, f"model `{self.name}` has no chat template; send a prompt to /v1/completions", param="messages")
        return await asyncio.to_thread(self.loaded.tokenizer.encode_chat, [dict(message) for message in messages])

    def submit(self, prompts: Sequence[list[int]], options: Options, *, max_tokens: int | None, logprobs: int | None = None) -> Ticket:
        """Queue one completion for each prompt. `max_tokens` None: as many as the server allows.

        Raises:
            Refused: more tokens asked for than the server allows, or no room in the queue.
            WrongInput: a prompt that the model cannot read.
        """
        limit = self.settings.max_tokens
        if max_tokens is not None and max_tokens > limit:
            raise Refused(400, f"max_tokens {max_tokens} is over this server's limit of {limit}; lower it, or raise serve.max_tokens", param="max_tokens")
        sampling = Sampling(options.temperature, options.top_p, options.seed, logprobs)
        requests = [Request(prompt, max_tokens or limit, sampling, tuple(options.stop)) for prompt in prompts]
        for request in requests:
            check(request, self.loaded.model.config)
        return self.engine.submit(requests)
