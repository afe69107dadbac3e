"""What is installed, and whether ingot takes it at its version: packages, Java, a checkout."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement

from ingot.cli import doctor
from ingot.cli.check.recipe import _check_cleaning
from ingot.cli.installed import installed_version, java, requirements, satisfies
from ingot.cloud.doctor.finding import DoctorFinding
from ingot.config.load import read_with_origins
from ingot.config.values import Findings
from tests.base.groups import real_group, said_inside
from tests.base.homeless import homeless


def installed(site: Path, name: str, version: str) -> None:
    """As pip leaves it, without its files."""
    about = site / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\n" + (f"Version: {version}\n" if version else "")
    )


def packages() -> DoctorFinding:
    (found,) = doctor._packages()
    return found


def test_a_package_of_a_version_that_ingot_does_not_take_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {one.name: one.specifier for one in requirements()}
    assert packages().ok
    installed(tmp_path, "transformers", "4.40.0")
    installed(tmp_path, "orjson", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = packages()
    assert not found.ok
    assert found.needed
    assert f"transformers 4.40.0, wanted {wanted['transformers']}" in found.found
    assert f"orjson missing, wanted {wanted['orjson']}" in found.found
    assert found.get == (
        f"pip install 'transformers{wanted['transformers']}' 'orjson{wanted['orjson']}'"
    )


def test_the_rest_of_a_removed_installation_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the backport of importlib.metadata tells it, where another package brings that."""
    gone = mock.Mock(side_effect=KeyError("Version"))
    monkeypatch.setattr("importlib.metadata.version", gone)
    assert installed_version("orjson") is None


def test_versions_are_compared_as_pip_does() -> None:
    wanted = Requirement("torch>=2.11")
    taken = ("2.11.0+cpu", "2.100", "2.12.0.dev20260101")
    assert all(satisfies(version, wanted) for version in taken)
    assert not any(satisfies(version, wanted) for version in (None, "2.9.1", "of-my-own"))


def test_a_checkout_that_is_not_installed_tells_what_it_requires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {str(one) for one in requirements()}
    found = importlib.metadata.requires

    def without_ingot(name: str) -> list[str] | None:
        if name == "ingot":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "requires", without_ingot)
    assert {str(one) for one in requirements()} == told
    monkeypatch.setattr("ingot.cli.installed.ingot.__file__", str(tmp_path / "ingot/__init__.py"))
    assert requirements() == []
    unknown = packages()
    assert not unknown.ok
    assert not unknown.needed


JAVAS = {
    'openjdk version "17.0.9" 2023-10-17\nOpenJDK Runtime Environment': 17,
    'java version "1.8.0_392"\nJava(TM) SE Runtime Environment': 8,
    'Picked up JAVA_TOOL_OPTIONS: -Xmx1g -Dof="9"\nopenjdk version "21" 2023-09-19 LTS': 21,
    'openjdk version "25-ea" 2025-09-16': 25,
    "The operation couldn't be completed": None,
}


def java_says(folder: Path, text: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "java"
    program.write_text(f"#!{sys.executable} -S\nimport sys\nsys.stderr.write({text!r})\n")
    program.chmod(0o755)


def test_javas_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert java() is None
    for text, major in JAVAS.items():
        java_says(tmp_path, text)
        found = java()
        assert (found and found.major) == major, text


def test_spark_wants_a_java_that_it_runs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    java_says(tmp_path, 'java version "1.8.0_392"')
    installed(tmp_path, "pyspark", "4.0.0")
    assert not next(doctor._java()).ok
    said = refused(tmp_path)
    assert "data.engine.kind spark needs Java 17 or newer, and here is 1.8.0_392" in said
    java_says(tmp_path, 'openjdk version "21.0.1" 2023-10-17')
    assert next(doctor._java()).ok
    assert "Java" not in refused(tmp_path)


def test_an_older_spark_takes_an_older_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    java_says(tmp_path, 'openjdk version "11.0.21" 2023-10-17')
    installed(tmp_path, "pyspark", "3.5.7")
    assert next(doctor._java()).ok
    assert "Java" not in refused(tmp_path)


def refused(folder: Path) -> str:
    path = folder / "recipe.yaml"
    path.write_text(
        "name: a\ndata: {train: [{source: a.jsonl}], seq_len: 64, engine: {kind: spark}}\n"
        "model: {source: preset:llama-3m}\ntrain: {steps: 2, global_batch: 4}\n"
    )
    recipe, values = read_with_origins([str(path)])
    found = Findings(values)
    _check_cleaning(recipe, found)
    return "\n".join(found.wrong)


def test_the_doctor_tells_what_a_container_may_use() -> None:
    """In a real group of 1.5 GB, however much the machine has."""
    with real_group("memory", "memory.max=1500000000 or memory.limit_in_bytes=1500000000") as group:
        ask = (
            "from ingot.cli import doctor; [found] = doctor._memory(); print(found.ok, found.found)"
        )
        assert re.fullmatch(r"False 1\.\d of 1\.5 GB free", said_inside(group, ask))


def test_the_doctor_looks_at_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    homeless(monkeypatch)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    found = {one.what: one for look in (doctor._disk, doctor._credentials) for one in look()}
    assert found["model cache"].found == "this user has no home"
    for what in ("model cache", "Hugging Face token", "Google Cloud credentials"):
        assert not found[what].ok
