"""`ingot export --format gguf`: a model folder as one GGUF file, a tensor at a time, read back and
compared before it takes its name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ingot.base.errors import Failed, WrongInput
from ingot.base.storage import disk_errors, fsync_folder, hold, partial_of, remove_partials_of
from ingot.checkpoints.gguf.families import (
    ROPE_FACTORS,
    Architecture,
    architecture_of,
    as_halves,
    metadata,
    names_of,
    rope_factors,
    stored,
)
from ingot.checkpoints.gguf.vocabulary import GgufVocabulary, vocabulary_of
from ingot.config.models.lineage import read_lineage
from ingot.models.adapters.peft_config import is_adapter
from ingot.models.hf.tensor_names import EMBEDDING
from ingot.models.kinds import base_folder, exported_shapes, exported_weights, open_model
from ingot.models.native.decoder import Decoder
from ingot.tokenizers.load import load_tokenizer

TOKENIZER = "tokenizer_config.json"
TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
"""Our names of the types that are written here, and the library's."""
QUANTIZED = {"q4_k_m": "Q4_K_M"}
"""Those that only llama.cpp's own program makes."""
QUANTIZE = "llama-quantize"
BLOCK = 32
"""Numbers that share a scale in q8_0."""

NEVER_MERGED = ["<no> <merge>"]
"""For a vocabulary without merges: llama.cpp wants a list, and a GGUF file has no empty one. These
are never merged, since merging begins with single characters.
"""

Array = npt.NDArray[Any]


def export_gguf(source: Path, target: Path, kind: str, *, overwrite: bool) -> int:
    """Write the model in `source` (an adapter merged) to `target` with matrices of type `kind`;
    returns the number of tensors, all of which were read back and compared.

    Raises:
        WrongInput: `target` exists, the type is unknown, llama.cpp has no such model or tokenizer,
            or a value does not fit the type.
        Failed: what was read back differs, or llama.cpp's program failed.
    """
    if kind not in (*TYPES, *QUANTIZED):
        raise WrongInput(
            f"--type {kind} is not known; it is one of {', '.join([*TYPES, *QUANTIZED])}"
        )
    if target.suffix != ".gguf" or target.is_dir():
        raise WrongInput(f"{target}: a GGUF file's name ends in .gguf; give such a path")
    _check_target(target, overwrite=overwrite)
    if importlib.util.find_spec("gguf") is None:
        raise WrongInput("--format gguf needs the package gguf; pip install 'ingot[gguf]'")
    if kind in QUANTIZED and shutil.which(QUANTIZE) is None:
        raise WrongInput(
            f"--type {kind} is made by llama.cpp's {QUANTIZE}, which is not on the path; install"
            " llama.cpp (brew install llama.cpp, or its releases), or take --type q8_0"
        )
    base = base_folder(source) if is_adapter(source) else source
    tokenizer = load_tokenizer(source if (source / TOKENIZER).exists() else base)
    model = open_model(source, device=torch.device("cpu"))
    if not isinstance(model, Decoder):
        raise WrongInput(f"{source}: only decoders are written as GGUF; export it with --format hf")
    made = _GgufModel(model, str(source))
    vocabulary = vocabulary_of(tokenizer, model.config.vocab_size)
    lineage = read_lineage(source) or {}
    name = str(lineage.get("run") or source.resolve().name)
    with _partial(target, overwrite=overwrite) as partial:
        if kind in TYPES:
            made.write(partial, TYPES[kind], vocabulary, name, lineage)
            made.compare(partial)
        else:
            between = partial.with_name(partial.name.replace(".partial-", ".partial-f32-"))
            with _held(between):
                made.write(between, "F32", vocabulary, name, lineage)
                made.compare(between)
                _quantize(between, partial, QUANTIZED[kind])
            made.compare(partial, shapes_only=True)
    return len(made.names) + (made.factors is not None)


def _check_target(target: Path, *, overwrite: bool) -> None:
    if target.exists() and not overwrite:
        raise WrongInput(f"{target} exists; choose another path, or add --overwrite")


