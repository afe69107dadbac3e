"""litgpt's model and loss, compiled, in the loop of its pretraining script, in bf16-mixed by Fabric
where the processor is fast in bf16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning
import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from litgpt.utils import chunked_cross_entropy
from safetensors.torch import load_file

from benchmarks.contenders.rows import TokenRows, decay_groups
from benchmarks.contenders.turnstile import Turnstile, knobs_of, read_task

PRECISIONS = {"bf16": "bf16-mixed", "fp32": "32-true"}


def load(folder: Path) -> GPT:
    """The model of a Hugging Face folder of a Llama."""
    read = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = Config(
        name="llama",
        block_size=read["max_position_embeddings"],
        n_layer=read["num_hidden_layers"],
        n_embd=read["hidden_size"],
        vocab_size=read["vocab_size"],
        padded_vocab_size=read["vocab_size"],
        n_head=read["num_attention_heads"],
        n_query_groups=read["num_key_value_heads"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=read["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
        intermediate_size=read["intermediate_size"],
        rope_base=int(read["rope_parameters"]["rope_theta"]),
    )
    weights: dict[str, Any] = {}
    copy_weights_hf_llama(config, {}, weights, load_file(folder / "model.safetensors"))
    model = GPT(config)
    model.load_state_dict(weights)
    return model


def main() -> None:
    task = read_task()
    fabric = lightning.Fabric(
        accelerator="cpu" if task["device"] == "cpu" else "gpu",
        devices=1,
        precision=PRECISIONS[task["compute"]],
    )
    model = load(Path(task["model"]))
    model.max_seq_length = task["seq_len"]
    knobs = knobs_of(task)
    optimizer = torch.optim.AdamW(
        decay_groups(model, knobs.pop("weight_decay")), fused=True, **knobs
    )
    compiled: Any = fabric.setup_module(torch.compile(model) if task["compiled"] else model)
    optimizer = fabric.setup_optimizers(optimizer)
    loader = fabric.setup_dataloaders(
        torch.utils.data.DataLoader(TokenRows(task), batch_size=task["batch"])
    )
    turnstile = Turnstile(task["steps"])
    log = (Path(task["folder"]) / "litgpt.jsonl").open("w", encoding="utf-8")
    turnstile.wait()
    for step, batch in enumerate(loader):
        tokens = batch["input_ids"]
        loss = chunked_cross_entropy(compiled(tokens)[:, :-1], tokens[:, 1:], chunk_size=0)
        fabric.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), task["clip"])
        optimizer.step()
        optimizer.zero_grad()
        log.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
        turnstile.step(loss.item())


if __name__ == "__main__":
    main()
