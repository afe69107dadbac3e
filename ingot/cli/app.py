"""The verbs of `ingot`. Each documents itself and imports its room when called, `--help` none."""

from __future__ import annotations

import copy
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from typer.models import CommandInfo, TyperInfo

import ingot
from ingot.base.errors import leave
from ingot.base.lazy import importing
from ingot.base.openfiles import raise_open_file_limit
from ingot.base.progress import outlive_reader
from ingot.cli.carry import export, import_, push
from ingot.cli.cloud import images, submit
from ingot.cli.completion import completion
from ingot.cli.guard import guarded, listen_to_signals, split_debug, write_any_text
from ingot.cli.launch import launch
from ingot.cli.options import Again, AsJson, DryRun, Fresh, Recipes
from ingot.cli.output import Overview
from ingot.cli.plan import plan
from ingot.cli.recipes import init, new, recipes
from ingot.cli.show import adopt, show, ui
from ingot.cli.verify import bench, verify

WORK, RESULT, LOOK = "From text to a model", "The model at work", "Looking and asking"

app = typer.Typer(
    name="ingot",
    cls=Overview,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Trains large language models end to end: raw text in, a served model out.",
    epilog="Start with: ingot run quickstart",
)

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


def main() -> None:
    """The entry point: turns any exception into one line and an exit code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun starts its ranks in sessions of their own, where they survive if torchrun itself
        # is killed. Ranks started by ingot are tied to their parent at the start.
        from ingot.base.processes import die_with_parent

        die_with_parent(os.getppid(), signal.SIGKILL)
    write_any_text()
    outlive_reader()
    raise_open_file_limit()
    debug, arguments = split_debug(sys.argv[1:])
    listen_to_signals()
    code = guarded(
        lambda: command(*arguments)(args=arguments, prog_name="ingot", standalone_mode=False),
        debug=debug,
    )
    # The memory of a rank that failed is freed once its GPU is idle, which a collective that others
    # have begun may keep it from for ever.
    leave(code, at_once=code != 0 and os.environ.get("WORLD_SIZE", "1") != "1")


@functools.cache
def command(*arguments: str) -> Callable[..., int | None]:
    """The command line, made of all verbs and their options; or of the verb alone that `arguments`
    name first, as looking up the options of all takes as long as many a verb.
    """
    words = [argument for argument in arguments if argument != "--debug"]
    verbs: list[CommandInfo | TyperInfo] = [*app.registered_commands, *app.registered_groups]
    for made in verbs:
        function = getattr(made.callback, "__name__", "")
        if words and words[0] == (made.name or typer.main.get_command_name(function)):
            alone = copy.copy(app)
            alone.registered_commands = [made] if isinstance(made, CommandInfo) else []
            alone.registered_groups = [made] if isinstance(made, TyperInfo) else []
            return typer.main.get_command(alone)
    return typer.main.get_command(app)


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


@app.command(rich_help_panel=WORK, epilog="Example: ingot run quickstart train.steps=100")
def run(
    context: typer.Context,
    arguments: Recipes,
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
    checked: Annotated[bool, typer.Option("--checked", hidden=True)] = False,
    as_json: AsJson = False,
) -> int:
    """Do all steps in order (ingest to serve), skipping what is done and unchanged."""
    with importing():
        from ingot.cli.verbs import do_all

    return do_all(arguments, fresh=fresh, debug=context.obj, checked=checked, as_json=as_json)


def train(
    context: typer.Context, arguments: Recipes, fresh: Fresh = False, as_json: AsJson = False
) -> int:
    return _do_step("train", context, arguments, fresh, as_json)


def _step(verb: str) -> Callable[..., int]:
    def step(
        context: typer.Context, arguments: Recipes, again: Again = False, as_json: AsJson = False
    ) -> int:
        return _do_step(verb, context, arguments, again, as_json)

    return step


def _do_step(
    verb: str, context: typer.Context, arguments: list[str], again: bool, as_json: bool
) -> int:
    with importing():
        from ingot.cli.verbs import do_step

    return do_step(verb, arguments, again=again, debug=context.obj, as_json=as_json)


STEPS = {
    "ingest": ("Read the sources into raw documents (Parquet).", "quickstart"),
    "prepare": (
        "Train or fetch the tokenizer, and turn documents into columns of tokens.",
        "quickstart tokenizer.vocab_size=8192",
    ),
    "train": (
        "Train, or go on from the newest checkpoint, and export the model folder.",
        "quickstart train.optimizer.lr=3e-4 --fresh",
    ),
    "evaluate": (
        "Measure a model folder: a table on stdout, the report on disk.",
        "quickstart evaluate.model=path/to/model",
    ),
    "gate": (
        "Is the model better than the live one? Exit code 0: deploy, 3: keep.",
        "quickstart gate.margin=0.01",
    ),
    "register": (
        "Keep the model as a new version, and make it live if the gate said so.",
        "quickstart",
    ),
}
"""What each step does, and the arguments of its example."""
for _verb, (_help, _example) in STEPS.items():
    app.command(
        _verb,
        rich_help_panel=WORK,
        help=_help,
        epilog=f"Example: ingot {_verb} {_example}",
    )(train if _verb == "train" else _step(_verb))


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
        typer.Option(
            "--version",
            help="The version to make live; the newest when left out, unless its gate refused it.",
        ),
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
    as_json: AsJson = False,
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
        as_json=as_json,
    )


@app.command(rich_help_panel=RESULT, epilog="Example: ingot serve runs/quickstart serve.port=8080")
def serve(
    target: Target,
    settings: Settings = None,
    dry_run: DryRun = False,
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
    as_json: AsJson = False,
) -> int:
    """One answer: only the completion on stdout."""
    from ingot.cli.model import predict_once

    return predict_once(target, prompt, settings or [], as_json=as_json)


@app.command(rich_help_panel=LOOK, epilog="Example: ingot explain train.optimizer.lr")
def explain(
    knob: Annotated[
        str,
        typer.Argument(
            metavar="KNOB", help="Dotted name of a knob or a section.", show_default=False
        ),
    ],
    as_json: AsJson = False,
) -> int:
    """What a knob means, its type and its default."""
    from ingot.cli.show import explain_knob

    return explain_knob(knob, as_json=as_json)


@app.command(rich_help_panel=LOOK, epilog="Example: ingot doctor --cloud quickstart")
def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE... KEY=VALUE...", help="For --cloud.", show_default=False),
    ] = None,
    cloud: Annotated[
        bool,
        typer.Option(
            "--cloud",
            help="Ask Google Cloud for all that the recipe needs, rather than this machine.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """What this machine has, what is missing, and the command that gets it."""
    from ingot.cli.doctor import examine, examine_cloud

    if arguments and not cloud:
        raise typer.BadParameter("a recipe is for --cloud")
    if cloud:
        return examine_cloud(arguments or [], as_json=as_json)
    return examine(as_json=as_json)


app.command(
    name="export",
    rich_help_panel=RESULT,
    epilog="Example: ingot export runs/quickstart exported/quickstart",
)(export)
app.command(
    name="import",
    rich_help_panel=RESULT,
    epilog="Example: ingot import hf:HuggingFaceTB/SmolLM2-135M models/smollm2",
)(import_)
app.command(
    rich_help_panel=RESULT, epilog="Example: ingot push runs/quickstart hf:ORG/NAME --dry-run"
)(push)
# Last, so that help lists the verbs of a run first.
app.command(
    rich_help_panel=WORK,
    epilog="Example: ingot submit quickstart places/vertex train.global_batch=8 --dry-run",
)(submit)
app.command(
    rich_help_panel=WORK, epilog="Example: ingot adopt old/config.yaml old/.env > recipe.yaml"
)(adopt)
app.command(
    rich_help_panel=LOOK,
    epilog="Example: ingot plan t5_xxl places/gce_2x16",
)(plan)
app.command(
    rich_help_panel=LOOK,
    epilog="Example: ingot bench quickstart --micro-batch 1,2,4 --precision fp32,bf16",
)(bench)
app.command(rich_help_panel=LOOK, epilog="Example: ingot ui runs --port 8080")(ui)
app.command(rich_help_panel=LOOK, epilog="Example: ingot recipes --json")(recipes)
app.command(rich_help_panel=LOOK, epilog="Example: ingot init quickstart my/recipes")(init)
app.command(
    rich_help_panel=LOOK,
    epilog="Example: ingot new --data my.jsonl --for adapt --machine gpu",
)(new)
app.command(rich_help_panel=LOOK, epilog="Example: ingot completion bash >> ~/.bashrc")(completion)
app.add_typer(launch, name="launch", rich_help_panel=WORK)
app.add_typer(images, name="images", rich_help_panel=WORK)
app.add_typer(show, name="show", rich_help_panel=LOOK)
app.add_typer(verify, name="verify", rich_help_panel=LOOK)
