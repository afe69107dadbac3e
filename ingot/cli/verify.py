"""`ingot verify ...`: proofs on the user's own recipe, one table each; exit code 1 if one fails."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.base.errors import EXIT_DONE, EXIT_FAILED, WrongInput
from ingot.base.progress import say
from ingot.cli.completion import complete_arguments
from ingot.cli.options import AsJson, Recipes
from ingot.cli.output import print_json

if TYPE_CHECKING:
    from ingot.verify.layout.proof import LayoutProof, LayoutResult
    from ingot.verify.proof import Proof

verify = typer.Typer(
    no_args_is_help=True,
    help="Prove things on your own recipe: tokenizer, data, export, resume, layout.",
)


@verify.command(epilog="Example: ingot verify tokenizer quickstart")
def tokenizer(recipe: Recipes, as_json: AsJson = False) -> int:
    """Fast encoders against the reference on your documents, round trip, special tokens."""
    from ingot.config.load import read_recipe
    from ingot.verify.tokenizer import verify_tokenizer

    return _shown("tokenizer", verify_tokenizer(read_recipe(recipe)), as_json=as_json)


@verify.command(epilog="Example: ingot verify data quickstart")
def data(recipe: Recipes, as_json: AsJson = False) -> int:
    """Every checksum and count of the ingested and prepared data."""
    from ingot.config.load import read_recipe
    from ingot.pipeline.incremental import check_data_is_current
    from ingot.pipeline.steps import step_named
    from ingot.verify.data import verify_data

    asked = read_recipe(recipe)
    check_data_is_current(step_named("train"), asked)
    return _shown("data", verify_data(asked), as_json=as_json)


@verify.command(epilog="Example: ingot verify export quickstart")
def export(recipe: Recipes, as_json: AsJson = False) -> int:
    """The exported model of a trained run against its checkpoint, transformers, PEFT and the
    server, token by token.
    """
    from ingot.config.load import read_recipe
    from ingot.verify.export.proof import verify_export

    return _shown("export", verify_export(read_recipe(recipe)), as_json=as_json)


@verify.command(epilog="Example: ingot verify resume quickstart")
def resume(recipe: Recipes, as_json: AsJson = False) -> int:
    """A few steps of the recipe in one go, against the same killed twice and resumed: metrics,
    weights, optimizer, bit for bit.

    Needs prepared data. Trains on this machine as `ingot train` does, in a folder of its own inside
    the run folder, which goes afterwards.
    """
    from ingot.config.load import read_recipe
    from ingot.verify.resume import verify_resume

    return _shown("resume", verify_resume(read_recipe(recipe)), as_json=as_json)


@verify.command(
    epilog=(
        "Example: ingot verify layout quickstart --layouts 'shard=2,tensor=2;pipeline=2,virtual=2'"
    )
)
def layout(
    recipe: Recipes,
    layouts: Annotated[
        str | None,
        typer.Option(
            "--layouts",
            metavar="KNOB=N,...;...",
            help="Layouts to try, apart by `;`, each as knobs of `parallel` (and recompute=full). "
            "Without it: the recipe's own on at most 8 processes, each mode alone, and the pairs of"
            " those that the recipe uses.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """The recipe made small, trained in many layouts on this CPU: losses, gradient norms and
    weights against one process.

    Needs prepared data. Degrees of the recipe's own layout are divided until 8 processes suffice;
    `auto` counts as 2.
    """
    from ingot.config.load import read_recipe
    from ingot.verify.layout.proof import verify_layout

    return _compared(verify_layout(read_recipe(recipe), layouts), as_json=as_json)


def _compared(proof: LayoutProof, *, as_json: bool) -> int:
    """Print the table on stdout; 0 if every possible layout matches one process, the recipe's own
    among them.
    """
    if as_json:
        layouts = [
            {
                "layout": one.layout.name,
                "processes": one.layout.processes,
                "holds": one.holds,
                "difference": one.difference,
                "summary": one.summary,
            }
            for one in proof.findings
        ]
        print_json("verify layout", title=proof.title, holds=proof.holds, layouts=layouts)
        return EXIT_DONE if proof.holds else EXIT_FAILED
    from rich.table import Table
    from rich.text import Text

    from ingot.base.console import console

    table = Table(
        "layout",
        "processes",
        "loss",
        "gradient norm",
        "weights",
        "share of weights",
        "",
        title=proof.title,
        title_justify="left",
    )
    for one in proof.findings:
        table.add_row(
            Text(one.layout.name),
            str(one.layout.processes),
            *_differences(one),
            Text(*MARKS[one.holds]),
        )
    console().print(table)
    for one in proof.findings:
        if one.holds is None:
            print(f"no case: {one.summary}")
    print(f"{proof.title}: {_verdict(proof)}")
    return EXIT_DONE if proof.holds else EXIT_FAILED


def _verdict(proof: LayoutProof) -> str:
    failed = [one for one in proof.findings if one.holds is False]
    tried = sum(one.holds is not None for one in proof.findings)
    if failed:
        return (
            f"{len(failed)} of {tried} layouts differ from one process; the first is"
            f" {failed[0].summary}"
        )
    if proof.own_is_missing:
        return (
            "the recipe's own layout could not be tried with a small model, and is not proved; the"
            " other layouts say nothing of it"
        )
    if not tried:
        return "not one of these layouts can be"
    return f"all {tried} layouts equal one process"


def _differences(one: LayoutResult) -> list[str]:
    """The differences from one process: absolute for the loss (nats), relative for the others; and
    the share of all weights that a rank holds.
    """
    found = one.difference
    return (
        ["", "", "", ""]
        if found is None
        else [
            f"{found.loss:.1e}",
            f"{found.norm:.1e}",
            f"{found.weights:.1e}",
            f"{found.share:.2f}",
        ]
    )


def _shown(verb: str, proof: Proof, *, as_json: bool) -> int:
    """Print the table on stdout; 0 if the proof holds."""
    if as_json:
        print_json(f"verify {verb}", title=proof.title, holds=proof.holds, checks=proof.checks)
        return EXIT_DONE if proof.holds else EXIT_FAILED
    from rich.table import Table
    from rich.text import Text

    from ingot.base.console import console

    table = Table("check", "", "what was found", title=proof.title, title_justify="left")
    for check in proof.checks:
        table.add_row(Text(check.what), Text(*MARKS[check.passed]), Text(check.detail))
    console().print(table)
    failed = sum(check.passed is False for check in proof.checks)
    tried = sum(check.passed is not None for check in proof.checks)
    said = f"{failed} of {tried} checks failed" if failed else f"all {tried} checks hold"
    none = len(proof.checks) - tried
    print(f"{proof.title}: {said}" + (f", {none} had no case" if none else ""))
    return EXIT_DONE if proof.holds else EXIT_FAILED


MARKS = {True: ("holds", "green"), False: ("FAILS", "bold red"), None: ("no case", "dim")}


if TYPE_CHECKING:
    from ingot.verify.bench import BenchCase

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE... KEY=VALUE...",
        autocompletion=complete_arguments,
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
BenchAsJson = Annotated[
    bool, typer.Option("--json", help="Print reports/bench.json rather than a table.")
]
Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Measure this device for `ingot plan`, in about a minute; takes no recipe. With"
        " --devices N, as N processes.",
    ),
]
Into = Annotated[Path | None, typer.Option("--into", hidden=True)]


def bench(
    arguments: Arguments = None,
    micro_batch: Sizes = None,
    devices: Devices = None,
    precision: Formats = None,
    steps: Steps = 4,
    synthetic: Synthetic = False,
    as_json: BenchAsJson = False,
    calibrate: Calibrate = False,
    into: Into = None,
) -> int:
    """Tokens a second, share of the peak and memory, by number of processes, micro-batch and number
    format.
    """
    from ingot.config.load import read_recipe

    if calibrate:
        return _calibrate(arguments, devices, into)
    if not arguments:
        raise WrongInput(
            "bench needs a recipe, such as quickstart; or --calibrate, which measures"
            " this device for `ingot plan`"
        )
    recipe = read_recipe(arguments)
    if into is not None:
        from ingot.verify.bench_row import measure_row

        measure_row(recipe, steps, into, synthetic=synthetic)
        return EXIT_DONE
    from ingot.base.console import console
    from ingot.report.bench import show_bench, write_bench_page
    from ingot.verify.bench import bench as measure
    from ingot.verify.bench import cases_of

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


def _calibrate(arguments: Sequence[str] | None, devices: str | None, into: Path | None) -> int:
    """Measure this device and store what was found. `into` marks one of several processes."""
    if arguments or (devices is not None and not (devices.isdecimal() and int(devices) > 0)):
        raise WrongInput(
            "bench --calibrate takes no recipe, and of --devices one number of processes; give"
            " `ingot bench --calibrate --devices 2`"
        )
    if devices is not None and int(devices) > 1 and into is None:
        from ingot.launch.job import Job
        from ingot.launch.places.local import foreground

        argv = ("bench", "--calibrate", "--into", "coefficients")
        return foreground(Job("calibrate", argv, int(devices))).code
    from ingot.base.environment import ranks
    from ingot.plan.devices.calibrate import calibrate
    from ingot.plan.devices.coefficients import save

    found = calibrate()
    if ranks().rank == 0:
        rates = ", ".join(
            f"{dtype} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in found.peak_flops.items()
        )
        say(f"calibrate: {found.title}: {rates}; stored in {save(found)}")
    return EXIT_DONE


def _child(
    case: BenchCase, row: Path, arguments: Sequence[str], options: Sequence[str]
) -> tuple[list[str], Mapping[str, str]]:
    """The command that measures one row, through a launcher if it has several processes, and its
    environment.
    """
    from ingot.launch.job import Job
    from ingot.launch.node.ranks import environment
    from ingot.launch.places.local import command

    job = Job(
        "bench", ("bench", *arguments, *case.overrides, *options, "--into", str(row)), case.devices
    )
    return command(job), {**os.environ, **environment(job)}
