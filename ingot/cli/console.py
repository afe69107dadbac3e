"""Run folders and existing reports for the command line, without torch."""

from __future__ import annotations

import os
from pathlib import Path

from ingot.base.console import console
from ingot.base.errors import WrongInput
from ingot.base.reports import read_report
from ingot.base.runfolder import RunFolder
from ingot.config.shipped import names
from ingot.evaluate import report as table


def run_folder(target: str, *more: str) -> RunFolder:
    """The run folder given by its path, or by the recipe that makes it and `more` recipes and
    overrides. Raises WrongInput if `target` is neither, or `more` stands beside a run folder.
    """
    given = (target, *more)
    if any(map(os.path.isdir, given)):
        if more:
            raise WrongInput(
                f"{' '.join(given)}: a run folder stands alone, since its recipe is made; give it"
                " without overrides, or a recipe with them"
            )
        return RunFolder(Path(target))
    path = Path(target)
    is_recipe = target in names() or path.exists() or path.suffix in (".yaml", ".yml")
    if not more and not is_recipe:
        raise WrongInput(f"{target} is neither a run folder nor a recipe; check the path")
    from ingot.config.load import read_recipe

    return read_recipe(given).folder


def show_report(run: RunFolder) -> None:
    """The metrics in `reports/evaluate.json`."""
    table.show_report(read_report(run.reports / "evaluate.json"), console())
