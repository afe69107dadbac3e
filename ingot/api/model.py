"""A trained model as an object: completions, chats and log-probabilities in this process."""

from __future__ import annotations

import numbers
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.base.runfolder import RunFolder, model_folder
from ingot.config.models.lineage import earlier_model
from ingot.models.native.decoder import Decoder
from ingot.serve.http.logprobs import text_of
from ingot.serve.native.model import load
from ingot.serve.predict import PredictOptions, check_characters, predict_locally

Message = Mapping[str, Any]


@dataclass(frozen=True)
class TokenLogprob:
    """A token of a text, and the natural logarithm of its probability after the tokens before it;
    None for the first one, which nothing precedes.
    """

    id: int
    text: str
    logprob: float | None


class Model:
    """A model folder, or the run folder of a trained one; weights are loaded at once. Several
    threads may ask it: it answers them in turn.

    Examples:
        >>> model = ingot.Model("runs/quickstart")
        >>> model.generate("def main(", max_tokens=40)

    Raises:
        WrongInput: no model folder, or one without its tokenizer.
    """

    def __init__(self, folder: str | Path, *, any_template: bool = True) -> None:
        """`any_template`: also load a chat model whose template was replaced since its training."""
        given = Path(folder).expanduser()
        if given.is_file():
            raise WrongInput(f"{given} is a file; give the folder that it is in, {given.parent}")
        self.folder = model_folder(given)
        if doubt := earlier_model(RunFolder(given)):
            say(f"note: {doubt}")
        self._loaded = load(self.folder, any_template=any_template)
        self.kind, self.tokenizer = self._loaded.kind, self._loaded.tokenizer
        self._alone = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_alone"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._alone = threading.Lock()

    def __repr__(self) -> str:
        return f"<ingot model {self.folder}, {self.kind}>"

    def generate(self, prompt: str, **options: Any) -> str:
        """The completion without the prompt; the text of a sequence-to-sequence model; the label of
        a classifier. Options are those of `ingot predict`: max_tokens, temperature, top_p, seed,
        stop (a list of texts), beams.
        """
        return self._answer(prompt, **options)

    def chat(self, messages: str | Sequence[Message], **options: Any) -> str:
        """The answer to a user's message, or to a list of messages with `role` and `content`."""
        return self._answer(messages, chat=True, **options)

    def scores(self, text: str | Sequence[Message]) -> dict[str, float]:
        """A classifier's probability of each label; the score that a reward model gives a list of
        messages, answers included.
        """
        if self.kind != "encoder":
            raise WrongInput(f"{self.folder} is of kind {self.kind}; scores are for classifiers")
        return self._predict(text, PredictOptions())[1]

    def logprobs(self, text: str) -> list[TokenLogprob]:
        """The log-probability of each token of a text, special tokens at its beginning included.

        Raises:
            WrongInput: the model is not a decoder of ingot's own, or the text has more tokens than
                the model has positions.
        """
        model = self._loaded.model
        if not isinstance(model, Decoder):
            raise WrongInput(f"{self.folder}: log-probabilities are for native decoders alone")
        if not isinstance(text, str):
            raise WrongInput(f"a text is needed, not {text!r}")
        check_characters("the text", text)
        ids = self._loaded.encode(text)
        positions = model.config.max_position_embeddings
        if not 0 < len(ids) <= positions:
            raise WrongInput(f"the text has {len(ids):,} tokens; give 1 to {positions:,}")
        device = model.head_weight.device
        with self._loaded.fewest_threads(), torch.no_grad():
            tokens = torch.tensor([ids], device=device)  # [1, T]
            places = torch.arange(len(ids), device=device).expand_as(tokens)
            logits = model.logits(model.hidden(tokens, places))[0, :-1].float()  # [T - 1, V]
            found = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].tolist()
        return [
            TokenLogprob(id, text_of(self.tokenizer, ids[place - 1 : place], id), logprob)
            for place, (id, logprob) in enumerate(zip(ids, [None, *found], strict=True))
        ]

    def _answer(self, prompt: str | Sequence[Message], **options: Any) -> str:
        known = PredictOptions.__dataclass_fields__
        if unknown := sorted(options.keys() - known):
            raise WrongInput(f"there is no option {unknown[0]}; there are {', '.join(known)}")
        stop = options.pop("stop", None)
        if not isinstance(stop, Iterable | None):
            raise WrongInput(f"stop is {stop!r}; give a text or a list of texts")
        options["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if "" in options["stop"]:
            raise WrongInput("stop has an empty text, which every answer begins with; leave it out")
        chosen = PredictOptions(**{name: _plain(value) for name, value in options.items()})
        chosen.check(self.kind)
        return self._predict(prompt, chosen)[0]

    def _predict(
        self, prompt: str | Sequence[Message], options: PredictOptions
    ) -> tuple[str, dict[str, float]]:
        # A sequence-to-sequence model has hooks of one text in its layers while it answers.
        with self._alone:
            return predict_locally(self._loaded, prompt, options)


def _plain(value: Any) -> Any:
    """numpy's numbers as Python's, which they are as good as."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value
