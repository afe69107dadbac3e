"""Opens a decoder's folder with packed weights (`native/packed.py`): the layers are read and packed
one after the other, so that the weights are never in memory twice.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ingot.base.malloc import mapping_blocks
from ingot.config.models.source import CONFIG, model_config
from ingot.models.device import Compute
from ingot.models.hf.folder import load_weights, named_tensors
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.native.packed import pack_weights
from ingot.models.parameters import allocate, named_weights


@torch.no_grad()
def open_packed(folder: Path, compute: Compute) -> Decoder | None:
    """The decoder in `folder`, whose tensors are stored as bfloat16, on this CPU and in evaluation
    mode, to compute in `compute`; None where its weights cannot be packed for that.

    Raises:
        WrongInput: as `load_model`.
    """
    config = DecoderConfig.from_hf(model_config(folder), str(folder / CONFIG))
    cpu = torch.device("cpu")
    with torch.device("meta"):
        model = Decoder(config).to(torch.bfloat16).eval()

    def read(number: str, layer: nn.Module) -> None:
        """Each layer opens the files anew: what is mapped of them counts as memory in use."""
        allocate(layer, cpu)
        places = {f"model.layers.{number}.{name}": part for name, part in named_weights(layer)}
        shapes = {name: tuple(place.shape) for name, place in places.items()}
        for name, tensor in named_tensors(folder, shapes, config):
            places[name].copy_(tensor)

    def make_room() -> None:
        for part in (model.model.embed_tokens, model.model.norm, model.lm_head):
            if part is not None:
                allocate(part, cpu)

    with mapping_blocks():
        # Names, shapes and contents of all are checked; those on `meta` are read later.
        load_weights(model, folder, make_room=make_room)
        return model if pack_weights(model, read, compute=compute) else None
