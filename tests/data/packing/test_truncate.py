"""What is longer than a row is cut where `data.truncate` says, or left out; nothing that is trained
gets lost without being counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.base.progress import Progress
from ingot.config.identity import training_identity
from ingot.config.sections.objective import Documents
from ingot.data.batches.loader import fixed_batches
from ingot.data.batches.rows import Rows, open_rows
from ingot.data.batches.samples import Samples
from ingot.data.columns.manifest import read_prepared
from ingot.data.columns.reader import IGNORE
from ingot.data.engines.local import LocalEngine
from ingot.data.packing.tables import RowTables, pack
from ingot.verify.data_columns import check_rows
from tests.data.batches.test_samples import write
from tests.small import small_recipe

PREFERENCE = {
    "chosen": [1, 2, 3, 4, 5, 6],
    "chosen_mask": [0, 0, 0, 0, 1, 1],
    "rejected": [1, 2, 3, 4, 7],
    "rejected_mask": [0, 0, 0, 0, 1],
}
LONG_ANSWER = {
    "chosen": [1, 2, 3, 4, 5, 6, 7],
    "chosen_mask": [0, 0, 1, 1, 1, 1, 1],
    "rejected": [1, 2, 8],
    "rejected_mask": [0, 0, 1],
}
LONG_REJECTED = {
    "chosen": PREFERENCE["rejected"],
    "chosen_mask": PREFERENCE["rejected_mask"],
    "rejected": PREFERENCE["chosen"],
    "rejected_mask": PREFERENCE["chosen_mask"],
}
RATED = {"answer": [1, 2, 3, 4, 5, 6], "answer_mask": [0, 0, 0, 0, 1, 1], "label": [1]}
CHAT = {"tokens": [1, 2, 3, 4, 5, 6, 7], "mask": [0, 1, 0, 0, 0, 1, 1]}
SHORT_CHAT = {"tokens": [8, 9], "mask": [0, 1]}


def rows_of(
    folder: Path, kind: Documents, records: list[Any], how: str, seq_len: int = 4
) -> tuple[RowTables, Rows | Samples]:
    columns = write(folder, kind, [[records]])
    prepared, quiet = read_prepared(columns), Progress("pack", None, "MB", quiet=True)
    made = pack(columns, prepared, seq_len, how, LocalEngine(1), quiet)
    proof = check_rows(columns, prepared, f"rows-{how}-{seq_len}.json", lambda count: None)
    assert proof.passed, proof.detail
    return made, open_rows(columns, "train", seq_len, pack=how, pad_last=False)


def shown(rows: Rows | Samples) -> list[tuple[list[int], list[int]]]:
    """Tokens and targets of all rows, without padding."""
    (batch,) = fixed_batches(rows, range(len(rows)), len(rows))
    return [
        (tokens[segments > 0].tolist(), labels[labels != IGNORE].tolist())
        for tokens, segments, labels in zip(batch.tokens, batch.segments, batch.labels, strict=True)
    ]


def test_a_prompt_is_cut_from_the_left_on_both_sides_alike(tmp_path: Path) -> None:
    records = [PREFERENCE, LONG_ANSWER, LONG_REJECTED]
    made, rows = rows_of(tmp_path, "preference", records, "none-left")
    assert shown(rows) == [
        ([3, 4, 5, 6], [5, 6]),
        ([3, 4, 7], [7]),
        ([2, 3, 4, 5], [3, 4, 5]),  # the last id of its prompt stays, its end is cut
        ([2, 8], [8]),
        ([3, 4, 7], [7]),
        ([3, 4, 5, 6], [5, 6]),
    ]
    assert (made.total.rows, made.total.truncated, made.total.lost) == (3, 3, 0)
    assert str(made).endswith("3 records were longer and cut at the beginning of their prompt")


def test_from_the_right_the_answers_go_and_are_counted(tmp_path: Path) -> None:
    made, rows = rows_of(tmp_path, "preference", [PREFERENCE, LONG_ANSWER], "none")
    assert shown(rows) == [([1, 2, 3, 4], [3, 4]), ([1, 2, 8], [8])]
    assert (made.total.rows, made.total.truncated, made.total.lost) == (1, 1, 1)


@pytest.mark.parametrize(
    ("kind", "records"),
    [
        (
            "preference",
            [PREFERENCE, {**LONG_ANSWER, "chosen": [1, 2, 3], "chosen_mask": [0, 0, 1]}],
        ),
        ("rated", [RATED, {"answer": [1, 2], "answer_mask": [0, 1], "label": [0]}]),
        ("labelled", [{"tokens": [1] * 5, "label": [0]}, {"tokens": [1], "label": [1]}]),
    ],
)
def test_what_is_too_long_is_left_out_and_counted(
    kind: Documents, records: list[Any], tmp_path: Path
) -> None:
    made, rows = rows_of(tmp_path, kind, records, "none-drop")
    assert len(rows) == 1
    assert (made.total.too_long, made.total.lost, made.total.truncated) == (1, 0, 0)
    assert "1 records were left out: they are longer, and data.truncate is drop" in str(made)


def test_rated_answers_keep_their_verdict_and_meet_whole_answers(tmp_path: Path) -> None:
    other = {"answer": [7, 8, 9], "answer_mask": [0, 1, 1], "label": [0]}
    _, rows = rows_of(tmp_path, "rated", [RATED, other], "none-left")
    assert shown(rows) == [
        ([3, 4, 5, 6], [5, 6]),
        ([3, 4, 8, 9], [8, 9]),
        ([7, 8, 9], [8, 9]),
        ([7, 5, 6], [5, 6]),
    ]
    (batch,) = fixed_batches(rows, range(2), 2)
    assert torch.equal(batch.ratings, torch.tensor([1, 0]))


@pytest.mark.parametrize("how", ["none", "best_fit"])
def test_of_a_chat_its_end_stays(how: str, tmp_path: Path) -> None:
    made, rows = rows_of(tmp_path, "chat", [CHAT, SHORT_CHAT], f"{how}-left")
    assert sorted(shown(rows)) == [([4, 5, 6, 7], [6, 7]), ([8, 9], [9])]
    assert (made.total.truncated, made.total.lost) == (1, 0)
    assert "1 records were longer and cut to their last 4 tokens" in str(made)
    untrained = {**CHAT, "mask": [0] * len(CHAT["mask"])}
    chats = [CHAT, SHORT_CHAT, untrained]
    left_out, rest = rows_of(tmp_path / "drop", "chat", chats, f"{how}-drop")
    assert shown(rest) == [([8, 9], [9])]
    assert (left_out.total.too_long, left_out.total.untrained) == (1, 1), "each is counted once"


def test_rows_of_another_way_are_not_taken(tmp_path: Path) -> None:
    _, rows = rows_of(tmp_path, "preference", [PREFERENCE], "none-left")
    with pytest.raises(WrongInput, match=r"data\.pack=none; run `ingot prepare` with"):
        open_rows(rows.columns, "train", 4, pack="none", pad_last=False)


def test_who_cannot_be_cut_from_the_left_is_told(tmp_path: Path) -> None:
    left = {"data__truncate": "left"}
    with pytest.raises(
        WrongInput, match=r"left is not for objective\.kind pretrain; set it to right$"
    ):
        small_recipe(tmp_path, **left)
    with pytest.raises(WrongInput, match=r"objective\.kind seq2seq; set it to right or drop"):
        small_recipe(tmp_path, objective__kind="seq2seq", **left)
    recipe = small_recipe(tmp_path, objective__kind="dpo", **left)
    assert training_identity(recipe)["data.truncate"] == "left"


@pytest.mark.parametrize("how", ["best_fit", "best_fit-drop"])
def test_prompts_that_fill_each_row_ask_for_longer_rows(tmp_path: Path, how: str) -> None:
    """Shorter ones would hold even less."""
    chat = {"tokens": [1, 2, 3, 4, 5, 6], "mask": [0, 0, 0, 0, 0, 1]}
    with pytest.raises(WrongInput, match=r"not one row of data\.seq_len=4; within it .* raise it$"):
        rows_of(tmp_path, "chat", [chat, chat], how)
