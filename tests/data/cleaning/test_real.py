"""Real documentation in forty languages: what is found is alike, what is left is not, and a planted
copy does not get through.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ingot.data.cleaning.folding import digests, fold
from ingot.data.cleaning.ngrams import ngrams, words
from ingot.data.cleaning.steps.clusters import similarities
from tests.data.cleaning.small import kept, small

DOCUMENTS = 1500


@pytest.fixture(scope="module")
def texts(test_data: Path) -> list[str]:
    """Documents of the multilingual shard, and after them changed copies of some."""
    with gzip.open(test_data / "debian_docs" / "multi.jsonl.gz", "rt", encoding="utf-8") as lines:
        every = (
            json.loads(line)["text"] for line in itertools.islice(lines, 0, 20 * DOCUMENTS, 20)
        )
        found = [text for text in every if 400 < len(text) < 20_000]
    chance = random.Random(2)
    return (
        found
        + [text.upper() for text in chance.sample(found, 30)]
        + [f"{text} end" for text in chance.sample(found, 30)]
    )


def test_real_documents(tmp_path: Path, texts: list[str]) -> None:
    cleaned, documents = kept(small(tmp_path, texts, normalize="nfc", exact=True, fuzzy={}))
    assert cleaned.dropped["exact"] >= 30
    assert cleaned.dropped["fuzzy"] >= 30
    left = pa.array([text for _, text in documents])
    folded = fold(left)
    assert len(np.unique(digests(folded), axis=0)) == len(left)
    sets = ngrams(words(folded), 5).sets()
    every = [sets.values[begin:end] for begin, end in itertools.pairwise(sets.offsets)]
    alike = sum(
        int((similarities(one, every[place + 1 :]) >= 0.8).sum())
        for place, one in enumerate(every[:60])
    )
    assert alike == 0
    assert all(
        example.similarity is not None and example.similarity > 0.5
        for example in cleaned.report.steps[1].examples
    )
