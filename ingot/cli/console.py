"""Console and existing reports for the command line, without torch."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ingot.base.errors import WrongInput
from ingot.base.reports import read_report
from ingot.base.runfolder import RunFolder
from ingot.config.shipped import names
from ingot.evaluate import report as table

PLAIN_WIDTH = 140


def console() -> Console:
    """A console as wide as the terminal, elsewhere wide enough for paths."""
    made = Console(highlight=False)
    if not made.is_terminal:
        made.width = PLAIN_WIDTH
    return made


def run_folder(target: str) -> RunFolder:
    """The run folder given by its path or by its recipe. Raises WrongInput if `target` is
    neither.
    """
    path = Path(target)
    own = target in names() and not path.is_dir()
    if not own and not path.exists() and path.suffix not in (".yaml", ".yml"):
        raise WrongInput(f"{target} is neither a run folder nor a recipe; check the path")
    if path.is_dir():
        return RunFolder(path)
    from ingot.config.load import read_recipe

    return read_recipe([target]).folder


def show_report(run: RunFolder) -> None:
    """The metrics in `reports/evaluate.json`, as `ingot evaluate` showed them when it wrote
    them.
    """
    table.show_report(read_report(run.reports / "evaluate.json"), console())
