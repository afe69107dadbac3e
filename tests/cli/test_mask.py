"""`ingot show mask`: what a person sees of the mask, and the faults that its audit must show."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from ingot.base.errors import WrongInput
from ingot.cli.views import mask
from ingot.cli.views.audit import (
    Audit,
    AuditedExample,
    audit_chats,
    audit_documents,
    audit_preferences,
    in_words,
    table,
)
from ingot.cli.views.mask import show_mask
from ingot.data.documents.preferences import Preference
from ingot.tokenizers.bpe import train_bpe
from ingot.tokenizers.chats.chat import Chat
from ingot.tokenizers.chats.encode import encode_chats
from ingot.tokenizers.tokenizer import Tokenizer
from tests.tokenizers.small import CHATML, bpe_files, chatty

CHATS = [
    [
        {"role": "user", "content": f"question {number}"},
        {"role": "assistant", "content": "copper " * number},
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": "yes"},
    ]
    for number in range(1, 6)
]


def printed(
    audit: Audit,
    tokenizer: Tokenizer,
    seq_len: int = 512,
    *,
    what: str = "chats",
    colour: bool = False,
    truncate: str = "right",
) -> str:
    out = io.StringIO()
    Console(
        width=160, force_terminal=colour, color_system="standard" if colour else None, file=out
    ).print(table(audit, tokenizer, seq_len, what=what, truncate=truncate))
    return out.getvalue()


def recipe(root: Path, template: str | None = CHATML, **knobs: Any) -> str:
    """A recipe whose tokenizer and chats lie in `root`."""
    (root / "tokenizer").mkdir()
    for name, content in bpe_files(template).items():
        (root / "tokenizer" / name).write_text(content, encoding="utf-8")
    (root / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS) + "not JSON\n",
        encoding="utf-8",
    )
    values = {
        "name": "m",
        "output": str(root / "runs"),
        "objective": {"kind": "sft"},
        "tokenizer": {"source": str(root / "tokenizer")},
        "data": {"train": [{"source": str(root / "chats.jsonl")}], "seq_len": 40},
        **knobs,
    }
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def test_straight_from_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_mask([recipe(tmp_path), "data.seq_len=60"], 2) == 0
    out = capsys.readouterr().out
    assert (
        "<|im_start|>user\nquestion 1<|im_end|>\n<|im_start|>assistant\n⟦copper<|im_end|>⟧\n" in out
    )
    assert out.count("--- example") == 2
    assert "<|im_end|> trained in 10 of 10 assistant turns" in out
    assert "none in 5" in out
    tokenizer = chatty()
    assert tokenizer.identity() in out
    assert str(tokenizer.template_identity) in out


def test_chats_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_mask([recipe(tmp_path)], 2, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["verb"], len(told["examples"])) == ("show mask", 2)
    first = told["examples"][0]
    assert len(first["ids"]) == len(first["trained"])
    trained = [run["text"] for run in first["runs"] if run["trained"]]
    assert [text.split("<")[0].strip() for text in trained] == ["copper", "yes"]
    assert "question 1" in first["runs"][0]["text"]
    audit = told["audit"]
    assert (audit["what"], audit["examples"]) == ("chats", 5)
    assert (audit["end_of_turn"]["trained"], audit["end_of_turn"]["turns"]) == (10, 10)
    assert 0 < audit["trained_tokens"] < audit["tokens"]
    assert 0 < audit["cut_trained_tokens"] < audit["cut_tokens"] < audit["tokens"]


def test_documents_of_pretraining(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path, objective={"kind": "pretrain"})
    (tmp_path / "chats.jsonl").write_text(
        '{"text": "the copper"}\n{"text": "rings"}\n', encoding="utf-8"
    )
    assert show_mask([path]) == 0
    out = capsys.readouterr().out
    assert "⟦<|begin_of_text|>the copper<|end_of_text|>⟧" in out
    assert "EOS at the end" in out
    assert "trained in 2 of 2 documents" in out
    assert "100.0% of the tokens" in out


def test_fewer_long_documents_are_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But all that are shown."""
    monkeypatch.setattr(mask, "AUDITED_CHARACTERS", 250)
    chat_file = recipe(tmp_path)
    texts = [{"text": "copper " * 20} for _ in range(9)]
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    (tmp_path / "texts.jsonl").write_text(lines, encoding="utf-8")
    plain = ["objective.kind=pretrain", f"data.train.0.source={tmp_path / 'texts.jsonl'}"]
    for examples, looked in ((1, 2), (5, 5)):
        show_mask([chat_file, *plain], examples)
        assert f"{looked} documents" in capsys.readouterr().out


def test_a_recipes_template_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path, None)
    with pytest.raises(WrongInput, match="has no chat template"):
        show_mask([path])
    assert show_mask([path, "tokenizer.template=alpaca"], 1) == 0
    assert "### Response:\n⟦copper<|end_of_text|>⟧" in capsys.readouterr().out


