"""`ingot show ...`, `ingot explain` and `ingot adopt`: information printed in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

show = typer.Typer(no_args_is_help=True, help="Show a recipe, its knobs, data, runs and models.")

Recipes = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE.yaml... KEY=VALUE...",
        help="Recipe files and overrides; later ones win.",
        show_default=False,
    ),
]
RunOrRecipe = Annotated[
    str,
    typer.Argument(
        metavar="RUN|RECIPE.yaml",
        help="A run folder, or the recipe that makes it.",
        show_default=False,
    ),
]


@show.command(epilog="Example: ingot show config recipes/quickstart.yaml train.steps=100")
def config(recipe: Recipes) -> int:
    """The whole resolved recipe, every default included, as YAML."""
    from ingot.cli.arguments import read_recipe
    from ingot.config.load import dump_recipe

    print(dump_recipe(read_recipe(recipe)), end="")
    return 0


@show.command(epilog="Example: ingot show knobs | grep lr")
def knobs() -> int:
    """Every knob with its default and type, one a line."""
    from ingot.config.knobs import knobs as all_knobs

    for knob in all_knobs():
        print(f"{knob.path:<44} {knob.default:<28} {knob.type}")
    return 0


@show.command(epilog="Example: ingot show run runs/quickstart")
def run(run: RunOrRecipe) -> int:
    """Steps, results, the last metrics, where the time of training went and what was lost, and the
    last events of one run.
    """
    from ingot.cli.console import run_folder
    from ingot.report.tables import show_run

    show_run(run_folder(run))
    return 0


@show.command(epilog="Example: ingot show runs --compare runs/first runs/second")
def runs(
    output: Annotated[
        str, typer.Argument(metavar="OUTPUT", help="The folder that runs lie in.")
    ] = "runs",
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare", metavar="A B", help="Two runs side by side instead.", show_default=False
        ),
    ] = None,
) -> int:
    """All runs in a folder with their results, or two side by side."""
    from ingot.cli.console import run_folder
    from ingot.report import tables

    if compare is not None:
        tables.compare(run_folder(compare[0]), run_folder(compare[1]))
    else:
        tables.show_runs(Path(output))
    return 0


@show.command(epilog="Example: ingot show data recipes/quickstart.yaml")
def data(run: RunOrRecipe) -> int:
    """Counts, lengths, sources, dropped documents and samples."""
    from ingot.cli.datatables import show_data

    return show_data(run)


@show.command(epilog="Example: ingot show mask recipes/chat_smollm2.yaml --examples 1")
def mask(
    recipe: Recipes,
    examples: Annotated[
        int, typer.Option("--examples", metavar="N", help="How many examples are printed.")
    ] = 3,
) -> int:
    """Examples with what is trained set off, and an audit of BOS, end-of-turn tokens and
    truncation.
    """
    from ingot.cli.mask import show_mask

    return show_mask(recipe, examples)


@show.command(epilog="Example: ingot show models")
def models() -> int:
    """Presets with their sizes, and the model types that can be loaded."""
    from rich.console import Console
    from rich.table import Table

    from ingot.config.presets import PRESETS
    from ingot.config.presets import THROUGH_TRANSFORMERS as OTHERS
    from ingot.config.shape import parameter_count

    presets = Table(
        "preset",
        "weights",
        "layers",
        "width",
        "heads",
        "vocabulary",
        "positions",
        title="model.source: preset:NAME (random weights)",
        title_justify="left",
        collapse_padding=True,
    )
    for name, preset in PRESETS.items():
        heads = f"{preset['num_attention_heads']} / {preset['num_key_value_heads']}"
        sizes = (
            preset["num_hidden_layers"],
            preset["hidden_size"],
            heads,
            preset["vocab_size"],
            preset["max_position_embeddings"],
        )
        presets.add_row(
            name,
            _millions(parameter_count(preset)),
            *(size if isinstance(size, str) else f"{size:,}" for size in sizes),
        )
    for name, preset in OTHERS.items():
        layers, width = (
            preset.get("num_layers") or preset["num_hidden_layers"],
            preset.get("d_model") or preset["hidden_size"],
        )
        heads = str(preset.get("num_heads") or preset["num_attention_heads"])
        presets.add_row(
            name,
            "",
            str(layers),
            str(width),
            heads,
            f"{preset['vocab_size']:,}",
            str(preset.get("max_position_embeddings", "")),
        )
    console = Console()
    console.print(presets)
    console.print(_loadable_types())
    return 0


def _loadable_types() -> Table:
    """Model types: native ones, and those of transformers that are proved, not proved, refused."""
    from rich.table import Table

    from ingot.config.family import native_families
    from ingot.config.model_types import PROVED, UNFIT, installed_types

    loadable = Table(
        "model_type",
        "kind",
        "which",
        title="model.source: hf:ORG/NAME or a folder, by model_type in its config.json",
        title_justify="left",
    )
    for name, which in native_families().items():
        loadable.add_row(name, "decoder", which)
    for kind, types in PROVED.items():
        for name in types:
            loadable.add_row(name, kind, "through transformers, proved")
        others = installed_types(kind).keys() - {*types, *UNFIT[kind]}
        unproved = "through transformers, with model.unproved=true"
        loadable.add_row(", ".join(sorted(others)), kind, unproved)
        for reason in dict.fromkeys(UNFIT[kind].values()):
            refused = [name for name, why in UNFIT[kind].items() if why == reason]
            loadable.add_row(", ".join(refused), kind, f"refused: {reason}")
    return loadable


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def explain_knob(name: str) -> int:
    """Print every knob that `name` matches, and for a section, its contents."""
    from ingot.config.knobs import find_knob
    from ingot.config.knobs import knobs as all_knobs

    found = find_knob(name)
    for knob in found:
        print(f"{knob.path}\n    {knob.doc}\n    type: {knob.type}; default: {knob.default}")
    inside = [
        knob
        for knob in all_knobs()
        if any(knob.path.startswith((f"{section.path}.", f"{section.path}[")) for section in found)
    ]
    for knob in inside:
        print(f"  {knob.path:<42} {knob.default:<28} {knob.type}")
    return 0


def adopt(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Configuration files of one older project; flags in a file too.",
            show_default=False,
        ),
    ],
) -> int:
    """Turn the configuration of an older project (YAML, JSON, .env, flags) into a recipe."""
    from ingot.base.errors import EXIT_DONE
    from ingot.base.progress import say
    from ingot.cli.check import findings
    from ingot.config.adopt.convert import adopt as convert

    adopted = convert(files, findings)
    print(adopted.text, end="")
    say(f"adopt: {', '.join(str(file) for file in files)}: {adopted.project}")
    for note in adopted.notes:
        say(note)
    return EXIT_DONE
