"""datatrove's near-duplicates (MinHash) and n-gram decontamination over a JSONL file, one process.
Runs in datatrove's own environment: `python datatrove_steps.py STEP TASK.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.decont import NGramsDecontConfig, NGramsDecontFilter
from datatrove.pipeline.dedup import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import ngrams, simplify_text

from benchmarks.contenders.memory import peak_bytes


def fuzzy(task: dict[str, Any], folder: Path) -> None:
    config = MinhashConfig(
        hash_config=HashConfig(precision=64),
        n_grams=task["ngram"],
        num_buckets=task["bands"],
        hashes_per_bucket=task["rows"],
    )
    signatures, buckets, gone = (str(folder / name) for name in ("signatures", "buckets", "gone"))
    run(folder, [reader(task), MinhashDedupSignature(signatures, config=config)])
    run(folder, [MinhashDedupBuckets(signatures, buckets, config=config)], tasks=task["bands"])
    run(folder, [MinhashDedupCluster(buckets, gone, config=config)])
    run(folder, [reader(task), MinhashDedupFilter(gone), writer(folder)])


def contamination(task: dict[str, Any], folder: Path) -> None:
    config, index = NGramsDecontConfig(n_grams=task["ngram"]), folder / "index"
    index.mkdir(parents=True)
    search = NGramsDecontFilter(str(index), config=config)
    # As NGramsDecontIndexer does it, which cannot be made without lighteval.
    hashes = set[int]()
    with Path(task["evaluation"]).open(encoding="utf-8") as lines:
        for line in lines:
            text = simplify_text(json.loads(line)["text"], config.norm_config)
            words = search.tokenizer.word_tokenize(text)
            hashes.update(map(search.hash_func, map(" ".join, ngrams(words, config.n_grams))))
    np.array(list(hashes), config.hash_config.np_descr).tofile(index / "held-out.index.hashes")
    run(folder, [reader(task), search, writer(folder)])


def reader(task: dict[str, Any]) -> JsonlReader:
    return JsonlReader(str(Path(task["corpus"]).parent), glob_pattern=Path(task["corpus"]).name)


def writer(folder: Path) -> JsonlWriter:
    return JsonlWriter(str(folder / "kept"), compression=None)


def run(folder: Path, pipeline: list[Any], tasks: int = 1) -> None:
    LocalPipelineExecutor(
        pipeline,
        tasks=tasks,
        workers=1,
        logging_dir=str(folder / f"logs-{len(list(folder.iterdir()))}"),
    ).run()


STEPS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "fuzzy": fuzzy,
    "contamination": contamination,
}


if __name__ == "__main__":
    task = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    folder = Path(task["folder"])
    STEPS[sys.argv[1]](task, folder)
    kept = sum(1 for path in (folder / "kept").iterdir() for _ in path.open(encoding="utf-8"))
    answer = {"kept": kept, "memory_bytes": peak_bytes()}
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
