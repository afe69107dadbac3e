"""`ingot verify export` on what training makes of every family, with and without an adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.train.trainer import train
from ingot.verify.export import proof as export
from ingot.verify.export.proof import verify_export
from tests.parallel.proving import EVERY, recipe_of
from tests.small import copy_of, small_recipe
from tests.verify.serving import served_here


@pytest.mark.drawn("the export of a family")
@pytest.mark.parametrize("family", EVERY)
def test_the_export_is_the_trained_model(
    family: str, prepared_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "server", served_here)
    whole = recipe_of(copy_of(prepared_root, tmp_path / "whole"), family, train__steps=2)
    train(whole)
    proof = verify_export(whole)
    assert proof.holds, [one for one in proof.checks if one.passed is False]
    adapted = small_recipe(
        copy_of(prepared_root, tmp_path / "adapted"),
        model__source=str(whole.folder.model),
        model__config=None,
        model__init="weights",
        model__lora=json.dumps({"rank": 4}),
        train__steps=2,
    )
    train(adapted)
    proof = verify_export(adapted)
    assert proof.holds, [one for one in proof.checks if one.passed is False]
