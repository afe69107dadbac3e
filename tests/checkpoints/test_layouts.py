"""Every layout loads what any other wrote, weights and optimizer bit for bit, and a process alone
reads the weights whole.
"""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ingot.base.errors import WrongInput
from ingot.base.markers import COMMIT
from ingot.checkpoints.reader import WholeWeights, load_checkpoint
from ingot.checkpoints.state import training_tensors
from ingot.checkpoints.store import checkpoint_in, step_folder
from ingot.config.sections.layout import Parallel
from ingot.config.sections.lora import Lora
from ingot.config.sections.training import AdamW
from ingot.models.adapters.lora import add_lora
from ingot.models.device import Compute
from ingot.models.native.config import DecoderConfig
from ingot.models.parameters import local_tensor, shard_slices
from ingot.models.spec import ModelSpec, create_model, materialize_model
from ingot.parallel.apply import WrapSettings, apply_wrappers, make_masters
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.train.optim.optimizers import make_optimizer
from tests.exhaustive import EXHAUSTIVE
from tests.ranks import run_ranks
from tests.saving import save_checkpoint

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "attention_bias": True,
}
MIXTURE = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
MODELS: dict[str, tuple[dict[str, Any], Lora | None]] = {
    "untied": (CONFIG, None),
    "tied": ({**CONFIG, "tie_word_embeddings": True}, None),
    "257": ({**CONFIG, "vocab_size": 257}, None),
    # Two layers for each of two ranks, of which it has the first and the third.
    "lora": ({**CONFIG, "num_hidden_layers": 4}, Lora(rank=3)),
    "experts": (MIXTURE, None),
}
ALONE: dict[str, int] = {}
SHARD, TENSOR, REPLICATE, PIPELINE, CONTEXT = LAYOUTS = (
    {"shard": 4},
    {"tensor": 2, "shard": 2},
    {"replicate": 2, "shard": 2},
    {"pipeline": 2, "shard": 2},
    {"context": 2, "tensor": 2},
)
VIRTUAL = {**PIPELINE, "virtual": 2}
EXPERT: tuple[dict[str, int], ...] = (
    {"shard": 4, "expert": 2},
    {"replicate": 2, "shard": 2, "expert": 4},
    {**TENSOR, "expert": 2},
    {**PIPELINE, "expert": 2},
    {**CONTEXT, "expert": 4},
)


def drawn(*layouts: dict[str, int], count: int = 2) -> tuple[dict[str, int], ...]:
    """So many of them, one after the other, as the commit draws them."""
    return tuple(random.Random(f"{os.environ['TEST_DRAW']} chain").sample(layouts, count))


CHAINS: dict[str, tuple[dict[str, int], ...]] = {
    "untied": drawn(*LAYOUTS),
    "tied": (SHARD, PIPELINE),
    "257": drawn(SHARD, TENSOR, count=1),
    "lora": (TENSOR, VIRTUAL),
    "experts": drawn(*EXPERT),
}
"""Each layout loads what the one before it wrote. Of the other models, those layouts that treat
shared weights, a vocabulary that does not divide, and an adapter in a way of their own."""
if EXHAUSTIVE:
    MODELS |= {
        name: ({**config, "num_hidden_layers": 4}, lora) for name, (config, lora) in MODELS.items()
    }
    CHAINS = {**dict.fromkeys(MODELS, (*LAYOUTS, VIRTUAL)), "experts": (*EXPERT, SHARD)}


def value(name: str, tensor: Tensor) -> Tensor:
    """What a tensor of the state holds, by its name, whole."""
    return torch.randn(
        tensor.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))
    )


def train_state(
    name: str, layout: dict[str, int], mesh: Mesh, compute: Compute = "fp32"
) -> tuple[nn.Module, Masters, torch.optim.Optimizer]:
    """A model with room for its weights, and an optimizer without state."""
    config, lora = MODELS[name]
    model_spec, how = (
        ModelSpec("decoder", DecoderConfig.from_hf(config), None, True),
        WrapSettings(Parallel(**layout), compute=compute),
    )
    model = create_model(model_spec, 0)
    if lora is not None:
        add_lora(model, lora, 0)
    model = apply_wrappers(model, mesh, how)
    materialize_model(model, model_spec, 0, mesh.device, filled=False)
    for parameter in model.parameters():
        local_tensor(parameter.detach()).fill_(7.0)
    masters = make_masters(model, mesh, how)
    return model, masters, make_optimizer(AdamW(), masters)


def begin(name: str, layout: dict[str, int], folder: Path, mesh: Mesh) -> None:
    """Write step 1: the state has the values of its names."""
    _, masters, optimizer = train_state(name, layout, mesh)
    for master in masters:
        optimizer.state[master.tensor] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(master.tensor),
            "exp_avg_sq": torch.zeros_like(master.tensor),
        }
    for key, tensor in training_tensors(masters, optimizer).items():
        local_tensor(tensor).copy_(value(key, tensor)[shard_slices(tensor)])
    save_checkpoint(folder, 1, masters, optimizer, {"samples": 1}, mesh)


