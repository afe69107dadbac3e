"""What `pip install ingot` installs is enough: wheel and source distribution are built, and the
quick start is done from an empty folder without a checkout. Short: with the packages of this
environment and a small training; slow: in environments of their own, as it stands.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from ingot.config.shipped import FOLDER
from tests.cli.commands import clean_environment
from tests.small import TINY_MODEL

PROJECT = Path(__file__).resolve().parents[2]
SOURCE = ("ingot", "images", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
STEPS = ("ingest", "prepare", "train", "evaluate", "gate", "register", "serve")
SHORT = {
    "INGOT_TRAIN__STEPS": "4",
    "INGOT_TRAIN__EVALUATE_EVERY": "4",
    "INGOT_CHECKPOINT__EVERY": "4",
    "INGOT_EVALUATE__SAMPLE_TOKENS": "4",
    "INGOT_EVALUATE__TASKS": "[{kind: loss}]",
    "INGOT_DATA__VALIDATION__FRACTION": "0.002",
    "INGOT_DATA__FRACTION": "0.02",
    "INGOT_DATA__SEQ_LEN": "32",
    "INGOT_MODEL__CONFIG": json.dumps(TINY_MODEL),
    "INGOT_TRAIN__GLOBAL_BATCH": "4",
    "INGOT_TRAIN__MICRO_BATCH": "4",
    "INGOT_TRACK__TENSORBOARD": "false",
    "OMP_NUM_THREADS": "1",
}


def done(words: Sequence[str | Path], cwd: Path, timeout_s: float = 200, **more: str) -> str:
    result = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=clean_environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, f"{words}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution as an index has it, not from the tree."""
    pytest.importorskip("setuptools", "77")
    place = tmp_path_factory.mktemp("built")
    for name in SOURCE:
        if (PROJECT / name).is_dir():
            no_cache = shutil.ignore_patterns("__pycache__")
            shutil.copytree(PROJECT / name, place / "tree" / name, ignore=no_cache)
        else:
            shutil.copy(PROJECT / name, place / "tree" / name)
    build = "from setuptools import build_meta; build_meta.build_{}({!r})"
    done([sys.executable, "-c", build.format("sdist", str(place))], place / "tree")
    (archive,) = place.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(place / "unpacked", filter="data")
    (tree,) = (place / "unpacked").iterdir()
    done([sys.executable, "-c", build.format("wheel", str(place))], tree)
    (made,) = place.glob("*.whl")
    return made


@pytest.mark.drawn("what the wheel holds")
def test_it_holds_every_file_of_the_package(wheel: Path) -> None:
    """What is not listed as package data is missing without a word."""
    kinds = {".py", ".yaml", ".jinja", ".html", ".css", ".md", ".txt"}
    package = FOLDER.parent
    ours = {
        f"ingot/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and (path.suffix in kinds or path.name == "py.typed")
    }
    assert {"ingot/recipes/quickstart.yaml", "ingot/recipes/places/laptop.yaml"} <= ours
    with zipfile.ZipFile(wheel) as opened:
        held = set(opened.namelist())
    assert ours <= held
    assert not [name for name in held if name.startswith(("tests/", "benchmarks/"))]


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed wheel, beside the packages of this environment."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, wheel]
    done([*pip, "--disable-pip-version-check"], target)
    return target


@pytest.mark.drawn("what the wheel holds")
def test_an_empty_folder_is_enough(site: Path, tmp_path: Path) -> None:
    """No checkout is on the path: not the working folder's, and not this process's."""
    variables = {"PYTHONPATH": str(site), **SHORT}
    found = "import ingot.cli; print(ingot.cli.__file__)"
    out = done([sys.executable, "-c", found], tmp_path, **variables)
    assert Path(out.strip()).is_relative_to(site)
    out = done([sys.executable, site / "bin/ingot", "ingest", "quickstart"], tmp_path, **variables)
    assert "documents" in out
    assert list((tmp_path / "runs/quickstart/data/raw").iterdir())


@pytest.mark.drawn("a proof as the README has it")
def test_the_quick_start_from_an_empty_folder(site: Path, tmp_path: Path) -> None:
    variables = {"PYTHONPATH": str(site), **SHORT}
    out = done([sys.executable, site / "bin/ingot", "run", "quickstart"], tmp_path, **variables)
    assert all(step in out for step in STEPS)
    assert "the served model's answer" in out
    assert (tmp_path / "runs/quickstart/reports/index.html").is_file()


@pytest.mark.slow
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_a_clean_environment(wheel: Path, version: str, tmp_path: Path) -> None:
    """As users do: `pip install`, `ingot run quickstart`, `ingot predict`."""
    python = shutil.which(f"python{version}")
    # What pyenv puts on the path may name a version that it does not start.
    if (
        python is None
        or subprocess.run([python, "-V"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"python{version} is not on this machine")
    here, own = tmp_path / "empty", tmp_path / "venv"
    here.mkdir()
    began = time.monotonic()
    done([python, "-m", "venv", own], here)
    install = [own / "bin/pip", "install", "-q", "-c", PROJECT / "constraints.txt", wheel]
    done([*install, "--disable-pip-version-check"], here, 1500)
    installed = time.monotonic()
    path = f"{own / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"
    variables = {"PATH": path, "PYTHONPATH": ""}
    out = done([own / "bin/ingot", "run", "quickstart"], here, 3600, **variables)
    ran = time.monotonic()
    assert all(step in out for step in STEPS)
    assert done([own / "bin/ingot", "predict", "runs/quickstart", "def "], here, **variables)
    print(f"\n{version}: installed in {installed - began:.0f} s, run in {ran - installed:.0f} s")
