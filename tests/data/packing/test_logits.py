"""A document in a packed row gives the logits and losses that it gives alone, whatever it shares
the row with.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.base.progress import Progress
from ingot.config.models.presets import preset
from ingot.data.batches.loader import Batch, fixed_batches
from ingot.data.batches.rows import IGNORE, open_rows
from ingot.data.columns.manifest import read_prepared
from ingot.data.engines.local import LocalEngine
from ingot.data.packing.tables import pack
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from tests import tolerances
from tests.data.batches.test_rows import write

SEQ_LEN, VOCAB_SIZE = 48, 99
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
}


@pytest.fixture(scope="module")
def model() -> Decoder:
    made = Decoder(DecoderConfig.from_hf({**preset("llama-3m"), **TINY}))
    init_weights(made, 0)
    return made.eval()


def documents(seed: int = 0) -> list[list[int]]:
    """Some shorter than a row, some as long, some that are split."""
    random = np.random.default_rng(seed)
    lengths = [3, 48, 5, 20, 23, 49, 7, 110, 31, 2, 11, 40]
    return [random.integers(1, VOCAB_SIZE, length).tolist() for length in lengths]


def packed(folder: Path, how: str, *, masked: bool) -> Batch:
    """All rows of the documents in one batch."""
    texts = documents()
    masks = [[int(place % 3 > 0) for place in range(len(text))] for text in texts]
    write(folder, [[texts]], masks=[[masks]] if masked else None)
    if how != "cut":
        pack(
            folder,
            read_prepared(folder),
            SEQ_LEN,
            how,
            LocalEngine(1),
            Progress("pack", None, "MB", quiet=True),
        )
    rows = open_rows(folder, "train", SEQ_LEN, pack=how, pad_last=True)
    return next(fixed_batches(rows, range(len(rows)), len(rows)))


def alone(model: Decoder, batch: Batch) -> float:
    """How far the logits of any document in any row lie from what the same tokens give by
    themselves.
    """
    worst = 0.0
    with torch.no_grad():
        together = model.logits(model.hidden(batch.tokens, batch.positions, batch.segments))
        for row in range(len(batch.tokens)):
            for segment in range(1, int(batch.segments[row].max()) + 1):
                here = batch.segments[row] == segment
                tokens = batch.tokens[row, here][None]
                by_itself = model.logits(model.hidden(tokens, torch.arange(tokens.shape[1])[None]))
                worst = max(worst, float((together[row, here] - by_itself[0]).abs().max()))
    return worst


@pytest.mark.parametrize(
    ("how", "masked"), [("cut", False), ("best_fit", False), ("none", False), ("best_fit", True)]
)
def test_packed_is_as_alone(model: Decoder, how: str, masked: bool, tmp_path: Path) -> None:
    batch = packed(tmp_path, how, masked=masked)
    assert how == "none" or int(batch.segments.max()) > 1
    assert alone(model, batch) < tolerances.PACKED


@pytest.mark.parametrize("leak", ["segments", "positions"])
def test_a_planted_leak_is_seen(model: Decoder, leak: str, tmp_path: Path) -> None:
    """Documents that see each other, and ones whose positions go on from the one before with
    nothing seen.
    """
    batch = packed(tmp_path, "best_fit", masked=False)
    if leak == "segments":
        joined = Batch(batch.tokens, batch.labels, batch.positions, torch.ones_like(batch.segments))
        with torch.no_grad():
            seen, apart = (
                model.logits(model.hidden(one.tokens, one.positions, one.segments))
                for one in (joined, batch)
            )
        assert float((seen - apart)[batch.segments > 1].abs().max()) > 100 * tolerances.PACKED
    else:
        # Rotary positions are relative: shifted as a whole they change nothing, restarted within a
        # document they do.
        wrong = Batch(batch.tokens, batch.labels, batch.positions % 5, batch.segments)
        assert alone(model, wrong) > 100 * tolerances.PACKED


def test_the_loss_of_split_documents_is_that_of_their_pieces(
    model: Decoder, tmp_path: Path
) -> None:
    """Summed over rows, the loss is that of every target after what of its document lies before it
    in its row.
    """
    batch = packed(tmp_path, "best_fit", masked=False)
    with torch.no_grad():
        logits = model.logits(model.hidden(batch.tokens, batch.positions, batch.segments)).double()
        ours = float(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum"
            )
        )
        expected, targets = 0.0, 0
        for document in documents():
            for begin in range(0, len(document) - 1, SEQ_LEN):
                tokens, labels = (
                    document[begin : begin + SEQ_LEN],
                    document[begin + 1 : begin + SEQ_LEN + 1],
                )
                by_itself = model.logits(
                    model.hidden(torch.tensor([tokens]), torch.arange(len(tokens))[None])
                ).double()[0, : len(labels)]
                expected += float(
                    torch.nn.functional.cross_entropy(
                        by_itself, torch.tensor(labels), reduction="sum"
                    )
                )
                targets += len(labels)
    assert (
        int((batch.labels != IGNORE).sum())
        == targets
        == sum(len(document) - 1 for document in documents())
    )
    assert ours == pytest.approx(expected, rel=tolerances.LOSS_FP32)