def carried(name: str, layout: dict[str, int], folder: Path, step: int) -> dict[str, int]:
    """Load step `step`, see that it is what was written first, write the next one; this rank's
    share of each tensor.
    """
    with running_mesh(Parallel(**layout)) as mesh:
        if step == 0:
            begin(name, layout, folder, mesh)
        _, masters, optimizer = train_state(name, layout, mesh)
        load_checkpoint(checkpoint_in(step_folder(folder, max(step, 1))), masters, optimizer, mesh)
        tensors = training_tensors(masters, optimizer)
        for key, tensor in tensors.items():
            assert torch.equal(local_tensor(tensor), value(key, tensor)[shard_slices(tensor)]), key
        for master in masters:
            assert torch.equal(local_tensor(master.parameter.detach()), master.tensor), (
                "the model has what its master has"
            )
        assert (
            sum(key.startswith("optimizer.") for key in tensors)
            == 3 * sum(key.startswith("model.") for key in tensors)
            > 0
        )
        save_checkpoint(folder, step + 1, masters, optimizer, {"samples": 1}, mesh)
        return {key: local_tensor(tensor).numel() for key, tensor in tensors.items()}


def chains(root: Path) -> dict[str, list[dict[str, int]]]:
    with running_mesh():
        return {
            name: [carried(name, layout, root / name, step) for step, layout in enumerate(chain)]
            for name, chain in CHAINS.items()
        }


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[dict[str, list[dict[str, int]]]]]:
    root = tmp_path_factory.mktemp("layouts")
    return root, run_ranks(4, chains, root, timeout_s=400)


def layout_name(layout: dict[str, int]) -> str:
    """As a checkpoint names it: the axes from the outermost to the innermost."""
    axes = ("replicate", "pipeline", "shard", "context", "tensor", "expert")
    return " x ".join(f"{axis} {layout[axis]}" for axis in axes if axis in layout)


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("name", MODELS)
def test_any_layout_loads_what_any_other_wrote(
    name: str, written: tuple[Path, list[dict[str, list[dict[str, int]]]]]
) -> None:
    root, ranks = written
    chain = CHAINS[name]
    alone = carried(name, ALONE, root / name, len(chain))
    folders = sorted((root / name).iterdir())
    assert len(folders) == len(chain) + 1
    told = [checkpoint_in(folder).commit for folder in folders]
    assert [(commit["world"], commit["layout"]) for commit in told] == [
        *((4, layout_name(layout)) for layout in chain),
        (1, ""),
    ]
    for folder, commit in zip(folders, told, strict=True):
        # One file a rank, the one that tells what lies where, and the marker: nothing else grows
        # with the ranks.
        assert len(list(folder.iterdir())) <= commit["world"] + 2
        assert {file.name for file in folder.iterdir()} >= {".metadata", COMMIT}
    for place, layout in enumerate(chain):
        counts = [sum(rank[name][place].values()) for rank in ranks]
        copies = layout.get("replicate", 1) * layout.get("context", 1)
        # Norms are whole on each rank under tensor parallelism, and so are an adapter's matrices on
        # one side.
        assert max(counts) <= (2.0 if name == "lora" else 1.5) * sum(alone.values()) * copies / 4, (
            layout,
            counts,
        )


@pytest.mark.parametrize("name", MODELS)
def test_one_process_reads_the_weights_whole(name: str, written: tuple[Path, Any]) -> None:
    root, _ = written
    with running_mesh() as mesh:
        _, masters, _ = train_state(name, ALONE, mesh)
    for step in range(1, len(CHAINS[name]) + 1):
        weights = WholeWeights(step_folder(root / name, step))
        for master in masters:
            assert torch.equal(
                weights[master.name], value(f"model.{master.name}", master.tensor)
            ), master.name


def refused(root: Path) -> list[str]:
    """The untied model's checkpoint for the tied model and the other way round, on a pipeline of
    which only one rank has the head.
    """
    said = []
    with running_mesh():
        layout = {"pipeline": 2}
        for name, other in (("tied", "untied"), ("untied", "tied"), ("untied", "257")):
            with running_mesh(Parallel(**layout)) as mesh:
                _, masters, optimizer = train_state(name, layout, mesh)
                with pytest.raises(WrongInput, match="does not fit this model") as error:
                    load_checkpoint(
                        checkpoint_in(step_folder(root / other, 1)), masters, optimizer, mesh
                    )
                assert all(
                    bool((local_tensor(master.tensor) == 7.0).all()) for master in masters
                ), "nothing is loaded"
                said.append(str(error.value))
    return said


def test_every_stage_hears_what_does_not_fit(written: tuple[Path, Any]) -> None:
    first, last = run_ranks(2, refused, written[0])
    assert "model.lm_head.weight is not part of this model" in first[0]
    assert "model.lm_head.weight is not part of this model" in last[0]
    assert "another stage of the pipeline says what" in first[1]
    assert "model.lm_head.weight is missing" in last[1]
    assert "model.model.embed_tokens.weight is [257, 24], [61, 24] is wanted" in first[2]
    assert "model.lm_head.weight is [257, 24], [61, 24] is wanted" in last[2]
