"""Sequence-to-sequence models and classifiers behind the same server: whole texts, labels and
scores, the same limits.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers

from ingot.base.errors import Failed, WrongInput
from ingot.cli.model import find_target, predict_once
from ingot.config.sections.lora import Lora
from ingot.models.adapters.lora import add_lora
from ingot.models.adapters.peft import save_adapter
from ingot.models.generation.request import REPLACEMENT
from ingot.models.generation.sampling import Sampling
from ingot.models.generation.seq2seq import Seq2SeqRequest
from ingot.models.hf.models import Seq2Seq
from ingot.models.native.decoder import Decoder
from ingot.serve.native.model import LoadedModel, load
from ingot.serve.predict import SUMMARY_TOKENS, predict
from tests import tolerances
from tests.models.generation.answers import generate
from tests.models.hf.tiny import LABELS, write
from tests.serve.running import Running, running
from tests.serve.tiny import make_classifier, make_summarizer

PROMPTS = [
    "the",
    "five wizards box",
    "the quick brown fox jumps over the lazy dog while",
    "Straße, ",
    "\n",
    "Q",
    "naïvely" * 9,
    "dog fox",
]
LIMIT = 90


@pytest.fixture(scope="module")
def summary_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_summarizer(tmp_path_factory.mktemp("summarizer") / "model")


@pytest.fixture(scope="module")
def summarizer(summary_folder: Path) -> LoadedModel:
    return load(summary_folder)


@pytest.fixture(scope="module")
def writing(summary_folder: Path) -> Iterator[Running]:
    with running(summary_folder, max_tokens=LIMIT) as made:
        yield made


@pytest.fixture(scope="module")
def class_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("classifier") / "model")


@pytest.fixture(scope="module")
def judging(class_folder: Path) -> Iterator[Running]:
    with running(class_folder) as made:
        yield made


def text_of(loaded: LoadedModel, prompt: str, max_tokens: int = LIMIT, **more: Any) -> str:
    """What the model writes alone, from ids put together by hand, without an incomplete character
    at its end.
    """
    assert isinstance(loaded.model, Seq2Seq)
    ids = [0, *loaded.tokenizer.encode(f"sum: {prompt}"), 1]
    written = generate(loaded.model, [ids], max_tokens, eos=[1], **more)[0]
    return loaded.tokenizer.decode(written).rstrip(REPLACEMENT)


def post(server: Running, route: str, body: Any) -> httpx.Response:
    with server.client() as client:
        return client.post(route, json=body)


@pytest.mark.drawn("whole texts of a server")
def test_an_article_gives_its_whole_summary(writing: Running, summarizer: LoadedModel) -> None:
    wanted = [text_of(summarizer, prompt) for prompt in PROMPTS]
    lengths = [len(summarizer.tokenizer.encode(text)) for text in wanted]
    assert max(lengths) > 70, (
        "neither at twenty tokens, the library's default, nor at sixty-four, ours of decoders"
    )
    assert min(lengths) < 20
    assert len(set(wanted)) == len(wanted)
    assert post(writing, "/predict", {"instances": PROMPTS}).json() == {"predictions": wanted}
    mapped = post(
        writing,
        "/predict",
        {"instances": [{"prompt": PROMPTS[1]}], "parameters": {"max_tokens": 9.0}},
    )
    assert mapped.json() == {"predictions": [text_of(summarizer, PROMPTS[1], 9)]}


@pytest.mark.drawn("whole texts of a server")
def test_settings_of_a_prediction(writing: Running, summarizer: LoadedModel) -> None:
    def ask(**parameters: Any) -> str:
        text: str = post(
            writing,
            "/predict",
            {"instances": ["the dog"], "parameters": {"max_tokens": 30, **parameters}},
        ).json()["predictions"][0]
        return text

    greedy = text_of(summarizer, "the dog", 30)
    assert ask(beams=4) == text_of(summarizer, "the dog", 30, beams=4) != greedy
    assert (
        ask(temperature=1.0, top_p=0.9, seed=8)
        == text_of(summarizer, "the dog", 30, temperature=1.0, top_p=0.9, seed=8)
        != greedy
    )
    stop = greedy[3:6]
    assert ask(stop=[stop]) == greedy[: greedy.find(stop)]


@pytest.mark.drawn("kinds that are served")
def test_completions_answer_whole_texts(writing: Running, summarizer: LoadedModel) -> None:
    wanted = [text_of(summarizer, prompt) for prompt in PROMPTS[:3]]
    with openai.OpenAI(base_url=f"{writing.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="tiny", prompt=PROMPTS[:3], temperature=0)
        assert [choice.text for choice in answer.choices] == wanted
        assert answer.usage is not None
        (alone,) = client.completions.create(
            model="tiny", prompt=summarizer.encode(PROMPTS[1]), temperature=0
        ).choices
        assert alone.text == wanted[1]
        chunks = list(
            client.completions.create(
                model="tiny",
                prompt=PROMPTS[0],
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == wanted[0]
        assert client.models.retrieve("tiny").model_dump()["kind"] == "seq2seq"
        for more, words in (
            ({"logprobs": 2}, "gives no log-probabilities"),
            ({"max_tokens": LIMIT + 1}, "over this server's limit of 90"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                client.completions.create(model="tiny", prompt="the", **more)  # type: ignore[call-overload]
        with pytest.raises(
            openai.BadRequestError, match="no chat template; send a prompt to /v1/completions"
        ):
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "the"}]
            )


def test_usage_and_metrics_count_the_tokens_that_were_written(
    writing: Running, summarizer: LoadedModel
) -> None:
    (answer,) = summarizer.worker(1).run([Seq2SeqRequest(summarizer.encode("the"), LIMIT)])  # type: ignore[union-attr]
    before = writing.metric("ingot_tokens_total", kind="completion")
    usage = post(writing, "/v1/completions", {"prompt": "the", "temperature": 0}).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
        len(summarizer.encode("the")),
        answer.generated,
    )
    assert writing.metric("ingot_tokens_total", kind="completion") == before + answer.generated


def together(server: Running, bodies: list[dict[str, Any]]) -> list[Any]:
    """One request each, all at the same time."""
    barrier = threading.Barrier(len(bodies))

    def ask(body: dict[str, Any]) -> Any:
        barrier.wait()
        return post(server, "/predict", body).json()["predictions"][0]

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, bodies))


@pytest.mark.drawn("whole texts of a server")
def test_eight_together_get_what_each_gets_alone(writing: Running, judging: Running) -> None:
    summaries = [
        {
            "instances": [prompt],
            "parameters": {"max_tokens": 40 + 5 * index, "beams": 1 + index % 2},
        }
        for index, prompt in enumerate(PROMPTS)
    ]
    texts = [{"instances": [prompt]} for prompt in PROMPTS]
    for server, bodies in ((writing, summaries), (judging, texts)):
        alone = [post(server, "/predict", body).json()["predictions"][0] for body in bodies]
        few = (
            server.metric("ingot_batch_rows_bucket", le="1.0"),
            server.metric("ingot_batch_rows_bucket", le="+Inf"),
        )
        answers = [together(server, bodies) for _ in range(2)]
        if server is writing:
            assert answers == [alone] * 2
        else:
            for answer, wanted in (
                (one, other) for some in answers for one, other in zip(some, alone, strict=True)
            ):
                assert answer["label"] == wanted["label"]
                assert answer["scores"] == pytest.approx(
                    wanted["scores"], abs=tolerances.LOGITS_FP32
                )
        batches = server.metric("ingot_batch_rows_bucket", le="+Inf") - few[1]
        assert batches > server.metric("ingot_batch_rows_bucket", le="1.0") - few[0], (
            "some must have been computed together"
        )


@pytest.mark.drawn("kinds that are served")
def test_a_text_gives_label_and_scores(judging: Running, class_folder: Path) -> None:
    """transformers' own probabilities, of the ids of its tokenizer: it puts no end behind a text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(class_folder)
    opened = transformers.AutoModelForSequenceClassification.from_pretrained(class_folder)
    predictions = post(
        judging, "/predict", {"instances": [*PROMPTS[:-1], {"text": PROMPTS[-1]}]}
    ).json()["predictions"]
    for prompt, prediction in zip(PROMPTS, predictions, strict=True):
        with torch.no_grad():
            scores = opened(**tokenizer(prompt, return_tensors="pt")).logits[0].softmax(dim=-1)
        assert prediction["scores"] == pytest.approx(
            dict(zip(LABELS, scores.tolist(), strict=True)), abs=tolerances.LOGITS_FP32
        )
        assert list(prediction["scores"]) == list(LABELS)
        assert prediction["label"] == LABELS[int(scores.argmax())]
    assert len({prediction["label"] for prediction in predictions}) > 1
    (alone,) = post(judging, "/predict", {"instances": [PROMPTS[0]], "parameters": {}}).json()[
        "predictions"
    ]
    assert alone["label"] == predictions[0]["label"]


