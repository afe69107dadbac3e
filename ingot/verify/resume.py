"""`ingot verify resume`: trains the user's own recipe for a few steps uninterrupted and again with
kills, through the command line, and compares the results.

Metrics (without timings), weights, optimizer state and the exported model must be bit-identical;
the first difference is reported. On a GPU both train with `train.deterministic`, without which two
runs are only nearly the same.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from ingot.base.environment import RESOLVED_VARIABLE
from ingot.base.errors import Failed, WrongInput
from ingot.base.processes import own_python
from ingot.base.progress import duration, say
from ingot.base.runfolder import folder_lock
from ingot.base.runlog import read_lines
from ingot.base.storage import sha256_file
from ingot.checkpoints.reader import StoredTensors
from ingot.checkpoints.store import newest_valid
from ingot.config.load import dump_recipe, load_recipe
from ingot.config.models.weights import weight_files
from ingot.config.recipe import Recipe
from ingot.models.device import adds_in_any_order
from ingot.verify.proof import Check, Proof

STEPS, EVERY = 9, 3
FOLDER = "verify-resume"
KILL_STEPS = (5, 8)
"""Each kill is after a checkpoint's step, so that steps are lost."""
CLOCKS = (
    "t_wall",
    "train/tokens_per_s",
    "train/tokens_per_step",
    "train/examples_per_s",
    "train/mfu",
    "validation/seconds",
    "rollout/seconds",
    "memory/",
    "gpu/",
)
"""Keys of metrics that depend on timing, or on where a restart began to count; those that end in a
slash stand for all keys below.
"""
RunCommand = Callable[[Sequence[str]], tuple[int, str]]
"""Runs `ingot ARGUMENTS`: its exit code, and what it printed on stderr."""


