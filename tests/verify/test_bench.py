"""The rows of a bench: which are tried, what is measured, and what becomes of processes that run
out of memory, are killed or refuse.
"""

from __future__ import annotations

import json
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ingot.base.environment import ranks
from ingot.base.errors import Failed, WrongInput
from ingot.base.hostmemory import HostMemory
from ingot.config.recipe import Recipe
from ingot.config.shape import flops_per_token
from ingot.data.columns.manifest import prepared_for
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.parallel.mesh import running_mesh
from ingot.train.setup import make_setup
from ingot.verify import bench_row
from ingot.verify.bench import (
    FORMULA,
    BenchCase,
    StartCommand,
    bench,
    best_of,
    cases_of,
    refusal_reason,
    run_case,
    skip_reason,
)
from ingot.verify.bench_row import measure_row
from tests.nobody import as_nobody, open_folder
from tests.ranks import run_ranks
from tests.small import TINY_MODEL, small_recipe, write_documents

ROW = {"status": "measured", "compute": "fp32"}


def told(cases: list[BenchCase]) -> list[tuple[int, str, int]]:
    return [(case.devices, case.precision, case.micro_batch) for case in cases]


def test_cases_are_what_the_recipe_would_run_or_what_is_asked_for(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, train__global_batch=12, launch__processes=2)
    assert told(cases_of(recipe, None, None, None)) == [
        (2, "recipe", size) for size in (1, 2, 4, 6)
    ]
    asked = cases_of(recipe, "1, 2", "8,4,4", "fp32,bf16")
    assert told(asked) == [
        (count, form, size) for count in (1, 2) for form in ("fp32", "bf16") for size in (4, 8)
    ]
    assert asked[0].overrides == [
        "train.micro_batch=4",
        "launch.processes=1",
        "precision.compute=fp32",
        "precision.float8=none",
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("0", None, None), "--devices 0: `0` is no positive whole number"),
        (
            (None, "1,two", None),
            "--micro-batch 1,two: `two` is no positive whole number; give a list such as 1,2,4",
        ),
        (
            (None, None, "fp16"),
            (
                "--precision fp16 is not known; choose among recipe, fp32, bf16, float8,"
                " float8-rowwise"
            ),
        ),
    ],
)
def test_lists_that_are_none_are_refused(
    options: tuple[Any, Any, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(WrongInput) as caught:
        cases_of(small_recipe(tmp_path), *options)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("knobs", "case", "says"),
    [
        (
            {},
            BenchCase(3, 1, "recipe"),
            "train.global_batch 4 does not divide over 3 processes; 2 would fit",
        ),
        ({}, BenchCase(2, 4, "recipe"), "a process has only 2 rows of train.global_batch 4"),
        (
            {"parallel__shard": 2, "parallel__replicate": 1},
            BenchCase(1, 1, "recipe"),
            "parallel.shard 2 needs 2 processes, 1 is running",
        ),
        (
            {"parallel__shard": 2},
            BenchCase(1, 1, "recipe"),
            "parallel.shard 2 takes 2 processes a copy, which does not divide 1; start 2 processes",
        ),
        ({}, BenchCase(2, 2, "recipe"), ""),
    ],
)
def test_what_cannot_be_is_known_before_it_is_tried(
    knobs: dict[str, Any], case: BenchCase, says: str, tmp_path: Path
) -> None:
    found = refusal_reason(small_recipe(tmp_path, **knobs), case)
    assert found.startswith(says)
    assert bool(found) == bool(says)


def test_larger_ones_are_hopeless_only_beside_their_like() -> None:
    out = [BenchCase(1, 4, "fp32")]
    assert skip_reason(BenchCase(1, 8, "fp32"), out) == "not tried: 4 rows at once ran out already"
    assert [
        skip_reason(case, out)
        for case in (BenchCase(1, 2, "fp32"), BenchCase(2, 8, "fp32"), BenchCase(1, 8, "bf16"))
    ] == ["", "", ""]


def shell(script: str) -> StartCommand:
    """Processes that do as `script` says; $1 is the file for the row, $2 the micro-batch."""
    return lambda case, into: (
        ["sh", "-c", script, "sh", str(into), str(case.micro_batch)],
        {"PATH": "/usr/bin:/bin"},
    )


@pytest.mark.parametrize(
    ("script", "row"),
    [
        (
            "kill -KILL $$",
            {
                "status": "out of memory",
                "reason": "killed by the system (SIGKILL), as it does when memory runs out",
            },
        ),
        (
            "exit 137",
            {
                "status": "out of memory",
                "reason": "killed by the system (SIGKILL), as it does when memory runs out",
            },
        ),
        (
            'echo \'{"status": "out of memory", "reason": "x"}\' > $1; exit 1',
            {"status": "out of memory", "reason": "x"},
        ),
        (
            "echo loading >&2; echo 'rank 1: error: too long; lower it' >&2; echo more >&2; exit 2",
            {"status": "refused", "reason": "too long; lower it"},
        ),
        ("echo 'error: disk full' >&2; exit 1", {"status": "failed", "reason": "disk full"}),
        ("exit 3", {"status": "failed", "reason": "ended with exit code 3, saying nothing"}),
        (
            "echo '{\"status\": \"measured\"}' > $1; echo 'error: late' >&2; exit 1",
            {"status": "failed", "reason": "late"},
        ),
        ('echo \'{"status": "measured"}\' > $1', {"status": "measured"}),
    ],
    ids=[
        "killed",
        "a rank killed",
        "ran out",
        "refused",
        "failed",
        "silent",
        "failed after all",
        "measured",
    ],
)
def test_however_processes_end_there_is_a_row(script: str, row: dict[str, Any]) -> None:
    assert run_case(BenchCase(1, 1, "fp32"), shell(script)) == row


def test_a_bench_that_is_stopped_leaves_no_process(tmp_path: Path) -> None:
    class Stop(BaseException):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stop

    pid = tmp_path / "pid"
    # Not while it is being started: then it ends with us.
    script = f"echo $$ > {pid}.new; mv {pid}.new {pid}; sleep 1; kill -ALRM $PPID; exec sleep 60"
    before = signal.signal(signal.SIGALRM, stop)
    began = time.monotonic()
    try:
        with pytest.raises(Stop):
            run_case(BenchCase(1, 1, "fp32"), shell(script))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 50
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_the_report_has_every_row_the_best_and_how_to_run_like_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rows at once are the fastest; eight run out, so sixteen are not tried; three processes do
    not divide.
    """
    recipe = small_recipe(tmp_path, train__global_batch=16)
    rate = {1: 10, 2: 30, 4: 20}
    script = (
        "case $2 in "
        + " ".join(
            f"{size}) echo '{json.dumps({**ROW, 'tokens_per_s': rate[size]})}' > $1;;"
            for size in rate
        )
        + " 8) kill -KILL $$;; *) echo 'error: not to be tried' >&2; exit 1;; esac"
    )
    report = bench(
        recipe, cases_of(recipe, "1,3", "1,2,4,8,16", None), shell(script), steps=3, synthetic=True
    )
    statuses = [(row["devices"], row["micro_batch"], row["status"]) for row in report["rows"]]
    assert statuses[:5] == [
        (1, 1, "measured"),
        (1, 2, "measured"),
        (1, 4, "measured"),
        (1, 8, "out of memory"),
        (1, 16, "out of memory"),
    ]
    assert {status for _, _, status in statuses[5:]} == {"refused"}
    assert {row["precision"] for row in report["rows"]} == {
        "fp32"
    }  # the recipe's own is known by those that computed in it
    assert report["best"] == {
        "row": 1,
        "told": "1 process, micro-batch 2",
        "knobs": ["train.micro_batch=2", "launch.processes=1"],
        "tokens_per_s": 30,
    }
    assert json.loads((recipe.folder.reports / "bench.json").read_text()) == report
    assert "bench: 5 rows to measure, 2 + 3 steps each" in capsys.readouterr().err


def test_nothing_measured_has_no_best() -> None:
    assert best_of([BenchCase(1, 1, "fp32")], [{"status": "failed", "reason": ""}]) is None


def test_data_that_is_not_prepared_is_told_before_any_process_is_started(tmp_path: Path) -> None:
    def never(case: BenchCase, into: Path) -> Any:
        raise AssertionError

    with pytest.raises(
        WrongInput,
        match=(
            r"holds no prepared data; run `ingot prepare` with this recipe first; or measure on"
            r" made-up rows with --synthetic"
        ),
    ):
        bench(small_recipe(tmp_path), [BenchCase(1, 1, "fp32")], never, steps=1, synthetic=False)


def test_a_place_that_takes_no_report_is_told_before_any_process_is_started() -> None:
    def never(case: BenchCase, into: Path) -> Any:
        raise AssertionError(case)

    def measure() -> None:
        with pytest.raises(WrongInput, match=r"reports/bench\.json cannot be written"):
            bench(recipe, [BenchCase(1, 1, "fp32")], never, steps=1, synthetic=True)

    with open_folder() as folder:
        recipe = small_recipe(folder)
        recipe.folder.reports.mkdir(parents=True)
        recipe.folder.reports.chmod(0o555)
        as_nobody(measure)


def measured(recipe: Recipe, into: Path, *, synthetic: bool = False) -> dict[str, Any]:
    measure_row(recipe, 2, into, synthetic=synthetic)
    row: dict[str, Any] = json.loads(into.read_text()) if into.exists() else {}
    return row


def test_a_row_is_measured_on_the_recipes_own_data_and_nothing_is_kept(
    root: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(root)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    row = measured(recipe, tmp_path / "row.json")
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert [path.name for path in recipe.folder.root.iterdir()] == ["data"]
    assert row["status"] == "measured"
    assert row["tokens_per_step"] == 4 * 32
    assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["seconds_per_step"])
    assert row["examples_per_s"] == pytest.approx(4 / row["seconds_per_step"])
    cost = flops_per_token(_tiny_config(recipe), 32, None)
    assert row["flops_per_token"] == cost
    assert row["share_of_peak"] == pytest.approx(row["tokens_per_s"] * cost / row["peak_flops"])
    assert 0 < row["share_of_peak"] < 1
    assert 0 < row["host_memory"] < 1
    assert 0 < row["cpu"] <= 1.5
    assert row["process_memory_bytes"] > 50_000_000
    assert row["gpu"] is row["gpu_memory"] is None
    assert "large matrix products" in FORMULA


@pytest.mark.drawn("a bench at length")
def test_padding_is_no_token(tmp_path: Path) -> None:
    """One document a row: what is told a second is the text, and what was computed the rest too."""
    write_documents(tmp_path / "text")
    recipe = small_recipe(tmp_path, data__pack="none", data__seq_len=256, train__global_batch=64)
    ingest(recipe)
    prepare(recipe)
    row = measured(recipe, tmp_path / "row.json")
    prepared = prepared_for(recipe)
    text = 64 * prepared.total("train", "tokens") / prepared.total("train", "documents")
    assert row["tokens_per_step"] == pytest.approx(text, rel=0.1)
    assert row["tokens_per_step"] < row["positions_per_step"] / 2
    assert row["tokens_per_s"] == pytest.approx(row["tokens_per_step"] / row["seconds_per_step"])
    assert row["share_of_peak"] == pytest.approx(
        row["positions_per_step"]
        / row["seconds_per_step"]
        * row["flops_per_token"]
        / row["peak_flops"]
    )


def _tiny_config(recipe: Recipe) -> dict[str, Any]:
    with running_mesh(recipe.parallel) as mesh:
        return make_setup(recipe, mesh).model_spec.config.to_hf()


def test_two_ranks_make_one_row_of_both(root: Path, tmp_path: Path) -> None:
    """Peaks of 1 and 2 TFLOP/s are one of 3, memory is that of the rank that has more, and rows are
    dealt, not doubled.
    """
    row, _ = run_ranks(2, measured_with_known_peaks, small_recipe(root), tmp_path / "row.json")
    assert row["tokens_per_step"] == 4 * 32
    assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["seconds_per_step"])
    assert row["peak_flops"] == pytest.approx(3e12)
    assert row["share_of_peak"] == pytest.approx(
        row["tokens_per_s"] * row["flops_per_token"] / 3e12
    )
    assert row["process_memory_bytes"] == 2000


def measured_with_known_peaks(recipe: Recipe, into: Path) -> dict[str, Any]:
    bench_row.measured_peak = lambda device, compute: 1e12 * (ranks().rank + 1)
    bench_row.peak_memory_bytes = lambda device: 1000 * (ranks().rank + 1)
    return measured(recipe, into)


def test_models_without_a_formula_claim_no_share(tmp_path: Path) -> None:
    tiny = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    knobs = {
        "objective__kind": "classify",
        "objective__labels": "[bad, good]",
        "model__source": "preset:bert-mini",
        "model__config": tiny,
    }
    row = measured(small_recipe(tmp_path, **knobs), tmp_path / "row.json", synthetic=True)
    assert row["share_of_peak"] is row["flops_per_token"] is None
    assert row["tokens_per_s"] > 0
    assert row["parameters"] > 32 * 320


def test_memory_that_runs_out_is_a_row_whatever_of_it_lacks(tmp_path: Path) -> None:
    """An embedding of 2 TB is more than any machine that tests run on has free."""
    wide = {**TINY_MODEL, "hidden_size": 1 << 17}
    recipe = small_recipe(tmp_path, tokenizer__vocab_size=1 << 22, model__config=wide)
    with pytest.raises(Failed, match=r"out of memory: .*can't allocate memory"):
        measured(recipe, tmp_path / "row.json", synthetic=True)
    row = json.loads((tmp_path / "row.json").read_text())
    assert row["status"] == "out of memory"
    assert row["reason"].startswith("DefaultCPUAllocator: can't allocate memory")


def test_a_limit_on_memory_is_met_by_a_refusal_and_not_by_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a machine that has next to nothing free, an allocation that the system would grant is
    refused.
    """
    monkeypatch.setattr(bench_row, "host_memory", lambda: HostMemory(999_000_000, 1_000_000_000))
    recipe = small_recipe(tmp_path, tokenizer__vocab_size=2_000_000)  # 256 MB
    with pytest.raises(Failed, match="out of memory"):
        measured(recipe, tmp_path / "row.json", synthetic=True)
    monkeypatch.undo()
    assert (
        measured(small_recipe(tmp_path), tmp_path / "row.json", synthetic=True)["status"]
        == "measured"
    )


def test_another_error_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Any:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(bench_row, "_measure", fails)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        measured(small_recipe(tmp_path), tmp_path / "row.json", synthetic=True)
    assert not (tmp_path / "row.json").exists()
