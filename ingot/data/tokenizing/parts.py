"""All parts of the columns: the ranges that are finished already are kept, the others are tokenised
by the engine with the fastest exact encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.base.markers import MAX_READERS
from ingot.base.progress import Progress, say
from ingot.config.recipe import Recipe
from ingot.data.cleaning.cleaned import CleaningResult
from ingot.data.cleaning.documents import sample
from ingot.data.columns.manifest import prefix_of
from ingot.data.documents.kinds import PLURALS
from ingot.data.documents.records import refuse_many
from ingot.data.engines.engine import Engine
from ingot.data.raw.ranges import ranges
from ingot.data.raw.store import RawData
from ingot.data.splits import Shares
from ingot.data.tokenizing.copies import held_out_copies, largest_hash
from ingot.data.tokenizing.tokenize import (
    TokenisedRange,
    TokeniseStage,
    inputs_of,
    keep_finished,
)
from ingot.tokenizers.encoders import REFERENCE, choose_encoder
from ingot.tokenizers.remembered import forget_encoder, remember_encoder, remembered_encoder
from ingot.tokenizers.tokenizer import Tokenizer

FEW_BYTES = 2_000_000
"""So few of documents are encoded by the reference in less time than another library takes to read
a vocabulary.
"""
TRIED_BYTES = 500_000
"""Of the documents on which an encoder is chosen."""
TRIED_AGAIN, LEAST_TRIED = 200_000, 10_000
"""Characters of all ranges, and at least of each, on which one that was chosen before is compared
with the reference.
"""
MANY_RENDERED, RENDERED_SHARE = 1_000, 0.1
"""A note says that chats were rendered one by one if at least this many and this share were."""


def tokenise(
    recipe: Recipe,
    raw: RawData,
    tokenizer: Tokenizer,
    tokenizer_folder: Path,
    cleaned: CleaningResult,
    engine: Engine,
    folder: Path,
    *,
    again: bool,
) -> list[TokenisedRange]:
    """All tokenised ranges in `folder`, in order: those that it or the run's columns hold already
    (if `again`, undamaged by their checksums), and the others made now.

    Raises:
        WrongInput: the raw documents are damaged, or the template refuses a chat.
        Failed: the disk is full, or a worker died.
    """
    shares, documents, prefix = Shares.of(recipe.data), recipe.documents, prefix_of(recipe)
    whole = recipe.objective.samples_answers  # a chat asks for one answer, its last
    tasks = ranges(raw)
    inputs = inputs_of(documents, prefix, tokenizer, shares, cleaned, whole=whole)
    keep = partial(keep_finished, recipe.folder.columns, folder, inputs=inputs, checksums=again)
    with ThreadPoolExecutor(MAX_READERS) as readers:
        found = zip(tasks, readers.map(keep, tasks), strict=True)
        kept = {task: made for task, made in found if made is not None}
    missing = [task for task in tasks if task not in kept]
    if not missing:
        return _told(recipe, [kept[task] for task in tasks])
    if kept:
        say(f"{len(kept)} of {len(tasks)} parts are finished already")
    few = sum(task.bytes for task in missing) < FEW_BYTES
    encoder, tried_here = (REFERENCE, True) if few else _encoder(recipe, raw, tokenizer, cleaned)
    work = TokeniseStage(
        raw.folder,
        folder,
        tokenizer_folder,
        encoder,
        documents,
        prefix,
        shares,
        cleaned,
        recipe.data.on_bad != "stop",
        inputs,
        0 if tried_here else max(TRIED_AGAIN // len(missing), LEAST_TRIED),
        largest_hash(sum(task.documents for task in tasks)),
        whole,
    )
    with Progress(
        "tokenise",
        total=-(-raw.bytes // 10**6),
        unit="MB",
        done=sum(task.bytes for task in kept) // 10**6,
    ) as progress:
        new = engine.run(work, missing, progress)
    for made in (made for made in new if made.redone):
        forget_encoder(tokenizer)
        say(
            f"{encoder} gave other ids than the reference for {made.redone}: part {made.range.name}"
            " was made again with the reference"
        )
    by_range = kept | {made.range: made for made in new}
    told = _told(recipe, [by_range[task] for task in tasks])
    _tell(new)
    return told


def _told(recipe: Recipe, made: list[TokenisedRange]) -> list[TokenisedRange]:
    """All ranges, new or kept, once it is said what is wrong with them."""
    _tell_refused(recipe, made)
    _tell_copies(recipe, made)
    return made


def _tell_refused(recipe: Recipe, made: Sequence[TokenisedRange]) -> None:
    """Say what the template refuses; raises WrongInput if `data.max_skipped` does not allow it, or
    `data.on_bad` none, of which an earlier run with another value may have left some out.
    """
    refused, kind = sum(one.refused for one in made), PLURALS[recipe.documents]
    if not refused:
        return
    total = refused + sum(part.documents for one in made for part in one.parts.values())
    example = next(one.refusal for one in made if one.refusal)
    if recipe.data.on_bad == "stop":
        raise WrongInput(f"{example}, or set data.on_bad=skip")
    told = f"the template refuses {refused:,} of {total:,} {kind} ({example})"
    refuse_many(told, refused, total, recipe.data.max_skipped)
    say(f"{refused:,} {kind} are left out, the template refuses them, such as {example}")


def _tell(new: Sequence[TokenisedRange]) -> None:
    """Say what of the chats just tokenised is not as somebody may expect."""
    if added := sum(part.added for one in new for part in one.parts.values()):
        say(
            f"{added:,} chats cut after an earlier answer are texts of their own: the template"
            " writes that answer otherwise once others follow, such as without its thought"
        )
    rendered = sum(one.rendered for one in new)
    chats = sum(part.documents for one in new for part in one.parts.values())
    if rendered >= max(MANY_RENDERED, chats * RENDERED_SHARE):
        say(
            f"{rendered:,} of {chats:,} chats were rendered one by one, which is exact but slower:"
            " their template, tools or special tokens allow no layout for chats alike"
        )


def _tell_copies(recipe: Recipe, made: Sequence[TokenisedRange]) -> None:
    """Warn of held-out documents that are trained on as well."""
    copies, seen = held_out_copies([one.sample for one in made])
    if not copies:
        return
    held_out = sum(one.parts["validation"].documents for one in made if "validation" in one.parts)
    sampled = "" if seen == held_out else "a sample of "
    which = f"{sampled}{seen:,} held-out {PLURALS[recipe.documents]}"
    # Cleaning reads texts alone, and has done what it can where it was asked to.
    texts = [one.sample for one in made if one.range.kind != "tokens"]
    helps = not recipe.data.clean.exact and held_out_copies(texts)[0]
    say(
        f"warning: {copies:,} of {which} are trained on too, word for word, and tell little about"
        " new ones" + ("; data.clean.exact=true keeps one of each" if helps else "")
    )


def _encoder(
    recipe: Recipe, raw: RawData, tokenizer: Tokenizer, cleaned: CleaningResult
) -> tuple[str, bool]:
    """The fastest library whose ids equal the reference's, and whether it was chosen on a sample of
    these documents; else on those of an earlier run on this machine.
    """
    if recipe.tokenizer.encoder == "reference":
        return REFERENCE, True
    if name := remembered_encoder(tokenizer):
        say(f"encoding with {name}, as chosen before for this tokenizer")
        return name, False
    texts = [
        document.text for document in sample(raw, cleaned, Shares.of(recipe.data), TRIED_BYTES)
    ]
    if not texts:
        return REFERENCE, True
    choice = choose_encoder(tokenizer, texts)
    remember_encoder(tokenizer, choice.name)
    say(f"encoding with {choice.name}: {dict(choice.tried)[choice.name].removeprefix('taken: ')}")
    for library, why in choice.tried:
        if library not in choice.speeds:
            say(f"{library} {why}")
    return choice.name, True
