"""The verb `prepare`: turns raw documents into token columns, cleaned if asked for, with the
tokenizer that the recipe names or trains.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.base.markers import FileEntry
from ingot.base.masking import knobs_hidden
from ingot.base.progress import Progress, say
from ingot.base.reports import VerbOutcome, file_sizes
from ingot.base.storage import (
    atomic_folder,
    disk_errors,
    link_file,
    remove_partials_of,
    replace_folder,
)
from ingot.config.length import steps_of
from ingot.config.recipe import Recipe
from ingot.config.sections.data import COLUMNS
from ingot.config.sections.evaluation import LossTask
from ingot.config.sections.objective import CHAT_TEMPLATED, PLAIN
from ingot.data.batches.order import order_of
from ingot.data.batches.prompts import check_prompts
from ingot.data.batches.rows import open_rows
from ingot.data.batches.samples import Samples, alike_ratings
from ingot.data.batches.spans import hiding_of
from ingot.data.cleaning.clean import clean, files_of
from ingot.data.cleaning.cleaned import CleaningResult
from ingot.data.columns.column import bin_path, column_prefix, idx_path
from ingot.data.columns.manifest import (
    MANIFEST,
    PreparedData,
    PreparedSource,
    column_dtype,
    data_identities,
    prefix_of,
    set_identity,
    write_prepared,
)
from ingot.data.documents.kinds import PLURALS
from ingot.data.engines.choose import open_engine
from ingot.data.engines.engine import Engine
from ingot.data.engines.local import LocalEngine
from ingot.data.packing.tables import RowTables, keep_packed, pack
from ingot.data.raw.ranges import SMALLEST_BYTES
from ingot.data.raw.store import RawData, open_raw
from ingot.data.sources.find import recipe_sources
from ingot.data.splits import Shares, Split, check_held_out
from ingot.data.tokenizing.encode import frame_of
from ingot.data.tokenizing.parts import tokenise
from ingot.data.tokenizing.tokenize import DONE, TokenisedRange
from ingot.data.tokenizing.vocabulary import provide_tokenizer
from ingot.tokenizers.chats.encode import end_of_turn
from ingot.tokenizers.tokenizer import Tokenizer

SPLITS: tuple[Split, ...] = ("train", "validation")
MOST_CONTAMINATED = 0.2
# Smaller data have only one range.
WARM_BYTES = SMALLEST_BYTES
# Modules that a worker imports only when it opens its encoder.
ENCODERS = ("gigatoken.gigatoken_rs", "awkward", "fastokens")


def prepare(recipe: Recipe, *, again: bool = False) -> VerbOutcome:
    """Clean, tokenise and pack all documents. Work finished earlier from the same inputs is reused,
    so a stopped run resumes. Everything is made in folders beside those of the columns and the
    tokenizer, which are replaced only once the result is complete and valid for the recipe.

    Args:
        again: reuse nothing that is damaged, by the checksums of all that could be reused.

    Raises:
        WrongInput: nothing is ingested for this recipe, its tokenizer cannot hide what the
            objective hides, a split is empty, or there is less than one global batch.
        Failed: the disk is full, or a worker died.
    """
    check_held_out(recipe, "prepare")
    raw = open_raw(recipe, unchanged=True)
    new = _being_made(recipe.folder.columns)
    with disk_errors(new):
        new.mkdir(parents=True, exist_ok=True)
        for folder in (recipe.folder.columns, recipe.folder.tokenizer):
            remove_partials_of(folder)
    with contextlib.closing(open_engine(recipe.data.engine, recipe.folder.data)) as engine:
        if isinstance(engine, LocalEngine) and raw.bytes > WARM_BYTES:
            engine.warm("ingot.data.tokenizing.tokenize", *ENCODERS)
        return _prepare(recipe, raw, engine, again=again)


def _prepare(recipe: Recipe, raw: RawData, engine: Engine, *, again: bool) -> VerbOutcome:
    run = recipe.folder
    folder = _being_made(run.columns)
    cleaned = clean(recipe, raw, engine)
    _tell(recipe, raw, cleaned)
    tokenizer, tokenizer_folder = provide_tokenizer(
        recipe, raw, cleaned, _being_made(run.tokenizer)
    )
    hiding_of(recipe, tokenizer)  # raises where the tokenizer cannot
    _warn_of_no_end(recipe, tokenizer)
    made = tokenise(recipe, raw, tokenizer, tokenizer_folder, cleaned, engine, folder, again=again)
    splits = {split: _sources(recipe, raw, split, made) for split in SPLITS}
    _check_splits(recipe, splits, cleaned.dropped)
    files = [FileEntry(**entry) for one in made for entry in one.files]
    _sweep(folder, files, made)
    identity, columns = tokenizer.identity(), COLUMNS[recipe.documents]
    before, after = frame_of(recipe.documents, tokenizer)
    prepared = PreparedData(
        objective=recipe.objective.kind,
        columns=[
            {"name": name, "dtype": column_dtype(name, tokenizer.vocab_size).name}
            for name in columns
        ],
        splits=splits,
        tokenizer=identity,
        template=tokenizer.template_identity,
        vocab_size=tokenizer.vocab_size,
        data=data_identities(files, SPLITS, identity),
        sets={split: set_identity(sources) for split, sources in splits.items()},
        closing=len(after),
        opening=len(before),
        prefix=prefix_of(recipe),
        labels=recipe.labels,
    )
    knobs = knobs_hidden(
        recipe.select(("data.train", "data.validation", "data.fraction", "data.clean", "tokenizer"))
    )
    dropped = _dropped(raw, made, splits, cleaned)
    about = {"raw": raw.identity, "cleaned": cleaned.identity, "knobs": knobs, "dropped": dropped}
    write_prepared(folder, prepared, about, files)
    keep_packed(run.columns, folder, prepared, checksums=again)
    packed = _pack(recipe, prepared, tokenizer, engine)
    _warn_of_alike_ratings(recipe, folder)
    with disk_errors(run.columns):
        replace_folder(folder, run.columns)
        if tokenizer_folder != run.tokenizer:
            replace_folder(tokenizer_folder, run.tokenizer)
    shutil.rmtree(_being_made(run.tokenizer), ignore_errors=True)  # left by a run that was given up
    named = _name_for_megatron(recipe, prepared)
    tokens = prepared.total("train", "tokens") + prepared.total("validation", "tokens")
    paths = [
        run.columns / MANIFEST,
        *(run.columns / entry.path for entry in files),
        *named,
        *(run.tokenizer / name for name in tokenizer.files),
        *files_of(recipe, cleaned),
    ]
    return VerbOutcome(
        f"{_in_words(tokens)} tokens{_in_no_row(recipe, packed, tokens)},"
        f" vocabulary {tokenizer.vocab_size:,}",
        str(run.columns),
        prepared.identity,
        file_sizes(run.root, paths),
        parts=prepared.data,
    )


def _in_no_row(recipe: Recipe, packed: RowTables | None, tokens: int) -> str:
    """How many tokens are in no row; empty if there are none, and for texts, which lose none."""
    if packed is None or recipe.documents in PLAIN or packed.total.tokens >= tokens:
        return ""
    lost = _in_words(tokens - packed.total.tokens)
    most = "data.seq_len" + (" and data.target_len" if recipe.documents == "pair" else "")
    return f" ({lost} beyond {most} or without anything trained are in no row)"


def _warn_of_no_end(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Print what keeps a model from learning where a document or an answer ends."""
    if recipe.documents not in ("labelled", "masked") and not (
        tokenizer.frame[1] if recipe.documents == "pair" else tokenizer.after
    ):
        say(
            "warning: this tokenizer has no EOS token, so a model does not learn where a document"
            " ends"
        )
    is_chat = recipe.documents in CHAT_TEMPLATED and tokenizer.template is not None
    if is_chat and end_of_turn(tokenizer) is None:
        say(
            "warning: the chat template writes no special token after what the assistant says, so a"
            " model does not learn to stop"
        )


