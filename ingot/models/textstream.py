"""Text out of tokens as they come: whole characters only, and never a piece of a stop string. Knows
no tokenizer, only `decode`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"
# A UTF-8 character that is not whole yet has at most three bytes.
UNSURE = 3
# Tokens decoded together with the next one, so that a space at its beginning is kept.
CONTEXT = 5
# Text that never becomes UTF-8 would let the window grow for ever: past LONGEST it is cut to the
# last SHORTEST tokens, which reach far enough back that where characters begin is the same in both.
LONGEST, SHORTEST = 64, 16


class TextStream:
    """The text of one completion.

    `context` are the prompt's tokens: the first new token is decoded after them, so that prompt and
    completion can be joined. `length` counts the characters that are certain so far, those held
    back for a stop string included; `unsettled` those after them that show as replacements for now.
    """

    def __init__(self, decode: Decode, context: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._window = list(context[-CONTEXT:])
        self._old = len(self._window)  # tokens of the window whose text is all given out
        self._given = decode(self._window).rstrip(
            REPLACEMENT
        )  # the part of the window's text that is given out
        self._held = ""
        self.length = 0
        self.unsettled = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that now surely belongs to the completion. Afterwards `stopped` tells whether a stop
        string was met.
        """
        fresh = self._certain(token)
        if self.stopped or not fresh:
            return ""
        text = self._held + fresh
        self.length += len(fresh)
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self.length -= len(text) - min(found)
            self._held = ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back for a stop string, now that no more tokens come. Replacements at the
        end may be half a character: dropped.
        """
        held, self._held = self._held, ""
        return held

    def _certain(self, token: int) -> str:
        """New characters that later tokens can no longer change."""
        self._window.append(token)
        text = self._decode(self._window)
        # Replacements at the end may be the beginning of a character; SentencePiece shows even
        # whole characters before it so, as long as all of them are spelt in bytes. Nothing of the
        # kind is given out before it is settled.
        solid = text.rstrip(REPLACEMENT)
        if len(solid) < len(text) and len(self._window) <= LONGEST:
            self.unsettled = len(text) - len(solid)
            if not solid.startswith(self._given):
                return ""
            fresh, self._given = solid[len(self._given) :], solid
            return fresh
        unsure = self.unsettled = min(UNSURE, len(text) - len(solid))
        certain = text[: len(text) - unsure]
        fresh = (
            certain[len(self._given) :]
            if certain.startswith(self._given)
            else self._decode(self._window[self._old :])
        )
        self._slide(unsure)
        return fresh

    def _slide(self, unsure: int) -> None:
        """Forget tokens whose text is given out, keeping enough to decode the next ones as if
        nothing were missing.
        """
        self._window = self._window[-SHORTEST:] if unsure else self._window[self._old :]
        text = self._decode(self._window)
        self._given = text[: len(text) - unsure]
        self._old = len(self._window)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`, so that it may still come."""
    return next(
        (
            size
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )
