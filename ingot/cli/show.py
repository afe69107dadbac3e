"""Information: `ingot show ...`, `ingot explain`, `ingot adopt`, and in a browser `ingot ui`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.base.errors import WrongInput
from ingot.cli.options import AsJson, Recipes, RunOrRecipe
from ingot.cli.output import print_json

if TYPE_CHECKING:
    from rich.table import Table

show = typer.Typer(no_args_is_help=True, help="Show a recipe, its knobs, data, runs and models.")


@show.command(epilog="Example: ingot show config quickstart train.steps=100")
def config(
    recipe: Recipes,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only what differs from the defaults.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """The whole resolved recipe, every default included, as YAML."""
    from ingot.config.knobs import changed_values
    from ingot.config.load import dump_recipe, read_recipe, recipe_values

    read = read_recipe(recipe)
    if as_json:
        values = changed_values(read) if changed else recipe_values(read)
        print_json("show config", recipe=values)
    else:
        print(dump_recipe(read, changed=changed), end="")
    return 0


@show.command(epilog="Example: ingot show knobs | grep lr")
def knobs(as_json: AsJson = False) -> int:
    """Every knob with its default and type, one a line."""
    from ingot.config.knobs import knobs as all_knobs

    if as_json:
        print_json("show knobs", knobs=list(all_knobs()))
        return 0
    for knob in all_knobs():
        print(f"{knob.path:<44} {knob.default:<28} {knob.type}")
    return 0


@show.command(epilog="Example: ingot show run runs/quickstart")
def run(run: RunOrRecipe, as_json: AsJson = False) -> int:
    """Steps, results, the last metrics, where the time of training went and what was lost, and the
    last events of one run.
    """
    from ingot.cli.console import run_folder
    from ingot.report.tables import run_json, show_run

    folder = run_folder(*run)
    if as_json:
        print_json("show run", **run_json(folder))
    else:
        show_run(folder)
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
    as_json: AsJson = False,
) -> int:
    """All runs in a folder with their results, or two side by side."""
    from ingot.cli.console import run_folder
    from ingot.report import tables
    from ingot.report.runs import each_of, runs_in

    if as_json:
        found = (
            each_of(runs_in(Path(output)), tables.run_json)
            if compare is None
            else [tables.run_json(run_folder(one)) for one in compare]
        )
        print_json("show runs", runs=found)
    elif compare is not None:
        tables.compare(run_folder(compare[0]), run_folder(compare[1]))
    else:
        tables.show_runs(Path(output))
    return 0


@show.command(epilog="Example: ingot show samples runs/digits --prompts 2")
def samples(
    run: RunOrRecipe,
    prompts: Annotated[
        int,
        typer.Option(
            "--prompts",
            metavar="N",
            min=1,
            help="How many are shown: the newest of a training on rewards, else of each task;"
            " completions of evaluate.prompts all are.",
        ),
    ] = 4,
    as_json: AsJson = False,
) -> int:
    """Prompts and answers: those of a training on rewards with the rewards, else those of the last
    evaluation and of its tasks that have references, such as rouge; with evaluate.base the answers
    before training are beside those after it.
    """
    from ingot.base.console import console
    from ingot.base.progress import say
    from ingot.base.reports import read_report
    from ingot.cli.console import run_folder
    from ingot.evaluate.report import show_completions, written_answers
    from ingot.report.reading import other_model
    from ingot.report.tables import samples_of, show_samples

    folder = run_folder(*run)
    report = folder.reports / "evaluate.json"
    if not folder.samples.exists() and report.exists():
        found = read_report(report)
        if (other := other_model(folder, found)) is not None:
            say(f"note: {other}")
        completed = found.samples
        completed += written_answers(folder.reports / "examples", prompts)
        if not completed:
            raise WrongInput(f"{report} has no answers; set evaluate.prompts and evaluate again")
        if as_json:
            print_json("show samples", samples=completed)
        else:
            show_completions(completed, console())
    elif as_json:
        print_json("show samples", samples=samples_of(folder, prompts))
    else:
        show_samples(folder, prompts)
    return 0


@show.command(epilog="Example: ingot show data quickstart")
def data(run: RunOrRecipe, as_json: AsJson = False) -> int:
    """Counts, lengths, sources, dropped documents and samples."""
    from ingot.cli.views.datatables import show_data

    return show_data(*run, as_json=as_json)


@show.command(epilog="Example: ingot show mask chat_smollm2 --examples 1")
def mask(
    recipe: Recipes,
    examples: Annotated[
        int, typer.Option("--examples", metavar="N", help="How many examples are printed.")
    ] = 3,
    as_json: AsJson = False,
) -> int:
    """Examples with what is trained set off, and an audit of BOS, end-of-turn tokens and
    truncation.
    """
    from ingot.cli.views.mask import show_mask

    return show_mask(recipe, examples, as_json=as_json)


@show.command(epilog="Example: ingot show rewards recipe.yaml --samples answers.jsonl")
def rewards(
    recipe: Recipes,
    samples: Annotated[
        Path,
        typer.Option(
            "--samples",
            metavar="FILE",
            help="JSON lines with `answer`, and `prompt`, `reference`, `finished`, `alone`.",
            show_default=False,
        ),
    ],
    as_json: AsJson = False,
) -> int:
    """Score answers of your own by a recipe's rewards, before a training is paid for."""
    from ingot.cli.views.rewards import show_rewards

    return show_rewards(recipe, samples, as_json=as_json)


