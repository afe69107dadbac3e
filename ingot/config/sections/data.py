"""The knobs of data: sources, cleaning, engines, rows."""

# ruff: noqa: RUF012 (pydantic copies a mutable default for each section)

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from ingot.config.doors import CLEANING
from ingot.config.section import ByKind, FileName, KindSettings, Positive, Section, Share
from ingot.config.sections.engines import EngineSettings, LocalEngineSettings
from ingot.config.sections.objective import CHAT_TEMPLATED, PLAIN, Documents

MOST_STEPS = 200
"""The step that dropped a document is stored in one byte."""
WITHOUT_SPLITS = ("builtin", "bigquery", "megatron", "wikipedia")
"""The kinds of sources that are read whole."""


class SourceSettings(Section):
    """One place that documents come from."""

    source: str
    """Path, folder, glob (local or `gs://...`), `hf:NAME[:SUBSET]` (a data set on the hub),
    `bigquery:SQL`, `wikipedia:LANG[:DATE]`, `megatron:PREFIX` (existing .bin and .idx),
    `builtin:stdlib`, the sources of the running interpreter's standard library,
    `builtin:digits`, chats that ask for the larger of two digits, `builtin:sums`, chats that ask
    for a sum in a given form, or `builtin:keeper`, 218 chats of all kinds in one voice.
    """
    format: Literal["auto", "jsonl", "parquet", "csv", "tsv", "text", "arrow", "wikipedia"] = "auto"
    """File format; `auto` goes by the ending (`.jsonl` or `.ndjson`, `.json`, `.parquet`, `.csv`,
    `.tsv`, `.arrow`, a `pages-articles` dump; everything else is text, one document a file). All
    but Parquet and Arrow may be compressed (`.gz`, `.zst` or `.bz2` behind it).
    """
    split: str = "train"
    """Which split of a Hugging Face data set, as a whole: `fraction` takes a part. Of files those
    that are named after it, as on the hub (`test.jsonl`, `val/a.csv`); for `train` all files, where
    names do not tell splits apart. What is held out by `data.validation` is, of files, the split
    `validation` where this is left at `train`.
    """
    text: str = "text"
    """The column or JSON key that holds the text."""
    names: list[str] = []
    """Names of the columns of a CSV or TSV file without a header line, such as `[text, label]`;
    empty where the first line has them.
    """
    layout: Literal["auto", "messages", "sharegpt", "alpaca", "hh"] = "auto"
    """How chats and preferences are written down: OpenAI's `messages`, or TRL's `prompt` and
    `completion` in their place; ShareGPT's `conversations`; Alpaca's `instruction`, `input`,
    `output`; or `hh`, texts with `Human:` and `Assistant:` in them. Preferences have `chosen` and
    `rejected` beside or in place of these. `auto` goes by the columns that there are.
    """
    columns: dict[str, str] = {}
    """Names of columns where they differ from the usual ones, such as `{instruction: question,
    output: answer}`; the usual ones are the layout's for chats and preferences, `source` and
    `target` for pairs, `text` and `label` for labelled texts, `text` for texts.
    """
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of this source in what is trained on, relative to the sum of all weights. With one
    source, or all weights equal to 1, every source counts by its size; otherwise sizes do not
    count, and a small source is repeated: training says how often.
    """
    fraction: Share = 1.0
    """Use this share of the source's documents, chosen by a hash of the document's identity."""
    exclude: list[str] = []
    """Files of the source that are left out: shell patterns of whole names as they stand in
    documents' identities, `*` crossing folders, such as `*/generated/*`.
    """

    @property
    def scheme(self) -> str:
        """What stands before the colon of a source that is no file; "" for one that is."""
        match = re.match(r"([a-z][a-z0-9_]*):(?!//)", self.source)
        return match[1] if match and not Path(self.source).exists() else ""


class ValidationShare(Section):
    """Held-out documents taken from the training sources."""

    fraction: Annotated[float, Field(gt=0.0, lt=1.0)]
    """Share of the training documents that is held out, chosen by a hash of the document's
    identity, `FILE:NUMBER` within its source: the same ones in every run, wherever the data lie.
    Two sources with files of the same name, as of two languages, have the same numbers held out.
    """
    group: str | None = None
    """Pattern (a regular expression) of the beginning of identities, which are `FILE:NUMBER`, by
    which documents belong together: those for which it finds the same text (its first group, if it
    has one) are held out together or not at all, such as `([^/]+)/` for a folder's files. Without
    it, or where it finds nothing, each document stands alone.
    """

    @field_validator("group")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        return pattern


class Fuzzy(Section):
    """Near-duplicates: documents whose sets of word n-grams are much alike (MinHash and banding
    find candidates, exact sets decide).
    """

    similarity: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Jaccard similarity of two documents' n-gram sets from which on they are duplicates."""
    ngram: Positive = 5
    """Words in an n-gram; a shorter document is one n-gram."""
    permutations: Annotated[int, Field(ge=16, le=1024)] = 128
    """Length of a document's MinHash signature."""


