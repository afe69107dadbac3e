"""`ingot recipes`, `ingot init` and `ingot new`: the recipes and places that come with the package,
and new ones.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.options import AsJson
from ingot.cli.output import print_json

if TYPE_CHECKING:
    from ingot.config.shipped import ShippedRecipe


def recipes(as_json: AsJson = False) -> int:
    """The recipes and places that come with ingot: what each is for, its hardware and its time."""
    from rich.table import Table
    from rich.text import Text

    from ingot.base.console import console
    from ingot.config.shipped import shipped

    found = list(shipped().values())
    if as_json:
        print_json("recipes", recipes=[_told(each) for each in found])
        return 0
    table = Table("recipe", "what it does", "hardware", "time", show_lines=True)
    places = Table("place", "where", "for")
    for each in found:
        if each.is_place:
            places.add_row(each.name, Text(each.about), ", ".join(each.recipes))
        else:
            short = [_first(each.fields.get(field, "")) for field in ("hardware", "time")]
            table.add_row(each.name, Text(each.about), *map(Text, short))
    out = console()
    out.print(table, places)
    out.print(
        "ingot run NAME starts one here, ingot init NAME copies one for editing; a place is given"
        " after the recipe."
    )
    return 0


def _first(text: str) -> str:
    """The first sentence."""
    return re.split(r"\. |\.$|; launch|;? \(", text, maxsplit=1)[0]


def _told(each: ShippedRecipe) -> dict[str, object]:
    return {
        "name": each.name,
        "kind": "place" if each.is_place else "recipe",
        "about": each.about,
        "path": str(each.path),
        **each.fields,
        **({"recipes": each.recipes} if each.is_place else {}),
    }


def init(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="As `ingot recipes` lists it.", show_default=False),
    ],
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Where to write it; or FILE.yaml.")
    ] = ".",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file where it exists.")
    ] = False,
) -> int:
    """Copy a recipe or place that comes with ingot, for editing."""
    from ingot.base.errors import WrongInput
    from ingot.base.progress import say
    from ingot.base.storage import disk_errors, write_atomic
    from ingot.config.shipped import shipped, suggestion

    short = re.sub(r"^recipes/|\.yaml$", "", name)
    if short not in shipped():
        raise WrongInput(f"ingot has no recipe `{name}`; {suggestion(name)}")
    own = shipped()[short]
    path = Path(folder)
    if path.suffix not in (".yaml", ".yml"):
        path = path / own.path.name
    if path.exists() and not overwrite:
        raise WrongInput(f"{path} exists; edit it, name another folder, or add --overwrite")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    # The commands at its head are those of the copy.
    text = own.path.read_text(encoding="utf-8").replace(f"recipes/{short}.yaml", str(path))
    write_atomic(path, text)
    if not own.is_place:
        say(f"edit it, then: ingot run {path}")
    print(path)
    return 0


PURPOSES = {
    "pretrain": ("texts, a model from random weights", "preset:llama-6m", ""),
    "adapt": ("texts, a model that goes on learning", "hf:HuggingFaceTB/SmolLM2-135M", ""),
    "chat": (
        "chats, what the assistant says is learnt",
        "hf:HuggingFaceTB/SmolLM2-135M",
        "objective: {kind: sft}                  # loss on the assistant's turns alone\n",
    ),
    "prefer": (
        "preferences: of two answers the better one",
        "hf:HuggingFaceTB/SmolLM2-135M-Instruct",
        "objective: {kind: dpo, beta: 0.1}       # against the model as it was\n",
    ),
}
"""What a new recipe can be for: its data, the model that is proposed, and the sections it needs."""
TEMPLATE = "tokenizer: {template: chatml}           # how turns are written\n"
"""For a model that was not tuned on chats; another keeps the template that it was tuned with."""
RATES = {"adapt": "5.0e-5", "chat": "5.0e-5", "prefer": "1.0e-6"}
"""Learning rates of models that go on learning: those of preferences would undo it with more."""
BYTES_A_TOKEN = 5
"""Of a file of documents, with what JSON needs around them."""
ENOUGH_STEPS = 50
"""Fewer in an epoch change a pretrained model too little to be seen."""


def new(
    data: Annotated[
        str | None, typer.Option("--data", help="A file, a glob, hf:ORG/NAME or bigquery:...")
    ] = None,
    purpose: Annotated[
        str | None, typer.Option("--for", metavar="|".join(PURPOSES), help="What is to be done.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="hf:ORG/NAME, a folder, or preset:NAME.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", help="cpu, gpu, or a number of GPUs of this machine.")
    ] = None,
    path: Annotated[str | None, typer.Option("--write", help="The recipe file.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file where it exists.")
    ] = False,
) -> int:
    """Ask what data, what for, what model, what machine and where, and write a commented recipe.
    What is given as an option is not asked.
    """
    from ingot.base.errors import WrongInput
    from ingot.base.progress import say
    from ingot.base.storage import disk_errors, write_atomic

    proposed = PURPOSES.get(purpose or "pretrain", PURPOSES["pretrain"])[1]
    asked = {
        "--data": (data, "builtin:stdlib"),
        "--for": (purpose, "pretrain"),
        "--model": (model, proposed),
        "--machine": (machine, "cpu"),
        "--write": (path, f"{purpose or 'pretrain'}.yaml"),
    }
    lacking = [f"{option} {such}" for option, (given, such) in asked.items() if given is None]
    if lacking and not sys.stdin.isatty():
        raise WrongInput(f"nobody can be asked here; add, for example, {' '.join(lacking)}")
    data = _answer(data, "What data? A file, a glob or hf:ORG/NAME", "builtin:stdlib")
    told = "; ".join(f"{name} ({about})" for name, (about, _, _) in PURPOSES.items())
    purpose = _answer(purpose, f"What for? {told}", "pretrain")
    if purpose not in PURPOSES:
        raise WrongInput(f"--for {purpose} is none of {', '.join(PURPOSES)}; choose one")
    model = _answer(model, "What model?", PURPOSES[purpose][1])
    machine = _answer(machine, "What machine? cpu, gpu, or a number of GPUs", "cpu")
    devices = {"cpu": 0, "gpu": 1}.get(machine, int(machine) if machine.isdecimal() else -1)
    if devices < 0:
        raise WrongInput(f"--machine {machine} is not cpu, gpu or a number of GPUs; give one")
    file = Path(_answer(path, "Where? The file to write", f"{purpose}.yaml"))
    if file.suffix not in (".yaml", ".yml"):
        raise WrongInput(f"--write {file}: a recipe's name ends in .yaml; give such a one")
    if file.exists() and not overwrite:
        raise WrongInput(f"{file} exists; edit it, name another file, or add --overwrite")
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, _written(file, data, purpose, model, devices))
    for line in _not_ready(file):
        say(f"before it can run: {line}")
    say(f"look at it, then: ingot plan {file} && ingot run {file}")
    print(file)
    return 0


def _answer(given: str | None, question: str, proposed: str) -> str:
    """What was given or is answered."""
    return str(typer.prompt(question, default=proposed, err=True)) if given is None else given


def _written(file: Path, data: str, purpose: str, model: str, devices: int) -> str:
    random, name = model.startswith("preset:"), re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem)
    quoted = {"data": json.dumps(data), "model": json.dumps(model), "name": json.dumps(name)}
    length = ("epochs: 1    ", "each document once; or steps: N")
    if random:
        length = ("steps: 1000  ", "or epochs: N, each document N times")
    tokenizer = ""
    if random:
        template = ", template: chatml" if purpose in ("chat", "prefer") else ""
        learnt = f"{{source: train, vocab_size: 8192{template}}}"
        tokenizer = f"tokenizer: {learnt}   # learnt from the documents\n"
    elif purpose == "chat" and not _has_template(model):
        tokenizer = TEMPLATE
    seq_len = 256 if random else 512
    rows = _rows_here(data, seq_len)
    batch = _batch(devices, rows)
    if not random and rows is not None and rows < ENOUGH_STEPS * batch[0]:
        length = ("epochs: 3    ", "little data, so each document three times; or steps: N")
    launch = (
        f"launch: {{processes: {devices}}}              # one for each GPU of this machine\n\n"
        if devices > 1
        else ""
    )
    prompt = "What can you do?" if purpose in ("chat", "prefer") else "The"
    return f"""\