def _warn_of_alike_ratings(recipe: Recipe, folder: Path) -> None:
    """Print what held-out rated answers do not tell, before training is paid for."""
    tasks = [task for task in recipe.tasks if isinstance(task, LossTask)]
    if recipe.documents != "rated" or not recipe.data.holds_out or not tasks:
        return
    data, plan = recipe.data, recipe.held_out_row_plan
    rows = open_rows(
        folder, "validation", data.seq_len, pack=plan, pad_last=True, target_len=data.target_len
    )
    if not isinstance(rows, Samples) or not len(rows):
        return
    if alike := alike_ratings(rows.ratings(range(len(rows)), len(rows))):
        untold = ", ".join(f"{task.name}/{metric}" for task in tasks for metric in alike.untold)
        say(f"warning: `ingot evaluate` will not tell {untold}: {alike.why}")


def _name_for_megatron(recipe: Recipe, prepared: PreparedData) -> list[Path]:
    """Link the files of the token columns under Megatron's names too, if the recipe asks for it;
    returns these names. Names of earlier data are removed.
    """
    folder, prefix = recipe.folder.megatron, recipe.data.megatron_prefix
    if prefix is None:
        shutil.rmtree(folder, ignore_errors=True)
        return []
    with atomic_folder(folder) as partial:
        for split, sources in prepared.splits.items():
            for number in (part.number for source in sources for part in source.parts):
                column = column_prefix(recipe.folder.columns, split, "tokens", number)
                name = partial / f"{prefix}.{split}-{number:05d}_text_document"
                for path_of in (bin_path, idx_path):
                    link_file(path_of(column), path_of(name))
    return sorted(folder.iterdir())


