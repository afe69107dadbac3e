"""The Hugging Face hub, through its own client: downloads by its cache, and uploads of a model."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.base.errors import Failed, IngotError, WrongInput

WEIGHTS = "*.safetensors"
MODEL_FILES = ["*.json", WEIGHTS, "*.model", "*.txt", "*.jinja"]
BESIDE_WEIGHTS = [pattern for pattern in MODEL_FILES if pattern != WEIGHTS]
TOKENIZERS = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("spiece.model",),
    ("vocab.json", "merges.txt"),
)
"""What files a tokenizer can be read from: of a folder that has several, the first."""
TOKENIZER_CONFIG = "tokenizer_config.json"
"""What has the special tokens and the chat template beside a tokenizer.json, which some libraries
fetch alone.
"""
ASK_S = 5.0
"""Timeout for small requests to the hub that are made before work begins."""


def fetch_model(name: str, revision: str | None = None, *, tokenizer_only: bool = False) -> Path:
    """The local folder of the hub model `ORG/NAME`, downloaded once and then read from the cache.

    Raises:
        WrongInput: no such model or revision, or it needs a token.
        Failed: the hub cannot be reached and the model is not in the cache.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    patterns = BESIDE_WEIGHTS if tokenizer_only else MODEL_FILES
    with _hub_errors(name, revision):
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
        is_whole = (
            _has_tokenizer(folder, name, revision) if tokenizer_only else any(folder.glob(WEIGHTS))
        )
        if not is_whole:
            # Of a hub that does not answer the client gives what another command fetched, such as
            # the configuration alone: that the model lacks the rest is only known of one that does.
            HfApi().model_info(name, revision=revision, timeout=ASK_S)
            if tokenizer_only:  # asked for by its name, so that the cache knows that there is none
                with contextlib.suppress(RemoteEntryNotFoundError):
                    hf_hub_download(name, TOKENIZER_CONFIG, revision=revision)
    return folder


def fetch_config(name: str, revision: str | None = None, *, adapters: bool = False) -> Path:
    """A folder with at least the `config.json` of the hub model `ORG/NAME`; with `adapters` that of
    an adapter's `adapter_config.json` where there is one, beside which its base's may lie. The hub
    is asked once, without retries, so that the answer or refusal is quick.

    Raises:
        WrongInput: as `fetch_model`; or the model has no configuration.
        Failed: as `fetch_model`.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    wanted = [*(["adapter_config.json"] if adapters else []), "config.json"]
    cached = [try_to_load_from_cache(name, file, revision=revision) for file in wanted]
    known = [Path(path).parent if isinstance(path, str) else None for path in cached]
    if known[0] is not None:
        return known[0]
    try:
        with _hub_errors(name, revision):
            files = HfApi().model_info(name, revision=revision, timeout=ASK_S).siblings or []
            there = [file for file in wanted if any(each.rfilename == file for each in files)]
            if not there:
                raise WrongInput(f"hf:{name} has no config.json and is no model; check the name")
            return Path(hf_hub_download(name, there[0], revision=revision)).parent
    except IngotError:
        # Whether a cached config.json is that of an adapter's base only the hub can tell.
        if known[-1] is None:
            raise
        return known[-1]


def ask_tokenizer(name: str, revision: str | None = None) -> Path:
    """A folder with the tokenizer of the hub model `ORG/NAME`. The hub is asked once whether it is
    reachable; if it is not, one in the cache is used.

    Raises:
        WrongInput, Failed: as `fetch_model`.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with _hub_errors(name, revision):
            HfApi().model_info(name, revision=revision, timeout=ASK_S)
    except Failed:
        with contextlib.suppress(LocalEntryNotFoundError):
            cached = snapshot_download(
                name, revision=revision, allow_patterns=BESIDE_WEIGHTS, local_files_only=True
            )
            if _has_tokenizer(Path(cached), name, revision):
                return Path(cached)
        raise
    return fetch_model(name, revision, tokenizer_only=True)


def _has_tokenizer(folder: Path, name: str, revision: str | None) -> bool:
    """Whether the cached folder of `ORG/NAME` has its tokenizer whole: a tokenizer.json alone is,
    where the hub has said that there is nothing beside it.
    """
    from huggingface_hub import try_to_load_from_cache

    found = [files for files in TOKENIZERS if all((folder / file).is_file() for file in files)]
    if found[:1] != [("tokenizer.json",)]:
        return bool(found)
    return try_to_load_from_cache(name, TOKENIZER_CONFIG, revision=revision) is not None


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


@dataclass(frozen=True)
class HubCommit:
    """A repository after an upload: its page, its newest commit, whether that commit is a new one,
    and the files of an earlier upload that it removed.
    """

    url: str
    commit: str
    new: bool
    removed: list[str]


def push_files(name: str, files: Mapping[str, Path | bytes], *, public: bool) -> HubCommit:
    """Make `files` (path in the repository -> file or content) the model repository `ORG/NAME`, in
    one commit; the repository is created if there is none, private unless `public`.

    The client sends no content that the hub has already, so the same call after a failure goes on
    where it was, and changes nothing where nothing changed. Files that loaders of models read and
    that are not among `files` are removed: they would be loaded with the new ones.

    Raises:
        WrongInput: no token or one that may not write there, a name that is none, or a repository
            of the other visibility; nothing has been uploaded then.
        Failed: the upload broke off.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    if get_token() is None:
        raise WrongInput(
            f"hf:{name}: no token for the hub is set; run `hf auth login`, or set $HF_TOKEN to one"
            " that may write there"
        )
    with _push_errors(name):
        api = HfApi()
        api.create_repo(name, private=not public, exist_ok=True)
        before = api.model_info(name)
        if before.private != (not public):
            raise WrongInput(
                f"hf:{name} is public; add --public to push there, or make it private in its"
                " settings"
                if not public
                else f"hf:{name} is private; push without --public, or make it public in its"
                " settings"
            )
        there = [file.rfilename for file in before.siblings or []]
        stale = [
            path
            for path in there
            if path not in files and any(fnmatch.fnmatchcase(path, each) for each in MODEL_FILES)
            if "/" not in path
        ]
        made = api.create_commit(
            name,
            [
                *(CommitOperationAdd(path, content) for path, content in files.items()),
                *(CommitOperationDelete(path) for path in stale),
            ],
            commit_message="Upload by ingot push",
        )
    return HubCommit(f"{api.endpoint}/{name}", made.oid, made.oid != before.sha, stale)


@contextlib.contextmanager
def _push_errors(name: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except IngotError:
        raise
    except HFValidationError as error:
        raise WrongInput(f"hf:{name} is not a name on the hub; write it as hf:ORG/NAME") from error
    except Exception as error:  # the client passes on whatever its transport raises
        response = getattr(error, "response", None) if isinstance(error, HfHubHTTPError) else None
        code = getattr(response, "status_code", None)
        if code in (401, 403, 404):
            raise WrongInput(
                f"hf:{name}: the hub answered {code}: the token may not write there; take one with"
                " the permission to write to this name"
            ) from error
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        raise Failed(
            f"hf:{name}: the upload broke off ({said}); the same command goes on with what is"
            " missing"
        ) from error
