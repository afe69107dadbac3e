"""ingot's near-duplicates and contamination over a JSONL file, one process: `ingest` and what
`prepare` does before it tokenises. `python ingot_steps.py STEP TASK.json`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.contenders.memory import peak_bytes
from ingot.config.load import load_recipe
from ingot.data.cleaning.clean import clean
from ingot.data.engines.local import LocalEngine
from ingot.data.ingest import ingest
from ingot.data.raw.store import open_raw


def knobs_of(step: str, task: dict[str, Any]) -> dict[str, Any]:
    if step == "fuzzy":
        permutations = task["bands"] * task["rows"]
        return {
            "data.clean.fuzzy": {
                "ngram": task["ngram"],
                "similarity": task["similarity"],
                "permutations": permutations,
            }
        }
    return {
        "data.clean.contamination": {"ngram": task["ngram"]},
        "data.validation": [{"source": task["evaluation"]}],
    }


def main(step: str, task: dict[str, Any]) -> None:
    knobs = {
        "name": step,
        "output": task["folder"],
        "data.train": [{"source": task["corpus"]}],
        "data.engine.workers": 1,
        "tokenizer.source": "train",
        **knobs_of(step, task),
    }
    recipe = load_recipe(
        (),
        [f"{knob}={json.dumps(value)}" for knob, value in knobs.items()],
        environ={},
        dotenv=None,
    )
    ingest(recipe)
    ingested = time.process_time()
    raw = open_raw(recipe)
    cleaned = clean(recipe, raw, LocalEngine(1))
    kept = sum(source.documents for source in raw.splits["train"]) - sum(cleaned.dropped.values())
    answer = {
        "kept": kept,
        "cpu_of_cleaning": time.process_time() - ingested,
        "memory_bytes": peak_bytes(),
    }
    (Path(task["folder"]) / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
