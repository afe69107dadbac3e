"""Meta's original Llama files (`params.json`, `consolidated.NN.pth`), for `ingot import`: read
only, memory-mapped, one tensor at a time.

A file is one rank's shard under Meta's model parallelism. The dim along which a tensor is sharded
is inferred from the shapes, which covers both Llama 2 (embedding sharded by width) and Llama 3 (by
vocabulary). Pickles are opened by torch with `weights_only`.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.config.models.source import META
from ingot.models.hf.tensor_names import EMBEDDING, HEAD, describe_troubles, to_meta
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder

# Keys of params.json: those used, and those without effect on the model. Any other key is refused,
# since it could change the model silently.
_USED = {
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "vocab_size",
    "norm_eps",
    "rope_theta",
    "use_scaled_rope",
    "rope_scaling_factor",
    "max_seq_len",
}
_IDLE = {
    "multiple_of",
    "ffn_dim_multiplier",
    "max_batch_size",
    "model_parallel_size",
}  # the first two are implied by the width of w1
_SCALED = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ROTARY = "rope.freqs"

Shards = Sequence[Mapping[str, Tensor]]


def is_meta(folder: Path) -> bool:
    """Whether a folder is in Meta's layout rather than Hugging Face's."""
    return (folder / META).is_file() and not (folder / "config.json").exists()


def load_meta(folder: Path, *, device: torch.device) -> tuple[Decoder, torch.dtype]:
    """The decoder in a folder in Meta's layout, in float32 and evaluation mode, and the dtype in
    which its weights are stored.

    Raises:
        WrongInput: a file is missing, damaged or not a pickle of plain tensors; params.json has an
            unsupported value; tensors do not fit.
    """
    shards = _shards(folder)
    config = DecoderConfig.from_hf(
        meta_config(_params(folder), shards, str(folder / META)), str(folder / META)
    )
    with torch.device("meta"):
        model = Decoder(config)
    shapes = {to_meta(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
    _check(shapes, shards, folder, tied=config.tie_word_embeddings)
    tensors: dict[str, Tensor] = {}
    for name, _ in model.named_parameters():
        whole = _whole(to_meta(name), shapes[to_meta(name)], shards, str(folder))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            whole = _half_split(whole, config.head_dim)
        # Always a copy: a memory-mapped tensor would keep the file open.
        tensors[name] = whole.to(device=device, dtype=torch.float32, copy=True)
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.eval(), shards[0][to_meta(EMBEDDING)].dtype


def meta_config(params: Mapping[str, Any], shards: Shards, where: str) -> dict[str, Any]:
    """Convert params.json to a Hugging Face configuration.

    Three values are not always given there:
    - The factor of a scaled rotary base (`use_scaled_rope`) is `rope_scaling_factor` in newer
      files. Otherwise it is 32 if the head is tied to the embedding, else 8, which holds for all
      published Llama 3.2 and 3.1 models.
    - Positions: `max_seq_len`, else the training context of the version, inferred from its rotary
      base and epsilon (`_trained_positions`).
    - The feed-forward size is that of w1.
    """
    if unknown := sorted(params.keys() - _USED - _IDLE):
        raise WrongInput(
            f"{where}: {', '.join(unknown)} is not known and could change the model; take a release"
            " of Llama's text models"
        )
    try:
        dim, heads = int(params["dim"]), int(params["n_heads"])
        theta, eps = float(params.get("rope_theta", 10_000.0)), float(params["norm_eps"])
        gate = to_meta("model.layers.0.mlp.gate_proj.weight")
        given = int(params.get("vocab_size", -1))
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": given if given > 0 else _vocabulary(shards, dim),
            "hidden_size": dim,
            "intermediate_size": sum(shard[gate].shape[0] for shard in shards),
            "num_hidden_layers": int(params["n_layers"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(params.get("n_kv_heads") or heads),
            "head_dim": dim // heads,
            "rms_norm_eps": eps,
            "tie_word_embeddings": _tied(shards),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }
        scaled = bool(params.get("use_scaled_rope", False))
        if scaled:
            factor = float(
                params.get("rope_scaling_factor") or (32 if config["tie_word_embeddings"] else 8)
            )
            config["rope_parameters"] = {**_SCALED, "rope_theta": theta, "factor": factor}
        config["max_position_embeddings"] = int(
            params.get("max_seq_len") or _trained_positions(scaled, theta, eps)
        )
    except KeyError as error:
        raise WrongInput(
            f"{where}: {error.args[0]} is missing there or in consolidated.*.pth; fetch the model"
            " again"
        ) from None
    except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise WrongInput(
            f"{where}: a size is not a number that fits ({error}); fetch the model again"
        ) from None
    return config


def _vocabulary(shards: Shards, dim: int) -> int:
    """Rows of the embedding, which some releases shard by rows and others by columns."""
    rows = [shard[to_meta(EMBEDDING)].shape[0] for shard in shards]
    sharded_by_rows = shards[0][to_meta(EMBEDDING)].shape[-1] == dim
    return sum(rows) if sharded_by_rows else rows[0]


def _trained_positions(scaled: bool, theta: float, eps: float) -> int:
    """The context that a release was trained for, in tokens."""
    if scaled:
        return 131_072
    if theta == 500_000:
        return 8192  # Llama 3
    if theta > 10_000:
        return 16_384  # Code Llama
    return 2048 if eps == 1e-6 else 4096  # Llama 1, Llama 2


def _params(folder: Path) -> dict[str, Any]:
    try:
        params = json.loads((folder / META).read_bytes())
    except ValueError as error:
        raise WrongInput(f"{folder / META} is not JSON ({error}); fetch the model again") from None
    if not isinstance(params, dict):
        raise WrongInput(f"{folder / META} is not a mapping; fetch the model again")
    return params


def _shards(folder: Path) -> list[dict[str, Tensor]]:
    """The shards by rank. Raises WrongInput naming every missing file."""
    names = sorted(path.name for path in folder.glob("consolidated.*.pth"))
    wanted = [
        f"consolidated.{rank:02d}.pth"
        for rank in range(int(re.sub(r"\D", "", names[-1]) or 0) + 1 if names else 1)
    ]
    if missing := [name for name in wanted if name not in names]:
        raise WrongInput(
            f"{folder}: {', '.join(missing)} missing beside {META}; fetch the model again"
        )
    return [_opened(folder / name) for name in wanted]


def _opened(file: Path) -> dict[str, Tensor]:
    with file.open("rb") as head:
        zipped = head.read(4) == b"PK\x03\x04"  # files before torch 1.6 cannot be mapped
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        reason = next(
            (line.strip() for line in str(error).splitlines() if "GLOBAL" in line),
            "damaged, or made in another way",
        )
        raise WrongInput(
            f"{file} holds more than tensors ({reason}); a pickle can run code, so it was not"
            " opened: take the original"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = re.split(r"\. |\n", str(error))[0] or "it ends too early"
        raise WrongInput(f"{file} is torn ({reason}); fetch the model again") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(value, Tensor) and value.is_floating_point() for value in tensors.values()
    ):
        raise WrongInput(
            f"{file} is not a mapping of names to unquantized weights; take a release of Llama's"
            " text models"
        )
    return {name: tensor for name, tensor in tensors.items() if name != _ROTARY}


def _tied(shards: Shards) -> bool:
    """Whether the head is tied to the embedding: absent, or equal to it."""
    head, embedding = to_meta(HEAD), to_meta(EMBEDDING)
    if not any(head in shard for shard in shards):
        return True
    return all(head in shard and torch.equal(shard[head], shard[embedding]) for shard in shards)


def _check(
    shapes: Mapping[str, tuple[int, ...]], shards: Shards, folder: Path, *, tied: bool
) -> None:
    """Raise an error naming every tensor that is missing, surplus, or whose shards do not add up to
    it.
    """
    troubles: list[tuple[str, str]] = []
    for name in dict.fromkeys([*shapes, *sorted(name for shard in shards for name in shard)]):
        pieces = [tuple(shard[name].shape) for shard in shards if name in shard]
        if name not in shapes:
            troubles += (
                [] if tied and name == to_meta(HEAD) else [(name, "is not part of this model")]
            )
        elif len(pieces) < len(shards):
            without = [
                f"consolidated.{rank:02d}.pth"
                for rank, shard in enumerate(shards)
                if name not in shard
            ]
            troubles.append((name, f"is missing{' in ' + ', '.join(without) if pieces else ''}"))
        elif _cut(shapes[name], pieces) is None and set(pieces) != {shapes[name]}:
            troubles.append(
                (
                    name,
                    (
                        f"is {' + '.join(str(list(piece)) for piece in pieces)},"
                        f" {list(shapes[name])} is wanted"
                    ),
                )
            )
    if troubles:
        raise WrongInput(
            f"{folder}: weights do not fit {META}: {describe_troubles(troubles)}; are all of its"
            " consolidated.*.pth there? Fetch the model again"
        )


def _cut(whole: Sequence[int], pieces: Sequence[Sequence[int]]) -> int | None:
    """The dim along which shards of these shapes concatenate to `whole`; None if there is none."""
    for dim in range(len(whole)):
        alike = all(
            len(piece) == len(whole)
            and [*piece[:dim], *piece[dim + 1 :]] == [*whole[:dim], *whole[dim + 1 :]]
            for piece in pieces
        )
        if alike and sum(piece[dim] for piece in pieces) == whole[dim]:
            return dim
    return None


def _whole(name: str, shape: tuple[int, ...], shards: Shards, where: str) -> Tensor:
    """Assemble one tensor from its shards; if every rank has a full copy, the copies must be
    equal.
    """
    pieces = [shard[name] for shard in shards]
    dim = _cut(shape, [piece.shape for piece in pieces])
    if dim is not None:
        return torch.cat(pieces, dim)
    if not all(torch.equal(piece, pieces[0]) for piece in pieces[1:]):
        raise WrongInput(
            f"{where}: {name} differs between the consolidated.*.pth, which are not of one model;"
            " fetch the model again"
        )
    return pieces[0]


def _half_split(weight: Tensor, head_dim: int) -> Tensor:
    """Permute rows of queries or keys from Meta's rotary layout (adjacent pairs) to ours: pairs (i,
    i + E/2).
    """
    rows, columns = weight.shape
    return (
        weight.view(rows // head_dim, head_dim // 2, 2, columns)
        .transpose(1, 2)
        .reshape(rows, columns)
    )
