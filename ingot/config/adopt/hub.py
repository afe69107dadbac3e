"""Names of models and data sets on the Hugging Face hub, as older projects write them."""

from __future__ import annotations

import re
from typing import NamedTuple

MOVED = {
    "roberta-base": "FacebookAI/roberta-base",
    "roberta-large": "FacebookAI/roberta-large",
    "xlm-roberta-base": "FacebookAI/xlm-roberta-base",
    "xlm-roberta-large": "FacebookAI/xlm-roberta-large",
    "distilroberta-base": "distilbert/distilroberta-base",
    "bert-base-uncased": "google-bert/bert-base-uncased",
    "bert-base-cased": "google-bert/bert-base-cased",
    "bert-large-uncased": "google-bert/bert-large-uncased",
    "distilbert-base-uncased": "distilbert/distilbert-base-uncased",
    "t5-small": "google-t5/t5-small",
    "t5-base": "google-t5/t5-base",
    "t5-large": "google-t5/t5-large",
    "t5-3b": "google-t5/t5-3b",
    "t5-11b": "google-t5/t5-11b",
    "cnn_dailymail": "abisee/cnn_dailymail",
    "xsum": "EdinburghNLP/xsum",
    "samsum": "Samsung/samsum",
    "ag_news": "fancyzhx/ag_news",
    "hellaswag": "Rowan/hellaswag",
}
"""Names from before every model and data set had an owner."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class Source(NamedTuple):
    """`source` as a recipe writes it; `moved`: the name of before, where the hub has another one
    now.
    """

    source: str
    moved: str = ""


def hub_source(name: str) -> Source:
    """`hf:ORG/NAME` for a name on the hub, and what is given for a path or an address."""
    name = name.removeprefix("hf:")
    if name in MOVED:
        return Source(f"hf:{MOVED[name]}", name)
    return Source(f"hf:{name}" if _NAME.fullmatch(name) else name)
