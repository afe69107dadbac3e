"""What an image installs: enough for what runs in it, at the versions of constraints.txt."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.images.instructions import IMAGES
from tests.small import small_recipe, write_documents

PROJECT = IMAGES.parent
KINDS = ("train", "spark", "serve")
ALONE = '''
import json, sys
refused = set(json.loads(sys.argv[1]))
class Without:
    """A finder for which packages that the image does not have are not there."""
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in refused else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
'''


def wanted(kind: str) -> list[Requirement]:
    done = subprocess.run(
        [sys.executable, str(IMAGES / "requirements.py"), kind],
        capture_output=True,
        text=True,
        check=True,
    )
    return [Requirement(line) for line in done.stdout.splitlines()]


def pins() -> dict[str, str]:
    lines = (PROJECT / "constraints.txt").read_text().splitlines()
    return {
        canonicalize_name(line.partition("==")[0]): line.partition("==")[2]
        for line in lines
        if "==" in line and not line.startswith("#")
    }


def closure(requirements: list[Requirement]) -> set[str]:
    """Names of all distributions that come with these, by what is installed here."""
    found: set[str] = set()
    todo = [
        (requirement.name, extra)
        for requirement in requirements
        for extra in requirement.extras or {""}
    ]
    seen: set[tuple[str, str]] = set()
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found.add(canonicalize_name(name))
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in map(Requirement, lines):
            if line.marker is None or line.marker.evaluate(
                {**default_environment(), "extra": extra}
            ):  # type: ignore[dict-item]
                todo += [(line.name, more) for more in line.extras or {""}] + (
                    [(line.name, "")] if line.extras else []
                )
    return found


def refused(kind: str, *also: str) -> str:
    """Top-level modules that an image of this kind lacks, as JSON."""
    have = closure([*wanted(kind), *map(Requirement, also)])
    lacking = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & have
        and module not in ("ingot", "tests", "google", "_distutils_hack")
    }
    return json.dumps(sorted(lacking))


def alone(
    kind: str, code: str, *also: str, cwd: Path = PROJECT
) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", ALONE + code, refused(kind, *also)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("kind", KINDS)
def test_every_requirement_is_one_of_the_project(kind: str) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    known = {
        *project["dependencies"],
        *(line for lines in project["optional-dependencies"].values() for line in lines),
    }
    assert {str(requirement) for requirement in wanted(kind)} <= {
        str(Requirement(line)) for line in known
    }
    assert "torch" not in {requirement.name for requirement in wanted(kind)}


@pytest.mark.parametrize("kind", KINDS)
def test_pinned_versions_satisfy_what_is_asked_for(kind: str) -> None:
    pinned = pins()
    wrong = [
        f"{item} is pinned at {pinned[name]}"
        for item in wanted(kind)
        if (name := canonicalize_name(item.name)) in pinned
        and not item.specifier.contains(pinned[name])
    ]
    assert not wrong
    assert sum(canonicalize_name(item.name) in pinned for item in wanted(kind)) > 8


LEFT_OUT = {
    "train": {
        "spark": "Dataproc prepares with Spark, in an image of its own",
        "mlflow": "it wants older shared packages than constraints.txt has",
        "trackio": "it wants older shared packages than constraints.txt has",
        "gguf": "llama.cpp's format is exported where a person types",
    },
    "spark": {"spark": "the service mounts it"},
}
"""Extras that a message of ingot names and an image lacks, and why."""


@pytest.mark.parametrize(("kind", "room"), [("train", ""), ("spark", "data")])
def test_an_image_has_every_extra_that_its_code_may_ask_for(kind: str, room: str) -> None:
    """A recipe that needs one more must not fail on machines that are paid for."""
    named = {
        extra
        for path in (PROJECT / "ingot" / room).rglob("*.py")
        for extra in re.findall(r"ingot\[([a-z0-9-]+)\]", path.read_text(encoding="utf-8"))
    }
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    lines = extras["optional-dependencies"]
    have = {str(requirement) for requirement in wanted(kind)}
    lacking = {
        extra for extra in named if not {str(Requirement(one)) for one in lines[extra]} & have
    }
    assert lacking == set(LEFT_OUT[kind])


def test_a_kind_that_is_none_is_told() -> None:
    done = subprocess.run(
        [sys.executable, str(IMAGES / "requirements.py"), "triton"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "usage: requirements.py train|spark|serve\n")


@pytest.mark.drawn("what an image has")
def test_the_spark_image_has_all_that_preparing_needs_and_no_torch(tmp_path: Path) -> None:
    """Real documents are ingested and prepared with nothing but what the image has, and what the
    service mounts: Spark.
    """
    write_documents(tmp_path / "text", count=30)
    recipe = small_recipe(tmp_path)
    code = f"""
from ingot.config.load import load_recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
import ingot.data.engines.spark, ingot.data.sources.readers, ingot.data.sources.wikipedia, ingot.data.sources.bigquery, ingot.cloud.bigquery, ingot.cloud.secrets
import ingot.cli.verbs, ingot.base.remote.replica, ingot.base.remote.bucket
import google.cloud.storage, google.cloud.bigquery, google.cloud.secretmanager_v1, gcsfs
recipe = load_recipe((), json.loads({json.dumps(json.dumps(_said(recipe)))}), environ={{}}, dotenv=None)
ingest(recipe)
prepare(recipe)
print([name for name in ("torch", "transformers", "pyspark") if name in sys.modules])
"""
    done = alone("spark", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert (recipe.folder.columns / "manifest.json").exists()


def _said(recipe: object) -> list[str]:
    values = recipe.model_dump(mode="json", exclude_defaults=True)  # type: ignore[attr-defined]
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


@pytest.mark.drawn("what an image has")
def test_the_serving_image_has_all_that_serving_needs() -> None:
    code = """
import importlib, pkgutil, ingot.serve, ingot.models
for room in (ingot.serve, ingot.models):
    for module in pkgutil.iter_modules(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
import ingot.cli.model, google.cloud.storage, gcsfs
"""
    done = alone("serve", code, "torch")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_training_image_can_import_all_of_ingot() -> None:
    code = """
import importlib, pkgutil, ingot
for module in pkgutil.walk_packages(ingot.__path__, "ingot."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import kfp, wandb, datasets, torchao, rouge_score, lm_eval, google.cloud.aiplatform_v1
"""
    done = alone("train", code, "torch")
    assert done.returncode == 0, done.stderr


def test_a_package_that_the_image_lacks_would_be_noticed() -> None:
    done = alone("serve", "import pytest")
    assert "No module named 'pytest'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_pip_finds_all_of_it(kind: str, tmp_path: Path) -> None:
    """The pip part of the Dockerfile, as a dry run against the registry that pip is set to."""
    listed = tmp_path / "requirements.txt"
    listed.write_text("\n".join(map(str, wanted(kind))) + "\n")
    argv = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--disable-pip-version-check",
        "--constraint",
        str(PROJECT / "constraints.txt"),
        "--requirement",
        str(listed),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    would = re.search(r"^Would install (.*)$", done.stdout, re.MULTILINE)
    assert would
    found = would[1].lower().replace("_", "-")
    assert not [
        item.name for item in wanted(kind) if f"{canonicalize_name(item.name)}-" not in found
    ]
