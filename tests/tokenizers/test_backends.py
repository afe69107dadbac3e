"""Tiktoken ranks and SentencePiece models: the ids of their own libraries, text that stays text, a
folder that others open.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.tokenizers.backend import split_batch
from ingot.tokenizers.edge_cases import edge_case_texts
from ingot.tokenizers.encoders import choose_encoder
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.sentencepiece_backend import read_model
from ingot.tokenizers.tiktoken_backend import LETTERS, SPLIT, is_ranks, read_ranks, spell, unspell
from ingot.tokenizers.tokenizer import SpecialIds, Tokenizer
from tests.tokenizers.models import TEXTS, pieces_file, ranks_file

KINDS = ("ranks", "bpe", "unigram")
FILES = {"ranks": "tokenizer.model", "bpe": "tokenizer.model", "unigram": "spiece.model"}


def data_of(kind: str) -> bytes:
    return ranks_file() if kind == "ranks" else pieces_file(kind)


def folder_of(kind: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / FILES[kind]).write_bytes(data_of(kind))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(folder_of(kind, tmp_path_factory.mktemp("model") / kind))


def library_ids(kind: str, text: str) -> list[int]:
    """What the library says, asked without this project."""

    import sentencepiece
    import tiktoken

    if kind == "ranks":
        ranks = read_ranks(ranks_file(), "")
        return tiktoken.Encoding(
            "own",
            pat_str=SPLIT,
            mergeable_ranks=ranks,
            special_tokens={"<|end_of_text|>": len(ranks)},
        ).encode_ordinary(text)
    ids: list[int] = sentencepiece.SentencePieceProcessor(model_proto=pieces_file(kind)).encode(
        text
    )
    return ids


def test_the_ids_of_the_library(kind: str, tokenizer: Tokenizer) -> None:
    texts = [*TEXTS[:9], *edge_case_texts(tokenizer.special_texts[:12])]
    wanted = [library_ids(kind, text) for text in texts]
    assert [tokenizer.encode(text) for text in texts] == wanted
    assert list(split_batch(tokenizer.encode_batch(texts))) == wanted


def test_special_tokens(kind: str, tokenizer: Tokenizer) -> None:
    count = len(read_ranks(ranks_file(), ""))
    expected = {
        "ranks": SpecialIds(count, count + 1, None),
        "bpe": SpecialIds(1, 2, None),
        "unigram": SpecialIds(None, 1, 0),
    }[kind]
    assert (tokenizer.special, tokenizer.adds_bos) == (expected, kind != "unigram")
    special = {
        index
        for index in range(tokenizer.vocab_size)
        if tokenizer.token(index) in tokenizer.special_texts
    }
    assert len(special) == len(tokenizer.special_texts) == (256 if kind == "ranks" else 3)
    unknown = {2} if kind == "unigram" else set()
    for token in tokenizer.special_texts:
        assert not (special - unknown) & set(tokenizer.encode(f"a{token}b {token}")), token
    assert tokenizer._reference.control.encode(
        f"a{tokenizer.special_texts[1]}", add_special_tokens=False
    ).ids == [*tokenizer.encode("a"), sorted(special)[1]]


def test_text_comes_back(kind: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_document("the copper rings")
    assert tokenizer.decode(ids) == "the copper rings"
    begin, end = (
        ("<|begin_of_text|>", "<|end_of_text|>")
        if kind == "ranks"
        else ("<s>" if kind == "bpe" else "", "</s>")
    )
    assert tokenizer.decode(np.array(ids), skip_special=False) == f"{begin}the copper rings{end}"
    assert tokenizer.decode([10**6, *ids]) == "the copper rings", (
        "ids outside the vocabulary are nothing"
    )


def test_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.token(tokenizer.vocab_size) is None
    assert tokenizer.token(-1) is None
    assert all(tokenizer.token(index) for index in range(tokenizer.vocab_size))


def test_saved_it_is_the_same_and_transformers_opens_it(
    kind: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.identity(), again.files, again.library) == (
        tokenizer.identity(),
        tokenizer.files,
        tokenizer.library,
    )
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS[:5], "für naïve 金属 12345"):
        assert theirs(text)["input_ids"] == (
            tokenizer.encode_framed(text) if kind == "unigram" else tokenizer.encode_prompt(text)
        )
        assert set(theirs(text, return_token_type_ids=True)["token_type_ids"]) == {0}
    assert (theirs.bos_token_id, theirs.eos_token_id) == (
        tokenizer.special.bos,
        tokenizer.special.eos,
    )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["ingot_reference"] == FILES[kind]


def test_what_was_made_of_it_is_tried(kind: str, tokenizer: Tokenizer) -> None:
    """Where transformers' own reading differs, as for unigram models, no fast encoder is fed with
    it.
    """
    trust = json.loads(tokenizer.files["tokenizer_config.json"])["ingot_conversion"]
    if kind == "unigram":
        assert trust.startswith("differs from the reference on ")
        assert (
            choose_encoder(tokenizer, TEXTS)
            .tried[0][1]
            .startswith("not taken: no tokenizer.json says exactly what sentencepiece")
        )
    else:
        assert trust == "exact"
        assert "the same ids" in choose_encoder(tokenizer, TEXTS).tried[0][1]


def test_a_planted_error_in_the_conversion_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_last_merge(*arguments: object) -> list[list[str]]:
        return []

    monkeypatch.setattr("ingot.tokenizers.convert._merges", without_last_merge)
    tokenizer = load_tokenizer(folder_of("bpe", tmp_path / "bpe"))
    assert json.loads(tokenizer.files["tokenizer_config.json"])["ingot_conversion"].startswith(
        "differs"
    )
    assert tokenizer.plain_json() is None


def test_identity_is_not_of_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of("ranks", tmp_path / "a"))
    windows = folder_of("ranks", tmp_path / "b")
    (windows / "tokenizer.model").write_bytes(ranks_file().replace(b"\n", b"\r\n"))
    assert load_tokenizer(windows).identity() == tokenizer.identity()
    assert load_tokenizer(windows / "tokenizer.model").identity() == tokenizer.identity(), (
        "the file alone"
    )
    (windows / "tokenizer.model").write_bytes(b"\n".join(ranks_file().splitlines()[:-1]))
    assert load_tokenizer(windows).identity() != tokenizer.identity()


def test_files_have_an_identity_of_their_bytes(tokenizer: Tokenizer) -> None:
    changed = {
        name: content + (b" " if isinstance(content, bytes) else " ")
        for name, content in tokenizer.files.items()
        if name != "tokenizer.model"
    }
    assert Tokenizer(dict(tokenizer.files)).files_identity == tokenizer.files_identity
    other = Tokenizer(
        {**tokenizer.files, "tokenizer_config.json": changed["tokenizer_config.json"]}
    )
    assert (
        other.files_identity == tokenizer.files_identity,
        other.identity() == tokenizer.identity(),
    ) == (False, True)


def test_pieces_have_an_identity(tmp_path: Path) -> None:
    one, other = (
        Tokenizer({"tokenizer.model": pieces_file("bpe", add_dummy_prefix=prefix)})
        for prefix in (True, False)
    )
    assert one.identity() != other.identity()


def test_the_configuration_names_special_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    count = len(read_ranks(ranks_file(), ""))
    folder = folder_of("ranks", tmp_path / "ranks")
    tokens = {
        str(count + place): {"content": text, "special": True}
        for place, text in enumerate(("<|begin_of_text|>", "<|eom|>"))
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": tokens, "eos_token": "<|eom|>", "chat_template": "x"})
    )
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.special, tokenizer.template) == (
        count + 2,
        SpecialIds(count, count + 1, None),
        "x",
    )
    assert (
        AutoTokenizer.from_pretrained(_saved(tokenizer, tmp_path / "saved")).eos_token_id
        == count + 1
    )


def _saved(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(folder)
    return folder


def test_sentinels_beside_a_unigram_model(tmp_path: Path) -> None:
    folder = folder_of("unigram", tmp_path / "t5")
    size = load_tokenizer(folder).vocab_size
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"added_tokens_decoder": {str(size): {"content": "<extra_id_0>", "special": True}}}
        )
    )
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.token(size)) == (size + 1, "<extra_id_0>")
    assert size not in tokenizer.encode("<extra_id_0>")
    assert (
        tokenizer.decode([size, *tokenizer.encode("the")], skip_special=False) == "<extra_id_0>the"
    )


def test_very_long_runs_that_tiktoken_alone_cannot_cut() -> None:
    tokenizer = Tokenizer({"tokenizer.model": ranks_file()})
    text = "the a" + " " * 1_500_000 + "b the copper"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[-2:] == tokenizer.encode(" the copper"), "only the long run is cut"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "neither tiktoken ranks nor a whole SentencePiece model"),
        (b"x", "neither tiktoken ranks nor a whole SentencePiece model"),
        (b"\x0a\xff\xff\xff\xff\x0f", "neither tiktoken ranks nor a whole SentencePiece model"),
        (ranks_file()[:-3], r"275 ranks|damaged in line|ranks that are not 0, 1, 2"),
        (
            ranks_file().replace(b"IQ== 1\n", b""),
            r"ranks that are not 0, 1, 2, \.\.\. with every single byte",
        ),
        (ranks_file() + b"$$$ 274\n", "is damaged in line 275"),
        (pieces_file("bpe")[:-5], "SentencePiece model"),
        (pieces_file("bpe")[:1000], "SentencePiece model"),
    ],
)
def test_damaged(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(WrongInput, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        (
            "ranks",
            {"tokenizer_class": "QWenTokenizer"},
            "tokenizer_class QWenTokenizer, whose way to cut text is not known",
        ),
        (
            "ranks",
            {"added_tokens_decoder": {"3": {"content": "<x>", "special": True}}},
            "special tokens below",
        ),
        (
            "bpe",
            {"added_tokens_decoder": {"9999": {"content": "<x>", "special": False}}},
            "adds '<x>', which SentencePiece and transformers match",
        ),
    ],
)
def test_configurations_that_do_not_fit(
    tmp_path: Path, kind: str, config: dict[str, object], message: str
) -> None:
    folder = folder_of(kind, tmp_path / kind)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(WrongInput, match=message):
        load_tokenizer(folder)


@given(data=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (read_model, read_ranks):
        try:
            read(data, "x")
        except WrongInput:
            continue
    is_ranks(data)


@given(place=st.integers(0, len(pieces_file("unigram")) - 1), byte=st.integers(0, 255))
def test_a_flipped_byte_is_read_or_refused(place: int, byte: int) -> None:
    data = bytearray(pieces_file("unigram"))
    data[place] = byte
    with contextlib.suppress(WrongInput):
        read_model(bytes(data), "x")


def test_bytes_as_characters() -> None:
    assert unspell(spell(bytes(range(256)))) == bytes(range(256))
    assert (spell(b" the\n"), unspell("金")) == ("ĠtheĊ", b"")
    assert len(set(LETTERS.values())) == 256
