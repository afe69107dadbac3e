"""Supervised fine-tuning: next-token prediction where the labels are what the assistant says, and nothing else."""

from __future__ import annotations

from ingot.objectives.pretrain import Pretrain


class SFT(Pretrain):
    """Cross-entropy over the tokens of assistant turns, their end-of-turn tokens included; the labels carry the choice."""

    name = "sft"
