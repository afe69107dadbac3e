"""`ingot bench`: how fast the recipe trains here, a row for each number of processes, micro-batch
and number format.

Each row is measured by processes of its own, so that one that runs out of memory, or is killed for
it, is a row that says so. This process only starts them and collects; it loads no torch. Nothing of
the run folder changes but `reports/bench.json`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ingot
from ingot.base.errors import EXIT_WRONG_INPUT, WrongInput
from ingot.base.processes import tied_to_me
from ingot.base.progress import Progress, say
from ingot.base.storage import write_atomic
from ingot.config.recipe import Recipe
from ingot.data.manifest import read_prepared
from ingot.verify.bench_cases import OWN, WARM_UP, Case, hopeless, refusal

FORMULA = (
    "share of peak = tokens/s x flops per token / peak. Flops per token: 6 for each weight of a"
    " matrix (head included, embedding not) and 12 x layers x heads x head size for each token that"
    " attention sees, seq_len / 2 on average; padding counts as tokens, and with LoRA so do the"
    " gradients of weights that are kept, which nobody computes. Peak: the best of several large"
    " matrix products in the same format and the same processes, summed over them."
)
KILLED = 128 + signal.SIGKILL
Start = Callable[[Case, Path], tuple[list[str], Mapping[str, str]]]
"""The command that measures a case into a file, and its environment."""


def check_data(recipe: Recipe) -> None:
    """Raises WrongInput where nothing was prepared to measure on."""
    try:
        read_prepared(recipe.folder.columns)
    except WrongInput as error:
        raise WrongInput(f"{error}; or measure on made-up rows with --synthetic") from None


def bench(
    recipe: Recipe, cases: Sequence[Case], start: Start, *, steps: int, synthetic: bool
) -> dict[str, Any]:
    """Measure all cases and write `reports/bench.json`; what is in it.

    Raises:
        WrongInput: nothing was prepared, and made-up rows are not asked for.
    """
    if not synthetic:
        check_data(recipe)
    tried = sum(not refusal(recipe, case) for case in cases)
    say(
        f"bench: {tried} {'row' if tried == 1 else 'rows'} to measure, {WARM_UP} + {steps} steps"
        " each"
    )
    rows: list[dict[str, Any]] = []
    ran_out: list[Case] = []
    began = time.time()
    with Progress("bench", len(cases), "rows") as progress:
        for done, case in enumerate(cases):
            progress.update(done, now=case.told())
            row = _without_trying(recipe, case, ran_out) or run_case(case, start)
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
    write_atomic(recipe.folder.reports / "bench.json", json.dumps(report, indent=1) + "\n")
    return report


def _without_trying(recipe: Recipe, case: Case, ran_out: Sequence[Case]) -> dict[str, Any] | None:
    """The row of a case that needs no measurement."""
    if reason := refusal(recipe, case):
        return {"status": "refused", "reason": reason}
    if reason := hopeless(case, ran_out):
        return {"status": "out of memory", "reason": reason}
    return None


def _name_formats(rows: Sequence[dict[str, Any]]) -> None:
    """Say what the recipe's own format is, which only those know that computed in it."""
    own = next(
        (row["compute"] for row in rows if row["precision"] == OWN and "compute" in row), OWN
    )
    for row in rows:
        if row["precision"] == OWN:
            row["precision"] = own


def run_case(case: Case, start: Start) -> dict[str, Any]:
    """The row that processes of its own make of a case, or how they ended."""
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
            preexec_fn=tied_to_me(),
        )
        try:
            _, said = child.communicate()
        finally:
            # Its ranks are tied to it as it is to us.
            child.kill()
            child.wait()
        try:
            row: dict[str, Any] = json.loads(into.read_bytes())
        except (FileNotFoundError, ValueError):
            return _ended(child.returncode, said.decode(errors="replace"))
        if row["status"] == "measured" and child.returncode:
            return _ended(child.returncode, said.decode(errors="replace"))
        return row


def _ended(code: int, said: str) -> dict[str, Any]:
    """The row of processes that ended without one."""
    code = 128 - code if code < 0 else code
    if code == KILLED:
        return {
            "status": "out of memory",
            "reason": "killed by the system (SIGKILL), as it does when memory runs out",
        }
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    # With several ranks each may complain; the first to do so is the cause.
    reason = next(
        (line for line in lines if "error:" in line), lines[-1] if lines else "it said nothing"
    ).rpartition("error: ")[2]
    return {
        "status": "refused" if code == EXIT_WRONG_INPUT else "failed",
        "reason": f"{reason}" if lines else f"ended with exit code {code}, saying nothing",
    }


def best_of(cases: Sequence[Case], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The row with the most tokens a second, and the knobs that make a recipe run like it; None
    where nothing was measured.
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
        "told": cases[index].told(),
        "knobs": cases[index].overrides,
        "tokens_per_s": rows[index]["tokens_per_s"],
    }
