"""The verbs that take a model and use it: deploy, serve, predict. Libraries that run models are
imported only when needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.base.runfolder import RunFolder
from ingot.cli.arguments import settings_without_recipe, values
from ingot.cli.output import print_json
from ingot.config.load import read_recipe, split_arguments
from ingot.config.models.lineage import earlier_model
from ingot.config.recipe import Recipe
from ingot.config.shipped import names
from ingot.registry.verbs import registered_version, registry_of

_REGISTERED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:@v?(?P<version>\d+))?", re.ASCII)


@dataclass(frozen=True)
class Target:
    """The location of a model: exactly one of `folder` and `url` is given; `recipe` holds the
    settings to use with it. `version`: of a registered model. `doubt`: that it may be an earlier
    training's, in words.
    """

    name: str
    folder: Path | None
    url: str | None
    recipe: Recipe
    version: int | None = None
    doubt: str | None = None

    def tell_doubt(self) -> None:
        """Say what is not certain about the model, which is used all the same."""
        if self.doubt is not None:
            say(f"note: {self.doubt}")


def find_target(target: str, more: Sequence[str] = ()) -> Target:
    """Resolve a target: URL, folder, recipe or registered name. `more`: further recipe files and
    overrides.

    Raises:
        WrongInput: it is none of these; says which were tried.
    """
    if target.startswith(("http://", "https://")):
        return Target(target, None, target.rstrip("/"), settings_without_recipe(more))
    path = Path(target)
    if path.is_dir():
        return _from_folder(path, more)
    if path.is_file() and path.suffix == ".gguf":
        raise WrongInput(
            f"{target} is for llama.cpp; give the run or the model folder that it was exported from"
        )
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        recipe = read_recipe([target, *more])
        return _of_run(recipe.name, recipe.folder, recipe)
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
        return _of_run(path.resolve().name, run, recipe)
    if not any(path.iterdir()):
        raise WrongInput(f"{path} is an empty folder; give a model folder or a run folder")
    raise WrongInput(
        f"{path} is neither a model folder (no config.json) nor a run folder (no model/); give one"
        " of these"
    )


def _of_run(name: str, run: RunFolder, recipe: Recipe) -> Target:
    if not (run.model / "config.json").exists():
        raise WrongInput(
            f"{run.root} holds no trained model (no {run.model}); run `ingot train` first"
        )
    return Target(name, run.model, None, recipe, doubt=earlier_model(run))


def _registered(target: str, more: Sequence[str]) -> Target:
    recipe = settings_without_recipe(more)
    path = recipe.registry_path
    match = _REGISTERED.fullmatch(target)
    if target in names() and recipe.registry.kind == "local" and not (path / target).is_dir():
        recipe = read_recipe([target, *more])
        return _of_run(recipe.name, recipe.folder, recipe)
    if match is None:
        raise WrongInput(
            f"{target} is no model folder, run folder, recipe, address or name of a registered"
            " model; check the path"
        )
    if recipe.registry.kind == "local" and not path.exists():
        raise WrongInput(
            f"{target} is no model folder, run folder, recipe or address, and there is no registry"
            f" at {path} to look it up in; check the path, or give output=FOLDER"
        )
    number = int(match["version"]) if match["version"] else None
    registry = registry_of(recipe)
    if match["name"] not in (known := registry.names()):
        raise WrongInput(
            f"{target} is no model folder, run folder, recipe or address, and nothing is registered"
            f" so in {registry.place}, which knows {', '.join(known) or 'no name'}; check the path,"
            " or give output=FOLDER"
        )
    version = registered_version(registry, match["name"], number)
    return Target(target, registry.fetch(version), None, recipe, version.number)


PREDICT: dict[str, Any] = {
    "max_tokens": -1,
    "temperature": 0.0,
    "top_p": 1.0,
    "seed": -1,
    "stop": "",
    "beams": 1,
    "chat": False,
    "api_key": "",
}
"""The settings of `predict`. `max_tokens` -1 means 64, or for a sequence-to-sequence model the
whole text; `seed` -1 draws one, `chat` applies the model's chat template to the prompt, `api_key`
is `env:NAME`.
"""


def deploy_version(
    target: str,
    arguments: Sequence[str],
    *,
    version: int | None,
    rollback: bool,
    canary: int | None,
    verify: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Make a version of a registered name live: move its pointer, or roll it out to its
    endpoint.
    """
    from ingot.registry.deploy import DeployRequest, address, deploy, render_deploy

    if Path(target).is_dir() and not _REGISTERED.fullmatch(target):
        raise WrongInput(
            f"{target} is a folder, and deploy makes live what is registered; give the registered"
            " name, or the recipe"
        )
    is_recipe = Path(target).is_file() or target.endswith((".yaml", ".yml"))
    recipe = read_recipe([target, *arguments]) if is_recipe else settings_without_recipe(arguments)
    name = recipe.registry_name if is_recipe else target
    if recipe.registry.kind == "vertex":  # options that are not given come from the recipe
        canary = recipe.serve.canary if canary is None else canary
        verify = verify or recipe.serve.verify
    wish = DeployRequest(version, canary, verify, rollback)
    if dry_run:
        print(render_deploy(recipe, name, wish, is_run=is_recipe), end="")
        return 0
    live = deploy(recipe, name, wish, is_run=is_recipe)
    where = address(recipe, name) or live.where
    if as_json:
        print_json("deploy", name=name, version=live.number, where=where)
    else:
        print(f"{name}@v{live.number} is live; see {where}")
    return 0


