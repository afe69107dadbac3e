"""Layouts beyond those that a user's recipe is proved in: `ingot verify layout` leaves them to us."""

from __future__ import annotations

from typing import Any

from ingot.verify.layout.modes import MODES, Layout, layout, mode_pairs, unique

PAIRED = (
    "replicate",
    "shard",
    "tensor",
    "1f1b",
    "zero bubble",
    "ring",
    "ulysses",
    "full",
    "selective",
)
"""The modes that are tried in pairs, except two of the same knob."""

PRODUCTS: tuple[dict[str, Any], ...] = (
    {"shard": 4},
    {"shard": 8},
    {"tensor": 4},
    {"pipeline": 4, "schedule": "1f1b"},
    {"context": 4},
    {"shard": 2, "tensor": 2, "pipeline": 2, "schedule": "1f1b"},
    {"context": 2, "tensor": 2, "shard": 2},
    {"context": 2, "context_by": "ulysses", "tensor": 2, "shard": 2},
    {"replicate": 2, "shard": 2, "tensor": 2},
    {"replicate": 2, "shard": 2, "context": 2},
    {"replicate": 2, "shard": 2, "pipeline": 2, "schedule": "gpipe"},
    {"tensor": 2, "context": 2, "pipeline": 2, "schedule": "1f1b"},
    {"shard": 2, "context": 2, "pipeline": 2, "virtual": 2, "schedule": "interleaved"},
    {
        "shard": 2,
        "tensor": 2,
        "pipeline": 2,
        "virtual": 2,
        "schedule": "zero_bubble",
        "reshard": False,
    },
    {"shard": 2, "reshard": False, "tensor": 2, "sequence": False, "recompute": "selective"},
    {"shard": 2, "tensor": 4},
)
"""Layouts with more than two ranks along one axis, or with three or four modes together."""


def all_layouts() -> list[Layout]:
    """Every mode alone, every pair of modes, and the products."""
    return unique(
        [
            *(layout(**knobs) for knobs in MODES.values()),
            *mode_pairs(PAIRED),
            *(layout(**knobs) for knobs in PRODUCTS),
        ]
    )
