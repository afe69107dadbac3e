"""The groups of this process are found wherever the kernel shows them, with those above."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.base.controlgroups import own_groups
from tests.base.groups import V2, machine, real_group, said_inside

V1 = """\
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"""
JOB = "/system.slice/slurmd.service/job_7"


@pytest.mark.parametrize(
    ("own", "mounts", "wanted"),
    [
        pytest.param(
            f"0::{JOB}",
            V2,
            [JOB[1:], "system.slice/slurmd.service", "system.slice", "."],
            id="version 2",
        ),
        pytest.param(
            "9:name=systemd:/x\n4:memory:/docker/7\n2:cpu,cpuacct:/a/b\n0::/",
            V1,
            ["cpu,cpuacct/a/b", "cpu,cpuacct/a", "cpu,cpuacct"],
            id="version 1",
        ),
        pytest.param("0::/", V2, ["."], id="a container that sees its own group as the topmost"),
        pytest.param(
            f"0::{JOB}/inner",
            V2.replace(" / /sys", f" {JOB} /sys"),
            ["inner", "."],
            id="a container whose group is mounted",
        ),
        pytest.param("0::/../../job_7", V2, ["."], id="a group outside of what is seen"),
        pytest.param("0::/b", V2.replace(" / /sys", " /a /sys"), ["."], id="another group's mount"),
        pytest.param(
            "0::/a\\x2db.scope/c",
            V2.replace(" / /sys", " /a\\134x2db.scope /sys"),
            ["c", "."],
            id="a name with a backslash",
        ),
        pytest.param("", V2, ["."], id="a kernel that tells of mounts alone"),
        pytest.param(f"0::{JOB}", "", [], id="nothing is mounted"),
        pytest.param("what is\nthis:", "23 1\nwhat is this - cgroup", [], id="another system"),
    ],
)
def test_the_groups_of_this_process_are_found_with_those_above(
    own: str, mounts: str, wanted: list[str], tmp_path: Path
) -> None:
    root = machine(tmp_path, own, mounts, {})
    assert list(own_groups("cpu", root)) == [root / "sys/fs/cgroup" / each for each in wanted]


def test_a_system_without_control_groups_has_none(tmp_path: Path) -> None:
    assert not list(own_groups("memory", tmp_path))


@pytest.mark.parametrize(
    ("controller", "limit", "told", "wanted"),
    [
        (
            "memory",
            f"memory.max={2**30} or memory.limit_in_bytes={2**30}",
            "from ingot.base.hostmemory import host_memory; print(host_memory().total)",
            2**30,
        ),
        (
            "cpu",
            "cpu.max=90000 100000 or cpu.cfs_quota_us=90000",
            "from ingot.base.environment import usable_cores; print(usable_cores())",
            1,
        ),
    ],
    ids=["memory", "cpu"],
)
def test_a_limit_that_the_kernel_keeps_is_seen(
    controller: str, limit: str, told: str, wanted: int
) -> None:
    with real_group(controller, limit) as group:
        assert int(said_inside(group, told)) == wanted
