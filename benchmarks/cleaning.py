"""Near-duplicates and contamination beside datatrove and text-dedup, with the same n-grams, bands
and rows, one process each, the peers in environments of their own. `python -m benchmarks.cleaning`.

The text is real, but most of it cannot come twice by chance: runs of four words of documentation
and programs in random order. Every tenth document is an earlier one of which two words in a hundred
are others, and every fiftieth holds a passage of a held-out document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.data import MB, texts
from benchmarks.environments import make_environment
from ingot.data.cleaning.ngrams import bands

ROOT, PROGRAMS = Path(__file__).parents[1], Path(__file__).parent / "contenders"
SIMILARITY, PERMUTATIONS = 0.8, 128
NGRAMS = {"fuzzy": 5, "contamination": 13}
CONTENDERS = {
    "fuzzy": ("ingot", "datatrove", "text-dedup"),
    "contamination": ("ingot", "datatrove"),
}
RUN, DOCUMENT, REMEMBERED = 4, 2000, 1000
"""Words that stay together, words of the longest document, documents that may come again."""


@dataclass(frozen=True)
class Played:
    """What one contender took; `cleaning` is its CPU seconds without reading, where it says."""

    name: str
    seconds: float
    cpu_seconds: float
    cleaning: float | None
    memory_bytes: int
    kept: int


def write_corpus(folder: Path, megabytes: float) -> tuple[Path, Path, int]:
    """The training documents, the held-out ones, and how many of the former there are."""
    draw, written, number = random.Random(1), 0, 0
    corpus, evaluation = folder / "corpus.jsonl", folder / "evaluation.jsonl"
    held_out = list(itertools.islice(_documents(draw), 200))
    evaluation.write_text("".join(map(_line, held_out)), encoding="utf-8")
    earlier = list[list[str]]()
    with corpus.open("w", encoding="utf-8") as stream:
        for words in _documents(draw):
            if number % 10 == 9:
                words = list(draw.choice(earlier))
                for _ in range(max(1, len(words) // 50)):
                    words[draw.randrange(len(words))] = f"changed{number}"
            elif number % 50 == 25:
                passage = draw.choice(held_out)
                words = [*words, *passage[: max(40, len(passage) // 4)]]
            if len(earlier) < REMEMBERED:
                earlier.append(words)
            else:
                earlier[draw.randrange(REMEMBERED)] = words
            written += stream.write(_line(words))
            number += 1
            if written >= megabytes * MB:
                return corpus, evaluation, number
    return corpus, evaluation, number


def _documents(draw: random.Random) -> Iterator[list[str]]:
    for text in texts():
        words = text.split()
        runs = [words[begin : begin + RUN] for begin in range(0, len(words), RUN)]
        draw.shuffle(runs)
        found = list(itertools.chain.from_iterable(runs))
        for begin in range(0, len(found), DOCUMENT):
            if len(part := found[begin : begin + DOCUMENT]) >= 50:
                yield part


def _line(words: list[str]) -> str:
    return json.dumps({"text": " ".join(words)}) + "\n"


def play(name: str, python: Path, step: str, task: dict[str, Any], folder: Path) -> Played:
    """Run one contender to its end."""
    own = folder / f"{name}-{step}"
    own.mkdir()
    described = own / "task.json"
    described.write_text(json.dumps({**task, "folder": str(own)}), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    with (own / "said.txt").open("w", encoding="utf-8") as said:
        process = subprocess.Popen(
            [
                str(python),
                str(PROGRAMS / f"{name.replace('-', '_')}_steps.py"),
                step,
                str(described),
            ],
            env=environment,
            stdout=said,
            stderr=said,
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{name} failed: {(own / 'said.txt').read_text(encoding='utf-8')[-2000:]}")
    answer = json.loads((own / "answer.json").read_text(encoding="utf-8"))
    return Played(
        name,
        time.monotonic() - began,
        usage.ru_utime + usage.ru_stime,
        answer.get("cpu_of_cleaning"),
        answer["memory_bytes"],
        answer["kept"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cleaning", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--steps", nargs="+", choices=NGRAMS, default=list(NGRAMS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS["fuzzy"])
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-peers")
    asked = parser.parse_args()
    named = asked.contenders or CONTENDERS["fuzzy"]
    contenders = {
        name: Path(sys.executable)
        if name == "ingot"
        else make_environment(asked.environments, name)
        for name in named
    }
    count, rows = bands(SIMILARITY, PERMUTATIONS)
    with tempfile.TemporaryDirectory() as root:
        corpus, evaluation, documents = write_corpus(Path(root), asked.megabytes)
        megabytes = corpus.stat().st_size / MB
        print(f"{megabytes:,.0f} MB, {documents:,} documents; {count} bands of {rows} rows")
        for step in asked.steps:
            task = {
                "corpus": str(corpus),
                "evaluation": str(evaluation),
                "ngram": NGRAMS[step],
                "similarity": SIMILARITY,
                "bands": count,
                "rows": rows,
            }
            for name in CONTENDERS[step]:
                if name in contenders:
                    played = play(name, contenders[name], step, task, Path(root))
                    _tell(step, megabytes, documents, played)


def _tell(step: str, megabytes: float, documents: int, played: Played) -> None:
    alone = (
        "" if played.cleaning is None else f", {megabytes / played.cleaning:.1f} without reading"
    )
    print(
        f"{step:14}{played.name:10}{megabytes / played.cpu_seconds:7.1f} MB per CPU second{alone};"
        f" {played.seconds:.0f} s, {played.memory_bytes / MB:,.0f} MB,"
        f" {documents - played.kept:,} dropped",
        flush=True,
    )


if __name__ == "__main__":
    main()
