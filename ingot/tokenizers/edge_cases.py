"""A fixed set of texts on which nearly identical tokenizers give different ids, used to test
encoders and conversions; and where two results differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ingot.tokenizers.backend import TokenBatch, split_batch

# Long enough to leave every fast path for short words, short enough for a tokenizer of quadratic
# cost.
LONG = 20_000

FIXED = (
    "",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "a",
    " a",
    "a ",
    "  a  b   c    d",
    "a\n\n\n  b\r\n\r\n\tc\r\rd \n \n e",
    "The quick brown fox, it's John's; they'll've WE'RE i'M don't DON'T 'S 'tis rock'n'roll ''' '",
    "0 1 12 123 1234 12345678901234567890 3.14 1,000,000 1e-5 0x7fFF ½ Ⅷ ٣٤٥ १२३ 一二三 ²³ ₂ 𝟘𝟙𝟚",
    (
        'def f(x: int) -> str:\n    return f"{x!r:>{10}}"  # done\n\n\tif (a&&b||!c) { x->y[i] +='
        " 1; }\n</html>\n%%%$$$###@@@~~~```"
    ),
    "👩‍👩‍👧‍👦 🇩🇪🇫🇷 👍🏽 ❤️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 🔥🔥🔥 ☃ ♟️ 1️⃣",
    (
        "é e\u0301 Å A\u030a ﬁ ﷺ ṩ s\u0323\u0307 s\u0307\u0323 ㎏ ™ Ω \u1100\u1161\u11a8 각"
        " a\u0300\u0316\u0301\u0302 \u0301 x\u0301\u0301\u0301"
    ),
    "\x00",
    "a\x00b\x00\x00c",
    "\x01\x02\x03\x07\x08\x0b\x0c\x0e\x1b[31m\x1f\x7f\x80\x85\x9f",
    (
        "\ufeffBOM \u200b\u200c\u200d\u2060 \u00ad \u202a\u202e\u2066"
        " \u00a0\u2003\u3000\u2028\u2029\u1680\u180e x\u00a0y\u3000z"
    ),
    "\ufffd \ufffe \uffff \U0001fffe \U0010ffff \ue000 \U000f0000",
    "▁ ▁▁ ▁a a▁b Ġ Ċ ĠĠa Ā <0x0A> <0xFF> ⁇ <unk> [UNK] ##ing @@ </w>",
    "Straße ẞ ŒUVRE ı İ ſ Ǆ ǅ ς Σ ﬀ 'ſ 'K \u212a's",
    (
        "Ελληνικά Кириллица עִבְרִית العَرَبِيَّة हिन्दी বাংলা தமிழ் ไทยภาษา ລາວ ខ្មែរ မြန်မာ"
        " ქართული አማርኛ 日本語のテキスト、中文文本。한국어 텍스트"
    ),
    "a\U00010400\U0001d400\U00020000\U000e0041",
    "ÀÀÀ",
    "ｆｕｌｌ　ｗｉｄｔｈ！１２３",
    "...!!!???---___===***   ...\n...\n",
    "\n\n\n\nx",
    "x\n\n\n\n",
    " \n \n \n",
    "\r\r\n\n\r",
)


def edge_case_texts(spelled: Iterable[str]) -> list[str]:
    """The set, with look-alikes of a tokenizer's special and added tokens (`special_texts`)."""
    long = [
        "x" * LONG,
        "ab" * LONG,
        " " * LONG + "x",
        "\n" * LONG,
        "7" * LONG,
        "é" * LONG,
        "金" * LONG,
        "🔥" * (LONG // 4),
        "-" * LONG,
        "a\u0301" * (LONG // 2),
        "word " * LONG,
        " \t" * LONG,
        "A1 b2, " * (LONG // 4),
    ]
    alike: list[str] = []
    for token in dict.fromkeys(spelled):
        alike += [
            token,
            f"a{token}b",
            f" {token} ",
            f"{token}{token}\n",
            f"x {token}\n{token.upper()} {token[:-1]}",
            f"\n{token}  {token[1:]}",
        ]
    return [*FIXED, *long, *alike]


def describe_difference(text: str, wanted: Sequence[int], found: Sequence[int]) -> str:
    """Describe where the ids of one text begin to differ."""
    at = next(
        (
            place
            for place, (one, other) in enumerate(zip(wanted, found, strict=False))
            if one != other
        ),
        min(len(wanted), len(found)),
    )
    shown = text if len(text) <= 40 else text[:37] + "..."
    return (
        f"differs from the reference on {shown!r} at token {at}: {list(found[at : at + 3])} instead"
        f" of {list(wanted[at : at + 3])}"
    )


def first_difference(texts: Sequence[str], wanted: TokenBatch, found: TokenBatch) -> str | None:
    """Describe the first difference between two batches; None if there is none."""
    if np.array_equal(found[0], wanted[0]) and np.array_equal(found[1], wanted[1]):
        return None
    if len(found[1]) != len(wanted[1]):
        return f"gives {len(found[1]) - 1} results for {len(texts)} texts"
    for text, one, other in zip(texts, split_batch(wanted), split_batch(found), strict=True):
        if one != other:
            return describe_difference(text, one, other)
    return "gives ids that belong to no text"
