"""How the serving engines are started, here and in an endpoint's container: arguments, routes,
Triton's model repository.

Only text and numbers: nothing is started, requested or read. Also each engine's format of a single
prompt and its answer, so that callers of an endpoint need not know its engine.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ingot.base.errors import Failed, WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.deployment import Serve

VLLM_IMAGE = "docker.io/vllm/vllm-openai:v0.32.0"
TRITON_IMAGE = "nvcr.io/nvidia/tritonserver:26.06-vllm-python-py3"
PORT = 8080
STORAGE = "$(AIP_STORAGE_URI)"
"""The address of the model's files, filled in by Vertex AI."""
RAW = ("vllm", "triton")
"""Engines with request formats of their own: their endpoints are called through rawPredict."""
SHARED_MEMORY_MB = 8192
FINISH_S = 8
"""Seconds that vLLM gives running requests to finish when it is stopped."""
_OLD = ("t4", "p4", "p100", "v100")
"""Accelerators without bfloat16."""
_BRING_THEIRS = re.compile(r"^(?:a2|a3|a4|a4x|g2|g4)-")
_COUNT = re.compile(r"-(\d+)g(?:-|$)")
_BY_PROCESSORS = {
    "g2": {24: 2, 48: 4, 96: 8},
    "g4": {96: 2, 192: 4, 384: 8},
}
"""Accelerators of the larger machines of a series whose names count processors; others have one."""


@dataclass(frozen=True)
class ServingContainer:
    """The container of one endpoint, in Vertex AI's terms.

    `image` empty: our own serving image. The route `predict` takes Vertex AI's `instances`, but for
    an engine in RAW its own format (`question`). Both routes are always given: the service's
    defaults are the same path for both. No API key is used: an endpoint authenticates its callers.
    """

    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = PORT
    health: str = "/health"
    predict: str = "/predict"
    timeout_s: int = 3600
    shared_memory_mb: int = 0


def container_of(recipe: Recipe) -> ServingContainer:
    """The container of an endpoint for `recipe.serve.engine`.

    The images of vLLM and Triton are the published ones unless `serve.image` names another. Vertex
    AI takes images from Artifact Registry only, so copy them there, or name a remote repository of
    it.

    Raises:
        WrongInput: vLLM or Triton on a machine without an accelerator, which their images require;
            or a bound that Triton's backend of vLLM does not have.
    """
    serve, name = recipe.serve, recipe.registry_name
    match serve.engine:
        case "vllm":
            cards = _accelerators(serve)
            # This image reads the bucket itself, without ingot: nothing is copied to a disk first.
            args = vllm_arguments(
                STORAGE, name, serve, host="0.0.0.0", port=PORT, dtype=dtype_on(serve)
            )
            args = (*args, "--load-format", "runai_streamer", "--tensor-parallel-size", str(cards))
            return ServingContainer(
                serve.image or VLLM_IMAGE,
                ("python3", "-m", VLLM_MODULE),
                args,
                _QUIET,
                predict="/invocations",
                shared_memory_mb=SHARED_MEMORY_MB,
            )
        case "triton":
            _accelerators(serve)
            _check_triton(serve)
            return ServingContainer(
                serve.image or TRITON_IMAGE,
                ("tritonserver",),
                triton_arguments(STORAGE, host="0.0.0.0", port=PORT),
                health="/v2/health/ready",
                predict=triton_route(name),
                shared_memory_mb=SHARED_MEMORY_MB,
            )
        case _:
            # The image's entry point runs `ingot serve`; its arguments are knobs.
            changed = serve.model_dump(include=set(SERVER_ARGUMENTS), exclude_defaults=True)
            settings = (
                f"serve.{key}={json.dumps(value)}" for key, value in sorted(changed.items())
            )
            return ServingContainer(
                serve.image or "", (), (f"serve.engine={serve.engine}", *settings)
            )