# {PURPOSES[purpose][0][0].upper()}{PURPOSES[purpose][0][1:]}; written by `ingot new`.
#
#   ingot run {file}
#
# Every knob that is not here has its default: ingot show config {file}; ingot explain KNOB
# Elsewhere than here: give a place after it, such as places/slurm (`ingot recipes` lists them).

name: {quoted["name"]}                 # the run lies in runs/ under this name

model: {{source: {quoted["model"]}}}
{tokenizer}{PURPOSES[purpose][2]}
data:
  train: [{{source: {quoted["data"]}}}]      # several sources: more entries, each with a weight
  validation: {{fraction: 0.05}}          # held out, the same documents in every run
  seq_len: {seq_len}

train:
  {length[0]}                 # {length[1]}
  global_batch: {batch[0]}             # rows a step, over all devices
  micro_batch: {batch[1]}               # rows at once on a device: lower it if memory is short
  optimizer: {{lr: {"1.0e-3" if random else RATES[purpose] + ", weight_decay: 0.0"}}}
  schedule: {{kind: cosine, warmup: 0.1, min_ratio: 0.1}}
  evaluate_every: 50

checkpoint: {{every: 100, keep: 2}}       # what was interrupted goes on from the newest

{launch}evaluate:
  tasks: [{{kind: loss}}]

