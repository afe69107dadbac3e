"""Places whose nodes see our disk: how a job ended by its nodes' notes, and for how long they wait
for each other.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from ingot.launch.job import Job
from ingot.launch.places.node_commands import shared_disk_command
from ingot.launch.rendezvous import EXIT, SIGNAL, Rendezvous, state_by_notes
from tests.small import small_recipe


@pytest.mark.parametrize(
    ("asked", "state"),
    [
        ([], "preempted"),
        ([signal.SIGTERM], "cancelled"),
        ([signal.SIGUSR1], "cancelled"),
        ([signal.SIGUSR2], "preempted"),  # for its stacks
        ([signal.SIGUSR2, signal.SIGTERM], "cancelled"),
    ],
)
def test_a_job_whose_ranks_saved_and_stopped_was_cancelled_if_somebody_asked(
    asked: list[int], state: str, tmp_path: Path
) -> None:
    meeting = Rendezvous(str(tmp_path))
    for number in asked:
        meeting.send(number, [0] if number == signal.SIGUSR2 else None)
    for node in range(2):
        meeting.leave(node, EXIT, rank=node, code=75)
    assert state_by_notes(meeting, 2) == state
    (tmp_path / f"{SIGNAL}-1.json").write_text('{"number": 10, "ranks": null, "by": "slurm"}\n')
    assert state_by_notes(meeting, 2) == "preempted"


def test_a_job_that_was_stopped_before_there_was_anything_to_save_did_not_fail(
    tmp_path: Path,
) -> None:
    """Else whoever supervises it elsewhere would start it again."""
    meeting = Rendezvous(str(tmp_path))
    for node, code in enumerate((143, -signal.SIGINT)):
        meeting.leave(node, EXIT, rank=node, code=code)
    assert state_by_notes(meeting, 2) == "failed", "nobody had asked"
    meeting.send(signal.SIGTERM)
    assert state_by_notes(meeting, 2) == "cancelled"
    (tmp_path / f"{SIGNAL}-1.json").write_text('{"number": 10, "ranks": null, "by": "slurm"}\n')
    assert state_by_notes(meeting, 2) == "preempted", "its time was up while it loaded"
    meeting.leave(1, EXIT, rank=1, code=1)
    assert state_by_notes(meeting, 2) == "failed"


def test_secrets_are_read_by_the_node_and_named_alone(tmp_path: Path) -> None:
    recipe = small_recipe(
        tmp_path,
        cloud__project="p",
        cloud__secrets={"HF_TOKEN": "secret:hf-token"},
        cloud__bucket="bucket",
    )
    argv = shared_disk_command(
        recipe, Job("train", ("train",), nodes=2, rendezvous="there"), "python"
    )
    told = json.loads(argv[argv.index("--cloud") + 1])
    assert told == {
        "project": "p",
        "region": "us-central1",
        "secrets": {"HF_TOKEN": "secret:hf-token"},
    }
    assert "--cloud" not in shared_disk_command(
        small_recipe(tmp_path), Job("train", ("train",), nodes=2, rendezvous="there"), "python"
    )


def test_nodes_wait_for_each_other_within_what_may_pass_before_they_count_as_hanging(
    tmp_path: Path,
) -> None:
    argv = shared_disk_command(
        small_recipe(tmp_path, launch__start_s=600),
        Job("train", ("train",), nodes=2, rendezvous="there"),
        "python",
    )
    assert float(argv[argv.index("--rendezvous-timeout-s") + 1]) == 540
