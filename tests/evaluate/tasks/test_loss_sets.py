"""What losses are measured on, so that a gate compares like with like: which texts, and which bytes
of them.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ingot.config.sections.evaluation import LossTask
from ingot.data.columns.manifest import prepared_for, set_identity
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.data.splits import Split
from ingot.evaluate.baselines import baselines
from ingot.evaluate.bigram import bigram_nll
from ingot.evaluate.corpus import open_columns, pairs
from ingot.evaluate.tasks import measure
from ingot.evaluate.tasks.loss import comparison_set, open_held_out
from ingot.parallel.mesh import running_mesh
from ingot.tokenizers.tokenizer import Tokenizer
from tests import tolerances
from tests.evaluate.small_models import place_model, subject_in, write_lines
from tests.evaluate.small_runs import recipe_of, records
from tests.small import small_recipe
from tests.tokenizers.small import bpe_files

SPLITS: tuple[Split, ...] = ("train", "validation")


@pytest.mark.parametrize("how", ["right", "drop"])
def test_chats_that_are_cut_otherwise_are_another_set(how: str, tmp_path: Path) -> None:
    """Of one length a gate may compare two models; of two it would compare other texts."""
    write_lines(tmp_path / "chat.jsonl", records("chat"))

    def found(seq_len: int, vocab_size: int = 400) -> str:
        knobs = {"data__truncate": how, "data__seq_len": seq_len}
        recipe = recipe_of(tmp_path, "chat", tokenizer__vocab_size=vocab_size, **knobs)
        prepare(recipe)
        made, rows = open_held_out(recipe, "the model", seq_len)
        return comparison_set(made.sets["validation"], rows, recipe, len(rows))

    ingest(recipe_of(tmp_path, "chat"))
    short, longer, whole = map(found, (34, 40, 96))
    assert len({short, longer, whole}) == 3
    assert whole == found(128), "nothing is cut"
    assert found(40, 300) != longer, "of other tokens"


@pytest.mark.parametrize("begins", [True, False])
def test_bytes_that_nothing_predicts_do_not_count(begins: bool, tmp_path: Path) -> None:
    """Of short texts the first token is much; without it, titles had fewer bits than they have. What
    it holds is up to the tokenizer, so that another one's bits are of other bytes.
    """
    tokenizer = Tokenizer(bpe_files(add_bos_token=begins))
    tokenizer.save(tmp_path / "tokenizer")
    held = {name: [f"{name} kettle", name, f"{name} naïve 大 lantern"] for name in ("red", "blue")}
    files = [
        str(write_lines(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts]))
        for name, texts in held.items()
    ]
    train = write_lines(tmp_path / "train.jsonl", [{"text": "copper lantern " * 200}])
    recipe = small_recipe(
        tmp_path,
        data__train=[{"source": str(train)}],
        data__validation=[{"source": source} for source in files],
        data__validation__fraction=None,
        tokenizer__source=str(tmp_path / "tokenizer"),
        tokenizer__vocab_size=None,
    )
    ingest(recipe)
    prepare(recipe)
    place_model(recipe, recipe.folder.model)
    with running_mesh() as mesh:
        found = measure(LossTask(), subject_in(recipe.folder.model, recipe, mesh))
    sizes = [
        len(text.encode()) - (0 if begins else len(tokenizer.decode(tokenizer.encode(text)[:1])))
        for texts in held.values()
        for text in texts
    ]
    assert [example["bytes"] for example in found.examples] == sizes
    bits = sum(example["nats"] for example in found.examples) / math.log(2)
    metrics = found.metrics
    assert metrics["loss/bits_per_byte"].value == pytest.approx(
        bits / sum(sizes), rel=tolerances.EXACT
    )
    made, tokens = prepared_for(recipe), metrics["loss/loss"].set_fingerprint
    on = made.sets["validation"] if begins else tokens
    assert metrics["loss/bits_per_byte"].set_fingerprint == on
    known, seen = (open_columns(recipe.folder.columns, made, split) for split in SPLITS)
    nats = bigram_nll(lambda: pairs(known), pairs(seen), made.vocab_size)
    bigram = baselines(recipe, made, ["bigram"])["bigram"]
    assert bigram == pytest.approx(nats / math.log(2) / sum(sizes), rel=tolerances.EXACT)
    of_red = set_identity(made.splits["validation"][:1])
    assert (metrics["loss/bits_per_byte/red.jsonl"].set_fingerprint == of_red) is begins
