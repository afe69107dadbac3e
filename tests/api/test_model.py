"""`ingot.Model`: answers are those of `ingot predict`, log-probabilities those of transformers."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import ingot
from ingot.api.curve import LiveCurve
from ingot.api.run import StepMetrics
from ingot.config.models.lineage import LINEAGE
from ingot.serve import predict
from ingot.serve.native import compute
from ingot.serve.native.model import LoadedModel
from tests.cli.commands import ingot as command
from tests.cli.tiny_model import write_model
from tests.lazy import lazy
from tests.small import copy_of

torch, transformers = lazy("torch"), lazy("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    return write_model(place / "tiny", special=["<|im_start|>", "<|im_end|>"])


@pytest.fixture(scope="module")
def model(folder: Path) -> ingot.Model:
    return ingot.Model(folder)


def test_it_answers_as_predict_does(model: ingot.Model, folder: Path) -> None:
    done = command("predict", str(folder), "the mould", "max_tokens=7", "temperature=0.8", "seed=3")
    assert done.returncode == 0, done.stderr
    answer = model.generate("the mould", max_tokens=7, temperature=0.8, seed=3)
    assert f"{answer}\n" == done.stdout


def test_logprobs_are_those_of_transformers(model: ingot.Model, folder: Path) -> None:
    found = model.logprobs("the mould cools slowly")
    assert "".join(token.text for token in found).endswith("slowly")
    assert found[0].logprob is None
    other = transformers.AutoModelForCausalLM.from_pretrained(folder).float()
    ids = torch.tensor([[token.id for token in found]])
    with torch.no_grad():
        wanted = other(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    ours = torch.tensor([token.logprob for token in found[1:]])
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


def test_tokens_are_named_as_the_server_names_them(folder: Path, tmp_path: Path) -> None:
    """SentencePiece drops the space before a word that is decoded alone."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    learning = tokenizers.trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"])
    made.train_from_iterator(["the mould cools slowly"], learning)
    place = copy_of(folder, tmp_path / "model")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(place)
    (place / LINEAGE).unlink()
    found = ingot.Model(place).logprobs("the mould cools")
    assert [token.text for token in found] == ["the", " mould", " cools"]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda model: model.generate("a", max_token=3), "there is no option max_token"),
        (lambda model: model.generate([{"role": "user", "content": "a"}]), "is for chat"),
        (lambda model: model.scores("a"), "scores are for classifiers"),
        (lambda model: model.generate("a", beams=3), "beams 3 is for sequence-to-sequence"),
        (lambda model: model.logprobs("a" * 100_000), "tokens; give 1 to"),
        (lambda model: model.chat("Who?"), "template"),
        (lambda model: model.generate("a", temperature=-1), "temperature is -1; give a number"),
        (lambda model: model.generate("a", top_p=1.5), "top_p is 1.5; give a number from 0 to 1"),
        (lambda model: model.generate("a", max_tokens="5"), "max_tokens is '5'; give a whole"),
        (lambda model: model.generate("a", stop=""), "stop has an empty text"),
        (lambda model: model.generate("a", stop=["b", ""]), "stop has an empty text"),
        (lambda model: model.generate("a", stop=5), "stop is 5; give a text or a list"),
        (lambda model: model.generate("a", stop=[1]), "stop has 1; give texts"),
        (lambda model: model.logprobs(5), "a text is needed, not 5"),
        (lambda model: model.logprobs("a\ud800"), "the text holds half of a surrogate pair"),
        (lambda model: model.generate("\udfffa"), "the prompt holds half of a surrogate pair"),
        (lambda model: model.generate("a", stop="\ud800"), "stop holds half of a surrogate pair"),
    ],
)
def test_what_it_cannot_do_is_told(call: object, told: str, model: ingot.Model) -> None:
    assert callable(call)
    with pytest.raises(ingot.WrongInput, match=told):
        call(model)


def test_no_text_to_stop_at_is_none(model: ingot.Model) -> None:
    written = model.generate("a", max_tokens=4)
    assert model.generate("a", max_tokens=4, stop=None) == written
    assert model.generate("a", max_tokens=4, stop=[]) == written


