"""What the tests say of themselves: their order, and what was not proved."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import graph
from tests.changed import differing, main
from tests.session import HOW, known_times, not_proved, slowest_first


def test_the_slowest_file_comes_first() -> None:
    order = slowest_first({"a", "b", "c"}, {"a": 1.0, "c": 60.0})
    assert sorted(order, key=lambda file: order[file]) == ["c", "b", "a"]


def test_times_are_of_files_that_there_are() -> None:
    missing = [file for file in known_times() if not (graph.PROJECT / file).exists()]
    assert len(missing) < len(known_times()) / 4 + 1, "out of date; `make times` writes them anew"


def test_what_was_not_proved_is_one_line_each_with_the_way_to_have_it() -> None:
    lines = not_proved(
        [
            ("tests/launch/places/test_slurm.py", "slurmctld, sbatch not installed; not root"),
            ("tests/launch/places/test_slurm.py", "slurmctld, sbatch not installed; not root"),
            ("tests/data/engines/test_spark.py", "Spark needs Java; install Java 17"),
            ("tests/x/test_other.py", "the moon is not full"),
        ]
    )
    assert lines == [
        "1 test of data/engines/test_spark.py: Spark needs Java; install Java 17; to prove it:"
        " apt install openjdk-17-jre-headless",
        "2 tests of launch/places/test_slurm.py: slurmctld, sbatch not installed; not root; to prove it:"
        f" {HOW['slurm|munge|sbatch']}",
        "1 test of x/test_other.py: the moon is not full",
    ]


DRAWN = """
import pytest
@pytest.mark.drawn
@pytest.mark.parametrize("case", [1, 2, 3])
def test_a(case): pass
@pytest.mark.drawn("places")
def test_b(): pass
@pytest.mark.drawn("places")
def test_c(): pass
def test_d(): pass
@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("case", [1, 2, 3, 4])
def test_e(case): pass
"""


SEEDS = 32
LOOP = f"""
import os, sys, pytest
for seed in range({SEEDS}):
    os.environ["TEST_DRAW"] = str(seed)
    pytest.main(["--collect-only", "-q", "-m", "not slow", "-p", "no:cacheprovider", "."])
    print("end")
"""


def test_one_of_a_group_is_drawn_by_the_commit(tmp_path: Path) -> None:
    (tmp_path / "test_drawn.py").write_text(DRAWN, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_collection_modifyitems", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-c", LOOP],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(graph.PROJECT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    seen, draws = set(), 0
    for said in done.stdout.split("end\n")[:-1]:
        found = [line.partition("::")[2] for line in said.splitlines() if "::" in line]
        tests = Counter(name.partition("[")[0] for name in found)
        assert tests["test_a"] <= 1, said
        assert tests["test_b"] + tests["test_c"] <= 1, said
        assert (tests["test_d"], tests["test_e"]) == (1, 2), said
        assert len(set(found)) == len(found)
        draws += tests["test_a"]
        seen |= set(found)
    assert 0 < draws < SEEDS
    each = {f"test_e[{case}]" for case in (1, 2, 3, 4)}
    assert seen == {"test_a[1]", "test_a[2]", "test_a[3]", "test_b", "test_c", "test_d", *each}


@pytest.mark.drawn("the graph of imports")
def test_a_change_runs_the_tests_above_it_and_no_others() -> None:
    page = graph.tests_of(["ingot/report/page.py"])
    assert "tests/report/test_page.py" in page
    assert "tests/models/native/test_decoder.py" not in page
    errors = graph.tests_of(["ingot/base/errors.py"])
    assert len(errors) > 2 * len(page)
    preferences = graph.tests_of(["ingot/objectives/preferences.py"])
    assert any(test.startswith("tests/train/") for test in preferences), "named in a table alone"
    assert len(graph.tests_of(["pyproject.toml"])) == len(
        [file for file in graph.files() if graph.is_test(file)]
    )
    assert "tests/house/test_recipes.py" in graph.tests_of(["ingot/recipes/quickstart.yaml"])


def test_files_that_git_does_not_know_yet_are_changed_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if (graph.PROJECT / ".git").exists():
        monkeypatch.setattr(sys, "argv", ["changed"])
        main()
        assert capsys.readouterr().out.split() == graph.tests_of(differing("HEAD"))
