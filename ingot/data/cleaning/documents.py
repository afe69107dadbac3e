"""The documents of a split as they are tokenised: cleaned and in the order of the columns; and a
sample of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ingot.base.errors import WrongInput
from ingot.base.markers import read_marker
from ingot.base.masking import knobs_hidden
from ingot.config.recipe import Recipe
from ingot.data.cleaning.clean import cleaned_as
from ingot.data.cleaning.cleaned import CleaningResult
from ingot.data.columns.manifest import MANIFEST
from ingot.data.documents.kinds import plain_text
from ingot.data.raw.ranges import RawRange, pieces, ranges, read_range
from ingot.data.raw.store import RawData, open_raw
from ingot.data.splits import Shares, Split, chosen, drawn

# Of a corpus much larger than the sample, evenly spread row groups suffice: SPREAD of them, and of
# SPREAD times the sample's size. A document larger than the SPREADth part of a sample gives
# excerpts, of EXCERPT_CHARS or, where that were more than MOST_EXCERPTS, longer ones.
SPREAD = 16
EXCERPT_CHARS, MOST_EXCERPTS = 1 << 14, 256
SAMPLING = 3
"""Raise when the same documents come to give another sample."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its identity `FILE:ROW` in its source, which stays the same when the data is
    moved to another folder.
    """

    doc_id: str
    text: str


def read_documents(recipe: Recipe, split: Split) -> Iterator[Document]:
    """The documents that `prepare` has put into `split`, in the order of its columns; sources of
    existing token columns have no text and are not included. Nothing is cleaned here: what the
    columns were made of is what counts, also where files of `data.clean.contamination.against` are
    others by now, or out of reach.

    Raises:
        WrongInput: `ingest` has not run, or ran for other sources than the recipe's; or the
            documents or `data.clean` are others than those of the columns.
    """
    raw = open_raw(recipe)
    made = read_marker(recipe.folder.columns, MANIFEST) or {"raw": raw.identity}
    cleaned = cleaned_as(recipe, made.get("cleaned"))
    asked = knobs_hidden(recipe.select(("data.clean",))["data.clean"])
    is_same = made.get("knobs", {}).get("data.clean", asked) == asked
    is_same = is_same and made["raw"] == raw.identity
    if cleaned is None or not is_same:
        # What is not there for the recipe itself may be damaged, which `prepare` does not see.
        again = " --again" if is_same else ""
        raise WrongInput(
            f"{recipe.folder.columns} was not made of the documents in {recipe.folder.raw} as"
            f" data.clean leaves them; run `ingot prepare{again}` with this recipe"
        )
    for task in ranges(raw):
        yield from documents_of(task, raw, cleaned, Shares.of(recipe.data), split)


def documents_of(
    task: RawRange, raw: RawData, cleaned: CleaningResult, shares: Shares, split: Split
) -> Iterator[Document]:
    """The documents of one range that belong to `split`."""
    if task.kind == "tokens":
        return
    for table in cleaned.tables(task, read_range(raw.folder, task)):
        for doc_id, text in zip(
            table.column("doc_id").to_pylist(), table.column("text").to_pylist(), strict=True
        ):
            if shares.split(task.split, doc_id) == split:
                yield Document(doc_id, text)


def sample(
    raw: RawData, cleaned: CleaningResult, shares: Shares, sample_bytes: int
) -> Iterator[Document]:
    """The plain texts of training documents, of about `sample_bytes` in total once they are
    cleaned, evenly spread, at least one; deterministic. Whether a document is among them is drawn
    by its identity; one that would be much of the sample gives excerpts instead, since whether it
    is there must not hang on its name. Existing token columns have no text to give.
    """
    tasks = [task for task in pieces(raw, "train") if task.kind != "tokens"]
    total = sum(task.bytes for task in tasks)
    # What cleaning drops, what is held out and what `data.fraction` leaves is passed over.
    trained = total * _trained(cleaned, shares)
    wanted = min(1.0, sample_bytes / max(trained, 1.0))
    found = False
    for task, share in _groups(tasks, wanted):
        for document in documents_of(task, raw, cleaned, shares, "train"):
            is_large = len(document.text.encode()) > sample_bytes / SPREAD
            if is_large or share >= 1.0 or chosen(document.doc_id, "vocabulary", share):
                found = True
                yield from _excerpts(_plain(task, document), share if is_large else 1.0)
    if not found:
        everything = (
            _plain(task, document)
            for task in tasks
            for document in documents_of(task, raw, cleaned, shares, "train")
        )
        for document in itertools.islice(everything, 1):
            yield from _excerpts(document, sample_bytes / max(len(document.text.encode()), 1))


def _groups(tasks: Sequence[RawRange], wanted: float) -> Iterator[tuple[RawRange, float]]:
    """The row groups to read for a sample of the share `wanted`, each with the share of its
    documents to take. If not all, those at places evenly spread over the bytes: a large one is read
    where a small one may be passed over, and as much is taken at each place.
    """
    step = max(1, min(int(1 / (SPREAD * wanted)), len(tasks) // SPREAD))
    distance = step * sum(task.bytes for task in tasks) / max(len(tasks), 1)
    begin = 0
    for task in tasks:
        if step == 1:
            yield task, wanted
            continue
        after = begin + task.bytes
        places = round(after / distance) - round(begin / distance)
        if places:
            yield task, min(1.0, places * distance * wanted / task.bytes)
        begin = after


def _excerpts(document: Document, share: float) -> Iterator[Document]:
    """`share` of a document, of each of its stretches as much, at places drawn by its identity; all
    of it as one.
    """
    if share >= 1.0:
        yield document
        return
    text = document.text
    count = min(max(1, int(len(text) * share) // EXCERPT_CHARS), MOST_EXCERPTS)
    for number in range(count):
        first, after = len(text) * number // count, len(text) * (number + 1) // count
        size = max(1, round((after - first) * share))
        begin = first + drawn(document.doc_id, f"excerpt {number}", after - first - size + 1)
        yield Document(document.doc_id, text[begin : begin + size])


def _plain(task: RawRange, document: Document) -> Document:
    assert task.kind != "tokens"
    return Document(document.doc_id, plain_text(task.kind, document.text))


def _trained(cleaned: CleaningResult, shares: Shares) -> float:
    """The share of the bytes of training sources that is trained on."""
    report = cleaned.report
    dropped = sum(step.bytes for step in report.steps)
    kept = 1 - dropped / report.bytes if report.bytes else 1.0
    return kept * (1 - (shares.validation or 0.0)) * shares.fraction
