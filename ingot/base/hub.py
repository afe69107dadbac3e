"""Downloads from the Hugging Face hub, through its own client and cache."""

from __future__ import annotations

from pathlib import Path

from ingot.base.errors import Failed, WrongInput

MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def fetch_model(name: str, revision: str | None = None, *, tokenizer_only: bool = False) -> Path:
    """The local folder of the hub model `ORG/NAME`, downloaded once and then read from the cache.

    Raises:
        WrongInput: no such model or revision, or it needs a token.
        Failed: the hub cannot be reached and the model is not in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = [
        pattern for pattern in MODEL_FILES if not (tokenizer_only and pattern == "*.safetensors")
    ]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
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
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise Failed(
            f"hf:{name} cannot be fetched ({type(error).__name__}) and is not in the cache; check"
            " the network, or give a folder"
        ) from error
