"""Prompts that begin alike: what an earlier one left changes no answer, saves its passes, and stays
within its bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.models.generation.generator import Generator
from ingot.models.generation.prefixes import BLOCK, PrefixStore, in_common
from ingot.models.generation.request import Completion, Request
from ingot.models.generation.sampling import Sampling
from ingot.models.hf.folder import load_model
from ingot.models.native.decoder import Decoder
from tests import tolerances
from tests.models.tiny import make_member, make_reference

CPU = torch.device("cpu")
MB = 1 << 20
SHARED = [(7 * place) % 95 for place in range(70)]
LOGPROBS = Sampling(logprobs=3)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["mistral", "gpt_oss", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_model(make_member(tmp_path_factory.mktemp("model"), request.param), device=CPU)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_model(make_reference(tmp_path_factory.mktemp("plain")), device=CPU)


def requests(count: int = 5, sampling: Sampling = LOGPROBS, **more: Any) -> list[Request]:
    """Prompts that begin alike, for some part of SHARED."""
    cuts = (70, 64, 33, 70, 32, 50, 69)[:count]
    return [
        Request([*SHARED[:cut], 80 + number, 3], 6 + number, sampling, **more)
        for number, cut in enumerate(cuts)
    ]


def same(one: Sequence[Completion], other: Sequence[Completion]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert [token.id for token in ours.tokens] == [token.id for token in theirs.tokens]
        for mine, its in zip(ours.tokens, theirs.tokens, strict=True):
            assert mine.logprob == pytest.approx(its.logprob, abs=tolerances.LOGPROB)
            assert [top for top, _ in mine.top] == [top for top, _ in its.top]
        assert ours.finish == theirs.finish


@pytest.mark.parametrize("rows", [1, 4])
def test_what_was_read_before_changes_no_answer(model: Decoder, rows: int) -> None:
    """Windows, sinks and norms of heads; one after the other and beside each other, read in shares,
    and again when all is kept.
    """
    wanted = Generator(model).run(requests())
    store = PrefixStore(MB)
    generator = Generator(model, max_rows=rows, prefill_tokens=48, prefixes=store)
    first = generator.run(requests())
    same(first, wanted)
    again = generator.run(requests())
    same(again, wanted)
    assert [answer.cached for answer in again] == [64, 64, 32, 64, 32]
    assert first[0].cached == 0
    assert first[3].cached == 64, "it began as the first one, which may still have been running"


def test_of_a_prompt_of_whole_blocks_the_last_is_read_again(plain: Decoder) -> None:
    """Alone, and beside a longer rest, whose padding is none of its tokens: the logits of its last
    token are wanted.
    """
    asked = [Request(SHARED[:64], 4, LOGPROBS), Request([5] * 40, 4, LOGPROBS)]
    wanted = Generator(plain, max_rows=2).run(asked)
    generator = Generator(plain, max_rows=2, prefixes=PrefixStore(MB))
    same(generator.run(asked), wanted)
    for some in (1, 2):
        again = generator.run(asked[:some])
        same(again, wanted[:some])
        assert again[0].cached == 32


def test_an_answer_is_read_once_as_part_of_the_next_turn(plain: Decoder) -> None:
    generator = Generator(plain, prefixes=PrefixStore(MB))
    (answer,) = generator.run([Request(SHARED[:40], 30)])
    turn = [*SHARED[:40], *(token.id for token in answer.tokens), 9, 8, 7]
    (later,) = generator.run([Request(turn, 5, LOGPROBS)])
    assert later.cached == len(turn) // BLOCK * BLOCK == 64
    same([later], Generator(plain).run([Request(turn, 5, LOGPROBS)]))


def test_a_cache_grows_once_for_those_that_come_together(plain: Decoder) -> None:
    """Each growth copies what all rows hold."""
    generator = Generator(plain, prefixes=PrefixStore(MB))
    for number in range(8):
        generator.add(Request([*SHARED, number, 1, 2], 9))
    generator.step()
    before = generator._cache.changes
    assert len(generator.step()) == 7 + 8, "seven are read, and all go on"
    assert generator._cache.changes - before == plain.config.num_hidden_layers


def test_eight_at_once_read_what_they_share_once(
    plain: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    eight = [Request([*SHARED, number, 1, 2], 2) for number in range(8)]
    read = 0
    original = plain.hidden

    def counted(tokens: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        nonlocal read
        read += tokens.numel() if tokens.shape[1] > 1 else 0
        return original(tokens, *more, **named)

    monkeypatch.setattr(plain, "hidden", counted)
    wanted = Generator(plain).run(eight)
    whole, read = read, 0
    same(Generator(plain, prefixes=PrefixStore(MB)).run(eight), wanted)
    assert (whole, read) == (8 * 73, 73 + 7 * (73 - 64))


def test_salts_share_nothing_and_scores_of_a_prompt_are_whole(plain: Decoder) -> None:
    generator = Generator(plain, prefixes=PrefixStore(MB))
    generator.run(requests(1, cache_salt="a"))
    (other,) = generator.run(requests(1, cache_salt="b"))
    (none,) = generator.run(requests(1))
    (same_salt,) = generator.run(requests(1, cache_salt="a"))
    (new,) = generator.run(requests(1, cache_salt="c"))
    assert [other.cached, none.cached, same_salt.cached, new.cached] == [0, 0, 64, 0]
    (scored,) = generator.run(requests(1, prompt_logprobs=2, cache_salt="a"))
    assert scored.prompt == Generator(plain).run(requests(1, prompt_logprobs=2))[0].prompt
    assert scored.cached is None


def test_prompts_of_any_length_fit_beside_one_that_is_nearly_known(plain: Decoder) -> None:
    """Its row begins far in, where a neighbour's padding must not reach beyond the last position."""
    generator = Generator(plain, prefixes=PrefixStore(MB), max_rows=4)
    positions = plain.config.max_position_embeddings
    long = [*SHARED, *range(95)][: positions - 3]
    wanted = Generator(plain, max_rows=4).run([Request(long, 2), Request([5] * 40, 2)])
    generator.run([Request(long, 2)])
    together = generator.run([Request(long, 2), Request([5] * 40, 2)])
    same(together, wanted)
    assert together[0].cached == (len(long) - 1) // BLOCK * BLOCK


