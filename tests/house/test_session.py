"""What the tests say of themselves: their order, and what was not proved."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree

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


LOOP = """
import os, sys, pytest
for seed in range(8):
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
    seen = set()
    for said in done.stdout.split("end\n")[:-1]:
        found = [line.partition("::")[2] for line in said.splitlines() if "::" in line]
        assert [name.partition("[")[0] for name in found] in (
            ["test_a", "test_b", "test_d", "test_e", "test_e"],
            ["test_a", "test_c", "test_d", "test_e", "test_e"],
        ), said
        assert len(set(found)) == len(found)
        seen |= set(found)
    each = {f"test_e[{case}]" for case in (1, 2, 3, 4)}
    assert seen == {"test_a[1]", "test_a[2]", "test_a[3]", "test_b", "test_c", "test_d", *each}


def test_a_change_runs_the_tests_above_it_and_no_others() -> None:
    page = graph.tests_of(["ingot/report/page.py"])
    assert "tests/report/test_page.py" in page
    assert "tests/models/native/test_decoder.py" not in page
    errors = graph.tests_of(["ingot/base/errors.py"])
    assert len(errors) > 4 * len(page) / 2
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


SHARED_OUT = {
    "conftest.py": """
        import os
        import pytest
        from tests.conftest import pytest_addoption
        from tests.workers import Workers
        os.environ["PARENT"] = str(os.getpid())
        def pytest_configure(config):
            config.pluginmanager.register(Workers(config.getoption("--workers")))
        @pytest.fixture(scope="session")
        def made(tmp_path_factory):
            folder = tmp_path_factory.mktemp("made", numbered=False)
            yield folder
            (folder / "ended").touch()
        """,
    "test_a.py": """
        import os, pytest, warnings
        def test_fails(made):
            print("of the one that failed")
            assert os.getpid() == int(os.environ["PARENT"])
        def test_dies(made): os._exit(3)
        def test_after_it(made): warnings.warn("be warned")
        @pytest.mark.skip(reason="not here")
        def test_skipped(): pass
        """,
    "test_b.py": """
        import os, pytest
        from pathlib import Path
        @pytest.mark.parametrize("number", range(4))
        def test_together(number, made):
            with Path(os.environ["TOLD"]).open("a") as told:
                told.write(f"{os.getpid()} {made}\\n")
        """,
}


def test_workers_share_the_tests_out_and_tell_all_of_them(tmp_path: Path) -> None:
    for name, text in SHARED_OUT.items():
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")

    def run(*arguments: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--workers=2", "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(graph.PROJECT),
                "PYTEST_ADDOPTS": "",
                "TOLD": str(tmp_path / "told"),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout.splitlines()

    said = run("-v", "--junitxml=all.xml", "--basetemp=base")
    outcomes = {tuple(line.split()[:2]) for line in said if re.match(r"test_.*::.* [A-Z]+ ", line)}
    assert outcomes == {
        ("test_a.py::test_fails", "FAILED"),
        ("test_a.py::test_dies", "FAILED"),
        ("test_a.py::test_after_it", "PASSED"),
        ("test_a.py::test_skipped", "SKIPPED"),
        *((f"test_b.py::test_together[{number}]", "PASSED") for number in range(4)),
    }
    assert "2 failed, 5 passed, 1 skipped, 1 warning" in said[-1]
    assert "of the one that failed" in said
    assert "the process that ran it ended with 3" in said
    assert any("UserWarning: be warned" in line for line in said)
    cases = ElementTree.parse(tmp_path / "all.xml").getroot().iter("testcase")
    assert sum(1 for _ in cases) == 8
    # A file's tests in one process, with one set of fixtures, which end before it does; the process
    # that died had no time to.
    told = (tmp_path / "told").read_text(encoding="utf-8").splitlines()
    assert len(told) == 4
    assert len(set(told)) == 1
    folders = list((tmp_path / "base").glob("*/made"))
    assert sum((folder / "ended").exists() for folder in folders) == len(folders) - 1 == 2
    assert "stopping after 1 failures" in "\n".join(run("-x"))
