"""Prompts and reference answers out of prepared chats, as a training on rewards reads them: a row's
tokens up to its last assistant turn that is trained, and that turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.grpo import GRPOSettings
from ingot.data.batches.order import SampleOrder
from ingot.data.batches.rows import IGNORE, Rows
from ingot.data.batches.samples import Samples
from ingot.data.packing.tables import RowTables
from ingot.tokenizers.chats.said import answer_frame, last_user_turn
from ingot.tokenizers.chats.spans import turn_format
from ingot.tokenizers.tokenizer import Tokenizer

AT_ONCE = 256
"""Rows that are read together."""


@dataclass(frozen=True)
class Prompt:
    """The ids that an answer is sampled after, and what rewards are told of it."""

    row: int
    ids: list[int]
    """The chat through the generation prompt of its last trained turn, as it is served."""
    text: str
    """The last user turn."""
    reference: str | None
    """What the last assistant turn that is trained says; None if it says nothing."""
    alone: bool = True
    """Whether nothing but the last user turn, and what the template adds, stands in the chat."""


class PromptReader:
    """Reads the prompts of rows.

    Args:
        rows: chats, one a row.
    """

    def __init__(self, rows: Rows, tokenizer: Tokenizer) -> None:
        self._rows, self._tokenizer = rows, tokenizer
        self._opening = turn_format(tokenizer.chat_format).prompt.rstrip()

    def prompts(self, numbers: Sequence[int]) -> list[Prompt]:
        """Raises WrongInput if the answer of a chat does not begin with a token of its own."""
        found: list[Prompt] = []
        for first in range(0, len(numbers), AT_ONCE):
            some = list(numbers[first : first + AT_ONCE])
            packed = self._rows.batch(some)
            found += [
                self._prompt(number, tokens, labels)
                for number, tokens, labels in zip(some, packed.tokens, packed.labels, strict=True)
            ]
        return found

    def _prompt(self, row: int, tokens: np.ndarray, labels: np.ndarray) -> Prompt:
        # The label of a position is the token after it.
        trained = np.flatnonzero(labels != IGNORE) + 1
        breaks = np.flatnonzero(np.diff(trained) > 1)
        begin = int(trained[breaks[-1] + 1] if len(breaks) else trained[0])
        ids = tokens[:begin].tolist()
        shown = self._tokenizer.decode(ids, skip_special=False)
        if not shown.rstrip().endswith(self._opening):
            raise WrongInput(
                f"row {row}: the chat template ends a prompt with {self._opening!r}, and the"
                " tokenizer joins its end with the answer's beginning; take a tokenizer.template"
                " whose assistant turns begin with a token of their own"
            )
        answer = tokens[begin : int(trained[-1]) + 1]
        asked, alone = asked_in(self._tokenizer, ids)
        return Prompt(row, ids, asked, said_in(self._tokenizer, answer), alone)


def asked_in(tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[str, bool]:
    """The last user turn of a chat that ends with the generation prompt, and whether that is all of
    the chat beside what the template adds.
    """
    shown = tokenizer.decode(prompt, skip_special=False)
    asked = last_user_turn(tokenizer.chat_format, shown)
    alone = tokenizer.encode_chat([{"role": "user", "content": asked}]) == list(prompt)
    return asked, alone


def said_in(tokenizer: Tokenizer, answer: np.ndarray) -> str | None:
    """What an answer says, of its ids that are trained; None if it says nothing."""
    frame = answer_frame(tokenizer.chat_format)
    written = tokenizer.decode(answer, skip_special=frame is None)
    return (written if frame is None else frame.content(written)) or None


def check_prompts(
    recipe: Recipe,
    rows: Rows | Samples,
    packed: RowTables | None,
    tokenizer: Tokenizer,
    order: SampleOrder,
    steps: range,
) -> None:
    """Read the prompts that `steps` of a training on rewards come to, before anything large is
    loaded; other trainings have none.

    Args:
        packed: how `rows` were planned.
        order: that of `rows`.

    Raises:
        WrongInput: a chat was cut, a prompt leaves no room for an answer, or a reward needs a
            reference that a chat does not have.
    """
    settings, seq_len = recipe.objective, recipe.data.seq_len
    if not isinstance(settings, GRPOSettings):
        return
    assert isinstance(rows, Rows)
    assert packed is not None
    counts, most = packed.counts["train"], settings.max_answer_tokens
    if cut := counts.truncated + counts.lost:
        raise WrongInput(
            f"{cut:,} chats are longer than data.seq_len {seq_len} with their reference answers,"
            " which would be cut; raise data.seq_len, or leave them out by data.truncate=drop"
        )
    needs_reference = any(reward.needs_reference for reward in settings.rewards)
    for prompt in PromptReader(rows, tokenizer).prompts(_trained(recipe, len(rows), order, steps)):
        if len(prompt.ids) + most > seq_len:
            raise WrongInput(
                f"a prompt of {len(prompt.ids)} tokens ({prompt.text[:40]!r}) and"
                f" objective.max_answer_tokens {most} exceed data.seq_len {seq_len}; raise it, or"
                " lower max_answer_tokens"
            )
        if needs_reference and prompt.reference is None:
            raise WrongInput(
                f"the prompt {prompt.text[:40]!r} has an empty answer, which a reward of"
                " objective.rewards compares with; leave it out, or choose other rewards"
            )


def _trained(recipe: Recipe, rows: int, order: SampleOrder, steps: range) -> list[int]:
    """The rows whose prompts `steps` answer, each once."""
    settings = recipe.objective
    assert isinstance(settings, GRPOSettings)
    each = (1 + settings.sample_again) * (recipe.train.global_batch // settings.group)
    first, end = steps.start // settings.updates, -(-steps.stop // settings.updates)
    count = min(max(end - first, 0) * each, 2 * rows)
    found: list[int] = np.unique(order.rows(first * each, count)).tolist()
    return found