def _being_made(folder: Path) -> Path:
    """Where the replacement of a folder is made."""
    return folder.with_name(f"{folder.name}.new")


def _tell(recipe: Recipe, raw: RawData, cleaned: CleaningResult) -> None:
    """Print what cleaning dropped, its notes, and which sources it could not read. Raises
    WrongInput if it dropped everything and there are no tokens beside.
    """
    if recipe.data.clean.wanted:
        for source in raw.tokenised:
            say(
                f"warning: data.clean does nothing to the {source.documents:,} documents of"
                f" {source.source}, which are tokens, and compares no other documents with them"
            )
    report = cleaned.report
    if not report.documents:
        return
    dropped = sum(cleaned.dropped.values())
    each = ", ".join(f"{count:,} by {step}" for step, count in cleaned.dropped.items() if count)
    if dropped == report.documents and not raw.tokenised:
        example = next(step.examples[0] for step in report.steps if step.examples)
        raise WrongInput(
            f"data.clean leaves none of the {dropped:,} documents ({each}), such as"
            f" {example.doc_id}: {example.text[:80]!r}; clean less"
        )
    say(
        f"cleaning dropped {dropped:,} of {report.documents:,} documents"
        + (f": {each}; `ingot show data` names some" if dropped else "")
    )
    for note, count in report.notes.items():
        say(f"cleaning: {count:,} {note}")
    if cleaned.dropped.get("contamination", 0) > MOST_CONTAMINATED * report.documents:
        say(
            "warning: so many contaminated documents mean that held-out documents share boilerplate"
            " with all others; raise data.clean.contamination.matches"
        )


def _pack(
    recipe: Recipe, prepared: PreparedData, tokenizer: Tokenizer, engine: Engine
) -> RowTables | None:
    """Plan rows unless documents are one stream, which gives None; refuse data too small for
    training or evaluation, a weight of a source without rows, and prompts that cannot be answered.
    """
    folder = _being_made(recipe.folder.columns)
    seq_len = recipe.data.seq_len
    how = recipe.row_plan
    target_len = recipe.data.target_len
    of_pairs = target_len if prepared.documents == "pair" else None
    usual = type(recipe.data).model_fields["target_len"].default
    if of_pairs is None and recipe.objective.spans is None and target_len != usual:
        say(
            f"warning: data.target_len {target_len} has no effect:"
            f" {PLURALS[prepared.documents]} have no targets of their own; remove it"
        )
    made = {}
    for plan in {how, recipe.held_out_row_plan} - {"cut"}:
        with Progress("pack", total=None, unit="MB") as progress:
            made[plan] = pack(folder, prepared, seq_len, plan, engine, progress, of_pairs)
    packed = made.get(how)
    if packed is not None:
        say(str(packed))
    by_part = recipe.data.window is not None
    rows = open_rows(
        folder, "train", seq_len, pack=how, pad_last=False, target_len=target_len, by_part=by_part
    )
    if len(rows) < recipe.objective.rows_of(recipe.train.global_batch):
        less = f"less than one train.global_batch={recipe.train.global_batch}; add documents, or "
        if isinstance(rows, Samples):
            words = (
                f"{len(rows):,} of {rows.documents:,} training {PLURALS[recipe.documents]} can be"
                f" trained on with data.seq_len={seq_len}"
            )
            raise WrongInput(f"{words}: {less}lower the batch, or raise data.seq_len")
        raise WrongInput(
            f"{rows.documents:,} training documents have {rows.tokens:,} tokens, {len(rows):,} rows"
            f" of data.seq_len={seq_len}: {less}lower one of the two"
        )
    order = order_of(recipe, rows)  # refused before machines are paid for, if training refuses it
    if recipe.train.start_from is None:  # else training knows at which step it begins, and checks
        steps = range(recipe.train.start_step or 0, steps_of(recipe, len(rows)))
        check_prompts(recipe, rows, packed, tokenizer, order, steps)
    for number, (size, source) in enumerate(zip(rows.sizes, prepared.splits["train"], strict=True)):
        if not size:
            say(
                f"warning: data.train[{number}] {source.source} has {source.tokens:,} tokens, not"
                f" one row of data.seq_len={seq_len}: it is not trained on"
            )
    return packed


