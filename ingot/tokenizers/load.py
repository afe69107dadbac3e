"""From a folder, a hub name or a recipe to a `Tokenizer`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.hub import fetch_model
from ingot.config.recipe import Recipe
from ingot.tokenizers.tokenizer import Tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
UNREAD = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that lies in a Hugging Face folder, a model's or its own.

    EOS and padding that only the model's `generation_config.json` names are taken from there. BOS is not: a reference
    that knows none puts none.

    Raises:
        WrongInput: there is no tokenizer in `folder`, or it cannot be read.
    """
    if not (folder / "tokenizer.json").is_file():
        raise WrongInput(_why_not(folder))
    try:
        files = {name: (folder / name).read_text(encoding="utf-8") for name in FILES if (folder / name).is_file()}
    except UnicodeDecodeError as error:
        raise WrongInput(f"{folder}: a tokenizer file is not UTF-8 ({error}); fetch or save the tokenizer again") from None
    tokenizer = Tokenizer(files, str(folder))
    missing = _from_model(folder, tokenizer)
    if not missing:
        return tokenizer
    config = json.loads(files.get("tokenizer_config.json", "{}")) | missing
    return Tokenizer({**files, "tokenizer_config.json": json.dumps(config, indent=1, ensure_ascii=False) + "\n"}, str(folder))


def resolve_tokenizer(recipe: Recipe) -> Path:
    """The folder of the recipe's tokenizer where it is not trained: `tokenizer.source`, or the model's own.

    Raises:
        WrongInput: the folder or hub name does not exist.
        Failed: the hub cannot be reached.
    """
    given = recipe.tokenizer.source
    knob, source = ("model.source", recipe.model.source) if given is None else ("tokenizer.source", given)
    if source.startswith("hf:"):
        revision = recipe.model.revision if source == recipe.model.source else None
        return fetch_model(source.removeprefix("hf:"), revision, tokenizer_only=True)
    folder = Path(source)
    if folder.is_file():
        raise WrongInput(f"{knob} {source} is a file; give the Hugging Face folder that holds its tokenizer.json, or hf:ORG/NAME")
    if not folder.is_dir():
        raise WrongInput(f"{knob} {source} does not exist; give a folder, hf:ORG/NAME, or tokenizer.source=train")
    return folder


def _why_not(folder: Path) -> str:
    if not folder.is_dir():
        return f"tokenizer folder {folder} does not exist; check the path"
    others = [name for name in UNREAD if (folder / name).is_file()]
    if others:
        return (f"{folder} has {' and '.join(others)} but no tokenizer.json, the one format read so far; "
                f"open it with transformers' AutoTokenizer, save_pretrained() it, and give that folder")
    return f"{folder} has no tokenizer.json; copy the tokenizer's files there, or set tokenizer.source to the folder that has them"


def _from_model(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """`eos_token` and `pad_token` that the tokenizer's own files leave open and the model's name by id."""
    found: dict[str, str] = {}
    for file in ("generation_config.json", "config.json"):
        values = _json_or_empty(folder / file)
        for name in ("eos", "pad"):
            token = values.get(f"{name}_token_id")
            token = token[0] if isinstance(token, list) and token else token
            if getattr(tokenizer.special, name) is None and isinstance(token, int) and (text := tokenizer.token(token)) is not None:
                found.setdefault(f"{name}_token", text)
    return found


def _json_or_empty(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
