"""A classifier's folder as a reward: the probabilities that `ingot predict` shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.config.sections.rewards import ClassifierReward
from ingot.rewards.build import build_rewards
from ingot.rewards.protocol import Sample
from ingot.serve.native.model import load
from ingot.serve.predict import PredictOptions, predict_locally
from tests import tolerances
from tests.models.hf.tiny import LABELS
from tests.serve.tiny import make_classifier, make_scorer

TEXTS = ("the quick fox", "", "a lazy dog " * 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("classifier") / "model")


def test_its_value_is_the_probability_that_predict_shows(folder: Path) -> None:
    loaded, threads = load(folder), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shown = ClassifierReward(
            kind="classifier",
            model=str(folder),
            class_name=LABELS[1],
            reads="prompt and answer",
            batch=2,
        )
        listed = [shown.model_copy(update={"reads": "answer", "name": "alone"}), shown]
        with build_rewards(listed) as rewards:
            assert torch.get_num_threads() == 2, "a small model leaves the trainer its threads"
            scores = rewards([*(Sample("why", text) for text in TEXTS), Sample("", "fox " * 99)])
    finally:
        torch.set_num_threads(threads)
    for name, before in (("alone", ""), ("classifier", "why\n\n")):
        wanted = [
            predict_locally(loaded, before + text, PredictOptions())[1][LABELS[1]] for text in TEXTS
        ]
        *found, too_long = scores.each[name]
        assert found == pytest.approx(wanted, abs=tolerances.LOGITS_FP32)
        assert too_long is None
        assert "the model has 64 positions" in scores.reasons[name]


def test_what_is_no_classifier_or_no_class_is_refused(folder: Path, tmp_path: Path) -> None:
    wrong = ClassifierReward(kind="classifier", model=str(folder), class_name="none")
    with pytest.raises(WrongInput, match="class_name 'none' is not a class of"):
        build_rewards([wrong])
    nowhere = ClassifierReward(kind="classifier", model=str(tmp_path), class_name="none")
    with pytest.raises(WrongInput, match="reward classifier: "):
        build_rewards([nowhere])


def test_a_reward_model_scores_prompt_and_answer_as_a_chat(tmp_path: Path) -> None:
    folder = make_scorer(tmp_path / "model")
    settings = ClassifierReward(kind="classifier", model=str(tmp_path), batch=2)  # a run's folder
    with build_rewards([settings]) as rewards:
        samples = [Sample("why", text) for text in TEXTS if text]
        scores = rewards([*samples, Sample("why", "fox", alone=False)])
    *found, seen_in_part = scores.each["classifier"]
    loaded = load(folder)
    chats = [
        [{"role": "user", "content": one.prompt}, {"role": "assistant", "content": one.answer}]
        for one in samples
    ]
    wanted = [predict_locally(loaded, chat, PredictOptions())[1]["score"] for chat in chats]
    assert found == pytest.approx(wanted, abs=tolerances.LOGITS_FP32)
    assert max(abs(score) for score in wanted) > 1e-3
    assert len({round(score, 5) for score in wanted}) == len(wanted)
    assert seen_in_part is None
    assert "turns before its last one" in scores.reasons["classifier"]
    with pytest.raises(WrongInput, match="leave class_name out"):
        build_rewards([settings.model_copy(update={"class_name": "score"})])


def test_a_classifier_wants_a_class(folder: Path) -> None:
    with pytest.raises(WrongInput, match="set class_name to one of them"):
        build_rewards([ClassifierReward(kind="classifier", model=str(folder))])
