"""The verbs that take a model: deploy, serve, predict, export, import. What runs a model is imported only when one is run here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.cli.arguments import read_recipe, settings_without_recipe, split, values
from ingot.cli.target import find_target

PREDICT: dict[str, Any] = {
    "max_tokens": -1, "temperature": 0.0, "top_p": 1.0, "seed": -1, "stop": "", "beams": 1, "chat": False, "api_key": "",
}
"""The settings of `predict`. `max_tokens` -1 is 64, for a sequence-to-sequence model the whole text; `seed` -1 draws one, `chat` puts the prompt
through the model's chat template, `api_key` is `env:NAME`."""


def deploy_version(target: str, arguments: Sequence[str], *, version: int | None, rollback: bool) -> int:
    """Move the live pointer of a registered name."""
    from ingot.registry import verbs

    if rollback and version is not None:
        raise WrongInput(f"--rollback and --version {version} are two wishes; give one of them")
    is_recipe = Path(target).is_file() or target.endswith((".yaml", ".yml"))
    recipe = read_recipe([target, *arguments]) if is_recipe else settings_without_recipe(arguments)
    name, path = recipe.registry_name if is_recipe else target, recipe.registry_path
    live = verbs.rollback(name, path=path) if rollback else verbs.deploy(name, version, path=path)
    print(f"{name}@v{live.number} is live; see {live.folder}")
    return 0


def serve_model(target: str, arguments: Sequence[str]) -> int:
    """Serve until a signal comes."""
    from ingot.serve.run import serve

    found = find_target(target, arguments)
    if found.folder is None:
        raise WrongInput(f"{target} is an address and served already; give a model folder, a run folder, a recipe or a registered name")
    serve(found.folder, found.recipe.serve, found.name)
    return 0


def predict_once(target: str, prompt: str, arguments: Sequence[str]) -> int:
    """Print one completion, text or label, and nothing else, on stdout."""
    files, overrides = split(arguments)
    own = [argument for argument in overrides if "." not in argument.partition("=")[0] and argument.partition("=")[0] != "output"]
    settings = values(own, PREDICT, "predict")
    found = find_target(target, [*files, *(argument for argument in overrides if argument not in own)])
    from ingot.base.environment import secret
    from ingot.serve.predict import predict

    print(predict(
        found.url or found.folder or "", prompt, max_tokens=None if settings["max_tokens"] == -1 else settings["max_tokens"],
        temperature=settings["temperature"], top_p=settings["top_p"], seed=settings["seed"] if settings["seed"] >= 0 else None,
        stop=[settings["stop"]] if settings["stop"] else [], beams=settings["beams"], chat=settings["chat"],
        api_key=secret(settings["api_key"], "api_key") if settings["api_key"] else None,
    ))
    return 0


def copy_checked(source: str, target: str, layout: str, *, overwrite: bool) -> int:
    """`export` and `import`: check every tensor of a model and write it anew as a Hugging Face folder."""
    if layout not in ("hf", "peft"):
        raise WrongInput(f"--format {layout} is not known; it is hf, a Hugging Face folder, or peft, an adapter")
    from ingot.base.hub import fetch_model
    from ingot.checkpoints.export import copy_adapter, copy_model
    from ingot.models.meta import is_meta

    folder: Path | None = Path(source)
    if source.startswith("hf:"):
        folder = fetch_model(source.removeprefix("hf:"))
    elif not is_meta(Path(source)):
        folder = find_target(source).folder
    if folder is None:
        raise WrongInput(f"{source} is an address; give a model folder, a run folder or hf:ORG/NAME")
    if layout == "peft":
        copy_adapter(_adapter(folder), Path(target), overwrite=overwrite)
        print(target)
        return 0
    made = copy_model(folder, Path(target), export_type=None, overwrite=overwrite)
    say(f"{target}: every tensor checked, {made['export_type']}, model {made['model_hash']}")
    print(target)
    return 0


def _adapter(folder: Path) -> Path:
    """The adapter that a folder is, or that lies beside the model of a run."""
    from ingot.base.runfolder import RunFolder
    from ingot.models.adapter import is_adapter

    for place in (folder, RunFolder(folder.parent).adapter):
        if is_adapter(place):
            return place
    raise WrongInput(f"{folder} is no adapter, and has none beside it; train one with model.lora, or export it with --format hf")
