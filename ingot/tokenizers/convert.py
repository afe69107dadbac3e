"""Converts tiktoken ranks, SentencePiece models and GPT-2's pair of files to a `tokenizer.json`,
the format that every tool reads.

Whether the result gives the same ids is tested (`convert_model`), never assumed: for unigram models
the libraries break ties and split unusual characters differently.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ingot.base.errors import WrongInput
from ingot.tokenizers.backend import JsonBackend
from ingot.tokenizers.edge_cases import edge_case_texts, first_difference
from ingot.tokenizers.sentencepiece_backend import (
    BPE,
    BYTE,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceBackend,
    SentencePieceModel,
)
from ingot.tokenizers.settings import EXACT, AddedVocabulary, added_tokens
from ingot.tokenizers.tiktoken_backend import SPLIT, TiktokenBackend, spell

GPT2, GPT2_CLASSES = "<|endoftext|>", ("GPT2Tokenizer", "GPT2TokenizerFast")
SPACE = "▁"


def convert_model(reference: TiktokenBackend | SentencePieceBackend) -> tuple[str, str] | None:
    """A tokenizer.json of a model, and how it compares: `EXACT` if all edge-case texts give the
    same ids, else a description of the first difference.

    None for a model that no tokenizer.json can express.
    """
    made = (
        ranks_json(reference) if isinstance(reference, TiktokenBackend) else pieces_json(reference)
    )
    if made is None:
        return None
    texts = edge_case_texts([*reference.special, *reference.added])
    return (
        made,
        first_difference(
            texts,
            reference.encode_batch(texts),
            JsonBackend(made, "the conversion").encode_batch(texts),
        )
        or EXACT,
    )


def ranks_json(reference: TiktokenBackend) -> str:
    """Convert tiktoken ranks: every pair of tokens that forms a token is a merge, ordered by the
    rank of the token it forms.
    """
    ranks = reference.ranks
    merges = sorted(
        (rank, left, right, token, cut)
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if (left := ranks.get(token[:cut])) is not None
        and (right := ranks.get(token[cut:])) is not None
    )
    model = {
        "type": "BPE",
        "ignore_merges": True,
        "vocab": {spell(token): rank for token, rank in ranks.items()},
        "merges": [[spell(token[:cut]), spell(token[cut:])] for _, _, _, token, cut in merges],
    }
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return _tokenizer_json(
        model,
        _special_tokens(reference.ids),
        (reference.before, reference.after),
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]},
        decoder=_byte_level(use_regex=True),
    )


def gpt2_json(
    vocabulary: str, merges: str, config: Mapping[str, Any], where: str
) -> tuple[str, dict[str, Any]]:
    """Convert GPT-2's `vocab.json` and `merges.txt`; the second result is the
    `tokenizer_config.json`, completed with GPT-2's own special token.

    Raises:
        WrongInput: they are damaged, or the configuration names a model that splits text in another
        way.
    """
    kind = config.get("tokenizer_class")
    if kind is not None and kind not in GPT2_CLASSES:
        raise WrongInput(
            f"{where} has a vocab.json of {kind}, whose way to cut text it does not say; add the"
            " tokenizer.json of that model"
        )
    try:
        ids = json.loads(vocabulary)
        pairs = [
            line.split(" ")
            for line in merges.splitlines()
            if line and not line.startswith("#version")
        ]
        if (
            not isinstance(ids, dict)
            or not ids
            or any(
                len(pair) != 2 or any(part not in ids for part in (*pair, "".join(pair)))
                for pair in pairs
            )
        ):
            raise ValueError("a merge has a part that is no token, or there are no tokens")
    except ValueError as error:
        raise WrongInput(
            f"{where}: vocab.json and merges.txt do not fit together ({error}); fetch both again"
        ) from None
    added = added_tokens(config)
    if GPT2 in ids and all(token.content != GPT2 for token in added):
        added = [AddedVocabulary(ids[GPT2], GPT2, True), *added]
    prefix = bool(config.get("add_prefix_space"))
    text = _tokenizer_json(
        {"type": "BPE", "vocab": ids, "merges": pairs},
        added,
        ([], []),
        pre_tokenizer=_byte_level(use_regex=True, prefix=prefix),
        decoder=_byte_level(use_regex=True),
    )
    own = {"bos_token": GPT2, "eos_token": GPT2, "unk_token": GPT2} if GPT2 in ids else {}
    return text, {
        "tokenizer_class": "GPT2Tokenizer",
        "clean_up_tokenization_spaces": False,
        **own,
        **config,
    }


def pieces_json(reference: SentencePieceBackend) -> str | None:
    """Convert a SentencePiece model; None for one whose way of splitting text cannot be
    expressed.
    """
    model = reference.model
    if (
        model.kind not in (UNIGRAM, BPE)
        or model.whitespace_as_suffix
        or not model.escape_whitespaces
    ):
        return None
    bytes_too = any(piece.kind == BYTE for piece in model.pieces)
    unknown = next(
        (index for index, piece in enumerate(model.pieces) if piece.kind == UNKNOWN), None
    )
    added = [AddedVocabulary(index, text, True) for text, index in reference.ids.items()]
    added += [
        AddedVocabulary(index, piece.text, False)
        for index, piece in enumerate(model.pieces)
        if piece.kind == USER_DEFINED
    ]
    if model.kind == UNIGRAM:
        scores = [[piece.text, piece.score] for piece in model.pieces]
        body: dict[str, Any] = {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": scores,
            "byte_fallback": bytes_too,
        }
    else:
        spelled = None if unknown is None else model.pieces[unknown].text
        vocabulary = {piece.text: index for index, piece in enumerate(model.pieces)}
        body = {
            "type": "BPE",
            "unk_token": spelled,
            "fuse_unk": True,
            "byte_fallback": bytes_too,
            "vocab": vocabulary,
            "merges": _merges(model, vocabulary),
        }
    strip = (
        [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if model.add_dummy_prefix else []
    )
    decoders = [
        _replace({"String": SPACE}, " "),
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *strip,
    ]
    around = reference.before, reference.after
    return _tokenizer_json(
        body,
        added,
        around,
        normalizer=_normalizer(model),
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _merges(model: SentencePieceModel, vocabulary: Mapping[str, int]) -> list[list[str]]:
    """The merges of a BPE model: SentencePiece merges the pair whose result has the best score, and
    only into ordinary pieces.
    """
    parts = {piece.text for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED)}
    found = [
        (-piece.score, vocabulary[piece.text[:cut]], vocabulary[piece.text[cut:]], piece.text, cut)
        for piece in model.pieces
        if piece.kind == NORMAL
        for cut in range(1, len(piece.text))
        if piece.text[:cut] in parts and piece.text[cut:] in parts
    ]
    return [[text[:cut], text[cut:]] for _, _, _, text, cut in sorted(found)]


def _normalizer(model: SentencePieceModel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        steps.append(
            {
                "type": "Precompiled",
                "precompiled_charsmap": base64.b64encode(model.charsmap).decode(),
            }
        )
    if model.remove_extra_whitespaces:
        steps += [
            {"type": "Strip", "strip_left": True, "strip_right": True},
            _replace({"Regex": " {2,}"}, " "),
        ]
    if model.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    return {"type": "Sequence", "normalizers": [*steps, _replace({"String": " "}, SPACE)]}


def _replace(pattern: Mapping[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": dict(pattern), "content": content}


def _byte_level(*, use_regex: bool, prefix: bool = False) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": prefix,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _special_tokens(ids: Mapping[str, int]) -> list[AddedVocabulary]:
    return [AddedVocabulary(index, text, True) for text, index in ids.items()]


def _framing(
    before: Sequence[AddedVocabulary], after: Sequence[AddedVocabulary]
) -> dict[str, Any] | None:
    """The post-processor that puts these special tokens around a text, and around each text of a
    pair.
    """
    if not before and not after:
        return None

    def framed(text: str, number: int) -> list[dict[str, Any]]:
        begin, end = (
            [{"SpecialToken": {"id": token.content, "type_id": number}} for token in tokens]
            for tokens in (before, after)
        )
        return [*begin, {"Sequence": {"id": text, "type_id": number}}, *end]

    special = {
        token.content: {"id": token.content, "ids": [token.id], "tokens": [token.content]}
        for token in (*before, *after)
    }
    return {
        "type": "TemplateProcessing",
        "single": framed("A", 0),
        "pair": framed("A", 0) + framed("B", 1),
        "special_tokens": special,
    }


def _tokenizer_json(
    model: Mapping[str, Any],
    added: Iterable[AddedVocabulary],
    around: tuple[Sequence[int], Sequence[int]],
    **parts: Any,
) -> str:
    """`around`: the ids of the special tokens before and after a text."""
    tokens = {token.id: token for token in added}
    before, after = ([tokens[token] for token in ids] for ids in around)
    state = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": None,
        **parts,
        "post_processor": _framing(before, after),
        "model": model,
        "added_tokens": [
            {
                "id": index,
                "content": token.content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token.special,
            }
            for index, token in sorted(tokens.items())
        ],
    }
    return json.dumps(state, ensure_ascii=False, indent=1) + "\n"
