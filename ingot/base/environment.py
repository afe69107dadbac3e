"""The process environment: ranks as torchrun sets them, `.env` files, references to secrets."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.base.controlgroups import ROOT, own_groups
from ingot.base.errors import WrongInput

REPLICA_VARIABLE = "REPLICA_OF_RUN"
"""The variable that tells the ranks of a node without a shared disk which replica of the run folder
in a bucket users and later attempts see.
"""
NODE_VARIABLE = "NODE_OF_JOB"
"""The variable that tells the ranks of a node its number: a launcher started them, perhaps from
another machine or before it was started anew itself.
"""
HOST_VARIABLE = "HOST_OF_RANKS"
"""The variable that tells ranks what this machine was called when the process that started them
began.
"""
RESULTS_VARIABLE = "RESULTS_ARE_MESSAGES"
"""The variable that tells ranks that what they print on stdout goes among the messages of the
process that started them, which needs no such result.
"""
RESOLVED_VARIABLE = "RECIPE_IS_RESOLVED"
"""The variable that tells a child process that its recipe is resolved: what `.env` and `INGOT_*`
variables set is in it, or was overridden by what was typed, and must not be set once more.
"""
LOADED_VARIABLE = "RECIPE_AS_LOADED"
"""The variable that tells a verb of a `Run` the file that holds what `ingot.load` read: that is
done, whatever the recipe's files, `.env` and variables say by now.
"""

AS_ONE_PROCESS = "unset RANK WORLD_SIZE LOCAL_RANK"
"""What to do about the variables of ranks that a shell kept and nobody meant."""
CPU_QUOTAS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""The files of version 2 and of version 1 of control groups that tell microseconds of processor
time, and in which period.
"""
_SPECIAL = ("eos", "bos", "pad", "unk", "sep", "cls", "mask", "image", "audio", "video", "per")
"""Tokens of tokenizers and models, and numbers `per_token`, which are no secrets."""
_SECRET = re.compile(
    rf"""(?: {"".join(f"(?<!{name}_)" for name in _SPECIAL)} TOKEN
    | PASSWORD | PASSWD | PASSPHRASE | SECRET | AUTHORIZATION | COOKIE | CONNECTION_?STRING
    | (?<!APPLICATION_)CREDENTIALS? | CREDENTIALS_JSON
    | (?:API|ACCESS|PRIVATE|SECRET|ACCOUNT|LICENSE|ENCRYPTION|SIGNING|AUTH)[_-]?KEY
    | (?:^|[_-])(?:JWT|PAT) | (?-i:_KEY|_PWD|_PASS|_AUTH) ) (?:_?\d)?$""",
    re.IGNORECASE | re.VERBOSE,
)
"""Some words name what is secret in variables alone: a knob `text_key` is a column."""
_DOTENV_LINE = re.compile(
    r"""
    ^[ \t]* (?:export[ \t]+)? ([\w.-]+) [ \t]* =
    (?: [ \t]* (?: "( (?:\\.|[^\\\n])*? | (?:\\[\s\S]|[^"\\])* )" | '( .*? | [^']* )' )
        [ \t]* (?:[ \t]\#.*)? $
    | (.*) $ )
    | ^ (.+) $
    """,
    re.MULTILINE | re.VERBOSE,
)
"""A name and the value that it gets, in double quotes, in single ones or plain; or another line.
Quotes end in their line if they can.
"""


def holds_secret(name: str) -> bool:
    """Whether a variable or a knob of this name holds a secret, judging by its name:
    `WANDB_API_KEY`, `hf_token`; not `HF_TOKEN_PATH`, which is a path, nor `max_tokens`.
    """
    return _SECRET.search(name) is not None


@functools.cache
def host_name() -> str:
    """What this machine is called, the same for a process and its ranks as long as they live: a
    laptop has another name in another network.
    """
    return os.environ.get(HOST_VARIABLE) or socket.gethostname()


def processor_name() -> str:
    """What this machine's processor is called; `CPU` where nothing tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "CPU")


def check_decoded(text: str, what: str) -> None:
    """Raises WrongInput where what was typed, or a variable, has bytes that this process could not
    read as text: Python puts halves of surrogate pairs in their place.
    """
    if re.search("[\udc80-\udcff]", text):
        raise WrongInput(
            f"{what} has bytes that are not UTF-8, or that the locale does not read so; give UTF-8,"
            " and set LC_ALL=C.UTF-8 where the locale is another"
        )


def install_command(apt: str, brew: str) -> str:
    """The command that installs a package on this system, by its name for apt or for brew."""
    return f"brew install {brew}" if sys.platform == "darwin" else f"apt install {apt}"


def usable_cores(root: Path = ROOT) -> int:
    """The number of processors that this process may use, or whose time its control groups are
    given. `root` is where their files are.
    """
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    quotas = [
        quota
        for group in own_groups("cpu", root)
        for files in CPU_QUOTAS
        if (quota := _cpu_quota(group, files)) is not None
    ]
    return max(1, min([len(mine) or os.cpu_count() or 1, *quotas]))


def _cpu_quota(group: Path, files: Sequence[str]) -> int | None:
    """The processors whose time a control group is given, rounded up; None without a limit."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = " ".join((group / file).read_text() for file in files).split()
        if int(quota) > 0:  # -1 is none in version 1, "max" in version 2
            return math.ceil(int(quota) / int(period))
    return None


