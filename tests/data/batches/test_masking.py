"""What is hidden from a masked language model: as transformers' collator hides it, the same for a
key, and never what is special.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.base.progress import Progress
from ingot.config.shape import BatchPlan
from ingot.data.batches.loader import Batch, Loader, fixed_batches
from ingot.data.batches.masking import Masking, mask_token
from ingot.data.batches.order import SampleOrder
from ingot.data.batches.rows import IGNORE, open_rows
from ingot.data.batches.samples import Samples
from ingot.data.columns.manifest import PreparedData, read_prepared
from ingot.data.engines.local import LocalEngine
from ingot.data.packing.tables import pack, read_packed
from ingot.tokenizers.bpe import MASK, train_bpe
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.words import word_starts
from tests.markers import changed
from tests.objectives.ways import prepare_way, recipe_of, write_all
from tests.tokenizers.small import TEXTS

TOKENS = 200_000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("masked")
    write_all(made)
    prepare_way(made, "mlm")
    return made


def opened(root: Path, split: Any = "train", seq_len: int = 48, **knobs: Any) -> Samples:
    recipe = recipe_of(root, "mlm", **knobs)
    masking = Masking.of(recipe, load_tokenizer(recipe.folder.tokenizer))
    rows = open_rows(
        recipe.folder.columns, split, seq_len, pad_last=False, pack="none", hiding=masking
    )
    assert isinstance(rows, Samples)
    return rows


def share(part: torch.Tensor | np.ndarray[Any, Any], whole: Any) -> float:
    return float(part.sum()) / float(whole.sum())


@pytest.mark.parametrize(
    "knobs", [(0.15, 0.8, 0.1), (0.4, 0.5, 0.3), (0.15, 1.0, 0.0), (0.15, 0.0, 1.0)]
)
def test_as_many_are_hidden_in_the_same_ways_as_by_transformers(
    knobs: tuple[float, float, float], root: Path, tmp_path: Path
) -> None:
    """Of as many tokens: how many are chosen, become the mask token, another one, or stay."""
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    names = ("mlm_probability", "mask_replace_prob", "random_replace_prob")
    given = dict(zip(names, knobs, strict=True))
    tokenizer = train_bpe(TEXTS, 300, masks=True)
    tokenizer.save(tmp_path)
    masking = Masking.of(recipe_of(root, "mlm", objective={"kind": "mlm", **given}), tokenizer)
    assert masking is not None
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert set(theirs.all_special_ids) == set(masking.special.tolist())
    assert (theirs.mask_token_id, len(theirs)) == (masking.mask, masking.vocab_size)
    assert (
        theirs("copper rings")["input_ids"]
        == masking.framed(np.array(tokenizer.encode("copper rings"))).tolist()
    )
    ids = np.random.default_rng(0).integers(0, 300, TOKENS)
    collator = DataCollatorForLanguageModeling(theirs, seed=1, **given)
    batch = collator([{"input_ids": ids.tolist()}])
    found = {
        "theirs": (batch["input_ids"][0].numpy(), batch["labels"][0].numpy()),
        "ours": masking.hide(ids, masking.of_sample(3)),
    }
    plain = ~np.isin(ids, masking.special)
    for who, (tokens, labels) in found.items():
        asked = labels != IGNORE
        assert not (asked & ~plain).any(), who
        assert (labels[asked] == ids[asked]).all(), who
        assert (tokens[~asked] == ids[~asked]).all(), who
        masked, other = tokens == masking.mask, (tokens != ids) & (tokens != masking.mask)
        # One of 300 drawn is the mask token, and another one the token itself.
        for part, of, wanted in (
            (asked, plain, knobs[0]),
            (masked & asked, asked, knobs[1] + knobs[2] / 300),
            (other & asked, asked, knobs[2] * 298 / 300),
        ):
            spread = (wanted * (1 - wanted) / of.sum()) ** 0.5
            assert abs(share(part, of) - wanted) <= 4 * spread, who
    drawn = found["ours"][0][(found["ours"][0] != ids) & (found["ours"][0] != masking.mask)]
    assert len(np.unique(drawn)) > 290 if knobs[2] else not len(drawn)


def test_a_text_is_in_pieces_and_nothing_of_it_is_lost(root: Path) -> None:
    """Each piece in its frame, in the order of the text; asked for or not, each token is there."""
    rows = opened(root)
    before, after = rows._hiding.frame if rows._hiding else ([], [])
    assert len(before) == len(after) == 1
    found = rows.fields(range(len(rows)))
    whole = np.where(found.labels != IGNORE, found.labels, found.tokens)
    bodies: dict[int, list[int]] = {}
    for document, row, live in zip(
        rows.documents_of(len(rows)).tolist(), whole, found.segments.sum(axis=1), strict=True
    ):
        assert (row[0], row[live - 1]) == (before[0], after[0])
        bodies.setdefault(document, []).extend(row[1 : live - 1].tolist())
    column = rows._sources[0].column("body", 0)
    assert len(rows.part_rows[0]) == 1
    assert list(bodies.values()) == [column[number].tolist() for number in range(len(column))]
    assert max(len(body) for body in bodies.values()) > 2 * 48
    special = rows._hiding.special if isinstance(rows._hiding, Masking) else []
    assert not np.isin(found.labels, special).any()
    assert (found.labels != IGNORE).sum() == pytest.approx(0.15 * rows.tokens, rel=0.1)


def steps_of(rows: Samples, count: int, ranks: int, micro_batch: int) -> list[dict[int, Any]]:
    """Step -> sample number -> what the model reads and is asked, over all ranks."""
    order, plan = (
        SampleOrder(rows.sizes, 0, rows.weights),
        BatchPlan(8, micro_batch, ranks),
    )
    found: list[dict[int, Any]] = []
    for step in range(count):
        seen: list[Batch] = []
        for rank in range(ranks):
            with contextlib.closing(Loader(rows, order, plan, rank)) as loader:
                seen += loader.step(step)
        live = [
            (number, tokens, labels)
            for batch in seen
            for number, tokens, labels in zip(
                batch.rows.tolist(), batch.tokens, batch.labels, strict=True
            )
            if number >= 0
        ]
        found.append(
            {
                index: (number, tokens[tokens != 0].tolist(), labels[labels != IGNORE].tolist())
                for index, (number, tokens, labels) in enumerate(live)
            }
        )
    return found


def test_any_number_of_ranks_sees_the_same_masks_and_another_pass_others(root: Path) -> None:
    rows = opened(root)
    passes = len(rows) // 8 + 1
    alone = steps_of(rows, 2 * passes, 1, 8)
    assert steps_of(rows, 2, 2, 3) == steps_of(rows, 2, 4, 1) == alone[:2]
    times: dict[int, list[Any]] = {}
    for step in alone:
        for number, *read in step.values():
            times.setdefault(number, []).append(read)
    again = [reads for reads in times.values() if len(reads) > 1]
    assert len(again) > 0.9 * len(rows)
    same = sum(reads[0] == reads[1] for reads in again)
    assert same < 0.1 * len(again), "short texts may have nothing that is asked for, twice"
    other = opened(root, seed=1)
    assert steps_of(other, 1, 1, 8)[0] != alone[0]


def test_held_out_texts_are_masked_alike_whatever_the_seed_and_their_number(root: Path) -> None:
    one, other = (opened(root, "validation", seed=seed) for seed in (0, 5))
    count = min(len(one), 9)
    whole = next(iter(fixed_batches(one, range(count), count)))
    again = next(iter(fixed_batches(other, range(count), count)))
    assert torch.equal(whole.tokens, again.tokens)
    assert torch.equal(whole.labels, again.labels)
    assert (whole.labels != IGNORE).any()
    for place, number in enumerate((4, 2)):
        row = next(iter(fixed_batches(other, (4, 2), 2)))
        width = min(row.tokens.shape[1], whole.tokens.shape[1])
        assert torch.equal(row.tokens[place, :width], whole.tokens[number, :width])
        assert torch.equal(row.labels[place, :width], whole.labels[number, :width])


def test_a_tokenizer_without_a_mask_token_is_refused(root: Path) -> None:
    with pytest.raises(WrongInput, match=r"has no mask token, .* set tokenizer.source to one"):
        Masking.of(recipe_of(root, "mlm"), train_bpe(TEXTS, 300))
    assert Masking.of(recipe_of(root, "pretrain"), train_bpe(TEXTS, 300)) is None


def test_rows_without_room_beside_the_frame_are_refused(root: Path) -> None:
    from ingot.data.prepare import prepare

    recipe = recipe_of(root, "mlm", data__seq_len=2)
    with pytest.raises(WrongInput, match=r"data.seq_len 2 has no room for a token beside the 2"):
        prepare(recipe)


def test_rows_are_planned_anew_for_another_frame(root: Path, tmp_path: Path) -> None:
    """The frame is not in the records, and the same text may lie in fewer rows or more."""
    recipe = recipe_of(root, "mlm")
    folder = tmp_path / "columns"
    shutil.copytree(recipe.folder.columns, folder)

    def rows_of(prepared: PreparedData) -> int:
        quiet = Progress("pack", None, "MB", quiet=True)
        packed = pack(folder, prepared, 48, "none", LocalEngine(1), quiet)
        assert packed == read_packed(folder, prepared, 48, "none")
        return packed.total.rows

    before = read_prepared(folder)
    changed(folder, "manifest.json", opening=before.opening + 30)
    after = read_prepared(folder)
    with pytest.raises(WrongInput, match=r"holds no rows of data\.seq_len=48"):
        read_packed(folder, after, 48, "none")
    assert rows_of(before) < rows_of(after)


def bert_like(folder: Path) -> None:
    """WordPiece with `[CLS]`, `[SEP]` and `[MASK]`, and no BOS nor EOS."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertTokenizerFast

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(TEXTS, trainers.WordPieceTrainer(special_tokens=names, vocab_size=200))
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    BertTokenizerFast(tokenizer_object=made).save_pretrained(folder)


