"""Whether a model folder still holds what was exported: the record in its `ingot.json` (a hash of
each tensor, of its configuration and of the tokenizer's files), and its comparison without torch.

It guards against damage and mistakes, not against somebody who changes the record too. Folders that
others wrote have no record and open unchecked.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from ingot.base.errors import WrongInput, some_of
from ingot.base.exact_json import as_object
from ingot.base.markers import fingerprint
from ingot.config.models.lineage import model_again, read_lineage
from ingot.config.models.source import CONFIG, model_config

CONTENT = "content"
"""The record's key in `ingot.json`."""
FILES = "files"
"""The record's key for files that are neither weights nor `config.json`."""
QUANTIZE = "quantize"
"""The key in `ingot.json` of what an adapter was trained beside, and what it was merged into."""
CHANGED = "changed_config"
"""The key in `ingot.json` of an adapter for what `model.config` changed of its base."""
LABELS = "labels"
"""The key in `ingot.json` of an adapter for the names of its classes, in their order."""
IGNORED = ("chat_template", "base_model_name_or_path")
"""Settings that may change without changing the model: the template has its own check and knob
(`any_template`), and an adapter's base may move.
"""
SETTINGS = ("tokenizer_config.json", "generation_config.json", "adapter_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "special_tokens_map.json")


def tensor_digests(lineage: Mapping[str, Any] | None) -> dict[str, str]:
    """The hashes of a folder's tensors from its `ingot.json`; empty without a record."""
    tensors = _record(lineage).get("tensors")
    return dict(tensors) if isinstance(tensors, dict) else {}


def recorded_content(folder: Path) -> str | None:
    """What stands for the whole model or adapter of a folder by its record, wherever the folder
    lies; None without a record of its tensors. Reads no weights: loading them compares.
    """
    lineage = read_lineage(folder)
    if not (tensors := tensor_digests(lineage)):
        return None
    record = _record(lineage)
    adapter = (record.get(FILES) or {}).get("adapter_config.json")
    return fingerprint({"tensors": tensors, CONFIG: record.get(CONFIG), "adapter": adapter})


def content_record(folder: Path, tensors: Mapping[str, str]) -> dict[str, Any]:
    """The record of a folder whose tensors have these hashes."""
    return {CONFIG: config_digest(folder), FILES: file_digests(folder), "tensors": dict(tensors)}


def config_digest(folder: Path) -> str:
    """A hash of the contents of `config.json`, independent of formatting."""
    return fingerprint(model_config(folder))


def file_digests(folder: Path) -> dict[str, str]:
    """Hashes of the tokenizer's files and of settings files: of the values for settings, of the
    bytes for others.
    """
    return {
        name: found
        for name in (*SETTINGS, *TOKENIZER_FILES)
        if (found := _file_digest(folder / name)) is not None
    }


def changed_files(folder: Path, lineage: Mapping[str, Any] | None) -> list[str]:
    """The files of the record, except weights, that are missing or changed."""
    record = _record(lineage)
    files = record.get(FILES)
    digests = files if isinstance(files, dict) else {}
    changed = [name for name, known in digests.items() if _file_digest(folder / name) != known]
    if CONFIG in record and record[CONFIG] != config_digest(folder):
        changed.append(CONFIG)
    return changed


def check_files(folder: Path) -> None:
    """Raises WrongInput if a file of the record, except weights, has changed."""
    if changed := changed_files(folder, read_lineage(folder)):
        refuse_changed(folder, {name: [] for name in changed})


def changed_content(folder: Path) -> dict[str, list[str]]:
    """What differs from the record, by file, with tensor names; reads the whole folder."""
    lineage = read_lineage(folder)
    changed: dict[str, list[str]] = {name: [] for name in changed_files(folder, lineage)}
    digests = tensor_digests(lineage)
    if not digests:
        return changed
    seen: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            for name, found in _stored_digests(file):
                seen.add(name)
                if digests.get(name) != found:
                    changed.setdefault(file.name, []).append(name)
        except (ValueError, KeyError, TypeError):
            changed[file.name] = []  # damaged
    if missing := [name for name in digests if name not in seen and not changed]:
        changed["weights that are missing"] = missing
    return changed


def check_content(folder: Path) -> None:
    """Raises WrongInput if a folder differs from its record."""
    if changed := changed_content(folder):
        refuse_changed(folder, changed)


def describe_changed(folder: Path, changed: Mapping[str, list[str]]) -> str:
    """What differs, in words."""
    what = "; ".join(
        f"{file}{f' ({some_of(names)})' if names else ''}" for file, names in changed.items()
    )
    return f"{folder} does not hold what was exported there: {what} changed since"


def refuse_changed(folder: Path, changed: Mapping[str, list[str]]) -> None:
    """Raises WrongInput naming what differs and how to accept it."""
    raise WrongInput(
        f"{describe_changed(folder, changed)};"
        f" {model_again(folder, 'export or fetch the model again')}, or, if that was on purpose,"
        f" accept it with `ingot import {folder} NEW`"
    )


def _record(lineage: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return as_object((lineage or {}).get(CONTENT))


def _file_digest(file: Path) -> str | None:
    """None if the file does not exist."""
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if file.name in SETTINGS:
        try:
            said = json.loads(data)
        except ValueError:
            return "not JSON"
        if isinstance(said, dict):
            said = {key: value for key, value in said.items() if key not in IGNORED}
        return fingerprint(said)
    return xxhash.xxh3_128(data).hexdigest()


def _stored_digests(file: Path) -> Iterator[tuple[str, str]]:
    """Each tensor of a safetensors file with the hash of its bytes; raises ValueError, KeyError or
    TypeError if it is damaged.
    """
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        if start > file.stat().st_size:
            raise ValueError("the header is longer than the file")
        header = json.loads(stream.read(start - 8))
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for name, about in header.items():
                if name == "__metadata__":
                    continue
                begin, end = (start + int(offset) for offset in about["data_offsets"])
                if end > len(data):
                    raise ValueError(f"{name} ends beyond the file")
                with memoryview(data) as view, view[begin:end] as part:
                    yield name, xxhash.xxh3_128(part).hexdigest()
