"""Verdicts of encoders: transformers' own, whoever else is in the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.models.generation.classifier import Classifier, classify
from ingot.models.generation.request import Request
from ingot.models.hf.models import Encoder
from tests import tolerances
from tests.models.hf.tiny import ENCODERS, LABELS, VOCAB, drawn, reference

TEXTS = [
    torch.randint(4, VOCAB - 2, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (12, 5, 9, 1, 30, 17, 3, 8)
]


def encoder(name: str) -> Encoder:
    made = drawn(name)
    assert isinstance(made, Encoder)
    return made


@pytest.mark.parametrize("name", ENCODERS)
def test_probabilities_are_transformers_own(name: str, tmp_path: Path) -> None:
    model = encoder(name)
    opened = reference(model, tmp_path)
    with torch.no_grad():
        wanted = torch.cat(
            [opened(input_ids=torch.tensor([text])).logits.softmax(dim=-1) for text in TEXTS]
        )
    torch.testing.assert_close(
        torch.tensor(classify(model, TEXTS)), wanted, rtol=0, atol=tolerances.LOGITS_FP32
    )
    assert wanted.std(dim=0).max() > 100 * tolerances.LOGITS_FP32, "the texts must differ"


def test_a_classifier_judges_what_waits_a_batch_at_a_time() -> None:
    model = encoder("bert")
    classifier = Classifier(model, max_rows=3)
    jobs = [classifier.add(Request(text, 1)) for text in TEXTS]
    classifier.cancel(jobs.pop(1))
    steps = []
    while classifier.busy:
        steps.append(classifier.step())
    assert [len(step) for step in steps] == [3, 3, 1]
    assert [job for step in steps for job, _ in step] == jobs
    for job, piece in (item for step in steps for item in step):
        (wanted,) = classify(model, [job.request.prompt])
        assert piece.scores == pytest.approx(wanted, abs=tolerances.LOGITS_FP32)
        assert sum(piece.scores) == pytest.approx(1)
        assert piece.text == LABELS[wanted.index(max(wanted))]
        assert (piece.finish, piece.tokens, piece.generated) == ("stop", (), 0)
    classifier.add(Request(TEXTS[0], 1))
    classifier.clear()
    assert (classifier.busy, classifier.step()) == (0, [])


def test_what_cannot_be_judged() -> None:
    model = encoder("roberta")
    classifier = Classifier(model)
    for text, words in (
        ([], "the text is empty"),
        ([5] * 65, "65 tokens, but the model has 64 positions"),
        ([99], "token 99 is not in the vocabulary"),
    ):
        with pytest.raises(WrongInput, match=words):
            classifier.add(Request(text, 1))
    classifier.add(Request([5] * 64, 1))
    with torch.no_grad():
        model.inner.classifier.out_proj.bias.fill_(float("nan"))
    ((_, piece),) = classifier.step()
    assert (piece.finish, piece.text) == ("error", "")
