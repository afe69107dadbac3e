"""`prepare` on preferences, pairs and labelled texts: what stands in the columns, what decides
about it, and what is told.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.data.batches.loader import fixed_batches
from ingot.data.batches.rows import IGNORE, open_rows
from ingot.data.columns.column import Column, column_prefix
from ingot.data.columns.manifest import prepared_for
from ingot.data.ingest import ingest
from ingot.data.packing.tables import read_packed
from ingot.data.prepare import _in_words, prepare
from ingot.data.tokenizing import tokenize as parts
from ingot.data.tokenizing import vocabulary
from ingot.tokenizers.bpe import train_bpe
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer
from tests.data.small import recipe
from tests.tokenizers.test_frame import framed_files

KNOBS: dict[str, dict[str, Any]] = {
    "preference": {
        "objective__kind": "dpo",
        "tokenizer__template": "chatml",
        "tokenizer__vocab_size": 400,
    },
    "rated": {
        "objective__kind": "kto",
        "tokenizer__template": "chatml",
        "tokenizer__vocab_size": 400,
    },
    "pair": {"objective__kind": "seq2seq", "objective__prefix": "say: ", "data__target_len": 12},
    "labelled": {"objective__kind": "classify", "objective__labels": ["odd", "even"]},
}


def records(kind: str, count: int, change: Callable[[str], str] = str) -> list[dict[str, Any]]:
    if kind == "preference":
        return [
            {
                "prompt": [
                    {"role": "user", "content": change("Hello")},
                    {"role": "assistant", "content": change("First")},
                    {"role": "user", "content": change(f"Question {number}?")},
                ],
                "chosen": [
                    {
                        "role": "assistant",
                        "content": change(f"Chosen {number}: copper. ") * (number % 4 + 1),
                    }
                ],
                "rejected": [{"role": "assistant", "content": change(f"Rejected {number}.")}],
            }
            for number in range(count)
        ]
    if kind == "rated":
        return [
            {
                "prompt": change(f"Question {number}?"),
                "completion": change(f"Answer {number}: copper. ") * (number % 4 + 1),
                "label": number % 3 > 0,
            }
            for number in range(count)
        ]
    if kind == "pair":
        return [
            {
                "source": change(f"The copper melts {number} times. ") * (number % 5 + 1),
                "target": change(f"melts {number}"),
            }
            for number in range(count)
        ]
    return [
        {
            "text": change(f"The number is {number}. ") * (number % 3 + 1),
            "label": ("even", "odd")[number % 2],
        }
        for number in range(count)
    ]


def of(kind: str, root: Path, **knobs: Any) -> Recipe:
    path = root / f"{kind}.jsonl"
    if not path.exists():
        path.write_text(
            "".join(json.dumps(record) + "\n" for record in records(kind, 60)), encoding="utf-8"
        )
    return recipe(root, path, **{"data__seq_len": 96, **KNOBS[kind], **knobs})


def made(kind: str, root: Path, **knobs: Any) -> tuple[Recipe, Tokenizer, dict[str, Column]]:
    """The recipe, its tokenizer, and the columns of its first training part."""
    small = of(kind, root, **knobs)
    ingest(small)
    prepare(small)
    columns = {
        name: Column(column_prefix(small.folder.columns, "train", name, 0))
        for name in prepared_for(small).names
    }
    return small, load_tokenizer(small.folder.tokenizer), columns


def test_preferences_train_the_answers_alone(tmp_path: Path) -> None:
    small, tokenizer, columns = made("preference", tmp_path)
    prepared, size = prepared_for(small), 0
    assert (prepared.objective, prepared.documents) == ("dpo", "preference")
    assert [column["dtype"] for column in prepared.columns] == [
        "uint16",
        "uint8",
        "uint16",
        "uint8",
    ]
    for number in range(len(columns["chosen"])):
        for name, begins in (("chosen", "Chosen "), ("rejected", "Rejected ")):
            ids, mask = columns[name][number], columns[f"{name}_mask"][number]
            trained = tokenizer.decode(ids[mask == 1], skip_special=False)
            assert trained.startswith(begins)
            assert trained.endswith("<|im_end|>"), "the model has to learn to stop"
            assert trained.count("<|im_end|>") == 1
            whole = tokenizer.decode(ids, skip_special=False)
            assert "First<|im_end|>" in whole
            assert "First" not in trained
            size += len(trained.removesuffix("<|im_end|>").encode()) if name == "chosen" else 0
        same = min(len(columns["chosen"][number]), len(columns["rejected"][number]))
        prompt = int(np.argmax(columns["chosen_mask"][number]))
        assert prompt < same
        assert (
            columns["chosen"][number][:prompt].tolist()
            == columns["rejected"][number][:prompt].tolist()
        )
    assert prepared.splits["train"][0].parts[0].bytes == pytest.approx(
        size, abs=len(columns["chosen"])
    ), "white space at the end may be trimmed"
    assert (
        prepared.total("train", "tokens")
        == columns["chosen"].elements + columns["rejected"].elements
    )
    batch = next(
        fixed_batches(
            open_rows(small.folder.columns, "train", 96, pack=small.pack, pad_last=False),
            range(4),
            4,
        )
    )
    said = [tokenizer.decode(row[row != IGNORE].tolist()) for row in batch.labels]
    assert [text.split()[0] for text in said] == ["Chosen", "Rejected"] * 4


def test_pairs_are_framed_with_their_prefix(tmp_path: Path) -> None:
    small, tokenizer, columns = made("pair", tmp_path)
    assert (tokenizer.frame, prepared_for(small).prefix) == (
        ([tokenizer.special.bos], [tokenizer.special.eos]),
        "say: ",
    )
    for number in range(len(columns["source"])):
        source, target = (
            tokenizer.decode(columns[name][number], skip_special=False)
            for name in ("source", "target")
        )
        assert source.startswith("<|begin_of_text|>say: The copper melts")
        assert source.endswith("times. <|end_of_text|>")
        assert target.startswith("<|begin_of_text|>melts")
        assert target.endswith("<|end_of_text|>")
    rows = open_rows(
        small.folder.columns, "train", 96, pack=small.pack, pad_last=False, target_len=12
    )
    batch = next(fixed_batches(rows, range(len(rows)), len(rows)))
    assert all(row[row != IGNORE][-1] == tokenizer.special.eos for row in batch.labels)
    assert batch.labels.shape[1] <= 12


def test_labelled_texts_are_framed_beside_their_labels(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    Tokenizer(framed_files("bytes", "roberta")).save(folder)
    small, tokenizer, columns = made(
        "labelled", tmp_path, tokenizer__source=str(folder), tokenizer__vocab_size=None
    )
    prepared = prepared_for(small)
    assert (prepared.labels, prepared.closing, prepared.documents) == (
        ["odd", "even"],
        1,
        "labelled",
    )
    for number in range(len(columns["tokens"])):
        ids, text = columns["tokens"][number], tokenizer.decode(columns["tokens"][number])
        assert (ids[0], ids[-1]) == (tokenizer.token_id("<s>"), tokenizer.token_id("</s>"))
        digits = "".join(letter for letter in text.split(".")[0] if letter.isdigit())
        assert columns["label"][number].tolist() == [1 - int(digits) % 2]


def test_labelled_texts_have_no_end_that_their_tokenizer_does_not_put(tmp_path: Path) -> None:
    """Who asks the classifier with transformers reads texts as it was trained on them."""
    train_bpe(["the copper melts and rings"], 280).save(tmp_path / "own")
    source = {"tokenizer__source": str(tmp_path / "own"), "tokenizer__vocab_size": None}
    small, tokenizer, columns = made("labelled", tmp_path, **source)
    theirs = AutoTokenizer.from_pretrained(small.folder.tokenizer)
    assert prepared_for(small).closing == 0
    for number in range(len(columns["tokens"])):
        ids = columns["tokens"][number].tolist()
        assert ids == theirs(tokenizer.decode(ids))["input_ids"]


@pytest.mark.parametrize(
    ("kind", "seq_len"), [("preference", 60), ("rated", 40), ("pair", 30), ("labelled", 15)]
)
def test_tokens_in_no_row_are_told_beside_all(kind: str, seq_len: int, tmp_path: Path) -> None:
    small, _, _ = made(kind, tmp_path, data__truncate="drop", data__seq_len=500)
    prepared = prepared_for(small)
    tokens = prepared.total("train", "tokens") + prepared.total("validation", "tokens")
    assert prepare(small).result.startswith(f"{_in_words(tokens)} tokens, vocabulary")
    short = of(kind, tmp_path, data__truncate="drop", data__seq_len=seq_len)
    told = prepare(short).result
    target_len = short.data.target_len if kind == "pair" else None
    rows = read_packed(short.folder.columns, prepared, seq_len, short.row_plan, target_len).total
    assert rows.too_long > 0
    most = "data.seq_len and data.target_len" if kind == "pair" else "data.seq_len"
    assert told.startswith(
        f"{_in_words(tokens)} tokens ({_in_words(tokens - rows.tokens)} beyond {most} or without"
        " anything trained are in no row), vocabulary"
    )


@pytest.mark.parametrize(
    ("rating", "told"),
    [
        (None, ""),
        (True, "will not tell loss/accuracy: all of the "),
        (False, "loss/bits_per_byte, loss/accuracy: none of the "),
    ],
)
def test_held_out_answers_of_one_rating_are_told_before_training(
    rating: bool | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rated.jsonl"
    rated = [one | ({} if rating is None else {"label": rating}) for one in records("rated", 60)]
    path.write_text("".join(json.dumps(record) + "\n" for record in rated), encoding="utf-8")
    made("rated", tmp_path)
    shown = capsys.readouterr()
    warnings = [line for line in (shown.out + shown.err).splitlines() if "will not tell" in line]
    assert len(warnings) == bool(told)
    assert told in "".join(warnings)


@pytest.mark.parametrize("kind", ["pair", "labelled"])
def test_a_length_of_targets_where_nothing_has_any_is_told(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(kind, tmp_path, data__target_len=99)
    told = "data.target_len 99 has no effect: labelled texts have no targets"
    assert (told in capsys.readouterr().err) is (kind == "labelled")


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("kind", list(KNOBS))
def test_the_vocabulary_is_learnt_from_what_is_said(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = vocabulary.train_bpe
    monkeypatch.setattr(
        vocabulary,
        "train_bpe",
        lambda texts, *rest, **more: real(seen.extend(texts) or seen, *rest, **more),
    )
    made(kind, tmp_path)
    assert seen
    assert not any("{" in text or '"' in text for text in seen), (
        "what is said, not the JSON that it is kept in"
    )


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("kind", list(KNOBS))
def test_finished_parts_are_kept_and_another_length_plans_rows_alone(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(kind, tmp_path)
    monkeypatch.setattr(parts.TokeniseStage, "open", None)
    prepare(
        of(kind, tmp_path, data__seq_len=64, **({"data__target_len": 5} if kind == "pair" else {}))
    )


def test_another_prefix_or_other_labels_are_other_data(tmp_path: Path) -> None:
    first = made("pair", tmp_path)[0]
    other = of("pair", tmp_path, objective__prefix="tell: ")
    with pytest.raises(
        WrongInput,
        match=(
            r"was prepared for objective\.prefix 'say: ', the recipe says 'tell: '; run `ingot"
            r" prepare`"
        ),
    ):
        prepared_for(other)
    before = prepared_for(first).data
    prepare(other)
    assert prepared_for(other).data != before
    (tmp_path / "labelled").mkdir()
    labelled = made("labelled", tmp_path / "labelled")[0]
    with pytest.raises(
        WrongInput,
        match=(
            r"was prepared for objective\.labels \['odd', 'even'\], the recipe says \['even',"
            r" 'odd'\]"
        ),
    ):
        prepared_for(of("labelled", tmp_path / "labelled", objective__labels=["even", "odd"]))
    assert prepared_for(labelled).labels == ["odd", "even"]


def test_documents_of_another_objective_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distillation on chats has the columns of instruction tuning: its parts are taken as they are,
    and the manifest written anew.
    """
    path = tmp_path / "chats.jsonl"
    path.write_text(
        "".join(
            json.dumps({"instruction": f"Question {n}?", "output": f"Answer {n}. " * 4}) + "\n"
            for n in range(60)
        )
    )
    knobs = {"tokenizer__template": "chatml", "tokenizer__vocab_size": 400, "data__seq_len": 64}
    tuned = recipe(tmp_path, path, objective__kind="sft", **knobs)
    ingest(tuned)
    prepare(tuned)
    distilled = recipe(
        tmp_path,
        path,
        objective__kind="distill",
        objective__teacher="x",
        objective__documents="chat",
        **knobs,
    )
    with pytest.raises(
        WrongInput, match=r"prepared for objective\.kind sft, the recipe says distill"
    ):
        prepared_for(distilled)
    monkeypatch.setattr(parts.TokeniseStage, "open", None)
    prepare(distilled)
    assert prepared_for(distilled).documents == "chat"
    texts = recipe(tmp_path, path, objective__kind="distill", objective__teacher="x", **knobs)
    with pytest.raises(
        WrongInput, match=r"prepared for objective\.documents 'chat', the recipe says 'text'"
    ):
        prepared_for(texts)


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("kind", list(KNOBS))
def test_cleaning_compares_what_is_said(tmp_path: Path, kind: str) -> None:
    twice = records(kind, 60) + records(kind, 60, change=str.upper)
    path = tmp_path / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in twice), encoding="utf-8")
    small = of(kind, tmp_path, data__clean={"exact": True, "normalize": "nfc"})
    assert ingest(small).result.startswith("120 documents")
    prepare(small)
    prepared = prepared_for(small)
    assert sum(prepared.total(split, "documents") for split in ("train", "validation")) == 60, (
        "but for upper and lower case the second half is the first"
    )


