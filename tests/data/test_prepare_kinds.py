"""What `prepare` makes of other kinds of documents: chats, and existing columns; and of a fast
encoder that errs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import ingot.data.ingest as ingest_module
from ingot.base.errors import WrongInput
from ingot.cli.views.datatables import show_data
from ingot.config.recipe import Recipe
from ingot.data.batches.rows import IGNORE, open_rows
from ingot.data.cleaning.cleaned import CleaningResult
from ingot.data.columns.column import Column, ColumnWriter, column_prefix
from ingot.data.columns.manifest import prepared_for, read_prepared
from ingot.data.ingest import ingest
from ingot.data.packing.tables import read_packed
from ingot.data.prepare import _in_words, prepare
from ingot.data.raw import ranges
from ingot.data.splits import Shares
from ingot.data.tokenizing import encode as taken
from ingot.data.tokenizing import tokenize as parts
from ingot.tokenizers.backend import TokenBatch
from ingot.tokenizers.encoders import REFERENCE, EncoderChoice
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.verify.export.transformers import check_chats
from tests.data.small import recipe, sentences, write_jsonl
from tests.tokenizers.chats.test_served import OPENED


def chats(path: Path, count: int = 60) -> Path:
    records = [
        {
            "messages": [
                {"role": "system", "content": "Speak of metal."},
                {"role": "user", "content": f"Question {number}?"},
                {
                    "role": "assistant",
                    "content": f"Answer {number}: copper melts. " * (number % 5 + 1),
                },
            ]
        }
        for number in range(count)
    ]
    if not path.exists():
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat_recipe(root: Path, **knobs: object) -> Recipe:
    given = {
        "objective__kind": "sft",
        "tokenizer__template": "alpaca",
        "tokenizer__vocab_size": 400,
        "data__seq_len": 96,
        **knobs,
    }
    return recipe(root, chats(root / "chats.jsonl"), **given)


def test_chats_become_tokens_and_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = chat_recipe(tmp_path)
    assert ingest(small).result.startswith("60 documents")
    prepare(small)
    assert "no special token after" not in capsys.readouterr().err
    prepared = prepared_for(small)
    assert prepared.columns == [
        {"name": "tokens", "dtype": "uint16"},
        {"name": "mask", "dtype": "uint8"},
    ]
    tokenizer = load_tokenizer(small.folder.tokenizer)
    assert prepared.template == tokenizer.template_identity is not None
    tokens, mask = (
        Column(column_prefix(small.folder.columns, "train", name, 0)) for name in ("tokens", "mask")
    )
    said = 0
    for record in range(len(tokens)):
        trained = tokens[record][mask[record] == 1]
        assert trained[-1] == tokenizer.special.eos, "the model has to learn to stop"
        text = tokenizer.decode(trained)
        assert text.startswith("Answer ")
        assert "Question" not in text
        said += len(text.encode())
        assert tokens[record].tolist().count(tokenizer.special.bos) == 1
    assert prepared.total("train", "bytes") == pytest.approx(said, abs=len(tokens)), (
        "white space at the end of an answer may be trimmed"
    )


def test_rows_of_chats_train_answers_alone(tmp_path: Path) -> None:
    small = chat_recipe(tmp_path)
    ingest(small)
    prepare(small)
    tokenizer = load_tokenizer(small.folder.tokenizer)
    rows = open_rows(small.folder.columns, "train", 96, pack="best_fit", pad_last=False)
    for index in range(len(rows)):
        row = rows.row(index)
        text = tokenizer.decode(row.labels[row.labels != IGNORE])
        assert "Answer" in text
        assert "Question" not in text
        assert "metal" not in text


def test_another_row_length_packs_again_and_encodes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = chat_recipe(tmp_path)
    ingest(small)
    prepare(small)
    monkeypatch.setattr(parts.TokeniseStage, "open", None)
    longer = chat_recipe(tmp_path, data__seq_len=128)
    prepare(longer)
    assert len(open_rows(longer.folder.columns, "train", 128, pack="best_fit", pad_last=False)) > 0


def test_another_template_makes_other_columns(tmp_path: Path) -> None:
    small = chat_recipe(tmp_path)
    ingest(small)
    first = prepare(small)
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% if message.role"
        " == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt"
        " %}<assistant>{% endif %}"
    )
    assert (
        prepare(chat_recipe(tmp_path, tokenizer__template=str(template))).outputs != first.outputs
    )


def test_chats_with_thoughts_are_trained_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the messages' own key to the columns, by a fast encoder that is compared throughout. An
    answer whose thought the template drops once others follow is trained in a text of its own.
    """
    monkeypatch.setattr("ingot.data.tokenizing.parts.FEW_BYTES", 0)
    monkeypatch.setattr("ingot.data.tokenizing.parts.MANY_RENDERED", 1)
    monkeypatch.setattr(parts, "COMPARED", 1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    answers = [
        {"role": "assistant", "content": f"Answer {n}.", "reasoning_content": f"Thought {n}."}
        for n in range(80)
    ]
    asked = {"role": "user", "content": "Well?"}
    records = [{"messages": [asked, answers[n], asked, answers[n + 1]]} for n in range(0, 80, 2)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (tmp_path / "thinks.jinja").write_text(OPENED)
    knobs = {"tokenizer__template": str(tmp_path / "thinks.jinja"), "tokenizer__encoder": "auto"}
    small = chat_recipe(tmp_path, **knobs)
    ingest(small)
    first = prepare(small)
    err = " ".join(capsys.readouterr().err.split())
    assert "40 chats cut after an earlier answer are texts of their own" in err
    # The template's end of a turn is no token of this vocabulary.
    assert "writes no special token after what the assistant says" in err
    assert "40 of 40 chats were rendered one by one" in err
    prepared = prepared_for(small)
    parts_made = [one for made in prepared.splits.values() for each in made for one in each.parts]
    assert sum(one.documents for one in parts_made) == sum(one.added for one in parts_made) == 40
    tokenizer, said = load_tokenizer(small.folder.tokenizer), list[str]()
    for split in prepared.splits:
        tokens, mask = (
            Column(column_prefix(small.folder.columns, split, name, 0)) for name in prepared.names
        )
        said += [
            tokenizer.decode(tokens[record][mask[record] == 1]) for record in range(len(tokens))
        ]
    tokenizer.save(small.folder.model)
    compared = check_chats(small, prepared, tokenizer)
    held_out = min(16, 2 * prepared.total("validation", "documents"))
    assert (compared.passed, compared.detail.split(",")[0]) == (True, f"{held_out} held-out chats")
    assert sorted(said) == sorted(
        f"Thought {n}.\n</think>\n\nAnswer {n}.<|im_end|>" for n in range(80)
    )
    kwargs = {"tokenizer__template_kwargs": {"enable_thinking": False}}
    with pytest.raises(
        WrongInput, match=r"the template refuses 40 of 40 chats \(chats.jsonl:1: .*mend the source$"
    ):
        prepare(chat_recipe(tmp_path, **knobs, **kwargs))
    with pytest.raises(WrongInput, match="no document of 0"):
        prepare(chat_recipe(tmp_path, **knobs, **kwargs, data__max_skipped=1.0))
    assert "40 chats are left out, the template refuses them" in capsys.readouterr().err
    for answer in answers:
        del answer["reasoning_content"]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    ingest(small)
    opened = prepare(small)
    closed = chat_recipe(tmp_path, **knobs, **kwargs)
    assert prepare(closed).outputs != opened.outputs != first.outputs
    asked_with = load_tokenizer(closed.folder.tokenizer)
    assert asked_with.decode(asked_with.encode_chat([asked])).endswith("<think>\n\n</think>\n\n")


def test_columns_of_another_objective_are_refused(tmp_path: Path) -> None:
    small = chat_recipe(tmp_path)
    ingest(small)
    prepare(small)
    with pytest.raises(
        WrongInput,
        match=r"prepared for objective\.kind sft, the recipe says pretrain; run `ingot prepare`",
    ):
        prepared_for(recipe(tmp_path, tmp_path / "chats.jsonl"))


def columns_of(root: Path, tokenizer: Tokenizer, texts: Sequence[str]) -> str:
    """Existing columns, as Megatron's own tool would leave them."""
    records = [np.array(tokenizer.encode_document(text), np.int32) for text in texts]
    with ColumnWriter(root / "old", np.dtype("int32")) as writer:
        writer.append(np.concatenate(records), np.array([len(record) for record in records]))
    return f"megatron:{root / 'old'}"


def test_existing_columns_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ingest_module, "GROUP_DOCUMENTS", 40)
    monkeypatch.setattr(ranges, "SMALLEST_BYTES", 1000)
    monkeypatch.setattr(taken, "BATCH_TOKENS", 300)
    texts = sentences(150)
    first = recipe(tmp_path / "first", write_jsonl(tmp_path / "a.jsonl", texts))
    ingest(first)
    prepare(first)
    tokenizer = load_tokenizer(first.folder.tokenizer)
    given = {"tokenizer__source": str(first.folder.tokenizer), "tokenizer__vocab_size": None}
    small = recipe(tmp_path / "second", columns_of(tmp_path, tokenizer, texts), **given)
    ingest(small)
    assert "nothing in it tells which tokenizer made its ids" in capsys.readouterr().err
    prepare(small)
    prepared = read_prepared(small.folder.columns)
    assert sum(prepared.total(split, "documents") for split in ("train", "validation")) == 150
    found = set()
    for split in ("train", "validation"):
        for part in prepared.splits[split][0].parts:
            column = Column(column_prefix(small.folder.columns, split, "tokens", part.number))
            found |= {tokenizer.decode(column[record]) for record in range(len(column))}
    assert found == set(texts)
    held_out = prepared.splits["validation"][0]
    assert (
        0
        < held_out.bytes
        == pytest.approx(
            sum(map(len, (text.encode() for text in texts))) * held_out.documents / 150, rel=0.3
        )
    )
    assert len(prepared.splits["train"][0].parts) > 1
    half = recipe(tmp_path / "half", small.data.train[0].source, **given, data__fraction=0.5)
    ingest(half)
    prepare(half)
    dropped = json.loads((half.folder.columns / "manifest.json").read_text())["dropped"]
    assert (0 < dropped["data.fraction"] < 150, dropped["lost"]) == (True, 0)


def test_existing_columns_are_not_cleaned_which_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are tokens. Nobody is told to drop copies among them with a knob that cannot."""
    texts = [*sentences(40), *sentences(40)]
    first = recipe(tmp_path / "first", write_jsonl(tmp_path / "a.jsonl", texts))
    ingest(first)
    prepare(first)
    source = columns_of(tmp_path, load_tokenizer(first.folder.tokenizer), texts)
    given = {"tokenizer__source": str(first.folder.tokenizer), "tokenizer__vocab_size": None}
    for clean in ({}, {"exact": True}, {"contamination": {}}):
        small = recipe(tmp_path / "second", source, **given, data__clean=clean)
        ingest(small)
        capsys.readouterr()
        prepare(small)
        told = capsys.readouterr().err
        copies = "trained on too, word for word, and tell little about new ones"
        assert (copies in told, "data.clean.exact" in told) == (True, False)
        unread = f"data.clean does nothing to the 80 documents of {source}, which are tokens"
        assert (unread in told) == bool(clean)
        show_data(str(small.folder.root))
        assert ("not cleaned, its documents are tokens" in capsys.readouterr().out) == bool(clean)


def test_texts_that_are_all_dropped_leave_the_tokens_beside_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", sentences(40))
    first = recipe(tmp_path / "first", texts)
    ingest(first)
    prepare(first)
    source = columns_of(tmp_path, load_tokenizer(first.folder.tokenizer), sentences(80))
    small = recipe(
        tmp_path / "second",
        texts,
        source,
        tokenizer__source=str(first.folder.tokenizer),
        tokenizer__vocab_size=None,
        data__clean={"min_chars": 10_000},
    )
    ingest(small)
    prepare(small)
    assert "cleaning dropped 40 of 40 documents" in capsys.readouterr().err
    sources = prepared_for(small).splits["train"]
    assert [bool(one.documents) for one in sources] == [False, True]


def test_columns_of_a_larger_vocabulary_are_refused(tmp_path: Path) -> None:
    texts = sentences(60)
    first = recipe(
        tmp_path / "first", write_jsonl(tmp_path / "a.jsonl", texts), tokenizer__vocab_size=320
    )
    ingest(first)
    prepare(first)
    source = columns_of(tmp_path, load_tokenizer(first.folder.tokenizer), texts)
    smaller = recipe(
        tmp_path / "other", write_jsonl(tmp_path / "b.jsonl", texts), tokenizer__vocab_size=280
    )
    ingest(smaller)
    prepare(smaller)
    small = recipe(
        tmp_path / "second",
        source,
        tokenizer__source=str(smaller.folder.tokenizer),
        tokenizer__vocab_size=None,
    )
    ingest(small)
    with pytest.raises(
        WrongInput,
        match=(
            r"old\.bin: document old:\d+ has the id 29\d, the tokenizer only 280 ids; another one"
            r" made these columns"
        ),
    ):
        prepare(small)


class Erring:
    """A fast encoder that gives one wrong id."""

    name = "erring 1.0"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        flat, offsets = self._tokenizer.encode_batch(texts)
        flat = flat.copy()
        flat[offsets[:-1]] = 7
        return flat, offsets


def test_a_fast_encoder_that_errs_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ingot.data.tokenizing.parts.FEW_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_jsonl(tmp_path / "a.jsonl", sentences(200))
    right = recipe(tmp_path / "right", source, tokenizer__encoder="reference")
    ingest(right)
    expected = prepare(right).outputs
    opened = parts.open_encoder
    choice = EncoderChoice("erring 1.0", [("erring 1.0", "taken: by a fault")], {"erring 1.0": 1.0})
    monkeypatch.setattr(
        "ingot.data.tokenizing.parts.choose_encoder", lambda tokenizer, texts: choice
    )
    monkeypatch.setattr(
        parts,
        "open_encoder",
        lambda tokenizer, name: (
            Erring(tokenizer) if name == "erring 1.0" else opened(tokenizer, name)
        ),
    )
    monkeypatch.setattr(parts, "COMPARED", 0.05)
    small = recipe(tmp_path / "erring", source)
    ingest(small)
    assert prepare(small).outputs == expected
    assert "erring 1.0 gave other ids than the reference for a.jsonl:" in capsys.readouterr().err
    manifest = json.loads((small.folder.columns / "done" / "train-00000.json").read_text())
    assert manifest["redone"].startswith("a.jsonl:")


def test_so_many_characters_are_compared_as_were_asked_for(tmp_path: Path) -> None:
    """Not whole documents, of which the reference takes longer than all others take."""
    small = recipe(tmp_path, write_jsonl(tmp_path / "a.jsonl", sentences(20)))
    ingest(small)
    prepare(small)
    folder, nothing = small.folder.tokenizer, CleaningResult.nothing()
    stage = parts.TokeniseStage(
        *(folder, folder, folder, REFERENCE, "text", ""),
        *(Shares(None, 1.0), nothing, True, "", 50),
    )
    tokenizer, texts = load_tokenizer(folder), ["word " * 8] * 3
    right = parts.open_encoder(tokenizer, REFERENCE)
    assert stage._compare_plain(tokenizer, right, ["a", "b", "c"], texts) == 50


def test_few_documents_are_encoded_without_opening_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their number of bytes decides, and never about the ids."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, made = write_jsonl(tmp_path / "a.jsonl", sentences(200)), []
    for name in ("few", "many"):
        small = recipe(tmp_path / name, source)
        ingest(small)
        made.append(prepare(small).outputs)
        assert ("encoding with" in capsys.readouterr().err) == (name == "many")
        monkeypatch.setattr("ingot.data.tokenizing.parts.FEW_BYTES", small.data.seq_len)
    assert made[0] == made[1]


def refusing(root: Path, **knobs: object) -> Recipe:
    """A template that does not take chats of which one number is odd in its own way."""
    template = root / "refusing.jinja"
    template.write_text(
        "{% for message in messages %}{% if 'Question 7?' in message.content %}{{"
        " raise_exception('seven is refused') }}{% endif %}<{{ message.role }}>{{ message.content"
        " }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if"
        " add_generation_prompt %}<assistant>{% endif %}"
    )
    return chat_recipe(root, tokenizer__template=str(template), **knobs)


def test_tokens_that_are_cut_are_told_beside_all(tmp_path: Path) -> None:
    small = chat_recipe(tmp_path, data__seq_len=50)
    ingest(small)
    told = prepare(small).result
    rows = read_packed(small.folder.columns, prepared_for(small), 50, small.row_plan)
    assert rows.total.truncated + rows.total.lost > 0
    prepared = prepared_for(small)
    tokens = prepared.total("train", "tokens") + prepared.total("validation", "tokens")
    cut = tokens - rows.total.tokens
    assert cut > 0
    assert told.startswith(f"{_in_words(tokens)} tokens ({_in_words(cut)} beyond data.seq_len or")
    assert "beyond" not in prepare(chat_recipe(tmp_path, data__seq_len=500)).result


def test_a_chat_that_the_template_refuses_is_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = refusing(tmp_path)
    ingest(small)
    first = prepare(small)
    prepared = prepared_for(small)
    assert sum(prepared.total(split, "documents") for split in ("train", "validation")) == 59
    told = "1 chats are left out, the template refuses them, such as chats.jsonl:8: "
    assert told in capsys.readouterr().err
    dropped = json.loads((small.folder.columns / "manifest.json").read_text())["dropped"]
    assert (dropped["template"], dropped["data.fraction"], dropped["lost"]) == (1, 0, 0)
    assert prepare(small) == first, "the finished part remembers what it left out"


def test_or_it_stops(tmp_path: Path) -> None:
    small = refusing(tmp_path, data__on_bad="stop")
    ingest(small)
    with pytest.raises(WrongInput, match="seven is refused"):
        prepare(small)
    prepare(refusing(tmp_path))
    with pytest.raises(WrongInput, match=r"seven is refused.*, or set data\.on_bad=skip"):
        prepare(small)  # though the part without that chat is finished


def test_an_encoder_chosen_before_is_compared_on_these_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It errs in documents of which none is drawn for the usual comparison."""
    monkeypatch.setattr("ingot.data.tokenizing.parts.FEW_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_jsonl(tmp_path / "a.jsonl", sentences(200))
    first = recipe(tmp_path / "first", source)
    ingest(first)
    expected = prepare(first).outputs
    capsys.readouterr()
    kept = list((tmp_path / "cache" / "ingot" / "encoders").iterdir())
    assert len(kept) == 1
    again = recipe(tmp_path / "again", source)
    ingest(again)
    assert prepare(again).outputs == expected
    assert "as chosen before for this tokenizer" in capsys.readouterr().err
    assert kept[0].exists()
    opened = parts.open_encoder
    monkeypatch.setattr(
        parts,
        "open_encoder",
        lambda tokenizer, name: opened(tokenizer, name) if name == REFERENCE else Erring(tokenizer),
    )
    monkeypatch.setattr(parts, "COMPARED", 0.0)
    erring = recipe(tmp_path / "erring", source)
    ingest(erring)
    assert prepare(erring).outputs == expected
    assert "gave other ids than the reference for a.jsonl:1" in capsys.readouterr().err
    assert not kept[0].exists()
