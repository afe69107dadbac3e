"""Documents to columns: the records of the tokenizer, the same bytes whoever makes them, and only
what changed made again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.base import storage
from ingot.base.errors import WrongInput
from ingot.cli.views.datatables import show_data
from ingot.config.recipe import Recipe
from ingot.data.batches.rows import open_rows
from ingot.data.cleaning.clean import clean
from ingot.data.cleaning.cleaned import CleaningResult
from ingot.data.cleaning.documents import read_documents, sample
from ingot.data.columns.column import Column, column_prefix
from ingot.data.columns.manifest import read_prepared
from ingot.data.engines.local import LocalEngine
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.data.raw import ranges as ranges_module
from ingot.data.raw import store as raw_module
from ingot.data.raw.store import open_raw
from ingot.data.splits import Shares
from ingot.data.tokenizing import copies as copies_module
from ingot.data.tokenizing import tokenize as tokenize_module
from ingot.data.tokenizing import vocabulary
from ingot.data.tokenizing.tokenize import TokeniseStage
from ingot.tokenizers.load import load_tokenizer
from tests.data.small import everything, recipe, sentences, write_jsonl
from tests.markers import changed
from tests.tokenizers.small import bpe_files


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts of little data; groups are cut at ingest, ranges in the parent, so worker
    processes need no patch.
    """
    monkeypatch.setattr(raw_module, "GROUP_BYTES", 1000)
    monkeypatch.setattr(raw_module, "PART_BYTES", 9000)
    monkeypatch.setattr(ranges_module, "SMALLEST_BYTES", 3000)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", sentences(120))


def ingested(*arguments: Any, **knobs: Any) -> Recipe:
    made = recipe(*arguments, **knobs)
    ingest(made)
    return made


def tokenizer_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in bpe_files(**config).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def records(small: Recipe, split: str) -> list[list[int]]:
    columns = small.folder.columns
    listed = read_prepared(columns).splits[split]  # type: ignore[index]
    opened = [
        Column(column_prefix(columns, split, "tokens", part.number))
        for source in listed
        for part in source.parts
    ]
    return [column[record].tolist() for column in opened for record in range(len(column))]


def test_columns_are_the_tokenizers_documents(tmp_path: Path, source: Path) -> None:
    small = ingested(tmp_path, source, data__fraction=0.7)
    outcome = prepare(small)
    tokenizer = load_tokenizer(small.folder.tokenizer)
    for split in ("train", "validation"):
        documents = list(read_documents(small, split))  # type: ignore[arg-type]
        assert records(small, split) == [
            tokenizer.encode_document(document.text) for document in documents
        ]
        totals = json.loads((small.folder.columns / "manifest.json").read_text())["totals"][split]
        assert totals == {
            "documents": len(documents),
            "tokens": sum(map(len, records(small, split))),
            "bytes": sum(len(document.text.encode()) for document in documents),
        }
    manifest = read_prepared(small.folder.columns)
    assert len(manifest.splits["train"][0].parts) > 5
    assert (
        outcome.result
        == f"{sum(len(record) for split in ('train', 'validation') for record in records(small, split)) / 1e3:.1f}"
        " k tokens, vocabulary 280"
    )
    assert (outcome.outputs, outcome.parts) == (manifest.identity, manifest.data)
    assert manifest.tokenizer == tokenizer.identity()


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, source: Path) -> None:
    small = ingested(tmp_path, source)
    alone = prepare(small)
    before = everything(small.folder.root / "data")
    for path in (small.folder.columns, small.folder.tokenizer):
        shutil.rmtree(path)
    assert prepare(recipe(tmp_path, source, data__engine__workers=3)) == alone
    assert everything(small.folder.root / "data") == before


