"""The verbs that take a model: deploy, serve, predict, export, import. What runs a model is imported only when one is run here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import say
from ingot.cli.arguments import read_recipe, settings_without_recipe, split, values
from ingot.cli.target import find_target

PREDICT: dict[str, Any] = {"max_tokens": 64, "temperature": 0.0, "top_p": 1.0, "seed": -1, "stop": "", "chat": False, "api_key": ""}
"""The settings of `predict`. `seed` -1 draws one, `chat` puts the prompt through the model's chat template, `api_key` is `env:NAME`."""
ANSWER_TIMEOUT_S = 600.0


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
    """Print one completion, and nothing else, on stdout."""
    files, overrides = split(arguments)
    own = [argument for argument in overrides if "." not in argument.partition("=")[0] and argument.partition("=")[0] != "output"]
    settings = values(own, PREDICT, "predict")
    found = find_target(target, [*files, *(argument for argument in overrides if argument not in own)])
    if found.url is not None:
        print(_ask(found.url, prompt, settings))
        return 0
    assert found.folder is not None
    from ingot.cli.complete import complete

    print(complete(found.folder, prompt, settings))
    return 0


def _ask(url: str, prompt: str, settings: dict[str, Any]) -> str:
    """One request to an OpenAI-compatible server."""
    import httpx

    from ingot.base.environment import secret

    base = url.removesuffix("/v1") + "/v1"
    headers = {"Authorization": f"Bearer {secret(settings['api_key'], 'api_key')}"} if settings["api_key"] else {}
    request = {key: settings[key] for key in ("max_tokens", "temperature", "top_p")}
    if settings["seed"] >= 0:
        request["seed"] = settings["seed"]
    if settings["stop"]:
        request["stop"] = settings["stop"]
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=ANSWER_TIMEOUT_S) as client:
            request["model"] = _json(client.get("/models"))["data"][0]["id"]
            if settings["chat"]:
                answer = _json(client.post("/chat/completions", json={**request, "messages": [{"role": "user", "content": prompt}]}))
                return str(answer["choices"][0]["message"]["content"])
            return str(_json(client.post("/completions", json={**request, "prompt": prompt}))["choices"][0]["text"])
    except httpx.HTTPError as error:
        raise Failed(f"{url} does not answer ({type(error).__name__}: {error}); check the address and that the server runs") from None
    except (KeyError, IndexError, TypeError) as error:
        raise WrongInput(f"{url} does not speak OpenAI's routes ({type(error).__name__}: {error}); give the address of `ingot serve`") from None


def _json(response: Any) -> Any:
    if response.status_code >= 400:
        kind = Failed if response.status_code in (429, 500, 502, 503, 504) else WrongInput
        raise kind(f"{response.url} answered {response.status_code}: {response.text[:300]}")
    try:
        return response.json()
    except ValueError:
        raise WrongInput(f"{response.url} did not answer in JSON; give the address of `ingot serve`") from None


def copy_checked(source: str, target: str, layout: str, *, overwrite: bool) -> int:
    """`export` and `import`: check every tensor of a model and write it anew as a Hugging Face folder."""
    if layout != "hf":
        raise WrongInput(f"--format {layout} is not known in this version; only hf is")
    from ingot.base.hub import fetch_model
    from ingot.checkpoints.export import copy_model

    folder = fetch_model(source.removeprefix("hf:")) if source.startswith("hf:") else find_target(source).folder
    if folder is None:
        raise WrongInput(f"{source} is an address; give a model folder, a run folder or hf:ORG/NAME")
    made = copy_model(folder, Path(target), export_type=None, overwrite=overwrite)
    say(f"{target}: every tensor checked, {made['export_type']}, model {made['model_hash']}")
    print(target)
    return 0
