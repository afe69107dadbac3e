"""Data sets of the Hugging Face hub, through the `datasets` library: a shard of a split takes the
place of a file. Rows are streamed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, WrongInput, one_line
from ingot.base.hub import ASK_S
from ingot.base.listing import find_files
from ingot.base.markers import fingerprint
from ingot.base.progress import say
from ingot.base.storage import stamp
from ingot.config.sections.data import SourceSettings
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.data.sources.kind import SourceKind
from ingot.data.sources.presence import files_among, with_presence
from ingot.data.sources.source_file import SourceFile, recall, remember
from ingot.data.sources.tables import batch_documents, columns_of, with_classes

SCHEME = "hf:"


def find_hub(source: SourceSettings, knob: str) -> list[SourceFile]:
    """The shards of `hf:NAME[:SUBSET]`, split `source.split`, stamped with the data set's commit.
    NAME may be a folder.

    Raises:
        WrongInput: no such data set, subset or split; the existing ones are named.
        Failed: the hub cannot be reached, and never was for this source.
    """
    name, _, subset = source.source.removeprefix(SCHEME).partition(":")
    where = {
        "path": source.source,
        "name": name,
        "subset": "" if subset == "default" else subset,
        "split": source.split,
    }
    key = f"{source.source} {source.split}"
    try:
        where["revision"] = revision_of(name, knob)
        shares = open_split(where, knob).num_shards
        remember(key, {"revision": where["revision"], "shares": shares})
    except Failed:
        known = recall(key)
        if known is None:
            raise
        where["revision"], shares = known["revision"], known["shares"]
        say(
            f"warning: the hub cannot be reached; {source.source} is taken to be as it was when it"
            " last was"
        )
    base = "/".join(
        part
        for part in (Path(name).name if Path(name).is_dir() else name, subset, source.split)
        if part
    )
    return [
        SourceFile(
            source.source, f"{base}-{share:05d}", "hub", {**where, "share": share, "shares": shares}
        )
        for share in range(shares)
    ]


def open_split(where: dict[str, Any], knob: str) -> Any:
    """The streamed split. The library's own errors name the existing subsets and splits."""
    try:
        import datasets
        from datasets.packaged_modules.cache.cache import Cache
    except ImportError as error:
        raise WrongInput(
            "an hf: source needs a package that is not installed; pip install 'ingot[datasets]'"
        ) from error
    folder = Path(where["name"]).is_dir()
    datasets.utils.logging.disable_progress_bar()
    try:
        builder = datasets.load_dataset_builder(
            where["name"],
            where["subset"] or None,
            revision=None if folder else where["revision"],
        )
        # Where the hub cannot be reached, the library takes whatever version somebody prepared, all
        # of it as one.
        if not folder and builder.hash != where["revision"]:
            raise ConnectionError(f"its cache holds {builder.hash}, not {where['revision']}")
        if isinstance(builder, Cache) and where.get("shares") != 1:
            raise ConnectionError(
                "its cache does not hold it in the shards of the hub: without a network, give the"
                " folder that its save_to_disk writes"
            )
        return builder.as_streaming_dataset(split=where["split"])
    except (FileNotFoundError, ValueError, RuntimeError) as error:
        if _is_out_of_reach(error):
            raise _unreachable(where["path"], knob, error) from error
        raise WrongInput(
            f"{knob} {where['path']} cannot be used: {one_line(error)}; check its name, subset and"
            " `split`"
        ) from error
    except Exception as error:  # the library passes on whatever its transport raises
        raise _unreachable(where["path"], knob, error) from error


def revision_of(name: str, knob: str) -> str:
    """The commit of a data set on the hub; for a folder, a fingerprint of its files' stamps."""
    if Path(name).is_dir():
        return fingerprint(
            [{**stamp(path), "path": os.path.relpath(path, name)} for path in find_files(name)]
        )
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return str(HfApi().dataset_info(name, timeout=ASK_S).sha)
    except HFValidationError as error:
        raise WrongInput(
            f"{knob} hf:{name} is not a name on the hub; write it as hf:ORG/NAME[:SUBSET]"
        ) from error
    except GatedRepoError as error:
        raise WrongInput(
            f"{knob} hf:{name} is gated; accept its terms on its page and set $HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise WrongInput(
            f"{knob} hf:{name} is no data set on the hub; check the name, or set $HF_TOKEN if it is"
            " private"
        ) from error
    except Exception as error:  # as in `open_split`
        raise _unreachable(f"hf:{name}", knob, error) from error


def _is_out_of_reach(error: BaseException | None) -> bool:
    """Whether the hub did not answer as it should: the library tells that as a file that is not
    found, and what it was in the error's context.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    while error is not None and not isinstance(error, LocalEntryNotFoundError):
        error = error.__context__
    return error is not None


def _unreachable(name: str, knob: str, error: Exception) -> Failed:
    return Failed(
        f"{knob} {name} cannot be reached ({type(error).__name__}: {one_line(error)}); check the"
        " network and $HF_TOKEN"
    )


BATCH_ROWS = 1000


def hub_documents(
    file: SourceFile, extractor: DocumentExtractor
) -> Iterator[ParsedDocument | BadRecord]:
    """The documents of one shard; rows count from 1 within it.

    Raises:
        WrongInput: the text column is missing, or is not text.
        Failed: the connection breaks down.
    """
    where, row, columns, files = file.stamp, 0, list[str](), list[str]()
    share = (
        open_split(where, file.path)
        .shard(num_shards=where["shares"], index=where["share"])
        .with_format("arrow")
    )
    tables = iter(share.iter(batch_size=BATCH_ROWS))
    while True:
        try:
            table = next(tables, None)
        except (
            Exception
            # Whatever the library or one of its readers raises for a lost connection or a bad file.
        ) as error:
            raise Failed(
                f"{file.path} broke down after row {row} ({type(error).__name__}:"
                f" {one_line(error)}); run the same command again"
            ) from error
        if table is None:
            return
        if not row:
            columns = columns_of(table.schema, file.path, extractor)
            files = files_among(table.schema, extractor.asked_columns)
            extractor = with_classes(extractor, table.schema)
        for batch in table.select(columns).to_batches():
            told = with_presence(batch, files)
            yield from batch_documents(told, row, extractor, table.column_names)
            row += batch.num_rows


class HubSource(SourceKind):
    """`hf:NAME[:SUBSET]`: a data set of the Hugging Face hub, or a folder that looks like one."""

    yields_records = True

    def find(self, source: SourceSettings, knob: str) -> list[SourceFile]:
        return find_hub(source, knob)

    def read(
        self, file: SourceFile, extractor: DocumentExtractor
    ) -> Iterator[ParsedDocument | BadRecord]:
        return hub_documents(file, extractor)