def test_nothing_changed_nothing_made(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ingested(tmp_path, source)
    first = prepare(small)
    before = everything(small.folder.root / "data")
    monkeypatch.setattr(TokeniseStage, "open", None)
    monkeypatch.setattr(vocabulary, "train_bpe", None)
    assert prepare(small) == first
    assert everything(small.folder.root / "data") == before


def test_what_is_trained_on_is_the_same_whatever_is_held_out(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges_module, "RANGES", 8)  # so that ranges grow with the data
    held_out = write_jsonl(tmp_path / "held.jsonl", sentences(40, 500))
    more = write_jsonl(tmp_path / "more.jsonl", sentences(400, 1000))
    parts = []
    for sources in ([held_out], [held_out, more]):
        small = recipe(
            tmp_path,
            source,
            data__validation__fraction=None,
            data__validation=[{"source": str(path)} for path in sources],
        )
        ingest(small)
        parts.append(prepare(small).parts)
    before, now = parts
    assert before["train"] == now["train"]
    assert before["validation"] != now["validation"]
    rows = open_rows(small.folder.columns, "validation", 16, pack="cut", pad_last=True)
    assert rows.fingerprint == now["validation"]


def test_a_changed_row_length_makes_nothing_again(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ingested(tmp_path, source)
    first = prepare(small)
    monkeypatch.setattr(TokeniseStage, "open", None)
    assert (
        prepare(recipe(tmp_path, source, data__seq_len=32, train__global_batch=4)).outputs
        == first.outputs
    )
    rows = open_rows(small.folder.columns, "train", 32, pack="cut", pad_last=False)
    assert rows.fingerprint == first.parts["train"]


def test_finished_parts_are_kept(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ingested(tmp_path, source)
    prepare(small)
    before = everything(small.folder.columns)
    made: list[int] = []
    real = TokeniseStage._make
    monkeypatch.setattr(
        TokeniseStage,
        "_make",
        lambda self, task, *rest: (made.append(task.number), real(self, task, *rest))[1],
    )
    (small.folder.columns / "train.tokens-00002.bin").unlink()
    (small.folder.columns / "done" / "train-00003.json").write_text('{"torn')
    with (small.folder.columns / "train.tokens-00004.idx").open("ab") as stream:
        stream.write(b"x")
    changed(small.folder.columns, "done/train-00005.json", without=("rendered",))
    (small.folder.columns / "train.tokens-00099.bin").write_text("of an earlier, larger run")
    (small.folder.columns / ".train.tokens-00001.bin.partial-77").write_text("of a killed run")
    prepare(small)
    assert made == [2, 3, 4, 5]
    assert everything(small.folder.columns) == before
    assert "parts are finished already" in capsys.readouterr().err


def test_manifests_of_another_version_are_refused_in_words(tmp_path: Path, source: Path) -> None:
    """Such as an earlier one's, which had one fingerprint for the data of all splits, or those of
    a version that knows more of each part: each is told with the command that makes it anew.
    """
    small = ingested(tmp_path, source)
    prepare(small)
    columns, raw, before = small.folder.columns, small.folder.raw, everything(small.folder.data)
    marker, read = json.loads((columns / "manifest.json").read_text()), open_raw(small)
    changed(columns, "manifest.json", data="c75e6c6a8426bf1a")
    with pytest.raises(WrongInput, match=r"manifest\.json has data as another.*prepare --again`"):
        read_prepared(columns)
    parts = [part | {"more": 1} for part in marker["splits"]["train"][0]["parts"]]
    splits = {"train": [marker["splits"]["train"][0] | {"parts": parts}], "validation": []}
    changed(columns, "manifest.json", data=marker["data"], splits=splits)
    with pytest.raises(
        WrongInput, match=r"has splits\.train\.0\.parts\.0\.more as another version"
    ):
        read_prepared(columns)
    prepare(small, again=True)
    assert everything(small.folder.data) == before
    changed(raw, "manifest.json", splits={"train": [{"source": "all that was known once"}]})
    with pytest.raises(
        WrongInput, match=r"has splits\.train\.0\.knobs as .* `ingot ingest --again`"
    ):
        open_raw(small)
    ingest(small)
    assert open_raw(small) == read


def test_damaged_files_are_made_again(tmp_path: Path, source: Path) -> None:
    """Damage that no size tells: `prepare --again` is what whoever finds it advises."""
    small = ingested(tmp_path, source, data__clean__exact=True, data__pack="best_fit")
    prepare(small)
    before = everything(small.folder.data)
    columns, tokenizer = small.folder.columns, small.folder.tokenizer
    damaged = [
        *columns.glob("train.*-00001.bin"),
        *small.folder.data.glob("clean/fates-*/train-00001.npy"),
        columns / "manifest.json",
        tokenizer / "tokenizer.json",
    ]
    assert len(damaged) == 5, "tokens, rows, and what is beside them"
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    with pytest.raises(WrongInput, match=r"manifest\.json is damaged; run `ingot prepare --again`"):
        read_prepared(columns)
    with pytest.raises(WrongInput, match=r"tokenizer\.json does not .* `ingot prepare --again`"):
        load_tokenizer(tokenizer)
    prepare(small, again=True)
    assert everything(small.folder.data) == before


@pytest.mark.drawn
@pytest.mark.parametrize("kill", [1, 3])
def test_what_a_killed_run_was_about_to_replace_does_not_stay(
    kill: int, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disks that cannot exchange two folders, the old columns have a name between two renames
    under which nothing finds them.
    """
    prepare(ingested(tmp_path, source))
    other = recipe(tmp_path, source, tokenizer__vocab_size=290)
    renames, replace = iter(range(kill)), os.replace

    def dies(one: Path, other: Path) -> None:
        replace(one, other)
        if {one.name, other.name} & {"columns", "tokenizer"} and next(renames, 0) == kill - 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as killing:
        killing.setattr(storage, "_exchange", lambda one, other: False)
        killing.setattr(os, "replace", dies)
        killing.setattr(os, "getpid", lambda: 2**22 + 1)  # that of no process, as once it is dead
        with pytest.raises(KeyboardInterrupt):
            prepare(other)
    prepare(other)
    assert sorted(os.listdir(other.folder.data)) == ["columns", "raw", "tokenizer"]


@pytest.mark.drawn(keep=3)
@pytest.mark.parametrize(
    ("knobs", "relearns"),
    [
        ({"data__validation__fraction": 0.3}, True),
        ({"data__fraction": 0.5}, True),
        ({"tokenizer__vocab_size": 290}, True),
        ({"tokenizer__sample_bytes": 2000}, True),
        ({"data__seq_len": 8}, False),
        ({"seed": 5}, False),
    ],
)
def test_the_vocabulary_is_learnt_again_only_for_a_reason(
    tmp_path: Path, source: Path, knobs: dict[str, Any], relearns: bool
) -> None:
    small = ingested(tmp_path, source)
    first = prepare(small)
    stamp = (small.folder.tokenizer / "tokenizer.json").stat().st_mtime_ns
    again = prepare(recipe(tmp_path, source, **knobs))
    assert ((small.folder.tokenizer / "tokenizer.json").stat().st_mtime_ns != stamp) == relearns
    assert relearns or again.outputs == first.outputs
    manifest = read_prepared(small.folder.columns)
    assert manifest.tokenizer == load_tokenizer(small.folder.tokenizer).identity(), (
        "columns of another vocabulary are never kept"
    )
    assert all(max(record) < manifest.vocab_size for record in records(small, "train"))


def test_a_changed_source_is_prepared_again(tmp_path: Path, source: Path) -> None:
    small = ingested(tmp_path, source)
    first = prepare(small)
    write_jsonl(source, [*sentences(119), "another last one"])
    ingest(small)
    assert prepare(small).outputs != first.outputs
    tokenizer = load_tokenizer(small.folder.tokenizer)
    assert "another last one" in {
        tokenizer.decode(record)
        for split in ("train", "validation")
        for record in records(small, split)
    }


def test_held_out_text_is_not_learnt_from(tmp_path: Path) -> None:
    """Else what is measured on would have shaped the vocabulary."""
    source, held = (
        write_jsonl(tmp_path / "a.jsonl", sentences(60)),
        write_jsonl(tmp_path / "b.jsonl", ["zygomorphic " * 50] * 20),
    )
    small = ingested(tmp_path, source, data__validation=[{"source": str(held)}])
    prepare(small)
    tokenizer = load_tokenizer(small.folder.tokenizer)
    assert len(tokenizer.encode(" zygomorphic")) > 6
    assert len(tokenizer.encode(" copper")) < 3


def test_held_out_sets_are_told_apart_by_text_alone(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = write_jsonl(tmp_path / "b.jsonl", sentences(40, 500))
    sets = []
    for vocab_size, training, cut in ((280, 120, 3000), (290, 90, 500)):
        monkeypatch.setattr(ranges_module, "SMALLEST_BYTES", cut)
        write_jsonl(source, sentences(training))
        small = ingested(
            tmp_path,
            source,
            data__validation=[{"source": str(held)}],
            tokenizer__vocab_size=vocab_size,
        )
        prepare(small)
        sets.append(read_prepared(small.folder.columns).sets)
    assert sets[0]["validation"] == sets[1]["validation"]
    assert sets[0]["train"] != sets[1]["train"]
    write_jsonl(held, [*sentences(39, 500), "one other"])
    ingest(small)
    prepare(small)
    assert read_prepared(small.folder.columns).sets["validation"] != sets[1]["validation"]


def test_a_given_tokenizer(tmp_path: Path, source: Path) -> None:
    given = tokenizer_folder(tmp_path / "given")
    small = ingested(tmp_path, source, tokenizer__source=str(given), tokenizer__vocab_size=None)
    outcome = prepare(small)
    assert outcome.result.endswith("vocabulary 302")
    identity = load_tokenizer(given).identity()
    assert (
        load_tokenizer(small.folder.tokenizer).identity()
        == identity
        == read_prepared(small.folder.columns).tokenizer
    )
    tokenizer_folder(given, eos_token="<|im_end|>")
    assert prepare(small).outputs != outcome.outputs
    assert records(small, "train")[0][-1] == 301


def test_large_vocabularies_take_int32(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.data.columns.column.UINT16_BELOW", 280)
    small = ingested(tmp_path, source)
    prepare(small)
    assert json.loads((small.folder.columns / "manifest.json").read_text())["columns"] == [
        {"name": "tokens", "dtype": "int32"}
    ]
    assert (
        open_rows(small.folder.columns, "train", 8, pack="cut", pad_last=False).row(0).tokens.max()
        < 280
    )


def test_sources_keep_their_weights_and_counts(tmp_path: Path, source: Path) -> None:
    other = write_jsonl(tmp_path / "b.jsonl", sentences(30, 700))
    small = ingested(tmp_path, {"source": str(source), "weight": 3.0}, other)
    prepare(small)
    manifest = read_prepared(small.folder.columns)
    assert [(item.source, item.weight) for item in manifest.splits["train"]] == [
        (str(source), 3.0),
        (str(other), 1.0),
    ]
    assert [
        sum(manifest.splits[split][number].documents for split in ("train", "validation"))
        for number in range(2)
    ] == [120, 30]
    rows = open_rows(small.folder.columns, "train", 16, pack="cut", pad_last=False)
    assert rows.weights == [3.0, 1.0]
    assert rows.sizes == [item.tokens // 16 for item in manifest.splits["train"]]


def test_less_than_a_global_batch(tmp_path: Path, source: Path) -> None:
    small = ingested(tmp_path, source, data__seq_len=512, train__global_batch=100)
    with pytest.raises(
        WrongInput,
        match=(
            r"\d+ training documents have [\d,]+ tokens, \d+ rows of data.seq_len=512: less than"
            r" one train.global_batch=100"
        ),
    ):
        prepare(small)
    with pytest.raises(WrongInput, match="holds no prepared data"):
        read_prepared(small.folder.columns)


@pytest.mark.parametrize("knobs", [{}, {"tokenizer__vocab_size": 290}])
def test_what_is_there_stays_until_its_replacement_is_whole(
    knobs: dict[str, Any], tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ingested(tmp_path, source)
    prepare(small)
    before = everything(small.folder.columns), everything(small.folder.tokenizer)
    with pytest.raises(WrongInput, match=r"data\.seq_len=9000000"):
        prepare(recipe(tmp_path, source, data__seq_len=9_000_000, **knobs))
    assert (everything(small.folder.columns), everything(small.folder.tokenizer)) == before
    assert read_prepared(small.folder.columns).tokenizer == (
        load_tokenizer(small.folder.tokenizer).identity()
    )
    monkeypatch.setattr(TokeniseStage, "_make", None)  # what was made is gone on with
    monkeypatch.setattr("ingot.data.tokenizing.vocabulary.train_bpe", None)
    prepare(recipe(tmp_path, source, **knobs))
    assert (everything(small.folder.columns) == before[0]) == (not knobs)
    assert read_prepared(small.folder.columns).vocab_size == knobs.get("tokenizer__vocab_size", 280)
    assert {path.name for path in small.folder.data.iterdir()} == {"raw", "columns", "tokenizer"}


def test_files_are_held_out_whole(tmp_path: Path) -> None:
    """And without groups they are not."""
    files = [write_jsonl(tmp_path / f"{n}.jsonl", sentences(20, 20 * n)) for n in range(20)]
    share = {"data__validation__fraction": 0.3}

    def held(**knobs: Any) -> list[int]:
        small = ingested(tmp_path, *files, **share, **knobs)
        prepare(small)
        rows = [document.doc_id for document in read_documents(small, "validation")]
        assert read_prepared(small.folder.columns).total("validation", "documents") == len(rows)
        return [sum(row.startswith(path.name) for row in rows) for path in files]

    assert set(held(data__validation__group=r"\d+\.jsonl")) == {0, 20}
    assert len(set(held())) > 2


@pytest.mark.drawn
@pytest.mark.parametrize("most", [None, 60])
def test_held_out_copies_of_what_is_trained_on_are_told(
    most: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From parts made at once or kept; of a sample where there are too many to look at all."""
    if most:
        monkeypatch.setattr(copies_module, "MOST_SAMPLED", most)
    texts = [*sentences(120), *sentences(40), *sentences(40)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    small = ingested(tmp_path, source)
    prepare(small)
    told = capsys.readouterr().err
    documents = {
        split: [document.text for document in read_documents(small, split)]
        for split in ("train", "validation")
    }
    copies = sum(text in documents["train"] for text in documents["validation"])
    assert 0 < copies < len(documents["validation"])
    assert "tell little about new ones; data.clean.exact=true keeps one of each" in told
    if most is None:
        assert f"warning: {copies} of {len(documents['validation'])} held-out texts are" in told
    else:
        (found,) = re.findall(r"(\d+) of a sample of (\d+) held-out texts", told)
        assert 0 < int(found[0]) < copies
        assert int(found[1]) < len(documents["validation"])
    prepare(small)  # with the parts that are there
    assert "trained on too" in capsys.readouterr().err
    prepare(recipe(tmp_path, source, data__clean__exact=True))
    assert "trained on too" not in capsys.readouterr().err


@pytest.mark.parametrize("changed", [{"normalize": "nfc"}, {"min_chars": 150}], ids=str)
def test_documents_are_read_as_the_columns_have_them_or_not_at_all(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [f"u\u0308ber {'x' * n}" for n in range(200)])
    small = ingested(tmp_path, source, data__clean={"min_chars": 30})
    prepare(small)
    assert all("u\u0308" in document.text for document in read_documents(small, "train"))
    other = recipe(tmp_path, source, data__clean={"min_chars": 30, **changed})
    with pytest.raises(WrongInput, match=r"as data\.clean leaves them; run `ingot prepare` with"):
        list(read_documents(other, "train"))


def test_an_empty_validation_split(tmp_path: Path, source: Path) -> None:
    small = ingested(tmp_path, source, data__validation__fraction=1e-9)
    with pytest.raises(
        WrongInput,
        match=r"no document of 120 is held out by data.validation.fraction=1e-09; raise it",
    ):
        prepare(small)


def test_validation_sources_that_cleaning_leaves_nothing_of(tmp_path: Path, source: Path) -> None:
    """No fraction is blamed where there is none."""
    held_out = tmp_path / "held.jsonl"
    held_out.write_text('{"text": "short"}\n')
    small = ingested(
        tmp_path,
        source,
        data__validation__fraction=None,
        data__validation=[{"source": str(held_out)}],
        data__clean__min_chars=8,
    )
    with pytest.raises(WrongInput, match=r"no document of the sources of data\.validation is left"):
        prepare(small)


def test_cleaning_that_leaves_nothing_is_what_is_named(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all documents, or of those to be trained on; nothing else need be raised."""
    small = ingested(tmp_path, source, data__clean__min_chars=10**6)
    with pytest.raises(
        WrongInput,
        match=r"^data\.clean leaves none of the 120 documents \(120 by min_chars\), such as a\.jsonl:1:"
        r" 'Text 0: the copper .*'; clean less$",
    ):
        prepare(small)
    show_data(str(small.folder.root))
    assert "a.jsonl:1: Text 0: the copper" in " ".join(capsys.readouterr().out.split())
    held_out = write_jsonl(tmp_path / "held.jsonl", sentences(3))
    given = tokenizer_folder(tmp_path / "given")
    knobs = {"data__validation__fraction": None, "data__validation": [{"source": str(held_out)}]}
    write_jsonl(source, ["short"] * 5)
    for tokenizer, words in (
        ({}, "to learn a vocabulary from; clean less"),
        (
            {"tokenizer__source": str(given), "tokenizer__vocab_size": None},
            "no document of the sources of data.train is left by cleaning; clean less",
        ),
    ):
        with pytest.raises(WrongInput, match=words):
            prepare(ingested(tmp_path, source, data__clean__min_chars=8, **tokenizer, **knobs))
    capsys.readouterr()
    prepare(ingested(tmp_path, held_out, data__clean__exact=True, train__global_batch=1))
    assert "cleaning dropped 0 of 3 documents\n" in capsys.readouterr().err


@pytest.mark.parametrize("way", [[], {"fraction": 0}])
def test_nothing_is_held_out_where_the_recipe_says_so(
    way: Any, tmp_path: Path, source: Path
) -> None:
    knobs = {"data__validation__fraction": None, "data__validation": way}
    small = ingested(tmp_path, source, **knobs)
    prepare(small)
    found = read_prepared(small.folder.columns)
    assert found.total("train", "documents") == 120
    assert found.total("validation", "documents") == 0
    with pytest.raises(WrongInput, match=r"^data\.clean\.contamination needs held-out documents"):
        prepare(recipe(tmp_path, source, data__clean__contamination={}, **knobs))


def test_no_training_document(tmp_path: Path, source: Path) -> None:
    small = ingested(tmp_path, source, data__fraction=1e-9)
    with pytest.raises(
        WrongInput, match=r"no training document to learn a vocabulary from; raise data\.fraction"
    ):
        prepare(small)


def test_a_source_without_a_row_is_told(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ingested(tmp_path, source, write_jsonl(tmp_path / "b.jsonl", ["tiny"]))
    prepare(small)
    assert "not one row of data.seq_len=16: it is not trained on" in capsys.readouterr().err
    weighted = {"source": str(tmp_path / "b.jsonl"), "weight": 0.5}
    with pytest.raises(WrongInput, match=r"data\.train\[1\] has a weight but not one row"):
        prepare(ingested(tmp_path, source, weighted))


def test_of_few_large_documents_there_is_a_sample(tmp_path: Path) -> None:
    """Chance would choose none of them: there would be nothing to learn a vocabulary from, nor to
    try encoders on.
    """
    small = ingested(
        tmp_path, write_jsonl(tmp_path / "a.jsonl", [text * 40 for text in sentences(12)])
    )
    opened, shares = raw_module.open_raw(small), Shares.of(small.data)
    for size in (1, 50):
        assert len(list(sample(opened, CleaningResult.nothing(), shares, size))) >= 1
    prepare(recipe(tmp_path, tmp_path / "a.jsonl", tokenizer__sample_bytes=50))


@pytest.mark.parametrize("share", [1 / 3, 1 / 50])
@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_what_a_large_document_gives_to_a_sample_does_not_hang_on_its_name(
    tmp_path: Path, name: str, share: float
) -> None:
    """Drawn by chance, a book beside three hundred notes is all of the sample or nothing of it."""
    notes, book = sentences(300), " ".join(f"ür{place:05}" for place in range(30_000))
    texts = [*notes[:150], book, *notes[150:]]
    opened = raw_module.open_raw(ingested(tmp_path, write_jsonl(tmp_path / f"{name}.jsonl", texts)))
    wanted = int(opened.bytes * share)

    def sampled() -> list[str]:
        found = sample(opened, CleaningResult.nothing(), Shares(None, 1.0), wanted)
        return [document.text for document in found]

    given = sampled()
    of_book = [text for text in given if text not in notes]
    assert 0.7 * wanted < sum(len(text.encode()) for text in given) < 1.3 * wanted
    assert share * 0.9 < sum(map(len, of_book)) / len(book) < share * 1.1
    assert all(text in book for text in of_book)
    if share > 0.1:
        assert [book.index(text) * 4 // len(book) for text in of_book] == [0, 1, 2, 3]
    assert given == sampled()


@pytest.mark.parametrize("share", [1 / 3, 1 / 50])
def test_of_large_documents_each_gives_to_a_sample(tmp_path: Path, share: float) -> None:
    books = [" ".join(f"{book}:{place}" for place in range(500)) for book in range(40)]
    small = ingested(tmp_path, write_jsonl(tmp_path / "a.jsonl", books))
    opened = raw_module.open_raw(small)
    wanted = int(opened.bytes * share)
    found = list(sample(opened, CleaningResult.nothing(), Shares(None, 1.0), wanted))
    assert 0.9 * wanted < sum(len(document.text) for document in found) < 1.1 * wanted
    assert len({document.doc_id for document in found}) >= (40 if share > 0.1 else 13)


def test_before_ingest(tmp_path: Path, source: Path) -> None:
    with pytest.raises(WrongInput, match="run `ingot ingest` with this recipe first"):
        prepare(recipe(tmp_path, source))


def test_a_sample_is_spread_over_everything(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", sentences(3000))
    small = ingested(tmp_path, source)
    opened = raw_module.open_raw(small)
    shares = Shares.of(small.data)
    total = opened.bytes

    def sampled(size: int) -> list[str]:
        return [
            document.text for document in sample(opened, CleaningResult.nothing(), shares, size)
        ]

    for wanted in (total // 3, total // 100):
        texts = sampled(wanted)
        places = np.array([int(text.split(":")[0].removeprefix("Text ")) for text in texts])
        assert len(set(places)) == len(places)
        assert 0.5 * wanted < sum(len(text.encode()) for text in texts) < 1.6 * wanted, (
            "although a fifth is held out"
        )
        assert abs(places.mean() - 1500) < 500
        assert texts == sampled(wanted)
    assert len(sampled(10 * total)) == sum(1 for _ in read_documents(small, "train"))


@pytest.mark.drawn
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_sample_is_as_large_as_asked_for_whatever_is_not_trained_on(
    tmp_path: Path, fraction: float
) -> None:
    """Else a tenth of the data for a trial gives a vocabulary of a tenth of the sample."""
    kept, dropped = sentences(400), ["ingot"] * 4000
    source = write_jsonl(tmp_path / "a.jsonl", [*kept[:200], *dropped, *kept[200:]])
    small = ingested(tmp_path, source, data__clean__min_chars=8, data__fraction=fraction)
    opened, wanted = raw_module.open_raw(small), sum(len(text.encode()) for text in kept) // 5
    cleaned = clean(small, opened, LocalEngine(1))
    found = sample(opened, cleaned, Shares.of(small.data), wanted)
    assert 0.7 * wanted < sum(len(document.text.encode()) for document in found) < 1.4 * wanted


@pytest.mark.parametrize("knobs", [{}, {"data__clean__min_chars": 8}, {"data__clean__exact": True}])
@pytest.mark.parametrize("loses", [False, True])
def test_every_document_that_is_in_no_column_is_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any], loses: bool
) -> None:
    """Also where a fraction leaves out some: what is lost beside them is not said to be theirs."""
    encode = tokenize_module.encode_records

    def lossy(documents: Any, tokenizer: Any, batch: Any, texts: Any, *more: Any, **named: Any):  # type: ignore[no-untyped-def]
        return encode(documents, tokenizer, batch, texts[1:], *more, **named)

    texts = ["short", *sentences(60), "short"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    small = ingested(tmp_path, source, data__fraction=0.5, **knobs)
    if loses:
        monkeypatch.setattr(tokenize_module, "encode_records", lossy)
    prepare(small)
    shares = Shares.of(small.data)
    outside = [n for n in range(1, 63) if shares.split("train", f"a.jsonl:{n}") is None]
    manifest = read_prepared(small.folder.columns)
    kept = sum(manifest.total(split, "documents") for split in ("train", "validation"))
    dropped = json.loads((small.folder.columns / "manifest.json").read_text())["dropped"]
    assert dropped["data.fraction"] == len(outside)
    assert (dropped["lost"] > 0) == loses
    assert sum(dropped.values()) + kept == 62
    assert prepare(small).result


def test_what_a_vocabulary_was_really_learnt_from_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(
        tmp_path / "a.jsonl", [text * 9 for text in sentences(60)] + ["x" * 999999]
    )
    prepare(ingested(tmp_path, source, data__clean__max_chars=9999))
    told = re.search(r"learning a vocabulary of 280 from ([\d.]+) MB", capsys.readouterr().err)
    assert told is not None
    assert 0 < float(told[1]) < 0.5, "not the megabyte that was dropped"


def test_documents_are_those_of_the_columns_and_cleaned_by_prepare_alone(
    tmp_path: Path, source: Path
) -> None:
    """An evaluation reads them after training, perhaps where files of benchmarks are not."""
    texts = [" ".join(f"word{number}x{place}" for place in range(20)) for number in range(60)]
    write_jsonl(source, texts)
    bench = write_jsonl(tmp_path / "bench.jsonl", texts[:20])
    knobs = {"data__clean__contamination": {"against": [str(bench)]}}
    small = ingested(tmp_path, source, **knobs)
    first = prepare(small)
    before, lying = list(read_documents(small, "train")), everything(small.folder.data / "clean")
    assert not {document.text for document in before}.intersection(texts[:20])
    write_jsonl(bench, texts[:1])
    assert list(read_documents(small, "train")) == before
    bench.unlink()
    assert list(read_documents(small, "train")) == before
    assert everything(small.folder.data / "clean") == lying
    listed = {str(Path("data/clean", name)) for name in lying}
    assert listed < first.files.keys(), "where one is gone, `prepare` is not called unchanged"
    for other in ({}, {"data__clean__normalize": "nfc"}):
        with pytest.raises(
            WrongInput, match=r"columns was not made of .* run `ingot prepare` with"
        ):
            list(read_documents(recipe(tmp_path, source, **other), "train"))
    marker = small.folder.data / "clean" / "clean.json"
    kept = marker.read_bytes()
    marker.write_bytes(kept.replace(b"0", b"1"))
    with pytest.raises(WrongInput, match=r"columns was not made of .* run `ingot prepare --again`"):
        list(read_documents(small, "train"))
    marker.write_bytes(kept)
    write_jsonl(source, texts[::-1])
    ingest(small)
    with pytest.raises(WrongInput, match=r"columns was not made of .* run `ingot prepare` with"):
        list(read_documents(small, "train"))
