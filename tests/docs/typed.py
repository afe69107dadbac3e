"""What a page tells its reader to type, and what makes it small: variables of the environment beat
the recipe's file, so the same commands train for seconds on a tiny model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.small import TINY_MODEL

PROJECT = Path(__file__).resolve().parents[2]
SHORT = {
    "INGOT_TRAIN__STEPS": "6",
    "INGOT_TRAIN__EVALUATE_EVERY": "3",
    "INGOT_TRAIN__EVALUATE_ROWS": "8",
    "INGOT_CHECKPOINT__EVERY": "4",
    "INGOT_EVALUATE__SAMPLE_TOKENS": "4",
    "INGOT_DATA__VALIDATION__FRACTION": "0.002",
    "INGOT_DATA__FRACTION": "0.05",
}
"""The quick start as it is, for a few steps."""
SMALLEST = {
    **SHORT,
    "INGOT_DATA__VALIDATION__FRACTION": "0.1",
    "INGOT_DATA__FRACTION": "1.0",
    "INGOT_DATA__TRAIN": "[{source: text}]",
    "INGOT_DATA__SEQ_LEN": "32",
    "INGOT_DATA__ENGINE__WORKERS": "1",
    "INGOT_TOKENIZER__VOCAB_SIZE": "320",
    "INGOT_MODEL__CONFIG": json.dumps(TINY_MODEL),
    "INGOT_TRAIN__GLOBAL_BATCH": "4",
    "INGOT_TRAIN__MICRO_BATCH": "2",
    "INGOT_TRACK__TENSORBOARD": "false",
    "OMP_NUM_THREADS": "1",
}
"""The quick start on a tiny model and the texts of `tests.small.write_documents` in `text/`."""
TUNED = {
    "INGOT_TRAIN__GLOBAL_BATCH": "2",
    "INGOT_TRAIN__MICRO_BATCH": "2",
    "INGOT_TRAIN__STEPS": "2",
    "INGOT_TRAIN__EPOCHS": "null",
    "INGOT_DATA__SEQ_LEN": "96",
    "INGOT_DATA__FRACTION": "1.0",
    "INGOT_DATA__VALIDATION__FRACTION": "0.1",
    "INGOT_DATA__ENGINE__WORKERS": "1",
    "INGOT_EVALUATE__SAMPLE_TOKENS": "4",
    "INGOT_TRACK__TENSORBOARD": "false",
    "OMP_NUM_THREADS": "1",
}
"""A recipe that tunes a model folder, for two steps."""


def page(name: str) -> str:
    """The text of a page by its path in the project."""
    return (PROJECT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