class Contamination(Section):
    """Training documents that hold parts of what the model is evaluated on."""

    ngram: Positive = 13
    """Words in an n-gram."""
    matches: Positive = 1
    """How many different n-grams in common with the evaluation documents make a training document
    contaminated.
    """
    against: list[str] = []
    """Evaluation documents beside the held-out ones, such as the items of benchmarks: files,
    folders or globs of JSONL, JSON, Parquet, CSV, TSV or Arrow, or `hf:NAME[:SUBSET]` (its
    validation split). All texts of a record together are one document.
    """


class CleaningSettings(KindSettings):
    """What every cleaning step of another package says of itself beside its knobs.

    `implementation(settings)` is called once in each worker and returns a function that is given
    the text of a document (of a chat, all that is said in it) and tells whether it stays. Its
    answer depends on the text alone, so that any number of workers drops the same documents.
    """

    kind: str
    """Which step."""
    name: str
    """The name that the report of cleaning has for it."""


class Clean(Section):
    """What `prepare` does to documents, and which it drops, before they are tokenised. Nothing
    unless asked for, and nothing to those of a `megatron:` source, which are tokens.
    """

    normalize: Literal["none", "nfc", "nfkc"] = "none"
    """Unicode normal form that texts are brought to."""
    min_chars: Annotated[int, Field(ge=0)] = 0
    """Drop documents with fewer characters."""
    max_chars: Positive | None = None
    """Drop documents with more characters."""
    languages: list[str] = []
    """Keep only documents in these languages (ISO 639-1, such as `[en, de]`); empty keeps all.
    Needs `ingot[languages]`.
    """
    exact: bool = False
    """Drop documents whose text another one has too, case, diacritics and white space set aside;
    the first one stays. Chats must be alike in all, roles, thoughts, calls and tools, and pairs on
    both sides.
    """
    fuzzy: Fuzzy | None = None
    """Drop near-duplicates; one of each cluster stays, the first. `{}` for the defaults."""
    contamination: Contamination | None = None
    """Drop training documents that hold parts of the validation documents, or of the files of
    `against`. `{}` for the defaults.
    """
    steps: list[Annotated[CleaningSettings, ByKind(CLEANING, "")]] = []
    """Steps of other packages, in this order, after the filters above and before duplicates: each
    has a `kind` and its own knobs.
    """

    @property
    def against(self) -> list[str]:
        """The files of evaluation documents that are in no split."""
        return [] if self.contamination is None else self.contamination.against

    @field_validator("steps")
    @classmethod
    def _distinct(cls, steps: list[CleaningSettings]) -> list[CleaningSettings]:
        names = [step.name for step in steps]
        if taken := [name for name in names if names.count(name) > 1 or name in cls.model_fields]:
            raise ValueError(f"has two steps called {taken[0]}; give each its own `name`")
        if len(steps) > MOST_STEPS:
            raise ValueError(f"has {len(steps)} steps; at most {MOST_STEPS} are possible")
        return steps

    @property
    def wanted(self) -> bool:
        """Whether anything is asked for."""
        return self != Clean()


Pack = Literal["cut", "best_fit", "none"]
OnBad = Literal["skip", "skip_files", "stop"]


