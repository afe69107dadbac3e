"""Small models in other formats than tokenizer.json: a file of tiktoken ranks, SentencePiece models
trained on the spot.
"""

from __future__ import annotations

import base64
import functools
import io

WORDS = (
    "the",
    "furnace",
    "melts",
    "copper",
    "and",
    "rings",
    "ingot",
    "mould",
    "für",
    "naïve",
    "金属",
    "slag",
    "12",
    "345",
    "don't",
)
TEXTS = [
    " ".join(WORDS[(step * place + step) % len(WORDS)] for place in range(9)) + "."
    for step in range(1, 60)
]


def ranks_file() -> bytes:
    """The 256 bytes and some merges, in the order in which they would have been learnt."""
    tokens = [bytes([byte]) for byte in [*range(32, 256), *range(32)]]
    tokens += [b"th", b" th", b" the", b"he", b"in", b"ing", b"  ", b"    ", b"\n\n", b"er"]
    tokens += [b" c", b"op", b" cop", b"per", b" copper", b"12", b"123", b"\xc3\xa9"]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@functools.cache
def pieces_file(kind: str, **settings: object) -> bytes:
    """A SentencePiece model: `bpe` as Llama 2 has it, `unigram` as T5 has it."""

    import sentencepiece

    like = {
        "bpe": {
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "split_digits": True,
            "vocab_size": 340,
        },
        "unigram": {
            "vocab_size": 90,
            "pad_id": 0,
            "eos_id": 1,
            "unk_id": 2,
            "bos_id": -1,
            "normalization_rule_name": "nmt_nfkc",
        },
    }[kind]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        model_type=kind,
        minloglevel=2,
        num_threads=1,
        hard_vocab_limit=False,
        **{**like, **settings},
    )
    return model.getvalue()
