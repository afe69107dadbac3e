"""`ingot show data` on preferences, pairs and labelled texts: each column has its lengths and a
sample.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.cli.views.datatables import show_data
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from tests.data.test_prepare_examples import of


@pytest.mark.parametrize(
    ("kind", "columns", "told"),
    [
        (
            "preference",
            ["chosen", "rejected"],
            ["a document of part 0, chosen: '", "rows of 96 tokens (none): ", "<|im_end|>"],
        ),
        (
            "rated",
            ["answer"],
            [
                "a document of part 0, answer: '",
                "a document of part 0, label: ",
                "rows of 96 tokens (none): ",
            ],
        ),
        (
            "pair",
            ["source", "target"],
            [
                "a document of part 0, target: '<|begin_of_text|>melts",
                "rows of 96 tokens, targets of 12 (none): ",
            ],
        ),
        (
            "labelled",
            ["tokens"],
            [
                "a document of part 0: '<|begin_of_text|>The number is",
                "a document of part 0, label: ",
                "rows of 96 tokens (none): ",
            ],
        ),
    ],
)
def test_every_kind_is_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    columns: list[str],
    told: list[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    small = of(kind, tmp_path)
    ingest(small)
    prepare(small)
    capsys.readouterr()
    assert show_data(str(small.folder.root)) == 0
    out = capsys.readouterr().out
    for text in told:
        assert text in out
    lengths = out.partition("tokens of a document")[2].partition("rows of")[0].splitlines()
    assert [line.split("│")[2].strip() for line in lengths if line.startswith("│")] == columns * 2
    assert "padding" not in out, "batches are no longer than their longest record"
    label = next((line for line in out.splitlines() if ", label: " in line), "label: odd")
    assert label.endswith(("odd", "even", "good", "bad"))
