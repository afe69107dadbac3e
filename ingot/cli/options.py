"""Arguments and options that several verbs take."""

from __future__ import annotations

from typing import Annotated

import typer

from ingot.cli.completion import complete_arguments

Recipes = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE... KEY=VALUE...",
        help="Recipe files, or names of ingot's own, and overrides; later ones win.",
        show_default=False,
        autocompletion=complete_arguments,
    ),
]
RunOrRecipe = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN|RECIPE... KEY=VALUE...",
        help="A run folder, or the recipe that makes it, with its overrides.",
        show_default=False,
    ),
]
Again = Annotated[bool, typer.Option("--again", help="Do it although nothing changed.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Train from the first step; old checkpoints are set aside.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")
]
