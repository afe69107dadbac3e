"""Loads a `Tokenizer` from a folder, a file, a hub name or a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput, some_of
from ingot.base.exact_json import read_object
from ingot.base.hub import TOKENIZERS, ask_tokenizer, fetch_model
from ingot.base.markers import problems, read_marker
from ingot.base.runfolder import RunFolder, model_folder
from ingot.config.models.content import check_files
from ingot.config.models.lineage import read_lineage
from ingot.config.recipe import Recipe
from ingot.tokenizers.convert import convert_model, gpt2_json
from ingot.tokenizers.settings import (
    CONFIG,
    CONVERSION_KEY,
    MODEL_FILES,
    REFERENCE_KEY,
    Files,
    added_tokens,
    listed_tokens,
    named_tokens,
    read_config,
    text_of,
    with_added_tokens,
)
from ingot.tokenizers.tokenizer import Tokenizer, open_model_backend

CONFIG_FILES = (CONFIG, "special_tokens_map.json", "chat_template.jinja")
JSON, GPT2 = "tokenizer.json", ("vocab.json", "merges.txt")
ADDED = "added_tokens.json"
PREPARED = "prepared.json"
"""Lies beside a tokenizer that `prepare` has kept, as it was read then."""
FRAMED_PAIRS = ("bart", "blenderbot", "deberta", "led", "longformer", "mvp", "roberta")
"""Types of models that have a pair of files as GPT-2 has, and put tokens around a text."""


def load_tokenizer(source: Path, *, check: bool = True) -> Tokenizer:
    """Load the tokenizer in a folder (its own, or a model's), or in a file with the configuration
    beside it.

    In a folder `tokenizer.json` wins, unless the configuration names the model that it was made
    from (`Tokenizer.save`); then `tokenizer.model` or `spiece.model` (tiktoken ranks or
    SentencePiece, by content), then GPT-2's `vocab.json` and `merges.txt`.

    EOS and padding that only the model's `generation_config.json` names are taken from there, but
    not in a folder that was exported here: its tokenizer is the one that the model was trained
    with. BOS is not: a library that knows none adds none.

    Raises:
        WrongInput: there is no tokenizer in `source`, it cannot be read, or, with `check`, it is
            not the one that was exported to this model folder, or that `prepare` kept here.
    """
    folder, name = (source.parent, source.name) if source.is_file() else (source, None)
    if check:
        check_files(folder)
        _check_prepared(folder)
    files: dict[str, str | bytes] = {
        name: text for name in CONFIG_FILES if (text := _read_text(folder / name)) is not None
    }
    config = with_added_tokens(
        read_config(files, str(folder)), _read_text(folder / ADDED), str(folder / ADDED)
    )
    name = name or _authoritative_file(folder, config)
    if name in GPT2:
        files[JSON], settings = gpt2_json(
            _require_text(folder, "vocab.json"),
            _require_text(folder, "merges.txt"),
            {**_class_of_model(folder), **config},
            str(folder),
        )
        files[CONFIG] = _updated_config(files, settings)
    elif name.endswith(".json"):
        files[JSON] = _require_text(folder, name)
    else:
        files |= _model_files(folder, name, files, config)
    tokenizer = Tokenizer(files, str(source))
    lineage = read_lineage(folder)  # without one, no identity, which takes as long as to open all
    exported = lineage is not None and lineage.get("tokenizer") == tokenizer.identity()
    if name.endswith(".json") and not exported and not (folder / PREPARED).exists():
        _check_added(tokenizer, config, str(source))
    missing = {} if exported else _tokens_from_model(folder, tokenizer)
    return (
        tokenizer
        if not missing
        else Tokenizer(files | {CONFIG: _updated_config(files, missing)}, str(source))
    )


def _check_prepared(folder: Path) -> None:
    """Raises WrongInput if a file of the tokenizer that `prepare` has kept in a run is not as it
    was then. A copy elsewhere is its owner's.
    """
    is_runs = folder == RunFolder(folder.parent.parent).tokenizer
    marker = read_marker(folder, PREPARED) if is_runs else None
    if marker is not None and (found := problems(folder, marker, checksums=True)):
        raise WrongInput(f"{found[0]}; run `ingot prepare --again`")


def _class_of_model(folder: Path) -> dict[str, str]:
    """The class of a GPT-2 pair of files whose configuration names none, where the model's type
    says that it is another than GPT-2's: such put tokens around a text.
    """
    kind = (read_object(folder / "config.json") or {}).get("model_type")
    return {"tokenizer_class": f"a {kind} model"} if kind in FRAMED_PAIRS else {}


def _check_added(tokenizer: Tokenizer, config: Mapping[str, Any], where: str) -> None:
    """Refuse a configuration that adds tokens to a tokenizer.json that lacks them: transformers
    appends them, and here they would be read as pieces of text.
    """
    told = [token.content for token in added_tokens(config)] + listed_tokens(config)
    told += [eos] if (eos := named_tokens(config).get("eos_token")) else []
    lacking = [text for text in dict.fromkeys(told) if tokenizer.token_id(text) is None]
    if lacking:
        raise WrongInput(
            f"{where}: the configuration adds {some_of(lacking)}, which the vocabulary"
            " lacks; open it with transformers' AutoTokenizer, save_pretrained() it, and give that"
            " folder"
        )


def _authoritative_file(folder: Path, config: Mapping[str, Any]) -> str:
    """Name of the file that defines the tokenizer of a folder."""
    marked = config.get(REFERENCE_KEY)
    names = [
        *([marked] if isinstance(marked, str) and Path(marked).name == marked else []),
        *(files[0] for files in TOKENIZERS),
    ]
    name = next((name for name in names if (folder / name).is_file()), None)
    if name is None:
        raise WrongInput(_missing_message(folder))
    return name


def _model_files(
    folder: Path, name: str, files: Files, config: Mapping[str, Any]
) -> dict[str, str | bytes]:
    """The files of a tokenizer that is defined by a model: the model, a converted tokenizer.json if
    possible, and a configuration that records how exact that is.
    """
    data, kept = (folder / name).read_bytes(), name if name in MODEL_FILES else MODEL_FILES[0]
    if config.get(REFERENCE_KEY) == name:
        return (
            {kept: data}
            if (made := _read_text(folder / JSON)) is None
            else {kept: data, JSON: made}
        )
    reference = open_model_backend(data, config, str(folder / name))
    made, trust = convert_model(reference) or (None, "none")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **reference.named,
        **config,
    }
    text = _updated_config(files, {**settings, REFERENCE_KEY: kept, CONVERSION_KEY: trust})
    return {kept: data, CONFIG: text} if made is None else {kept: data, CONFIG: text, JSON: made}


def _updated_config(files: Files, values: Mapping[str, Any]) -> str:
    config = json.loads(text_of(files, CONFIG) or "{}") | dict(values)
    return json.dumps(config, indent=1, ensure_ascii=False) + "\n"


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise WrongInput(
            f"{path}: a tokenizer file is not UTF-8 ({error}); fetch or save the tokenizer again"
        ) from None


def _require_text(folder: Path, name: str) -> str:
    text = _read_text(folder / name)
    if text is None:
        raise WrongInput(f"{folder} has no {name}; copy the tokenizer's files there")
    return text


def resolve_tokenizer(recipe: Recipe, *, ask: bool = False) -> Path:
    """The folder or file of a recipe's tokenizer that is not trained: `tokenizer.source`, or the
    model's own. `ask`: where the hub does not answer at once, one in the cache will do.

    Raises:
        WrongInput: the folder, file or hub name does not exist.
        Failed: the hub cannot be reached.
    """
    given = recipe.tokenizer.source
    if given is None:
        return models_tokenizer(recipe, ask=ask)
    revision = recipe.model.revision if given == recipe.model.source else None
    return _resolved("tokenizer.source", given, revision, ask=ask)


def models_tokenizer(recipe: Recipe, *, ask: bool) -> Path:
    """The same of the tokenizer that lies beside the model's weights."""
    return _resolved("model.source", recipe.model.source, recipe.model.revision, ask=ask)


def _resolved(knob: str, source: str, revision: str | None, *, ask: bool) -> Path:
    if source.startswith("hf:"):
        name = source.removeprefix("hf:")
        if ask:
            return ask_tokenizer(name, revision)
        return fetch_model(name, revision, tokenizer_only=True)
    folder = Path(source)
    if not folder.is_dir() and not (knob == "tokenizer.source" and folder.is_file()):
        raise WrongInput(
            f"{knob} {source} does not exist; give a folder, a tokenizer.model, hf:ORG/NAME, or"
            " tokenizer.source=train"
        )
    return model_folder(folder)


def _missing_message(folder: Path) -> str:
    if not folder.is_dir():
        return f"tokenizer {folder} does not exist; check the path"
    if RunFolder(folder).recipe.exists():
        return f"{folder} is a run that holds no trained model; run `ingot train` first"
    if (folder / "vocab.txt").is_file():
        return (
            f"{folder} has vocab.txt but no tokenizer.json; open it with transformers'"
            " AutoTokenizer, save_pretrained() it, and give that folder"
        )
    return f"{folder} has no tokenizer.json; copy the tokenizer's files there"


def _tokens_from_model(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """`eos_token` and `pad_token` that the model's files name by id and the tokenizer's own files
    do not.
    """
    found: dict[str, str] = {}
    for file in ("generation_config.json", "config.json"):
        values = read_object(folder / file) or {}
        for name in ("eos", "pad"):
            token = values.get(f"{name}_token_id")
            token = token[0] if isinstance(token, list) and token else token
            if (
                getattr(tokenizer.special, name) is None
                and isinstance(token, int)
                and (text := tokenizer.token(token)) is not None
            ):
                found.setdefault(f"{name}_token", text)
    return found
