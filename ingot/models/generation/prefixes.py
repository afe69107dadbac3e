"""Keys and values of prompts that were read before: a request that begins as one of them copies
these into its row, and only the rest of it is computed.

They are kept in blocks of tokens, each known by all tokens before it and its own: compared token by
token, not by a hash, so a request never gets another prompt's. The blocks that were not used for
the longest time are dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.base.hostmemory import host_memory

BLOCK = 32
"""Tokens of a block: what requests share is a multiple of it."""
SPARE_BYTES = 512_000_000
"""With less free memory than this nothing is kept."""


def memory_is_short() -> bool:
    """Whether this machine, or the container, has hardly any memory left."""
    return host_memory().free < SPARE_BYTES


@dataclass(eq=False)
class _Block:
    """The keys and values `[layers, 2, K, BLOCK, E]` of some tokens, behind those of the blocks
    before it.
    """

    kept: Tensor

    @property
    def bytes(self) -> int:
        return self.kept.nbytes


Key = tuple[object, tuple[int, ...]]
"""What is before a block (another block, or the salt of a first one), and its own tokens."""


class PrefixStore:
    """Blocks of at most `max_bytes` in all.

    Prompts with different salts share nothing. `short_of_memory()` is asked before anything is
    added: while it answers True, nothing is, and what is kept is given back.
    """

    def __init__(self, max_bytes: int, short_of_memory: Callable[[], bool] = lambda: False) -> None:
        self._max_bytes, self._short_of_memory = max_bytes, short_of_memory
        self._blocks: OrderedDict[Key, _Block] = OrderedDict()
        self.bytes = 0

    def known(self, tokens: Sequence[int], salt: str | None) -> int:
        """How many of the first tokens `find` finds."""
        return BLOCK * len(self._found(tokens, salt))

    def find(self, tokens: Sequence[int], salt: str | None) -> Tensor | None:
        """The keys and values of as many of the first tokens as are kept, `[layers, 2, K, T, E]`;
        they count as used now.
        """
        keys = self._found(tokens, salt)
        self._use(keys)
        if not keys:
            return None
        return torch.cat([self._blocks[key].kept for key in keys], dim=3)

    def add(
        self, tokens: Sequence[int], salt: str | None, saved: Callable[[int, int], Tensor]
    ) -> None:
        """Keep the full blocks of `tokens` that are not kept yet. `saved(start, end)` copies their
        keys and values, `[layers, 2, K, end - start, E]`. Numbers that are not finite are not kept.
        """
        if self._short_of_memory():
            self.clear()
            return
        count = len(tokens) // BLOCK
        keys = self._chain(tokens, salt, count)
        begin = BLOCK * len(keys)
        if len(keys) == count:
            self._use(keys)
            return
        fresh = saved(begin, BLOCK * count)
        if not bool(fresh.isfinite().all()):
            return
        before: object = self._blocks[keys[-1]] if keys else salt
        for number, part in enumerate(fresh.split(BLOCK, dim=3), len(keys)):
            # A copy: a view would hold the memory of all of them until the last one is dropped.
            block = _Block(part.clone())
            key = (before, tuple(tokens[BLOCK * number : BLOCK * (number + 1)]))
            if self.bytes + block.bytes > self._max_bytes:
                self._use(keys)  # the beginning of this one is the last to go
                self._drop(self.bytes + block.bytes - self._max_bytes, keep=len(keys))
                if self.bytes + block.bytes > self._max_bytes:
                    break
            self._blocks[key] = block
            self.bytes += block.bytes
            keys.append(key)
            before = block
        self._use(keys)

    def clear(self) -> None:
        """Drop everything."""
        self._blocks.clear()
        self.bytes = 0

    def _found(self, tokens: Sequence[int], salt: str | None) -> list[Key]:
        """The keys of the blocks that need not be computed. At least one token is left, whose
        logits are wanted.
        """
        return self._chain(tokens, salt, (len(tokens) - 1) // BLOCK)

    def _chain(self, tokens: Sequence[int], salt: str | None, most: int) -> list[Key]:
        """The keys of the first blocks of `tokens` that are kept, at most so many."""
        keys: list[Key] = []
        before: object = salt
        for number in range(most):
            key = (before, tuple(tokens[BLOCK * number : BLOCK * (number + 1)]))
            block = self._blocks.get(key)
            if block is None:
                break
            keys.append(key)
            before = block
        return keys

    def _use(self, keys: Sequence[Key]) -> None:
        """Mark blocks as used now, the first one last: what is dropped has nothing behind it."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _drop(self, size: int, keep: int) -> None:
        """Drop the least recently used blocks until `size` bytes are free, but not the last `keep`
        of them.
        """
        while size > 0 and len(self._blocks) > keep:
            _, block = self._blocks.popitem(last=False)
            self.bytes -= block.bytes
            size -= block.bytes


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """The tokens of the full blocks that two prompts begin with alike, at least one token of `one`
    left out.
    """
    most = min((len(one) - 1) // BLOCK, len(other) // BLOCK)
    for number in range(most):
        here = slice(BLOCK * number, BLOCK * (number + 1))
        if tuple(one[here]) != tuple(other[here]):
            return BLOCK * number
    return BLOCK * most
