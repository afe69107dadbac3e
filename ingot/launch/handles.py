"""The handles of a run's jobs, under `RUN/jobs/`: `VERB.KIND.json`, and the recipe that a place was given, `KIND.yaml`."""

from __future__ import annotations

from pathlib import Path

from ingot.base.storage import write_atomic
from ingot.config.load import dump_recipe, load_recipe
from ingot.config.recipe import Recipe
from ingot.launch.job import Handle


def jobs_folder(root: Path) -> Path:
    return root / "jobs"


def store(root: Path, handle: Handle, recipe: Recipe) -> Handle:
    """Keep a handle, and the recipe by which its place is asked later on."""
    write_atomic(jobs_folder(root) / f"{handle.kind}.yaml", dump_recipe(recipe))
    write_atomic(jobs_folder(root) / f"{handle.name}.{handle.kind}.json", handle.to_json())
    return handle


def stored(root: Path) -> list[Handle]:
    """The handles of all jobs of a run that run elsewhere, the last one first."""
    found = []
    for path in jobs_folder(root).glob("*.*.json"):
        try:
            found.append(Handle.from_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # of another version, or being written
    return sorted(found, key=lambda handle: handle.started, reverse=True)


def find(root: Path, name: str, kind: str) -> Handle | None:
    """The handle of the job that was last submitted as `name` to the place `kind`."""
    return next((handle for handle in stored(root) if (handle.name, handle.kind) == (name, kind)), None)


def recipe_of(root: Path, handle: Handle) -> Recipe:
    """The recipe that the job was submitted with."""
    return load_recipe([jobs_folder(root) / f"{handle.kind}.yaml"], environ={}, dotenv=None)
