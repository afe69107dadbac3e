"""The model folder: what training hands to evaluate, register, serve, and to every other tool that
reads Hugging Face folders.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import ingot
from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.base.storage import atomic_folder
from ingot.config.model_source import CONFIG, model_config
from ingot.models.adapters.peft_config import is_adapter
from ingot.models.hf.content import CONTENT
from ingot.models.hf.folder import (
    LINEAGE,
    changed_content,
    config_digest,
    hash_model,
    read_lineage,
)
from ingot.models.hf.meta import is_meta, load_meta
from ingot.models.hf.tensorfile import TensorSpec, stream_weights
from ingot.models.kinds import AnyModel, base_folder, exported_shapes, exported_weights, open_model
from ingot.models.native.decoder import Decoder
from ingot.tokenizers.chat import stop_tokens
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer

GENERATION = "generation_config.json"
ExportType = Literal["bf16", "fp32"]
TOKENIZER = "tokenizer_config.json"
GENERATED = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
DTYPES: dict[ExportType, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def export_model(
    model: AnyModel,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    export_type: ExportType,
    lineage: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Write the model folder, all at once, adapters folded in, one tensor in memory at a time.
    Returns its `ingot.json`, with `model_hash` in it.

    `generation` is the source's generation configuration, carried over; None makes one from the
    tokenizer. `tensors` are the weights of a model on `meta`, in its own order.
    """
    dtype = DTYPES[export_type]
    stop = stop_tokens(tokenizer)
    eos = stop[0] if len(stop) == 1 else stop or None
    special = {
        "bos_token_id": tokenizer.special.bos,
        "eos_token_id": eos,
        "pad_token_id": tokenizer.special.pad,
    }
    config = {**model.config.to_hf(), "dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    if not isinstance(model, Decoder):
        # A decoder of the other kinds begins and ends as its own configuration says.
        generation = generation or {
            "_from_model_config": True,
            **{key: config[key] for key in GENERATED if config.get(key) is not None},
        }
    elif generation is None:
        config.update(special)
        generation = {
            "_from_model_config": True,
            **{key: value for key, value in special.items() if value is not None},
        }
    else:
        generation = _stopping_at(generation, stop)
    with atomic_folder(folder) as partial:
        written = stream_weights(
            {name: TensorSpec(shape, dtype) for name, shape in exported_shapes(model).items()},
            exported_weights(model, tensors),
            partial,
        )
        _write_json(partial / CONFIG, config)
        _write_json(partial / GENERATION, generation)
        tokenizer.save(partial)
        made = {
            "schema": 1,
            "ingot": ingot.__version__,
            "model_hash": hash_model(partial),
            "tokenizer": tokenizer.identity(),
            "template": tokenizer.template_identity,
            "export_type": export_type,
            **lineage,
            CONTENT: {
                CONFIG: config_digest(partial),
                "tensors": {name: sum_ for file in written.values() for name, sum_ in file.items()},
            },
        }
        _write_json(partial / LINEAGE, made)
    return made


def _stopping_at(generation: Mapping[str, Any], stop: Sequence[int]) -> dict[str, Any]:
    """A generation configuration that also ends an answer at these tokens: what ends a turn in
    training has to end it in serving.
    """
    given = generation.get("eos_token_id")
    listed = given if isinstance(given, list) else [] if given is None else [given]
    missing = [token for token in stop if token not in listed]
    return {**generation, "eos_token_id": [*listed, *missing]} if missing else dict(generation)


def source_generation(folder: Path | None) -> dict[str, Any] | None:
    """`generation_config.json` of the folder that training started from, if any."""
    if folder is None or not (folder / GENERATION).exists():
        return None
    generation: dict[str, Any] = json.loads((folder / GENERATION).read_bytes())
    return generation


def copy_model(
    source: Path,
    target: Path,
    *,
    export_type: ExportType | None,
    overwrite: bool,
    accept: bool = False,
) -> dict[str, Any]:
    """`ingot export` and `ingot import`: read a model folder, Hugging Face's or Meta's, check every
    tensor, write it anew. `accept`: also what changed since it was exported; `ingot.json` then says
    of which model (`changed_from`).

    Raises:
        WrongInput: not a model folder, weights or a tokenizer that do not fit, or `target` exists
            and `overwrite` is not set (or is no model folder, so that something else would be
            lost).
    """
    if target.exists() and not overwrite:
        raise WrongInput(f"{target} exists; choose another folder, or add --overwrite")
    if (
        target.exists()
        and not (target / CONFIG).exists()
        and (target.is_file() or any(target.iterdir()))
    ):
        raise WrongInput(
            f"{target} is no model folder, and --overwrite replaces only those; choose another"
            " folder"
        )
    base = base_folder(source) if is_adapter(source) else source
    config = None if is_meta(source) else model_config(base)
    # The tokenizer before the weights, which may be many gigabytes.
    tokenizer = load_tokenizer(
        base if is_adapter(source) and not (source / TOKENIZER).exists() else source
    )
    model, stored = _opened(source, config, check=not accept)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise WrongInput(
            f"{source}: its tokenizer has {tokenizer.vocab_size} ids, the model only"
            f" {model.config.vocab_size}; put the model's own there"
        )
    if export_type is None:
        export_type = "bf16" if stored in ("bfloat16", "float16") else "fp32"
    lineage = {
        key: value
        for key, value in (read_lineage(source) or {"source": str(source)}).items()
        if key not in ("schema", "model_hash", "export_type", CONTENT)
    }
    if accept and config is not None and (problem := changed_content(base).problem()):
        say(f"{problem}; accepted")
        lineage["changed_from"] = (read_lineage(base) or {}).get("model_hash")
    return export_model(
        model,
        tokenizer,
        target,
        export_type=export_type,
        lineage=lineage,
        generation=source_generation(base),
    )


def copy_adapter(source: Path, target: Path, *, overwrite: bool) -> None:
    """`ingot export --format peft`: an adapter, every tensor of which is checked against its base.

    Raises:
        WrongInput: no adapter, one that does not fit, or `target` exists and `overwrite` is not set
            (or is no adapter).
    """
    if target.exists() and not overwrite:
        raise WrongInput(f"{target} exists; choose another folder, or add --overwrite")
    if target.exists() and not is_adapter(target):
        raise WrongInput(
            f"{target} is no adapter, and --overwrite replaces only those; choose another folder"
        )
    open_model(source, device=torch.device("cpu"))
    with atomic_folder(target) as partial:
        for file in sorted(source.iterdir()):
            if file.is_file():
                shutil.copyfile(file, partial / file.name)


def _opened(source: Path, config: Mapping[str, Any] | None, *, check: bool) -> tuple[AnyModel, str]:
    """The model in a folder, and the type that its weights are stored in; without a `config`, one
    in Meta's layout.
    """
    if config is None:
        model, dtype = load_meta(source, device=torch.device("cpu"))
        return model, str(dtype).removeprefix("torch.")
    return open_model(source, device=torch.device("cpu"), check=check), str(
        config.get("dtype") or config.get("torch_dtype") or "float32"
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