def test_a_preference_that_the_template_refuses_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "refusing.jinja"
    template.write_text(
        "{% for message in messages %}{% if 'Rejected 7.' in message.content %}{{"
        " raise_exception('seven is refused') }}{% endif %}<{{ message.role }}>{{ message.content"
        " }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if"
        " add_generation_prompt %}<assistant>{% endif %}"
    )
    small = made("preference", tmp_path, tokenizer__template=str(template))[0]
    assert (
        sum(prepared_for(small).total(split, "documents") for split in ("train", "validation"))
        == 59
    )
    assert (
        "1 preferences are left out, the template refuses them, such as preference.jsonl:8: "
        in capsys.readouterr().err
    )


def test_too_few_to_train_on(tmp_path: Path) -> None:
    small = of("preference", tmp_path, data__seq_len=8)
    ingest(small)
    with pytest.raises(
        WrongInput,
        match=(
            r"train documents none can be learnt from with data\.seq_len=8; raise it or add"
            r" documents"
        ),
    ):
        prepare(small)
    with pytest.raises(
        WrongInput,
        match=(
            r"of 5\d training preferences can be trained on with data\.seq_len=96: less than one"
            r" train\.global_batch=64"
        ),
    ):
        prepare(of("preference", tmp_path, train__global_batch=64, data__validation__fraction=0.1))