def roberta_like(folder: Path) -> None:
    """Bytes, `<s>` and `</s>`, and a mask that takes the space before it."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import RobertaTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = ["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True, special=True)]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=names, vocab_size=320, initial_alphabet=letters)
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    mask = AddedToken("<mask>", lstrip=True, special=True)
    RobertaTokenizerFast(tokenizer_object=made, mask_token=mask).save_pretrained(folder)


@pytest.mark.parametrize("make", [bert_like, roberta_like])
def test_tokenizers_of_the_hub_mask_and_frame_as_transformers_does(
    make: Any, root: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    make(tmp_path)
    theirs, tokenizer = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    masking = Masking.of(recipe_of(root, "mlm"), tokenizer)
    assert masking is not None
    assert set(masking.special.tolist()) == set(theirs.all_special_ids)
    assert (masking.mask, masking.vocab_size) == (theirs.mask_token_id, len(theirs))
    text = "the furnace melts copper"
    assert masking.framed(np.array(tokenizer.encode(text))).tolist() == theirs(text)["input_ids"]
    hidden = f"the furnace {theirs.mask_token} copper {theirs.mask_token}."
    assert tokenizer.encode_masked(hidden) == theirs(hidden)["input_ids"]


def sentencepiece_like(folder: Path) -> None:
    """Unigrams that begin with a space, as XLM-RoBERTa's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    made.decoder = decoders.Metaspace()
    names = ["<s>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=names, unk_token="<unk>")
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **named).save_pretrained(folder)


