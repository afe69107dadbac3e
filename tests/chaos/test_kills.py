"""A training is killed again and again, in every phase, and ends with the bytes of one that was
left alone.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.heartbeat import Heartbeat, Phase, heartbeat_file, read_beats
from ingot.base.runlog import read_lines
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.train.trainer import train
from tests.cli.commands import clean_environment, command
from tests.ranks import free_port
from tests.small import copy_of, small_recipe
from tests.train.test_run import last_state, metrics, weights

FORKS = multiprocessing.get_context("forkserver")
KNOBS: dict[str, Any] = {
    "checkpoint__every": 2,
    "train__evaluate_every": 3,
    "train__evaluate_rows": 8,
}
WHILE_TRAINING: tuple[Phase, ...] = ("step", "loading", "evaluating", "first step", "saving")
PATIENCE_S = 90.0
REACH = 6
"""Steps within which every phase comes by; a kill that missed its own is done then."""


def start(root: Path, world: int, knobs: dict[str, Any]) -> list[BaseProcess]:
    """The ranks of `ingot train`, forked from a process that has torch loaded."""
    port = free_port()
    processes: list[BaseProcess] = [
        FORKS.Process(target=_rank, args=(rank, world, port, root, knobs), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    return processes


def _rank(rank: int, world: int, port: int, root: Path, knobs: dict[str, Any]) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(
        1
    )  # the process that this one was forked from had read the environment before
    os.dup2(os.open(root / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    train(small_recipe(root, **knobs))


def wait_for(processes: list[BaseProcess], root: Path) -> None:
    """Until all have ended well."""
    for rank, process in enumerate(processes):
        process.join(PATIENCE_S)
        assert process.exitcode == 0, (root / f"said-{rank}").read_text()


@dataclass
class Killer:
    """Starts a training and kills it, as often as it is asked to; `phases` are those that the
    victims were in.
    """

    root: Path
    world: int
    knobs: dict[str, Any]
    draw: random.Random
    phases: Counter[str] = field(default_factory=Counter)

    def kill_in(self, phase: Phase) -> None:
        """One attempt that is killed in `phase`: a rank of it, or all at once."""
        processes = start(self.root, self.world, self.knobs)
        victim = self.draw.randrange(self.world)
        whole = self.draw.random() < 0.3
        # Within the phase, not always at its first moment.
        later_s, steps = (
            (self.draw.uniform(0, 0.3) if phase == "loading" else self.draw.choice((0.0, 0.002))),
            self.draw.randrange(1, REACH),
        )
        began, first = time.monotonic(), None
        while True:
            beat = self.beat_of(processes[victim])
            first = beat.step if beat and first is None else first
            found: str = beat.phase if beat else "loading"
            far = beat.step - first if beat and first is not None else 0
            if (
                found == phase
                and (phase != "step" or far >= steps)
                and time.monotonic() - began > later_s * (phase == "loading")
            ):
                time.sleep(later_s * (phase != "loading"))
                break
            if found == "exporting" or (far >= REACH and found == "step" and phase != "exporting"):
                break  # this phase was too short to be seen
            assert processes[victim].is_alive(), (self.root / f"said-{victim}").read_text()
            assert time.monotonic() - began < PATIENCE_S
            time.sleep(0.0005)
        beat = self.beat_of(processes[victim])
        for process in processes if whole else [processes[victim]]:
            process.kill()
        self.phases[beat.phase if beat else "loading"] += 1
        time.sleep(0.05)  # in which the others go on, or fail
        for process in processes:
            process.kill()
            process.join(PATIENCE_S)
        assert processes[victim].exitcode == -signal.SIGKILL, "it had ended before"

    def beat_of(self, process: BaseProcess) -> Heartbeat | None:
        folder = small_recipe_folder(self.root)
        return next(
            (
                beat
                for beat in read_beats(heartbeat_file(folder / "heartbeats"))
                if beat.pid == process.pid
            ),
            None,
        )


def small_recipe_folder(root: Path) -> Path:
    return root / "runs/small"


def events(recipe: Recipe, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(recipe.folder.events) if event["kind"] == kind]


def check_equal(killed: Recipe, alone: Recipe) -> None:
    """Bit for bit: everything logged but clocks, the last checkpoint, the exported weights."""
    assert metrics(killed) == metrics(alone)
    assert last_state(killed) == last_state(alone)
    expected = weights(alone)
    for name, tensor in weights(killed).items():
        assert torch.equal(tensor, expected[name]), name


def kill_often(
    root: Path,
    alone: Path,
    world: int,
    kills: int,
    exporting: int,
    steps: int,
    seed: int,
    *,
    loses: bool = True,
) -> Counter[str]:
    """`kills` kills while it trains and `exporting` after that; the phases that they came in.
    `loses`: so many that some must have come between two checkpoints.
    """
    knobs = {**KNOBS, "train__steps": steps}
    wait_for(start(alone, world, knobs), alone)
    killer = Killer(root, world, knobs, random.Random(seed))
    for number in range(kills):
        killer.kill_in(WHILE_TRAINING[number % len(WHILE_TRAINING)])
    for _ in range(exporting):
        killer.kill_in("exporting")
    wait_for(start(root, world, knobs), root)
    recipe = small_recipe(root, **knobs)
    check_equal(recipe, small_recipe(alone, **knobs))
    assert killer.phases.total() == kills + exporting
    lost = sum(event["steps"] for event in events(recipe, "lost"))
    assert lost > 0 or not loses, "steps were really lost, and done again"
    return killer.phases


@pytest.mark.drawn("a crash or a kill in training")
def test_killed_once_in_each_phase_it_ends_as_if_it_had_not_been(
    root: Path, tmp_path: Path
) -> None:
    """Two ranks, one kill in each phase while it trains, and one while it exports."""
    alone = copy_of(root, tmp_path / "alone")
    phases = kill_often(root, alone, 2, len(WHILE_TRAINING), 1, steps=20, seed=3, loses=False)
    print(f"\n2 processes: {phases.total()} kills, {dict(phases)}")
    assert len(phases) >= 3, phases


@pytest.mark.slow
@pytest.mark.parametrize(("world", "kills", "exporting"), [(1, 24, 3), (2, 20, 3)])
def test_killed_in_every_phase_it_ends_as_if_it_had_not_been(
    world: int, kills: int, exporting: int, root: Path, tmp_path: Path
) -> None:
    """50 kills in all."""
    alone = copy_of(root, tmp_path / "alone")
    phases = kill_often(root, alone, world, kills, exporting, steps=45, seed=world)
    print(f"\n{world} processes: {phases.total()} kills, {dict(phases)}")
    assert len(phases) >= 5, phases


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_killed_hundreds_of_times_it_ends_as_if_it_had_not_been(
    world: int, root: Path, tmp_path: Path
) -> None:
    """500 kills in all."""
    alone = copy_of(root, tmp_path / "alone")
    phases = kill_often(root, alone, world, kills=230, exporting=20, steps=600, seed=10 + world)
    assert len(phases) >= 5, phases


@pytest.mark.slow
def test_a_launched_training_survives_the_chaos_that_ships(root: Path, tmp_path: Path) -> None:
    """Four kills by `chaos.kill_every_s`, two of them so late that loading is over: a rank, all
    ranks, the supervisor, a rank.
    """
    knobs = {**KNOBS, "train__steps": 80, "train__global_batch": 32, "train__micro_batch": 1}
    alone = copy_of(root, tmp_path / "alone")
    recipe = small_recipe(root, **knobs, launch__processes=2)
    (root / "r.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    launched = [
        "launch",
        "train",
        str(root / "r.yaml"),
        "chaos.kill_every_s=7",
        "chaos.what=[rank,group,supervisor]",
        "chaos.seed=232",
    ]
    codes: list[int] = []
    said = ""
    deadline = time.monotonic() + 3 * PATIENCE_S
    while len(events(recipe, "killed")) < 4:
        process = subprocess.Popen(
            command(*launched),
            env=clean_environment(OMP_NUM_THREADS="1"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        while process.poll() is None and (
            len(events(recipe, "killed")) < 4 or len(events(recipe, "restart")) < 3
        ):
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
        process.kill()
        said += process.communicate()[1]
        codes.append(process.returncode)
    assert codes == [-signal.SIGKILL] * 2, f"one by chaos, one by us; {said}"
    assert [event["what"] for event in events(recipe, "killed")] == [
        "rank",
        "group",
        "supervisor",
        "rank",
    ]
    assert len(events(recipe, "restart")) == said.count("starting again from") == 3
    wait_for(start(root, 2, knobs), root)
    wait_for(start(alone, 2, knobs), alone)
    check_equal(small_recipe(root, **knobs), small_recipe(alone, **knobs))
