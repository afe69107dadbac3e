"""Downloads from the Hugging Face hub, through its own client and cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ingot.base.errors import Failed, IngotError, WrongInput

MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
ASK_S = 5.0
"""Timeout for small requests to the hub that are made before work begins."""


def fetch_model(name: str, revision: str | None = None, *, tokenizer_only: bool = False) -> Path:
    """The local folder of the hub model `ORG/NAME`, downloaded once and then read from the cache.

    Raises:
        WrongInput: no such model or revision, or it needs a token.
        Failed: the hub cannot be reached and the model is not in the cache.
    """
    from huggingface_hub import snapshot_download

    patterns = [
        pattern for pattern in MODEL_FILES if not (tokenizer_only and pattern == "*.safetensors")
    ]
    with _hub_errors(name, revision):
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def fetch_config(name: str, revision: str | None = None) -> Path:
    """A folder with at least the `config.json` of the hub model `ORG/NAME`. The hub is asked once,
    without retries, so that the answer or refusal is quick.

    Raises:
        WrongInput: as `fetch_model`; or the model has no configuration.
        Failed: as `fetch_model`.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    known = try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(known, str):
        return Path(known).parent
    with _hub_errors(name, revision):
        files = HfApi().model_info(name, revision=revision, timeout=ASK_S).siblings or []
        if all(file.rfilename != "config.json" for file in files):
            raise WrongInput(f"hf:{name} has no config.json and is no model; check the name")
        return Path(hf_hub_download(name, "config.json", revision=revision)).parent


def ask_tokenizer(name: str, revision: str | None = None) -> Path:
    """A folder with the tokenizer of the hub model `ORG/NAME`. The hub is asked once whether it is
    reachable; if it is not, a complete tokenizer in the cache is used.

    Raises:
        WrongInput, Failed: as `fetch_model`.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    files = ("tokenizer.json", "tokenizer_config.json")
    known = [try_to_load_from_cache(name, file, revision=revision) for file in files]
    try:
        with _hub_errors(name, revision):
            HfApi().model_info(name, revision=revision, timeout=ASK_S)
    except Failed:
        if isinstance(known[0], str) and isinstance(known[1], str):
            return Path(known[0]).parent
        raise
    return fetch_model(name, revision, tokenizer_only=True)


@contextlib.contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except IngotError:
        raise
    except HFValidationError as error:
        raise WrongInput(f"hf:{name} is not a name on the hub; write it as hf:ORG/NAME") from error
    except GatedRepoError as error:
        raise WrongInput(
            f"hf:{name} is gated; accept its terms on its page and set $HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        where = f" at revision {revision}" if revision else ""
        raise WrongInput(
            f"hf:{name}{where} is not on the hub; check the name, or set $HF_TOKEN if it is private"
        ) from error
    except Exception as error:  # the client passes on whatever its transport raises
        raise Failed(
            f"hf:{name} cannot be fetched ({type(error).__name__}) and is not in the cache; check"
            " the network, or give a folder"
        ) from error
