"""Text out of tokens: whatever way a text is cut into tokens, it comes out whole, and nothing of a
stop string does.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from ingot.models.generation.request import LONGEST, REPLACEMENT, TextStream

# No deadline for a single example: the machine may be busy.
UNHURRIED = settings(deadline=None)
texts = st.text(
    st.characters(codec="utf-8", exclude_characters=REPLACEMENT), max_size=40
) | st.text("aäあ😀\u0301 \n", max_size=40)


def decode_bytes(ids: Sequence[int]) -> str:
    """As a byte-level tokenizer decodes: a token is a byte."""
    return bytes(ids).decode(errors="replace")


def stream(
    text: str | bytes, stop: Sequence[str] = (), context: bytes = b""
) -> tuple[list[str], TextStream]:
    streamed = TextStream(decode_bytes, list(context), stop)
    pieces = []
    for token in text.encode() if isinstance(text, str) else text:
        pieces.append(streamed.push(token))
        if streamed.stopped:
            break
    else:
        pieces.append(streamed.finish())
    return pieces, streamed


def sentencepiece() -> Tokenizer:
    """Bytes as tokens beside words that begin with a space, decoded as Llama 2 does."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "lo"]
    made = Tokenizer(
        models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True)
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


@UNHURRIED
@given(texts, texts)
def test_every_text_comes_out_whole_and_never_half_a_character(text: str, context: str) -> None:
    pieces, streamed = stream(text, context=context.encode())
    assert "".join(pieces) == text
    assert REPLACEMENT not in "".join(pieces)
    assert streamed.length == len(text)


@UNHURRIED
@given(texts, st.binary(max_size=3))
def test_half_a_character_at_the_end_is_dropped(text: str, rest: bytes) -> None:
    pieces, _ = stream(text.encode() + "😀".encode()[: len(rest)])
    assert "".join(pieces) == text


@UNHURRIED
@given(st.binary(max_size=4 * LONGEST))
def test_bytes_that_are_no_utf8_come_out_as_they_decode(data: bytes) -> None:
    whole = data.decode(errors="replace")
    text = "".join(stream(data)[0])
    assert whole.startswith(text)
    assert set(whole[len(text) :]) <= {REPLACEMENT}
    assert len(whole) - len(text) <= LONGEST


