"""What `verify data` finds: nothing in data that are whole, and each planted fault by its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.base.markers import FileEntry, entry_of, write_marker
from ingot.base.progress import Progress
from ingot.config.recipe import Recipe
from ingot.config.sections.data import COLUMNS
from ingot.data.columns.column import ColumnWriter, bin_path, column_prefix, idx_path, token_dtype
from ingot.data.columns.manifest import (
    MANIFEST,
    ColumnPart,
    PreparedData,
    PreparedSource,
    data_identities,
    read_prepared,
    write_prepared,
)
from ingot.data.engines.local import LocalEngine
from ingot.data.ingest import ingest
from ingot.data.packing.tables import pack
from ingot.data.tokenizing.encode import encode_documents
from ingot.tokenizers.bpe import train_bpe
from ingot.tokenizers.load import PREPARED, load_tokenizer
from ingot.verify.data import verify_data
from ingot.verify.proof import Proof
from tests.data.small import recipe, sentences, write_jsonl

CHAT = {
    "messages": [{"role": "user", "content": "Copper?"}, {"role": "assistant", "content": "Melts."}]
}


def prepared(root: Path, *, chats: bool = False) -> Recipe:
    """A recipe with its documents ingested, and columns of two parts and row tables beside them."""
    if chats:
        (root / "docs.jsonl").parent.mkdir(parents=True, exist_ok=True)
        (root / "docs.jsonl").write_text(
            "".join(json.dumps(CHAT) + "\n" for _ in range(40)), encoding="utf-8"
        )
    else:
        write_jsonl(root / "docs.jsonl", sentences(40))
    made = asked(root, chats=chats)
    ingest(made)
    tokenizer = train_bpe(sentences(40), 280)
    tokenizer.save(made.folder.tokenizer)
    write_marker(
        made.folder.tokenizer,
        PREPARED,
        {},
        [entry_of(made.folder.tokenizer, name) for name in sorted(tokenizer.files)],
    )
    write_columns(made, chats=chats)
    pack(
        made.folder.columns,
        read_prepared(made.folder.columns),
        16,
        "best_fit",
        LocalEngine(1),
        Progress("pack", None, "MB", quiet=True),
    )
    return made


def asked(root: Path, **knobs: Any) -> Recipe:
    chats = knobs.pop("chats", False)
    return recipe(
        root, root / "docs.jsonl", **({"objective__kind": "sft"} if chats else {}), **knobs
    )


def write_columns(
    made: Recipe, *, chats: bool, wrong: Callable[[dict[str, Any]], None] = lambda columns: None
) -> None:
    """Columns of the documents; `wrong` changes what is written into the second part of the
    training split.
    """
    tokenizer, folder = load_tokenizer(made.folder.tokenizer), made.folder.columns
    kind, splits, entries = made.documents, {}, list[FileEntry]()
    for split, slices in {
        "train": [slice(0, 20), slice(20, 30)],
        "validation": [slice(30, 40)],
    }.items():
        parts = []
        for number, some in enumerate(slices):
            flat, lengths = encode_documents(tokenizer, sentences(40)[some])
            columns: dict[str, Any] = {
                "tokens": flat,
                "lengths": lengths,
                "documents": len(lengths),
                "mask": (np.arange(len(flat)) % 2).astype(np.uint8),
            }
            if (split, number) == ("train", 1):
                wrong(columns)
            for name in COLUMNS[kind]:
                prefix = column_prefix(folder, split, name, number)
                with ColumnWriter(
                    prefix,
                    np.dtype("uint8") if name == "mask" else token_dtype(tokenizer.vocab_size),
                ) as writer:
                    writer.append(
                        columns[name], columns.get(f"lengths of {name}", columns["lengths"])
                    )
                entries += [
                    entry_of(folder, path.name) for path in (bin_path(prefix), idx_path(prefix))
                ]
            parts.append(ColumnPart(number, columns["documents"], len(flat), 0, "0"))
        splits[split] = [
            PreparedSource(
                "s",
                1.0,
                sum(part.documents for part in parts),
                sum(part.tokens for part in parts),
                0,
                parts,
            )
        ]
    identity = tokenizer.identity()
    kinds = [
        {"name": name, "dtype": "uint8" if name == "mask" else "uint16"} for name in COLUMNS[kind]
    ]
    about = (
        identity,
        tokenizer.template_identity,
        tokenizer.vocab_size,
        data_identities(entries, ["train"], identity),
    )
    write_prepared(
        folder,
        PreparedData(made.objective.kind, kinds, splits, *about, {"train": "a"}),
        {},
        entries,
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify") / "root"
    prepared(root)
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    """The sources stay where they were: they carry stamps."""
    shutil.copytree(whole / "runs", tmp_path / "runs")
    return tmp_path


def verified(whole: Path, root: Path, **knobs: Any) -> Proof:
    return verify_data(asked(whole, **{"output": str(root / "runs"), **knobs}))


def failed(proof: Proof) -> dict[str, str]:
    assert proof.holds == (not any(check.passed is False for check in proof.checks))
    return {check.what: check.detail for check in proof.checks if check.passed is False}


def test_whole_data_hold(whole: Path, root: Path) -> None:
    proof = verified(whole, root)
    assert not failed(proof)
    told = {check.what: check.detail for check in proof.checks}
    assert list(told) == [
        "files: raw documents",
        "files: tokenizer",
        "files: columns",
        "sources since they were ingested",
        "tokenizer of the columns",
        "tokenizer of the recipe",
        "columns: indexes",
        "columns: counts",
        "columns: ids",
        "columns: end of each record",
        "files: rows-best_fit-16",
        "rows: best_fit, 16 tokens",
    ]
    assert told["columns: counts"].startswith("40 documents, ")
    assert (
        told["sources since they were ingested"]
        == "1 sources, 40 documents, those of the recipe, unchanged"
    )
    assert told["columns: ids"] == "all below 280"


def test_whole_chats_hold(tmp_path: Path) -> None:
    proof = verify_data(prepared(tmp_path, chats=True))
    assert not failed(proof)
    assert {check.what: check.passed for check in proof.checks}["columns: masks"] is True
    assert {check.what: check.passed for check in proof.checks}[
        "columns: end of each record"
    ] is None


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


FILES = (
    "raw/train-00000.parquet",
    "tokenizer/tokenizer.json",
    "columns/train.tokens-00001.bin",
    "columns/train.tokens-00000.idx",
    "columns/validation.tokens-00000.bin",
    "columns/train.rows-best_fit-16-00000.bin",
    "columns/train.rows-best_fit-16-00001.idx",
)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_named(name: str, whole: Path, root: Path) -> None:
    path = root / "runs/small/data" / name
    flip(path, path.stat().st_size // 2)
    assert any(
        f"{path} does not match its checksum" in detail
        for detail in failed(verified(whole, root)).values()
    )


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_missing_file_is_named(name: str, whole: Path, root: Path) -> None:
    path = root / "runs/small/data" / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert any(
        f"{path} has {len(content) - 1} bytes, {len(content)} were written" in detail
        for detail in failed(verified(whole, root)).values()
    )
    path.unlink()
    assert any(f"{path} is missing" in detail for detail in failed(verified(whole, root)).values())


@pytest.mark.parametrize(
    "name", ["raw/manifest.json", "columns/manifest.json", "tokenizer/prepared.json"]
)
def test_a_torn_marker_is_named(name: str, whole: Path, root: Path) -> None:
    path = root / "runs/small/data" / name
    path.write_bytes(path.read_bytes()[:-9])
    assert any(
        f"{path} is missing or torn; run `ingot" in detail
        for detail in failed(verified(whole, root)).values()
    )


def too_large(columns: dict[str, Any]) -> None:
    columns["tokens"][3] = 280


def without_end(columns: dict[str, Any]) -> None:
    columns["tokens"][columns["lengths"][0] - 1] = 5


def one_more(columns: dict[str, Any]) -> None:
    columns["documents"] += 1


@pytest.mark.parametrize(
    ("wrong", "what", "detail"),
    [
        (too_large, "columns: ids", "train.tokens-00001.bin has 1 elements that are not below 280"),
        (
            without_end,
            "columns: end of each record",
            "train.tokens-00001.bin has 1 records that do not end with token",
        ),
        (one_more, "columns: counts", "train.tokens-00001.bin has 10 documents and"),
    ],
)
def test_content_that_no_checksum_catches(
    wrong: Callable[[dict[str, Any]], None], what: str, detail: str, whole: Path, root: Path
) -> None:
    """Written wrong and hashed after that."""
    write_columns(asked(whole, output=str(root / "runs")), chats=False, wrong=wrong)
    found = failed(verified(whole, root))
    assert list(found) == [what]
    assert detail in found[what]


def twos(columns: dict[str, Any]) -> None:
    columns["mask"][:4] = 2


def shifted(columns: dict[str, Any]) -> None:
    """As many elements in as many records, cut elsewhere."""
    columns["lengths of mask"] = columns["lengths"].copy()
    columns["lengths of mask"][:2] += (1, -1)


@pytest.mark.parametrize(
    ("wrong", "detail"),
    [
        (twos, "train.mask-00001.bin has 4 elements that are not below 2"),
        (shifted, "train.mask-00001.bin has records of other lengths than train.tokens-00001.bin"),
    ],
)
def test_masks(wrong: Callable[[dict[str, Any]], None], detail: str, tmp_path: Path) -> None:
    made = prepared(tmp_path, chats=True)
    write_columns(made, chats=True, wrong=wrong)
    assert detail in failed(verify_data(made))["columns: masks"]


def test_tables_that_lie(whole: Path, root: Path) -> None:
    """Rows that train some tokens twice and others never, hashed after that."""
    folder = root / "runs/small/data/columns"
    prefix = column_prefix(folder, "train", "rows-best_fit-16", 0)
    whole_rows = np.frombuffer(bin_path(prefix).read_bytes(), np.int64).reshape(-1, 3)
    marker = json.loads((folder / "rows-best_fit-16.json").read_text())

    def found(change: Callable[[Any], None]) -> str:
        pieces = whole_rows.copy()
        change(pieces)
        bin_path(prefix).write_bytes(pieces.tobytes())
        files = [entry_of(folder, entry["path"]) for entry in marker["files"]]
        write_marker(
            folder,
            "rows-best_fit-16.json",
            {key: value for key, value in marker.items() if key != "files"},
            files,
        )
        return failed(verified(whole, root))["rows: best_fit, 16 tokens"]

    def put(row: int, column: int, value: int) -> Callable[[Any], None]:
        return lambda pieces: pieces.__setitem__((row, column), value)

    assert "plans records that are not there" in found(put(0, 0, 10_000))
    assert "plans more of a record than there is" in found(
        lambda pieces: pieces.__setitem__((slice(None), 1), 5000)
    )
    assert "or of more than 16 tokens" in found(put(0, 2, 17))
    assert "plans some tokens twice, or leaves some out" in found(
        put(1, 1, int(whole_rows[1, 1]) - 1)
    )
    ends = np.flatnonzero(np.diff(whole_rows[:, 0], append=-1) != 0)
    last = int(ends[np.argmax(whole_rows[ends, 2] > 2)])
    assert "leaves out 1 tokens" in found(put(last, 2, int(whole_rows[last, 2]) - 1))


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        (3, "3 documents of data/raw are in no column"),
        (-2, "2 documents are in columns, and not in data/raw"),
    ],
)
def test_documents_that_reach_no_column(whole: Path, root: Path, lost: int, says: str) -> None:
    """Lost by a fault of ours: neither cleaned, nor left out by a fraction."""
    folder = root / "runs/small/data/columns"
    marker = json.loads((folder / MANIFEST).read_text())
    files = [entry_of(folder, entry["path"]) for entry in marker.pop("files")]
    write_marker(folder, MANIFEST, {**marker, "dropped": {"lost": lost}}, files)
    found = failed(verified(whole, root))
    assert says in found["columns: counts"]


def test_another_tokenizer(whole: Path, root: Path) -> None:
    """Columns of one, another in the folder; and a recipe that by now asks for another."""
    folder = root / "runs/small/data/tokenizer"
    identity = load_tokenizer(folder).identity()
    other = train_bpe(sentences(40), 275)
    other.save(root / "other")
    told = failed(
        verified(whole, root, tokenizer__source=str(root / "other"), tokenizer__vocab_size=None)
    )
    assert list(told) == ["tokenizer of the recipe"]
    assert (
        f"another vocabulary or special tokens: identity {other.identity()}, {folder} has"
        f" {identity}; run `ingot prepare`" in told["tokenizer of the recipe"]
    )
    other.save(folder)
    write_marker(folder, PREPARED, {}, [entry_of(folder, name) for name in sorted(other.files)])
    told = failed(verified(whole, root))
    assert (
        f"the columns were made with tokenizer {identity}, {folder} is {other.identity()}"
        in told["tokenizer of the columns"]
    )


def test_changed_sources_and_recipes(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    write_jsonl(tmp_path / "docs.jsonl", sentences(41))
    assert "docs.jsonl has" in failed(verify_data(made))["sources since they were ingested"]
    write_jsonl(tmp_path / "docs.jsonl", sentences(40))
    told = failed(verify_data(asked(tmp_path, chats=True)))
    assert (
        "was prepared for objective.kind pretrain, the recipe says sft; run `ingot prepare`"
        in told["manifest of the columns"]
    )
