"""`python requirements.py train|spark|serve`: what an image installs beside torch and ingot itself, a requirement a line, from pyproject.toml.

Printed apart from ingot's code, so that the layer of dependencies stays in the cache when only code changes. Versions are those of
constraints.txt.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EXTRAS: dict[str, tuple[str, ...]] = {
    "train": (
        "gcp",
        "kfp",
        "track",
        "datasets",
        "wikipedia",
        "languages",
        "rouge",
        "json-schema",
        "lm-eval",
        "float8",
    ),
    "spark": ("gcp", "datasets", "wikipedia", "languages"),
    "serve": ("gcp",),
}
CALLED = {"google-cloud-storage", "google-cloud-bigquery", "google-cloud-secret-manager", "gcsfs"}
"""Of the cloud's clients, what workers and servers call; the others are for who launches."""
UNUSED: dict[str, set[str]] = {
    "train": set(),
    # Preparing data loads no torch and serves nothing.
    "spark": {
        "transformers",
        "safetensors",
        "tensorboard",
        "fastapi",
        "uvicorn",
        "prometheus-client",
        "nvidia-ml-py",
    },
    "serve": {"tensorboard", "google-cloud-bigquery"},
}


def name_of(requirement: str) -> str:
    """`google-cloud-storage>=3.1` is `google-cloud-storage`."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def requirements(kind: str, project: dict[str, Any]) -> list[str]:
    """The requirements of an image by pyproject's `project` table, sorted."""
    extras = project["optional-dependencies"]
    wanted = [("", line) for line in project["dependencies"]] + [
        (extra, line) for extra in EXTRAS[kind] for line in extras[extra]
    ]
    return sorted(
        {
            line
            for extra, line in wanted
            if name_of(line) not in UNUSED[kind] | {"torch"}
            and (kind == "train" or extra != "gcp" or name_of(line) in CALLED)
        }
    )


def main() -> int:
    kind = sys.argv[1] if len(sys.argv) == 2 else ""
    if kind not in EXTRAS:
        print(f"usage: requirements.py {'|'.join(EXTRAS)}", file=sys.stderr)
        return 2
    # Beside us in an image, one above in a checkout.
    found = next(
        path for path in (HERE / "pyproject.toml", HERE.parent / "pyproject.toml") if path.exists()
    )
    print(
        "\n".join(requirements(kind, tomllib.loads(found.read_text(encoding="utf-8"))["project"]))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
