"""What losses are measured on, so that a gate compares like with like: which texts, and which bytes
of them.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.config.sections.evaluation import LossTask
from ingot.data.columns.manifest import prepared_for, set_identity
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.data.splits import Split
from ingot.evaluate.baselines import baselines
from ingot.evaluate.bigram import bigram_nll
from ingot.evaluate.corpus import open_columns, pairs
from ingot.evaluate.tasks import measure
from ingot.evaluate.tasks.loss import comparison_set, open_held_out, open_loss
from ingot.parallel.mesh import running_mesh
from ingot.tokenizers.tokenizer import Tokenizer
from tests import tolerances
from tests.evaluate.small_models import place_model, subject_in, write_lines
from tests.evaluate.small_runs import recipe_of, records
from tests.small import small_recipe
from tests.tokenizers.small import bpe_files

SPLITS: tuple[Split, ...] = ("train", "validation")


@pytest.mark.drawn(keep=3)
@pytest.mark.parametrize(
    ("documents", "how", "lengths", "is_alike"),
    [
        ("chat", "right", (34, 40), False),
        ("chat", "drop", (34, 40), False),
        ("preference", "right", (26, 30), False),
        ("rated", "right", (34, 40), False),
        ("pair", "right", (12, 16), False),
        ("labelled", "right", (18, 22), True),
        ("labelled", "drop", (18, 22), False),
    ],
)
def test_what_is_cut_otherwise_is_another_set(
    documents: str, how: str, lengths: tuple[int, int], is_alike: bool, tmp_path: Path
) -> None:
    """Of one length a gate may compare two models; of two it would compare other texts. `is_alike`:
    another tokenizer cuts elsewhere, but what is predicted is the same.
    """
    write_lines(tmp_path / f"{documents}.jsonl", records(documents))

    def found(seq_len: int, vocab_size: int = 400) -> str:
        knobs = {"data__truncate": how, "data__seq_len": seq_len, "data__target_len": 96}
        recipe = recipe_of(tmp_path, documents, tokenizer__vocab_size=vocab_size, **knobs)
        prepare(recipe)
        made, rows = open_held_out(recipe, "the model", seq_len)
        return comparison_set(made.sets["validation"], rows, recipe, len(rows))

    ingest(recipe_of(tmp_path, documents))
    short, longer, whole = map(found, (*lengths, 96))
    assert len({short, longer, whole}) == 3
    assert whole == found(128), "nothing is cut"
    assert (found(lengths[1], 300) == longer) is is_alike, "of other tokens"


def test_texts_that_a_longer_window_takes_whole_are_another_set(tmp_path: Path) -> None:
    """A model that sees more of a text before it is not better for that."""
    write_lines(tmp_path / "held.jsonl", [{"text": "copper lantern kettle"}])
    write_lines(tmp_path / "train.jsonl", [{"text": "copper lantern kettle " * 100}])

    def found(seq_len: int) -> str:
        recipe = small_recipe(
            tmp_path,
            data__train=[{"source": str(tmp_path / "train.jsonl")}],
            data__validation=[{"source": str(tmp_path / "held.jsonl")}],
            data__validation__fraction=None,
            data__seq_len=seq_len,
        )
        ingest(recipe)
        prepare(recipe)
        place_model(recipe, recipe.folder.model)
        with running_mesh() as mesh:
            metrics = measure(LossTask(), subject_in(recipe.folder.model, recipe, mesh)).metrics
        return metrics["loss/bits_per_byte"].set_fingerprint

    assert len({found(4), found(6)}) == 2
    assert found(32) == found(64), "nothing is cut"


def test_rows_that_end_no_text_are_refused_before_they_are_measured(tmp_path: Path) -> None:
    """Of a book the first rows are no whole text: nothing could be told of them."""
    write_lines(tmp_path / "held.jsonl", [{"text": "copper lantern kettle " * 20}])
    write_lines(tmp_path / "train.jsonl", [{"text": "copper lantern kettle " * 100}])
    recipe = small_recipe(
        tmp_path,
        data__train=[{"source": str(tmp_path / "train.jsonl")}],
        data__validation=[{"source": str(tmp_path / "held.jsonl")}],
        data__validation__fraction=None,
        data__seq_len=8,
    )
    ingest(recipe)
    prepare(recipe)
    place_model(recipe, recipe.folder.model)
    with running_mesh() as mesh:
        subject = subject_in(recipe.folder.model, recipe, mesh)
        with pytest.raises(WrongInput, match="ends in so many rows of 8 tokens; set it") as refused:
            open_loss(LossTask(), subject.info, 2)
        enough = int(re.findall(r"to (\d+) or more", str(refused.value))[0])
        assert open_loss(LossTask(), subject.info, enough).measure(subject).examples
        with pytest.raises(WrongInput, match=r"train\.evaluate_rows"):
            open_loss(LossTask(), subject.info, enough - 1)


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
        data__seq_len=128,
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
