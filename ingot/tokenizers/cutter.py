"""Text with special tokens in it, cut at them: for libraries that encode plain text only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Pieces:
    """Ids of a text."""

    ids: list[int]


class Cutter:
    """Gives each special token its id and hands what stands between them to `encode`, piece by
    piece.
    """

    def __init__(self, special: Mapping[str, int], encode: Callable[[str], list[int]]) -> None:
        self._special, self._encode = special, encode
        # Longer ones first, so that none is taken for its own beginning.
        self._pattern = re.compile(
            f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})"
            if special
            else r"((?!))"
        )

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Pieces:
        """Nothing is put around the text, whatever `add_special_tokens` says: the template has it
        already.
        """
        ids: list[int] = []
        for number, piece in enumerate(self._pattern.split(sequence)):
            if piece:
                ids += [self._special[piece]] if number % 2 else self._encode(piece)
        return Pieces(ids)
