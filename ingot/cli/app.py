"""The verbs of `ingot`. Each function documents its verb and imports its room when called; `ingot
--help` imports none of them.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

import ingot
from ingot.base.errors import leave
from ingot.cli.cloud import images, submit
from ingot.cli.guard import guarded, listen_to_signals, split_debug
from ingot.cli.launch import launch
from ingot.cli.plan import plan
from ingot.cli.show import adopt, show
from ingot.cli.verify import bench, verify

WORK, RESULT, LOOK = "From text to a model", "The model at work", "Looking and asking"

app = typer.Typer(
    name="ingot",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Trains large language models end to end: raw text in, a served model out.",
    epilog="Start with: ingot run recipes/quickstart.yaml",
)

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE.yaml... KEY=VALUE...",
        help="Recipe files and overrides; later ones win.",
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE...", help="Settings and overrides.", show_default=False),
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="Model folder, run folder, recipe, registered name (NAME or NAME@v2), or URL.",
        show_default=False,
    ),
]
Destination = Annotated[
    str, typer.Argument(metavar="DST", help="The folder to write.", show_default=False)
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST where it exists.")]
Again = Annotated[bool, typer.Option("--again", help="Do it although nothing changed.")]


def main() -> None:
    """The entry point: turns any exception into one line and an exit code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun starts its ranks in sessions of their own, where they survive if torchrun itself
        # is killed. Ranks started by ingot are tied to their parent at the start.
        from ingot.base.processes import die_with_parent

        die_with_parent(os.getppid(), signal.SIGKILL)
    debug, arguments = split_debug(sys.argv[1:])
    listen_to_signals()
    leave(guarded(lambda: app(arguments, prog_name="ingot", standalone_mode=False), debug=debug))


@app.callback()
def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=lambda asked: _version(asked),
            help="Show the version.",
        ),
    ] = False,
) -> None:
    context.obj = debug


def _version(asked: bool) -> None:
    if asked:
        print(ingot.__version__)
        raise typer.Exit


@app.command(
    rich_help_panel=WORK, epilog="Example: ingot run recipes/quickstart.yaml train.steps=100"
)
def run(
    context: typer.Context,
    arguments: Arguments,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help=(
                "Train from the first step where training is to be done; old checkpoints are set"
                " aside."
            ),
        ),
    ] = False,
) -> int:
    """Do all steps in order (ingest to serve), skipping what is done and unchanged."""
    from ingot.cli.verbs import do_all

    return do_all(arguments, fresh=fresh, debug=context.obj)


@app.command(rich_help_panel=WORK, epilog="Example: ingot ingest recipes/quickstart.yaml")
def ingest(context: typer.Context, arguments: Arguments, again: Again = False) -> int:
    """Read the sources into raw documents (Parquet)."""
    return _step(context, "ingest", arguments, again)


@app.command(
    rich_help_panel=WORK,
    epilog="Example: ingot prepare recipes/quickstart.yaml tokenizer.vocab_size=8192",
)
def prepare(context: typer.Context, arguments: Arguments, again: Again = False) -> int:
    """Train or fetch the tokenizer, and turn documents into columns of tokens."""
    return _step(context, "prepare", arguments, again)


@app.command(
    rich_help_panel=WORK,
    epilog="Example: ingot train recipes/quickstart.yaml train.optimizer.lr=3e-4 --fresh",
)
def train(
    context: typer.Context,
    arguments: Arguments,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start from the first step; old checkpoints are set aside."),
    ] = False,
) -> int:
    """Train, or go on from the newest checkpoint, and export the model folder."""
    return _step(context, "train", arguments, fresh)


@app.command(
    rich_help_panel=WORK,
    epilog="Example: ingot evaluate recipes/quickstart.yaml evaluate.model=path/to/model",
)
def evaluate(context: typer.Context, arguments: Arguments, again: Again = False) -> int:
    """Measure a model folder: a table on stdout, the report on disk."""
    return _step(context, "evaluate", arguments, again)


@app.command(
    rich_help_panel=WORK, epilog="Example: ingot gate recipes/quickstart.yaml gate.margin=0.01"
)
def gate(context: typer.Context, arguments: Arguments, again: Again = False) -> int:
    """Is the model better than the live one? Exit code 0: deploy, 3: keep."""
    return _step(context, "gate", arguments, again)


@app.command(
    rich_help_panel=WORK,
    epilog="Example: ingot register recipes/quickstart.yaml registry.name=python",
)
def register(context: typer.Context, arguments: Arguments, again: Again = False) -> int:
    """Keep the model as a new version, and make it live if the gate said so."""
    return _step(context, "register", arguments, again)


def _step(context: typer.Context, verb: str, arguments: list[str], again: bool) -> int:
    from ingot.cli.verbs import do_step

    return do_step(verb, arguments, again=again, debug=context.obj)


