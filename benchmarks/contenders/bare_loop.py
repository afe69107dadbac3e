"""A loop written by hand over transformers' Llama, compiled: what anyone would write first."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.contenders.rows import TokenRows, decay_groups
from benchmarks.contenders.turnstile import Turnstile, knobs_of, read_task


def main() -> None:
    task = read_task()
    model: Any = AutoModelForCausalLM.from_pretrained(
        task["model"], dtype="float32", attn_implementation="sdpa"
    )
    knobs = knobs_of(task)
    optimizer = torch.optim.AdamW(
        decay_groups(model, knobs.pop("weight_decay")), fused=True, **knobs
    )
    compiled: Any = torch.compile(model) if task["compiled"] else model
    loader: Any = torch.utils.data.DataLoader(TokenRows(task), batch_size=task["batch"])
    turnstile = Turnstile(task["steps"])
    turnstile.wait()
    for batch in loader:
        bf16 = task["compute"] == "bf16"
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            loss = compiled(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task["clip"])
        optimizer.step()
        optimizer.zero_grad()
        turnstile.step(loss.item())


if __name__ == "__main__":
    main()