def test_truncation_is_told(tmp_path: Path) -> None:
    tokenizer = chatty()
    audit = audit_chats(tokenizer, list(map(Chat, CHATS)))
    lengths = [len(example.ids) for example in audit.examples]
    assert "0 of 5; of these 0" in printed(audit, tokenizer, max(lengths))
    assert "5 of 5; of these 5 lose all" in printed(audit, tokenizer, 8)


def test_an_untrained_end_of_turn_shows() -> None:
    tokenizer = chatty()
    audit = audit_chats(tokenizer, list(map(Chat, CHATS)))
    end = tokenizer.special_ids["<|im_end|>"]
    planted = Audit(
        [
            AuditedExample(
                example.ids,
                np.where(example.ids == end, 0, example.mask).astype(np.uint8),
                example.turns,
            )
            for example in audit.examples
        ]
    )
    assert "trained in 10 of 10" in printed(audit, tokenizer)
    assert "trained in 0 of 10" in printed(planted, tokenizer)
    assert "\x1b[31m<|im_end|> trained in 0 of 10" in printed(planted, tokenizer, colour=True)
    assert "\x1b[31m<|im_end|>" not in printed(audit, tokenizer, colour=True)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ bos_token }}", "one in 5"),
        ("{{ bos_token }}{{ bos_token }}", "two or more in 5"),
        ("", "none in 5"),
    ],
)
def test_double_bos_shows(template: str, told: str) -> None:
    tokenizer = chatty(template + CHATML)
    audit = audit_chats(tokenizer, list(map(Chat, CHATS)))
    assert told in printed(audit, tokenizer)
    assert (f"\x1b[31m{told}" in printed(audit, tokenizer, colour=True)) == ("two" in told)


def test_no_end_of_turn_shows() -> None:
    tokenizer = chatty(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if"
        " add_generation_prompt %}assistant:{% endif %}"
    )
    assert "does not learn to stop" in printed(
        audit_chats(tokenizer, list(map(Chat, CHATS))), tokenizer
    )


def test_empty_assistant_turns_show() -> None:
    said = {"role": "assistant", "content": "yes"}
    silent = {"role": "assistant", "content": " "}
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    calling = {**silent, "tool_calls": [call]}
    asked = {"role": "user", "content": "so?"}
    tokenizer = chatty(CHATML)
    chats = [Chat([asked, said, asked, silent]), Chat([asked, said]), Chat([asked, calling])]
    audit = audit_chats(tokenizer, chats)
    assert "empty assistant turns" in (shown := printed(audit, tokenizer))
    assert "1: these teach to say nothing; take them out of the chats" in shown
    assert "empty assistant turns" not in printed(audit_chats(tokenizer, chats[1:]), tokenizer)


def test_answers_that_are_not_trained_are_no_turns_that_lack_their_end() -> None:
    asked, said = {"role": "user", "content": "so?"}, {"role": "assistant", "content": "yes"}
    tokenizer = chatty(CHATML)
    audit = audit_chats(tokenizer, [Chat([asked, said | {"weight": 0}, asked, said])])
    assert "<|im_end|> trained in 1 of 1 assistant turns" in printed(audit, tokenizer)


def test_an_end_that_is_not_eos_shows() -> None:
    told = "it is not the tokenizer's EOS (<|end_of_text|>)"
    tokenizer = chatty()
    assert told in printed(audit_chats(tokenizer, list(map(Chat, CHATS))), tokenizer)
    same = Tokenizer(bpe_files(CHATML, eos_token="<|im_end|>"))
    assert told not in printed(audit_chats(same, list(map(Chat, CHATS))), same)


def test_chats_without_targets_and_refused_ones_are_counted() -> None:
    tokenizer = chatty(
        "{% if messages | length > 4 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
    )
    audit = audit_chats(tokenizer, [*map(Chat, CHATS), Chat(CHATS[0][:1]), Chat(CHATS[0] * 2)])
    assert len(audit.examples) == 6
    assert audit.without_targets() == 1
    assert [(count, "too long" in reason) for reason, count in audit.refused.items()] == [(1, True)]


