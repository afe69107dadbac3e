"""`ingot bench`: measures how fast the recipe trains on this machine, one row per number of
processes, micro-batch and number format.

Each row is measured by its own processes, so that one that runs out of memory, or is killed for it,
is reported as such. This process only starts them and collects the rows; it imports no torch. Of
the run folder only `reports/bench.json` is written.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ingot
from ingot.base.errors import EXIT_WRONG_INPUT, WrongInput
from ingot.base.processes import preexec_die_with_parent
from ingot.base.progress import Progress, say
from ingot.base.storage import disk_errors, write_atomic
from ingot.config.recipe import Recipe
from ingot.config.sections.training import Train
from ingot.config.shape import batch_plan
from ingot.data.columns.manifest import read_prepared

WARM_UP = 2
"""Steps that are not counted: memory is allocated, kernels are chosen, models are compiled."""
RECIPE_PRECISION = "recipe"
"""The number format that the recipe asks for."""
PRECISIONS: dict[str, Mapping[str, str]] = {
    RECIPE_PRECISION: {},
    "fp32": {"precision.compute": "fp32", "precision.float8": "none"},
    "bf16": {"precision.compute": "bf16", "precision.float8": "none"},
    "float8": {"precision.compute": "bf16", "precision.float8": "tensorwise"},
    "float8-rowwise": {"precision.compute": "bf16", "precision.float8": "rowwise"},
}
"""The number formats that can be measured, and their knobs."""


@dataclass(frozen=True)
class BenchCase:
    """One row: the number of processes, the micro-batch and the number format."""

    devices: int
    micro_batch: int
    precision: str

    @property
    def overrides(self) -> list[str]:
        """The knobs as command-line overrides."""
        knobs = {
            "train.micro_batch": str(self.micro_batch),
            "launch.processes": str(self.devices),
            **PRECISIONS[self.precision],
        }
        return [f"{knob}={value}" for knob, value in knobs.items()]

    def describe(self) -> str:
        form = "" if self.precision == RECIPE_PRECISION else f", {self.precision}"
        return (
            f"{self.devices} {'process' if self.devices == 1 else 'processes'}, micro-batch"
            f" {self.micro_batch}{form}"
        )


def cases_of(
    recipe: Recipe, devices: str | None, micro_batches: str | None, precisions: str | None
) -> list[BenchCase]:
    """The rows for lists such as `1,2,4`; None means what the recipe would run, with micro-batches
    in powers of two.

    Raises:
        WrongInput: a list contains something else than positive numbers, or an unknown format.
    """
    counts = _numbers("--devices", devices) if devices else [recipe.launch.processes]
    formats = [part.strip() for part in precisions.split(",")] if precisions else [RECIPE_PRECISION]
    if unknown := [name for name in formats if name not in PRECISIONS]:
        raise WrongInput(
            f"--precision {unknown[0]} is not known; choose among {', '.join(PRECISIONS)}"
        )
    found = []
    for count in counts:
        sizes = (
            _numbers("--micro-batch", micro_batches)
            if micro_batches
            else _powers_of_two(recipe, count)
        )
        found += [BenchCase(count, size, name) for name in formats for size in sizes]
    return list(dict.fromkeys(found))


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if wrong := [part for part in parts if not part.isdecimal() or int(part) == 0]:
        raise WrongInput(
            f"{option} {text}: `{wrong[0]}` is no positive whole number; give a list such as 1,2,4"
        )
    return sorted({int(part) for part in parts})


def _powers_of_two(recipe: Recipe, devices: int) -> list[int]:
    """Powers of two up to the number of rows of one process, and that number itself."""
    try:
        most = batch_plan(_with_micro_batch(recipe, 1), recipe.parallel, devices).per_rank
    except WrongInput:
        most = recipe.train.global_batch  # each row will report why it is impossible
    return sorted({2**power for power in range(most.bit_length())} | {most})


def _with_micro_batch(recipe: Recipe, micro_batch: int) -> Train:
    return recipe.train.model_copy(update={"micro_batch": micro_batch})


def refusal_reason(recipe: Recipe, case: BenchCase) -> str:
    """Why a row cannot be measured, by the recipe's arithmetic alone; empty if it can be tried."""
    try:
        plan = batch_plan(
            _with_micro_batch(recipe, case.micro_batch), recipe.parallel, case.devices
        )
    except WrongInput as error:
        return str(error)
    if case.micro_batch > plan.per_rank:
        return (
            f"a process has only {plan.per_rank} rows of train.global_batch"
            f" {recipe.train.global_batch}"
        )
    return ""


def skip_reason(case: BenchCase, ran_out: Sequence[BenchCase]) -> str:
    """Why a row need not be tried: an otherwise equal one with a smaller micro-batch ran out of
    memory.
    """
    smaller = [
        one.micro_batch
        for one in ran_out
        if (one.devices, one.precision) == (case.devices, case.precision)
        and one.micro_batch <= case.micro_batch
    ]
    return f"not tried: {min(smaller)} rows at once ran out already" if smaller else ""


FORMULA = (
    "tokens/s are those of text, without padding. Share of peak = positions/s x flops per token /"
    " peak; positions are tokens and padding, which is computed too. Flops per token: 6 for each"
    " weight of a matrix (head included, embedding not), 4 where LoRA keeps it and it has no"
    " gradient, and 12 x layers x heads x head size for each token that attention sees, seq_len / 2"
    " on average. Peak: the best of several large matrix products in the same format and the same"
    " processes, summed over them."
)
KILLED = 128 + signal.SIGKILL
StartCommand = Callable[[BenchCase, Path], tuple[list[str], Mapping[str, str]]]
"""Gives the command that measures a case and writes the row to a file, and its environment."""


