"""The benchmark of cleaning runs: what is planted is found, and the peak is the process's own."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.cleaning import NGRAMS, SIMILARITY, play, write_corpus
from ingot.data.cleaning.ngrams import bands


def test_near_duplicates_of_a_small_corpus(tmp_path: Path) -> None:
    corpus, evaluation, documents = write_corpus(tmp_path, 0.3)
    count, rows = bands(SIMILARITY, 128)
    task = {
        "corpus": str(corpus),
        "evaluation": str(evaluation),
        "ngram": NGRAMS["fuzzy"],
        "similarity": SIMILARITY,
        "bands": count,
        "rows": rows,
    }
    played = play("ingot", Path(sys.executable), "fuzzy", task, tmp_path)
    assert 0 < documents - played.kept <= documents // 10 + 1
    assert 0 < (played.cleaning or 0) < played.cpu_seconds
    assert 10e6 < played.memory_bytes < 10e9
