"""Tables of the site that say what ingot supports, made by asking the code: the table of model
families, the recipes that it accepts and refuses, and the keys that `ingot adopt` converts.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import yaml

from ingot.adopt.convert import PROJECTS
from ingot.base.errors import WrongInput
from ingot.config.doors import OBJECTIVES, PLACES
from ingot.config.knobs import find_knob
from ingot.config.load import load_recipe
from ingot.config.models.family import native_families
from ingot.config.models.types import PROVED, REFUSED_DECODERS, UNFIT
from ingot.config.shipped import shipped
from pages.reference import anchor, escape, knob_page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKER = re.compile(r"<!-- table: (\w+)(?: ([^>]*?))? -->")
PLAIN = (
    "train.sample_every=null",
    "train.evaluate_tasks=[]",
    "train.early_stop=null",
    "checkpoint.best=null",
)
"""What some recipes measure while they train, which is refused where ranks hold parts of rows."""
OPTIONS: dict[str, tuple[str, ...]] = {
    "replicate": ("parallel.replicate=2",),
    "shard": ("parallel.shard=2",),
    "tensor": ("parallel.tensor=2",),
    "pipeline": ("parallel.pipeline=2",),
    "context": ("parallel.context=2",),
    "LoRA": ("model.lora={}",),
    "float8": ("precision.float8=rowwise",),
    "compile": ("train.compile=true",),
    "packed rows": ("data.pack=best_fit",),
}
"""Column -> the knobs that ask for it."""
PLACES_PROVED = {
    "local": ("every verb", "proved: real processes, killed at any time"),
    "ssh": ("every verb", "proved: real sshd, hosts in network namespaces"),
    "slurm": ("every verb", "proved: a real Slurm of two nodes"),
    "gce": ("every verb", "proved against a stand-in of Google's services, with Google's clients"),
    "vertex": ("every verb", "proved against a stand-in of Google's services"),
    "tpu": ("every verb", "written as Google documents it; never tried"),
    "dataproc": ("`ingest`, `prepare`", "proved against a stand-in; Spark itself is real"),
    "dataflow": ("`prepare`", "proved against a stand-in; Beam itself is real"),
}
"""`launch.kind` -> what it runs, and how far that is proved."""


def fill(markdown: str) -> str:
    """The page with a table in the place of each marker `<!-- table: NAME ARGUMENT -->`."""
    return MARKER.sub(lambda found: TABLES[found[1]](found[2] or ""), markdown)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


@functools.cache
def basis(way: str) -> tuple[str, ...]:
    """The arguments of a recipe of a way of training: the first that comes with ingot, or one of
    another way that trains on the same documents.
    """
    kinds = {str(each.path): _kind(each.path) for each in shipped().values() if not each.is_place}
    own = [path for path, kind in kinds.items() if kind == way]
    if own:
        return (own[0],)
    wanted = OBJECTIVES.load(way, "objective.kind").document_kind
    near = (
        path
        for path, kind in kinds.items()
        if OBJECTIVES.load(kind, "objective.kind").document_kind == wanted
    )
    return next(near), f"objective={{kind: {way}}}"


def _kind(path: Path) -> str:
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    return str(recipe.get("objective", {}).get("kind", "pretrain"))


@functools.cache
def refusal(way: str, knobs: tuple[str, ...]) -> str:
    """Why a recipe of this way with these knobs is refused; empty where it is accepted."""
    path, *objective = basis(way)
    try:
        load_recipe([path], [*objective, *PLAIN, *knobs], environ={}, dotenv=None)
    except WrongInput as error:
        reason = re.sub(r"^(`[^`]*` on the command line|[^ ]*yaml:\d+): ", "", str(error))
        return reason.partition(" (objective.kind")[0].replace(f"objective.kind {way}", "this kind")
    return ""


def methods(_: str = "") -> str:
    """Way of training x layout and option, with a numbered reason for each refusal."""
    reasons: list[str] = []
    rows = []
    for way in OBJECTIVES.built_in:
        path = f"objective[{way}].kind"
        cells = [f"[`{way}`]({knob_page(path)}#{anchor(path)})"]
        for knobs in OPTIONS.values():
            why = refusal(way, knobs)
            if why and why not in reasons:
                reasons.append(why)
            number = reasons.index(why) + 1 if why else 0
            cells.append(f"refused [{number}](#reason-{number})" if why else "yes")
        rows.append(cells)
    notes = [
        f'<span id="reason-{number}"></span>{number}. {escape(why)}  '
        for number, why in enumerate(reasons, 1)
    ]
    return "\n".join([table(["`objective.kind`", *OPTIONS], rows), "", *notes])


def families(_: str = "") -> str:
    return table(
        ["`model_type`", "models"],
        ([f"`{name}`", escape(about)] for name, about in native_families().items()),
    )


def others(_: str = "") -> str:
    """Model types of transformers that are trained as they are."""
    rows = [
        [f"`{way}`", ", ".join(f"`{name}`" for name in PROVED[kind])]
        for way, kind in (("seq2seq", "seq2seq"), ("classify", "encoder"))
    ]
    return table(["`objective.kind`", "`model_type`, each proved"], rows)


def refused(_: str = "") -> str:
    """Model types that are refused, by reason."""
    by: dict[tuple[str, str], list[str]] = {}
    for name, why in REFUSED_DECODERS.items():
        by.setdefault(("decoder", f"{why} not built yet"), []).append(name)
    for kind, types in UNFIT.items():
        for name, why in types.items():
            by.setdefault((kind, why), []).append(name)
    return table(
        ["as", "`model_type`", "reason"],
        ([kind, ", ".join(f"`{n}`" for n in names), why] for (kind, why), names in by.items()),
    )


def places(_: str = "") -> str:
    return table(
        ["`launch.kind`", "runs", "how far"],
        ([f"`{kind}`", *PLACES_PROVED[kind]] for kind in PLACES.built_in),
    )


def recipes(_: str = "") -> str:
    return table(
        ["recipe", "what it does", "hardware"],
        (
            [
                f"[{each.name}](../reference/recipes.md#{each.name})",
                escape(each.about),
                escape(each.fields.get("hardware", "")),
            ]
            for each in shipped().values()
            if not each.is_place
        ),
    )


def adopted(title: str) -> str:
    """Every key of a project that `ingot adopt` reads, and the knob that it becomes."""
    (project,) = [each for each in PROJECTS if each.title == title]
    rows = []
    for row in project.rows:
        key = f"`{row.key}`" + "".join(f", `{other}`" for other in row.also)
        if row.knob:
            ours = _link(row.knob)
            note = row.changed
        else:
            ours = "" if row.lost else "converted together with others"
            note = row.lost
        rows.append([key, ours, escape(note)])
    return table(["there", "here", ""], rows)


def _link(knob: str) -> str:
    """A knob with a link to where its section's page explains it.

    Raises:
        WrongInput: there is no such knob.
    """
    known = knob
    while True:
        try:
            found = find_knob(known)[0].path
            break
        except WrongInput:
            known = known.rpartition(".")[0]  # a key of a mapping, such as cloud.secrets.HF_TOKEN
            if not known or find_knob(known)[0].type != "mapping":
                raise
    return f"[`{knob}`]({knob_page(found)}#{anchor(found)})"


def comparisons() -> list[dict]:
    """What benchmarks/results holds, with the machine of each."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        found += [
            {**each, "machine": kept["machine"], "file": path.name} for each in kept["comparisons"]
        ]
    return found


