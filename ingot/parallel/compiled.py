"""torch.compile, a layer at a time: equal layers are compiled once, and what gathers weights or
moves activations stays outside the graphs.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from ingot.parallel.shard import layers

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def compile_layers(model: nn.Module) -> None:
    """Compile the layers of a model, or of a stage of it, when they are first called; names stay
    what they are.
    """
    keep_compiled()
    for layer in layers(model):
        layer.compile()


def keep_compiled() -> None:
    """Let what is compiled outlive restarts of the machine, unless the environment says where it is
    kept: torch's own place is a temporary one.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault(CACHE, str(base / "ingot" / "compiled"))