SERVER_ARGUMENTS = (
    "cors",
    "max_body_bytes",
    "max_tokens",
    "max_queue",
    "max_batch",
    "finish_s",
    "any_template",
    "compute",
    "pack",
    "eager",
    "prefix_cache_mb",
    "tool_call_parser",
)
"""Knobs of `serve` that our own server in a container is given as arguments."""
NOT_BY_TRITON = {
    "max_tokens": "each request says how many it wants",
    "max_queue": "its queue has no bound",
    "tool_call_parser": "it answers prompts, not chats",
}
"""Knobs of `serve` that vLLM inside Triton has nothing for, and what holds instead."""
_QUIET = {"VLLM_NO_USAGE_STATS": "1"}
VLLM_MODULE = "vllm.entrypoints.openai.api_server"


def vllm_arguments(
    model: str, name: str, serve: Serve, *, host: str, port: int, dtype: str
) -> tuple[str, ...]:
    """vLLM's command-line arguments, never including a key: vLLM reads `VLLM_API_KEY`.

    Sampling defaults in the model's folder are ignored, as by our own server; `serve.max_tokens`
    bounds each answer.
    """
    most = json.dumps({"max_new_tokens": serve.max_tokens}, separators=(",", ":"))
    return (
        "--model",
        model,
        "--served-model-name",
        name,
        "--host",
        host,
        "--port",
        str(port),
        "--dtype",
        dtype,
        "--max-model-len",
        "auto",
        "--max-num-seqs",
        str(serve.max_batch),
        "--generation-config",
        "vllm",
        "--override-generation-config",
        most,
        *(() if serve.prefix_cache_mb else ("--no-enable-prefix-caching",)),
        *(("--enforce-eager",) if serve.eager else ()),
        "--disable-uvicorn-access-log",
        "--shutdown-timeout",
        str(FINISH_S),
        *(
            ("--enable-auto-tool-choice", "--tool-call-parser", serve.tool_call_parser)
            if serve.tool_call_parser
            else ()
        ),
    )


def triton_arguments(repository: str, *, host: str, port: int) -> tuple[str, ...]:
    """Triton's command-line arguments: HTTP only. Vertex AI's frontend of Triton does not support
    streams, so its plain routes are used there too.
    """
    return (
        f"--model-repository={repository}",
        f"--http-address={host}",
        f"--http-port={port}",
        "--allow-grpc=false",
        "--allow-metrics=false",
        "--allow-vertex-ai=false",
        "--exit-timeout-secs=10",
    )


def triton_route(name: str) -> str:
    return f"/v2/models/{triton_name(name)}/generate"


def triton_name(name: str) -> str:
    """A name valid as a folder and in a URL: `python@v2` becomes `python-v2`."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)


def triton_repository(
    name: str, serve: Serve, model: str, backend: Literal["python", "vllm"]
) -> dict[str, str]:
    """The files of a model repository, by relative path. The model itself stays at `model`, a
    folder or gs:// address.

    `python`: generation by ingot's own server, in the environment of Triton's Python backend.
    `vllm`: by vLLM inside the Triton image that includes it. Both use the same tensors, and
    requests join a running batch. There is one instance, whatever device it then uses: KIND_CPU and
    KIND_MODEL only keep Triton from creating one per accelerator.
    """
    about = {
        "folder": model,
        **{
            key: str(getattr(serve, key)).lower()
            for key in (
                "max_batch",
                "max_queue",
                "max_tokens",
                "any_template",
                "compute",
                "pack",
                "eager",
                "prefix_cache_mb",
            )
        },
    }
    config = _PBTXT.format(
        name=triton_name(name),
        backend=backend,
        kind="KIND_CPU" if backend == "python" else "KIND_MODEL",
        parameters=(
            "\n".join(
                _PARAMETER.format(key=key, value=json.dumps(value)) for key, value in about.items()
            )
            if backend == "python"
            else ""
        ),
    )
    folder = triton_name(name)
    if backend == "python":
        return {f"{folder}/config.pbtxt": config, f"{folder}/1/model.py": _MODEL_PY}
    engine = {
        "model": model,
        "dtype": dtype_on(serve),
        "max_num_seqs": serve.max_batch,
        "tensor_parallel_size": _accelerators(serve),
        "generation_config": "vllm",
        **({} if serve.prefix_cache_mb else {"enable_prefix_caching": False}),
        **({"enforce_eager": True} if serve.eager else {}),
        **({"load_format": "runai_streamer"} if "://" in model else {}),
    }
    return {
        f"{folder}/config.pbtxt": config,
        f"{folder}/1/model.json": json.dumps(engine, indent=1) + "\n",
    }


_PBTXT = """\
name: "{name}"
backend: "{backend}"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }},
  {{ name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }},
  {{ name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true }}
]
output [ {{ name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }} ]
instance_group [ {{ count: 1 kind: {kind} }} ]
{parameters}
"""
_PARAMETER = 'parameters {{ key: "{key}" value {{ string_value: {value} }} }}'
_MODEL_PY = '''\
"""Answers by the server of ingot, which must be installed where Triton's Python backend runs."""