@contextlib.contextmanager
def _partial(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A path beside `target` that takes its name if the block ends without error, and nobody else
    took it meanwhile.
    """
    partial = partial_of(target)
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_partials_of(target)
        with _held(partial):
            yield partial
            with partial.open("rb") as stream:
                os.fsync(stream.fileno())
            _check_target(target, overwrite=overwrite)
            partial.replace(target)
            fsync_folder(target.parent)


@contextlib.contextmanager
def _held(partial: Path) -> Iterator[None]:
    """A file that others leave alone while this process writes it; removed at the end unless it
    was moved.
    """
    try:
        with partial.open("wb") as stream:
            hold(stream.fileno())
            yield
    finally:
        partial.unlink(missing_ok=True)


class _GgufModel:
    """A decoder with the names and metadata that it has in a GGUF file."""

    def __init__(self, model: Decoder, where: str) -> None:
        import gguf

        self.model, self.where = model, where
        self.architecture: Architecture = architecture_of(model.config, where)
        self.metadata = metadata(model.config, self.architecture, where)
        self.factors = rope_factors(model.config)
        self.shapes = exported_shapes(model)
        self.sources = names_of(self.shapes, self.architecture)
        kind = next(
            k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture.name
        )
        table = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
        self.names: dict[str, str] = {}
        for own in self.sources:
            there = table.get_name(own, (".weight", ".bias"))
            if there is None:
                raise WrongInput(
                    f"{where}: llama.cpp's `{self.architecture.name}` has no place for {own};"
                    " export it with --format hf"
                )
            self.names[own] = there

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor to write by its name in Hugging Face's files, as the model has it."""
        embedding: Tensor | None = None
        for name, tensor in exported_weights(self.model):
            embedding = tensor if name == EMBEDDING else embedding
            yield name, tensor
        for name in self.sources.keys() - self.shapes.keys():  # a head that is the embedding
            assert embedding is not None
            yield name, embedding

    def write(
        self, path: Path, kind: str, vocabulary: GgufVocabulary, name: str, lineage: dict[str, Any]
    ) -> None:
        """Write the file; matrices in `kind`, all else in float32."""
        import gguf

        writer = gguf.GGUFWriter(path, self.architecture.name)
        _about(writer, kind, _usable(name), lineage)
        for key, value in self.metadata.items():
            _add(writer, f"{self.architecture.name}.{key}", value)
        _add_vocabulary(writer, vocabulary)
        if self.factors is not None:
            shape, size = tuple(self.factors.shape), self.factors.nbytes
            writer.add_tensor_info(ROPE_FACTORS, shape, np.dtype(np.float32), size)
        for own, source in self.sources.items():
            form = _type_of(self.shapes[source], kind)
            bytes_shape = gguf.quant_shape_to_byte_shape(self.shapes[source], form)
            size = int(np.prod(bytes_shape))
            writer.add_tensor_info(self.names[own], bytes_shape, np.dtype(np.uint8), size, form)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if self.factors is not None:
            _write_tensor(writer, self.factors.numpy(), path)
        for own, tensor in self.tensors():
            values = stored(own, tensor, self.model.config, self.architecture)
            _write_tensor(writer, self._encoded(own, values, kind), path)
        writer.close()

    def _encoded(self, own: str, values: Tensor, kind: str) -> Array:
        import gguf

        form = _type_of(tuple(values.shape), kind)
        largest = float(values.abs().max())
        limit = {"F16": 65_504.0, "Q8_0": 65_504.0 * 127}.get(form.name)
        if not np.isfinite(largest) or (limit is not None and largest > limit):
            raise WrongInput(
                f"{self.where}: {own} has values up to {largest:g}, which {form.name.lower()}"
                " cannot hold; take --type bf16"
            )
        encoded: Array = gguf.quantize(np.ascontiguousarray(values.numpy()), form)
        return encoded

    def compare(self, path: Path, *, shapes_only: bool = False) -> None:
        """Raises Failed if what is in the file is not the model: each number as near as its type
        can be; with `shapes_only`, names and shapes.
        """
        import gguf

        there = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        expected = {*self.names.values(), *([ROPE_FACTORS] if self.factors is not None else [])}
        if there.keys() != expected:
            raise _differs(path, sorted(there.keys() ^ expected)[0])
        for own, tensor in self.tensors():
            read = there[self.names[own]]
            if tuple(reversed(read.shape.tolist())) != tuple(tensor.shape):
                raise _differs(path, read.name)
            if shapes_only:
                continue
            numbers = gguf.dequantize(read.data, read.tensor_type).reshape(tuple(tensor.shape))
            found = as_halves(
                own, torch.from_numpy(np.array(numbers)), self.model.config, self.architecture
            )
            wanted = tensor.detach().to("cpu", torch.float32)
            if self.architecture.norm_offset and own.endswith("norm.weight"):
                wanted = wanted + self.model.config.norm_offset
            if not _is_near(found, wanted, read.tensor_type.name):
                raise _differs(path, read.name)


def _write_tensor(writer: Any, tensor: Array, path: Path) -> None:
    try:
        writer.write_tensor_data(tensor)
    except OSError as error:
        if error.errno is None:  # numpy's, without the reason: the system gives it to who asks
            with path.open("ab") as stream:
                stream.write(tensor.data)
        raise


def _type_of(shape: tuple[int, ...], kind: str) -> Any:
    """Vectors stay float32; rows that blocks do not divide are float16 instead of q8_0."""
    import gguf

    if len(shape) < 2:
        return gguf.GGMLQuantizationType.F32
    if kind == "Q8_0" and shape[-1] % BLOCK:
        kind = "F16"
    return gguf.GGMLQuantizationType[kind]


def _is_near(found: Tensor, wanted: Tensor, kind: str) -> bool:
    if kind == "F32":
        return torch.equal(found, wanted)
    if kind in ("F16", "BF16"):
        dtype = torch.float16 if kind == "F16" else torch.bfloat16
        return torch.equal(found, wanted.to(dtype).float())
    blocks = wanted.reshape(-1, BLOCK)
    step = blocks.abs().amax(1, keepdim=True) / 127
    # Half a step, and what float16 takes from the step itself (2^-11 of up to 127 steps).
    bound = step * (0.5 + 127 / 2**11) + 127 * 2**-25
    return bool(((found.reshape(-1, BLOCK) - blocks).abs() <= bound).all())


def _differs(path: Path, name: str) -> Failed:
    return Failed(f"{path}: {name} is not in the file as it is in the model; export it again")


def _about(writer: Any, kind: str, name: str, lineage: dict[str, Any]) -> None:
    import gguf

    types = {"F32": "ALL_F32", **{name: f"MOSTLY_{name}" for name in ("F16", "BF16", "Q8_0")}}
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[types[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key in ("ingot", "run", "model_hash", "tokenizer"):
        if lineage.get(key) is not None:
            writer.add_string(f"ingot.{key}", str(lineage[key]))


def _usable(name: str) -> str:
    """llama.cpp has tokens absorb blanks, as Phi-3's do, where a model is named so, and fails where
    it lacks one of them.
    """
    return "ingot" if any(each in name.lower() for each in ("phi3", "phi-3")) else name


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def _add_vocabulary(writer: Any, vocabulary: GgufVocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    else:
        writer.add_token_merges(vocabulary.merges or NEVER_MERGED)
    for name, index in vocabulary.special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}", index)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(vocabulary.space_before)
    if vocabulary.template is not None:
        writer.add_chat_template(vocabulary.template)


def _quantize(source: Path, target: Path, kind: str) -> None:
    """Let llama.cpp's own program quantise a file."""
    done = subprocess.run(
        [QUANTIZE, str(source), str(target), kind], capture_output=True, text=True, check=False
    )
    if done.returncode or not target.exists():
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise Failed(f"{QUANTIZE} failed ({done.returncode}): {last[0][:200]}")
