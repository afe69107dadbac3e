"""What is sent to a build."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.cloud.build_inputs import BuildSource, ingot_source
from tests.cloud.checkout import PROJECT, committed, git, plain, running_from
from tests.patience import PATIENCE_S


def names(made: BuildSource) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(made.data), mode="r:gz") as tar:
        return {item.name for item in tar if item.isfile()}


def test_of_a_checkout_only_what_is_committed_goes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = running_from(monkeypatch, committed(tmp_path / "here"))
    (root / ".env").write_text("HF_TOKEN=hunter2\n")
    (root / "runs").mkdir()
    (root / "runs" / "big").write_text("x")
    (root / "ingot" / "scratch.py").write_text("new")
    (root / "ingot" / "__init__.py").write_text("changed")
    made = ingot_source()
    assert {
        "ingot/__init__.py",
        "images/train.Dockerfile",
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "LICENSE",
    } <= names(made)
    assert not {
        name
        for name in names(made)
        if "runs" in name or ".env" in name or "scratch" in name or ".git" in name
    }
    assert b"hunter2" not in made.data
    assert made.revision == git(root, "rev-parse", "HEAD")[:12]
    assert made.unsaved == 2


def test_the_same_commit_is_the_same_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running_from(monkeypatch, committed(tmp_path / "one"))
    first = ingot_source()
    running_from(monkeypatch, committed(tmp_path / "two"))
    assert ingot_source() == first


def test_without_git_the_archive_does_not_tell_when_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = running_from(monkeypatch, plain(tmp_path / "one"))
    made = ingot_source()
    (first / "ingot" / "__pycache__").mkdir()
    (first / "ingot" / "__pycache__" / "x.pyc").write_bytes(b"x")
    os.utime(first / "LICENSE", (time.time() - 1000, time.time() - 1000))
    again = ingot_source()
    assert again == made
    assert "-" in made.revision
    (first / "ingot" / "__init__.py").write_text("other")
    assert ingot_source().revision != made.revision


def test_what_is_incomplete_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = running_from(monkeypatch, plain(tmp_path / "here"))
    (root / "constraints.txt").unlink()
    with pytest.raises(
        WrongInput,
        match=r"this ingot lacks constraints.txt, of which images are built; install it anew",
    ):
        ingot_source()


def test_a_checkout_that_git_cannot_read_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = running_from(monkeypatch, committed(tmp_path / "here"))
    git(root, "rm", "-r", "--quiet", "images")
    git(root, "commit", "--quiet", "--message", "gone")
    with pytest.raises(Failed, match=r"git archive failed in .*: .*images.*; mend the checkout"):
        ingot_source()


def test_each_installation_builds_the_same_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip records as installed what it has compiled, and no two of these files are alike."""
    made = []
    for each in ("one", "two"):
        shared = plain(tmp_path / each / "share" / "ingot")
        site = running_from(monkeypatch, tmp_path / each / "lib")
        site.mkdir()
        (shared / "ingot").rename(site / "ingot")
        for folder in (shared / "images", site / "ingot"):
            (folder / "__pycache__").mkdir()
            (folder / "__pycache__" / "a.cpython-311.pyc").write_text(f"compiled for {each}")
        about = site / "ingot-0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ingot\nVersion: 0\n")
        files = (path for path in shared.rglob("*") if path.is_file())
        record = "".join(f"../share/ingot/{path.relative_to(shared)},,\n" for path in files)
        (about / "RECORD").write_text(record)
        monkeypatch.syspath_prepend(str(site))
        made.append(ingot_source())
    assert made[0].revision == made[1].revision
    assert made[0].data == made[1].data


@pytest.mark.slow
def test_an_installed_ingot_builds_images_too(tmp_path: Path) -> None:
    """A wheel carries the Dockerfiles and what they copy; from there comes the same as from a
    checkout.
    """
    root = committed(tmp_path / "here")
    subprocess.run(["cp", "-r", str(PROJECT / "ingot"), str(root)], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path / "wheel"), str(root)],
        check=True,
        timeout=300,
    )
    (wheel,) = (tmp_path / "wheel").iterdir()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "venv",
            "--without-pip",
            "--system-site-packages",
            str(tmp_path / "venv"),
        ],
        check=True,
        timeout=PATIENCE_S,
    )
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", "--force-reinstall", str(wheel)],
        check=True,
        timeout=300,
    )
    beside = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    code = (
        "import io, tarfile; from ingot.cloud.build_inputs import ingot_source; made = ingot_source();"
        " print(made.revision, *sorted(item.name for item in"
        " tarfile.open(fileobj=io.BytesIO(made.data), mode='r:gz')))"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    append = f"import sys; sys.path.append({str(beside)!r}); {code}"
    done = subprocess.run(
        [str(python), "-c", append],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, *found = done.stdout.split()
    assert {
        "images/train.Dockerfile",
        "images/train.sh",
        "images/requirements.py",
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "LICENSE",
    } <= set(found)
    assert "ingot/cloud/build_inputs.py" in found
