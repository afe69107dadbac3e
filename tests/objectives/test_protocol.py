"""What is no objective is refused when it is made."""

from __future__ import annotations

from typing import Any, Literal, cast

import pytest
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.config.sections.objective import ObjectiveSettings
from ingot.data.batches.loader import Batch
from ingot.objectives.protocol import ObjectiveInputs, make_objective


class Partial(ObjectiveSettings):
    """A way of training whose code lacks a method."""

    implementation = "Lacking"
    document_kind = "text"
    kind: Literal["partial"] = "partial"


class Lacking:
    def __init__(self, settings: Partial, inputs: ObjectiveInputs) -> None: ...

    def targets(self, batch: Batch) -> int:
        return 1

    def token(self, view: Any, labels: Tensor, extras: Tensor | None) -> Tensor:
        return labels

    def reduce(self, values: Tensor, batch: Batch, all_sum: Any) -> tuple[Tensor, dict[str, Any]]:
        return values.sum(), {}


def test_a_method_that_an_objective_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    words = r"objective\.kind partial is a Lacking, which has no method extras"
    with pytest.raises(WrongInput, match=words):
        make_objective(Partial(), ObjectiveInputs())
    monkeypatch.setattr(cast("Any", Lacking), "extras", lambda *_: None, raising=False)
    make_objective(Partial(), ObjectiveInputs())
