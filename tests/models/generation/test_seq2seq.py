"""Texts of sequence-to-sequence models: transformers' own ids, whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.models.generation.request import Request
from ingot.models.generation.sampling import Sampling, UniformDraws, sample_tokens
from ingot.models.generation.seq2seq import Seq2SeqRequest, answer_batch
from ingot.models.generation.seq2seq_generator import Seq2SeqGenerator
from ingot.models.hf.models import Seq2Seq
from tests.models.generation.answers import generate
from tests.models.hf.tiny import SEQ2SEQ, VOCAB, common, in_short, reference
from tests.models.hf.tiny import varied as model_of

SOURCES = [
    torch.randint(4, VOCAB - 2, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (12, 5, 9, 1, 30, 17, 3, 8)
]


def theirs(
    model: Seq2Seq, folder: Path, eos: int | None, max_tokens: int, beams: int
) -> list[list[int]]:
    """What transformers writes for each source alone."""
    from transformers import GenerationConfig

    opened: Any = reference(model, folder)
    start = model.inner.config.decoder_start_token_id
    asked = GenerationConfig(
        max_new_tokens=max_tokens,
        num_beams=beams,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=model.config.pad,
        decoder_start_token_id=start,
    )
    texts = []
    for source in SOURCES:
        opened.generation_config = GenerationConfig()
        ids = opened.generate(torch.tensor([source]), generation_config=asked)[0].tolist()[1:]
        texts.append(ids[: ids.index(eos)] if eos in ids else ids)
    return texts


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", in_short(SEQ2SEQ))
def test_ids_are_transformers_own_and_the_batch_changes_nothing(
    name: str, beams: int, tmp_path: Path
) -> None:
    model = model_of(name)
    endless = generate(model, SOURCES, 40, beams, eos=[VOCAB - 3])
    eos = common(endless)
    wanted = theirs(model, tmp_path, eos, 40, beams)
    assert max(len(text) for text in wanted) == 40 > 20, "twenty is the library's default"
    assert min(len(text) for text in wanted) < 40
    assert generate(model, SOURCES, 40, beams, eos=[eos]) == wanted
    assert [generate(model, [source], 40, beams, eos=[eos])[0] for source in SOURCES] == wanted


def test_sampling_draws_as_decoders_do(tmp_path: Path) -> None:
    """By hand: the logits of the text so far, then the request's own dice. Neither neighbours nor
    torch's generator have a part.
    """
    model, eos = model_of("t5-1.1"), VOCAB - 3
    before = torch.get_rng_state()
    texts = generate(model, SOURCES, 12, temperature=0.9, top_p=0.8, seed=4, eos=[eos])
    assert torch.equal(torch.get_rng_state(), before)
    assert texts != generate(model, SOURCES, 12, temperature=0.9, top_p=0.8, seed=5, eos=[eos])
    for source, text in zip(SOURCES, texts, strict=True):
        sampling, written = Sampling(0.9, 0.8, 4), list[int]()
        dice = UniformDraws(sampling)
        while len(written) < 12:
            with torch.no_grad():
                hidden = model.hidden(torch.tensor([source]), None, torch.tensor([[*written, 0]]))
                (choice,) = sample_tokens(
                    model.project(hidden[:, -1]).float(), [sampling], [dice.next_uniform()]
                )
            if choice.token == eos:
                break
            written.append(choice.token)
        assert text == written


def test_each_request_has_its_own_settings() -> None:
    model = model_of("bart")
    requests = [
        Seq2SeqRequest(source, 5 + index, Sampling(index % 2, 0.9, 7))
        for index, source in enumerate(SOURCES)
    ]
    together = answer_batch(model, requests, [VOCAB - 3])
    assert together == [answer_batch(model, [request], [VOCAB - 3])[0] for request in requests]
    assert [written.generated for written in together if written.finish == "length"] == [
        request.max_tokens
        for request, written in zip(requests, together, strict=True)
        if written.finish == "length"
    ]
    assert any(written.finish == "length" for written in together)


def test_lengths_of_a_folder_do_not_count_but_what_it_forbids_does() -> None:
    from transformers import GenerationConfig

    model = model_of("bart")
    plain = generate(model, SOURCES, 30, eos=[VOCAB - 3])
    forbidden = plain[0][0]
    model.inner.generation_config = GenerationConfig(
        max_length=5,
        num_beams=4,
        do_sample=True,
        temperature=3.0,
        forced_eos_token_id=2,
        eos_token_id=2,
        top_k=3,
    )
    assert generate(model, SOURCES, 30, eos=[VOCAB - 3]) == plain
    model.inner.generation_config.bad_words_ids = [[forbidden]]
    assert model.inner.generation_config.max_length == 5, "and it is what it was"
    other = generate(model, SOURCES, 30, eos=[VOCAB - 3])
    assert all(forbidden not in text for text in other)
    assert other != plain


def test_the_models_own_end_is_the_default() -> None:
    model = model_of("pegasus")
    eos = common(generate(model, SOURCES, 20, eos=[VOCAB - 3]))
    model.inner.generation_config.eos_token_id = eos
    assert generate(model, SOURCES, 20) == generate(model, SOURCES, 20, eos=[eos])
    assert not any(eos in text for text in generate(model, SOURCES, 20))


def test_a_model_in_training_is_left_so() -> None:
    model = model_of("t5", dropout_rate=0.5)
    wanted = generate(model, SOURCES, 10)
    model.train()
    assert generate(model, SOURCES, 10) == wanted
    assert model.training
    assert model.inner.training
    assert generate(model, [], 10) == []


@pytest.mark.parametrize("beams", [1, 2])
def test_numbers_that_are_not_finite_fail_their_request_alone(
    beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("bart")
    encoder = model.inner.model.encoder
    forward = encoder.forward

    def broken(ids: Tensor, **more: object) -> Any:
        out = forward(ids, **more)
        out.last_hidden_state = out.last_hidden_state.masked_fill(
            (ids == 7).any(dim=1)[:, None, None], float("nan")
        )
        return out

    fine = answer_batch(model, [Seq2SeqRequest([5, 6], 6, beams=beams)], [VOCAB - 3])
    monkeypatch.setattr(encoder, "forward", lambda input_ids, **more: broken(input_ids, **more))
    written = answer_batch(
        model,
        [Seq2SeqRequest([5, 7], 6, beams=beams), Seq2SeqRequest([5, 6], 6, beams=beams)],
        [VOCAB - 3],
    )
    assert written[0].finish == "error"
    assert written[1:] == fine


@pytest.mark.drawn(keep=4)
@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Seq2SeqRequest([], 5), "the text is empty"),
        (
            Seq2SeqRequest([5] * 65, 5),
            "the text has 65 tokens, but the model has 64 positions; shorten it",
        ),
        (Seq2SeqRequest([5, 61], 5), "token 61 is not in the vocabulary of 61 tokens"),
        (Seq2SeqRequest([5], 5, Sampling(logit_bias=((61, 1.0),))), "logit_bias: token 61 is not"),
        (Seq2SeqRequest([-1], 5), "token -1 is not in the vocabulary"),
        (Seq2SeqRequest([5], 0), "max_tokens is 0, but the model writes from 1 to 64"),
        (Seq2SeqRequest([5], 65), "max_tokens is 65"),
        (Seq2SeqRequest([5], 5, beams=0), "beams is 0"),
        (
            Seq2SeqRequest([5], 5, Sampling(0.5), (), 2),
            "beams 2 and temperature 0.5 exclude each other",
        ),
    ],
)
def test_requests_that_cannot_be_served(request_: Seq2SeqRequest, words: str) -> None:
    summarizer = Seq2SeqGenerator(model_of("bart"), decode=str)
    with pytest.raises(WrongInput, match=words):
        summarizer.add(request_)
    assert summarizer.busy == 0
    assert generate(model_of("bart"), [[5] * 64], 64, eos=[VOCAB - 3]), (
        "as many as there are positions fit"
    )


def spell(ids: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in ids)


def test_a_summarizer_answers_all_kinds_of_requests() -> None:
    model = model_of("t5-1.1")
    alone = generate(model, SOURCES, 9, eos=[VOCAB - 3])
    stop = f"<{alone[0][4]}>"
    requests: list[Request] = [
        Seq2SeqRequest(SOURCES[0], 9),
        Request(SOURCES[1], 9),
        Seq2SeqRequest(SOURCES[2], 7, beams=2),
        Seq2SeqRequest(SOURCES[3], 9, beams=2),
        Seq2SeqRequest(SOURCES[0], 9, stop=(stop,)),
        Seq2SeqRequest(SOURCES[4], 7, beams=2),
    ]
    answers = Seq2SeqGenerator(model, decode=spell, eos=[VOCAB - 3], max_rows=2).run(requests)
    assert [answer.text for answer in answers[:2]] == [spell(alone[0]), spell(alone[1])]
    assert [answer.text for answer in answers[2:4]] == [
        spell(generate(model, [SOURCES[row]], size, 2, eos=[VOCAB - 3])[0])
        for row, size in ((2, 7), (3, 9))
    ]
    assert answers[4].text == spell(alone[0])[: spell(alone[0]).find(stop)]
    assert answers[4].finish == "stop"
    assert (answers[0].finish, answers[0].generated) == ("length", 9)


def test_a_search_gives_up_at_the_next_token_who_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("t5-1.1")
    summarizer = Seq2SeqGenerator(model, decode=spell, eos=[VOCAB - 3])
    stays, leaves = (
        summarizer.add(Seq2SeqRequest(source, 40, beams=2)) for source in (SOURCES[0], SOURCES[1])
    )
    wanted = generate(model, [SOURCES[0]], 40, 2, eos=[VOCAB - 3])[0]
    project, steps = model.inner.lm_head.forward, list[int]()

    def counted(hidden: Tensor) -> Tensor:
        steps.append(len(hidden))
        if len(steps) == 3:
            summarizer.interrupt(leaves)
        logits: Tensor = project(hidden)
        return logits

    monkeypatch.setattr(model.inner.lm_head, "forward", counted)
    answers = dict(summarizer.step())
    assert answers[stays].text == spell(wanted)
    assert answers[leaves].generated < 6 < len(steps)
    assert summarizer.busy == 0
    for job in (summarizer.add(Seq2SeqRequest(SOURCES[0], 5, beams=beams)) for beams in (1, 2)):
        summarizer.cancel(job)
        summarizer.cancel(job)
        assert summarizer.step() == []
    summarizer.add(Seq2SeqRequest(SOURCES[0], 5))
    summarizer.clear()
    assert summarizer.busy == 0
