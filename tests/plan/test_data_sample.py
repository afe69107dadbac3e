"""Lengths beside rows: a sample of the sources against what `prepare` makes of all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.data import sample
from ingot.data import sample as sampling
from ingot.data.columns.manifest import prepared_for
from ingot.data.ingest import ingest
from ingot.data.packing.tables import read_packed
from ingot.data.prepare import prepare
from ingot.data.sample import NotHere, sample_sources
from ingot.plan import data_sample as room
from ingot.plan.assemble import data_sample
from ingot.plan.checks.recipe import judge_data, judge_unknown
from ingot.plan.data_sample import ColumnLengths, data_bytes, look_at_data
from ingot.plan.ranges import Range
from ingot.plan.run_cost import PreparationCost, preparation_cost
from ingot.plan.unknown import Unknown
from ingot.verify.data import verify_data
from tests.objectives.ways import prepare_way, recipe_of, write_all
from tests.plan.test_run_cost import cost
from tests.small import small_recipe, write_documents

WORDS = [
    "copper",
    "melts",
    "and",
    "the",
    "bright",
    "mould",
    "cools",
    "slowly",
    "while",
    "it",
    "rings",
    "true",
]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.mark.parametrize("pack", ["cut", "best_fit"])
def test_a_sample_says_beforehand_what_prepare_finds(tmp_path: Path, pack: str) -> None:
    write_documents(tmp_path / "text", 120)
    recipe = small_recipe(tmp_path, data__pack=pack)
    before = look_at_data(recipe)
    wanted = preparation_cost(recipe, before.text_bytes)
    assert isinstance(wanted.seconds, Range)
    assert wanted.seconds.low > 0
    ingest(recipe)
    prepare(recipe)
    after = look_at_data(recipe)
    done = Range.exactly(0.0, "measured")
    assert preparation_cost(recipe, after.text_bytes) == PreparationCost(done, done)
    assert after.about.startswith("all ")
    assert before.rows is not None
    assert after.rows is not None
    assert after.rows.origin == "measured"
    assert after.rows.low == after.rows.high
    assert before.rows.low <= after.rows.likely <= before.rows.high
    assert before.columns["tokens"].median == pytest.approx(after.columns["tokens"].median, rel=0.2)
    assert before.padding == pytest.approx(after.padding, abs=0.02)
    room = data_bytes(recipe, after)
    files = sum(path.stat().st_size for path in recipe.folder.data.rglob("*") if path.is_file())
    assert not isinstance(room, Unknown)
    assert (room.likely, room.origin) == (files, "measured")


def test_more_workers_prepare_sooner_and_chats_take_longer(tmp_path: Path) -> None:
    write_documents(tmp_path / "text", 20)
    one, four, chats, spark = (
        small_recipe(tmp_path, **knobs)
        for knobs in (
            {"data__engine": {"kind": "local", "workers": 1}},
            {"data__engine": {"kind": "local", "workers": 4}},
            {"objective__kind": "sft", "tokenizer__template": "alpaca"},
            {"data__engine": {"kind": "spark"}},
        )
    )
    size = Range.exactly(1e12)
    alone, shared = (preparation_cost(recipe, size) for recipe in (one, four))
    assert alone.core_s == alone.seconds == shared.core_s
    assert isinstance(alone.seconds, Range)
    assert isinstance(shared.seconds, Range)
    assert shared.seconds.likely == pytest.approx(alone.seconds.likely / 4, rel=1e-3)
    slower = preparation_cost(chats, size).core_s
    assert isinstance(slower, Range)
    assert slower.likely > alone.seconds.likely
    assert preparation_cost(spark, size).core_s == alone.core_s
    assert isinstance(preparation_cost(spark, size).seconds, Unknown)


def test_rows_are_those_of_the_row_tables(tmp_path: Path) -> None:
    write_documents(tmp_path / "text", 60)
    recipe = small_recipe(tmp_path, data__pack="best_fit")
    ingest(recipe)
    prepare(recipe)
    packed = read_packed(
        recipe.folder.columns, prepared_for(recipe), recipe.data.seq_len, "best_fit"
    )
    found = look_at_data(recipe)
    assert found.rows is not None
    assert found.rows.likely == sum(map(sum, packed.rows["train"]))
    assert found.padding == pytest.approx(packed.padding)


def test_targets_beyond_the_row_are_counted_as_lost(tmp_path: Path) -> None:
    long, short = " ".join(WORDS * 3), "yes"
    chats = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]}
        for answer in (long, short) * 20
    ]
    source = write_jsonl(tmp_path / "chats.jsonl", chats)
    knobs: dict[str, Any] = {
        "objective__kind": "sft",
        "data__train": [{"source": str(source)}],
        "tokenizer__template": "alpaca",
    }
    whole = look_at_data(small_recipe(tmp_path, data__seq_len=512, **knobs))
    assert (whole.truncated, whole.left_out, whole.lost_targets) == (0.0, 0.0, 0.0)
    shortest = int(whole.columns["tokens"].low)
    cut = look_at_data(small_recipe(tmp_path, data__seq_len=shortest + 10, **knobs))
    assert cut.truncated == pytest.approx(0.5, abs=0.01)
    assert cut.lost_targets is not None
    assert 0.1 < cut.lost_targets < 0.95
    for other in ("left", "drop"):  # what is cut elsewhere is not counted
        knobs["data__truncate"] = other
        cut = look_at_data(small_recipe(tmp_path, data__seq_len=shortest + 10, **knobs))
        assert cut.lost_targets is None
    knobs["data__truncate"] = "right"
    gone = look_at_data(small_recipe(tmp_path, data__seq_len=8, **knobs))
    assert gone.left_out > 0.9, "the prompt alone fills the row"


def test_of_pairs_only_what_is_written_counts_as_a_target(tmp_path: Path) -> None:
    pairs = [{"source": " ".join(WORDS * 4), "target": " ".join(WORDS[:8])} for _ in range(30)]
    source = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    recipe = small_recipe(
        tmp_path,
        objective__kind="seq2seq",
        model__source="preset:t5-3m",
        model__config={},
        data__train=[{"source": str(source)}],
        data__seq_len=16,
        data__target_len=64,
    )
    found = look_at_data(recipe)
    assert found.columns["source"].beyond > 0.1
    assert found.lost_targets == 0.0
    less = recipe.model_copy(update={"data": recipe.data.model_copy(update={"target_len": 3})})
    assert (look_at_data(less).lost_targets or 0.0) > 0.2


def test_texts_lose_nothing_since_they_go_on_in_another_row(tmp_path: Path) -> None:
    write_documents(tmp_path / "text", 40)
    found = look_at_data(small_recipe(tmp_path, data__seq_len=8))
    assert found.columns["tokens"].longer > 0.9
    assert (found.truncated, found.lost_targets) == (0.0, 0.0)


def rows_told_and_there(recipe: Recipe) -> tuple[Range, Range]:
    """The rows that a sample promises, and those that `prepare` makes."""
    before = look_at_data(recipe)
    ingest(recipe)
    prepare(recipe)
    after = look_at_data(recipe)
    assert before.rows is not None
    assert after.rows is not None
    return before.rows, after.rows


@pytest.mark.parametrize("sampled", [True, False])
def test_of_a_source_that_is_taken_in_part_only_that_part_counts(
    sampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampled:
        monkeypatch.setattr(room, "MOST_DOCUMENTS", 60)
    write_documents(tmp_path / "text", 400)
    recipe = small_recipe(
        tmp_path, data__train=[{"source": str(tmp_path / "text"), "fraction": 0.2}]
    )
    told, there = rows_told_and_there(recipe)
    assert told.likely == pytest.approx(there.likely, rel=0.4)


def test_a_sample_is_spread_over_all_files(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(100):
        (folder / f"{number:03d}.txt").write_text(f"{number} " * 50, encoding="utf-8")
    recipe = small_recipe(tmp_path)
    some = sample_sources(recipe, 10, 10**6)
    assert not some.whole
    assert len(some.texts) == 10
    numbers = [int(text.split()[0]) for text in some.texts]
    assert np.ptp(numbers) >= 85
    every = sample_sources(recipe, 1000, 10**6)
    assert (every.whole, len(every.texts)) == (True, 100)
    assert every.file_bytes == sum(path.stat().st_size for path in folder.iterdir())


def test_a_small_file_beside_a_large_one_does_not_stand_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MOST_BYTES", 20_000)
    folder = tmp_path / "text"
    write_documents(tmp_path / "written", 100)
    folder.mkdir()
    (folder / "README").write_text("Texts to train on.", encoding="utf-8")
    every = "".join(path.read_text("utf-8") for path in (tmp_path / "written").iterdir())
    (folder / "input.txt").write_text(every, encoding="utf-8")
    recipe = small_recipe(tmp_path, data__validation=[])
    assert look_at_data(recipe).about.startswith("a sample of 1 document")
    told, there = rows_told_and_there(recipe)
    assert told.likely == pytest.approx(there.likely, rel=0.01)


def test_of_a_text_without_end_a_part_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "MOST_OF_ONE", 100)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "all.txt").write_text("melts copper " * 100, encoding="utf-8")
    found = sample_sources(small_recipe(tmp_path), 10, 10**6)
    assert (found.whole, [len(text) for text in found.texts]) == (False, [100])


@pytest.mark.parametrize("seen", [60, 2000])
def test_rows_are_guessed_where_a_sample_is_little_for_a_vocabulary(
    seen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MOST_BYTES", seen)
    write_documents(tmp_path / "text", 200)
    recipe = small_recipe(tmp_path, data__validation=[], tokenizer__vocab_size=400)
    told, there = rows_told_and_there(recipe)
    assert told.origin == "guessed"
    assert told.low <= there.likely <= told.high


def test_of_less_than_a_row_of_a_stream_not_a_whole_row_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MOST_DOCUMENTS", 1)
    write_documents(tmp_path / "text", 60)
    found = look_at_data(small_recipe(tmp_path, data__seq_len=4096))
    assert found.rows is not None
    assert found.tokens is not None
    assert found.rows.likely == pytest.approx(found.tokens.likely / 4096)


def test_a_source_that_is_not_here_says_so(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, data__train=[{"source": "gs://bucket/texts.jsonl"}])
    with pytest.raises(WrongInput, match="run `ingot ingest` first"):
        look_at_data(recipe)


@pytest.mark.parametrize("limit", [1024, 4096])
@pytest.mark.parametrize("draw", [lambda rng: rng.integers(20, 4000, 400), lambda _: [100] * 80])
def test_blocks_of_a_mask_that_hold_a_document_are_counted(limit: int, draw: Any) -> None:
    lengths = np.asarray(draw(np.random.default_rng(0)), np.int64)
    # Documents one after the other in a stream that is cut into rows, as flex attention sees them.
    document = np.repeat(np.arange(len(lengths)), lengths)
    rows = document[: len(document) // limit * limit].reshape(-1, limit)
    some = rows[:: max(1, len(rows) // 24)]
    causal = np.tril(np.ones((limit, limit), bool))
    blocks = limit // 128

    def touched(mask: Any) -> int:
        return int(mask.reshape(blocks, 128, blocks, 128).any((1, 3)).sum())

    computed = np.mean([touched(causal & (row[:, None] == row[None])) for row in some])
    told = ColumnLengths.of(lengths, limit, cut=True).attended
    assert told == pytest.approx(computed / touched(causal), rel=0.15)


def test_one_document_a_row_attends_to_all_of_it() -> None:
    assert ColumnLengths.of(np.full(9, 512), 512).attended == 1.0
    assert ColumnLengths.of(np.full(9, 1024), 512).attended == 1.0
    two = ColumnLengths.of(np.full(9, 512), 1024).attended
    assert 20 / 36 < two <= 28 / 36, "blocks of 128, wherever documents begin"


def test_records_that_cannot_be_read_are_counted_and_told_with_their_place(tmp_path: Path) -> None:
    mixed = [{"text": f"copper {number}"} for number in range(30)] + [{"text": 7}] * 10
    path = write_jsonl(tmp_path / "mixed.jsonl", mixed)
    recipe = small_recipe(tmp_path, data__train=[{"source": str(path)}])
    found = look_at_data(recipe)
    assert found.unreadable == pytest.approx(0.25)
    assert f"(10); the first is {path}:31" in found.why_unreadable
    assert any(
        one.kind == "warning" and "25.0% of the records" in one.message
        for one in judge_data(recipe, found)
    )


def test_a_source_without_a_readable_record_is_wrong_and_read_no_further(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [{"text": 7}] * 50_000)
    recipe = small_recipe(tmp_path, data__train=[{"source": str(path)}])
    assert sample_sources(recipe, 10, 10_000).bad.total() < 200
    with pytest.raises(WrongInput, match="no document that can be read: of its first records"):
        look_at_data(recipe)
    found = data_sample(recipe, quick=False)
    assert isinstance(found, Unknown)
    assert found.wrong
    assert judge_unknown(found).kind == "warning"


def test_sources_elsewhere_are_sampled_from_what_was_ingested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(tmp_path / "text", 120)
    recipe = small_recipe(tmp_path)
    before = look_at_data(recipe)
    monkeypatch.setattr(sample, "is_local", lambda source: False)
    with pytest.raises(NotHere):
        look_at_data(recipe)
    assert judge_unknown(data_sample(recipe, quick=False)).kind == "not checked"  # type: ignore[arg-type]
    ingest(recipe)
    after = look_at_data(recipe)
    assert after.rows is not None
    assert before.rows is not None
    assert after.rows.low <= before.rows.likely <= after.rows.high


def test_chats_of_which_no_row_can_be_made_are_planned_nevertheless(tmp_path: Path) -> None:
    """Every answer lies beyond the row."""
    long = {"role": "user", "content": " ".join(WORDS * 20)}
    chats = [{"messages": [long, {"role": "assistant", "content": "yes"}]}] * 40
    path = write_jsonl(tmp_path / "chats.jsonl", chats)
    recipe = small_recipe(
        tmp_path,
        data__train=[{"source": str(path)}],
        objective__kind="sft",
        tokenizer__template="chatml",
    )
    found = look_at_data(recipe)
    assert found.left_out == 1.0
    assert found.rows == Range.exactly(0.0)
    assert isinstance(cost(recipe, rows=found.rows).epochs, Unknown)


@pytest.mark.parametrize(
    ("way", "framing", "longest"), [("mlm", 2, 46), ("span_corruption", 1, 52)]
)
def test_masked_texts_are_planned_and_proved_as_their_pieces(
    way: str, framing: int, longest: int, tmp_path: Path
) -> None:
    """Nothing is cut away, what frames a piece is no padding, and `verify data` reads the same."""
    write_all(tmp_path)
    recipe = recipe_of(tmp_path, way, data__seq_len=24)
    before = look_at_data(recipe)
    assert (before.truncated, before.lost_targets, before.left_out) == (0.0, 0.0, 0.0)
    prepare_way(tmp_path, way)
    recipe = recipe_of(tmp_path, way)
    after = look_at_data(recipe)
    packed = read_packed(recipe.folder.columns, prepared_for(recipe), 48, recipe.row_plan)
    rows, tokens = (getattr(packed.counts["train"], name) for name in ("rows", "tokens"))
    assert after.rows == Range.exactly(rows, "measured")
    each = framing + longest
    assert after.padding == pytest.approx(1 - (tokens + framing * rows) / (each * rows))
    assert 0 < after.padding < 0.6
    found = {check.what: check.passed for check in verify_data(recipe).checks}
    assert found[f"rows: {recipe.row_plan}, 48 tokens"] is True
    assert found["columns: end of each record"] is None
    assert False not in found.values()
