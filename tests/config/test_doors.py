from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.base.lazy import lazy_import
from ingot.config import doors
from ingot.config.doors import BUILT_IN, Door, load_dotted

DOOR = Door("colour", {"red": "json:dumps"})


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, **entries: str) -> None:
    """A distribution in `folder`, as pip leaves it there, with these entry points."""
    info = folder / "paint-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paint\nVersion: 1.2\n")
    lines = "".join(f"colour.{kind} = {path}\n" for kind, path in entries.items())
    (info / "entry_points.txt").write_text(f"[ingot.plugins]\n{lines}size.big = json:loads\n")
    monkeypatch.syspath_prepend(str(folder))


def test_a_built_in_kind_is_what_its_path_names() -> None:
    import json

    assert DOOR.load("red", "wall.colour") is json.dumps
    assert DOOR.package_of("red") is None


def test_an_unknown_kind_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(
        WrongInput, match=r"wall\.colour is 'rad'; it should be one of 'red'; did you mean 'red'\?"
    ):
        DOOR.load("rad", "wall.colour")
    assert DOOR.find("rad") is None


def test_kinds_of_installed_packages_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    _install(tmp_path, monkeypatch, blue="json:loads", red="json:loads")
    assert DOOR.load("blue", "wall.colour") is json.loads
    assert DOOR.load("red", "wall.colour") is json.dumps, "a built-in kind cannot be replaced"
    assert DOOR.kinds() == ["red", "blue"]
    assert DOOR.package_of("blue") == "paint 1.2"


@pytest.mark.parametrize("shared", [False, True])
def test_the_code_of_a_kind_is_all_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """`shared`: the package is in a namespace in which others are, too."""
    place = tmp_path / "house" if shared else tmp_path
    for package in ("walls", "roofs"):
        (place / package / "inner").mkdir(parents=True)
        (place / package / "__init__.py").touch()
        (place / package / "inner" / "mixed.py").write_text("BLUE = 1\n")
    module = "house.walls.paints" if shared else "walls.paints"
    _install(tmp_path, monkeypatch, blue=f"{module}:BLUE")
    before = DOOR.code_of("blue")
    assert before is not None
    assert before.startswith("paint 1.2 (")
    (place / "roofs/inner/mixed.py").write_text("BLUE = 2\n")
    assert DOOR.code_of("blue") == before
    (place / "walls/inner/mixed.py").write_text("BLUE = 2\n")
    assert DOOR.code_of("blue") != before
    assert DOOR.code_of("red") is None


@pytest.mark.parametrize("name", ["chat.jinja", "words/french.txt", "words/table.json"])
def test_files_of_a_package_that_are_no_code_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    package = tmp_path / "doors"
    (package / "words").mkdir(parents=True)
    (package / "__init__.py").write_text("BLUE = 1\n")
    (package / name).write_text("one")
    _install(tmp_path, monkeypatch, blue="doors:BLUE")
    before = DOOR.code_of("blue")
    for made in ("__pycache__/a.pyc", "words/b.pyc", ".git/HEAD", ".chat.jinja.swp"):
        (package / made).parent.mkdir(exist_ok=True)
        (package / made).write_text("made by others")
    assert DOOR.code_of("blue") == before
    (package / name).write_text("two")
    assert DOOR.code_of("blue") != before


@pytest.mark.parametrize("listed", [("RECORD", "shades.py,,\n"), ("top_level.txt", "shades\n")])
def test_the_modules_of_a_distribution_are_one_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: tuple[str, str]
) -> None:
    """As an installer lists them; and as it names them of what is installed where it lies."""
    for module in ("paints", "shades", "others"):
        (tmp_path / f"{module}.py").write_text("BLUE = 1\n")
    _install(tmp_path, monkeypatch, blue="paints:BLUE")
    name, text = listed
    (tmp_path / "paint-1.2.dist-info" / name).write_text(text)
    before = DOOR.code_of("blue")
    (tmp_path / "others.py").write_text("BLUE = 2\n")
    assert DOOR.code_of("blue") == before
    (tmp_path / "shades.py").write_text("BLUE = 2\n")
    assert DOOR.code_of("blue") != before


def test_code_is_read_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "glazes.py"
    _install(tmp_path, monkeypatch, blue="glazes:BLUE")
    read = list[str]()
    monkeypatch.setattr(
        doors, "sha256_file", lambda path: read.append(path) or Path(path).read_text()
    )
    found = []
    for day, text in enumerate(("BLUE = 1\n", "BLUE = 2\n")):
        file.write_text(text)
        os.utime(file, (day, day))
        found += [DOOR.code_of("blue"), DOOR.code_of("blue")]
    assert read == [str(file), str(file)]
    assert found[0] == found[1] != found[2] == found[3]


def test_a_package_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, monkeypatch, blue="json:no_such_thing")
    with pytest.raises(WrongInput, match=r"colour\.blue = json:no_such_thing of paint cannot"):
        DOOR.find("blue")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("BLUE = undefined", "NameError: name 'undefined'"),
        ("def (:", "SyntaxError"),
        ("1 / 0", "Ze"),
    ],
)
def test_a_package_whose_code_fails_is_named(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, monkeypatch, blue="failing_paint:BLUE")
    (tmp_path / "failing_paint.py").write_text(code)
    told = rf"colour\.blue = failing_paint:BLUE of paint cannot be imported \({words}"
    with pytest.raises(WrongInput, match=told):
        DOOR.find("blue")


def test_two_packages_with_the_same_kind_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path / "one", monkeypatch, blue="json:loads")
    _install(tmp_path / "two", monkeypatch, blue="json:load")
    (tmp_path / "two/paint-1.2.dist-info").rename(tmp_path / "two/other-1.dist-info")
    metadata = tmp_path / "two/other-1.dist-info/METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    with pytest.raises(WrongInput, match=r"two installed packages bring colour\.blue"):
        DOOR.find("blue")


def test_a_lazy_module_is_imported_when_it_is_used() -> None:
    code = (
        "import sys; from ingot.base.lazy import lazy_import; m = lazy_import('colorsys');"
        " before = 'colorsys' in sys.modules; m.rgb_to_hsv(0, 0, 0);"
        " print(before, 'colorsys' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    assert lazy_import("math").pi > 3


@pytest.mark.parametrize(
    ("door", "kind"), [(door, kind) for door, kinds in BUILT_IN.items() for kind in kinds]
)
def test_every_row_of_the_table_leads_somewhere(door: str, kind: str) -> None:
    assert load_dotted(BUILT_IN[door][kind]) is not None
