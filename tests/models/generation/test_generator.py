"""Generation: what transformers generates, and for each request what it gets alone, whoever runs
beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.config.models.presets import preset
from ingot.models.generation.generator import GenerationJob, Generator, eos_ids
from ingot.models.generation.request import Completion, CompletionChunk, Request, join_chunks
from ingot.models.generation.sampling import SampledToken, Sampling
from ingot.models.hf.folder import load_model
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.tokenizers.load import load_tokenizer
from tests import tolerances
from tests.models.tiny import CASES, make_reference

CPU = torch.device("cpu")
PROMPTS = [
    [5],
    [1, 2, 3, 4, 5, 6, 7],
    list(range(40)),
    [90, 3],
    list(range(60, 80)),
    [7] * 33,
    [13, 17],
    [96, 0, 96],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load_model(folder, device=CPU)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def letters(ids: Sequence[int]) -> str:
    """A token is a character."""
    return "".join(chr(33 + token) for token in ids)


def ids(completion: Completion) -> list[int]:
    return [token.id for token in completion.tokens]


@torch.inference_mode()
def without_cache(
    model: Decoder, prompt: Sequence[int], count: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities, each from a whole pass over everything before
    it.
    """
    tokens, logprobs = list(prompt), []
    for _ in range(count):
        hidden = model.hidden(torch.tensor([tokens]), torch.arange(len(tokens))[None])
        best = model.logits(hidden[0, -1]).log_softmax(-1).max(-1)
        tokens.append(int(best.indices))
        logprobs.append(float(best.values))
    return tokens[len(prompt) :], logprobs


@pytest.mark.drawn(keep=3)
@pytest.mark.parametrize("case", CASES)
def test_greedy_is_what_transformers_generates(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = make_reference(tmp_path, seed=3, **CASES[case])
    theirs = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    together = Generator(load_model(reference, device=CPU), max_rows=4).run(
        [Request(prompt, 24) for prompt in PROMPTS]
    )
    for prompt, completion in zip(PROMPTS, together, strict=True):
        tokens = torch.tensor([prompt])
        out = theirs.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
        )
        assert ids(completion) == out[0, len(prompt) :].tolist()


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize(("rows", "prefill"), [(8, 512), (3, 512), (3, 7), (1, 1), (8, 40)])
def test_the_cache_changes_nothing(model: Decoder, rows: int, prefill: int) -> None:
    """Unequal prompts, read together or in shares, in any number of rows: tokens and
    log-probabilities of a model without cache.
    """
    requests = [
        Request(prompt, 5 + 3 * index, Sampling(logprobs=0)) for index, prompt in enumerate(PROMPTS)
    ]
    for request, completion in zip(
        requests, Generator(model, max_rows=rows, prefill_tokens=prefill).run(requests), strict=True
    ):
        tokens, logprobs = without_cache(model, request.prompt, request.max_tokens)
        assert ids(completion) == tokens
        assert [token.logprob for token in completion.tokens] == pytest.approx(
            logprobs, abs=tolerances.LOGPROB
        )
        assert completion.finish == "length"


@pytest.mark.parametrize("prefill", [512, 6])
def test_requests_join_and_leave_a_running_batch(model: Decoder, prefill: int) -> None:
    """Arrivals at different steps, different lengths, some cancelled while they wait, are read or
    decode: the rest notices nothing.
    """
    generator = Generator(model, decode=letters, max_rows=4, prefill_tokens=prefill)
    requests = [
        Request(prompt, 4 + 7 * index % 19, Sampling(float(index % 2), seed=index))
        for index, prompt in enumerate(PROMPTS * 2)
    ]
    jobs, pieces, cancelled = [], {}, {3: 5, 6: 7, 9: 9, 12: 20, 15: 15}
    for step in range(1000):
        if step < len(requests):
            jobs.append(generator.add(requests[step]))
            pieces[jobs[-1]] = []
        for index, when in cancelled.items():
            if when == step:
                generator.cancel(jobs[index])
                generator.cancel(jobs[index])
        for job, piece in generator.step():
            pieces[job].append(piece)
        if step >= len(requests) and not generator.busy:
            break
    assert not generator.busy
    for index, (request, job) in enumerate(zip(requests, jobs, strict=True)):
        (alone,) = Generator(model, decode=letters).run([request])
        if index in cancelled and not (pieces[job] and pieces[job][-1].finish):
            assert alone.text.startswith("".join(piece.text for piece in pieces[job]))
        else:
            assert join_chunks(pieces[job]) == alone
    assert sum(bool(parts and parts[-1].finish) for parts in pieces.values()) >= len(
        requests
    ) - len(cancelled)