@show.command(epilog="Example: ingot show models")
def models(as_json: AsJson = False) -> int:
    """Presets with their sizes, and the model types that can be loaded."""
    from rich.table import Table

    from ingot.base.console import console
    from ingot.config.models.presets import PRESETS
    from ingot.config.models.presets import THROUGH_TRANSFORMERS as OTHERS

    if as_json:
        print_json("show models", presets={**PRESETS, **OTHERS}, types=_types())
        return 0
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
            _total_and_active(preset),
            *(size if isinstance(size, str) else f"{size:,}" for size in sizes),
        )
    for name, preset in OTHERS.items():
        layers = preset.get("num_layers") or preset["num_hidden_layers"]
        width = preset.get("d_model") or preset["hidden_size"]
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
    out = console()
    out.print(presets)
    out.print(_loadable_types())
    return 0


def _total_and_active(preset: Mapping[str, Any]) -> str:
    """Weights, and of a mixture of experts those that one token meets."""
    from ingot.config.shape import parameter_count

    whole, active = parameter_count(preset), parameter_count(preset, active=True)
    each = "" if active == whole else f", {_millions(active)} active"
    return _millions(whole) + each


def _types() -> list[dict[str, str]]:
    """Model types: native ones, and those of transformers that are proved, not proved, refused."""
    from ingot.config.models.family import native_families
    from ingot.config.models.types import PROVED, UNFIT, installed_types

    found = [(name, "decoder", "native", which) for name, which in native_families().items()]
    for kind, proved in PROVED.items():
        found += [(name, kind, "proved", "") for name in proved]
        others = sorted(installed_types(kind).keys() - {*proved, *UNFIT[kind]})
        found += [(name, kind, "unproved", "") for name in others]
        found += [(name, kind, "refused", reason) for name, reason in UNFIT[kind].items()]
    fields = ("model_type", "kind", "state", "about")
    return [dict(zip(fields, each, strict=True)) for each in found]


def _loadable_types() -> Table:
    """The same as a table, types of one fate together."""
    from rich.table import Table

    loadable = Table(
        "model_type",
        "kind",
        "which",
        title="model.source: hf:ORG/NAME or a folder, by model_type in its config.json",
        title_justify="left",
    )
    told = {
        "proved": "through transformers, proved",
        "unproved": "through transformers, with model.unproved=true",
    }
    together: dict[tuple[str, str], list[str]] = {}
    for each in _types():
        if each["state"] in ("native", "proved"):
            text = each["about"] or told[each["state"]]
            loadable.add_row(each["model_type"], each["kind"], text)
        else:
            text = told.get(each["state"]) or f"refused: {each['about']}"
            together.setdefault((each["kind"], text), []).append(each["model_type"])
    for (kind, text), names in together.items():
        loadable.add_row(", ".join(names), kind, text)
    return loadable


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def explain_knob(name: str, *, as_json: bool) -> int:
    """Print every knob that `name` matches, and for a section, its contents."""
    from ingot.config.knobs import find_knob
    from ingot.config.knobs import knobs as all_knobs

    found = find_knob(name)
    inside = [
        knob
        for knob in all_knobs()
        if any(knob.path.startswith((f"{section.path}.", f"{section.path}[")) for section in found)
    ]
    if as_json:
        print_json("explain", knobs=found, inside=inside)
        return 0
    for knob in found:
        print(f"{knob.path}\n    {knob.doc}\n    type: {knob.type}; default: {knob.default}")
    for knob in inside:
        print(f"  {knob.path:<42} {knob.default:<28} {knob.type}")
    return 0


def adopt(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Configuration files of one project; flags in a file too.",
            show_default=False,
        ),
    ],
) -> int:
    """Turn the configuration of another trainer into a recipe: axolotl, LLaMA-Factory, torchtune,
    Megatron's flags and more.
    """
    from ingot.adopt.convert import adopt as convert
    from ingot.base.errors import EXIT_DONE
    from ingot.base.progress import say
    from ingot.cli.check.recipe import findings

    adopted = convert(files, findings)
    print(adopted.text, end="")
    say(f"adopt: {', '.join(str(file) for file in files)}: {adopted.project}")
    for note in adopted.notes:
        say(note)
    return EXIT_DONE


def ui(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder that runs lie in.")
    ] = Path("runs"),
    host: Annotated[
        str,
        typer.Option(
            "--host", help="The address to listen on; beyond this machine a token is asked for."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")
    ] = 7070,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="URL",
            help="A running `ingot serve` for the playground; may be given several times.",
            show_default=False,
        ),
    ] = None,
    allow_actions: Annotated[
        bool,
        typer.Option(
            "--allow-actions", help="Let who has the token promote and roll back versions."
        ),
    ] = False,
) -> int:
    """All runs of a folder in a browser: a table, curves over each other, what differs, data,
    samples, the registry, and a playground for served models.
    """
    from ingot.ui.server import serve_ui

    serve_ui(folder, host=host, port=port, acts=allow_actions, models=model or [])
    return 0
