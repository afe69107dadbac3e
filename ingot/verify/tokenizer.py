"""`ingot verify tokenizer`: proves on the user's own documents that text becomes the right ids: the
fast encoder against the reference, decoding, special tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ingot.base.errors import WrongInput
from ingot.base.markers import read_marker
from ingot.base.storage import open_read
from ingot.config.recipe import Recipe
from ingot.config.sections.data import SourceSettings
from ingot.config.sections.objective import CHAT_TEMPLATED
from ingot.data.cleaning.cleaned import CleaningResult
from ingot.data.cleaning.documents import Document, sample
from ingot.data.columns.column import token_dtype
from ingot.data.columns.manifest import MANIFEST
from ingot.data.documents.kinds import DocumentExtractor, plain_text
from ingot.data.documents.records import ParsedDocument
from ingot.data.raw.store import open_raw
from ingot.data.sources.find import recipe_sources, source_files
from ingot.data.sources.readers import parse_file
from ingot.data.sources.source_file import SourceFile
from ingot.data.splits import Shares
from ingot.data.tokenizing.encode import frame_of
from ingot.tokenizers.backend import TokenBatch, split_batch
from ingot.tokenizers.chats.templates import for_recipe
from ingot.tokenizers.edge_cases import describe_difference
from ingot.tokenizers.encoders import REFERENCE, EncoderChoice, choose_encoder, open_encoder
from ingot.tokenizers.load import load_tokenizer, resolve_tokenizer
from ingot.tokenizers.settings import CONVERSION_KEY, EXACT, read_config
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.verify.proof import Check, Proof

SAMPLE_BYTES = 4_000_000
FILES = 64
REMOTE = ("hub", "bigquery", "megatron", "wikipedia")
SHOWN = 60
FRAMED = ("pair", "labelled", "masked")


def verify_tokenizer(recipe: Recipe) -> Proof:
    """Check the recipe's tokenizer on an even sample of its training documents, about 4 MB.

    Ingested documents are used if there are any; otherwise the files of the sources are read.

    Raises:
        WrongInput: the tokenizer does not exist yet or cannot be read, or there are no documents.
            Failed: it cannot be fetched.
    """
    tokenizer = _tokenizer(recipe)
    documents = list(_documents(recipe))
    if not documents:
        raise WrongInput(
            "data.train has no document to try the tokenizer on; check the sources, or raise"
            " data.fraction"
        )
    texts = [document.text for document in documents]
    wanted = tokenizer.encode_batch(texts)
    choice = choose_encoder(tokenizer, texts)
    name = REFERENCE if recipe.tokenizer.encoder == REFERENCE else choice.name
    checks = [
        *_encoders(choice),
        _fast_path(tokenizer, name, documents, wanted),
        _round_trip(tokenizer, documents, wanted),
        _look_alikes(tokenizer, name),
        _special(recipe, tokenizer),
        _bos(tokenizer, texts),
        _fits(tokenizer, wanted),
        *_frame(recipe, tokenizer),
        _template(recipe, tokenizer),
        _prepared(recipe, tokenizer),
        *_conversion(tokenizer),
    ]
    return Proof(
        f"Tokenizer of {tokenizer.vocab_size:,} tokens ({tokenizer.library}) on {_amount(texts)},"
        f" identity {tokenizer.identity()}",
        checks,
    )


def _tokenizer(recipe: Recipe) -> Tokenizer:
    if not recipe.trains_tokenizer:
        return for_recipe(recipe, load_tokenizer(resolve_tokenizer(recipe)))
    if not recipe.folder.tokenizer.is_dir():
        raise WrongInput(
            f"{recipe.folder.tokenizer} holds no tokenizer, since none is learnt yet; run `ingot"
            " prepare` with this recipe first"
        )
    return load_tokenizer(recipe.folder.tokenizer)


def _documents(recipe: Recipe) -> Iterator[Document]:
    if not (recipe.folder.raw / MANIFEST).is_file():
        yield from _unread(recipe)
        return
    yield from sample(
        open_raw(recipe), CleaningResult.nothing(), Shares.of(recipe.data), SAMPLE_BYTES
    )


def _unread(recipe: Recipe) -> Iterator[Document]:
    """The beginnings of up to 64 files, spread evenly over the files of all sources."""
    pairs = zip(recipe_sources(recipe)["train"], source_files(recipe)["train"], strict=True)
    files = [
        (source, file) for source, found in pairs for file in found if file.format not in REMOTE
    ]
    if not files:
        raise WrongInput(
            "the sources of data.train are not files that can be read just so; run `ingot ingest`"
            " with this recipe first"
        )
    files = (
        [files[index * len(files) // FILES] for index in range(FILES)]
        if len(files) > FILES
        else files
    )
    for source, file in files:
        yield from _beginning(recipe, source, file, SAMPLE_BYTES // len(files))


def _beginning(
    recipe: Recipe, source: SourceSettings, file: SourceFile, most: int
) -> Iterator[Document]:
    read, wanted = 0, DocumentExtractor.for_source(source, recipe.documents, recipe.labels)
    with open_read(file.path) as stream:
        for item in parse_file(stream, file.path, file.format, wanted):
            if read >= most:
                return
            if isinstance(item, ParsedDocument):
                text = plain_text(recipe.documents, item.text)
                read += len(text.encode())
                yield Document(f"{file.name}:{item.row}", text)


def _encoders(choice: EncoderChoice) -> Iterator[Check]:
    """An encoder that is not exact does not fail the proof, since it is not used."""
    for name, why in choice.tried:
        yield Check(f"encoder {name}", True if name in choice.speeds else None, why)


def _fast_path(
    tokenizer: Tokenizer, name: str, documents: Sequence[Document], wanted: TokenBatch
) -> Check:
    what = "fast path against reference"
    if name == REFERENCE:
        return Check(what, None, "documents are encoded with the reference itself")
    found = open_encoder(tokenizer, name).encode_batch([document.text for document in documents])
    for document, ours, theirs in zip(
        documents, split_batch(wanted), split_batch(found), strict=True
    ):
        if ours != theirs:
            return Check(
                what,
                False,
                f"{name} on {document.doc_id}:"
                f" {describe_difference(document.text, ours, theirs)};"
                " set tokenizer.encoder=reference",
            )
    return Check(
        what, True, f"{name} gives the same {len(wanted[0]):,} ids for {len(documents):,} documents"
    )


def _round_trip(tokenizer: Tokenizer, documents: Sequence[Document], wanted: TokenBatch) -> Check:
    other = [
        (document, back)
        for document, ids in zip(documents, split_batch(wanted), strict=True)
        if (back := tokenizer.decode(ids, skip_special=False)) != document.text
    ]
    share = (
        f"{(1 - len(other) / len(documents)):.2%} of {len(documents):,} documents come back as they"
        " were"
    )
    if not other:
        return Check("round trip", True, share)
    document, back = other[0]
    at = next(
        (
            place
            for place, (one, two) in enumerate(zip(document.text, back, strict=False))
            if one != two
        ),
        min(len(document.text), len(back)),
    )
    example = (
        f"{document.doc_id} has {_part(document.text, at)!r} and comes back with"
        f" {_part(back, at)!r}"
    )
    by_design = tokenizer.lossy_reason
    return Check(
        "round trip",
        None if by_design else False,
        f"{share}; {example}" + (f"; by design: {by_design}" if by_design else ""),
    )


def _part(text: str, at: int) -> str:
    return text[max(at - 10, 0) : at + SHOWN - 10]


def _look_alikes(tokenizer: Tokenizer, name: str) -> Check:
    """Whether special tokens spelled out in text stay text; except the unknown token, which any
    text may produce.
    """
    unknown = tokenizer.named.get("unk_token")
    texts = [f"a{text}b {text}\n{text}" for text in tokenizer.special_ids]
    special = {index: text for text, index in tokenizer.special_ids.items() if text != unknown}
    for encode_batch in (tokenizer.encode_batch, open_encoder(tokenizer, name).encode_batch):
        for text, ids in zip(texts, split_batch(encode_batch(texts)), strict=True):
            if found := special.keys() & set(ids):
                return Check(
                    "look-alikes of special tokens",
                    False,
                    f"the text {text!r} becomes the special token {special[min(found)]!r}",
                )
    return Check(
        "look-alikes of special tokens",
        True,
        f"{len(texts):,} special tokens, spelled out in text, stay text",
    )


def _special(recipe: Recipe, tokenizer: Tokenizer) -> Check:
    what, special = "BOS, EOS and padding", tokenizer.special
    missing = [
        f"{name} {text!r}"
        for name, text in tokenizer.named.items()
        if tokenizer.token_id(text) is None
    ]
    if missing:
        return Check(
            what,
            False,
            f"the configuration names {' and '.join(missing)}, which the vocabulary does not have;"
            " mend tokenizer_config.json",
        )
    words = [
        f"{name} {'none' if index is None else f'{tokenizer.token(index)} ({index})'}"
        for name, index in vars(special).items()
    ]
    if special.eos is None and recipe.documents not in FRAMED:
        return Check(
            what,
            None,
            f"{', '.join(words)}; without EOS a model does not learn where a document ends",
        )
    return Check(what, True, ", ".join(words))


def _frame(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[Check]:
    """The frame of a text for models with an encoder; without an end, a model would never learn to
    stop.
    """
    if recipe.documents in FRAMED:
        before, after = (
            [f"{tokenizer.token(token)} ({token})" for token in tokens]
            for tokens in frame_of(recipe.documents, tokenizer)
        )
        passed = bool(after) or recipe.documents != "pair"
        yield Check(
            "around each text",
            passed,
            f"{' '.join(before) or 'nothing'} before it, {' '.join(after) or 'nothing'} behind it",
        )


def _bos(tokenizer: Tokenizer, texts: Sequence[str]) -> Check:
    what, bos = "one BOS", tokenizer.special.bos
    if bos is None:
        return Check(what, None, "the tokenizer has none")
    spelled = str(tokenizer.token(bos))
    count = max(
        tokenizer.encode_document(text[:SHOWN]).count(bos) for text in (*texts[:100], f"{spelled}a")
    )
    if count != int(tokenizer.adds_bos) and bos != tokenizer.special.eos:
        return Check(what, False, f"a document has {count} times {spelled}")
    chat = _chat(tokenizer)
    if chat.count(bos) > 1 and bos != tokenizer.special.eos:
        return Check(
            what,
            False,
            f"the chat template writes {spelled} {chat.count(bos)} times at the beginning of a"
            " chat; mend the template",
        )
    begun = sum(text.startswith(spelled) for text in texts)
    also = (
        f"; {begun:,} documents begin with the letters {spelled}, which stay text: take them out of"
        " the source"
        if begun
        else ""
    )
    return Check(
        what,
        None if begun else True,
        f"{spelled} stands {'once' if tokenizer.adds_bos else 'not'} before a document{also}",
    )


def _chat(tokenizer: Tokenizer) -> list[int]:
    """The ids of a short chat; [] if there is no template, or if it refuses this chat."""
    try:
        return tokenizer.encode_chat([{"role": "user", "content": "a"}])
    except WrongInput:
        return []


def _fits(tokenizer: Tokenizer, wanted: TokenBatch) -> Check:
    dtype, highest = token_dtype(tokenizer.vocab_size), int(wanted[0].max(initial=-1))
    fits = highest < tokenizer.vocab_size <= np.iinfo(dtype).max + 1
    return Check(
        "ids fit their column",
        fits,
        f"{dtype.name} for {tokenizer.vocab_size:,} tokens; the highest id here is {highest:,}",
    )


def _template(recipe: Recipe, tokenizer: Tokenizer) -> Check:
    identity, needed = tokenizer.template_identity, recipe.documents in CHAT_TEMPLATED
    if identity is None:
        return Check(
            "chat template",
            False if needed else None,
            "none" + ("; set tokenizer.template to a built-in name or a file" if needed else ""),
        )
    return Check(
        "chat template",
        True,
        f"identity {identity}, from {recipe.tokenizer.template or 'the tokenizer itself'}",
    )


def _prepared(recipe: Recipe, tokenizer: Tokenizer) -> Check:
    what, folder = "prepared data", recipe.folder.columns
    marker = read_marker(folder, MANIFEST) if Path(folder).is_dir() else None
    if marker is None:
        return Check(what, None, "there are none yet")
    if marker["tokenizer"] != tokenizer.identity():
        return Check(
            what,
            False,
            f"{folder} was made with tokenizer {marker['tokenizer']}, this is"
            f" {tokenizer.identity()}; run `ingot prepare --again`",
        )
    return Check(what, True, f"{folder} was made with this tokenizer")


def _conversion(tokenizer: Tokenizer) -> Iterator[Check]:
    """If a model file defines the tokenizer, other tools read the tokenizer.json converted from
    it.
    """
    trust = read_config(tokenizer.files, "tokenizer").get(CONVERSION_KEY)
    if trust is not None:
        same = "gives the same ids on every nasty text"
        yield Check(
            "tokenizer.json for other tools",
            True if trust == EXACT else None,
            same if trust == EXACT else str(trust),
        )


def _amount(texts: Sequence[str]) -> str:
    return f"{len(texts):,} documents, {sum(len(text.encode()) for text in texts) / 1e6:,.1f} MB"
