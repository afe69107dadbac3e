"""`prepare` on Spark's local[2] against this machine's own two processes, turn by turn; Spark's
session is started before.

`python -m benchmarks.spark [--megabytes 100] [--rounds 3]`; the ratio asked of it is at most 1.6.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.data import VOCABULARY, recipe_over, write_corpus, write_tokenizer
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare

MOST = 1.6
SPARK = {
    "kind": "spark",
    "master": "local[2]",
    "conf": {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
    },
}
ENGINES: dict[str, dict[str, Any]] = {"local": {"kind": "local", "workers": 2}, "spark": SPARK}


def recipes(root: Path, megabytes: float, learnt_mb: float, vocabulary: int) -> dict[str, Recipe]:
    """A run for each engine, both over one corpus and ingested."""
    corpus = write_corpus(root / "corpus.jsonl", megabytes)
    write_tokenizer(root / "tokenizer", learnt_mb, vocabulary)
    made = {
        name: recipe_over(root, corpus, name=name, **{"data.engine": engine})
        for name, engine in ENGINES.items()
    }
    for recipe in made.values():
        ingest(recipe)
    return made


def seconds(recipe: Recipe) -> float:
    """How long `prepare` takes from raw documents to checked and flushed columns."""
    shutil.rmtree(recipe.folder.columns, ignore_errors=True)
    began = time.perf_counter()
    prepare(recipe)
    return time.perf_counter() - began


def measure(
    root: Path, megabytes: float, rounds: int, learnt_mb: float = 5.0, vocabulary: int = VOCABULARY
) -> list[tuple[float, float]]:
    """Seconds of (local, spark), a pair a round, each round the other one first."""
    made = recipes(root, megabytes, learnt_mb, vocabulary)
    (root / "small").mkdir()
    prepare(
        recipes(root / "small", 0.5, 0.2, 300)["spark"]
    )  # so that the session is there before the clock runs
    found = []
    for turn in range(rounds):
        took = {
            name: seconds(made[name])
            for name in (sorted(made) if turn % 2 else sorted(made, reverse=True))
        }
        found.append((took["local"], took["spark"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ingot-spark-") as root:
        pairs = measure(Path(root), options.megabytes, options.rounds)
    for local, spark in pairs:
        speeds = (
            f"local {local:.1f} s ({options.megabytes / local:.1f} MB/s)  spark {spark:.1f} s"
            f" ({options.megabytes / spark:.1f} MB/s)"
        )
        print(f"{speeds}  ratio {spark / local:.2f}")
    ratio = statistics.median(spark / local for local, spark in pairs)
    print(f"median ratio {ratio:.2f} (at most {MOST} is asked)")


if __name__ == "__main__":
    main()
