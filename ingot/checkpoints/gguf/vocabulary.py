"""A tokenizer as llama.cpp has it. A GGUF file does not say how text is split before merging, only
the name of a way that llama.cpp has built in: what has no such name is refused, since texts would
get other ids there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.tokenizers.chats.encode import stop_tokens
from ingot.tokenizers.sentencepiece_backend import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    read_model,
)
from ingot.tokenizers.settings import MODEL_FILES
from ingot.tokenizers.tiktoken_backend import SPLIT, is_ranks
from ingot.tokenizers.tokenizer import Tokenizer

_QWEN = SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{END}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{END}"
    r"|{NUMBER}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED.replace("{END}", "").replace("{NUMBER}", r"\p{N}")
_GPT4O = _CASED.replace("{END}", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace(
    "{NUMBER}", r"\p{N}{1,3}"
)
_BY_REGEX = {
    (SPLIT, True): "llama-bpe",
    (SPLIT, False): "dbrx",
    (_QWEN, False): "qwen2",
    (_TEKKEN, True): "tekken",
    (_GPT4O, False): "gpt-4o",
}
"""Names of llama.cpp, by the expression that splits a text and whether a word that is a token as a
whole is taken without merging."""
_GPT2, _DIGITS = "gpt-2", "smollm"
_ABSORBING = ("lstrip", "rstrip", "single_word")
"""What tokenizer.json can say of an added token, and a GGUF file cannot."""
_CHAT = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c d"},
    {"role": "user", "content": "e"},
]


@dataclass(frozen=True)
class GgufVocabulary:
    """`model` is llama.cpp's `gpt2` (bytes and merges) or `llama` (SentencePiece's scores); `kinds`
    are SentencePiece's. `special`: ids by llama.cpp's names.
    """

    model: str
    pre: str
    tokens: list[str]
    kinds: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    special: Mapping[str, int] = field(default_factory=dict)
    adds_bos: bool = False
    space_before: bool = False
    template: str | None = None


def vocabulary_of(tokenizer: Tokenizer, size: int) -> GgufVocabulary:
    """The tokenizer for a model of `size` embeddings; ids that it does not have are unused.

    Raises:
        WrongInput: llama.cpp would give other ids.
    """
    model = next((name for name in MODEL_FILES if name in tokenizer.files), None)
    data = tokenizer.files[model] if model else b""
    data = data if isinstance(data, bytes) else data.encode()
    spelled = [tokenizer.token(index) for index in range(size)]
    tokens = [f"[PAD{index}]" if text is None else text for index, text in enumerate(spelled)]
    added = dict.fromkeys(tokenizer.special_texts, USER_DEFINED)
    added |= dict.fromkeys(tokenizer.special_ids, CONTROL)
    kinds = [UNUSED if text is None else added.get(text, NORMAL) for text in spelled]
    stops = [stop for stop in stop_tokens(tokenizer) if stop != tokenizer.special.eos]
    ids = {
        "bos_token_id": tokenizer.special.bos,
        "eos_token_id": _end(tokenizer, stops, spelled),
        "eot_token_id": stops[0] if stops else None,
        "padding_token_id": tokenizer.special.pad,
    }
    about: dict[str, Any] = {
        "special": {name: index for name, index in ids.items() if index is not None},
        "adds_bos": tokenizer.adds_bos,
        "template": tokenizer.template,
    }
    chat = _chat_ids(tokenizer)
    if tokenizer.adds_bos and chat and chat[0] != tokenizer.special.bos:
        say(
            f"note: {tokenizer.where}: llama.cpp puts {tokenizer.named['bos_token']} before each"
            " chat, which the chat template does not; start it with --override-kv"
            " tokenizer.ggml.add_bos_token=bool:false"
        )
    if model is not None and not is_ranks(data):
        return _pieces(tokenizer, data, tokens, kinds, about)
    if "tokenizer.json" not in tokenizer.files or model is not None:
        raise _unknown(tokenizer, "it is a file of tiktoken ranks")
    text = tokenizer.files["tokenizer.json"]
    state = json.loads(text)
    _check_blanks(tokenizer, state, chat)
    merges = [
        each if isinstance(each, str) else " ".join(each)
        for each in state["model"].get("merges", [])
    ]
    return GgufVocabulary(
        "gpt2", _way_of_splitting(tokenizer, state), tokens, kinds, [], merges, **about
    )


def _end(tokenizer: Tokenizer, stops: Sequence[int], spelled: Sequence[str | None]) -> int:
    """EOS; where there is none the end of a turn, or an id that is never generated. Without one
    llama.cpp would stop at its default, an ordinary token here.
    """
    unused = next((index for index, text in enumerate(spelled) if text is None), None)
    turn = stops[0] if stops else None
    for found in (tokenizer.special.eos, turn, tokenizer.special.pad, unused):
        if found is not None:
            return found
    raise WrongInput(
        f"{tokenizer.where} has neither EOS nor padding, and llama.cpp would stop at an ordinary"
        " token; name one in tokenizer_config.json, or export it with --format hf"
    )


def _chat_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids of a chat by the template; [] where there is none, or it refuses such a chat."""
    if tokenizer.template is None:
        return []
    try:
        return tokenizer.encode_chat(_CHAT)
    except WrongInput:
        return []


