"""Spans that are hidden from an encoder-decoder: as T5 cuts them, the same for a key, and nothing of
a text lost.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.config.shape import BatchPlan
from ingot.config.spans import SpanLengths
from ingot.data.batches.loader import Loader
from ingot.data.batches.order import SampleOrder
from ingot.data.batches.rows import IGNORE, Ids, open_rows
from ingot.data.batches.samples import Samples
from ingot.data.batches.spans import SpanCorruption
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.models.spec import build_model, resolve_model_spec
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.tokenizers.bpe import EOS, train_bpe
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.sentinels import decoder_for, encode_with_sentinels, sentinels_of
from tests import tolerances
from tests.objectives.ways import prepare_way, recipe_of, write_all
from tests.tokenizers.small import TEXTS

SENTINELS = [1000 - number for number in range(40)]
END = 1
WAY = "span_corruption"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("spans")
    write_all(made)
    prepare_way(made, WAY)
    return made


def corruption(density: float = 0.15, mean: float = 3.0, seed: int = 0) -> SpanCorruption:
    """Sentinels that go down, as T5's do, and a frame of one token."""
    frame = np.empty(0, np.int64), np.array([END])
    return SpanCorruption(frame, seed, frame, np.array(SENTINELS), SpanLengths(density, mean))


def opened(root: Path, split: Any = "train", seq_len: int = 48, **knobs: Any) -> Samples:
    recipe = recipe_of(root, WAY, data__seq_len=seq_len, **knobs)
    hiding = SpanCorruption.of(recipe, load_tokenizer(recipe.folder.tokenizer))
    rows = open_rows(
        recipe.folder.columns,
        split,
        seq_len,
        pad_last=False,
        pack=recipe.row_plan,
        target_len=recipe.target_len,
        hiding=hiding,
    )
    assert isinstance(rows, Samples)
    return rows


def hidden_in(body: Ids, target: Ids) -> list[bool]:
    """Which tokens of a text are hidden, by what is to be written: found by its spans in order, in
    a text that has every token once.
    """
    asked = set(target.tolist())
    return [token in asked for token in body.tolist()]


def plainly(body: list[int], hidden: list[bool]) -> tuple[list[int], list[int]]:
    """Source and target of a text, token by token, as the paper describes them."""
    source, target, spans = list[int](), list[int](), 0
    for place, (token, is_hidden) in enumerate(zip(body, hidden, strict=True)):
        if not is_hidden:
            source.append(token)
            continue
        if place == 0 or not hidden[place - 1]:
            source.append(SENTINELS[spans])
            target.append(SENTINELS[spans])
            spans += 1
        target.append(token)
    return [*source, END], [*target, END]


@pytest.mark.parametrize("figures", [(0.15, 3.0), (0.5, 3.0), (0.3, 8.0), (0.15, 1.0), (0.5, 1.0)])
def test_spans_are_as_many_and_as_long_as_t5_has_them(figures: tuple[float, float]) -> None:
    """The source and the target of texts of any length, beside a plain implementation."""
    density, mean = figures
    made = corruption(density, mean)
    for length in (2, 3, 4, 5, 7, 16, 61, 100):
        body = np.arange(10, 10 + length)
        found = np.array([], bool)
        if made.lengths.hidden(length)[1] > len(SENTINELS):
            continue
        for place in range(5):
            source, target = made.sample(body, place)
            hidden = hidden_in(body, target)
            assert (source.tolist(), target.tolist()) == plainly(body.tolist(), hidden)
            assert (hidden[0], hidden[-1]) == (False, True)
            wanted = min(max(round(length * density), 1), length - 1)
            spans = max(1, round(min(wanted, length - round(length * density)) / mean))
            assert sum(hidden) == wanted
            assert sum(np.diff(hidden, prepend=False) & hidden) == spans
            assert len(source) == length - wanted + spans + 1
            assert len(target) == wanted + spans + 1
            found = np.append(found, hidden)
        if length > 16:
            assert len(set(map(tuple, found.reshape(5, -1).tolist()))) == 5, "each sample its own"


def test_every_way_to_cut_a_text_is_as_likely() -> None:
    """Four of eight tokens hidden in two spans: three ways to cut each kind, nine together."""
    made, count = corruption(0.5, 2.0), 1800
    body = np.arange(10, 18)
    found = Counter(tuple(hidden_in(body, made.sample(body, place)[1])) for place in range(count))
    assert len(found) == 9
    assert max(abs(times - count / 9) for times in found.values()) < 4 * (count / 9) ** 0.5


