"""`serve.engine: vllm`: runs vLLM's OpenAI server on a model folder as a child process, in an
environment of its own.

Sampling, batching and limits are vLLM's; `max_tokens`, `max_batch`, the API key and the address are
passed to it, and so is any `VLLM_...` variable. Under Vertex AI's variables our proxy runs in front
of it (`proxy.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from ingot.base.hostmemory import host_memory
from ingot.base.processes import python_with_module, safe_path
from ingot.config.models.content import check_content
from ingot.config.models.source import model_config
from ingot.config.sections.deployment import Serve
from ingot.config.serving import VLLM_MODULE, VLLM_TYPES, shell, vllm_arguments
from ingot.models.device import accelerator, is_fast_in_bf16
from ingot.models.hf.compressed import Scheme, scheme_of
from ingot.serve.engines.child import ServerCommand, run_server_process
from ingot.serve.engines.proxy import running_proxy
from ingot.serve.http.bodies import PromptBounds
from ingot.serve.http.listen import (
    LOOPBACK,
    bound_socket,
    fetched_model_folder,
    free_port,
    kept_port,
    listen_address,
    read_api_key,
    url_host,
)
from ingot.serve.native.causal import DEFAULT_POSITIONS
from ingot.serve.native.folder import CheckedFolder, check_decoder_folder, most_characters

# On a CPU vLLM would take nine tenths of the memory for its KV cache, and fail where they are not
# free.
MAX_CACHE_BYTES = 4 << 30


def serve_vllm(target: Path, settings: Serve, name: str) -> None:
    """Serve the model in `target` with vLLM; blocks until SIGTERM or SIGINT.

    Raises:
        WrongInput: not a decoder's folder, weights that changed since their export, or no vLLM
            in the environment of `serve.python`.
        Failed: the port is taken, or vLLM died; with its error message.
    """
    key = read_api_key(settings.api_key)
    host, port = listen_address(settings, os.environ)
    python = python_with_module(settings.python, "vllm")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(fetched_model_folder(target, os.environ))
        checked = check_decoder_folder(folder, "vllm", any_template=settings.any_template)
        check_content(folder)
        if "AIP_HTTP_PORT" not in os.environ:
            own = free_port(host, port) if port else kept_port(host)
            run_server_process(
                vllm_command(python, folder, settings, name, host, own, key),
                f"serving {name} at http://{url_host(host)}:{own}",
            )
            return
        listener = stack.enter_context(bound_socket(host, port))
        inside = kept_port(LOOPBACK)
        run_server_process(
            vllm_command(python, folder, settings, name, LOOPBACK, inside, None),
            f"serving {name} at http://{url_host(host)}:{listener.getsockname()[1]}",
            lambda: running_proxy(
                listener,
                f"http://{LOOPBACK}:{inside}",
                settings,
                name,
                prompt_bounds(checked, settings),
                key,
                os.environ,
            ),
        )


def render_vllm(folder: Path, settings: Serve, name: str) -> str:
    """The command that `serve_vllm` would run; the API key's variable is named, not its value."""
    check_decoder_folder(folder, "vllm", any_template=settings.any_template)
    made = vllm_command(
        settings.python or sys.executable,
        folder,
        settings,
        name,
        settings.host,
        settings.port,
        None,
    )
    keys = {"VLLM_API_KEY": f"${settings.api_key.removeprefix('env:')}"} if settings.api_key else {}
    return shell(made.argv, {**made.environment, **keys}) + "\n"


def _cpu_dtype(scheme: Scheme | None) -> str:
    """What vLLM computes in on a CPU: it has products of four-bit matrices in bf16 alone, and with
    AMX those of eight-bit inputs, too.
    """
    if scheme is None:
        return "float32"
    blocks = scheme.integer_inputs and is_fast_in_bf16(torch.device("cpu"))
    return "bfloat16" if scheme.bits == 4 or blocks else "float32"


def vllm_command(
    python: str, folder: Path, settings: Serve, name: str, host: str, port: int, key: str | None
) -> ServerCommand:
    """The command line of vLLM. On a CPU it runs without compiling first, and unless
    `serve.compute` says otherwise in float32 where it can.
    """
    accelerated = accelerator() is not None
    scheme = scheme_of(model_config(folder), str(folder))
    dtype = VLLM_TYPES.get(settings.compute, "auto" if accelerated else _cpu_dtype(scheme))
    more = () if accelerated else ("--kv-cache-memory-bytes", str(kv_cache_bytes()))
    if not accelerated:
        settings = settings.model_copy(update={"eager": True})
    argv = (
        python,
        "-m",
        VLLM_MODULE,
        *vllm_arguments(str(folder), name, settings, host=host, port=port, dtype=dtype),
        *more,
    )
    reachable = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    secrets: Mapping[str, str] = {"VLLM_API_KEY": key} if key else {}
    return ServerCommand(
        "vLLM",
        argv,
        f"http://{url_host(reachable)}:{port}/health",
        quiet_environment(os.environ) | safe_path(),
        secrets,
    )


def quiet_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that silence vLLM's step log and usage reports; those already set are left
    alone.
    """
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    return {name: value for name, value in defaults.items() if name not in environ}


def prompt_bounds(checked: CheckedFolder, settings: Serve) -> PromptBounds:
    """The bounds of what our proxy passes on: those of our own server."""
    config = model_config(checked.folder)
    part = config.get("text_config")
    text = part if isinstance(part, dict) else config
    positions = int(text.get("max_position_embeddings") or DEFAULT_POSITIONS)
    scaling = text.get("rope_scaling") or {}
    positions = math.ceil(positions * max(1.0, float(scaling.get("factor") or 1)))
    return PromptBounds(
        settings.max_batch + settings.max_queue,
        positions,
        most_characters(checked.tokenizer, positions),
    )


def kv_cache_bytes() -> int:
    """A quarter of the free memory, in quarters of a GiB, at most MAX_CACHE_BYTES."""
    step = 1 << 28
    return max(step, min(MAX_CACHE_BYTES, host_memory().free // 4 // step * step))