def _check_blanks(tokenizer: Tokenizer, state: Mapping[str, Any], chat: list[int]) -> None:
    """llama.cpp finds added tokens as they are spelled, and keeps the blanks beside them.

    Raises:
        WrongInput: some absorb blanks that the chat template itself writes.
    """
    added = state.get("added_tokens") or []
    odd = [one["content"] for one in added if any(one.get(name) for name in _ABSORBING)]
    if not odd:
        return
    plain = [{**one, **dict.fromkeys(_ABSORBING, False)} for one in added]
    text = json.dumps({**state, "added_tokens": plain})
    as_there = Tokenizer({**tokenizer.files, "tokenizer.json": text}, tokenizer.where)
    what = f"{tokenizer.where}: its tokens {', '.join(odd[:3])} absorb blanks or stand for words"
    if _chat_ids(as_there) != chat:
        raise WrongInput(
            f"{what}, and chats would have other ids in llama.cpp, which does not know that; export"
            " it with --format hf"
        )
    say(f"note: {what}, which llama.cpp does not know: beside them its ids may be others")


def _way_of_splitting(tokenizer: Tokenizer, state: Mapping[str, Any]) -> str:
    """llama.cpp's name for the way in which a tokenizer.json splits a text."""
    model, normalizer = state["model"], state.get("normalizer")
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise _unknown(tokenizer, f"its model is {model.get('type')}, not one of merged bytes")
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    if any(model.get(name) for name in affixes):
        raise _unknown(tokenizer, "its tokens have affixes")
    if normalizer not in (None, {"type": "NFC"}):
        raise _unknown(tokenizer, f"its normalizer is {normalizer.get('type')}")
    steps = state.get("pre_tokenizer") or {}
    parts: Sequence[Mapping[str, Any]] = (
        steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    )
    kinds = [part.get("type") for part in parts]
    last = parts[-1]
    if kinds[-1] != "ByteLevel" or last.get("add_prefix_space"):
        raise _unknown(tokenizer, f"its pre-tokenizer is {'+'.join(map(str, kinds))}")
    whole = bool(model.get("ignore_merges"))
    if last.get("use_regex", True):
        if kinds == ["ByteLevel"] and not whole:
            return _GPT2
        if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and not whole:
            return _DIGITS
    elif kinds == ["Split", "ByteLevel"]:
        split = parts[0]
        expression = split["pattern"].get("Regex", "")
        as_known = str(split.get("behavior")).lower() == "isolated" and not split.get("invert")
        if as_known and (expression, whole) in _BY_REGEX:
            return _BY_REGEX[expression, whole]
        raise _unknown(tokenizer, f"it splits by {expression[:60]!r}")
    raise _unknown(tokenizer, f"its pre-tokenizer is {'+'.join(map(str, kinds))}")


def _pieces(
    tokenizer: Tokenizer, data: bytes, tokens: list[str], kinds: list[int], about: dict[str, Any]
) -> GgufVocabulary:
    """The vocabulary of a SentencePiece model of merges."""
    model = read_model(data, tokenizer.where)
    if model.kind != BPE:
        raise _unknown(tokenizer, "it is a unigram model")
    if model.charsmap or model.remove_extra_whitespaces or model.whitespace_as_suffix:
        raise _unknown(tokenizer, "it changes a text before it splits it")
    if sum(piece.kind == BYTE for piece in model.pieces) < 256:
        raise _unknown(tokenizer, "it lacks pieces for single bytes")
    scores = [-10_000.0] * len(tokens)
    for index, piece in enumerate(model.pieces[: len(tokens)]):
        if tokens[index] == piece.text:
            kinds[index], scores[index] = piece.kind, piece.score
        elif kinds[index] == NORMAL:
            raise _unknown(tokenizer, f"its files disagree about id {index}")
    for index, kind in enumerate(kinds):
        if kind == NORMAL and index >= len(model.pieces):
            raise _unknown(tokenizer, f"its files disagree about id {index}")
    space = model.add_dummy_prefix
    return GgufVocabulary("llama", "default", tokens, kinds, scores, space_before=space, **about)


def _unknown(tokenizer: Tokenizer, what: str) -> WrongInput:
    return WrongInput(
        f"{tokenizer.where}: llama.cpp does not know this tokenizer's way of splitting texts"
        f" ({what}); export it with --format hf"
    )
