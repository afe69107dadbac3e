"""Held-out chats as transformers writes them with the exported tokenizer, against the ids that
`prepare` stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.data.chats import from_messages
from ingot.data.columns import Column, column_prefix
from ingot.data.manifest import Prepared
from ingot.data.preferences import from_preference
from ingot.data.texts import read_documents
from ingot.tokenizers.chat import encode_chats
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.verify.proof import Check
from ingot.verify.theirs import NotOpened, chat_ids

WHAT = "chat template"
CHATS = 16
Chat = Sequence[Mapping[str, Any]]
COLUMN_NAMES = {"chat": ("tokens",), "preference": ("chosen", "rejected")}
"""The columns that hold whole chats."""


def check_chats(recipe: Recipe, prepared: Prepared, tokenizer: Tokenizer) -> Check:
    """transformers' ids of held-out chats against the stored ones. `tokenizer`: the one that they
    were prepared with.

    A chat whose text looks like a special token is passed over: by transformers it becomes that
    token, here it stays text.
    """
    if recipe.documents not in COLUMN_NAMES:
        return Check(
            WHAT,
            None,
            f"the run is trained on {recipe.documents} documents, which no template writes",
        )
    names = COLUMN_NAMES[recipe.documents]
    asked: list[tuple[str, Chat, list[int]]] = []
    passed_over = 0
    for doc_id, chats, stored in itertools.islice(
        _stored(recipe, prepared, tokenizer, names), CHATS
    ):
        for name, chat, ids in zip(names, chats, stored, strict=True):
            where = doc_id if len(names) == 1 else f"{doc_id} ({name})"
            if any(token in str(message) for message in chat for token in tokenizer.spelled):
                passed_over += 1
            else:
                asked.append((where, chat, ids))
    if not asked:
        return Check(
            WHAT,
            None,
            f"{passed_over} held-out chats hold text that looks like special tokens, which"
            " transformers takes for such",
        )
    try:
        found = chat_ids(recipe.folder.model, [chat for _, chat, _ in asked])
    except NotOpened as error:
        return Check(
            WHAT,
            False,
            f"{error}; put back the template and tokenizer that the run was trained with",
        )
    for (where, _, ids), theirs in zip(asked, found, strict=True):
        if theirs != ids:
            return Check(
                WHAT,
                False,
                f"{where}: {_first_difference(theirs, ids, tokenizer)}; put back the template that"
                " the run was trained with",
            )
    left = f"; {passed_over} that look like special tokens are passed over" if passed_over else ""
    return Check(
        WHAT,
        True,
        f"{len(asked)} held-out chats, {sum(len(ids) for _, _, ids in asked):,} ids, the same as"
        f" prepared{left}",
    )


def _stored(
    recipe: Recipe, prepared: Prepared, tokenizer: Tokenizer, names: Sequence[str]
) -> Iterator[tuple[str, list[Chat], list[list[int]]]]:
    """Held-out documents as chats, with the records that `prepare` made of them; those that the
    template refused have none.
    """
    parts = [part for source in prepared.splits["validation"] for part in source.parts]
    columns = [
        [
            Column(column_prefix(recipe.folder.columns, "validation", name, part.number))
            for part in parts
        ]
        for name in names
    ]
    records = zip(
        *(
            (record for column in one for record in (column[index] for index in range(len(column))))
            for one in columns
        ),
        strict=True,
    )
    for document in read_documents(recipe, "validation"):
        chats: list[Chat] = (
            [from_messages(document.text)]
            if recipe.documents == "chat"
            else list(from_preference(document.text).sides)
        )
        try:
            encode_chats(tokenizer, chats, tokenizer.encode_batch)
        except WrongInput:
            continue
        yield document.doc_id, chats, [[int(token) for token in record] for record in next(records)]


def _first_difference(theirs: Sequence[int], stored: Sequence[int], tokenizer: Tokenizer) -> str:
    at = next(
        (
            place
            for place, (one, other) in enumerate(zip(theirs, stored, strict=False))
            if one != other
        ),
        min(len(theirs), len(stored)),
    )
    one, other = (
        repr(tokenizer.token(ids[at])) if at < len(ids) else "nothing" for ids in (theirs, stored)
    )
    return (
        f"token {at} is {one} by transformers, {other} as prepared ({len(theirs)} ids for"
        f" {len(stored)})"
    )
