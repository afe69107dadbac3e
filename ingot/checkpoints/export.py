"""The exported model folder in Hugging Face's format, read by evaluation, registration, serving and
any other tool that reads such folders.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

import ingot
from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.base.storage import atomic_folder, fsync_tree
from ingot.config.models.content import CONTENT, changed_content, content_record, describe_changed
from ingot.config.models.experts import CORRECTION
from ingot.config.models.lineage import LINEAGE, read_lineage
from ingot.config.models.source import CONFIG, model_config
from ingot.config.models.weights import hash_model
from ingot.models.adapters.peft_config import is_adapter
from ingot.models.hf.loading import GENERATION
from ingot.models.hf.meta import is_meta, load_meta
from ingot.models.hf.tensorfile import TensorSpec, stream_weights
from ingot.models.kinds import AnyModel, base_folder, exported_shapes, exported_weights, open_model
from ingot.models.native.decoder import Decoder
from ingot.tokenizers.chats.encode import stop_tokens
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer

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


class Encoding(Protocol):
    """A form of the tensors in the files other than numbers as they are."""

    @property
    def config(self) -> Mapping[str, Any]:
        """What `config.json` says of it."""

    def forms(self, plain: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """The tensors of the files, in order."""

    def tensors(self, plain: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, in that order."""

    def check(self, folder: Path) -> dict[str, Any]:
        """Read back what was written; returns what `ingot.json` says of it. Raises Failed if it
        is not what was given.
        """