def run_ingot(arguments: Sequence[str]) -> tuple[int, str]:
    """Run `ingot ARGUMENTS`, whose recipe is resolved, in a new process."""
    ended = subprocess.run(
        [*own_python(), "-m", "ingot", *arguments],
        env={**os.environ, RESOLVED_VARIABLE: "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stderr


def verify_resume(recipe: Recipe, run: RunCommand | None = None) -> Proof:
    """Train `STEPS` steps of the recipe twice, once killed at `KILL_STEPS`; needs prepared data.

    Args:
        run: runs the command that trains; a new process if None.

    Raises:
        WrongInput: the data is not prepared, or the recipe does not fit it.
        Failed: a training ended otherwise than it should.
    """
    if not (recipe.folder.columns / "manifest.json").exists():
        raise WrongInput(
            f"{recipe.folder.columns} holds no prepared data; run `ingot prepare` on the recipe"
            " first"
        )
    run = run or run_ingot
    with _side_by_side(recipe) as (uninterrupted, interrupted):
        say(f"verify resume: {STEPS} steps in one go")
        _train(uninterrupted, run)
        for step in KILL_STEPS:
            say(f"verify resume: the same, killed after step {step}")
            _train(interrupted, run, kill_at=step)
        say("verify resume: the rest")
        _train(interrupted, run)
        title = (
            f"resume of {recipe.name}: {STEPS} steps, a checkpoint every {EVERY}, killed after"
            f" {' and '.join(map(str, KILL_STEPS))}"
            f"{', with train.deterministic' if adds_in_any_order() else ''}"
        )
        both = uninterrupted.recipe, interrupted.recipe
        return Proof(
            title,
            [
                _check_lost_steps(interrupted.recipe),
                _check_metrics(*both),
                *_check_states(*both),
                _check_export(*both),
            ],
        )


@dataclass(frozen=True)
class ResumeRun:
    """A short run of the recipe in its own folder. The changed knobs are given on the command line,
    which overrides the environment.
    """

    file: Path
    changes: list[str]
    recipe: Recipe


@contextlib.contextmanager
def _side_by_side(recipe: Recipe) -> Iterator[tuple[ResumeRun, ResumeRun]]:
    """Two runs beside the prepared data, removed at the end."""
    folder = recipe.folder.root / FOLDER
    # Another proof of this run would take the folder away from under this one.
    with folder_lock(recipe.folder.root, FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir()
            file = folder / "recipe.yaml"
            file.write_text(dump_recipe(recipe), encoding="utf-8")
            yield _short_run(recipe, file, "straight"), _short_run(recipe, file, "broken")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _short_run(recipe: Recipe, file: Path, name: str) -> ResumeRun:
    changes = [f"output={file.parent / name}", *_short_run_knobs(recipe)]
    run = ResumeRun(file, changes, load_recipe([file], changes, environ={}, dotenv=None))
    run.recipe.folder.root.mkdir(parents=True)
    run.recipe.folder.data.symlink_to(recipe.folder.data.resolve(), target_is_directory=True)
    return run


def _short_run_knobs(recipe: Recipe) -> list[str]:
    often = [
        f"train.{knob}=2"
        for knob in ("evaluate_every", "sample_every")
        if getattr(recipe.train, knob)
    ]
    # Kernels that add up in any order differ between any two runs, resumed or not.
    exact = ["train.deterministic=true"] if adds_in_any_order() else []
    begun = recipe.train.start_from is not None or recipe.train.start_step is not None
    return [
        *exact,
        *(["train.start_step=0"] if begun else []),
        "train.epochs=null",
        "train.tokens=null",
        f"train.steps={STEPS}",
        # A training that ends before its kills proves nothing.
        "train.early_stop=null",
        "train.profile=null",
        *often,
        f"checkpoint.every={EVERY}",
        "checkpoint.upload=null",
        "checkpoint.notice=null",
        "track.every=1",
        "track.wandb=null",
        "chaos={}",
    ]


def _train(training: ResumeRun, run: RunCommand, kill_at: int | None = None) -> None:
    """Train to the end, or until the training kills itself at step `kill_at`."""
    chaos = [] if kill_at is None else [f"chaos.kill_at={kill_at}"]
    code, messages = run(["train", str(training.file), *training.changes, *chaos])
    killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if kill_at is None and code:
        raise Failed(f"training ended with {code}: {_last_line(messages)}")
    if kill_at is not None and not killed:
        raise Failed(
            f"training ended with {code} where it should be killed after step {kill_at}:"
            f" {_last_line(messages)}"
        )


def _last_line(messages: str) -> str:
    return (messages.strip().splitlines() or ["no message"])[-1]


def _check_lost_steps(interrupted: Recipe) -> Check:
    """Whether steps were done, lost and done again: otherwise nothing is proved."""
    lost = [event for event in read_lines(interrupted.folder.events) if event["kind"] == "lost"]
    steps = [int(event["steps"]) for event in lost]
    detail = (
        f"{' and '.join(map(str, steps))} steps were lost and done again,"
        f" {duration(sum(event['seconds'] for event in lost))}"
    )
    return Check(
        "steps lost",
        len(steps) == len(KILL_STEPS) and all(steps),
        detail if steps else "the kills cost no step: nothing was proved",
    )


def _check_metrics(uninterrupted: Recipe, interrupted: Recipe) -> Check:
    lines = [
        [_without_clocks(line) for line in read_lines(recipe.folder.metrics)]
        for recipe in (uninterrupted, interrupted)
    ]
    for one, other in zip_longest(*lines, fillvalue={}):
        differ = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        if differ:
            step, key = one.get("step", other.get("step")), differ[0]
            return Check(
                "metrics",
                False,
                f"first at step {step}: {key} is {one.get(key)} in one go, {other.get(key)}"
                " resumed",
            )
    return Check("metrics", True, f"{len(lines[0])} lines equal, clocks aside")


def _without_clocks(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in line.items()
        if key not in CLOCKS
        and not key.startswith(tuple(name for name in CLOCKS if name.endswith("/")))
    }


def _check_states(uninterrupted: Recipe, interrupted: Recipe) -> list[Check]:
    """Compare weights and optimizer state of the last checkpoints tensor by tensor."""
    found = [newest_valid(recipe.folder.checkpoints) for recipe in (uninterrupted, interrupted)]
    one, other = (
        StoredTensors(checkpoint.folder) for checkpoint in found if checkpoint is not None
    )
    checks = []
    for what in ("model", "optimizer"):
        names = sorted(name for name in {*one.names, *other.names} if name.startswith(f"{what}."))
        different = next(
            (
                name
                for name in names
                if name not in one.names
                or name not in other.names
                or not torch.equal(one[name], other[name])
            ),
            None,
        )
        if not names:
            checks.append(Check(f"{what} state", None, "there is none"))
        elif different is None:
            checks.append(Check(f"{what} state", True, f"{len(names)} tensors equal bit for bit"))
        elif different in one.names and different in other.names:
            largest = float((one[different].double() - other[different].double()).abs().max())
            checks.append(
                Check(f"{what} state", False, f"first in {different}, by up to {largest:.3g}")
            )
        else:
            checks.append(Check(f"{what} state", False, f"{different} is in one of the two only"))
    return checks


def _check_export(uninterrupted: Recipe, interrupted: Recipe) -> Check:
    files = [
        {file.name: sha256_file(file) for file in weight_files(recipe.folder.model)}
        for recipe in (uninterrupted, interrupted)
    ]
    different = next(
        (
            name
            for name in sorted({**files[0], **files[1]})
            if files[0].get(name) != files[1].get(name)
        ),
        None,
    )
    if different is not None:
        return Check("exported model", False, f"{different} differs")
    return Check(
        "exported model",
        True,
        f"{len(files[0])} {'file' if len(files[0]) == 1 else 'files'} equal byte for byte",
    )
