"""Reading and writing Hugging Face model folders. Missing or surplus tensors, and those of another
shape, are all named, and then nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.config.models.lineage import model_again, read_lineage
from ingot.config.models.rotary import overridden
from ingot.config.models.source import CONFIG, model_config
from ingot.config.models.weights import indexed, weight_files
from ingot.models.hf.compressed import SCALE, CompressedMatrix, matrix_of
from ingot.models.hf.content import ALL, Share, compared, content_check
from ingot.models.hf.mxfp4 import BLOCKS, SCALES, PackedStack, split_name
from ingot.models.hf.tensor_names import (
    EMBEDDING,
    HEAD,
    Piece,
    describe_mismatches,
    is_further,
    language_name,
    pieces_shape,
    stored_pieces,
)
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import Slices, allocate, local_tensor, named_weights, shard_slices
from ingot.models.quantized import packed_matrices
from ingot.models.quantized_experts import StackReader, packed_stacks


def load_model(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    overrides: Mapping[str, Any] | None = None,
    check: bool = True,
) -> Decoder:
    """The decoder in `folder`, in `dtype` (None: float32), in evaluation mode. `check` False
    accepts changes since the export.

    Raises:
        WrongInput: not a model folder, an unsupported architecture, damaged files, tensors that do
            not fit, or, with `check`, that differ from those of the export.
    """
    config = DecoderConfig.from_hf(
        overridden(model_config(folder), overrides or {}), str(folder / CONFIG)
    )
    with torch.device("meta"):
        model = Decoder(config).to(dtype or torch.float32)
    load_weights(model, folder, ALL if check else None, lambda: allocate(model, device))
    return model.eval()


@torch.no_grad()
def load_weights(
    model: Decoder,
    folder: Path,
    share: Share | None = ALL,
    make_room: Callable[[], None] = lambda: None,
) -> None:
    """Load the parameters of a model from `folder`, one tensor at a time; of sharded parameters
    only this rank's shard is read. `share`: the tensors compared with the record of the export;
    those are read completely. `make_room` allocates what of them is on `meta`, once the names
    and shapes are known to fit: a wrong configuration may ask for any memory.

    Raises:
        WrongInput: tensors that do not fit, or that differ from those of the export.
    """
    with torch.device("meta"):
        whole = {
            name: tuple(parameter.shape) for name, parameter in named_weights(Decoder(model.config))
        }
    tied = model.config.tie_word_embeddings
    stored_there = stored_shapes(folder)
    found = {
        name: shape for name, shape in stored_there.items() if not is_further(name, model.config)
    }
    pieces = stored_pieces(whole, model.config, {language_name(name) or name for name in found})
    wanted = {stored: pieces_shape(held) for stored, held in pieces.items()}
    _check_names(wanted, found, folder, tied=tied)
    others = sum(language_name(name) is None for name in found) + len(stored_there) - len(found)
    if others and (share is None or share.rank == 0):
        say(f"{folder}: only the language model is read; {others} tensors beside it are left out")
    make_room()
    places = {name: tensor for name, tensor in named_weights(model) if name in whole}
    packed, stacks = packed_matrices(model), StackReader(packed_stacks(model))
    twin: Tensor | None = None
    check = None if share is None else content_check(folder, share)
    for file, name, stored in _stored(folder):
        if check is not None:
            stored = check.checked(file, name, stored)
        ours = language_name(name)
        if tied and ours == HEAD and EMBEDDING in places:
            twin = _weights(name, stored, shard_slices(places[EMBEDDING]), folder)
        for piece in pieces.get(ours or "", ()):
            if piece.own in places:
                _read_piece(piece, name, stored, places[piece.own], folder)
            elif piece.own in packed:
                # Whole, as scales are of whole blocks and of the mean of all of them.
                rows = slice(piece.row, piece.row + piece.shape[0])
                matrix = _weights(name, stored, (rows, slice(0, piece.shape[1])), folder)
                packed[piece.own].fill(matrix, piece.own)
            elif piece.own in stacks:
                _read_experts(piece, name, stored, stacks, folder)
    if check is not None:
        check.finish()
    if twin is not None and not torch.equal(
        twin.to(places[EMBEDDING].dtype), local_tensor(places[EMBEDDING]).cpu()
    ):
        raise WrongInput(
            f"{folder}: {CONFIG} ties {HEAD} to {EMBEDDING}, but the two differ; set"
            " tie_word_embeddings to false"
        )


def _read_piece(piece: Piece, name: str, stored: Any, place: Tensor, folder: Path) -> None:
    """Copy what this rank has of a piece of the parameter `place` out of the stored tensor."""
    here, there = list[slice](), list[slice]()
    for held, part in zip(shard_slices(place), piece.slices, strict=True):
        first = min(max(held.start, part.start), part.stop)
        end = max(first, min(held.stop, part.stop))
        here.append(slice(first - held.start, end - held.start))
        there.append(slice(first - part.start, end - part.start))
    if piece.single:
        expert = there.pop(0)
        if expert.start == expert.stop:
            return  # another rank has this expert
    target = local_tensor(place)[tuple(here)]
    if piece.turned:
        experts, rows, columns = there
        target.copy_(_weights(name, stored, (experts, columns, rows), folder).mT)
        return
    rows = slice(piece.row + there[0].start, piece.row + there[0].stop)
    part_here = _weights(name, stored, (rows, *there[1:]), folder)
    target.copy_(part_here.view(target.shape))


def _read_experts(piece: Piece, name: str, stored: Any, stacks: StackReader, folder: Path) -> None:
    """Hand over what a stored tensor has of matrices that are kept as bytes, expert by expert."""
    (begin, first, _), (count, rows, columns) = piece.first, piece.shape
    for number in range(count):
        if begin + number not in stacks.held(piece.own):
            continue
        one, width = slice(piece.row + number, piece.row + number + 1), slice(0, columns)
        if piece.single:
            part = _weights(name, stored, (slice(piece.row, piece.row + rows), width), folder)
        elif piece.turned:
            part = _weights(name, stored, (one, width, slice(0, rows)), folder)[0].mT
        else:
            part = _weights(name, stored, (one, slice(0, rows), width), folder)[0]
        stacks.take(piece.own, begin + number, first, part)


def _weights(name: str, stored: Any, wanted: Slices, folder: Path) -> Tensor:
    """A slice of a stored tensor, which must hold floating-point numbers."""
    part = _part(stored, wanted)
    if not part.is_floating_point():
        raise WrongInput(
            f"{folder}: {name} holds {str(part.dtype).removeprefix('torch.')}, not weights as they"
            " are; give an unquantized model"
        )
    return part


def _part(stored: Any, wanted: Slices) -> Tensor:
    """A slice of a stored tensor. A slice may be empty, as the last ranks have of a short tensor;
    such a one is not requested from the file.
    """
    part: Tensor = stored[
        tuple(slice(0, 1) if side.start == side.stop else side for side in wanted)
    ]
    return part[tuple(slice(0, 0) if side.start == side.stop else slice(None) for side in wanted)]


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes, read from the file headers only."""
    return {name: tuple(stored.get_shape()) for _, name, stored in _stored(folder)}


