"""How tokens are spelt beside their log-probabilities."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from ingot.models.generation.request import GeneratedToken
from ingot.serve.http.logprobs import LogprobFormatter
from ingot.tokenizers.bpe import train_bpe
from ingot.tokenizers.tokenizer import Tokenizer

WORDS = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁fox", "es"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """As Llama 2's decodes: words begin with a space that is dropped at the start of a text; bytes
    beside them.
    """
    made = tokenizers.Tokenizer(
        models.BPE({word: index for index, word in enumerate(WORDS)}, [], byte_fallback=True)
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer({"tokenizer.json": made.to_str()})


def ids(*words: str) -> list[int]:
    return [[*WORDS, "</s>"].index(word) for word in words]


def test_tokens_read_as_they_do_in_their_place(tokenizer: Tokenizer) -> None:
    fox, es, half, other = ids("▁fox", "es", "<0xC3>", "<0xC4>")
    tokens = [
        GeneratedToken(fox, 0, -0.5, ((fox, -0.5), (es, -2.0))),
        GeneratedToken(es, 4, -0.25, ((es, -0.25), (fox, -1.5))),
        GeneratedToken(half, 6, -3.0, ((other, -1.0), (half, -3.0))),
        GeneratedToken(es, 7, -4.0, ((ids("</s>")[0], -0.1),)),
    ]
    told = LogprobFormatter(tokenizer, ids("▁the")).completions(tokens)
    assert told["tokens"] == [" fox", "es", "\ufffd", "es"]
    assert told["top_logprobs"] == [
        {" fox": -0.5, "es": -2.0},
        {"es": -0.25, " fox": -1.5},
        {"\ufffd": -1.0},
        {"</s>": -0.1, "es": -4.0},
    ]
    assert told["token_logprobs"] == [-0.5, -0.25, -3.0, -4.0]
    assert told["text_offset"] == [0, 4, 6, 7]


def test_a_stream_of_pieces_reads_like_the_whole(tokenizer: Tokenizer) -> None:
    tokens = [
        GeneratedToken(token, 0, -1.0, ((token, -1.0),))
        for token in ids("▁fox", "▁the", "es", "▁fox")
    ]
    whole, parts = (
        LogprobFormatter(tokenizer, ids("▁the")),
        LogprobFormatter(tokenizer, ids("▁the")),
    )
    together = whole.chat(tokens)["content"]
    assert [item for token in tokens for item in parts.chat([token])["content"]] == together
    assert [item["token"] for item in together] == [" fox", " the", "es", " fox"]
    assert [bytes(item["bytes"]) for item in together] == [b" fox", b" the", b"es", b" fox"]
    assert together[0]["top_logprobs"] == [
        {"token": " fox", "logprob": -1.0, "bytes": list(b" fox")}
    ]


def test_half_a_character_is_told_by_its_bytes(tokenizer: Tokenizer) -> None:
    written = ids("▁the", "<0xC3>", "<0xA9>", "es")
    told = LogprobFormatter(tokenizer, written[:1]).chat(
        [GeneratedToken(token, 0, -1.0, ((written[2], -2.0),)) for token in written[1:]]
    )["content"]
    assert [(item["token"], item["bytes"]) for item in told] == [
        ("\ufffd", [0xC3]),
        ("\ufffd", [0xA9]),
        ("es", list(b"es")),
    ]
    assert [top["bytes"] for item in told for top in item["top_logprobs"]] == [[0xA9]] * 3


def test_the_bytes_of_all_parts_of_an_emoji_are_its_own() -> None:
    """Of a tokenizer that shows all bytes of an unfinished character as one sign."""
    made = train_bpe(["a b"], 260)
    written = made.encode("a🎉 é")
    told = LogprobFormatter(made, []).chat([GeneratedToken(token, 0, -1.0) for token in written])
    assert [item["token"] for item in told["content"]] == [
        "a",
        *["\ufffd"] * 4,
        " ",
        *["\ufffd"] * 2,
    ]
    assert b"".join(bytes(item["bytes"]) for item in told["content"]) == "a🎉 é".encode()


def test_a_token_whose_bytes_nobody_tells_has_none() -> None:
    made = tokenizers.Tokenizer(models.WordLevel({"\ufffd?": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer = Tokenizer({"tokenizer.json": made.to_str()})
    (item,) = LogprobFormatter(tokenizer, []).chat([GeneratedToken(0, 0, -1.0)])["content"]
    assert (item["token"], item["bytes"]) == ("\ufffd?", None)
