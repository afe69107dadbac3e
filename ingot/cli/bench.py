"""`ingot bench`: the recipe's own training, measured row by row. The table on stdout; figures and a
plot in `reports/`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.base.errors import EXIT_DONE, EXIT_FAILED
from ingot.base.progress import say

if TYPE_CHECKING:
    from ingot.verify.bench_cases import Case

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE.yaml... KEY=VALUE...",
        help="Recipe files and overrides; later ones win.",
        show_default=False,
    ),
]
Sizes = Annotated[
    str | None,
    typer.Option(
        "--micro-batch",
        metavar="1,2,4",
        help="Rows at once; powers of two up to those of a process.",
        show_default=False,
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="1,2",
        help="Numbers of processes; what the recipe would run with.",
        show_default=False,
    ),
]
Formats = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="fp32,bf16",
        help="fp32, bf16, float8, float8-rowwise; the recipe's own.",
        show_default=False,
    ),
]
Steps = Annotated[
    int,
    typer.Option(
        "--steps", metavar="N", min=1, help="Steps that are counted, after two that are not."
    ),
]
Synthetic = Annotated[
    bool,
    typer.Option(
        "--synthetic", help="Made-up rows and random weights: nothing needs to be prepared."
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print reports/bench.json rather than a table.")
]
Into = Annotated[Path | None, typer.Option("--into", hidden=True)]


def bench(
    arguments: Arguments,
    micro_batch: Sizes = None,
    devices: Devices = None,
    precision: Formats = None,
    steps: Steps = 4,
    synthetic: Synthetic = False,
    as_json: AsJson = False,
    into: Into = None,
) -> int:
    """Tokens a second, share of the peak and memory, by number of processes, micro-batch and number
    format.
    """
    from ingot.cli.arguments import read_recipe

    recipe = read_recipe(arguments)
    if into is not None:
        from ingot.verify.bench_row import measure_row

        measure_row(recipe, steps, into, synthetic=synthetic)
        return EXIT_DONE
    from ingot.cli.look import console
    from ingot.report.bench import show_bench, write_bench_page
    from ingot.verify.bench import bench as measure
    from ingot.verify.bench_cases import cases_of

    cases = cases_of(recipe, devices, micro_batch, precision)
    options = ["--steps", str(steps), *(["--synthetic"] if synthetic else [])]
    report = measure(
        recipe,
        cases,
        lambda case, row: _child(case, row, arguments, options),
        steps=steps,
        synthetic=synthetic,
    )
    page = write_bench_page(recipe.folder)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        show_bench(report, console())
    say(f"bench: the table is in {page.with_suffix('.json')}, with a plot in {page}")
    return EXIT_DONE if report["best"] else EXIT_FAILED


def _child(
    case: Case, row: Path, arguments: Sequence[str], options: Sequence[str]
) -> tuple[list[str], Mapping[str, str]]:
    """The command that measures one row, through a launcher where it has several processes, and its
    environment.
    """
    from ingot.launch.job import Job
    from ingot.launch.local import command
    from ingot.launch.ranks import environment

    job = Job(
        "bench", ("bench", *arguments, *case.overrides, *options, "--into", str(row)), case.devices
    )
    return command(job), {**os.environ, **environment(job)}