def holds_bf16(folder: Path) -> bool:
    """Whether all tensors of a folder are stored as bfloat16."""
    readers = [_opened(file) for file in weight_files(folder)]
    return all(
        reader.get_slice(name).get_dtype() == "BF16"
        for reader in readers
        for name in reader.keys()  # noqa: SIM118 (a reader is not a mapping)
    )


def _stored(folder: Path) -> Iterator[tuple[Path, str, Any]]:
    """The file, name and slice of each tensor of a folder; one in MXFP4 or compressed-tensors as
    what it stands for.
    """
    places = _places(folder)
    for name, (file, reader) in places.items():
        own, ending = split_name(name)
        if (matrix := matrix_of(name, places)) is not None:
            if name == matrix + SCALE:
                yield file, matrix, CompressedMatrix(matrix, places)
        elif not ending or own + BLOCKS not in places or own + SCALES not in places:
            yield file, name, reader.get_slice(name)
        elif ending == BLOCKS:
            scales = places[own + SCALES][1].get_slice(own + SCALES)
            yield file, own, PackedStack(reader.get_slice(name), scales)


def _places(folder: Path) -> dict[str, tuple[Path, Any]]:
    """The file of each tensor of a folder, and its reader; of a tensor in two files the one that
    the index names, as other tools read it.
    """
    named, places = indexed(folder) or {}, dict[str, tuple[Path, Any]]()
    for file in weight_files(folder):
        reader = _opened(file)
        for name in reader.keys():  # noqa: SIM118 (a reader is not a mapping)
            chosen = named.get(name)
            if name in places and chosen not in (other := places[name][0].name, file.name):
                raise WrongInput(
                    f"{folder}: {name} is in {other} and in {file.name}; keep the files of one"
                    " model, or fetch it again"
                )
            if name not in places or chosen == file.name:
                places[name] = file, reader
    return places


