"""Which fast library was chosen for a tokenizer on this machine, in the user's cache folder:
choosing opens every library and encodes with the reference, a second of CPU at each `prepare`.

A choice is kept with all that it depends on but the documents it was tried on: the tokenizer's
identity, and the versions of the libraries and of the reference. It decides about speed alone;
whoever follows it compares its ids with the reference's on documents of his own, and forgets it
where they differ.
"""

from __future__ import annotations

import contextlib
import json
import platform
from pathlib import Path

from ingot.base.errors import IngotError
from ingot.base.markers import fingerprint
from ingot.base.storage import write_atomic
from ingot.base.userfolders import cache_folder
from ingot.tokenizers.encoders import LIBRARIES, REFERENCE
from ingot.tokenizers.tokenizer import Tokenizer


def remembered_encoder(tokenizer: Tokenizer) -> str | None:
    """The library that was chosen for this tokenizer before, with its version; None if there is
    none or it cannot be read.
    """
    try:
        found = json.loads(_file(tokenizer).read_bytes())["encoder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    known = any(found == library.name for library in LIBRARIES if library.version is not None)
    return found if known else None


def remember_encoder(tokenizer: Tokenizer, name: str) -> None:
    """Keep a choice. That of the reference is not kept: other documents may allow a faster one."""
    if name == REFERENCE:
        return
    # Without a folder that can be written, such as another user's, the next run chooses again.
    with contextlib.suppress(OSError, IngotError):
        file = _file(tokenizer)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps({"encoder": name}) + "\n")


def forget_encoder(tokenizer: Tokenizer) -> None:
    """Remove a choice that proved wrong."""
    with contextlib.suppress(OSError):
        _file(tokenizer).unlink(missing_ok=True)


def _file(tokenizer: Tokenizer) -> Path:
    about = [
        tokenizer.identity(),
        tokenizer.library,
        [library.name for library in LIBRARIES],
        platform.node(),
    ]
    return cache_folder() / "encoders" / f"{fingerprint(about)}.json"
