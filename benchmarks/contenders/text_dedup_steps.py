"""text-dedup's near-duplicates (MinHash, with its fastest hash) over a JSONL file, one process.
Runs in text-dedup's own environment: `python text_dedup_steps.py fuzzy TASK.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import datasets
from text_dedup.minhash import main

from benchmarks.contenders.memory import peak_bytes

if __name__ == "__main__":
    task = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    folder = Path(task["folder"])
    options = {
        "path": "json",
        "data_files": task["corpus"],
        "split": "train",
        "column": "text",
        "cache_dir": folder / "cache",
        "output": folder / "kept",
        "num_proc": 1,
        "ngram": task["ngram"],
        "num_perm": task["bands"] * task["rows"],
        "b": task["bands"],
        "r": task["rows"],
        "threshold": task["similarity"],
        "hash_func": "xxh3",
        "hash_bits": 32,
    }
    main(
        [text for name, value in options.items() for text in (f"--{name}", str(value))],
        standalone_mode=False,
    )
    kept = len(datasets.load_from_disk(str(folder / "kept")))
    answer = {"kept": kept, "memory_bytes": peak_bytes()}
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