import triton_python_backend_utils

from ingot.serve.engines.triton_backend import TritonBackend


class TritonPythonModel(TritonBackend):
    """Triton looks for this name."""

    utils = triton_python_backend_utils
'''


def artifact_of(recipe: Recipe, model: str) -> dict[str, str]:
    """The files of an endpoint's artifact folder beside the model at `model` (gs://): Triton needs
    a repository, the others only the model ({}).
    """
    return (
        triton_repository(recipe.registry_name, recipe.serve, model, "vllm")
        if recipe.serve.engine == "triton"
        else {}
    )


def question(engine: str, name: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """The request for one greedy completion in the format of the engine's `predict_route`."""
    if engine == "vllm":
        return {"model": name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    if engine == "triton":
        return triton_question(prompt, {"max_tokens": max_tokens, "temperature": 0})
    return {"instances": [prompt], "parameters": {"max_tokens": max_tokens, "temperature": 0}}


def triton_question(prompt: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The same for Triton, with any sampling settings."""
    return {
        "text_input": prompt,
        "stream": False,
        "sampling_parameters": json.dumps(sampling),
        "exclude_input_in_output": True,
    }


def answered(engine: str, answer: Any) -> str:
    """The completion in the response to a `question`. Raises Failed if there is none."""
    try:
        if engine == "vllm":
            return str(answer["choices"][0]["text"])
        if engine == "triton":
            text = answer["text_output"]
            return str(text[0] if isinstance(text, list) else text)
        return str(answer["predictions"][0])
    except (KeyError, IndexError, TypeError):
        raise Failed(
            f"what answered is no {engine} server: {str(answer)[:200]}; check serve.engine and"
            " serve.image"
        ) from None


VLLM_TYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""`serve.compute` in vLLM's terms."""


def dtype_on(serve: Serve) -> str:
    """The dtype for weights on the endpoint's machine, in vLLM's terms."""
    if serve.compute != "auto":
        return VLLM_TYPES[serve.compute]
    kind = (serve.machine.accelerator or "").lower().replace("_", "-")
    return "half" if kind.rpartition("-")[2] in _OLD else "bfloat16"


def _accelerators(serve: Serve) -> int:
    """The number of accelerators of the machine. Raises WrongInput if there is none."""
    machine = serve.machine
    if machine.accelerators:
        return machine.accelerators
    if not _BRING_THEIRS.match(machine.type):
        raise WrongInput(
            f"serve.engine {serve.engine} needs an accelerator on an endpoint, and"
            f" serve.machine.type {machine.type} has none; set it to one that brings its own"
            " (g2-standard-12), or set serve.machine.accelerator and serve.machine.accelerators"
        )
    if found := _COUNT.search(machine.type):
        return int(found[1])
    series, size = machine.type.partition("-")[0], machine.type.rpartition("-")[2]
    return _BY_PROCESSORS.get(series, {}).get(int(size), 1) if size.isdecimal() else 1


def _check_triton(serve: Serve) -> None:
    """Raises WrongInput if a knob is set that Triton behind an endpoint would not heed."""
    changed = serve.model_dump(include=set(NOT_BY_TRITON), exclude_defaults=True)
    for knob, value in changed.items():
        raise WrongInput(
            f"serve.{knob} {value} is not heeded by serve.engine triton on an endpoint:"
            f" {NOT_BY_TRITON[knob]}; leave it out, or set serve.engine to vllm or native"
        )


def shell(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """A command line as typed in a shell; `$NAME` in a variable's value is expanded by the
    shell.
    """
    return " ".join(
        [*(f'{name}="{value}"' for name, value in environment.items()), shlex.join(words)]
    )
