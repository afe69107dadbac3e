"""Which model a name stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.base.reports import begin_record
from ingot.base.runfolder import RunFolder
from ingot.config.models.lineage import LINEAGE
from ingot.config.models.source import CONFIG, named_folder


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_model_by_its_run_is_told_once_where_it_may_be_an_earlier_trainings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
) -> None:
    run = RunFolder(tmp_path / "first")
    run.model.mkdir(parents=True)
    (run.model / CONFIG).write_text("{}")
    (run.model / LINEAGE).write_text('{"step": 8}')
    assert named_folder(str(run.root), "model.source") == run.model
    begin_record(run.steps, "train")
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert named_folder(str(run.model), "model.source") == run.model, "who names it means it"
    assert capsys.readouterr().err == ""
    for knob in ("model.source", "objective.teacher", "evaluate.model"):
        assert named_folder(str(run.root), knob) == run.model
    told = f"`train` was begun in {run.root} and has not ended, so {run.model} (step 8) may be"
    assert capsys.readouterr().err.count(told) == (rank == "0")
