"""The program for a GPU refuses a machine without one; what it does there is run here in
miniature.
"""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from benchmarks import gpu


def test_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees none here"):
        gpu.main()


def test_what_a_gpu_is_asked() -> None:
    rows = gpu.rows_of()
    assert {(row.preset, row.seq_len) for row in rows} == {("llama-1b", 4096), ("llama-8b", 4096)}
    assert sum(row.trainer for row in rows) == 8
    assert {row.float8 for row in rows if row.config} == {"none", "tensorwise", "rowwise"}
    full, adapted = gpu.Row("", "llama-8b", 1), gpu.Row("", "llama-8b", 1, lora=True)
    # Gradients of weights that are kept: 2 of 6 operations a weight; those of attention remain.
    assert adapted.flops == pytest.approx(full.flops * 2 / 3, rel=0.05)
    assert adapted.flops > full.flops * 2 / 3


def test_of_the_numbers_of_layers_the_most_that_fit_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def ours(row: gpu.Row, steps: int, folder: object) -> dict[str, object]:
        tried.append((dict(row.config)["num_hidden_layers"], row.float8))
        if tried[-1][0] == 24:
            return {"status": "out of memory", "reason": "none left"}
        return {
            "status": "measured",
            "tokens_per_s": 100.0,
            "peak_flops": 1e15,
            "process_memory_bytes": 1,
        }

    monkeypatch.setattr(gpu, "ours", ours)
    found = gpu.measure([row for row in gpu.rows_of() if row.config], 1, "cpu")
    assert tried == [
        (24, "none"),
        (24, "tensorwise"),
        (24, "rowwise"),
        (16, "none"),
        (16, "tensorwise"),
        (16, "rowwise"),
    ]
    assert [row["status"] for row in found] == ["out of memory"] * 3 + ["measured"] * 3
    assert found[-1]["share_of_peak"] == pytest.approx(
        100 * gpu.Row("", "llama-8b", 1, config=(("num_hidden_layers", 16),)).flops / 1e15
    )


@pytest.mark.slow
def test_all_rows_in_miniature() -> None:
    rows = gpu.rows_of(one_gpu=False)
    found = gpu.measure(rows, 1, "cpu")
    console = Console(record=True, width=150)
    gpu.show(found, console)
    said = console.export_text()
    refused = [row for row in found if row["status"] != "measured"]
    assert {row["name"] for row in refused} <= {row.name for row in rows if row.float8 != "none"}, (
        said
    )
    assert all(0 < row["share_of_peak"] < 1 for row in found if row["status"] == "measured")