def test_a_bound_holds_and_the_oldest_goes_first(plain: Decoder) -> None:
    probe = PrefixStore(MB)
    Generator(plain, prefixes=probe).run([Request(SHARED[:33], 1)])
    block = probe.bytes
    store = PrefixStore(4 * block)
    generator = Generator(plain, prefixes=store)
    prompts = [[number] * 70 for number in range(3)]
    for prompt in prompts:
        generator.run([Request(prompt, 1)])
        assert block <= store.bytes <= 4 * block
        held = [one.kept.untyped_storage().nbytes() for one in store._blocks.values()]
        assert sum(held) == store.bytes, "what is kept is no view of more"
    assert [store.known(prompt, None) for prompt in prompts] == [0, 64, 64]
    generator.run([Request(prompts[1], 1)])  # used, so the other one goes
    generator.run([Request(prompts[0], 1)])
    assert [store.known(prompt, None) for prompt in prompts] == [64, 64, 0]
    generator.run([Request([*SHARED, *range(50)], 1)])  # more than a prompt alone may take
    assert store.bytes <= 4 * block


def test_a_longer_prompt_than_fits_keeps_its_beginning() -> None:
    store = PrefixStore(2 * 8 * BLOCK)
    tokens = list(range(5 * BLOCK))
    store.add(tokens, None, lambda start, end: torch.zeros(1, 2, 1, end - start, 1))
    assert store.known([*tokens, 1], None) == 2 * BLOCK
    found = store.find([*tokens, 1], None)
    assert found is not None
    assert found.shape == (1, 2, 1, 2 * BLOCK, 1)


def test_memory_that_is_needed_is_given_back(
    plain: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = False
    store = PrefixStore(MB, lambda: short)
    generator = Generator(plain, prefixes=store)
    generator.run(requests(2))
    assert store.bytes
    original, failed = plain.hidden, False

    def once(*given: Any, **named: Any) -> torch.Tensor:
        nonlocal failed
        if not failed:
            failed = True
            raise torch.OutOfMemoryError("no memory")
        return original(*given, **named)

    monkeypatch.setattr(plain, "hidden", once)
    (answer,) = generator.run([Request([1, 2, 3], 4, LOGPROBS)])
    assert not store.bytes
    same([answer], Generator(plain).run([Request([1, 2, 3], 4, LOGPROBS)]))
    generator.run(requests(2))
    assert store.bytes
    short = True
    same(generator.run(requests(2)), Generator(plain).run(requests(2)))
    assert not store.bytes


def test_broken_numbers_are_kept_for_nobody(plain: Decoder, tmp_path: Path) -> None:
    model = load_model(make_reference(tmp_path), device=CPU)
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = float("nan")
    store = PrefixStore(MB)
    generator = Generator(model, prefixes=store, max_rows=1)
    (broken,) = generator.run([Request([*SHARED[:10], 96, *SHARED[:40]], 4)])
    assert (broken.finish, store.bytes) == ("error", 0)
    same(generator.run(requests()), Generator(model).run(requests()))


def test_what_leaves_before_it_is_read_harms_nobody(plain: Decoder) -> None:
    generator = Generator(plain, prefixes=PrefixStore(MB), max_rows=2, prefill_tokens=40)
    left = generator.add(Request([*SHARED, 4, 4], 5))
    generator.step()
    generator.cancel(left)
    answers = generator.run(requests())
    same(answers, Generator(plain).run(requests()))
    assert answers[0].cached == 32, "the share that was read is kept"


def test_what_two_prompts_begin_with() -> None:
    long = list(range(100))
    assert in_common(long, long) == 96
    assert in_common(long[:64], long) == 32, "a token is left whose logits are wanted"
    assert in_common(long, long[:64]) == 64
    assert in_common(long, [*long[:40], 0, *long[41:]]) == 32
    assert in_common(long, [1, *long]) == 0
