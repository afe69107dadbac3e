"""The documentation site: it builds without a warning, and what it says is what the code says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.config.doors import FAMILIES, OBJECTIVES, PLACES
from ingot.config.knobs import knobs
from ingot.config.shipped import names
from pages import tables
from pages.chart import FILE, chart
from pages.reference import anchor, command_page, knob_page, knob_pages, recipe_page
from tests.docs.typed import PROJECT, page


def build(project: Path, target: Path) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("mkdocs") is None:
        assert not os.environ.get("CI"), "CI needs the extra `docs`"
        pytest.skip("no mkdocs here; pip install 'ingot[docs]'")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        cwd=project,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_it_builds_and_a_broken_link_or_anchor_is_an_error(tmp_path: Path) -> None:
    """`make site` is a part of continuous integration; here also what it must refuse."""
    for name in ("docs", "pages", "ingot", "benchmarks"):
        (tmp_path / name).symlink_to(PROJECT / name)
    for name in ("mkdocs.yml", "CHANGELOG.md", "CONTRIBUTING.md"):
        (tmp_path / name).symlink_to(PROJECT / name)
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/reference/knobs/train.html").is_file()
    (tmp_path / "docs").unlink()
    (tmp_path / "docs").mkdir()
    for each in (PROJECT / "docs").iterdir():
        if each.name != "install.md":
            (tmp_path / "docs" / each.name).symlink_to(each)
    for link in ("nowhere.md", "tour.md#nowhere"):
        text = page("docs/install.md") + f"\n[a broken link]({link})\n"
        (tmp_path / "docs/install.md").write_text(text)
        done = build(tmp_path, tmp_path / "site")
        assert done.returncode != 0, f"a link to {link} passed"
        assert "nowhere" in done.stderr


def test_every_knob_verb_and_recipe_is_explained() -> None:
    found, verbs, recipes = knob_pages(), command_page(), recipe_page()
    for knob in knobs():
        heading = f"### `{knob.path}` {{ #{anchor(knob.path)} }}"
        page_of = knob_page(knob.path)
        assert heading in found[page_of] or page_of.endswith(f"/{knob.path}.md")
    assert {"## `ingot run`", "### `ingot launch status`"} <= set(verbs.splitlines())
    for name in names():
        assert f"\n## {name} {{" in recipes


def test_the_matrix_is_what_recipes_are_refused_for() -> None:
    for way in OBJECTIVES.built_in:
        assert tables.refusal(way, ()) == "", "without an option the recipe must pass"
    assert set(tables.PLACES_PROVED) == set(PLACES.built_in), (
        "a new place: say how far it is proved"
    )
    assert tables.refusal("sft", tables.OPTIONS["tensor"]) == ""
    assert "cannot be staged" in tables.refusal("dpo", tables.OPTIONS["pipeline"])
    matrix = tables.methods()
    for way in OBJECTIVES.built_in:
        (row,) = re.findall(rf"^\| \[`{way}`\].*$", matrix, flags=re.MULTILINE)
        cells = [cell.strip() for cell in row.strip("|").split(" | ")][1:]
        refused = [bool(tables.refusal(way, knobs)) for knobs in tables.OPTIONS.values()]
        assert [cell.startswith("refused") for cell in cells] == refused
    assert all(f"| `{name}` |" in tables.families() for name in FAMILIES.built_in)


def test_a_knob_of_another_trainer_leads_to_a_knob_that_exists() -> None:
    assert "reference/knobs/train.md#train-micro_batch" in tables.adopted("axolotl")
    with pytest.raises(WrongInput, match=r"train\.microbatch"):
        tables._link("train.microbatch")
    for found in tables.MARKER.finditer(page("docs/coming-from.md")):
        assert tables.TABLES[found[1]](found[2] or "")


def test_the_chart_is_what_the_results_hold() -> None:
    assert FILE.read_text(encoding="utf-8") == chart(), "python -m pages.chart writes it anew"


def test_pictures_are_small() -> None:
    for path in (PROJECT / "docs/images").iterdir():
        assert path.stat().st_size < 150_000, path.name


def test_the_first_page_stays_short_and_leads_to_what_exists() -> None:
    readme = page("README.md")
    assert len(readme.splitlines()) <= 150
    for link in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (PROJECT / link).exists(), link
