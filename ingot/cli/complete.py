"""`ingot predict` on a model folder: load, complete one prompt, on this machine's best device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ingot.models.device import computing_in, pick_device, resolve_compute, use_all_cores
from ingot.models.folder import load_model
from ingot.models.generate import Generator, Request, eos_ids
from ingot.models.sampling import Sampling
from ingot.tokenizers.load import load_tokenizer


def complete(folder: Path, prompt: str, settings: dict[str, Any]) -> str:
    """The completion alone, without the prompt. `settings`: those of `ingot predict`.

    Raises:
        WrongInput: the folder holds no model or tokenizer, or the prompt does not fit the model.
    """
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": prompt}]) if settings["chat"] else tokenizer.encode_prompt(prompt)
    device = pick_device()
    use_all_cores(1)
    compute = resolve_compute("auto", device)
    model = load_model(folder, device=device, dtype=torch.bfloat16 if compute == "bf16" else torch.float32)
    generator = Generator(model, eos=eos_ids(folder, tokenizer.special.eos), decode=tokenizer.decode, max_rows=1)
    sampling = Sampling(settings["temperature"], settings["top_p"], settings["seed"] if settings["seed"] >= 0 else None)
    stop = (settings["stop"],) if settings["stop"] else ()
    with computing_in(compute, device):
        return generator.run([Request(ids, settings["max_tokens"], sampling, stop)])[0].text
