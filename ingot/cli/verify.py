"""`ingot verify ...`: proofs on the user's own recipe, one table each; exit code 1 where one does not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ingot.verify.proof import Proof

verify = typer.Typer(no_args_is_help=True, help="Prove things on your own recipe: tokenizer, data, export.")

Recipes = Annotated[
    list[str], typer.Argument(metavar="RECIPE.yaml... KEY=VALUE...", help="Recipe files and overrides; later ones win.", show_default=False)
]


@verify.command(epilog="Example: ingot verify tokenizer recipes/quickstart.yaml")
def tokenizer(recipe: Recipes) -> int:
    """Fast encoders against the reference on your documents, round trip, special tokens."""
    from ingot.cli.arguments import read_recipe
    from ingot.verify.tokenizer import verify_tokenizer

    return _shown(verify_tokenizer(read_recipe(recipe)))


@verify.command(epilog="Example: ingot verify data recipes/quickstart.yaml")
def data(recipe: Recipes) -> int:
    """Every checksum and count of the ingested and prepared data."""
    from ingot.cli.arguments import read_recipe
    from ingot.verify.data import verify_data

    return _shown(verify_data(read_recipe(recipe)))


@verify.command(epilog="Example: ingot verify export recipes/quickstart.yaml")
def export(recipe: Recipes) -> int:
    """The exported model of a trained run against its checkpoint, transformers, PEFT and the server, token by token."""
    from ingot.cli.arguments import read_recipe
    from ingot.verify.export import verify_export

    return _shown(verify_export(read_recipe(recipe)))


def _shown(proof: Proof) -> int:
    """The table on stdout; 0 where the proof holds."""
    from rich.table import Table
    from rich.text import Text

    from ingot.base.errors import EXIT_DONE, EXIT_FAILED
    from ingot.cli.look import console

    table = Table("check", "", "what was found", title=proof.title, title_justify="left")
    for check in proof.checks:
        table.add_row(Text(check.what), MARKS[check.passed], Text(check.detail))
    console().print(table)
    failed = sum(check.passed is False for check in proof.checks)
    print(f"{proof.title}: " + (f"{failed} of {len(proof.checks)} checks failed" if failed else f"all {len(proof.checks)} checks hold"))
    return EXIT_DONE if proof.holds else EXIT_FAILED


MARKS = {True: "[green]holds[/]", False: "[bold red]FAILS[/]", None: "[dim]no case[/]"}
