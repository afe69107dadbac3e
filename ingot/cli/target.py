"""TARGET of predict, serve, deploy: a model folder, a run folder, a recipe, a registered name, or
an address.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.base.runfolder import RunFolder
from ingot.cli.arguments import read_recipe, settings_without_recipe
from ingot.config.recipe import Recipe
from ingot.registry.verbs import registry_of, resolve

_REGISTERED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:@v?(?P<version>\d+))?", re.ASCII)


@dataclass(frozen=True)
class Target:
    """Where a model is. Exactly one of `folder` and `url` is given; `recipe` holds the settings
    that go with it.
    """

    name: str
    folder: Path | None
    url: str | None
    recipe: Recipe


def find_target(target: str, more: Sequence[str] = ()) -> Target:
    """`more`: further recipe files and overrides.

    Raises:
        WrongInput: it is none of the things that it can be; says which were looked for.
    """
    if target.startswith(("http://", "https://")):
        return Target(target, None, target.rstrip("/"), settings_without_recipe(more))
    path = Path(target)
    if path.is_dir():
        return _from_folder(path, more)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        recipe = read_recipe([target, *more])
        return Target(recipe.name, _model_of(recipe.folder), None, recipe)
    return _registered(target, more)


def _from_folder(path: Path, more: Sequence[str]) -> Target:
    if (path / "config.json").exists() or (path / "adapter_config.json").exists():
        return Target(path.resolve().name, path, None, settings_without_recipe(more))
    run = RunFolder(path)
    if run.model.is_dir() or run.recipe.exists():
        recipe = (
            read_recipe([str(run.recipe), *more])
            if run.recipe.exists()
            else settings_without_recipe(more)
        )
        return Target(path.resolve().name, _model_of(run), None, recipe)
    raise WrongInput(
        f"{path} is neither a model folder (no config.json) nor a run folder (no model/); give one"
        " of these"
    )


def _model_of(run: RunFolder) -> Path:
    if not (run.model / "config.json").exists():
        raise WrongInput(
            f"{run.root} holds no trained model (no {run.model}); run `ingot train` first"
        )
    return run.model


def _registered(target: str, more: Sequence[str]) -> Target:
    recipe = settings_without_recipe(more)
    path = recipe.registry_path
    match = _REGISTERED.fullmatch(target)
    if match is None or (recipe.registry.kind == "local" and not path.exists()):
        raise WrongInput(
            f"{target} is no model folder, run folder, recipe or address, and there is no registry"
            f" at {path} to look it up in; check the path, or give output=FOLDER"
        )
    number = int(match["version"]) if match["version"] else None
    return Target(target, resolve(registry_of(recipe), match["name"], number), None, recipe)
