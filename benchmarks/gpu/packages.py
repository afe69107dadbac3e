"""The packages that `ingot` needs, and the few of them that a bare GPU machine lacks: they are
brought as wheels in a folder. `python -m benchmarks.gpu.packages FOLDER` fills it.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORTED_AS = {
    "pyyaml": "yaml",
    "nvidia-ml-py": "pynvml",
    "huggingface-hub": "huggingface_hub",
    "prometheus-client": "prometheus_client",
}
"""Distribution -> module, where they are called otherwise."""
TESTS = ("pytest", "filelock")
"""What the helpers of the tests import, which the program uses."""
WHEELS = (
    "pydantic",
    "pydantic-core",
    "typing-inspection",
    "annotated-types",
    "orjson",
    "zstandard",
    "xxhash",
    "gigatoken",
    "awkward",
    "awkward-cpp",
    "lazy-importer",
    "importlib-metadata",
    "zipp",
    "attrs",
    "fastokens",
    "llguidance",
    "fastapi",
    "annotated-doc",
    "starlette",
    "opentelemetry-api",
    "uvicorn",
    "torchao",
)
"""What a machine with `THERE` does not have."""
THERE = (
    *("torch", "transformers", "tokenizers", "tiktoken", "sentencepiece", "safetensors"),
    *("huggingface-hub", "numpy", "pyarrow", "fsspec", "pyyaml", "jinja2", "typer", "rich"),
    *("psutil", "httpx", "prometheus-client", "tensorboard", "nvidia-ml-py", "packaging"),
    *("typing-extensions", "anyio", "click", "h11"),
)
"""What comes with torch, transformers and the libraries that are usual beside them."""
PLATFORM, PYTHON = "manylinux_2_{}_x86_64", "3.12"
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
MOST_BYTES = 50e6


def dependencies() -> list[str]:
    """Names of the distributions that `ingot` always needs."""
    with (ROOT / "pyproject.toml").open("rb") as stream:
        listed = tomllib.load(stream)["project"]["dependencies"]
    return [re.split(r"[<>=!~;\[ ]", one, maxsplit=1)[0] for one in listed]


def missing() -> list[str]:
    """Distributions that the program needs and this Python does not have, also what those need that
    are brought as wheels: pip installs these without.
    """
    names = [*dependencies(), *TESTS]
    modules = {name: IMPORTED_AS.get(name.lower(), name.replace("-", "_")) for name in names}
    lacks = [name for name, module in modules.items() if importlib.util.find_spec(module) is None]
    if lacks:
        return lacks
    return [f"{name} for {wheel}" for name, wheel in needed_by_wheels() if not is_there(name)]


def needed_by_wheels() -> list[tuple[str, str]]:
    """(distribution, the installed wheel that needs it)."""
    # It comes with what `missing` looks for first.
    from packaging.requirements import Requirement

    found = []
    for wheel in filter(is_there, WHEELS):
        for line in metadata.requires(wheel) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                found.append((requirement.name, wheel))
    return found


def is_there(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def versions() -> list[str]:
    """The wheels at the versions of constraints.txt."""
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, equals, number = line.partition("==")
        if equals:
            pinned[name.lower().replace("_", "-")] = number
    return [f"{name}=={pinned[name]}" for name in WHEELS]


def download(folder: Path, python: str) -> int:
    """Fill the folder; answer its size in bytes."""
    platforms = [f"--platform={PLATFORM.format(number)}" for number in GLIBC]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"),
            *("--implementation=cp", f"--python-version={python}", *platforms),
            *("--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"),
            *("-d", str(folder), *versions()),
        ],
        check=True,
    )
    return sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.packages", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/gpu-wheels"))
    parser.add_argument("--ready", action="store_true", help="only tell what this Python lacks")
    parser.add_argument("--python", default=PYTHON, help=f"of the GPU machine; default {PYTHON}")
    asked = parser.parse_args()
    if asked.ready:
        lacks = missing()
        raise SystemExit(f"{sys.executable} lacks {', '.join(lacks)}" if lacks else 0)
    asked.folder.mkdir(parents=True, exist_ok=True)
    size = download(asked.folder, asked.python)
    print(f"{asked.folder}: {size / 1e6:.0f} MB for Python {asked.python}, Linux x86-64")
    print(
        f"there: python3 -m pip install --no-index --no-deps --target SITE {asked.folder}/*.whl;"
        " PYTHONPATH=SITE python3 -m benchmarks.gpu --minutes 10"
    )
    if size > MOST_BYTES:
        raise SystemExit(f"more than {MOST_BYTES / 1e6:.0f} MB; leave some out")


if __name__ == "__main__":
    main()
