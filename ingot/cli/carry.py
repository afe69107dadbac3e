"""The verbs that carry a model elsewhere: export and import (folders), push (the hub)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.options import AsJson
from ingot.cli.output import print_json

if TYPE_CHECKING:
    from ingot.base.hub import HubCommit
    from ingot.registry.hub import PushPlan

Destination = Annotated[
    str, typer.Argument(metavar="DST", help="The folder to write.", show_default=False)
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST where it exists.")]

Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN|RECIPE.yaml",
        help="A run folder, or the recipe that makes it.",
        show_default=False,
    ),
]
Repository = Annotated[
    str,
    typer.Argument(metavar="hf:ORG/NAME", help="A repository of the hub.", show_default=False),
]


def export(
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
            "--format",
            help="hf, a Hugging Face folder; peft, the adapter of a LoRA run; gguf, a file for"
            " llama.cpp; compressed-tensors, a folder in four or eight bits for vLLM.",
        ),
    ] = "hf",
    kind: Annotated[
        str | None,
        typer.Option(
            "--type",
            help="Of the matrices. In GGUF: f32, f16, bf16 (where left out), q8_0, or q4_k_m by"
            " llama.cpp's llama-quantize. In compressed-tensors, bits of weights and inputs: w4a16"
            " (where left out), w8a16 or w8a8.",
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> int:
    """Check every tensor of a model and write it as a Hugging Face folder, or in fewer bits for
    llama.cpp or vLLM.
    """
    if layout == "gguf":
        made = write_gguf(source, target, kind or "bf16", overwrite=overwrite)
    elif layout == "compressed-tensors":
        made = write_compressed(source, target, kind or "w4a16", overwrite=overwrite)
    elif kind is not None:
        raise typer.BadParameter("--type is for --format gguf and compressed-tensors")
    else:
        made = copy_checked(source, target, layout, overwrite=overwrite)
    return _tell_made("export", made, as_json=as_json)


def _tell_made(verb: str, made: Mapping[str, Any], *, as_json: bool) -> int:
    """The path of what was written on stdout, or all that is known of it as JSON."""
    if as_json:
        print_json(verb, **made)
    else:
        print(made["path"])
    return 0


def write_gguf(source: str, target: str, kind: str, *, overwrite: bool) -> dict[str, Any]:
    """`export --format gguf`: a checked model as one file for llama.cpp."""
    from ingot.base.errors import WrongInput
    from ingot.base.progress import say
    from ingot.checkpoints.gguf.write import export_gguf
    from ingot.models.hf.meta import is_meta

    folder = _folder(source)
    if is_meta(folder):
        raise WrongInput(f"{folder} is in Meta's layout; `ingot import` it first")
    count = export_gguf(folder, Path(target), kind, overwrite=overwrite)
    say(f"{target}: {count} tensors, {kind}, read back and compared")
    return {"path": target, "format": "gguf", "type": kind, "tensors": count}


def write_compressed(source: str, target: str, kind: str, *, overwrite: bool) -> dict[str, Any]:
    """`export --format compressed-tensors`: a checked model as a folder in fewer bits; says how far
    it is from the original, and what that does to the loss on a run's held-out documents.
    """
    from ingot.base.errors import WrongInput
    from ingot.base.progress import say
    from ingot.checkpoints.compressed import COMPRESSED, export_compressed
    from ingot.cli.model import find_target
    from ingot.evaluate.held_out import held_out_loss
    from ingot.models.hf.meta import is_meta

    folder = _folder(source)
    if is_meta(folder):
        raise WrongInput(f"{folder} is in Meta's layout; `ingot import` it first")
    is_model = source.startswith("hf:") or (Path(source) / "config.json").exists()
    recipe = None if is_model else find_target(source).recipe
    measure, why = held_out_loss(recipe)
    made, far = export_compressed(folder, Path(target), kind, overwrite=overwrite, measure=measure)
    say(
        f"{target}: {far.matrices} matrices in {kind}, read back and compared, model"
        f" {made['model_hash']}; the others are in {made['export_type']}"
    )
    say(
        f"it is another model than {folder}: its matrices differ by {far.relative:.1%} in norm,"
        f" {far.worst} most ({far.worst_relative:.1%})"
    )
    if far.loss is None:
        say(f"the held-out loss was not measured: {why}")
    else:
        before, after = far.loss
        say(f"held-out loss {before:.4f} before, {after:.4f} after ({after - before:+.4f} nats)")
    if kind == "w8a8":
        say(
            "the inputs of products, which vLLM rounds to eight bits too, were not rounded for that"
        )
    return {
        **made[COMPRESSED],
        "path": target,
        "format": "compressed-tensors",
        "model_hash": made["model_hash"],
    }


def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="hf:ORG/NAME or a Hugging Face folder.", show_default=False
        ),
    ],
    target: Destination,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> int:
    """Check every tensor of somebody's model and write it as a folder of our own; also of one of
    ours that was changed on purpose.
    """
    made = copy_checked(source, target, "hf", overwrite=overwrite, accept=True)
    return _tell_made("import", made, as_json=as_json)


def copy_checked(
    source: str, target: str, layout: str, *, overwrite: bool, accept: bool = False
) -> dict[str, Any]:
    """`export` and `import`: check every tensor of a model and write it as a new Hugging Face
    folder. `accept`: accept changes since its export.
    """
    from ingot.base.errors import WrongInput

    if layout not in ("hf", "peft"):
        raise WrongInput(
            f"--format {layout} is not known; it is hf, a Hugging Face folder, peft, an adapter,"
            " gguf, a file for llama.cpp, or compressed-tensors, a folder in fewer bits for vLLM"
        )
    from ingot.base.progress import say
    from ingot.checkpoints.export import copy_adapter, copy_model
    from ingot.config.models.content import CONTENT
    from ingot.config.models.lineage import read_lineage

    folder = _folder(source)
    if layout == "peft":
        copy_adapter(_adapter(folder), Path(target), overwrite=overwrite)
        return {"path": target, "format": "peft"}
    recorded = CONTENT in (read_lineage(folder) or {}) and not accept
    made = copy_model(folder, Path(target), overwrite=overwrite, accept=accept)
    checked = (
        "every tensor is as it was exported"
        if recorded
        else "every tensor read, of the shape that config.json asks for"
    )
    say(f"{target}: {checked}, {made['export_type']}, model {made['model_hash']}")
    told = {"type": made["export_type"], "model_hash": made["model_hash"]}
    return {"path": target, "format": "hf", **told}


def _folder(source: str) -> Path:
    """The model folder that `source` names: hf:ORG/NAME, or what serves as a target."""
    from ingot.base.errors import WrongInput
    from ingot.base.hub import fetch_model
    from ingot.cli.model import find_target
    from ingot.models.hf.meta import is_meta

    if source.startswith("hf:"):
        return fetch_model(source.removeprefix("hf:"))
    if is_meta(Path(source)):
        return Path(source)
    found = find_target(source)
    if found.folder is None:
        raise WrongInput(
            f"{source} is an address; give a model folder, a run folder or hf:ORG/NAME"
        )
    found.tell_doubt()
    return found.folder


def _adapter(folder: Path) -> Path:
    """The adapter in a folder, or beside the model of a run."""
    from ingot.base.errors import WrongInput
    from ingot.base.runfolder import RunFolder
    from ingot.config.models.lineage import is_of_another
    from ingot.models.adapters.peft_config import is_adapter

    if is_adapter(folder):
        return folder
    beside = RunFolder(folder.parent).adapter
    if is_adapter(beside) and not is_of_another(beside, folder):
        return beside
    raise WrongInput(
        f"{folder} is no adapter, and has none beside it; train one with model.lora, or export it"
        " with --format hf"
    )


def push(
    run: Run,
    target: Repository,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="The adapter of a LoRA run rather than the merged model."),
    ] = False,
    public: Annotated[
        bool, typer.Option("--public", help="For everybody to see; private without it.")
    ] = False,
    license_: Annotated[
        str | None,
        typer.Option(
            "--license", metavar="NAME", help="The model's licence; without it none is stated."
        ),
    ] = None,
    data_license: Annotated[
        list[str] | None,
        typer.Option(
            "--data-license",
            metavar="SOURCE=NAME",
            help="The licence of a source of data, for the card; may be given several times.",
            show_default=False,
        ),
    ] = None,
    despite_gate: Annotated[
        bool, typer.Option("--despite-gate", help="Also a model that the gate refused.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would go where, and send nothing.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Put a run's model or adapter on the Hugging Face hub, with a card made from the run: data,
    method, evaluation with intervals, lineage. Needs $HF_TOKEN or `hf auth login`.
    """
    from ingot.base.errors import WrongInput
    from ingot.cli.console import run_folder
    from ingot.registry.hub import PushOptions, plan_push
    from ingot.registry.hub import push as send

    licenses = [each.rpartition("=") for each in data_license or []]
    if wrong := ["".join(each) for each in licenses if not all(each)]:
        raise WrongInput(f"--data-license {wrong[0]}: write it as SOURCE=NAME")
    stated = {source: name for source, _, name in licenses}
    options = PushOptions(adapter, public, license_, stated, despite_gate)
    plan = plan_push(run_folder(run), target, options)
    _show_push(plan, None if dry_run else send(plan), as_json=as_json)
    return 0


def _show_push(plan: PushPlan, made: HubCommit | None, *, as_json: bool) -> None:
    """`made` is None after a dry run."""
    if as_json:
        told = {} if made is None else asdict(made)
        print_json(
            "push",
            **{"name": plan.name, "public": plan.public, "files": plan.sizes, "card": plan.card},
            **told,
        )
    elif made is None:
        _show_plan(plan)
    else:
        state = f"commit {made.commit[:8]}" if made.new else "unchanged, nothing was sent"
        removed = f", without {', '.join(made.removed)} of before" if made.removed else ""
        print(f"{made.url} ({'public' if plan.public else 'private'}): {state}{removed}")


def _show_plan(plan: PushPlan) -> None:
    who = "public" if plan.public else "private"
    print(f"would push to hf:{plan.name} ({who}):")
    for path, nbytes in plan.sizes.items():
        print(f"  {path:<34} {nbytes / 1e3:>12,.1f} kB")
    print(f"\n{plan.card}", end="")