def export_model(
    model: AnyModel,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    export_type: ExportType,
    lineage: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
    encoding: Encoding | None = None,
    may_take: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Write the model folder atomically, adapters merged, holding one tensor in memory at a time.
    Returns the contents of its `ingot.json`, including `model_hash`.

    `generation` is the source model's generation configuration; None derives one from the
    tokenizer. `tensors` supplies the weights of a model on `meta`, in the model's own order.
    `may_take` is called once everything is on the disk, and raises where `folder` is another's by
    then.
    """
    dtype = DTYPES[export_type]
    config, generation = _configured(model, tokenizer, dtype, generation)
    forms, weights = _specs(model, dtype), exported_weights(model, tensors)
    parameters = sum(math.prod(form.shape) for form in forms.values())
    if encoding is not None:
        forms, weights = encoding.forms(forms), encoding.tensors(weights)
        config |= encoding.config
    with atomic_folder(folder) as partial:
        written = stream_weights(forms, weights, partial)
        _write_json(partial / CONFIG, config)
        _write_json(partial / GENERATION, generation)
        tokenizer.save(partial)
        told = {} if encoding is None else encoding.check(partial)
        made = {
            "schema": 1,
            "ingot": ingot.__version__,
            "model_hash": hash_model(partial),
            "tokenizer": tokenizer.identity(),
            "template": tokenizer.template_identity,
            "export_type": export_type,
            **lineage,
            "parameters": parameters,
            **told,
            CONTENT: content_record(
                partial, {name: sum_ for file in written.values() for name, sum_ in file.items()}
            ),
        }
        _write_json(partial / LINEAGE, made)
        if may_take is not None:
            fsync_tree(partial)
            may_take()
    return made


def _configured(
    model: AnyModel, tokenizer: Tokenizer, dtype: torch.dtype, generation: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The contents of `config.json` and of `generation_config.json`."""
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
        # Models of transformers keep the start and end tokens of their own configuration.
        generation = {
            **(
                generation
                or {
                    "_from_model_config": True,
                    **{key: config[key] for key in GENERATED if config.get(key) is not None},
                }
            ),
            **model.config.learnt_start,
        }
    elif generation is None:
        config.update(special)
        generation = {
            "_from_model_config": True,
            **{key: value for key, value in special.items() if value is not None},
        }
    else:
        generation = _stopping_at(generation, stop)
    return config, generation


def _specs(model: AnyModel, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """The tensors of the files; what chooses experts is float32 in every one."""
    return {
        name: TensorSpec(shape, torch.float32 if name.endswith(CORRECTION) else dtype)
        for name, shape in exported_shapes(model).items()
    }


def _stopping_at(generation: Mapping[str, Any], stop: Sequence[int]) -> dict[str, Any]:
    """The generation configuration with these stop tokens added: a token that ends a turn in
    training must also end generation in serving.
    """
    given = generation.get("eos_token_id")
    listed = given if isinstance(given, list) else [] if given is None else [given]
    missing = [token for token in stop if token not in listed]
    return {**generation, "eos_token_id": [*listed, *missing]} if missing else dict(generation)


def source_generation(folder: Path | None) -> dict[str, Any] | None:
    """`generation_config.json` of the folder that training started from, if there is one."""
    if folder is None or not (folder / GENERATION).exists():
        return None
    generation: dict[str, Any] = json.loads((folder / GENERATION).read_bytes())
    return generation


def copy_model(
    source: Path,
    target: Path,
    *,
    overwrite: bool,
    accept: bool = False,
    encode: Callable[[AnyModel, ExportType], Encoding] | None = None,
) -> dict[str, Any]:
    """Copy a model folder (Hugging Face's or Meta's layout) to a new one, with every tensor
    checked; behind `ingot export` and `ingot import`. `accept` also takes a model that changed
    after its export; `changed_from` in the new `ingot.json` then has the original's hash. `encode`
    says in which other form the tensors are written.

    Raises:
        WrongInput: `source` is not a model folder, its weights or tokenizer do not fit, or `target`
            exists and `overwrite` is not set (or it is not a model folder, so that other files
            would be lost).
    """
    may_take = functools.partial(
        _check_target, target, "model folder", _is_model_or_empty, overwrite=overwrite
    )
    may_take()
    base = base_folder(source) if is_adapter(source) else source
    config = None if is_meta(source) else model_config(base)
    # The tokenizer first: the weights may be many gigabytes.
    tokenizer = load_tokenizer(
        base if is_adapter(source) and not (source / TOKENIZER).exists() else source,
        check=not accept,
    )
    model, stored = _opened(source, config, check=not accept)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise WrongInput(
            f"{source}: its tokenizer has {tokenizer.vocab_size} ids, the model only"
            f" {model.config.vocab_size}; put the model's own there"
        )
    # float16 has more digits than bf16: only in float32 is every one of its numbers the same.
    rounded = encode is not None and stored == "float16"
    export_type: ExportType = "bf16" if stored == "bfloat16" or rounded else "fp32"
    lineage = {
        key: value
        for key, value in (read_lineage(source) or {"source": str(source)}).items()
        if key not in ("schema", "model_hash", "export_type", CONTENT)
    }
    if accept and config is not None and (changed := changed_content(base)):
        say(f"{describe_changed(base, changed)}; accepted")
        lineage["changed_from"] = (read_lineage(base) or {}).get("model_hash")
    return export_model(
        model,
        tokenizer,
        target,
        export_type=export_type,
        lineage=lineage,
        generation=source_generation(base),
        encoding=None if encode is None else encode(model, export_type),
        may_take=may_take,
    )


def copy_adapter(source: Path, target: Path, *, overwrite: bool) -> None:
    """Copy an adapter after checking each tensor against its base; behind
    `ingot export --format peft`.

    Raises:
        WrongInput: `source` is not an adapter or does not fit, or `target` exists and `overwrite`
            is not set (or it is not an adapter).
    """
    _check_target(target, "adapter", is_adapter, overwrite=overwrite)
    open_model(source, device=torch.device("cpu"))
    with atomic_folder(target) as partial:
        for file in sorted(source.iterdir()):
            if file.is_file():
                shutil.copyfile(file, partial / file.name)
        fsync_tree(partial)
        _check_target(target, "adapter", is_adapter, overwrite=overwrite)


def _check_target(
    target: Path, kind: str, is_one: Callable[[Path], bool], *, overwrite: bool
) -> None:
    """Raises WrongInput if what lies at `target` may not be replaced."""
    if not target.exists():
        return
    if not overwrite:
        raise WrongInput(f"{target} exists; choose another folder, or add --overwrite")
    if not is_one(target):
        raise WrongInput(
            f"{target} is no {kind}, and --overwrite replaces only those; choose another folder"
        )


def _is_model_or_empty(folder: Path) -> bool:
    return (folder / CONFIG).exists() or (folder.is_dir() and not any(folder.iterdir()))


def _opened(source: Path, config: Mapping[str, Any] | None, *, check: bool) -> tuple[AnyModel, str]:
    """The model of a folder and the type that its weights are stored in. `config` None means Meta's
    layout.
    """
    if config is None:
        model, dtype = load_meta(source, device=torch.device("cpu"))
        return model, str(dtype).removeprefix("torch.")
    return open_model(source, device=torch.device("cpu"), check=check), str(
        config.get("dtype") or config.get("torch_dtype") or "float32"
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
