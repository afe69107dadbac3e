"""What Slurm is given, without a Slurm: the script, and the environment that sbatch is called in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.config.recipe import Recipe
from ingot.launch.job import Job
from ingot.launch.places import slurm_cluster as cluster
from ingot.launch.places.slurm import SlurmLauncher
from tests.launch.nodes import recipe_for

SECRET = "hush-77aa"


def slurm_recipe(root: Path, **knobs: object) -> Recipe:
    return recipe_for(root, **{"launch__kind": "slurm", **knobs})


def job_of(recipe: Recipe, **about: object) -> Job:
    job = Job("train", ("train", "r.yaml"), rendezvous=str(recipe.folder.root / "meet"))
    return replace(job, **about)  # type: ignore[arg-type]


def option(script: str, name: str) -> str | None:
    found = re.search(rf"^#SBATCH --{name}=(.*)$", script, re.MULTILINE)
    return found[1] if found else None


@pytest.mark.parametrize(
    ("knob", "job", "asked"),
    [("4h", 3600.0, "1:00:00"), ("30m", 86_400.0, ":30:00"), ("30m", None, ":30:00")],
)
def test_of_two_time_limits_the_shorter_is_asked_for(
    knob: str, job: float | None, asked: str, tmp_path: Path
) -> None:
    recipe = slurm_recipe(tmp_path, launch__slurm__time=knob)
    script = SlurmLauncher(recipe).render(job_of(recipe, time_limit_s=job))
    assert (option(script, "time") or "").lstrip("0-") == asked


def test_it_is_told_of_its_time_limit_as_long_before_it_as_the_recipe_says(tmp_path: Path) -> None:
    recipe = slurm_recipe(tmp_path, launch__slurm__time="4h", launch__slurm__signal_s=321)
    assert option(SlurmLauncher(recipe).render(job_of(recipe)), "signal") == "B:USR1@321"


def test_secrets_are_in_neither_the_script_nor_the_environment_of_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORD", SECRET)
    monkeypatch.setenv("PLAIN", "shown")
    recipe = slurm_recipe(tmp_path)
    job, launcher = job_of(recipe, secrets=("WORD",)), SlurmLauncher(recipe)
    Path(job.rendezvous or "").mkdir(parents=True)
    monkeypatch.setattr(launcher, "_reasons", lambda job: [])
    calls: list[tuple[tuple[str, ...], Mapping[str, str]]] = []

    def ask(*command: str, environ: Mapping[str, str]) -> str:
        calls.append((command, environ))
        return "77\n"

    monkeypatch.setattr(cluster, "run_command", ask)
    assert launcher.submit(job).id == "77"
    ((command, environ),) = calls
    assert command[0] == "sbatch"
    assert environ["PLAIN"] == "shown"
    assert "WORD" not in environ
    assert SECRET not in repr(environ) + Path(command[-1]).read_text()