@app.command(rich_help_panel=RESULT, epilog="Example: ingot deploy quickstart --version 2")
def deploy(
    target: Annotated[
        str,
        typer.Argument(
            metavar="NAME|RECIPE.yaml",
            help="A registered name, or the recipe that registers it.",
            show_default=False,
        ),
    ],
    settings: Settings = None,
    version: Annotated[
        int | None,
        typer.Option("--version", help="The version to make live; the newest when left out."),
    ] = None,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Back to the version that was live before.")
    ] = False,
    canary: Annotated[
        int | None,
        typer.Option(
            "--canary",
            metavar="PERCENT",
            help="Of an endpoint's traffic, what the new version gets first.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help=(
                "Compare a prediction of the endpoint with the model folder's before all traffic"
                " moves."
            ),
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done or sent, and do nothing.")
    ] = False,
) -> int:
    """Make a registered version the live one, behind its endpoint where the registry is Vertex
    AI's.
    """
    from ingot.cli.model import deploy_version

    return deploy_version(
        target,
        settings or [],
        version=version,
        rollback=rollback,
        canary=canary,
        verify=verify,
        dry_run=dry_run,
    )


@app.command(rich_help_panel=RESULT, epilog="Example: ingot serve runs/quickstart serve.port=8080")
def serve(
    target: Target,
    settings: Settings = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")
    ] = False,
) -> int:
    """Serve a model over HTTP (OpenAI's routes and Vertex's) until stopped; serve.engine says what
    answers.
    """
    from ingot.cli.model import serve_model

    return serve_model(target, settings or [], dry_run=dry_run)


@app.command(
    rich_help_panel=RESULT,
    epilog='Example: ingot predict runs/quickstart "def main(" max_tokens=40 temperature=0',
)
def predict(
    target: Target,
    prompt: Annotated[str, typer.Argument(help="The text to go on from.", show_default=False)],
    settings: Settings = None,
) -> int:
    """One answer: only the completion on stdout."""
    from ingot.cli.model import predict_once

    return predict_once(target, prompt, settings or [])


@app.command(rich_help_panel=LOOK, epilog="Example: ingot explain train.optimizer.lr")
def explain(
    knob: Annotated[
        str,
        typer.Argument(
            metavar="KNOB", help="Dotted name of a knob or a section.", show_default=False
        ),
    ],
) -> int:
    """What a knob means, its type and its default."""
    from ingot.cli.show import explain_knob

    return explain_knob(knob)


@app.command(rich_help_panel=LOOK, epilog="Example: ingot doctor --cloud recipes/quickstart.yaml")
def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE.yaml... KEY=VALUE...", help="For --cloud.", show_default=False
        ),
    ] = None,
    cloud: Annotated[
        bool,
        typer.Option(
            "--cloud",
            help="Ask Google Cloud for all that the recipe needs, rather than this machine.",
        ),
    ] = False,
) -> int:
    """What this machine has, what is missing, and the command that gets it."""
    from ingot.cli.doctor import examine, examine_cloud

    if arguments and not cloud:
        raise typer.BadParameter("a recipe is for --cloud")
    return examine_cloud(arguments or []) if cloud else examine()


@app.command(
    name="export",
    rich_help_panel=RESULT,
    epilog="Example: ingot export runs/quickstart exported/quickstart",
)
def export_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_FOLDER", help="A run folder or a model folder.", show_default=False
        ),
    ],
    target: Destination,
    layout: Annotated[
        str,
        typer.Option(
            "--format", help="hf, a Hugging Face folder, or peft, the adapter of a LoRA run."
        ),
    ] = "hf",
    overwrite: Overwrite = False,
) -> int:
    """Check every tensor of a model and write it as a Hugging Face folder."""
    from ingot.cli.model import copy_checked

    return copy_checked(source, target, layout, overwrite=overwrite)


@app.command(
    name="import",
    rich_help_panel=RESULT,
    epilog="Example: ingot import hf:HuggingFaceTB/SmolLM2-135M models/smollm2",
)
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="hf:ORG/NAME or a Hugging Face folder.", show_default=False
        ),
    ],
    target: Destination,
    overwrite: Overwrite = False,
) -> int:
    """Check every tensor of somebody's model and write it as a folder of our own; also of one of
    ours that was changed on purpose.
    """
    from ingot.cli.model import copy_checked

    return copy_checked(source, target, "hf", overwrite=overwrite, accept=True)


# Last, so that help lists the verbs of a run first.
app.command(rich_help_panel=WORK, epilog="Example: ingot submit recipes/quickstart.yaml --dry-run")(
    submit
)


app.command(
    rich_help_panel=WORK, epilog="Example: ingot adopt old/config.yaml old/.env > recipe.yaml"
)(adopt)
app.command(
    rich_help_panel=LOOK,
    epilog="Example: ingot plan recipes/t5_xxl.yaml recipes/places/gce_2x16.yaml",
)(plan)
app.command(
    rich_help_panel=LOOK,
    epilog="Example: ingot bench recipes/quickstart.yaml --micro-batch 1,2,4 --precision fp32,bf16",
)(bench)
app.add_typer(launch, name="launch", rich_help_panel=WORK)
app.add_typer(images, name="images", rich_help_panel=WORK)
app.add_typer(show, name="show", rich_help_panel=LOOK)
app.add_typer(verify, name="verify", rich_help_panel=LOOK)
