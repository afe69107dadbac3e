"""The peers' own environments: each library with what it needs, from the package index, torch first
and the same for all that compute with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
PEERS: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers==5.23.0", "accelerate==1.15.0"),
    "lightning": ("lightning==2.6.6", "transformers==5.23.0"),
    "trl": (
        "trl==1.16.0",
        "peft==0.21.2",
        "transformers==5.23.0",
        "accelerate==1.15.0",
        "datasets==5.2.0",
    ),
    "litgpt": ("litgpt==0.5.13", "huggingface-hub<1.4"),
    "datatrove": ("datatrove[processing]==0.10.1", "spacy==3.8.18", "orjson"),
    "text-dedup": ("text-dedup==0.4.0",),
}
WITHOUT_TORCH = ("datatrove", "text-dedup")
MARKER = "installed.json"


def python_of(folder: Path, name: str) -> Path:
    """The interpreter of a peer's environment, which `make_environment` makes."""
    return folder / name / ("Scripts" if os.name == "nt" else "bin") / "python"


def make_environment(folder: Path, name: str) -> Path:
    """Install a peer under `folder`, unless exactly this is there already. Answers its interpreter;
    ends the program when it cannot be had.
    """
    torch = [] if name in WITHOUT_TORCH else [TORCH]
    wanted = [*torch, *PEERS[name]]
    marker = folder / name / MARKER
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) == wanted:
        return python_of(folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    print(f"installing {', '.join(wanted)} into {folder / name}", file=sys.stderr)
    venv.create(folder / name, with_pip=True, clear=True)
    python = python_of(folder, name)
    # torch alone first: a peer's own bound would otherwise choose the version.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for packages in filter(None, (torch, wanted)):
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *packages], env=environment, check=False
        )
        if done.returncode:
            raise SystemExit(
                f"{', '.join(packages)} could not be installed into {folder / name}; see pip's"
                " message above"
            )
    marker.write_text(json.dumps(wanted), encoding="utf-8")
    return python