def test_numbers_of_numpy_are_numbers(model: ingot.Model) -> None:
    plain = model.generate("the mould", max_tokens=4, temperature=0.5, top_p=1, seed=3)
    as_numpy = {"max_tokens": np.int64(4), "temperature": np.float32(0.5), "seed": np.uint8(3)}
    assert model.generate("the mould", top_p=np.float64(1), **as_numpy) == plain
    with pytest.raises(ingot.WrongInput, match="give a whole number"):
        model.generate("the mould", max_tokens=np.float32(4.5))


def test_threads_are_answered_in_turn_and_the_process_keeps_its_own(
    model: ingot.Model, folder: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """A sequence-to-sequence model that two threads ask at once mixes up their texts; and a small
    one, which answers soonest with one thread of torch's, would leave the process one for good.
    """
    seen, meanwhile = list[tuple[bool, int]](), list[int]()

    def answer(loaded: LoadedModel, *_: object) -> tuple[str, dict[str, float]]:
        alone = asked._alone.locked(), torch.get_num_threads()
        seen.append(alone)
        begins = threading.Thread(target=lambda: meanwhile.append(torch.get_num_threads()))
        begins.start()
        begins.join()
        return "", {}

    torch.set_num_threads(2)
    asked = ingot.Model(folder)
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(predict, "_answer", answer)
    asked.kind = "encoder"  # which alone has scores
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asked.scores, "a").result()
        assert asked.generate("a") == ""
        assert pool.submit(torch.get_num_threads).result() == 2
    assert seen == [(True, 1)] * 2
    assert meanwhile == [2] * 2, "a thread that begins meanwhile keeps for good what it finds"
    assert torch.get_num_threads() == 2


def test_a_thread_keeps_the_number_that_it_chose(one_thread: None) -> None:
    """Whichever thread is answered first, no other one gets its number."""
    torch.set_num_threads(2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.get_num_threads).result()  # the first time it takes the process's
        pool.submit(torch.set_num_threads, 3).result()
        torch.set_num_threads(2)
        theirs = compute.one_thread()
        pool.submit(theirs.__enter__).result()
        with compute.one_thread():
            assert torch.get_num_threads() == 1
            pool.submit(theirs.__exit__, None, None, None).result()
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        assert pool.submit(torch.get_num_threads).result() == 3


def test_a_copy_of_a_model_answers_as_it_does(model: ingot.Model) -> None:
    copy = pickle.loads(pickle.dumps(model))
    assert copy.generate("the mould", max_tokens=4) == model.generate("the mould", max_tokens=4)


def test_a_home_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert ingot.Model(f"~/{folder.name}").folder == folder


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ingot.WrongInput):
        ingot.Model(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ingot.WrongInput, match="is a file; give the folder that it is in"):
        ingot.Model(tmp_path / "model.safetensors")


def test_a_curve_shows_the_last_values() -> None:
    curve = LiveCurve()
    assert (curve.text(), curve.html()) == ("", "")
    for step, loss in enumerate([4.0, 3.0, float("nan"), 2.0]):
        curve(StepMetrics(step, {"train/loss": loss}))
    curve(StepMetrics(3, {"validation/loss": 2.5}))
    assert curve.text() == "step 3  loss █▅▁ 2.000"
    drawn = curve.html()
    assert [f">{told}" in drawn for told in ("loss 2.000<", "validation loss 2.500<")] == [True] * 2
    assert [f">{edge}<" in drawn for edge in ("4", "2", "step 0", "3")] == [True] * 4
    assert "nan" not in drawn
    curve(StepMetrics(4, {"train/loss": float("nan")}))
    assert curve.text() == "step 4  loss █▅▁ nan"
    assert ">step 4:" in curve.html()
    assert ">loss nan<" in curve.html()


def test_a_curve_of_small_losses_has_two_ends_and_its_last_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    curve = LiveCurve(every_s=1e9)
    for step, loss in enumerate([0.0042, 0.0031]):
        curve(StepMetrics(step, {"train/loss": loss}))
    assert [f">{edge}<" in curve.html() for edge in ("0.004", "0.003")] == [True] * 2
    capsys.readouterr()
    curve.close()
    assert "step 1  loss █▁ 0.003100" in capsys.readouterr().err
