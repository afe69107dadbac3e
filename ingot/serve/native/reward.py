"""A classifier as a reward. It stands in this room, which loads model folders; the door of rewards
names it by its path, so that the room of rewards needs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.base.runfolder import model_folder
from ingot.config.models.content import LABELS
from ingot.config.models.lineage import read_lineage
from ingot.config.models.source import model_config
from ingot.config.sections.rewards import ClassifierReward
from ingot.models.adapters.peft import class_count
from ingot.models.adapters.peft_config import is_adapter
from ingot.models.generation.classifier import classify
from ingot.models.generation.seq2seq import check_text
from ingot.models.hf.models import Encoder
from ingot.models.kinds import kind_of_folder
from ingot.rewards.protocol import RewardFailed, Sample
from ingot.serve.native.model import load
from ingot.tokenizers.chats.chat import Chat


class ClassifierScore:
    """The probability of a class, or the score of a reward model, by a model on this machine's
    accelerator beside the trained one.
    """

    def __init__(self, settings: ClassifierReward) -> None:
        self._settings = settings
        self._loaded = load(model_folder(Path(settings.model)), any_template=True)
        name = settings.class_name
        self._place = 0 if name is None else labels_of(settings).index(name)

    @staticmethod
    def check(settings: ClassifierReward) -> None:
        """Raises WrongInput for what is no classifier, or has no such class; or, without a class,
        for what is no reward model.
        """
        folder = model_folder(Path(settings.model))
        if kind_of_folder(folder) != "encoder":
            raise WrongInput(f"{folder} is no classifier; give the folder of one")
        labels = labels_of(settings)
        if (settings.class_name is None) != (len(labels) == 1):
            raise WrongInput(
                f"{folder} has one output, a score; leave class_name out"
                if len(labels) == 1
                else f"{folder} tells {', '.join(labels)} apart; set class_name to one of them"
            )
        if settings.class_name is not None and settings.class_name not in labels:
            raise WrongInput(
                f"class_name {settings.class_name!r} is not a class of {folder}, which has"
                f" {', '.join(labels)}; name one of them"
            )

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        model = self._loaded.model
        assert isinstance(model, Encoder)
        texts = [self._encoded(sample) for sample in samples]
        for text in texts:
            try:
                check_text(text, model.config)
            except WrongInput as error:
                raise RewardFailed(str(error)) from None
        size = self._settings.batch
        scores = [
            each
            for first in range(0, len(texts), size)
            for each in classify(model, texts[first : first + size])
        ]
        return [each[self._place] for each in scores]

    def _encoded(self, sample: Sample) -> list[int]:
        if not self._loaded.scores_chats:
            return self._loaded.encode(self._text(sample))
        if not sample.alone:
            raise RewardFailed(
                "the prompt has turns before its last one, which a reward model would not see; take"
                " prompts of one turn"
            )
        turns = (("user", sample.prompt), ("assistant", sample.answer))
        return self._loaded.encode_whole_chat(
            Chat([{"role": role, "content": text} for role, text in turns])
        )

    def _text(self, sample: Sample) -> str:
        if self._settings.reads == "answer":
            return sample.answer
        return f"{sample.prompt}\n\n{sample.answer}"


def labels_of(settings: ClassifierReward) -> list[str]:
    """The names of the model's classes, in the order of its scores."""
    folder = model_folder(Path(settings.model))
    if is_adapter(folder):
        named: list[str] | None = (read_lineage(folder) or {}).get(LABELS)
        return named or [str(number) for number in range(class_count(folder) or 0)]
    given = model_config(folder).get("id2label") or {}
    return [str(given[number]) for number in sorted(given, key=int)]