def test_a_text_is_as_long_as_its_source_has_room_for() -> None:
    """T5's own figures, and for others: the longest text that fits, as do all shorter ones."""
    usual = SpanLengths(0.15, 3.0)
    assert (usual.longest(511), usual.target_len(512)) == (568, 114)
    for density, mean in itertools.product((0.01, 0.15, 0.33, 0.5), (1.0, 2.5, 3.0, 20.0)):
        lengths = SpanLengths(density, mean)
        assert SpanLengths.of_plan(f"none-{lengths.plan}") == lengths
        sizes = [lengths.corrupted(length) for length in range(2, 1500)]
        assert all(one <= other for one, other in itertools.pairwise(s for s, _ in sizes))
        assert all(one <= other for one, other in itertools.pairwise(t for _, t in sizes))
        for room in (3, 4, 17, 511):
            longest = lengths.longest(room)
            assert lengths.corrupted(longest)[0] <= room < lengths.corrupted(longest + 1)[0]
    assert SpanLengths.of_plan("none") is SpanLengths.of_plan("none-left") is None


def test_pieces_hold_all_of_a_text_and_the_shortest_are_told(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the spans put back, pieces of a document are its tokens; none has fewer than two."""
    recipe = recipe_of(root, WAY, data__seq_len=7)
    prepare(recipe)
    rows = opened(root, seq_len=7)
    column = rows._sources[0].column("body", 0)
    lengths = column.lengths(0, len(column))
    assert ((lengths % rows._hiding.lengths.longest(6)) == 1).any()  # type: ignore[union-attr]
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    sentinels, end = set(sentinels_of(tokenizer)), tokenizer.token_id(EOS)
    found = rows.fields(range(len(rows)))
    assert found.tokens.shape[1] <= 7
    bodies: dict[int, list[int]] = {}
    shortest = 99
    for document, source, live, target in zip(
        rows.documents_of(len(rows)).tolist(),
        found.tokens,
        found.segments.sum(axis=1),
        found.labels,
        strict=True,
    ):
        spans: list[list[int]] = []
        for token in target[target != IGNORE].tolist()[:-1]:
            spans.append([]) if token in sentinels else spans[-1].append(token)
        assert source[live - 1] == end == target[target != IGNORE][-1]
        filled = iter(spans)
        whole = [
            token
            for one in source[: live - 1].tolist()
            for token in (next(filled) if one in sentinels else [one])
        ]
        shortest = min(shortest, len(whole))
        bodies.setdefault(document, []).extend(whole)
    assert list(bodies.values()) == [column[number].tolist() for number in range(len(column))]
    assert shortest == 2
    assert "left out" not in capsys.readouterr().err
    one = root / "one.jsonl"
    one.write_text('{"text": "a"}\n' * 3 + '{"text": "copper rings and cools"}\n' * 60)
    short = recipe_of(root, WAY, name="short", data__train=[{"source": str(one)}])
    ingest(short)
    prepare(short)
    told = capsys.readouterr().err
    assert "records were left out: they have fewer than 2 tokens, of which one is hidden" in told


def reads(rows: Samples, count: int, ranks: int, micro_batch: int) -> list[list[Any]]:
    """The samples of each step over all ranks: number, what is read, what is written."""
    order, plan = SampleOrder(rows.sizes, 0, rows.weights), BatchPlan(8, micro_batch, ranks)
    found: list[list[Any]] = [[] for _ in range(count)]
    for rank in range(ranks):
        with contextlib.closing(Loader(rows, order, plan, rank)) as loader:
            for step, batch in [(i, one) for i in range(count) for one in loader.step(i)]:
                rowwise = zip(batch.rows.tolist(), batch.tokens, batch.labels, strict=True)
                found[step] += [
                    (number, tokens[tokens != 0].tolist(), labels[labels != IGNORE].tolist())
                    for number, tokens, labels in rowwise
                    if number >= 0
                ]
                text = int((batch.segments > 0).sum() + (batch.labels != IGNORE).sum())
                assert batch.text_tokens == text
    return found


def test_any_number_of_ranks_hides_the_same_and_another_pass_other_spans(root: Path) -> None:
    rows = opened(root)
    assert rows.fields(range(len(rows))).segments.sum(axis=1).max() == 48, (
        "rows are used to the end"
    )
    alone = reads(rows, 2 * (len(rows) // 8 + 1), 1, 8)
    assert reads(rows, 2, 2, 3) == reads(rows, 2, 4, 1) == alone[:2]
    times: dict[int, list[Any]] = {}
    for number, *read in itertools.chain.from_iterable(alone):
        times.setdefault(number, []).append(read)
    # Short texts can be cut in few ways.
    again = [one for one in times.values() if len(one) > 1 and len(one[0][1]) > 9]
    assert len(again) > 0.3 * len(rows)
    assert sum(one[0] == one[1] for one in again) < 0.1 * len(again)
    assert reads(opened(root, seed=1), 1, 1, 8) != alone[:1]


def test_held_out_texts_are_corrupted_alike_whatever_the_seed(root: Path) -> None:
    one, other = (opened(root, "validation", seed=seed).fields([3, 1]) for seed in (0, 5))
    assert (one.tokens == other.tokens).all()
    assert (one.labels == other.labels).all()
    assert (one.labels[0] != IGNORE).sum() > 3


def test_the_loss_is_that_of_transformers_on_the_same_ids(root: Path) -> None:
    from transformers import T5ForConditionalGeneration

    recipe = recipe_of(root, WAY)
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    spec = resolve_model_spec(recipe, tokenizer.vocab_size, tokenizer.ids_for_model)
    model = build_model(spec, 0, filled=True).eval()
    theirs = model.inner
    assert isinstance(theirs, T5ForConditionalGeneration)
    made = opened(root).fields(range(7))
    tokens, labels, positions, segments = map(torch.from_numpy, made)
    ours = model(tokens, positions, segments, labels, CrossEntropy().token)
    loss = theirs(
        input_ids=tokens.masked_fill(segments == 0, model.config.pad),
        attention_mask=segments,
        labels=labels,
    ).loss
    mean = ours.detach().sum() / (labels != IGNORE).sum()
    assert float(mean) == pytest.approx(float(loss.detach()), abs=tolerances.LOGITS_FP32)


def t5_like(folder: Path) -> None:
    """Unigrams that begin with a space, and sentinels whose ids go down."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    sentinels = [f"<extra_id_{number}>" for number in reversed(range(30))]
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    names = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=names, unk_token="<unk>")
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=sentinels,
    ).save_pretrained(folder)


