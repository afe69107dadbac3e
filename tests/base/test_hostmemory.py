"""What a container or a job may use counts, not what the machine around it has."""

from __future__ import annotations

import re
from pathlib import Path

from ingot.base.hostmemory import HostMemory, host_memory
from tests.base.groups import V2, machine
from tests.house.source import PACKAGE

V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def group(name: str, limit: int | str, used: int, cache: int) -> dict[str, str]:
    return {
        f"{name}/memory.max": f"{limit}",
        f"{name}/memory.current": f"{used}",
        f"{name}/memory.stat": f"anon 5\ninactive_file {cache}",
    }


def test_a_limit_counts_without_the_files_it_would_give_back(tmp_path: Path) -> None:
    second = machine(tmp_path / "v2", "0::/", V2, group(".", 100, 60, 20))
    assert host_memory(second) == HostMemory(40, 100)
    files = {
        "memory/docker/7/memory.limit_in_bytes": "100",
        "memory/docker/7/memory.usage_in_bytes": "90",
        "memory/docker/7/memory.stat": "total_inactive_file 0",
    }
    first = machine(tmp_path / "v1", "4:memory:/docker/7", V1, files)
    assert host_memory(first) == HostMemory(90, 100)


def test_the_tightest_of_a_group_and_those_above_it_counts(tmp_path: Path) -> None:
    """A job may use 100 of 1000, of which its neighbours in the service left 30."""
    files = group("a/job", 100, 20, 0) | group("a", 1000, 970, 0)
    assert host_memory(machine(tmp_path, "0::/a/job/step", V2, files)) == HostMemory(70, 100)
    (tmp_path / "sys/fs/cgroup/a/memory.current").write_text("2000")
    assert host_memory(tmp_path).free == 0


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    whole = host_memory(tmp_path / "none")
    assert whole.total > 10**8
    unlimited = machine(tmp_path / "v2", "0::/", V2, group(".", "max", 60, 20))
    assert host_memory(unlimited).total == whole.total


def test_nothing_else_asks_what_the_machine_has() -> None:
    """A plan said that a training fits which the kernel then killed at its container's limit."""
    asks = re.compile(r"psutil\.virtual_memory|os\.(cpu_count|sched_getaffinity)")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if asks.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"base/hostmemory.py", "base/environment.py"}
