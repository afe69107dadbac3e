"""What the folder of a model says here, by the command that a deployment runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.registry.vertexai import objects, probe
from tests.cli.commands import ingot
from tests.models.hf.tiny import LABELS
from tests.serve.tiny import make_classifier, make_folder


@pytest.mark.parametrize("make", [make_folder, make_classifier])
def test_a_model_of_any_kind_answers_here_whatever_its_prompt_begins_with(
    tmp_path: Path, make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "model")

    def forked(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return ingot(*command[3:])

    monkeypatch.setattr(probe, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": forked}))
    classifies = objects.is_classifier(folder)
    answer = probe.local_answer(folder, "- the quick brown fox", classifies)
    assert answer in LABELS if classifies else answer
