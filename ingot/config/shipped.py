"""Recipes and places that come with the package, found by name: `quickstart`, `places/laptop`.

A path always means that file; where none is, `recipes/quickstart.yaml`, as documentation writes it,
means the package's. Whoever may have meant something else is told.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ingot.base.progress import say

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
PLACES = "places"


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe or place of the package; its texts come from the comment at its head."""

    name: str
    path: Path
    about: str
    """The first line, without what a place says of the recipes it is for."""
    fields: dict[str, str]
    """`hardware`, `time`, `data`, ...: what stands behind `# Hardware:` and so on, on one line."""
    recipes: tuple[str, ...] = ()
    """The recipes that a place is for."""

    @property
    def is_place(self) -> bool:
        return self.name.startswith(f"{PLACES}/")


@functools.cache
def shipped() -> dict[str, ShippedRecipe]:
    """Everything that the package holds, recipes first, by name."""
    paths = [*sorted(FOLDER.glob("*.yaml")), *sorted((FOLDER / PLACES).glob("*.yaml"))]
    return {name: _read(name, path) for path in paths for name in (_name(path),)}


def _name(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").as_posix()


def names() -> list[str]:
    """The names alone; no file is opened."""
    return [_name(path) for path in sorted(FOLDER.rglob("*.yaml"))]


def _read(name: str, path: Path) -> ShippedRecipe:
    head = path.read_text(encoding="utf-8").partition("\n\n")[0]
    lines = [line.removeprefix("#").strip() for line in head.splitlines()]
    fields: dict[str, str] = {}
    key = ""
    for line in lines[1:]:
        if found := re.match(r"([A-Z][a-z]+): +(.*)", line):
            key = found[1].lower()
            fields[key] = found[2]
        elif key and line:
            fields[key] += f" {line}"
    about, places = lines[0], tuple(re.findall(r"recipes/(\w+)\.yaml", lines[0]))
    if name.startswith(f"{PLACES}/"):
        about = about.partition(": ")[2]
    return ShippedRecipe(name, path, about, fields, places)


def resolve(given: str | Path) -> tuple[Path, str | None]:
    """The file that a recipe argument means, and a note where it could have meant another one. What
    is neither a file nor a name of the package's comes back as it is.
    """
    text = os.fspath(given)
    bare = text if "." not in text else ""
    documented = re.fullmatch(r"recipes/(.+)\.yaml", text)
    name = documented[1] if documented else bare
    own = FOLDER / f"{name}.yaml"
    if not name or not re.fullmatch(r"(places/)?\w+", name) or not own.is_file():
        return Path(text), None
    if os.path.isfile(text):
        note = f"note: the file {text} is read, not the recipe of that name in ingot"
        return Path(text), None if documented else note
    if documented:
        return own, f"note: there is no {text} here; ingot's own recipe is read"
    near = next((each for each in (f"{name}.yaml", f"{name}/") if os.path.exists(each)), None)
    note = (
        f"note: {name} is ingot's own recipe, and {near} here is not read; give a path to read it"
    )
    return own, note if near else None


def path_to_type(given: str) -> str:
    """The path of the file that a recipe argument means, for a command's arguments: as given where
    it was a path. What begins with a dash gets a `./`, without which it is an option.
    """
    path, _ = resolve(given)
    typed = given if path == Path(given) else str(path)
    return f"./{typed}" if typed.startswith("-") else typed


def tell_names(files: Iterable[str]) -> list[str]:
    """Say which file is read where a name could mean another one; the paths of all, to type."""
    given = list(files)
    if "LOCAL_RANK" not in os.environ:
        for note in [note for _, note in map(resolve, given) if note]:
            say(note)
    return [path_to_type(file) for file in given]


def suggestion(given: str | Path) -> str:
    """What to do about a recipe that does not exist."""
    text = os.fspath(given)
    stem = re.sub(r"^(\./)?(recipes/)?|\.ya?ml$", "", text)
    known = names()
    if stem in known:
        return f"`{stem}` is ingot's own, and `ingot init {stem}` copies it here"
    if "/" not in text.removeprefix(f"{PLACES}/") and (
        near := difflib.get_close_matches(stem, known, n=1, cutoff=0.7)
    ):
        return f"did you mean `{near[0]}`, which is ingot's own?"
    return "check the path" if re.search(r"[/.]", text) else "`ingot recipes` lists ingot's own"