def test_a_classifier_writes_no_text(judging: Running) -> None:
    for route, body in (
        ("completions", {"prompt": "the"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "the"}]}),
    ):
        response = post(judging, f"/v1/{route}", body)
        assert response.status_code == 400
        assert (
            "`tiny` is a classifier and writes no text; send texts as `instances`"
            in response.json()["error"]["message"]
        )
    with judging.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["kind"], model["max_model_len"]) == ("encoder", 64)
        assert client.get("/health").json() == {"status": "ok", "model": "tiny"}


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (
            "writing",
            {"instances": ["fox " * 9000]},
            "tokens, but the model has 8,192 positions; shorten it",
        ),
        (
            "writing",
            {"instances": ["the"], "parameters": {"beams": 17}},
            "`parameters.beams` is 17",
        ),
        (
            "writing",
            {"instances": ["the"], "parameters": {"beams": 2, "temperature": 1.0}},
            "beams 2 and temperature 1.0 exclude each other",
        ),
        (
            "writing",
            {"instances": ["the"], "parameters": {"max_tokens": 91}},
            "max_tokens 91 is over this server's limit of 90",
        ),
        ("writing", {"instances": [{"text": "the"}]}, "prompt` is missing"),
        (
            "writing",
            {"instances": ["the"] * 129},
            "129 prompts in one request; this server takes at most 128",
        ),
        (
            "judging",
            {"instances": ["naïvely " * 60]},
            "tokens, but the model has 64 positions; shorten it",
        ),
        (
            "judging",
            {"instances": ["the"], "parameters": {"max_tokens": 3}},
            "`parameters.max_tokens` is not known",
        ),
        ("judging", {"instances": [{"prompt": "the"}]}, "text` is missing"),
        ("judging", {"instances": []}, "`instances`"),
        ("judging", {"instances": ["the", "fox " * 9000]}, "prompt 1 has 36,000 characters"),
        ("judging", {"instances": [5]}, '`instances.0`: give a text, or an object such as {"text"'),
        ("judging", {"instances": [{"text": 5}]}, "`instances.0.text` is 5"),
        ("judging", {"instances": [{"messages": 5}]}, "`instances.0.messages` is 5"),
    ],
)
def test_refusals(
    kind: str, body: dict[str, Any], words: str, request: pytest.FixtureRequest
) -> None:
    response = post(request.getfixturevalue(kind), "/predict", body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


@pytest.fixture
def narrow(summary_folder: Path) -> Iterator[Running]:
    """One row, one place in the queue, and texts that take seconds."""
    with running(summary_folder, max_tokens=8000, max_batch=1, max_queue=1, finish_s=0.5) as made:
        yield made


def endless(loaded: LoadedModel) -> dict[str, Any]:
    """A request whose text does not end."""
    runs = loaded.worker(8).run([Seq2SeqRequest(loaded.encode(prompt), 1000) for prompt in PROMPTS])  # type: ignore[union-attr]
    return {
        "instances": [
            next(
                prompt
                for prompt, answer in zip(PROMPTS, runs, strict=True)
                if answer.finish == "length"
            )
        ]
    }


@pytest.mark.drawn("whole texts of a server")
def test_a_long_text_can_be_left_waited_for_and_stopped(
    narrow: Running, summarizer: LoadedModel
) -> None:
    body = endless(summarizer)
    with narrow.client() as client:
        with narrow.asked("/predict", body):
            narrow.wait_for("ingot_running", 1)
        narrow.wait_for("ingot_cancelled_total", 1)
        narrow.wait_for("ingot_running", 0)
        assert narrow.metric("ingot_tokens_total", kind="completion") < 8000
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(post(narrow, "/predict", body)))
            for _ in range(2)
        ]
        threads[0].start()
        narrow.wait_for("ingot_running", 1)
        threads[1].start()
        narrow.wait_for("ingot_waiting", 1)
        full = client.post("/predict", json=body)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert client.get("/health").status_code == 200
    narrow.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(30)
    assert [answer.status_code for answer in answers] == [503, 503]
    assert narrow.process.wait(60) == 0


