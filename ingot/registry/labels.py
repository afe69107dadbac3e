"""Names and numbers in the narrow alphabet of Google's labels and ids: lower case letters, digits,
hyphens, underscores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ingot.base.evaluation import EvaluationReport
from ingot.base.fingerprint import fingerprint

MOST_LABELS, MOST_CHARACTERS = 64, 63
KEY = "ingot-key"
"""The label of a version that says which model it is, by `key_of`."""
CONTAINER, ENGINE = "ingot-container", "ingot-engine"
"""The labels of a version that say in which container it is, by `container.Wanted.mark`, and what
answers there.
"""
_ID_CHARACTERS = 45


def label(text: str) -> str:
    """`text` as the value of a label; where that loses something it ends in a hash of the whole."""
    plain = re.sub(r"[^a-z0-9_-]", "-", text.lower())
    return (
        plain
        if plain == text and len(plain) <= MOST_CHARACTERS
        else f"{plain[:_ID_CHARACTERS]}-{fingerprint(text)[:8]}"
    )


def resource_id(name: str) -> str:
    """The id of the model and the endpoint of a registered name. No two names have the same."""
    plain = re.sub(r"[^a-z0-9-]", "-", name.lower())
    same = plain == name and len(plain) <= _ID_CHARACTERS and not plain.endswith("-")
    return (
        f"ingot-{plain}"
        if same
        else f"ingot-{plain[:_ID_CHARACTERS].rstrip('-')}-{fingerprint(name)[:8]}"
    )


def key_of(model_hash: str, tokenizer_hash: str) -> str:
    """Which model it is, with which tokenizer: a folder in the bucket, and a label."""
    return label(f"{model_hash}-{tokenizer_hash}")


def labels_of(
    report: EvaluationReport, ours: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """Labels of a version: `ours`, then those of the recipe, then as many metrics as there is room
    for, to look at: `loss_bits_per_byte: 0_8123`.
    """
    labels = {**{label(key): label(value) for key, value in given.items()}, **ours}
    for key, metric in sorted(report.metrics.items()):
        name = _metric(key)
        if len(labels) < MOST_LABELS and name not in labels:
            labels[name] = number(metric.value)
    return labels


def number(value: float) -> str:
    """Six digits of a number, its point an underscore."""
    return f"{value:.6g}".replace(".", "_").replace("+", "")


def _metric(key: str) -> str:
    plain = re.sub(r"[^a-z0-9_-]", "_", key.lower())
    plain = plain if plain[:1].isalpha() else f"m_{plain}"
    return (
        plain
        if len(plain) <= MOST_CHARACTERS
        else f"{plain[:_ID_CHARACTERS]}_{fingerprint(key)[:8]}"
    )
