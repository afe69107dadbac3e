"""A small run for every way of training: documents that we made up, models that start from nothing,
prepared data.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.train.trainer import train
from tests.small import TINY_MODEL, WORDS, small_recipe, write_documents

T5 = {
    "model_type": "t5",
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": 400,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": True,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 400,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
WAYS: dict[str, dict[str, Any]] = {
    "pretrain": {},
    "pretrain-best-fit": {"data__pack": "best_fit"},
    "sft": {"objective__kind": "sft"},
    # Dropout and noise too: they depend on the sample alone.
    "sft-lora": {
        "objective__kind": "sft",
        "model__source": "TEACHER",
        "model__neftune_alpha": 5.0,
        "model__lora": {"rank": 4, "alpha": 8, "dropout": 0.2},
    },
    "dpo-lora": {
        "objective": {"kind": "dpo", "beta": 0.5},
        "data__seq_len": 64,
        "model__source": "TEACHER",
        "model__neftune_alpha": 5.0,
        "model__lora": {"rank": 4, "dropout": 0.2},
    },
    "dpo": {"objective": {"kind": "dpo", "beta": 0.5}, "data__seq_len": 64},
    # With and without a reference, per token and as a whole, with a second term.
    "ipo": {"objective": {"kind": "ipo", "beta": 0.5}, "data__seq_len": 64},
    "simpo": {"objective": {"kind": "simpo", "sft_weight": 0.2}, "data__seq_len": 64},
    "orpo": {"objective": {"kind": "orpo", "beta": 0.5}, "data__seq_len": 64},
    "kto": {"objective": {"kind": "kto", "beta": 0.5}, "data__seq_len": 64},
    "kto-lora": {
        "objective": {"kind": "kto", "beta": 0.5, "undesirable_weight": 1.5},
        "data__seq_len": 64,
        "model__source": "TEACHER",
        "model__lora": {"rank": 4, "dropout": 0.2},
    },
    # A model of transformers' that starts from nothing, or from a decoder with a head of its own.
    "reward": {
        "objective": {"kind": "reward", "margin": 0.2, "center": 0.05},
        "data__seq_len": 64,
    },
    "reward-lora": {
        "objective": {"kind": "reward"},
        "data__seq_len": 64,
        "model__source": "TEACHER",
        "model__lora": {"rank": 4, "alpha": 8},
    },
    "distill": {"objective": {"kind": "distill", "teacher": "TEACHER"}},
    "distill-chats": {"objective": {"kind": "distill", "teacher": "TEACHER", "documents": "chat"}},
    "seq2seq": {"objective": {"kind": "seq2seq", "prefix": "short: "}, "data__target_len": 16},
    "classify": {"objective": {"kind": "classify", "labels": ["cold", "hot"]}},
    "mlm": {"objective": {"kind": "mlm"}},
    "mlm-packed": {"objective": {"kind": "mlm"}, "data__pack": "best_fit"},
    "span_corruption": {"objective": {"kind": "span_corruption"}},
}
FROM_NOTHING = {
    "seq2seq": "t5",
    "classify": "bert",
    "mlm": "bert",
    "mlm-packed": "bert",
    "span_corruption": "t5",
}
"""Configurations of the models that are not decoders."""
SOURCES = {
    "sft": "chats",
    "sft-lora": "chats",
    "distill-chats": "chats",
    "dpo": "preferences",
    "dpo-lora": "preferences",
    "ipo": "preferences",
    "simpo": "preferences",
    "orpo": "preferences",
    "kto": "rated",
    "kto-lora": "rated",
    "reward": "preferences",
    "reward-lora": "preferences",
    "seq2seq": "pairs",
    "classify": "labelled",
}


def said(generator: random.Random, most: int = 12) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(2, most)))


def write_all(root: Path, count: int = 60) -> None:
    """Documents of every kind, of very different lengths, and the configurations of models that
    start from nothing.
    """
    generator = random.Random(0)
    write_documents(root / "text")
    lines: dict[str, list[dict[str, Any]]] = {
        "chats": [],
        "preferences": [],
        "rated": [],
        "pairs": [],
        "labelled": [],
    }
    for number in range(count):
        question, answer, worse = (
            f"{said(generator)} {number}?",
            said(generator),
            f"{said(generator, 6)} not",
        )
        lines["chats"].append(
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
        lines["preferences"].append({"prompt": question, "chosen": answer, "rejected": worse})
        good = number % 3 > 0
        given = answer if good else worse
        lines["rated"].append({"prompt": question, "completion": given, "label": good})
        lines["pairs"].append({"source": f"{question} {said(generator)}", "target": answer})
        verb, label = ("burns", "hot") if number % 2 else ("freezes", "cold")
        lines["labelled"].append(
            {"text": f"{said(generator)} {verb} {said(generator)}", "label": label}
        )
    for name, records in lines.items():
        (root / f"{name}.jsonl").write_text(
            "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
            encoding="utf-8",
        )
    for name, config in (("t5", T5), ("bert", BERT)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))


def recipe_of(root: Path, way: str, **knobs: Any) -> Recipe:
    """The small recipe of one way of training, its run in `root/runs/WAY`."""
    source = root / f"{SOURCES[way]}.jsonl" if way in SOURCES else root / "text"
    given: dict[str, Any] = {
        "name": way,
        "data__train": [{"source": str(source)}],
        "data__validation__fraction": 0.2,
        "data__seq_len": 48,
        "tokenizer__template": "chatml",
        "tokenizer__vocab_size": 400,
        "train__optimizer__lr": 0.003,
        **WAYS[way],
        **knobs,
    }
    if "TEACHER" in str(given):
        # The tokenizer that the teacher was trained with.
        given |= {
            "tokenizer__source": str(root / "runs" / "teacher" / "model"),
            "tokenizer__vocab_size": None,
        }
        if given.get("model__source") == "TEACHER":
            given |= {"model__source": str(root / "runs" / "teacher"), "model__config": None}
        else:
            given["objective"] = {**given["objective"], "teacher": str(root / "runs" / "teacher")}
    if way in FROM_NOTHING and "model__source" not in knobs:
        given |= {
            "model__source": str(root / FROM_NOTHING[way]),
            "model__init": "random",
            "model__config": knobs.get("model__config"),
        }
    return small_recipe(root, **given)


def make_ready(root: Path, ways: Iterable[str] = tuple(WAYS)) -> Path:
    """`root` with the documents of all ways, those of `ways` ingested and prepared, and a teacher
    trained where one of them needs it.
    """
    write_all(root)
    for way in ways:
        prepare_way(root, way)
    return root


def prepare_way(root: Path, way: str) -> None:
    """Ingest and prepare the data of one way, once."""
    if "TEACHER" in str(WAYS[way]) and not (root / "runs" / "teacher").exists():
        teacher = recipe_of(
            root,
            "sft",
            name="teacher",
            model__config={**TINY_MODEL, "hidden_size": 48},
            train__steps=4,
        )
        ingest(teacher)
        prepare(teacher)
        train(teacher)
    recipe = recipe_of(root, way)
    if not recipe.folder.data.exists():
        ingest(recipe)
        prepare(recipe)