def test_a_long_prompt_after_many_short_ones_takes_one_row(model: Decoder) -> None:
    """Otherwise one long prompt would make all rows as long as itself."""

    def kept(requests: list[Request]) -> int:
        generator.run(requests)
        return sum(tensor.nbytes for pair in generator._cache._stores for tensor in pair or ())

    generator = Generator(model, max_rows=8)
    long = [Request(list(range(90)) + [1] * 10, 4)]
    alone = kept(long)
    assert kept([Request(prompt, 4) for prompt in PROMPTS]) > alone
    assert kept(long) == alone


def test_a_long_prompt_waits_where_it_would_make_too_many_rows_long(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until fewer run; those behind it wait, too, so that its turn comes. What it has left is given
    back while others run, and nobody's text changes.
    """
    monkeypatch.setattr("ingot.models.generation.generator.SMALL_GROWTH", 0)
    monkeypatch.setattr("ingot.models.generation.cache.SHORT_LENGTH", 32)
    short = [Request([3 + number, 5], 6 + number) for number in range(6)]
    requests = [*short, Request([*range(90)] + [7] * 30, 3), Request([8, 9], 30)]
    alone = [without_cache(model, request.prompt, request.max_tokens)[0] for request in requests]
    generator = Generator(model, max_rows=8)
    free = 2**60
    monkeypatch.setattr("ingot.models.generation.generator.free_memory", lambda device: free)

    def stored() -> int:
        return sum(tensor.nbytes for pair in generator._cache._stores for tensor in pair or ())

    def run() -> tuple[int, int, int]:
        """Rows beside the long one when it begins; bytes at most, and in the end."""
        jobs = [generator.add(request) for request in requests]
        parts: dict[GenerationJob, list[CompletionChunk]] = {job: [] for job in jobs}
        beside, sizes = -1, [0]
        while generator.busy:
            for job, piece in generator.step():
                parts[job].append(piece)
            if beside < 0 and parts[jobs[6]]:
                beside = generator.rows
            sizes.append(stored())
        assert [ids(join_chunks(parts[job])) for job in jobs] == alone
        return beside, max(sizes), sizes[-1]

    beside, most, left = run()
    assert beside >= 6
    assert left < most / 4, "it is as short again as those that it ran beside"
    free = most
    beside, less, _ = run()
    assert 1 <= beside < 6
    assert less < most
    free = 0
    assert run()[0] <= 2, "it runs, beside one whose prompt is read in the same pass"


def test_a_seed_gives_the_same_whoever_runs_beside(model: Decoder) -> None:
    request = Request(PROMPTS[1], 30, Sampling(1.0, 0.9, seed=11))
    (alone,) = Generator(model).run([request])
    neighbours = [Request(prompt, 25, Sampling(1.3, seed=None)) for prompt in PROMPTS[:5]]
    together = Generator(model, max_rows=6).run([*neighbours, request])
    other = Generator(model).run([Request(PROMPTS[1], 30, Sampling(1.0, 0.9, seed=12))])
    assert ids(together[-1]) == ids(alone) != ids(other[0])


def test_eos_ends_a_request_and_is_not_in_its_text(model: Decoder) -> None:
    tokens, _ = without_cache(model, PROMPTS[1], 20)
    place = next(place for place in range(3, 20) if tokens[place] not in tokens[:place])
    unused = next(token for token in range(97) if token not in tokens)
    (completion,) = Generator(model, eos=[unused, tokens[place]], decode=letters).run(
        [Request(PROMPTS[1], 20)]
    )
    assert (completion.finish, completion.generated) == ("stop", place + 1)
    assert ids(completion) == tokens[:place]
    assert completion.text == letters(tokens[:place])


def test_stop_strings_end_a_request_before_them(model: Decoder) -> None:
    tokens, _ = without_cache(model, PROMPTS[2], 20)
    text = letters(tokens)
    stop = text[8:11]
    place = text.find(stop)
    for logprobs in (None, 2):
        (completion,) = Generator(model, decode=letters).run(
            [Request(PROMPTS[2], 20, Sampling(logprobs=logprobs), (stop, "\n"))]
        )
        assert (completion.text, completion.finish) == (text[:place], "stop")
        assert ids(completion) == tokens[:place]
        assert [token.offset for token in completion.tokens] == list(range(place))


def test_no_piece_holds_what_may_become_a_stop_string(model: Decoder) -> None:
    text = letters(without_cache(model, PROMPTS[2], 20)[0])
    generator = Generator(model, decode=letters)
    generator.add(Request(PROMPTS[2], 20, Sampling(logprobs=0), (text[10:13],)))
    given = ""
    while generator.busy:
        for _, piece in generator.step():
            given += piece.text
            assert not any(given.endswith(text[10 : 10 + size]) for size in (1, 2)) or piece.finish
            assert all(token.offset < len(given) for token in piece.tokens)


def test_the_last_position_ends_a_request(model: Decoder) -> None:
    positions = model.config.max_position_embeddings
    long = [index % 97 for index in range(positions - 3)]
    completions = Generator(model).run([Request(long, 50), Request([1], 5)])
    assert [(completion.generated, completion.finish) for completion in completions] == [
        (3, "length"),
        (5, "length"),
    ]
    assert ids(completions[0]) == without_cache(model, long, 3)[0]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([], 5), "empty"),
        (Request([1] * 128, 5), "128 positions"),
        (Request([1, 97], 5), "token 97 is not"),
        (Request([-1], 5), "token -1 is not"),
        (Request([1], 0), "max_tokens is 0"),
    ],
)
def test_what_cannot_be_served_is_refused(model: Decoder, request_: Request, words: str) -> None:
    generator = Generator(model)
    with pytest.raises(WrongInput, match=words):
        generator.add(request_)
    assert not generator.busy


def test_broken_numbers_end_their_request_and_poison_nobody(folder: Path) -> None:
    """One embedding is NaN: requests that read it fail, and the rows that they leave behind serve
    others as before.
    """
    model = load_model(folder, device=CPU)
    requests = [
        Request([11, 96, 3, 4, 5, 6, 7, 8], 6),
        Request([1, 2], 20),
        Request([3, 4, 5, 6, 7, 8, 9], 30),
        Request([5], 40),
    ]
    wanted = Generator(model, eos=[96]).run(requests[1:])
    assert not any(96 in ids(completion) for completion in wanted)
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = float("nan")
    completions = Generator(model, eos=[96], max_rows=2).run(requests)
    assert completions[0].finish == "error"
    assert completions[1:] == wanted


def test_after_a_failed_step_the_batch_can_be_cleared(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator(model)
    generator.add(Request([1, 2], 5))
    generator.step()
    monkeypatch.setattr(model, "hidden", _out_of_memory)
    with pytest.raises(MemoryError):
        generator.step()
    monkeypatch.undo()
    generator.clear()
    assert not generator.busy
    assert ids(generator.run([Request([1, 2], 5)])[0]) == without_cache(model, [1, 2], 5)[0]


def _out_of_memory(*arguments: object, **more: object) -> None:
    raise MemoryError


def test_pieces_tell_how_far_a_request_is(model: Decoder) -> None:
    generator = Generator(model, decode=letters)
    generator.add(Request([1, 2], 3))
    pieces: list[CompletionChunk] = []
    while generator.busy:
        pieces += [piece for _, piece in generator.step()]
    assert [piece.generated for piece in pieces] == [1, 2, 3]
    assert [len(piece.text) for piece in pieces] == [1, 1, 1]
    assert [piece.finish for piece in pieces] == [None, None, "length"]


@settings(deadline=None)
@given(st.text("aä😀あ", min_size=1, max_size=20), st.sampled_from(["", "ああ"]))
def test_every_token_is_given_out_once_and_knows_its_character(text: str, stop: str) -> None:
    """Tokens are bytes: those of one character share its offset."""
    data = text.encode()
    job = GenerationJob(
        Request([0], len(data), stop=(stop,) if stop else ()),
        lambda ids: bytes(ids).decode(errors="replace"),
    )
    pieces = []
    for byte in data:
        pieces.append(job.accept(SampledToken(byte, True), 99))
        if pieces[-1].finish:
            break
    whole = text[: text.find(stop)] if stop and stop in text else text
    completion = join_chunks(pieces)
    assert completion.text == whole
    assert bytes(ids(completion)).decode() == whole
    assert [token.offset for token in completion.tokens] == [
        index for index, character in enumerate(whole) for _ in character.encode()
    ]


def test_it_runs_in_bfloat16(folder: Path) -> None:
    model = load_model(folder, device=CPU, dtype=torch.bfloat16)
    completions = Generator(model, max_rows=3).run([Request(prompt, 10) for prompt in PROMPTS])
    assert all(completion.generated == 10 for completion in completions)


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({"eos_token_id": [2, 7]}, {"eos_token_id": 3}, {2, 7}),
        ({"eos_token_id": 5}, {}, {5}),
        ({"eos_token_id": None}, {"eos_token_id": 3}, {3}),
        (None, {"eos_token_id": [3]}, {3}),
        (None, {}, {9}),
    ],
)
def test_eos_is_read_where_it_stands(
    generation: dict[str, object] | None,
    config: dict[str, object],
    wanted: set[int],
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_ids(tmp_path, 9) == wanted


@pytest.mark.parametrize("value", ["</s>", {"id": 2}, [2, "7"], [[2]], 2.5, True])
def test_an_eos_that_is_no_id_is_named(tmp_path: Path, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(WrongInput, match=r"generation_config\.json: eos_token_id is neither a"):
        eos_ids(tmp_path)


def test_eight_together_take_the_passes_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No decoding pass serves one request alone."""
    model = Decoder(DecoderConfig.from_hf(preset("llama-3m"))).eval()
    init_weights(model, 0)
    requests = [
        Request([(7 * row + 13 * place) % 500 for place in range(5 + 4 * row)], 16)
        for row in range(8)
    ]
    sizes: list[int] = []
    original = model.hidden

    def counted(tokens: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        sizes.append(tokens.shape[0])
        return original(tokens, *more, **named)

    monkeypatch.setattr(model, "hidden", counted)
    Generator(model).run(requests[:1])
    alone = len(sizes)
    sizes.clear()
    Generator(model).run(requests)
    assert len(sizes) <= alone + 2
    assert max(sizes) == 8


TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea, there lived",
    "1 + 1 =",
    "Water boils at",
    "Dear Sir or Madam,",
    "import torch\n\nclass",
    "Über die Brücke ging",
]


@pytest.mark.drawn("a real model")
@pytest.mark.xdist_group("smollm2")
@pytest.mark.timeout(900)
def test_smollm2_gives_the_text_of_transformers(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = load_model(smollm2, device=CPU), load_tokenizer(smollm2)
    prompts = [tokenizer.encode_prompt(text) for text in TEXTS[1::2]] + [
        tokenizer.encode_chat([{"role": "user", "content": "What is a llama?"}])
    ]
    together = Generator(model, eos=eos_ids(smollm2), decode=tokenizer.decode).run(
        [Request(prompt, 16) for prompt in prompts]
    )
    theirs = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    reader = AutoTokenizer.from_pretrained(smollm2)
    for prompt, completion in zip(prompts, together, strict=True):
        tokens = torch.tensor([prompt])
        out = theirs.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=16, do_sample=False
        )
        assert completion.text == reader.decode(out[0, len(prompt) :], skip_special_tokens=True)
