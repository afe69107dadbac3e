"""Pages of the reference: each knob, each command and each recipe that comes with ingot, from what
the code itself says of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ingot.cli.app import app
from ingot.config.knobs import Knob, knobs
from ingot.config.recipe import Recipe
from ingot.config.shipped import names, resolve

KNOBS = "reference/knobs"
SINGLE = "recipe"
"""The page of knobs that are in no section: name, seed, output."""


def escape(text: str) -> str:
    """Text for a cell of a Markdown table, outside of code."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def knob_pages() -> dict[str, str]:
    """A page for each section of a recipe with its knobs, and one that lists the sections."""
    sections: dict[str, list[Knob]] = defaultdict(list)
    every = list(knobs())
    for knob in every:
        sections[_section(knob.path)].append(knob)
    docs = {
        name: " ".join((field.description or "").split())
        for name, field in Recipe.model_fields.items()
    }
    lines = [
        "# Knobs",
        "",
        f"A recipe is a YAML file of these sections; {len(every):,} knobs in all. What is left out"
        " has its default, and an unknown name is refused with the nearest one. `ingot explain"
        " KNOB` prints what stands here, `ingot show config RECIPE` every value of a recipe, and"
        " `key=value` on a command line or `INGOT_SECTION__KNOB=value` in the environment beats the"
        " file. Where a section has several kinds, the kind stands in brackets.",
        "",
        "| section | what it is about | knobs |",
        "| --- | --- | --- |",
    ]
    pages = {}
    for name, found in sections.items():
        about = docs.get(name, "The run itself.")
        lines.append(f"| [{name}]({name}.md) | {escape(about)} | {len(found)} |")
        pages[f"{KNOBS}/{name}.md"] = _knob_page(name, about, found)
    return {f"{KNOBS}/index.md": "\n".join(lines) + "\n", **pages}


def _section(path: str) -> str:
    """The section of a knob; those that are in none share a page."""
    top = path.partition(".")[0].partition("[")[0]
    return SINGLE if top in ("name", "seed", "output") else top


def knob_page(path: str) -> str:
    """The page that explains a knob."""
    return f"{KNOBS}/{_section(path)}.md"


def _knob_page(name: str, about: str, found: list[Knob]) -> str:
    lines = [f"# {name}", "", escape(about), ""]
    for knob in (each for each in found if each.path != name):
        given = (
            "required" if knob.default == "required" else f"default `{knob.default or '(empty)'}`"
        )
        lines += [
            f"### `{knob.path}` {{ #{anchor(knob.path)} }}",
            "",
            f"`{knob.type}`, {given}",
            "",
            escape(knob.doc),
            "",
        ]
    return "\n".join(lines)


def anchor(path: str) -> str:
    return path.replace("[", "-").replace("]", "").replace(".", "-")


def command_page() -> str:
    """Every verb with its arguments and options, in the order of `ingot --help`."""
    root = typer.main.get_command(app)
    lines = [
        "# Commands",
        "",
        "`ingot VERB RECIPE... KEY=VALUE...`: recipe files or names of ingot's own, then overrides;"
        " what comes last wins. Results go to stdout, messages to stderr. Exit codes: 0 done, 1"
        " failed, 2 wrong input, 3 the gate keeps the live model, 75 stopped with a checkpoint"
        " saved. Every verb has `--help`.",
        "",
    ]
    for path, command in _commands(root, "ingot"):
        lines += _command(path, command)
    return "\n".join(lines)


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in getattr(group, "commands", {}).items():
        yield f"{path} {name}", command
        yield from _commands(command, f"{path} {name}")


def _command(path: str, command: Any) -> list[str]:
    level = "##" if path.count(" ") == 1 else "###"
    lines = [f"{level} `{path}`", "", escape(" ".join((command.help or "").split())), ""]
    if getattr(command, "commands", None):
        return lines
    shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    usage = [word_of(p) if p.required else f"[{word_of(p)}]" for p in arguments]
    options = ["[OPTIONS]"] * (len(shown) > len(arguments))
    lines += ["```console", " ".join(["$", path, *options, *usage]), "```", ""]
    rows = []
    for each in shown:
        value = f" {each.metavar}" if each.metavar else ""
        word = word_of(each) if each in arguments else f"{', '.join(each.opts)}{value}"
        text = " ".join((each.help or "").split())
        cell = word.replace("|", "\\|")
        rows.append(f"| `{cell}` | {escape(text)} |")
    if rows:
        lines += ["| argument or option | |", "| --- | --- |", *rows, ""]
    if command.epilog and command.epilog.startswith("Example: "):
        lines += ["For example:", "", "```console", f"$ {command.epilog[9:]}", "```", ""]
    return lines


def word_of(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def recipe_page() -> str:
    """Every recipe and place that comes with ingot, as it is."""
    lines = [
        "# Recipes and places",
        "",
        "`ingot recipes` lists them with hardware and time, `ingot run NAME` starts one, `ingot"
        " init NAME` copies one for editing. A place says where a recipe runs and is given after"
        " it.",
        "",
    ]
    for name in names():
        text = Path(resolve(name)[0]).read_text(encoding="utf-8").rstrip()
        lines += [f"## {name} {{ #{name.rpartition('/')[2]} }}", "", "```yaml", text, "```", ""]
    return "\n".join(lines)
