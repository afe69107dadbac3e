"""`ingot images build NAME...`: container images by Cloud Build, with a run's model and data in
them where that is wanted. `ingot submit`: the recipe as a pipeline of Vertex AI, watched from here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.base.errors import WrongInput
from ingot.cli.options import Recipes

if TYPE_CHECKING:
    from ingot.cloud.images import ImageKind
    from ingot.config.recipe import Recipe

images = typer.Typer(no_args_is_help=True, help="Container images for training, Spark and serving.")

CUDA, NO_CUDA = "cu126", "cpu"
KEPT = (
    "registered versions keep the image that they were registered with; to serve with this one, set"
    " serve.image to NAME@sha256:..., and register again"
)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)


@images.callback()
def _group() -> None:
    """So that the only command of the group keeps its name."""


@images.command(
    "build",
    epilog=(
        "Example: ingot images build train serve quickstart cloud.repository=ingot --with model"
    ),
)
def build(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME... [RECIPE...] [KEY=VALUE...]",
            help="train, spark, serve; recipe files and overrides.",
            show_default=False,
        ),
    ],
    with_: Annotated[
        str, typer.Option("--with", metavar="model,data", help="What of the run to put in as well.")
    ] = "",
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", help="A further tag, beside the commit and `latest`."),
    ] = None,
    torch: Annotated[
        str | None,
        typer.Option(
            "--torch",
            help="Build of torch: cpu, cu126, cu130; by the recipe's machines if left out.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be asked for, and send nothing.")
    ] = False,
) -> int:
    """Build images in the cloud, and print each with its digest."""
    from ingot.base.progress import say
    from ingot.base.remote.bucket import open_bucket
    from ingot.cloud import builds
    from ingot.cloud.build_inputs import bake, ingot_source, parts_by_image
    from ingot.cloud.clients import GoogleClients
    from ingot.cloud.images import untagged_name

    kinds, recipe = _kinds_and_recipe(arguments)
    google, tags = GoogleClients(recipe.cloud), _tags(tag or [])
    parts = parts_by_image(kinds, _listed(with_))
    _ = [untagged_name(recipe.cloud, kind) for kind in kinds]  # before anything is sent
    made = ingot_source()
    if made.unsaved:
        say(
            f"warning: {made.unsaved} changed or new files are not in the images; commit them if"
            " they should be"
        )
    name = f"{builds.FOLDER}/source-{made.sha256[:16]}.tgz"
    if not dry_run:
        open_bucket(google.bucket).put(name, made.data, generation=0)
    request = builds.BuildRequest(
        kinds,
        made.revision,
        name,
        tags,
        {kind: torch or _torch(recipe, kind) for kind in kinds if kind != "spark"},
        bake(google, recipe, parts, send=not dry_run),
    )
    if dry_run:
        print(builds.render_build(google, request), end="")
        return 0
    for image in builds.run_build(google, request):
        print(f"{image.name} {image.digest}")
    if "serve" in kinds and recipe.registry.kind == "vertex":
        say(f"note: {KEPT}")
    return 0


def _kinds_and_recipe(arguments: Sequence[str]) -> tuple[tuple[ImageKind, ...], Recipe]:
    """The named image kinds, and the recipe; without a recipe file, environment and overrides are
    enough.
    """
    from ingot.cli.arguments import settings_without_recipe
    from ingot.cloud.images import KINDS
    from ingot.config.load import read_recipe, split_arguments
    from ingot.config.shipped import names

    kinds = tuple(kind for kind in KINDS if kind in arguments)
    rest = [argument for argument in arguments if argument not in KINDS]
    known = names()
    if wrong := [each for each in rest if each not in known and not re.search(r"[=./]", each)]:
        raise WrongInput(f"{wrong[0]} is no image of ours; give one or more of {', '.join(KINDS)}")
    if not kinds:
        raise WrongInput(f"no image is named; give one or more of {', '.join(KINDS)}")
    return kinds, read_recipe(rest) if split_arguments(rest)[0] else settings_without_recipe(rest)


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _tags(tags: Sequence[str]) -> tuple[str, ...]:
    if wrong := [tag for tag in tags if not _TAG.fullmatch(tag)]:
        raise WrongInput(
            f"--tag {wrong[0]!r} cannot be a tag; use up to 128 letters, digits, dots, hyphens and"
            " underscores, and begin with no dot or hyphen"
        )
    return tuple(tags)


def _torch(recipe: Recipe, kind: ImageKind) -> str:
    """The build of torch: training images are built for GPUs and also run without one; serving
    images without GPU support are gigabytes smaller.
    """
    from ingot.cloud.machines import accelerators_of

    return CUDA if kind == "train" or accelerators_of(recipe.serve.machine)[1] else NO_CUDA


DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the specification and the request, and send nothing."),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="CRON",
        help='Run it again and again, such as "0 3 * * 1"; in the place of an earlier schedule.',
    ),
]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait/--no-wait", help="Tell the steps as they begin and end, until all is over."
    ),
]
Cancel = Annotated[
    bool, typer.Option("--cancel", help="End the pipeline of this recipe that runs.")
]


def submit(
    arguments: Recipes,
    dry_run: DryRun = False,
    schedule: Schedule = None,
    wait: Wait = True,
    cancel: Cancel = False,
) -> int:
    """Send the whole pipeline to Vertex AI, print its page, and follow it; the same command again
    follows what runs already.
    """
    from ingot.base.progress import say
    from ingot.cli.check.recipe import check, read_checked
    from ingot.cli.plan import tell_dry_run
    from ingot.pipeline import submit as pipeline
    from ingot.pipeline.plan import VERBS

    recipe, values = read_checked(arguments, "submit", VERBS, submitted=True)
    if cancel:
        for id in pipeline.cancel(recipe):
            print(id)
        return 0
    check(recipe, values, VERBS, submitted=True, dry_run=dry_run)
    submission = pipeline.prepare_submission(recipe)
    if dry_run:
        print(pipeline.render_submission(submission, schedule), end="", flush=True)
        tell_dry_run(recipe, values)
        return 0
    if schedule is not None:
        made = pipeline.schedule(recipe, submission, schedule)
        print(made.name)
        return 0
    id, is_old = pipeline.submit(recipe, submission)
    say(f"the pipeline {id} runs already" if is_old else f"submitted as {id}")
    try:
        print(submission.link(id), flush=True)
        if wait:
            pipeline.follow(submission, id, recipe.folder.root)
    except BaseException as stop:
        if not isinstance(stop, Exception):
            say("the pipeline goes on; the same command follows it, and with --cancel ends it")
        raise
    return 0