@pytest.mark.drawn("kinds that are served")
def test_predict_says_the_same_from_a_folder_and_a_server(
    summary_folder: Path,
    writing: Running,
    summarizer: LoadedModel,
    class_folder: Path,
    judging: Running,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for target in (summary_folder, writing.url):
        assert predict(target, PROMPTS[7]) == text_of(summarizer, PROMPTS[7])
        assert predict(target, "the", max_tokens=40, beams=3) == text_of(
            summarizer, "the", 40, beams=3
        )
        assert predict(target, "the", max_tokens=40, temperature=1.0, seed=2) == text_of(
            summarizer, "the", 40, temperature=1.0, seed=2
        )
        with pytest.raises(WrongInput, match="chat is for models that were trained on chats"):
            predict(target, "the", chat=True)
    assert capfd.readouterr().err == ""
    scores = post(judging, "/predict", {"instances": ["the"]}).json()["predictions"][0]
    for target in (class_folder, judging.url):
        assert predict(target, "the") == scores["label"]
        assert (
            capfd.readouterr().err
            == ", ".join(f"{label} {score:.4f}" for label, score in scores["scores"].items()) + "\n"
        )
        with pytest.raises(WrongInput, match="beams 2 is for sequence-to-sequence models"):
            predict(target, "the", beams=2)
        with pytest.raises(WrongInput, match="a classifier writes no text"):
            predict(target, "the", max_tokens=5)


@pytest.mark.drawn("whole texts of a server")
def test_predict_prints_the_answer_and_nothing_else(
    class_folder: Path,
    summary_folder: Path,
    summarizer: LoadedModel,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert predict_once(str(class_folder), "the dog", []) == 0
    told = capfd.readouterr()
    assert told.out.strip() in LABELS
    assert told.err.count("\n") == 1
    assert all(label in told.err for label in LABELS)
    assert predict_once(str(summary_folder), "Straße, ", ["beams=2", "max_tokens=30"]) == 0
    assert capfd.readouterr() == (text_of(summarizer, "Straße, ", 30, beams=2) + "\n", "")
    assert predict_once(str(summary_folder), "the dog", []) == 0
    assert capfd.readouterr().out == text_of(summarizer, "the dog", SUMMARY_TOKENS) + "\n"


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "broken")
    from_disk = load(folder)
    with torch.no_grad():
        from_disk.model.inner.classifier.out_proj.bias.fill_(float("nan"))  # type: ignore[union-attr]
    write(from_disk.model, folder)  # type: ignore[arg-type]
    with pytest.raises(Failed, match="not finite"):
        predict(folder, "the")


def test_the_end_of_a_text_is_what_targets_were_framed_with(
    summary_folder: Path, tmp_path: Path
) -> None:
    """A T5 of random weights still names 1 in its configuration; with a tokenizer trained here that
    may be any token.
    """
    folder = make_summarizer(tmp_path / "other")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [77, 2]}))
    assert load(folder).eos == {1, 2}
    assert load(folder).prefix == "sum: "


