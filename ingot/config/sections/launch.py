"""The knobs that say where verbs run: this machine, hosts by ssh, Slurm, virtual machines and jobs
of Google Cloud.
"""

# ruff: noqa: RUF012 (pydantic copies a mutable default for each section)

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ingot.config.doors import PLACES
from ingot.config.section import FreeValues, KindName, Positive, Section

Place = Annotated[str, KindName(PLACES)]
"""A place: one of the table in `ingot.config.doors`, or one that an installed package brings."""
CodeSource = Literal["installed", "sync", "image"]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_duration(value: Any) -> Any:
    """`90m`, `1.5h`, `7d`, or plain seconds."""
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", value.strip())
        if found is None:
            raise ValueError(
                "is no duration; write seconds, or a number with s, m, h or d, such as 90m"
            )
        return float(found[1]) * _UNITS[found[2] or "s"]
    return value


Duration = Annotated[float, BeforeValidator(parse_duration), Field(gt=0)]
"""Seconds; written `90m`, `24h`, `7d` as well."""


class Machine(Section):
    """A machine type of Google Cloud, with what hangs on it."""

    type: str = "n1-standard-8"
    """Machine type, such as `a2-highgpu-8g`."""
    accelerator: str | None = None
    """Accelerator type as Compute Engine names it, such as `nvidia-tesla-t4` (Vertex AI's spelling
    is understood too); empty for none, and for machine types that bring theirs (a2, a3, a4, g2).
    """
    accelerators: Annotated[int, Field(ge=0)] = 0
    """Accelerators on each machine."""
    spot: bool = False
    """Spare capacity at a lower price, which may be taken away; training goes on from its newest
    checkpoint.
    """
    flex_start: bool = False
    """Wait for capacity in the queue of flex-start (Vertex AI, Dynamic Workload Scheduler) rather
    than fail at once.
    """
    reservation: str | None = None
    """Use this reservation only: `NAME`, or `projects/PROJECT/zones/ZONE/reservations/NAME`."""
    disk_gb: Positive = 200
    """Size of the boot disk."""


class Ssh(Section):
    """`launch.kind: ssh`."""

    hosts: list[str] = []
    """Hosts as ssh takes them (`USER@HOST`, or names of its configuration), one node each, the
    first of them node 0.
    """
    config: str | None = None
    """A configuration file for ssh instead of `~/.ssh/config`."""


class Slurm(Section):
    """`launch.kind: slurm`."""

    account: str | None = None
    """`sbatch --account`."""
    partition: str | None = None
    """`sbatch --partition`; the cluster's default when empty."""
    time: Duration | None = None
    """Time limit of one job; the partition's when empty. A training that comes to it saves a
    checkpoint and goes on in a new job.
    """
    gpus: Annotated[int, Field(ge=0)] | None = None
    """`sbatch --gpus-per-node`; nothing is asked for when empty."""
    cpus: Positive | None = None
    """Cores of each node (`sbatch --cpus-per-task`, of one task a node). Empty: 8 for each of
    `gpus` on a single node, otherwise whole nodes (`--exclusive`).
    """
    memory: Annotated[str, Field(pattern=r"^[0-9]+[KMGT]?$")] | None = None
    """Memory of each node (`sbatch --mem`), such as `500G`; `0` is all that a node has. Empty: 8 GB
    for each core, all of it where whole nodes are taken.
    """
    image: str | None = None
    """Container image (`srun --container-image`, with the pyxis plugin); the nodes' own software
    when empty.
    """
    mounts: list[str] = []
    """`SRC:DST` that the container sees besides the working folder."""
    signal_s: Positive = 300
    """Seconds before the time limit at which ranks are told to save a checkpoint and stop."""
    options: dict[str, str] = {}
    """Further options of sbatch by their long names, such as `{constraint: h100, exclusive: ""}`.
    """


class Tpu(Section):
    """`launch.kind: tpu`."""

    type: str = "v5litepod-8"
    """Accelerator type of the TPU VM."""
    runtime: str = "v2-alpha-tpuv5-lite"
    """Runtime version of the TPU VM."""


class Launch(Section):
    """Where verbs run."""

    kind: Place = "local"
    """Where: on this machine (`local`), on a list of hosts (`ssh`), as a Slurm job (`slurm`), on
    virtual machines made for the run (`gce`), as a custom job of Vertex AI (`vertex`), on a TPU VM
    (`tpu`); ingest and prepare also on Google's Spark (`dataproc`) or Beam (`dataflow`).
    """
    nodes: Positive = 1
    """Machines that share a training or evaluation step."""
    processes: Positive = 1
    """Processes (devices) of such a step on each machine."""
    detach: bool = False
    """`ingot launch` comes back at once and the job goes on without a terminal; follow it with
    `ingot launch logs RUN`.
    """
    restarts: Annotated[int, Field(ge=0)] = 100
    """How often a training that failed is started again from its newest checkpoint. Two failures
    without progress between them end it before. An end by its place, such as Slurm's time limit or
    a spot machine that is taken away, does not count if a newer checkpoint was made before it.
    """
    hang_s: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Seconds without a sign of life while steps are done after which a rank counts as hanging;
    `auto`: 30 and three times the usual step.
    """
    start_s: Positive = 1800
    """The same while a rank loads, compiles, evaluates, saves or exports, or a job waits for its
    nodes to meet.
    """
    code: CodeSource = "installed"
    """Which ingot the nodes run: the one installed there (`installed`), this one, copied to them
    (`sync`; ssh), or the image's (`image`; Slurm, the cloud). Nodes with different versions are
    refused.
    """
    python: str | None = None
    """Interpreter on the nodes (ssh, Slurm); this one's path when empty."""
    folder: str | None = None
    """Working folder on the nodes (ssh, Slurm), in which relative paths of the recipe are looked
    up; this one's path when empty.
    """
    interface: str | None = None
    """Network interface that ranks of several nodes talk over (`eth0`); their own choice when
    empty.
    """
    port: Annotated[int, Field(gt=0, le=65535)] = 29500
    """Port of node 0 where the ranks meet."""
    environment: dict[str, str] = {}
    """Variables that every rank gets. No secrets: these are written down."""
    secrets: list[str] = []
    """Names of variables of this process's environment that the ranks get too, without being
    written down anywhere.
    """
    image: str | None = None
    """Container image for gce, vertex and tpu; the training image of `cloud.repository` when empty.
    """
    machine: Machine = Machine()
    """What each node is, for gce and vertex."""
    ssh: Ssh = Ssh()
    """For `kind: ssh`."""
    slurm: Slurm = Slurm()
    """For `kind: slurm`."""
    tpu: Tpu = Tpu()
    """For `kind: tpu`."""
    options: FreeValues = {}
    """Settings of a launcher that another package brings, which checks them itself."""

    @property
    def variables(self) -> dict[str, str]:
        """`environment`, and what `interface` comes to."""
        return self.environment | (
            {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface}
            if self.interface
            else {}
        )