def named_tensors(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], config: DecoderConfig
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these names and shapes of ours, in that order, one at a time; raises
    WrongInput after the last one if any differs from the export's.
    """
    holding = {
        language_name(name) or name: (file, name, there) for file, name, there in _stored(folder)
    }
    held: dict[str, list[tuple[str, Piece]]] = {}
    for stored, pieces in stored_pieces(shapes, config, holding).items():
        for piece in pieces:
            held.setdefault(piece.own, []).append((stored, piece))
    check, read, tensor = content_check(folder), "", torch.empty(0)
    for name, shape in shapes.items():
        parts: list[Tensor] = []
        for stored, piece in held[name]:
            if stored != read:
                file, name_there, there = holding[stored]
                read, tensor = stored, check.checked(file, name_there, there)[:]
            part = tensor[piece.row : piece.row + piece.stored_shape[0]]
            parts.append(part.mT.contiguous() if piece.turned else part)
        # The matrices of a stack of experts come in its order.
        yield name, parts[0] if len(parts) == 1 else torch.cat(parts).view(shape)
    check.finish()


def stored_tensors(folder: Path, *, check: bool = True) -> Iterator[tuple[str, Tensor]]:
    """All tensors, memory-mapped, one at a time. With `check`, compared with the record of the
    export: raises WrongInput after the last one if any differs.
    """
    found = (
        (file, name, reader.get_tensor(name)) for name, (file, reader) in _places(folder).items()
    )
    if check:
        yield from compared(content_check(folder), found)
    else:
        yield from ((name, tensor) for _, name, tensor in found)


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except SafetensorError as error:
        raise WrongInput(
            f"{file} is torn or not safetensors ({error}); {model_again(file.parent)}"
        ) from None


def _check_names(
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    folder: Path,
    *,
    tied: bool,
) -> None:
    """Raise an error that names every difference. Older exports contain rotary frequencies (buffers
    computed here) and a copy of a tied head.
    """
    found = {ours: shape for name, shape in found.items() if (ours := language_name(name))}
    passed_over = {
        name for name in found if name.endswith("rotary_emb.inv_freq") or (tied and name == HEAD)
    }
    if trouble := describe_mismatches(wanted, found, passed_over):
        raise WrongInput(
            f"{folder}: weights do not fit {CONFIG}: {trouble}; check model.source and model.config"
        )


def check_template(folder: Path, template: str | None, knob: str) -> None:
    """Refuse a model folder whose chat template is not the one that the model was trained with.

    `template` is the identity of the folder's present template. Folders not written by ingot have
    no record of it and are accepted.

    Raises:
        WrongInput: they differ; `knob` allows it.
    """
    lineage = read_lineage(folder) or {}
    if lineage.get("template", template) != template:
        raise WrongInput(
            f"the chat template in {folder} ({template or 'none'}) is not the one that the model"
            f" was trained with ({lineage['template'] or 'none'}), so chats would be written in a"
            f" form that it never saw; put the old one back, or set {knob}=true"
        )
