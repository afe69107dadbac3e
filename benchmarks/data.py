"""Data against the usual libraries on this machine: from JSONL to columns, cleaning, rows for
training.
"""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.comparison import Comparison
from benchmarks.turns import Contender, Turn, Work
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.data.cleaning.clean import clean
from ingot.data.engines.local import LocalEngine
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.data.raw.store import open_raw
from ingot.tokenizers.bpe import train_bpe

CORPUS = Path(os.environ.get("TEST_DATA", "../shared/data")) / "debian_docs" / "en_prog.jsonl.gz"
VOCABULARY = 32_000
MB = 10**6


def texts() -> Iterator[str]:
    """English documentation of programming languages where it is at hand, else the standard
    library's own sources; over and over.
    """
    while True:
        if CORPUS.exists():
            with gzip.open(CORPUS, "rt", encoding="utf-8") as lines:
                yield from (json.loads(line)["text"] for line in lines)
        else:
            for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
                yield path.read_text(encoding="utf-8", errors="replace")


def write_corpus(path: Path, megabytes: float) -> Path:
    """JSONL of about so many megabytes of text. Later rounds over the corpus get a mark, so that no
    document comes twice.
    """
    written = 0
    with path.open("w", encoding="utf-8") as stream:
        for number, text in enumerate(texts()):
            marked = f"{number} {text}"
            stream.write(json.dumps({"text": marked}) + "\n")
            written += len(marked.encode())
            if written >= megabytes * MB:
                return path
    return path


def write_tokenizer(
    folder: Path, megabytes: float, vocab_size: int, special: Sequence[str] = ()
) -> Path:
    """A byte-level BPE learnt from the beginning of the corpus."""
    sizes = itertools.accumulate(len(text) for text in texts())
    shown = (
        text
        for text, _ in itertools.takewhile(
            lambda pair: pair[1] < megabytes * MB, zip(texts(), sizes, strict=False)
        )
    )
    folder.mkdir(parents=True)
    train_bpe(shown, vocab_size, special).save(folder)
    return folder


def recipe_over(root: Path, corpus: Path, **knobs: Any) -> Recipe:
    given = {
        "name": "bench",
        "output": str(root / "runs"),
        "data.train": [{"source": str(corpus)}],
        "data.validation.fraction": 0.1,
        "tokenizer.source": str(root / "tokenizer"),
        "train.global_batch": 1,
        "data.seq_len": 128,
        **knobs,
    }
    return load_recipe(
        (),
        [f"{knob}={json.dumps(value)}" for knob, value in given.items()],
        environ={},
        dotenv=None,
    )


def to_columns(root: str, corpus: str) -> Work:
    """The verbs `ingest` and `prepare`, from JSONL to checked and flushed columns, one process a
    core.
    """
    recipe = recipe_over(Path(root), Path(corpus))
    size = _text_bytes(Path(corpus))

    def work() -> Turn:
        shutil.rmtree(recipe.folder.root, ignore_errors=True)
        ingest(recipe)
        prepare(recipe)
        return Turn(size / MB)

    return work


def only_prepare(root: str, corpus: str) -> Work:
    """The verb `prepare` alone, from raw documents in Parquet."""
    recipe = recipe_over(Path(root), Path(corpus), name="prepare")
    size = _text_bytes(Path(corpus))
    ingest(recipe)

    def work() -> Turn:
        shutil.rmtree(recipe.folder.columns, ignore_errors=True)
        prepare(recipe)
        return Turn(size / MB)

    return work


def gigatoken_files(root: str, corpus: str) -> Work:
    """The fastest exact encoder reading the same JSONL by itself, all threads, keeping nothing."""
    gigatoken = importlib.import_module("gigatoken")
    encoder = gigatoken.Tokenizer(str(Path(root) / "tokenizer" / "tokenizer.json"))
    size = _text_bytes(Path(corpus))

    def work() -> Turn:
        encoder.encode_files(gigatoken.JsonlFileSource([corpus], field="text"))
        return Turn(size / MB)

    return work


