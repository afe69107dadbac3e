"""The verb `prepare`: raw documents into token columns, with the tokenizer that the recipe names or learns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.base.markers import FileEntry
from ingot.base.progress import Progress, say
from ingot.base.steprecord import Outcome, sizes
from ingot.base.storage import disk_errors
from ingot.config.recipe import Recipe
from ingot.data.columns import token_dtype
from ingot.data.documents import Shares
from ingot.data.manifest import MANIFEST, Prepared, PreparedSource, data_identity, set_identity, write_prepared
from ingot.data.parts import DONE, Made, finished, range_inputs, ranges
from ingot.data.raw import Raw, open_raw
from ingot.data.sources import Split, recipe_sources
from ingot.data.vocabulary import provide_tokenizer
from ingot.data.workers import Job, make_parts
from ingot.tokenizers.tokenizer import Tokenizer

SPLITS: tuple[Split, ...] = ("train", "validation")


def prepare(recipe: Recipe) -> Outcome:
    """Tokenise all documents. What an earlier run finished from the same inputs is kept, so a stopped run goes on.

    Raises:
        WrongInput: nothing is ingested for this recipe, a split is empty, or there is less than one global batch.
        Failed: the disk is full, or a worker died.
    """
    raw = open_raw(recipe)
    folder = recipe.folder.columns
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
    tokenizer = provide_tokenizer(recipe, raw)
    if tokenizer.special.eos is None:
        say("warning: this tokenizer has no EOS token, so a model does not learn where a document ends")
    made = _make(recipe, raw, tokenizer)
    splits = {split: _sources(recipe, raw, split, made) for split in SPLITS}
    _check(recipe, splits)
    files = [FileEntry(**entry) for one in made for entry in one.files]
    _sweep(folder, files, made)
    identity = tokenizer.identity()
    prepared = Prepared(
        columns=[{"name": "tokens", "dtype": token_dtype(tokenizer.vocab_size).name}], splits=splits, tokenizer=identity,
        template=tokenizer.template_identity, vocab_size=tokenizer.vocab_size, data=data_identity(files, identity),
        sets={split: set_identity(sources) for split, sources in splits.items()},
    )
    knobs = recipe.select(("data.train", "data.validation", "data.fraction", "tokenizer"))
    write_prepared(folder, prepared, {"raw": raw.identity, "knobs": knobs, "dropped": _dropped(raw, splits)}, files)
    tokens = prepared.total("train", "tokens") + prepared.total("validation", "tokens")
    paths = [folder / MANIFEST, *(folder / entry.path for entry in files), *(recipe.folder.tokenizer / name for name in tokenizer.files)]
    return Outcome(
        f"{_in_words(tokens)} tokens, vocabulary {tokenizer.vocab_size:,}", str(folder), prepared.data, sizes(recipe.folder.root, paths)
    )


def _make(recipe: Recipe, raw: Raw, tokenizer: Tokenizer) -> list[Made]:
    """Every part, in order: those that are finished, and the others made now."""
    folder, shares = recipe.folder.columns, Shares.of(recipe.data)
    tasks = ranges(raw)
    kept = {task: made for task in tasks if (made := finished(folder, task, range_inputs(task, tokenizer.identity(), shares)))}
    missing = [task for task in tasks if task not in kept]
    done = sum(task.bytes for task in kept)
    if kept and missing:
        say(f"{len(kept)} of {len(tasks)} parts are finished already")
    with Progress("tokenise", total=-(-raw.bytes // 10**6), unit="MB", done=done // 10**6) as progress:
        job = Job(raw.folder, folder, recipe.folder.tokenizer, shares)
        new = make_parts(job, missing, recipe.data.engine.workers, progress) if missing else []
    by_range = kept | {made.range: made for made in new}
    return [by_range[task] for task in tasks]


def _sources(recipe: Recipe, raw: Raw, split: Split, made: Sequence[Made]) -> list[PreparedSource]:
    """What each source gave to a split; held-out documents keep the source they come from."""
    origin: Split = split if split in raw.splits else "train"
    found = []
    for number, source in enumerate(recipe_sources(recipe)[origin]):
        mine = [one for one in made if one.range.split == origin and one.range.source == number]
        parts = [one.parts[split] for one in mine if split in one.parts]
        found.append(PreparedSource(
            source.source, source.weight, sum(part.documents for part in parts), sum(part.tokens for part in parts),
            sum(part.bytes for part in parts), parts,
        ))
    return found


def _check(recipe: Recipe, splits: dict[Split, list[PreparedSource]]) -> None:
    """Refuse data with which no training or no evaluation can be done, before the manifest says that it is ready."""
    documents = {split: sum(source.documents for source in sources) for split, sources in splits.items()}
    total, shares = sum(documents.values()), Shares.of(recipe.data)
    if not documents["validation"]:
        raise WrongInput(
            f"no document of {total:,} is held out by data.validation.fraction={shares.validation}; raise it, "
            f"or give data.validation sources of its own"
        )
    seq_len, batch = recipe.data.seq_len, recipe.train.global_batch
    rows = sum(source.tokens // seq_len for source in splits["train"])
    if rows < batch:
        tokens = sum(source.tokens for source in splits["train"])
        raise WrongInput(
            f"{documents['train']:,} training documents have {tokens:,} tokens, {rows:,} rows of data.seq_len={seq_len}: less than one "
            f"train.global_batch={batch}; add documents, or lower one of the two"
        )
    for number, source in enumerate(splits["train"]):
        if source.tokens < seq_len:
            say(f"warning: data.train[{number}] {source.source} has {source.tokens:,} tokens, not one row of data.seq_len={seq_len}: it is not trained on")


def _dropped(raw: Raw, splits: dict[Split, list[PreparedSource]]) -> dict[str, int]:
    """Documents that were read and are in no split."""
    read = sum(source.documents for sources in raw.splits.values() for source in sources)
    return {"data.fraction": read - sum(source.documents for sources in splits.values() for source in sources)}


def _sweep(folder: Path, files: Iterable[FileEntry], made: Iterable[Made]) -> None:
    """Remove what earlier or killed runs left in the folder and the manifest will not name."""
    keep = {entry.path for entry in files} | {f"{DONE}/{one.range.name}.json" for one in made}
    for path in [*folder.iterdir(), *(folder / DONE).iterdir()]:
        if path.is_file() and str(path.relative_to(folder)) not in keep:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def _in_words(count: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f} {letter}"
    return str(count)
