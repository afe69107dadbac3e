"""The handles of a run's jobs at other places, `RUN/jobs/VERB.KIND.json`, each with the recipe that
it was submitted with, `VERB.KIND.yaml`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.storage import write_atomic
from ingot.config.load import dump_recipe, load_recipe
from ingot.config.recipe import Recipe
from ingot.launch.job import Handle, Job, JobState
from ingot.launch.supervisor.supervise import FRESH

SPENT = ".spent.json"
"""How the file ends in which a supervisor keeps what its starts have used: it is no handle."""


def jobs_folder(root: Path) -> Path:
    return root / "jobs"


def store_handle(root: Path, handle: Handle, recipe: Recipe | None = None) -> Handle:
    """Store a handle, and the recipe for later queries of its place; without `recipe`, the stored
    recipe stays.
    """
    if recipe is not None:
        store_recipe(root, handle, recipe)
    write_atomic(jobs_folder(root) / f"{handle.name}.{handle.kind}.json", handle.to_json())
    return handle


def stored_handles(root: Path) -> list[Handle]:
    """The handles of all jobs of a run at other places, the newest first. Raises WrongInput as
    `find_handle` does.
    """
    files = jobs_folder(root).glob("*.*.json")
    read = (_read(path) for path in files if not path.name.endswith(SPENT))
    found = [handle for handle in read if handle is not None]
    return sorted(found, key=lambda handle: handle.started, reverse=True)


def find_handle(root: Path, name: str, kind: str) -> Handle | None:
    """The handle of the job that was last submitted as `name` to the place `kind`.

    Raises:
        WrongInput: there is one that cannot be read, such as another version's. Its job may still
            run, and taken for none it would be paid for twice.
    """
    return _read(jobs_folder(root) / f"{name}.{kind}.json")


def _read(path: Path) -> Handle | None:
    try:
        return Handle.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WrongInput(
            f"{path} cannot be read ({type(error).__name__}: {error}), so its job may still run;"
            " ask the version of ingot that wrote it, or the place, and remove the file once the"
            " job is over"
        ) from error


def store_recipe(root: Path, handle: Handle, recipe: Recipe) -> None:
    write_atomic(_recipe_file(root, handle), dump_recipe(recipe))


def recipe_of(root: Path, handle: Handle) -> Recipe:
    """The recipe that the job was submitted with. Raises WrongInput if it cannot be read, for
    example one of another version.
    """
    return load_recipe([_recipe_file(root, handle)], environ={}, dotenv=None)


def check_same_work(root: Path, running: Handle, state: JobState, job: Job, recipe: Recipe) -> None:
    """Check that a running job does what `job` would do, before it is taken for it.

    Raises:
        Failed: it was submitted with other arguments or another recipe, ignoring knobs that do not
            affect the result.
    """
    # On a shared disk, checkpoints that the running job has made by now would be taken for those of
    # the training before it, and it would begin anew once more when it is restarted.
    anew_twice = FRESH in job.argv and not job.run_folder_url
    if anew_twice or set(running.argv) not in ({*job.argv}, {*job.argv, FRESH}):
        difference = "other arguments"
    elif not _has_same_result(root, running, recipe):
        difference = "another recipe"
    else:
        return
    raise Failed(
        f"{job.name} is {state} already as {running.kind} job {running.id} with {difference}; wait"
        f" for it, or `ingot launch cancel {root}`"
    )


def work_fingerprint(recipe: Recipe, argv: Sequence[str]) -> str:
    """What a job does, as a label of what runs at a place, where no handle may tell it."""
    return fingerprint([_result_knobs(recipe), sorted(set(argv))])


def is_same_work(recipe: Recipe, job: Job, label: str | None) -> bool:
    """Whether what has this `work_fingerprint` does what `job` would do."""
    return label in [work_fingerprint(recipe, argv) for argv in (job.argv, (*job.argv, FRESH))]


def _has_same_result(root: Path, handle: Handle, recipe: Recipe) -> bool:
    with contextlib.suppress(IngotError):  # a recipe of another version counts as another recipe
        return _result_knobs(recipe_of(root, handle)) == _result_knobs(recipe)
    return False


def _result_knobs(recipe: Recipe) -> dict[str, Any]:
    """All knobs except where it runs; the number of ranks counts."""
    return {
        **recipe.model_dump(mode="json", exclude={"launch", "cloud", "serve"}),
        "ranks": [recipe.launch.nodes, recipe.launch.processes],
    }


def _recipe_file(root: Path, handle: Handle) -> Path:
    return jobs_folder(root) / f"{handle.name}.{handle.kind}.yaml"