def tokenizers_batches(root: str, corpus: str) -> Work:
    """tokenizers' `encode_batch_fast` over the same JSONL, all threads, keeping nothing."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    reference = importlib.import_module("tokenizers").Tokenizer.from_file(
        str(Path(root) / "tokenizer" / "tokenizer.json")
    )
    size = _text_bytes(Path(corpus))

    def work() -> Turn:
        with Path(corpus).open(encoding="utf-8") as lines:
            documents = (json.loads(line)["text"] for line in lines)
            while batch := list(itertools.islice(documents, 256)):
                reference.encode_batch_fast(batch, add_special_tokens=False)
        return Turn(size / MB)

    return work


def datasets_map(root: str, corpus: str) -> Work:
    """`datasets.map(num_proc=2)` with the same tokenizer, as its documentation shows it."""
    datasets, transformers = (
        importlib.import_module("datasets"),
        importlib.import_module("transformers"),
    )
    datasets.disable_progress_bars()
    datasets.disable_caching()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(Path(root) / "tokenizer" / "tokenizer.json")
    )
    size = _text_bytes(Path(corpus))

    def work() -> Turn:
        loaded = datasets.load_dataset(
            "json", data_files=corpus, split="train", cache_dir=str(Path(root) / "cache")
        )
        loaded.map(
            lambda batch: tokenizer(batch["text"]),
            batched=True,
            num_proc=2,
            remove_columns=["text"],
        )
        shutil.rmtree(Path(root) / "cache", ignore_errors=True)
        return Turn(size / MB)

    return work


def cleaning(root: str, corpus: str, knobs: dict[str, Any]) -> Work:
    """What `prepare` does before it tokenises, from raw documents, one process a core."""
    recipe = recipe_over(Path(root), Path(corpus), name="clean-" + "-".join(knobs), **knobs)
    size = _text_bytes(Path(corpus))
    ingest(recipe)
    raw = open_raw(recipe)

    def work() -> Turn:
        shutil.rmtree(recipe.folder.data / "clean", ignore_errors=True)
        clean(recipe, raw, LocalEngine())
        return Turn(size / MB)

    return work


def plain_folding(corpus: str) -> Work:
    """Exact deduplication as one writes it in a few lines: case, diacritics and white space folded
    by the standard library, one process.
    """
    size = _text_bytes(Path(corpus))

    def work() -> Turn:
        seen = set()
        with Path(corpus).open(encoding="utf-8") as lines:
            for line in lines:
                folded = unicodedata.normalize("NFKD", json.loads(line)["text"]).casefold()
                seen.add(
                    hash(
                        " ".join(
                            "".join(
                                character
                                for character in folded
                                if not unicodedata.combining(character)
                            ).split()
                        )
                    )
                )
        return Turn(size / MB)

    return work


def peak_memory(root: Path, megabytes: float) -> tuple[float, float, float]:
    """Run `ingest` and `prepare` on so much text: seconds, and the peak memory of the largest
    process and of all together, MB.
    """
    corpus = write_corpus(root / f"{megabytes:g}.jsonl", megabytes)
    knobs = [
        f"name=m{megabytes:g}",
        f"output={root / 'runs'}",
        f"data.train=[{{source: '{corpus}'}}]",
        f"tokenizer.source={root / 'tokenizer'}",
    ]
    rest = root / "rest.yaml"
    rest.write_text("data: {seq_len: 128, validation: {fraction: 0.1}}\n", encoding="utf-8")
    largest = together = 0.0
    began = time.monotonic()
    for verb in ("ingest", "prepare"):
        with (root / "said.txt").open("w", encoding="utf-8") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "ingot", verb, str(rest), *knobs],
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
        while process.poll() is None:
            sizes = _memory(process.pid)
            largest, together = max(largest, *sizes, 0), max(together, sum(sizes))
            time.sleep(0.05)
        if process.returncode:
            said_last = (root / "said.txt").read_text(encoding="utf-8").strip().rsplit("\n", 1)[-1]
            raise SystemExit(f"{verb} failed on {megabytes:g} MB: {said_last}")
    corpus.unlink()
    return time.monotonic() - began, largest / MB, together / MB


def _memory(pid: int) -> list[int]:
    """Bytes of memory of a process and of those under it; a page that several share counts as its
    share for each.
    """
    sizes = [0]
    try:
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            sizes.append(process.memory_full_info().pss)
    except psutil.Error:
        pass  # it ended while it was looked at
    return sizes


def _text_bytes(corpus: Path) -> int:
    with corpus.open(encoding="utf-8") as lines:
        return sum(len(json.loads(line)["text"].encode()) for line in lines)


def preparing(quick: bool, root: Path) -> Comparison:
    corpus = write_corpus(root / "corpus.jsonl", 2 if quick else 200)
    write_tokenizer(root / "tokenizer", 1 if quick else 20, 500 if quick else VOCABULARY)
    arguments = (str(root), str(corpus))
    contenders = [
        Contender("ingot ingest + prepare", to_columns, arguments),
        Contender("ingot prepare", only_prepare, arguments),
        Contender("gigatoken, keeping nothing", gigatoken_files, arguments),
        Contender("tokenizers", tokenizers_batches, arguments),
        Contender("datasets.map", datasets_map, arguments),
    ]
    ours = contenders[0].name
    ratios = [(ours, contender.name) for contender in contenders[2:]] + [
        (contenders[1].name, contenders[2].name)
    ]
    notes = ["memory is that of the leading process, workers aside"]
    return Comparison(
        f"from JSONL to columns, {2 if quick else 200} MB", "MB", contenders, ratios, notes
    )


def preparing_much(quick: bool, root: Path) -> Comparison:
    size = 4 if quick else 2000
    write_tokenizer(root / "tokenizer", 1 if quick else 20, 500 if quick else VOCABULARY)
    notes = [
        "peak memory of the verbs on the command line, pages that processes share counted once:"
    ]
    for megabytes in (2, 4) if quick else (20, 200, 2000):
        seconds, largest, together = peak_memory(root, megabytes)
        notes.append(
            f"ingest + prepare of {megabytes:,} MB: {seconds:.1f} s, {largest:,.0f} MB in the"
            f" largest process, {together:,.0f} MB in all together"
        )
    arguments = (str(root), str(write_corpus(root / "corpus.jsonl", size)))
    contenders = [
        Contender("ingot ingest + prepare", to_columns, arguments),
        Contender("gigatoken, keeping nothing", gigatoken_files, arguments),
    ]
    return Comparison(
        f"from JSONL to columns, {size:,} MB",
        "MB",
        contenders,
        [(contenders[0].name, contenders[1].name)],
        notes,
    )


def cleanings(quick: bool, root: Path) -> Comparison:
    corpus = write_corpus(root / "corpus.jsonl", 2 if quick else 100)
    write_tokenizer(root / "tokenizer", 1, 500)
    arguments = (str(root), str(corpus))
    contenders = [
        Contender("exact", cleaning, (*arguments, {"data.clean.exact": True})),
        Contender("exact, in plain Python", plain_folding, (str(corpus),)),
        Contender("fuzzy", cleaning, (*arguments, {"data.clean.fuzzy": {}})),
    ]
    return Comparison(
        f"cleaning {2 if quick else 100} MB",
        "MB",
        contenders,
        [("exact", "exact, in plain Python")],
    )


COMPARISONS: dict[str, Callable[[bool, Path], Comparison]] = {
    "prepare": preparing,
    "prepare-much": preparing_much,
    "clean": cleanings,
}
"""Name -> the comparison; the first argument asks for tiny sizes that only show that everything
runs.
"""