@UNHURRIED
@given(
    st.text("abä", max_size=30),
    st.lists(st.text("abä", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_is_found_wherever_tokens_cut_it(text: str, stops: list[str]) -> None:
    pieces, streamed = stream(text, stops)
    # Looked for after every character: the one that is complete first ends the text, of those the
    # one that begins first.
    whole = next(
        (text[:end] for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)),
        None,
    )
    cut = None if whole is None else min(whole.find(stop) for stop in stops if stop in whole)
    assert "".join(pieces) == text[:cut]
    assert streamed.stopped == (cut is not None)
    assert streamed.length == len(text[:cut])


def test_text_that_may_begin_a_stop_string_waits() -> None:
    pieces, _ = stream("one\nt\n\ntwo", ["\n\n"])
    assert pieces == ["o", "n", "e", "", "\nt", "", ""]


def test_held_text_comes_out_at_the_end() -> None:
    assert stream("a##", ["###"])[0] == ["a", "", "", "##"]


def test_spaces_that_a_decoder_strips_at_the_start_are_kept_after_a_prompt() -> None:
    tokenizer = sentencepiece()
    hello, world = tokenizer.token_to_id("▁Hello"), tokenizer.token_to_id("▁world")
    streamed = TextStream(tokenizer.decode, [hello])
    assert [
        streamed.push(world),
        streamed.push(tokenizer.token_to_id("lo")),
        streamed.push(world),
    ] == [" world", "lo", " world"]
    assert TextStream(tokenizer.decode, []).push(hello) == "Hello"


@pytest.mark.parametrize("count", [1, LONGEST - 1, 3 * LONGEST])
def test_a_word_behind_tokens_without_text_keeps_its_space(count: int) -> None:
    tokenizer = sentencepiece()
    tokenizer.add_special_tokens(["<unk>"])
    pieces = ["▁Hello", *["<unk>"] * count, "▁world", "<unk>", "lo", "▁world"]
    ids = [tokenizer.token_to_id(piece) for piece in pieces]
    streamed = TextStream(tokenizer.decode, [])
    text = "".join(streamed.push(token) for token in ids) + streamed.finish()
    assert text == tokenizer.decode(ids) == "Hello worldlo world"
    assert streamed.length == len(text)
    assert len(streamed._window) <= LONGEST


@UNHURRIED
@given(texts)
def test_bytes_of_sentencepiece_come_out_whole(text: str) -> None:
    tokenizer = sentencepiece()
    hello = tokenizer.token_to_id("▁Hello")
    streamed = TextStream(tokenizer.decode, [hello])
    pieces = [streamed.push(byte + 1) for byte in text.encode()] + [streamed.push(hello)]
    assert "".join(pieces) == text + " Hello"


def test_broken_bytes_after_whole_ones_do_not_stop_a_sentencepiece_stream() -> None:
    """The decoder turns a whole run of bytes into replacements when its end is broken; what was
    given out stays.
    """
    tokenizer = sentencepiece()
    hello = tokenizer.token_to_id("▁Hello")
    streamed = TextStream(tokenizer.decode, [hello])
    text = "".join(
        streamed.push(token)
        for token in [*(byte + 1 for byte in "é".encode()), 0xFF + 1, hello, hello]
    )
    assert text.startswith("é")
    assert text.endswith(" Hello Hello")


def test_a_stop_string_inside_and_across_long_tokens() -> None:
    pieces = ["ab", "<e", "nd>x", "c<end>d"]

    def decode(ids: Sequence[int]) -> str:
        return "".join(pieces[index] for index in ids)

    across, inside = TextStream(decode, [0], ["<end>"]), TextStream(decode, [], ["end", "<end>"])
    assert [across.push(token) for token in (0, 1, 2)] == ["ab", "", ""]
    assert inside.push(3) == "c"
    assert across.stopped
    assert inside.stopped


def decode_without_special(ids: Sequence[int]) -> str:
    return decode_bytes([token for token in ids if token < 256])


END, TURN = 256, 257
SPECIAL = {"<end>": END, "<turn>": TURN}


@pytest.mark.parametrize(
    ("stop", "tokens", "text", "stopped"),
    [
        ("<end>", [*b"ab", END, *b"cd"], "ab", True),
        ("<end>\n", [*b"ab", END, *b"c", END, *b"\nd"], "abc", True),
        ("\n<turn>us", [*b"a\nb\n", TURN, *b"it\n", TURN, *b"us", *b"d"], "a\nb\nit", True),
        ("<turn>us<end>", [*b"ab", TURN, *b"us"], "abus", False),
        ("<end>", [*b"ab<end>cd"], "ab", True),
        ("<end>", [*b"ab", TURN, *b"cd"], "abcd", False),
    ],
)
def test_a_stop_string_holds_special_tokens_that_have_no_text(
    stop: str, tokens: list[int], text: str, stopped: bool
) -> None:
    special = {name: token for name, token in SPECIAL.items() if name in stop}
    streamed = TextStream(decode_without_special, [], [stop], special=special)
    pieces = [streamed.push(token) for token in tokens]
    assert "".join([*pieces, streamed.finish()]) == text
    assert (streamed.stopped, streamed.length) == (stopped, len(text))


def decode_each_byte(ids: Sequence[int]) -> str:
    """As sentencepiece decodes: a byte that is part of no character is one replacement."""
    text, place = "", 0
    while place < len(ids):
        for size in (1, 2, 3, 4):
            try:
                text += bytes(ids[place : place + size]).decode()
            except UnicodeDecodeError:
                continue
            place += size
            break
        else:
            text, place = text + "\ufffd", place + 1
    return text


@pytest.mark.parametrize("broken", range(56, 68))
def test_a_character_behind_many_broken_bytes_is_held_back_until_it_is_whole(broken: int) -> None:
    """Three bytes of four may be there when the window is too long to wait for all of it."""
    data = b"\xff" * broken + "🔥 ok".encode()
    streamed = TextStream(decode_each_byte, [], ())
    pieces = [streamed.push(token) for token in data]
    assert "".join([*pieces, streamed.finish()]) == decode_each_byte(data)