def bytes_like(folder: Path) -> None:
    train_bpe(TEXTS, 330, masks=True).save(folder)


SENTENCES = [
    "the furnace melts (bright) copper, slowly; naïve Überhitzung!",
    "rings   and  rings: 12345 moulds' cooling isn't done",
    *TEXTS,
]


@pytest.mark.parametrize("make", [bert_like, roberta_like, sentencepiece_like, bytes_like])
def test_words_are_those_of_the_library_and_are_masked_as_a_whole(
    make: Any, root: Path, tmp_path: Path
) -> None:
    """Beside the word numbers of transformers' tokenizer: a token for a token."""
    from transformers import AutoTokenizer

    make(tmp_path)
    theirs, tokenizer = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    knobs = {"kind": "mlm", "whole_word_mask": True, "mlm_probability": 0.4}
    masking = Masking.of(recipe_of(root, "mlm", objective=knobs), tokenizer)
    assert masking is not None
    assert masking.words is not None
    several = 0
    for text in SENTENCES:
        encoded = theirs(text)
        ids, numbers = np.array(encoded["input_ids"]), encoded.word_ids()
        body = masking.framed(np.array(tokenizer.encode(text)))
        assert body.tolist() == ids.tolist()
        inner = numbers[1:-1]
        wanted = [place == 0 or inner[place - 1] != one for place, one in enumerate(inner)]
        assert masking.words(ids[1:-1]).tolist() == wanted, text
        several += wanted.count(False)
        plain = ~np.isin(ids, masking.special)
        for place in range(20):
            asked = masking.hide(ids, masking.of_sample(place))[1] != IGNORE
            for word in set(inner):
                of_word = np.array([one == word for one in numbers]) & plain
                assert len(set(asked[of_word].tolist())) < 2
    assert several > 10
    rows = np.array(tokenizer.encode(" ".join(SENTENCES * 80)))
    tokens, labels = masking.hide(masking.framed(rows), masking.of_sample(1))
    asked = labels != IGNORE
    assert share(asked, np.ones_like(asked)) == pytest.approx(0.4, abs=0.03)
    assert share(tokens[asked] == masking.mask, asked[asked]) == pytest.approx(0.8, abs=0.03)
    # How each of its tokens is hidden is drawn for it alone: two are alike by 0.8 ** 2 + 0.2 ** 2.
    begin, hidden = len(masking.frame[0]), tokens == masking.mask
    within = np.flatnonzero(~masking.words(rows)) + begin
    within = within[asked[within]]
    alike = hidden[within] == hidden[within - 1]
    assert share(alike, np.ones_like(alike)) == pytest.approx(0.68, abs=0.1)