@pytest.mark.parametrize(
    ("truncate", "kept"), [("right", slice(0, 40)), ("left", slice(-40, None)), ("drop", None)]
)
def test_what_is_cut_is_not_told_as_trained(truncate: str, kept: slice | None) -> None:
    """Of a chat that is longer than a row, and of one that is not."""
    tokenizer = chatty()
    audit = audit_chats(tokenizer, [Chat(CHATS[0]), Chat(CHATS[0][:2])])
    long, short = audit.examples
    assert len(long.ids) > 40 >= len(short.ids)
    mask = long.mask[kept] if kept is not None else long.mask[:0]
    cut = len(long.mask) - len(mask), int(long.mask.sum() - mask.sum())
    gone = audit.cut(40, truncate)
    assert (gone.tokens, gone.trained) == cut
    assert audit.cut(len(long.ids), truncate).tokens == 0
    told = printed(audit, tokenizer, 40, truncate=truncate)
    left = (mask.sum() + short.mask.sum()) / (len(mask) + len(short.ids))
    assert f"{left:.1%} of the tokens; {cut[0]} tokens are cut away, {cut[1]} of them to" in told
    if truncate == "drop":
        assert "trained in 1 of 3 assistant turns, 2 are cut away" in told


def test_a_prompt_is_cut_before_its_answer() -> None:
    mask = np.array([0, 0, 0, 1, 1, 1], np.uint8)
    audit = Audit([AuditedExample(np.arange(6, dtype=np.int32), mask, side="good")])
    for seq_len, cut in ((4, (2, 0)), (2, (4, 2))):
        gone = audit.cut(seq_len, "left")
        assert (gone.tokens, gone.trained) == cut


def test_colours_and_brackets() -> None:
    tokenizer = chatty()
    ids, mask, _ = encode_chats(tokenizer, [Chat(CHATS[0])], tokenizer.encode_batch)
    example = AuditedExample(ids, mask, 2)
    plain, coloured = (
        in_words(tokenizer, example, plain=True),
        in_words(tokenizer, example, plain=False),
    )
    assert (
        plain.plain.replace("⟦", "").replace("⟧", "")
        == coloured.plain
        == tokenizer.decode(ids, skip_special=False)
    )
    green = "".join(
        coloured.plain[span.start : span.end]
        for span in coloured.spans
        if "green" in str(span.style)
    )
    assert green == "copper<|im_end|>yes<|im_end|>"


def test_a_terminal_is_told_nothing_by_the_data() -> None:
    """Such as to clear the screen, or to take a text into the clipboard."""
    tokenizer = chatty()
    (example,) = audit_documents(tokenizer, ["a\x1b[2J\x9b1m\tb\n\x07\x7f"]).examples
    shown = in_words(tokenizer, example, plain=False).plain
    assert "a\\x1b[2J\\x9b1m\tb\n\\x07\\x7f" in shown


def test_documents_end_with_eos() -> None:
    tokenizer = Tokenizer(bpe_files(CHATML, eos_token=None))
    assert "trained in 0 of 1 documents" in printed(
        audit_documents(tokenizer, ["a"]), tokenizer, what="documents"
    )


PREFERENCE = {
    "prompt": [*CHATS[0][:2], {"role": "user", "content": "and?"}],
    "chosen": [{"role": "assistant", "content": "rings"}],
    "rejected": [{"role": "assistant", "content": "melts melts melts"}],
}


def test_both_sides_of_preferences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path, objective={"kind": "dpo"})
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(PREFERENCE)}\n" * 5, encoding="utf-8")
    assert show_mask([path, "data.seq_len=60"], 2) == 0
    out = capsys.readouterr().out
    before = (
        "assistant\ncopper<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (
        out.count(f"{before}⟦rings<|im_end|>⟧")
        == out.count(f"{before}⟦melts melts melts<|im_end|>⟧")
        == 2
    )
    assert [
        line.partition(", ")[2].partition(", ")[0]
        for line in out.splitlines()
        if line.startswith("--- example")
    ] == ["chosen", "rejected"] * 2
    assert "<|im_end|> trained in 10 of 10 assistant turns" in out, (
        "the turn in the prompt is not counted"
    )
    assert "10 sides" in out


def test_preferences_that_the_template_refuses() -> None:
    tokenizer = chatty(
        "{% if 'melts' in messages[-1].content %}{{ raise_exception('no melting') }}{% endif %}"
        + CHATML
    )
    fine = Preference(PREFERENCE["prompt"], PREFERENCE["chosen"], PREFERENCE["chosen"] * 2)
    audit = audit_preferences(tokenizer, [fine, Preference(**PREFERENCE), fine])
    assert [example.side for example in audit.examples] == ["chosen", "rejected"] * 2
    assert [(count, "no melting" in reason) for reason, count in audit.refused.items()] == [
        (1, True)
    ]
    assert "of these 4 lose all" in printed(audit, tokenizer, 8, what="sides")


