"""The loss of any model on the first held-out documents of a run, for a comparison of two forms of
the same model; `ingot evaluate` measures all of them, with intervals.
"""

from __future__ import annotations

from collections.abc import Callable

from ingot.base.errors import WrongInput
from ingot.config.models.content import read_lineage
from ingot.config.recipe import Recipe
from ingot.data.batches.loader import fixed_batches
from ingot.data.columns.manifest import prepared_for
from ingot.evaluate.loss import row_losses
from ingot.evaluate.tasks.loss import open_held_out
from ingot.models.kinds import AnyModel
from ingot.models.native.decoder import Decoder

TARGETS = 4096
"""Rows are taken until so many tokens are predicted: minutes for billions of weights on a CPU."""
ROWS = 256
MICRO_BATCH = 4


def held_out_loss(recipe: Recipe | None) -> tuple[Callable[[AnyModel], float] | None, str]:
    """What measures the mean loss of the targets, in nats, of a decoder on the CPU in float32; or
    None, and the reason why there is no such loss. `recipe` None: no run is known.
    """
    if recipe is None:
        return None, "a model folder has no held-out documents; give its run folder"
    try:
        prepared = prepared_for(recipe)
        made = (read_lineage(recipe.folder.model) or {}).get("tokenizer")
        if prepared.tokenizer != made:
            return None, "the data was prepared again, with another tokenizer"
        _, rows = open_held_out(recipe, str(recipe.folder.model), recipe.data.seq_len)
    except WrongInput as error:
        return None, str(error)

    def measure(model: AnyModel) -> float:
        assert isinstance(model, Decoder)
        nats, targets = 0.0, 0
        for batch in fixed_batches(rows, range(min(len(rows), ROWS)), MICRO_BATCH):
            found = row_losses(model, [batch])
            nats, targets = nats + float(found.nll.sum()), targets + int(found.targets.sum())
            if targets >= TARGETS:
                break
        return nats / max(1, targets)

    return (measure, "") if len(rows) else (None, "the run has no held-out documents")