def middle(values: list[float]) -> float:
    ordered = sorted(values)
    count = len(ordered)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def measured(_: str = "") -> str:
    """Every comparison that benchmarks/results holds."""
    parts = []
    for each in comparisons():
        machine = each["machine"]
        parts.append(
            f"**{each['title']}** ({machine['device']}, torch {machine['torch']},"
            f" {machine['date']}, `benchmarks/results/{each['file']}`)\n"
        )
        rows = [
            [
                result["name"],
                f"{middle(result['rates']):,.0f} {each['unit']}/s",
                f"{result['memory_bytes'] / 1e6:,.0f} MB" if result.get("memory_bytes") else "",
            ]
            for result in each["results"]
            if result.get("rates")
        ]
        parts.append(table(["", "median rate", "peak memory"], rows) + "\n")
        parts += [
            f"- {ratio['of']} over {ratio['over']}: {ratio['median']:.2f} times"
            f" ({ratio['least']:.2f} to {ratio['most']:.2f})"
            for ratio in each["ratios"]
        ]
        parts.append("")
    return "\n".join(parts)


TABLES: dict[str, Callable[[str], str]] = {
    "adopted": adopted,
    "families": families,
    "measured": measured,
    "methods": methods,
    "others": others,
    "places": places,
    "recipes": recipes,
    "refused": refused,
}
