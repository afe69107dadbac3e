"""The loss of any model on the first held-out documents of a run, for a comparison of two forms of
the same model; `ingot evaluate` measures all of them, with intervals.
"""

from __future__ import annotations

from collections.abc import Callable

from ingot.base.errors import WrongInput
from ingot.config.models.lineage import read_lineage
from ingot.config.recipe import Recipe
from ingot.data.batches.loader import Batch, fixed_batches
from ingot.data.batches.rows import Rows
from ingot.data.batches.samples import Samples
from ingot.data.columns.manifest import prepared_for
from ingot.evaluate.loss import row_losses
from ingot.evaluate.tasks.loss import open_held_out
from ingot.models.kinds import AnyModel
from ingot.models.native.decoder import Decoder
from ingot.models.native.head import IGNORE

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

    batches = _predicting(rows)
    if not batches:
        return None, "no held-out row has a token to predict"

    def measure(model: AnyModel) -> float:
        assert isinstance(model, Decoder)
        found = [row_losses(model, [batch]) for batch in batches]
        nats = sum(float(losses.nll.sum()) for losses in found)
        return nats / sum(int(losses.targets.sum()) for losses in found)

    return measure, ""


def _predicting(rows: Rows | Samples) -> list[Batch]:
    """The first batches in which anything is predicted, up to `TARGETS` tokens or `ROWS` rows."""
    batches, targets = list[Batch](), 0
    for batch in fixed_batches(rows, range(len(rows)), MICRO_BATCH):
        count = int((batch.labels != IGNORE).sum())
        if count:
            batches.append(batch)
            targets += count
        if targets >= TARGETS or len(batches) * MICRO_BATCH >= ROWS:
            break
    return batches