def test_plain_sampling_is_not_shared(writing: Running, summarizer: LoadedModel) -> None:
    body = {
        "instances": ["the", "the"],
        "parameters": {"max_tokens": 20, "temperature": 1.0, "seed": 5},
    }
    first, second = post(writing, "/predict", body).json()["predictions"]
    (answer,) = summarizer.worker(1).run(
        [Seq2SeqRequest(summarizer.encode("the"), 20, Sampling(1.0, 1.0, 5))]
    )  # type: ignore[union-attr]
    assert first == second == answer.text


@torch.no_grad()
def last_hidden(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor([ids])
    if isinstance(loaded.model, Seq2Seq):
        return loaded.model.hidden(tokens, None, tokens)
    assert isinstance(loaded.model, Decoder)
    return loaded.model.hidden(tokens, torch.arange(len(ids))[None])


def test_an_adapter_is_opened_on_its_base_with_the_bases_tokenizer(
    folder: Path, summary_folder: Path, tmp_path: Path
) -> None:
    """As PEFT lays it down: the adapter alone, and the name of what it belongs to."""
    for base, kind in ((folder, "decoder"), (summary_folder, "seq2seq")):
        adapted = load(base)
        add_lora(adapted.model, Lora(rank=2, alpha=64.0), 1)
        with torch.no_grad():
            for name, parameter in adapted.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
        save_adapter(adapted.model, tmp_path / kind, base=str(base), kind=kind)  # type: ignore[arg-type]
        opened = load(tmp_path / kind)
        assert (opened.kind, opened.eos) == (kind, adapted.eos)
        hidden = [
            last_hidden(one, opened.encode("the lazy dog")) for one in (opened, adapted, load(base))
        ]
        torch.testing.assert_close(hidden[0], hidden[1], rtol=0, atol=tolerances.LOGITS_FP32)
        assert (hidden[0] - hidden[2]).abs().max() > 0.1
        assert find_target(str(tmp_path / kind)).folder == tmp_path / kind