def threads_asked_for() -> int | None:
    """The threads that `OMP_NUM_THREADS` asks for, of `4,2` those of the outer level; None where it
    holds no such number, which OpenMP then passes over.
    """
    with contextlib.suppress(ValueError):
        threads = int(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0])
        return threads if threads >= 1 else None
    return None


@dataclass(frozen=True)
class Ranks:
    """This process's rank among the processes of a job; the values of torchrun's variables."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def ranks(environ: Mapping[str, str] | None = None) -> Ranks:
    """This process's rank; the only one of its job where no variable says otherwise.

    Raises:
        WrongInput: the variables are no numbers, name a rank that the job has not, or LOCAL_RANK
            stands alone.
    """
    environ = os.environ if environ is None else environ
    values = [
        environ.get(name, default)
        for name, default in (
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "1"),
        )
    ]
    try:
        here = Ranks(*(int(value) for value in values))
    except ValueError:
        raise WrongInput(
            f"RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE must be integers, not {values}; start"
            " with torchrun"
        ) from None
    if not 0 <= here.rank < here.world:  # nobody would be rank 0, which alone writes
        raise WrongInput(
            f"RANK={here.rank} is no rank of WORLD_SIZE={here.world}; start with torchrun, or"
            f" {AS_ONE_PROCESS}"
        )
    if "LOCAL_RANK" in environ and "RANK" not in environ:
        raise WrongInput(
            f"LOCAL_RANK={here.local_rank} is set and RANK is not, as whoever starts ranks sets it;"
            f" start with torchrun, or {AS_ONE_PROCESS}"
        )
    return here


def read_dotenv(path: Path, prefix: str) -> dict[str, str]:
    """The `NAME=value` lines of a `.env` file whose names begin with `prefix`; `#` comments,
    `export `, quotes, values in quotes over several lines, and a backslash before a double quote or
    another backslash in double ones are understood, nothing is expanded. What else stands there is
    for others.

    Raises:
        WrongInput: a line names such a variable in another way, as `set NAME=value` does, or the
            file is not UTF-8. It does not show the line, which might hold a secret.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise WrongInput(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    ours = re.escape(prefix)
    begins = re.compile(rf"^(?=[ \t]*(?:export[ \t]+)?{ours}[\w.-]*[ \t]*=)", re.MULTILINE)
    names_ours = re.compile(rf"[^#=]*\b{ours}\w")
    values: dict[str, str] = {}
    number = 1
    for part in begins.split(text):  # quotes that would go on over one of ours were never closed
        for found in _DOTENV_LINE.finditer(part):
            name, double, single, plain, other = found.groups()
            if other is not None and names_ours.match(other):
                line = number + part.count("\n", 0, found.start())
                raise WrongInput(f"{path}:{line}: the line is not NAME=value; mend or remove it")
            if name is None or not name.startswith(prefix):
                continue
            if double is not None:
                values[name] = re.sub(r'\\(["\\])', r"\1", double)
            elif single is not None:
                values[name] = single
            else:
                values[name] = re.split(r"\s#", plain, maxsplit=1)[0].strip()
        number += part.count("\n")
    return values


def take_env_file(path: Path) -> dict[str, str]:
    """Read variables from a JSON file that was left for this process only, and delete the file.

    Raises:
        WrongInput: the file is missing or malformed.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        return {str(name): str(value) for name, value in values.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise WrongInput(
            f"{path} holds no variables ({type(error).__name__}); start the job again"
        ) from None


def secret(reference: str, what: str) -> str:
    """The value behind `env:NAME`; a bare value is refused, so that no secret stands in a recipe.

    Raises:
        WrongInput: the variable is not set, or `reference` is not a reference.
    """
    scheme, _, name = reference.partition(":")
    if scheme != "env" or not name:
        raise WrongInput(f"{what} must be a reference such as env:NAME, not the secret itself")
    try:
        return os.environ[name]
    except KeyError:
        raise WrongInput(
            f"{what} refers to {reference}, but ${name} is not set; export {name}=... first"
        ) from None
