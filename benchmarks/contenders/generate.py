"""transformers' `generate` behind a line of JSON each way: a batch of prompts in, their
continuations out.

`python -m benchmarks.contenders.generate FOLDER DTYPE`; `auto` is the type that its weights are
stored in.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import transformers


def continued(model: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy continuations of exactly `tokens` ids, in one batch padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    made = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        pad_token_id=0,
        eos_token_id=None,
    )
    written: list[list[int]] = made[:, longest:].tolist()
    return written


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder, dtype = sys.argv[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config = transformers.GenerationConfig()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        ids = continued(model, asked["prompts"], asked["tokens"])
        told = {"ids": ids, "seconds": time.perf_counter() - began}
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main()
