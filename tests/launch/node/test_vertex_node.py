"""Which node a worker of a custom job is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ingot.base.errors import WrongInput
from ingot.launch.node.main import torchrun_variables


def _cluster(pool: str, index: int, *others: int) -> dict[str, str]:
    cluster = {"workerpool0": ["cmle-training-workerpool0-ab-0:2222"]}
    for number, count in enumerate(others, start=1):
        cluster[f"workerpool{number}"] = [
            f"cmle-training-workerpool{number}-ab-{each}:2222" for each in range(count)
        ]
    return {
        "CLUSTER_SPEC": json.dumps(
            {"cluster": cluster, "environment": "cloud", "task": {"type": pool, "index": index}}
        )
    }


@pytest.mark.parametrize(
    ("pool", "index", "others", "nodes", "number"),
    [
        ("workerpool0", 0, (), 1, 0),
        ("workerpool0", 0, (3,), 4, 0),
        ("workerpool1", 2, (3,), 4, 3),
        ("workerpool2", 1, (3, 2), 6, 5),
    ],
)
def test_pool_and_index_become_a_node_number(
    pool: str, index: int, others: tuple[int, ...], nodes: int, number: int
) -> None:
    assert torchrun_variables(_cluster(pool, index, *others)) == {
        "PET_NNODES": str(nodes),
        "PET_NODE_RANK": str(number),
        "PET_MASTER_ADDR": "cmle-training-workerpool0-ab-0",
        "PET_MASTER_PORT": "2222",
    }


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"CLUSTER_SPEC": "{"},
        {"CLUSTER_SPEC": "[]"},
        _cluster("workerpool1", 0),
        _cluster("workerpool1", 3, 3),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(WrongInput, match="CLUSTER_SPEC does not say which worker this is"):
        torchrun_variables(environ)


def test_outside_a_custom_job_it_ends_with_one_line() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CLUSTER_SPEC"}
    done = subprocess.run(
        [sys.executable, "-m", "ingot.launch.node", "--cluster-spec", "--", "train"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "CLUSTER_SPEC" in done.stderr
