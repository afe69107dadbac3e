"""Recipes of the package are found by name, paths stay paths, and what could be both is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.config.load import load_recipe
from ingot.config.shipped import FOLDER, names, resolve, shipped, tell_names


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("given", ["quickstart", "places/laptop", "recipes/quickstart.yaml"])
def test_names_and_documented_paths_mean_the_packages_files(given: str) -> None:
    path, _ = resolve(given)
    assert path.is_file()
    assert path.is_relative_to(FOLDER)


def test_a_name_and_a_place_make_a_recipe_in_an_empty_folder() -> None:
    loaded = load_recipe(["quickstart", "places/laptop"], environ={}, dotenv=None)
    assert (loaded.name, loaded.launch.kind) == ("quickstart", "local")


@pytest.mark.parametrize("given", ["./quickstart", "my/quickstart.yaml", "quickstart.yaml", "."])
def test_a_path_is_a_path(given: str) -> None:
    assert resolve(given) == (Path(given), None)


def test_commands_get_paths_for_names_and_paths_as_given() -> None:
    """What begins with a dash is an option without its `./`."""
    given = ["./-r.yaml", "./t5_small", "my//r.yaml"]
    assert tell_names([*given, "quickstart"]) == [*given, str(FOLDER / "quickstart.yaml")]
    assert tell_names(["-r.yaml", "-a/-r.yaml"]) == ["./-r.yaml", "./-a/-r.yaml"]


def test_what_a_name_could_mean_beside_is_told(here: Path) -> None:
    assert resolve("quickstart")[1] is None
    (here / "quickstart.yaml").write_text("name: mine\n")
    path, note = resolve("quickstart")
    assert path == FOLDER / "quickstart.yaml"
    assert note
    assert "quickstart.yaml here is not read" in note
    (here / "t5_small").write_text("name: mine\n")
    path, note = resolve("t5_small")
    assert path == Path("t5_small")
    assert note
    assert "the file t5_small is read" in note
    (here / "recipes").mkdir()
    (here / "recipes/quickstart.yaml").write_text("name: mine\n")
    assert resolve("recipes/quickstart.yaml") == (Path("recipes/quickstart.yaml"), None)
    assert "no recipes/t5_small.yaml here" in (resolve("recipes/t5_small.yaml")[1] or "")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("quikstart", "did you mean `quickstart`"),
        ("places/labtop", "did you mean `places/laptop`"),
        ("t5_small.yaml", "`ingot init t5_small` copies it here"),
        ("some/where.yaml", "check the path"),
        ("unheard", "`ingot recipes` lists"),
    ],
)
def test_what_is_not_there_leads_on(given: str, told: str) -> None:
    with pytest.raises(WrongInput, match=r"does not exist; ") as raised:
        load_recipe([given], environ={}, dotenv=None)
    assert told in str(raised.value)


def test_everything_shipped_says_what_it_is_and_needs() -> None:
    assert list(shipped()) == [*[name for name in names() if "/" not in name]] + [
        name for name in names() if "/" in name
    ]
    for each in shipped().values():
        assert each.about.endswith("."), each.name
        assert each.recipes if each.is_place else {"hardware", "time"} <= set(each.fields)
    assert set(shipped()) >= {name for each in shipped().values() for name in each.recipes}
