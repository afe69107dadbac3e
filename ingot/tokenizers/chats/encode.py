"""Encodes chats and marks which tokens are trained: the assistant's turns with their end-of-turn
tokens.

The ids are those of the rendered chat; only the template can produce special tokens. The text of
many chats is encoded in one call: a rendered chat is split at its special tokens, and what lies
between is plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.base.errors import WrongInput
from ingot.tokenizers.chats.chat import Chat
from ingot.tokenizers.chats.plan import ChatPlan, EncodeBatch, Ids, Indices, Mask
from ingot.tokenizers.chats.render import any_of_pattern
from ingot.tokenizers.chats.spans import turn_format
from ingot.tokenizers.tokenizer import Tokenizer

PROBE = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c d"},
    {"role": "user", "content": " \ne f\n "},
    {"role": "assistant", "content": " \ng\n "},
    {"role": "user", "content": "h"},
]
"""Contents without and with white space beside the special tokens, which may absorb it."""


def encode_chats(
    tokenizer: Tokenizer,
    chats: Sequence[Chat],
    encode_batch: EncodeBatch,
    trained_from: Sequence[int] | None = None,
) -> tuple[Ids, Mask, Indices]:
    """The ids of all chats, concatenated; a mask with 1 for each id that is trained; and the number
    of ids of each chat.

    A token that begins before the assistant's turn and ends in it is not trained.

    Args:
        encode_batch: ids of texts, the same as the tokenizer's own.
        trained_from: for each chat the number of its first message that is trained, if that is the
        assistant's; None: all are.

    Raises:
        WrongInput: there is no template, it refuses a chat, or a trained answer is not written as a
            server would ask for it.
    """
    found = encode_trained(tokenizer, chats, encode_batch, trained_from)
    if (several := np.flatnonzero(found.counts != 1)).size:
        raise WrongInput(
            f"the chat template of {tokenizer.where} writes an answer of chat {several[0] + 1}"
            " otherwise once others follow, so that they cannot be trained in one text; let"
            " answers be one message"
        )
    return found.ids, found.mask, found.lengths


def whole_chat_ids(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """The ids of one chat with all its answers, of which none need be trained.

    Raises:
        WrongInput: there is no template, or it refuses the chat.
    """
    ids, *_ = encode_chats(tokenizer, [chat], tokenizer.encode_batch, [len(chat)])
    return [int(token) for token in ids]


@dataclass(frozen=True)
class TrainedTexts:
    """What of chats is trained: ids, concatenated; a mask with 1 for each trained id; the number of
    ids of each text; of each chat the number of its texts; and of each text how many of the chat's
    messages are written so by the template, 0 if it writes no such text as a whole.
    """

    ids: Ids
    mask: Mask
    lengths: Indices
    counts: Indices
    messages: Sequence[int]
    rendered: int
    """How many chats were rendered one by one, which is slower."""


def encode_trained(
    tokenizer: Tokenizer,
    chats: Sequence[Chat],
    encode_batch: EncodeBatch,
    trained_from: Sequence[int] | None = None,
) -> TrainedTexts:
    """`encode_chats` of chats that may be several texts, so that each answer is trained as it was
    when it was served: some templates drop the thoughts of earlier answers, for example.
    """
    plan = ChatPlan(tokenizer, whole=not is_split_exact(tokenizer))
    plan.add(chats, [0] * len(chats) if trained_from is None else trained_from)
    counts = np.array(plan.counts, np.int64)
    return TrainedTexts(*plan.encode(encode_batch), counts, plan.messages, plan.rendered)


def end_of_turn(tokenizer: Tokenizer) -> str | None:
    """The special token that the template writes right after an assistant's turn; None if there is
    none.
    """
    return turn_format(tokenizer.chat_format).end


def stop_tokens(tokenizer: Tokenizer) -> list[int]:
    """The ids at which generation stops: EOS, and the template's end-of-turn token if that is
    another one.
    """
    end = end_of_turn(tokenizer) if tokenizer.template else None
    found = [tokenizer.special.eos, tokenizer.special_ids[end] if end is not None else None]
    return sorted({token for token in found if token is not None})


def is_split_exact(tokenizer: Tokenizer) -> bool:
    """Whether splitting a chat at its special tokens gives the same ids: not where these absorb
    whitespace, or where only the start of a text gets a prefix.
    """
    form = tokenizer.chat_format
    try:
        text = form.render(PROBE)
    except WrongInput:
        return True
    pieces = any_of_pattern(tuple(form.special)).split(text) if form.special else [text]
    cut = [
        token
        for number, piece in enumerate(pieces)
        for token in ([form.special[piece]] if number % 2 else tokenizer.encode(piece))
    ]
    return cut == form.control.encode(text, add_special_tokens=False).ids