def test_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(
        tmp_path,
        objective={"kind": "seq2seq", "prefix": "say: "},
        tokenizer={"source": str(tmp_path / "tokenizer")},
    )
    (tmp_path / "chats.jsonl").write_text(
        '{"source": "the copper", "target": "rings"}\n' * 4, encoding="utf-8"
    )
    assert show_mask([path, "data.target_len=2"], 1) == 0
    out, tokenizer = capsys.readouterr().out, chatty()
    assert (
        "<|begin_of_text|>say: the copper<|end_of_text|> | ⟦<|begin_of_text|>rings<|end_of_text|>⟧"
        in out
    )
    sides = [
        " ".join(map(str, tokenizer.encode_framed(text))) for text in ("say: the copper", "rings")
    ]
    assert f"source {sides[0]} | target {sides[1]}" in out
    assert "<|begin_of_text|> before it, <|end_of_text|> behind it" in out
    assert "targets longer than data.target_len=2" in out
    assert "4 of 4" in out
    assert show_mask([path, "data.target_len=2"], 1, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    (example,) = told["examples"]
    assert example["columns"]["target"]["ids"] == tokenizer.encode_framed("rings")
    assert (told["audit"]["longer"]["target"], told["audit"]["labels"]) == (4, None)


def test_labelled_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path, objective={"kind": "classify", "labels": ["dull", "bright", "none"]})
    lines = [
        {"text": "the copper", "label": "bright"},
        {"text": "rings", "label": 0},
        {"text": "x", "label": 7},
    ]
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    assert show_mask([path], 2) == 0
    out = capsys.readouterr().out
    assert "<|begin_of_text|>the copper -> bright (1)" in out
    assert "<|begin_of_text|>rings -> dull (0)" in out
    assert "2 labelled texts" in out
    assert [line.split("│")[2].strip() for line in out.splitlines() if "label " in line] == [
        "1, 50.0%",
        "1, 50.0%",
        "0, 0.0%",
    ]
    assert show_mask([path], 2, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert [example["label"] for example in told["examples"]] == ["bright", "dull"]
    assert told["audit"]["labels"] == {"dull": 1, "bright": 1, "none": 0}


def asks_for_hidden(path: str, texts: list[str], **objective: Any) -> None:
    """Let the recipe at `path` train on what is hidden of these texts."""
    source = Path(path).with_name("texts.jsonl")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    values = yaml.safe_load(Path(path).read_text()) | {"objective": objective}
    values["data"]["train"] = [{"source": str(source)}]
    Path(path).write_text(yaml.safe_dump(values), encoding="utf-8")


def test_masked_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is asked for, what the model reads, and how much of both; as JSON the same."""
    path = recipe(tmp_path, None)
    train_bpe(["copper melts and rings"] * 9, 300, masks=True).save(tmp_path / "tokenizer")
    texts = ["copper melts and rings " * number for number in (9, 2)]
    asks_for_hidden(path, texts, kind="mlm", mlm_probability=0.5)
    assert show_mask([path]) == 0
    out = capsys.readouterr().out
    assert "--- example 1, 40 tokens," in out
    assert "the model reads: <|begin_of_text|>" in out
    assert "<|mask|>" in out
    assert show_mask([path], as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    audit, first = told["audit"], told["examples"][0]
    assert audit["asked"] == audit["masked"] + audit["replaced"] + audit["kept"] > 9
    assert first["text"].startswith("<|begin_of_text|>copper melts and rings copper")
    assert first["text"].endswith("<|end_of_text|>")
    assert first["read"].count("<|mask|>") > 5
    assert sum(label >= 0 for label in first["labels"]) > first["read"].count("<|mask|>")
    assert audit["in_several_pieces"] == 1
    assert f"{audit['asked']:,} tokens" in out
    train_bpe(["copper"] * 9, 300).save(tmp_path / "tokenizer")
    with pytest.raises(WrongInput, match="has no mask token"):
        show_mask([path])


def test_hidden_spans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is read and what is to be written, and how much is hidden; as JSON the same."""
    path = recipe(tmp_path, None)
    train_bpe(["copper melts and rings"] * 9, 400, spans=True).save(tmp_path / "tokenizer")
    texts = ["copper melts and rings " * 9, "a"]
    asks_for_hidden(path, texts, kind="span_corruption", noise_density=0.3)
    assert show_mask([path]) == 0
    out = capsys.readouterr().out
    assert "--- example 1, 45 tokens: 37 to read, 20 to write" in out
    assert "the model reads: copper" in out
    assert "and writes: <extra_id_0>" in out
    assert re.search(r"left out: fewer than 2 tokens[ │]*1 of 2", out)
    assert show_mask([path], as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    (first,), audit = told["examples"], told["audit"]
    spans = re.split(r"<extra_id_\d+>", first["target"]["text"].removesuffix("<|end_of_text|>"))
    whole = first["source"]["text"].removesuffix("<|end_of_text|>")
    for number, span in enumerate(spans[1:]):
        whole = whole.replace(f"<extra_id_{number}>", span)
    assert ("copper melts and rings " * 9).startswith(whole)
    assert (audit["hidden"], audit["spans"], audit["too_short"]) == (14, 5, 1)
