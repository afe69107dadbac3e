"""`serve.engine: triton`: runs NVIDIA's Triton as a child process on a model repository written
here, whose Python backend generates with our own code.

The server is that of the environment of `serve.python` (the wheel nvidia-pytriton includes it),
else `tritonserver` on PATH. Its Python backend runs in the environment of the first `python3` on
PATH, which must have ingot as well, with numpy 1.26 for that wheel.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.base.processes import python_with_module, run_python
from ingot.base.storage import write_atomic
from ingot.config.sections.deployment import Serve
from ingot.config.serving import shell, triton_arguments, triton_name, triton_repository
from ingot.serve.engines.child import ServerCommand, run_server_process
from ingot.serve.http.listen import (
    LOOPBACK,
    fetched_model_folder,
    free_port,
    listen_address,
    url_host,
)
from ingot.serve.native.folder import check_decoder_folder

PROGRAM = "tritonserver"
_ENVIRONMENT_SCRIPT = (
    "import json, sys, sysconfig; print(json.dumps([sysconfig.get_path('platlib'),"
    " sysconfig.get_config_var('LIBDIR'), '%d.%d' % sys.version_info[:2]]))"
)


@dataclass(frozen=True)
class TritonInstallation:
    """An installed Triton. `backend`: files of the Python backend that must be copied together;
    empty where the server finds it by itself.
    """

    program: Path
    backend: tuple[Path, ...] = ()
    libraries: tuple[Path, ...] = ()


def serve_triton(target: Path, settings: Serve, name: str) -> None:
    """Serve the model in `target` with Triton; blocks until SIGTERM or SIGINT.

    Raises:
        WrongInput: not a decoder's folder, an API key (Triton checks none), or no Triton.
        Failed: the port is taken, or Triton died; with its error message.
    """
    _check_key(settings)
    host, port = listen_address(settings, os.environ)
    python = python_with_module(settings.python, "ingot")
    installation = find_triton(python)
    with fetched_model_folder(target, os.environ) as folder, _temporary_folder() as place:
        check_decoder_folder(folder, "triton", any_template=settings.any_template)
        own = free_port(host, port)
        for path, text in triton_repository(
            name, settings, str(folder.resolve()), "python"
        ).items():
            (place / "models" / path).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(place / "models" / path, text)
        assemble_backend(installation, place / "backends" / "python")
        url = f"http://{url_host(host)}:{own}"
        run_server_process(
            triton_command(python, installation, place, triton_name(name), host, own),
            f"serving {name} at {url}",
        )


def render_triton(folder: Path, settings: Serve, name: str) -> str:
    """The repository's files and the command that `serve_triton` would run; `PLACE` stands for a
    temporary folder.
    """
    _check_key(settings)
    check_decoder_folder(folder, "triton", any_template=settings.any_template)
    python = settings.python or sys.executable
    installation = _find_installation(python) or TritonInstallation(
        Path(PROGRAM)
    )  # the command can be shown without having Triton
    files = triton_repository(name, settings, str(folder.resolve()), "python")
    shown_files = "".join(f"# PLACE/models/{path}\n{text}\n" for path, text in files.items())
    made = triton_command(
        python, installation, Path("PLACE"), triton_name(name), settings.host, settings.port
    )
    kept = {
        name: value.replace(os.environ.get(name) or "\0", f"${name}")
        for name, value in made.environment.items()
    }
    return shown_files + shell(made.argv, kept) + "\n"


def triton_command(
    python: str, installation: TritonInstallation, place: Path, model: str, host: str, port: int
) -> ServerCommand:
    """The command line of Triton. Its Python backend runs in the environment of the first `python3`
    on PATH.
    """
    more = (
        (f"--backend-directory={place / 'backends'}", "--disable-auto-complete-config")
        if installation.backend
        else ()
    )
    argv = (
        str(installation.program),
        *triton_arguments(str(place / "models"), host=host, port=port),
        "--log-info=false",
        *more,
    )
    path = os.pathsep.join(
        [str(Path(python).absolute().parent), os.environ.get("PATH", os.defpath)]
    )
    libraries = os.pathsep.join(
        [*map(str, installation.libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    )
    reachable = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    # The server is ready before its model is, so the model's own health is checked.
    health = f"http://{url_host(reachable)}:{port}/v2/models/{model}/ready"
    return ServerCommand(
        "Triton",
        argv,
        health,
        {"PATH": path, **({"LD_LIBRARY_PATH": libraries} if libraries else {})},
    )


def find_triton(python: str) -> TritonInstallation:
    """The Triton in the environment of an interpreter, else the one on PATH. Raises WrongInput
    where there is none, or the interpreter cannot be run.
    """
    if (found := _find_installation(python)) is None:
        raise WrongInput(
            f"there is no Triton in the environment of {python}, and no {PROGRAM} on PATH; set"
            " serve.python to the interpreter of an environment that has nvidia-pytriton"
        )
    return found


def _find_installation(python: str) -> TritonInstallation | None:
    done = run_python(python, _ENVIRONMENT_SCRIPT, "nvidia-pytriton")
    if done.returncode == 0:
        packages, libraries, version = json.loads(done.stdout)
        root = Path(packages) / "pytriton" / PROGRAM
        if (root / "bin" / PROGRAM).exists():
            stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
            if not stub.exists():
                known = ", ".join(sorted(path.name for path in stub.parent.parent.glob("*")))
                raise WrongInput(
                    f"the Triton in {packages} has no Python backend for Python {version} (only"
                    f" {known}); set serve.python to one of these"
                )
            return TritonInstallation(
                root / "bin" / PROGRAM,
                (*sorted((root / "backends" / "python").glob("*.*")), stub),
                (Path(packages) / "nvidia_pytriton.libs", Path(libraries)),
            )
    on_path = shutil.which(PROGRAM)
    return TritonInstallation(Path(on_path)) if on_path else None


def assemble_backend(installation: TritonInstallation, folder: Path) -> None:
    """Copy the Python backend together: the wheel keeps the part for each version of Python
    elsewhere.
    """
    for file in installation.backend:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / file.name)
    if installation.backend:
        (folder / installation.backend[-1].name).chmod(0o755)


def _check_key(settings: Serve) -> None:
    if settings.api_key:
        raise WrongInput(
            "serve.api_key is set, but Triton checks no key; remove it and put Triton"
            " behind a proxy, or set serve.engine=native"
        )


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ingot-triton-") as folder:
        yield Path(folder)
