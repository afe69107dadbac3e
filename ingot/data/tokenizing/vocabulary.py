"""The tokenizer of a run in `data/tokenizer/`: trained on the training documents, or loaded from
where the recipe says.

A sub-stage of `prepare` with a marker of its own: a vocabulary is trained again only if its inputs
changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from ingot.base.errors import WrongInput
from ingot.base.markers import entry_of, fingerprint, problems, read_marker, write_marker
from ingot.base.progress import Progress, say
from ingot.base.storage import atomic_folder
from ingot.config.recipe import Recipe
from ingot.data.cleaning.cleaned import CleaningResult
from ingot.data.cleaning.documents import SAMPLING, sample
from ingot.data.raw.store import RawData
from ingot.data.splits import Shares
from ingot.tokenizers.bpe import TRAINER, train_bpe
from ingot.tokenizers.chats.templates import find_template, for_recipe, required_tokens
from ingot.tokenizers.load import PREPARED, load_tokenizer, resolve_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer


def provide_tokenizer(
    recipe: Recipe, raw: RawData, cleaned: CleaningResult, new: Path
) -> tuple[Tokenizer, Path]:
    """The tokenizer of the recipe, and its folder: `data/tokenizer/`, or `new` if it differs from
    the one there.

    Raises:
        WrongInput: the recipe's tokenizer cannot be read, or there is not one document to train on.
        Failed: it cannot be fetched.
    """
    _sweep(recipe.folder.tokenizer)
    given = None
    if recipe.trains_tokenizer:
        inputs = fingerprint(_inputs(recipe, raw, cleaned))
    else:
        given = for_recipe(recipe, load_tokenizer(resolve_tokenizer(recipe)))
        inputs = given.files_identity
    for folder in (recipe.folder.tokenizer, new):
        if _is_current(folder, inputs):
            return given or load_tokenizer(folder), folder
    _save(new, given or _learn(recipe, raw, cleaned), inputs)
    return given or load_tokenizer(new), new


def _inputs(recipe: Recipe, raw: RawData, cleaned: CleaningResult) -> dict[str, Any]:
    """Everything that determines a trained vocabulary."""
    return {
        "trainer": TRAINER,
        "library": tokenizers.__version__,
        "vocab_size": recipe.tokenizer.vocab_size,
        "sample_bytes": recipe.tokenizer.sample_bytes,
        "sampling": SAMPLING,
        **Shares.of(recipe.data).identity(),
        "cleaned": cleaned.identity,
        "template": recipe.tokenizer.template and find_template(recipe.tokenizer.template),
        "template_kwargs": recipe.tokenizer.template_kwargs,
        **_hides(recipe),
        "documents": recipe.documents,
        "parts": [part.sha256 for source in raw.splits["train"] for part in source.parts],
    }


def _hides(recipe: Recipe) -> dict[str, bool]:
    """What a tokenizer that is trained for a recipe is to hide, and whether its texts have an end,
    as `train_bpe` is told.
    """
    spans, documents = recipe.objective.spans is not None, recipe.documents
    masks, ends = documents == "masked" and not spans, documents == "labelled"
    return {"masks": masks, "spans": spans, "ends": ends}


def learn_tokenizer(recipe: Recipe, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that a recipe asks to be trained, from plain texts."""
    special = required_tokens(recipe.tokenizer.template)
    learnt = train_bpe(texts, recipe.tokenizer.vocab_size, special, **_hides(recipe))
    return for_recipe(recipe, learnt)


def _learn(recipe: Recipe, raw: RawData, cleaned: CleaningResult) -> Tokenizer:
    size = min(recipe.tokenizer.sample_bytes, sum(source.bytes for source in raw.splits["train"]))
    with Progress("sample", total=-(-size // 10**6), unit="MB") as progress:
        texts = _shown(recipe, _texts(recipe, raw, cleaned), progress, cleaned)
        tokenizer = learn_tokenizer(recipe, texts)
    if tokenizer.vocab_size < recipe.tokenizer.vocab_size:
        say(
            f"the vocabulary has only {tokenizer.vocab_size:,} tokens: no further pair of tokens"
            " occurs twice"
        )
    return tokenizer


def _texts(recipe: Recipe, raw: RawData, cleaned: CleaningResult) -> Iterator[str]:
    for document in sample(raw, cleaned, Shares.of(recipe.data), recipe.tokenizer.sample_bytes):
        yield document.text


def _shown(
    recipe: Recipe, texts: Iterator[str], progress: Progress, cleaned: CleaningResult
) -> Iterator[str]:
    """The texts, and how much they were once all are read: a sample has about the size wanted."""
    done = 0
    for text in texts:
        done += len(text.encode())
        progress.update(done // 10**6)
        yield text
    if not done:
        raise WrongInput(
            "there is no training document to learn a vocabulary from;"
            + (
                " clean less (`ingot show data` names what was left out), or"
                if any(cleaned.dropped.values())
                else ""
            )
            + " raise data.fraction or tokenizer.sample_bytes"
        )
    say(f"learning a vocabulary of {recipe.tokenizer.vocab_size:,} from {done / 1e6:,.2f} MB")


def _is_current(folder: Path, inputs: str) -> bool:
    marker = read_marker(folder, PREPARED)
    return (
        marker is not None
        and marker.get("inputs") == inputs
        and not problems(folder, marker, checksums=True)
    )


def _save(folder: Path, tokenizer: Tokenizer, inputs: str) -> None:
    with atomic_folder(folder) as partial:
        tokenizer.save(partial)
        entries = [entry_of(partial, name) for name in sorted(tokenizer.files)]
        write_marker(
            partial, PREPARED, {"inputs": inputs, "identity": tokenizer.identity()}, entries
        )


def _sweep(folder: Path) -> None:
    """Remove what a killed run left half-written beside the folder."""
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
