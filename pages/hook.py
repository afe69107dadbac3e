"""What mkdocs calls while it builds the site: adds the pages that are made from the code, and leads
links that leave `docs/` to the pages that show the same files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

from pages.reference import command_page, knob_pages, recipe_page
from pages.tables import fill

ROOT = Path(__file__).resolve().parents[1]
COPIED = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Page -> the file of the project that it shows."""
OUTSIDE = {
    "../CHANGELOG.md": "changelog.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../ingot/recipes/README.md": "reference/recipes.md",
}
"""Links of pages in `docs/` to files outside, and the pages that show these."""
RECIPE = re.compile(r"\]\(\.\./ingot/recipes/(?:places/)?(\w+)\.yaml\)")


def generated() -> dict[str, str]:
    """Every page that has no file in `docs/`, by its path there."""
    copied = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in COPIED.items()}
    return {
        **copied,
        **knob_pages(),
        "reference/commands.md": command_page(),
        "reference/recipes.md": recipe_page(),
    }


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give the section of knobs a page for each section of a recipe."""
    pages = [page for page in knob_pages() if page != "reference/knobs/index.md"]
    _replace(config.nav, "reference/knobs/", ["reference/knobs/index.md", *pages])
    return config


def _replace(nav: Any, placeholder: str, pages: list[Any]) -> None:
    for entry in nav:
        for title, value in entry.items() if isinstance(entry, dict) else ():
            if value == placeholder:
                entry[title] = pages
            elif isinstance(value, list):
                _replace(value, placeholder, pages)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in tables that are made from the code, and mend links that leave the folder."""
    for outside, inside in OUTSIDE.items():
        markdown = markdown.replace(f"]({outside})", f"]({inside})")
    return fill(RECIPE.sub(r"](reference/recipes.md#\1)", markdown))


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    return nav