def check_data(recipe: Recipe) -> None:
    """Raises WrongInput if there is no prepared data to measure on."""
    try:
        read_prepared(recipe.folder.columns)
    except WrongInput as error:
        raise WrongInput(f"{error}; or measure on made-up rows with --synthetic") from None


def bench(
    recipe: Recipe, cases: Sequence[BenchCase], start: StartCommand, *, steps: int, synthetic: bool
) -> dict[str, Any]:
    """Measure all cases and write `reports/bench.json`; returns its content.

    Raises:
        WrongInput: there is no prepared data, and `synthetic` is not set; or the report cannot be
            written.
    """
    if not synthetic:
        check_data(recipe)
    reports = recipe.folder.reports
    with disk_errors(reports):  # before an hour of measuring is lost for it
        reports.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(prefix=".bench.json.partial-", dir=reports).close()
    tried = sum(not refusal_reason(recipe, case) for case in cases)
    say(
        f"bench: {tried} {'row' if tried == 1 else 'rows'} to measure, {WARM_UP} + {steps} steps"
        " each"
    )
    rows: list[dict[str, Any]] = []
    ran_out: list[BenchCase] = []
    began = time.time()
    with Progress("bench", len(cases), "rows") as progress:
        for done, case in enumerate(cases):
            progress.update(done, now=case.describe())
            row = _untried_row(recipe, case, ran_out) or run_case(case, start)
            if row["status"] == "out of memory":
                ran_out.append(case)
            rows.append(
                {
                    "devices": case.devices,
                    "micro_batch": case.micro_batch,
                    "precision": case.precision,
                    **row,
                }
            )
        progress.update(len(cases))
    _name_formats(rows)
    report = {
        "schema": 1,
        "name": recipe.name,
        "model": recipe.model.source,
        "objective": recipe.objective.kind,
        "seq_len": recipe.data.seq_len,
        "global_batch": recipe.train.global_batch,
        "steps": steps,
        "synthetic": synthetic,
        "time": began,
        "seconds": time.time() - began,
        "ingot": ingot.__version__,
        "formula": FORMULA,
        "rows": rows,
        "best": best_of(cases, rows),
    }
    write_atomic(reports / "bench.json", json.dumps(report, indent=1) + "\n")
    return report


def _untried_row(
    recipe: Recipe, case: BenchCase, ran_out: Sequence[BenchCase]
) -> dict[str, Any] | None:
    """The row of a case that need not be measured; None if it must be."""
    if reason := refusal_reason(recipe, case):
        return {"status": "refused", "reason": reason}
    if reason := skip_reason(case, ran_out):
        return {"status": "out of memory", "reason": reason}
    return None


def _name_formats(rows: Sequence[dict[str, Any]]) -> None:
    """Replace the name `recipe` by the recipe's own number format, which only the measured rows
    know.
    """
    own = next(
        (
            row["compute"]
            for row in rows
            if row["precision"] == RECIPE_PRECISION and "compute" in row
        ),
        RECIPE_PRECISION,
    )
    for row in rows:
        if row["precision"] == RECIPE_PRECISION:
            row["precision"] = own


def run_case(case: BenchCase, start: StartCommand) -> dict[str, Any]:
    """The row that a case's own processes write, or how they ended."""
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as folder:
        into = Path(folder) / "row.json"
        command, environment = start(case, into)
        child = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=preexec_die_with_parent(),
        )
        try:
            _, said = child.communicate()
        finally:
            # Its ranks end with it, as it ends with us.
            child.kill()
            child.wait()
        try:
            row: dict[str, Any] = json.loads(into.read_bytes())
        except (FileNotFoundError, ValueError):
            return _row_of_exit(child.returncode, said.decode(errors="replace"))
        if row["status"] == "measured" and child.returncode:
            return _row_of_exit(child.returncode, said.decode(errors="replace"))
        return row


def _row_of_exit(code: int, said: str) -> dict[str, Any]:
    """The row of processes that ended without writing one."""
    code = 128 - code if code < 0 else code
    if code == KILLED:
        return {
            "status": "out of memory",
            "reason": "killed by the system (SIGKILL), as it does when memory runs out",
        }
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    # Several ranks may report errors; the first one is the cause.
    reason = next(
        (line for line in lines if "error:" in line), lines[-1] if lines else "it said nothing"
    ).rpartition("error: ")[2]
    return {
        "status": "refused" if code == EXIT_WRONG_INPUT else "failed",
        "reason": f"{reason}" if lines else f"ended with exit code {code}, saying nothing",
    }


def best_of(cases: Sequence[BenchCase], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The row with the most tokens per second, and the knobs with which a recipe runs like it; None
    if nothing was measured.
    """
    measured = [
        (float(row["tokens_per_s"]), index)
        for index, row in enumerate(rows)
        if row["status"] == "measured"
    ]
    if not measured:
        return None
    _, index = max(measured, key=lambda one: (one[0], -one[1]))
    return {
        "row": index,
        "told": cases[index].describe(),
        "knobs": cases[index].overrides,
        "tokens_per_s": rows[index]["tokens_per_s"],
    }