def test_words_of_a_text_cut_within_a_character_are_found(tmp_path: Path) -> None:
    """A piece of a text may begin or end within a character of several bytes."""
    bytes_like(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = np.array(tokenizer.encode("日本 copper 本"))
    whole = word_starts(tokenizer)(ids)
    assert whole.sum() == 3
    for cut in range(1, 5):
        part = word_starts(tokenizer)(ids[cut : len(ids) - 1])
        assert part[1:].tolist() == whole[cut + 1 : len(ids) - 1].tolist()
        assert part[0]


def test_words_that_cannot_be_told_are_refused(root: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE({"a": 0, "<mask>": 1, "b": 2}, []))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, mask_token="<mask>").save_pretrained(tmp_path)
    knobs = {"kind": "mlm", "whole_word_mask": True}
    with pytest.raises(WrongInput, match=r"words begin cannot be told .*BPE, Whitespace"):
        Masking.of(recipe_of(root, "mlm", objective=knobs), load_tokenizer(tmp_path))


def test_a_learnt_mask_token_takes_the_space_before_the_word_that_it_hides() -> None:
    """In training the hidden token is ` fox` with its space; a text with a lone space before the
    mask would be one that the model has never read.
    """
    tokenizer = train_bpe(["the quick fox melts copper"] * 9, 300, masks=True)
    before, after = map(list, tokenizer.frame)
    hidden = tokenizer.encode("the fox melts")
    hidden[1] = mask_token(tokenizer)
    assert tokenizer.encode_masked(f"the {MASK} melts") == [*before, *hidden, *after]