def test_sentinels_of_a_t5_are_in_their_order_and_read_as_transformers_reads_them(
    root: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    t5_like(tmp_path)
    theirs, tokenizer = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    made = SpanCorruption.of(recipe_of(root, WAY), tokenizer)
    assert made is not None
    last = len(theirs) - 1
    assert made.sentinels.tolist() == [last - number for number in range(30)]
    assert made.sentinels[0] == theirs.convert_tokens_to_ids("<extra_id_0>")
    asked = "the furnace <extra_id_0> copper <extra_id_1>"
    assert encode_with_sentinels(tokenizer, asked) == theirs(asked)["input_ids"]
    plain = "the furnace </s> melts"
    assert encode_with_sentinels(tokenizer, plain) == tokenizer.encode_framed(plain)
    ids = [last, *tokenizer.encode("melts"), last - 1, theirs.eos_token_id]
    source = encode_with_sentinels(tokenizer, asked)
    assert decoder_for(tokenizer, source)(ids) == theirs.decode(ids[:-1])
    assert decoder_for(tokenizer, source[-1:])(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_tokenizer_that_cannot_hide_spans_is_refused(root: Path, tmp_path: Path) -> None:
    recipe = recipe_of(root, WAY)
    with pytest.raises(WrongInput, match=r"has no sentinels .* set model.source to a T5"):
        SpanCorruption.of(recipe, train_bpe(TEXTS, 300, masks=True))
    t5_like(tmp_path)
    with pytest.raises(WrongInput, match=r"seq_len 1000 has 5\d hidden spans, and .* only 30"):
        SpanCorruption.of(recipe_of(root, WAY, data__seq_len=1000), load_tokenizer(tmp_path))
    assert SpanCorruption.of(recipe_of(root, "mlm"), train_bpe(TEXTS, 300)) is None
    with pytest.raises(WrongInput, match=r"data.seq_len 3 has no room for a token beside the 1"):
        prepare(recipe_of(root, WAY, data__seq_len=3))


def test_a_target_length_of_ones_own_is_refused(root: Path) -> None:
    with pytest.raises(WrongInput, match=r"targets are up to 12 tokens long; remove it"):
        recipe_of(root, WAY, data__target_len=64)