class Data(Section):
    """Documents in, rows of tokens out."""

    train: list[SourceSettings]
    """The sources that are trained on."""
    validation: Annotated[
        Annotated[list[SourceSettings], Tag("sources")] | Annotated[ValidationShare, Tag("share")],
        Discriminator(
            lambda value: "share" if isinstance(value, dict | ValidationShare) else "sources"
        ),
    ] = ValidationShare(fraction=0.01)
    """What loss is measured on: sources of its own, or `{fraction: F}` of the training documents.
    `[]`, null and a fraction of 0 all hold nothing out.
    """
    seq_len: Positive = 512
    """Tokens in a row; at most the model's positions. Of a preference, each of the two answers with
    its prompt; of a pair, the source.
    """
    target_len: Positive = 128
    """Tokens in the target of a pair; longer ones are cut off."""
    pack: Literal["auto", "cut", "best_fit", "none"] = "auto"
    """How documents become rows. `cut`: one stream, cut every `seq_len` tokens. `best_fit`: whole
    documents side by side with little padding, those that are too long split (for chats:
    truncated; of masked texts pieces, for encoders that keep them apart). `none`: one document a
    row. `auto`: cut for texts, best_fit for chats, none else.
    """
    truncate: Literal["right", "left", "drop"] = "right"
    """What is done with a document of messages that is longer than `seq_len`. `right`: its end is
    cut off, which is where answers stand. `left`: its beginning is cut off; of preferences and
    rated answers that of the prompt alone, of both sides alike, and of an answer that is still too
    long the end. What begins a text goes with it: BOS, a system message. `drop`: it is left out;
    so may be pairs and labelled texts. `prepare` counts what was cut or left out.
    """
    window: Positive | None = None
    """How many parts of the prepared columns (files of 16 to 512 MB of text; of each source, where
    sources have weights) training draws its rows from at a time; all of them where it is empty.
    With a window, machines without a shared disk fetch a part shortly before it is needed and drop
    it afterwards, so that none must hold the whole corpus, but for the reference of `dpo`, which
    goes through all of it first. Texts that are cut into rows are then cut within each part.
    """
    on_bad: OnBad = "skip"
    """What happens at a record that cannot be read: counted, named and skipped, or stop. A file
    that is damaged or cut short stops ingest, too; `skip_files` goes on with what was read of it.
    """
    max_skipped: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The most that may be skipped: a share of each source's records, not counting empty texts, and
    of the chats that the template refuses. More than that, and more than three, stops.
    """
    fraction: Share = 1.0
    """Train on this share of the documents, chosen by a hash of the document's identity."""
    clean: Clean = Clean()
    """What is done to documents before they are tokenised."""
    skip: list[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(gt=0)]]] = []
    """Ranges `[first, after the last]` of training samples (rows, counted from 0 in the order of
    training) that are left out on purpose, such as those around a loss spike. Epochs are shorter by
    them; `train.steps` and `train.tokens` go on into the next pass instead. A run that is resumed
    may leave out what it has not come to yet.
    """
    engine: EngineSettings = LocalEngineSettings()
    """What `prepare` runs on."""
    megatron_prefix: FileName | None = None
    """For Megatron's own tools: `prepare` also gives the parts of the token columns the names that
    they expect, `data/megatron/PREFIX.SPLIT-NNNNN_text_document.bin` and `.idx`; the same files,
    which take no room on this disk (a replica in a bucket holds them twice). For texts alone.
    """

    @field_validator("skip")
    @classmethod
    def _ranges(cls, given: list[tuple[int, int]]) -> list[tuple[int, int]]:
        for first, last in given:
            if first >= last:
                raise ValueError(f"[{first}, {last}]: the first is less than the second")
        return given

    @field_validator("validation", mode="before")
    @classmethod
    def _nothing_held_out(cls, given: Any) -> Any:
        """All ways to say so become the empty list."""
        is_share = isinstance(given, dict)
        if given is None or (
            is_share
            and {"fraction"} <= given.keys() <= {"fraction", "group"}
            and type(given["fraction"]) in (int, float)
            and given["fraction"] == 0
        ):
            return []
        if is_share and "source" in given:
            raise ValueError(
                "data.validation is either a list of sources, `[{source: PATH}]`, or a share of the"
                " documents, `{fraction: 0.01}`; give one of the two"
            )
        return given

    @field_validator("train", "validation")
    @classmethod
    def _with_splits(
        cls, given: list[SourceSettings] | ValidationShare, info: ValidationInfo
    ) -> list[SourceSettings] | ValidationShare:
        """Only files and data sets of the hub tell splits apart."""
        for number, source in enumerate(given if isinstance(given, list) else ()):
            if source.split != "train" and source.scheme in WITHOUT_SPLITS:
                raise ValueError(
                    f"data.{info.field_name}[{number}].split {source.split} has no effect on"
                    f" {source.source}, which has no splits and would be read whole; remove it, or"
                    " give a source that is that split"
                )
        return given

    @field_validator("validation")
    @classmethod
    def _counted_by_documents(
        cls, given: list[SourceSettings] | ValidationShare
    ) -> list[SourceSettings] | ValidationShare:
        """A weight says how often something is trained on, and loss counts every document once."""
        for number, source in enumerate(given if isinstance(given, list) else ()):
            if source.weight != 1:
                raise ValueError(
                    f"data.validation[{number}].weight {source.weight:g} has no effect on what is"
                    " measured, where every document counts once, and each source's metrics stand"
                    " beside; remove it, or set the source's `fraction`"
                )
        return given

    @property
    def holds_out(self) -> bool:
        """Whether there are held-out documents to measure on."""
        return self.validation != []

    @property
    def held_out_columns(self) -> list[str]:
        """The sources of documents that are held out which hold ids alone, without texts."""
        held_out = self.validation if isinstance(self.validation, list) else self.train
        return [source.source for source in held_out if source.scheme == "megatron"]

    @property
    def examples_split(self) -> Literal["train", "validation"]:
        """Where examples of documents are taken from, held-out ones where there are any."""
        return "validation" if self.holds_out else "train"


def truncations(documents: Documents) -> tuple[str, ...]:
    """What `truncate` may be: texts are split over rows and lose nothing, and only messages have a
    prompt.
    """
    if documents in PLAIN:
        return ("right",)
    return ("right", "left", "drop") if documents in CHAT_TEMPLATED else ("right", "drop")


COLUMNS: dict[Documents, tuple[str, ...]] = {
    "text": ("tokens",),
    "chat": ("tokens", "mask"),
    "preference": ("chosen", "chosen_mask", "rejected", "rejected_mask"),
    "rated": ("answer", "answer_mask", "label"),
    "pair": ("source", "target"),
    "labelled": ("tokens", "label"),
    "masked": ("body",),
}
"""The columns that `prepare` writes for each kind of document; the first one is what the model
reads.
"""