serve: {{prompt: "{prompt}"}}     # what the served model is asked at the end of `ingot run`
"""


def _has_template(model: str) -> bool:
    """Whether a model was tuned on chats that were written down in a way of its own: by the files
    beside it, or on the hub by its name.
    """
    from ingot.base.errors import IngotError
    from ingot.config.models.source import named_folder
    from ingot.tokenizers.load import load_tokenizer

    if model.startswith("hf:"):
        return re.search(r"(?i)instruct|chat|-it\b", model) is not None
    try:
        return load_tokenizer(named_folder(model, "--model"), check=False).template is not None
    except IngotError:
        return False


def _rows_here(data: str, seq_len: int) -> int | None:
    """About how many rows local files fill; None where they lie elsewhere, or are not there yet."""
    from ingot.base.errors import IngotError
    from ingot.config.sections.data import SourceSettings
    from ingot.data.sources.find import find_source

    source = SourceSettings(source=data)
    if source.scheme not in ("", "builtin"):
        return None
    try:
        return sum(file.bytes for file in find_source(source)) // (BYTES_A_TOKEN * seq_len)
    except IngotError:
        return None


def _batch(devices: int, rows: int | None) -> tuple[int, int]:
    """Rows a step over all devices, and rows at once on one of them. Of little data a step takes an
    eighth at most, so that it has some.
    """
    ways = max(1, devices)
    usual, micro = (16, 4) if devices == 0 else (64, 8 if devices < 8 else 4)
    batches = -(-usual // (micro * ways))
    most = usual if rows is None else rows // 8
    while batches > 1 and batches * micro * ways > most:
        batches //= 2
    while micro > 1 and batches * micro * ways > most:
        micro //= 2
    return batches * micro * ways, micro


def _not_ready(file: Path) -> list[str]:
    """What `ingot run` would refuse."""
    from ingot.base.errors import WrongInput
    from ingot.cli.check.recipe import findings, read_checked

    try:
        recipe, values = read_checked([str(file)], "run")
        return findings(recipe, values).wrong
    except WrongInput as error:
        return str(error).splitlines()