def serve_model(target: str, arguments: Sequence[str], *, dry_run: bool) -> int:
    """Serve until a signal arrives; `dry_run` prints what would be started instead."""
    from ingot.serve.server import render, serve

    found, folder = _served(target, arguments)
    if dry_run:
        print(render(folder, found.recipe.serve, found.name), end="")
    else:
        serve(folder, found.recipe.serve, found.name, found.version)
    return 0


def _served(target: str, arguments: Sequence[str]) -> tuple[Target, Path]:
    """What is served, and its folder. If Vertex AI sets $AIP_STORAGE_URI, that is served and TARGET
    need not exist; its last part is the name.
    """
    if os.environ.get("AIP_STORAGE_URI") and not Path(target).exists():
        path = Path(target)
        return Target(path.name, path, None, settings_without_recipe(arguments)), path
    found = find_target(target, arguments)
    found.tell_doubt()
    if found.version is not None and "@" not in target:
        say(
            f"{target} is v{found.version}, live now; start this server again once `ingot deploy`"
            " made another one live"
        )
    if found.folder is None:
        raise WrongInput(
            f"{target} is an address and served already; give a model folder, a run folder, a"
            " recipe or a registered name"
        )
    return found, found.folder


def predict_once(
    target: str, prompt: str, arguments: Sequence[str], *, as_json: bool = False
) -> int:
    """Print only the completion, text or label on stdout."""
    files, overrides = split_arguments(arguments)
    own = [
        argument
        for argument in overrides
        if "." not in argument.partition("=")[0] and argument.partition("=")[0] != "output"
    ]
    settings = values(own, PREDICT, "predict")
    found = find_target(
        target, [*files, *(argument for argument in overrides if argument not in own)]
    )
    found.tell_doubt()
    from ingot.base.environment import secret
    from ingot.serve.predict import predict

    answer = predict(
        found.url or found.folder or "",
        prompt,
        max_tokens=None if settings["max_tokens"] == -1 else settings["max_tokens"],
        temperature=settings["temperature"],
        top_p=settings["top_p"],
        seed=settings["seed"] if settings["seed"] >= 0 else None,
        stop=[settings["stop"]] if settings["stop"] else [],
        beams=settings["beams"],
        chat=settings["chat"],
        api_key=secret(settings["api_key"], "api_key") if settings["api_key"] else None,
    )
    if as_json:
        print_json("predict", target=target, prompt=prompt, answer=answer)
    else:
        print(answer)
    return 0