def _sources(
    recipe: Recipe, raw: RawData, split: Split, made: Sequence[TokenisedRange]
) -> list[PreparedSource]:
    """What each source contributed to a split; held-out documents are counted for the source they
    come from.
    """
    origin: Split = split if split in raw.splits else "train"
    found = []
    for number, source in enumerate(recipe_sources(recipe)[origin]):
        mine = [one for one in made if one.range.split == origin and one.range.source == number]
        parts = [one.parts[split] for one in mine if split in one.parts]
        found.append(
            PreparedSource(
                source.source,
                source.weight,
                sum(part.documents for part in parts),
                sum(part.tokens for part in parts),
                sum(part.bytes for part in parts),
                parts,
            )
        )
    return found


def _check_splits(
    recipe: Recipe, splits: dict[Split, list[PreparedSource]], dropped: Mapping[str, int]
) -> None:
    """Refuse an empty split before the manifest is written."""
    documents = {
        split: sum(source.documents for source in sources) for split, sources in splits.items()
    }
    cleaned = "is left by cleaning; clean less (`ingot show data` names what was left out)"
    if not documents["train"] and any(dropped.values()):
        raise WrongInput(f"no document of the sources of data.train {cleaned}, or give others")
    if not recipe.data.holds_out or documents["validation"]:
        return
    share = Shares.of(recipe.data).validation
    if share is None:
        raise WrongInput(f"no document of the sources of data.validation {cleaned}, or give others")
    raise WrongInput(
        f"no document of {sum(documents.values()):,} is held out by"
        f" data.validation.fraction={share}; raise it, give data.validation"
        " sources of its own, or hold nothing out with data.validation=null"
    )


def _dropped(
    raw: RawData,
    made: Sequence[TokenisedRange],
    splits: dict[Split, list[PreparedSource]],
    cleaned: CleaningResult,
) -> dict[str, int]:
    """Documents that were read but are in no split, by reason; `lost`: without any, of which there
    should be none.
    """
    read = sum(source.documents for sources in raw.splits.values() for source in sources)
    dropped = Counter(cleaned.dropped) + Counter({"template": sum(one.refused for one in made)})
    dropped["data.fraction"] = cleaned.report.outside + sum(one.outside for one in made)
    kept = sum(source.documents for sources in splits.values() for source in sources)
    return {**dropped, "lost": read - kept - sum(dropped.values())}


def _sweep(folder: Path, files: Iterable[FileEntry], made: Iterable[TokenisedRange]) -> None:
    """Remove leftovers of earlier or killed runs that the manifest will not list; `pack` handles
    row tables itself.
    """
    keep = {entry.path for entry in files} | {f"{DONE}/{one.range.name}.json" for one in made}
    for path in [*folder.iterdir(), *(folder / DONE).iterdir()]:
        if (
            path.is_file()
            and "rows-" not in path.name
            and str(path.relative_to(folder)) not in keep
        ):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def _in_words(count: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f} {letter}"
    return str(count)
