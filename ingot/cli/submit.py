"""`ingot submit`: the recipe as a pipeline of Vertex AI, watched from here."""

from __future__ import annotations

from typing import Annotated

import typer

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE.yaml... KEY=VALUE...",
        help="Recipe files and overrides; later ones win.",
        show_default=False,
    ),
]
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
    arguments: Arguments,
    dry_run: DryRun = False,
    schedule: Schedule = None,
    wait: Wait = True,
    cancel: Cancel = False,
) -> int:
    """Send the whole pipeline to Vertex AI, print its page, and follow it; the same command again
    follows what runs already.
    """
    from ingot.base.progress import say
    from ingot.cli.arguments import read_recipe
    from ingot.pipeline import submit as pipeline

    recipe = read_recipe(arguments)
    if cancel:
        for id in pipeline.cancel(recipe):
            print(id)
        return 0
    submission = pipeline.prepared(recipe)
    if dry_run:
        print(pipeline.rendered(submission, schedule), end="")
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
