"""The program for a GPU, without one: what it does with its minutes and its results. It runs whole in
test_gpu_whole.py.
"""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import attention, packages, results, runner, table, training
from benchmarks.gpu.record import Asked, Record
from benchmarks.gpu.results import Results
from benchmarks.gpu.rows import ROWS, Row, in_miniature
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.steps import flops_of
from ingot.base.environment import Ranks
from ingot.parallel.mesh import Mesh
from ingot.train.micro_batch.trial import made_up_setup

HERE = Asked(torch.device("cpu"), tiny=True, steps=2)
HEAD = {"device": "a GPU", "commit": "abc"}
SCRIPT = """
import json, pathlib, sys, time
given = json.loads(sys.stdin.readline())
row, into = given["row"], pathlib.Path(given["into"])
def say(**line):
    with into.open("a") as stream: stream.write(json.dumps(line) + "\\n")
say(check="first", holds=True, detail="")
if row == "1B full, 8 rows": say(status="out of memory", reason="none left")
elif row == "raises": sys.exit("no such kernel")
elif row == "hangs": time.sleep(60)
else:
    say(figures={"tokens_per_s": 1000.0, "step_s": 2.0, "allocated_bytes": 3e9, "flops_per_token": 5e9})
    say(status="measured", reason="")
"""


@pytest.fixture
def script(tmp_path: Path) -> Sequence[str]:
    (tmp_path / "row.py").write_text(SCRIPT)
    return sys.executable, "-SE", str(tmp_path / "row.py")


def rows(*names: str) -> list[Row]:
    return [one for one in ROWS if one.name in names]


def made(folder: Path, script: Sequence[str], minutes: float = 10.0, **head: str) -> Runner:
    known = Results(folder / "gpu.jsonl", {**HEAD, **head}, planned="h100")
    ends = time.monotonic() + 60 * minutes
    return Runner(known, "cuda", tiny=False, ends=ends, command=script)


def test_rows_are_told_apart_and_follow_what_they_hang_on() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    for row in ROWS:
        assert importlib.util.find_spec(f"benchmarks.gpu.{row.program}") is not None
        if row.unless_measured:
            assert names.index(row.unless_measured) < names.index(row.name)
    # A call lasts ten minutes, and the most valuable rows begin in it.
    assert all(row.estimate_s <= 180 for row in ROWS)
    checks = [row for row in ROWS if row.kind == "correct"]
    assert sum(row.estimate_s for row in checks[:4]) < 600


def test_a_smaller_row_follows_where_memory_ran_out_and_nothing_is_done_twice(
    tmp_path: Path, script: Sequence[str]
) -> None:
    ladder = rows("1B full, 8 rows", "1B full, 4 rows", "1B full, 2 rows")
    told = made(tmp_path, script).run(ladder)
    kept = {line["row"]: line["status"] for line in read(tmp_path)}
    assert kept == {"1B full, 8 rows": "out of memory", "1B full, 4 rows": "measured"}
    assert [line.partition(":")[0] for line in told] == ["1B full, 2 rows"]
    again = made(tmp_path, script)
    again.run(ladder)
    assert len(read(tmp_path)) == 2
    made(tmp_path, script, commit="another").run(ladder)
    assert len(read(tmp_path)) == 4
    made(tmp_path, script, device="another").run(ladder)
    assert len(read(tmp_path)) == 6


def test_a_failure_is_a_row_with_its_reason_and_what_it_had(
    tmp_path: Path, script: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RESERVE_S", 0.0)
    raises, hangs = (Row(name, "correct", "attention", 0.5) for name in ("raises", "hangs"))
    doing = made(tmp_path, script)
    doing.run([raises])
    doing.ends = time.monotonic() + 3
    doing.run([hangs])
    one, other = read(tmp_path)
    assert (one["status"], one["reason"]) == ("failed", "no such kernel")
    assert other["status"] == "cut off"
    assert [line["checks"][0]["holds"] for line in (one, other)] == [True, True]
    # What was cut off is tried again, given more time; what failed is not.
    assert doing.results.is_done(raises)
    assert not doing.results.is_done(hangs)
    assert doing.results.estimate_s(hangs) > hangs.estimate_s
    assert table.show(doing.results, Console(file=(tmp_path / "out").open("w"))) == 0, (
        "rows that the table does not know are not its own"
    )


def test_checks_share_the_device_and_speeds_have_it_alone(
    tmp_path: Path, script: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: dict[str, tuple[float, float]] = {}
    both = threading.Barrier(2, timeout=30)
    was = runner.RowProcess.do

    def slowly(self: Any, row: Row, timeout: float, cache: Path | None) -> int | None:
        began = time.monotonic()
        if row.name in ("attention", "families"):
            both.wait()
        code = was(self, row, timeout, cache)
        spans[row.name] = (began, time.monotonic())
        return code

    monkeypatch.setattr(runner.RowProcess, "do", slowly)
    monkeypatch.setattr(runner, "usable_cores", lambda: 16)
    made(tmp_path, script).run(
        rows("ceilings", "attention", "families", "memory", "1B kernels, 8 rows")
    )
    order = [spans["ceilings"], spans["attention"], spans["1B kernels, 8 rows"], spans["memory"]]
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(order))
    assert spans["ceilings"][1] <= spans["families"][0]
    assert spans["families"][1] <= spans["1B kernels, 8 rows"][0]


def test_no_row_begins_that_would_not_end(tmp_path: Path, script: Sequence[str]) -> None:
    told = made(tmp_path, script, minutes=1.0).run(rows("attention", "ceilings"))
    assert [line["row"] for line in read(tmp_path)] == ["ceilings"]
    assert told[0].startswith("attention: takes about")


def test_plans_of_another_machine_stand_beside_what_came(
    tmp_path: Path, script: Sequence[str]
) -> None:
    plan = rows("plan: 1B full, 4 rows")[0]
    here = Results(tmp_path / "gpu.jsonl", {**HEAD, "device": "CPU"}, planned="h100")
    planned = {"allocated_bytes": 3.3e9, "step_s": {"likely": 1.5}}
    done = {"seconds": 9.0, "status": "measured", "reason": "", "checks": []}
    here.add(plan, {**done, "figures": planned})
    doing = made(tmp_path, script)
    doing.run([*rows("1B full, 8 rows", "1B full, 4 rows"), plan])
    assert len(read(tmp_path)) == 3
    with (tmp_path / "shown").open("w") as stream:
        table.show(doing.results, Console(file=stream, width=150))
    shown = (tmp_path / "shown").read_text()
    assert "+10%" in shown
    assert "-25%" in shown
    assert "out of memory: none left" in shown


def test_what_another_machine_measured_is_shown(
    tmp_path: Path,
    script: Sequence[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made(tmp_path, script, device="NVIDIA H200", commit="one").run(rows("1B serving"))
    made(tmp_path, script, device="NVIDIA H200", commit="two").run(rows("ceilings"))
    file = tmp_path / "gpu.jsonl"
    before = file.read_bytes()
    monkeypatch.setattr(sys, "argv", ["gpu", "--show", "--results", str(file)])
    program.main()
    shown = capsys.readouterr().out
    assert "NVIDIA H200" in shown
    assert "1B serving" in shown
    assert "ceilings" in shown
    assert file.read_bytes() == before, "showing adds nothing"
    with pytest.raises(SystemExit, match="holds no results"):
        results.kept(tmp_path / "none.jsonl")


def test_what_failed_in_another_commit_is_done_again(tmp_path: Path) -> None:
    """And is shown all the same."""
    (row,), file = rows("1B serving"), tmp_path / "gpu.jsonl"
    checks = [{"check": "steps are recorded", "holds": False, "detail": "no kernel"}]
    before = Results(file, {**HEAD, "commit": "old"})
    before.add(row, {"status": "measured", "reason": "", "figures": {}, "checks": checks})
    assert before.is_done(row)
    after = Results(file, HEAD, also=["old"])
    assert not after.is_done(row)
    assert results.kept(file).of(row) is not None
    after.add(row, {"status": "measured", "reason": "", "figures": {}, "checks": checks})
    assert after.is_done(row)


def test_a_fault_is_a_check_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    was = attention.make_attn_fns

    def one_key_more(positions: Any, segments: Any, windows: Sequence[int | None]) -> Any:
        wide = was(positions, segments, [window and window + 1 for window in windows])
        return dict(zip(windows, wide.values(), strict=True))

    monkeypatch.setattr(attention, "make_attn_fns", one_key_more)
    record = Record()
    attention.run(HERE, record)
    failed = {line["check"].partition(",")[0] for line in record.lines if not line["holds"]}
    windowed = [name for name, case in attention.CASES.items() if case.window]
    assert failed == {name.partition(",")[0] for name in windowed}


def test_a_part_that_raises_is_a_fault_and_the_rest_is_done() -> None:
    record = Record()
    with record.trying("part"):
        raise ValueError("of no kind\nthat is known")
    record.within("difference", float("nan"), 1.0)
    assert [line["holds"] for line in record.lines] == [False, False]
    assert record.lines[0]["detail"].startswith("ValueError: of no kind (test_gpu.py:")
    with pytest.raises(torch.OutOfMemoryError), record.trying("memory"):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("what", training.BESIDE_CPU)
def test_no_dropout_where_devices_are_compared(what: str, tmp_path: Path) -> None:
    """What a GPU draws is not what a CPU draws."""
    asked = Asked(torch.device("cpu"), tiny=False)
    recipe = training.recipe_of(tmp_path, training.sized(training.BESIDE_CPU[what], asked))
    setup = made_up_setup(recipe, Mesh(Ranks(), asked.device))
    assert recipe.model.lora is None or recipe.model.lora.dropout == 0
    config = setup.model_spec.config.to_hf()
    rates = {name: rate for name, rate in config.items() if "drop" in name}
    assert bool(rates) == (what in ("T5", "BERT"))
    assert not any(rates.values())


def test_a_device_that_plans_do_not_know_has_no_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.planned_device("NVIDIA H100 80GB HBM3") == "h100"
    monkeypatch.setattr(program, "nvidia", lambda: {"device": "NVIDIA GB10"})
    monkeypatch.setattr("sys.argv", ["gpu", "--only", "plan:", "--results", str(tmp_path / "a")])
    program.main()
    assert "no plans: `ingot plan` does not know NVIDIA GB10" in capsys.readouterr().out


def test_gradients_of_kept_weights_are_not_counted() -> None:
    full, adapted = (flops_of(tiny=False, preset="llama-8b", lora=lora) for lora in (False, True))
    # 2 of 6 operations a weight; those of attention remain.
    assert adapted == pytest.approx(full * 2 / 3, rel=0.05)
    assert adapted > full * 2 / 3


def test_it_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packages.missing() == []
    assert set(packages.WHEELS) > {"pydantic", "pydantic-core", "torchao"}
    assert all("==" in one for one in packages.versions())
    was, brought = packages.is_there, {*packages.WHEELS, *packages.dependencies()}
    needed = [(name, wheel) for name, wheel in packages.needed_by_wheels() if name not in brought]
    lacking = needed[0][0]
    with monkeypatch.context() as without:
        without.setattr(packages, "is_there", lambda name: name != lacking and was(name))
        assert packages.missing() == [
            f"{name} for {wheel}" for name, wheel in needed if name == lacking
        ]
    monkeypatch.setattr("sys.argv", ["gpu"])
    monkeypatch.setattr(program, "nvidia", dict)
    with pytest.raises(SystemExit, match="names none here"):
        program.main()
    monkeypatch.setattr(program, "missing", lambda: ["orjson"])
    with pytest.raises(SystemExit, match="lacks orjson"):
        program.main()


def test_the_wheels_and_what_is_there_are_all_that_is_needed() -> None:
    there = {*packages.WHEELS, *packages.THERE}
    needed = dict.fromkeys(packages.dependencies(), "ingot") | dict(packages.needed_by_wheels())
    assert all(map(packages.is_there, packages.WHEELS))
    lacking = {
        f"{name} for {wheel}"
        for name, wheel in needed.items()
        if name.lower().replace("_", "-") not in there
    }
    assert lacking == set()


def test_files_without_a_commit_have_a_hash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "ingot").mkdir()
    (tmp_path / "ingot" / "a.py").write_text("1")
    one = results.source_id()
    (tmp_path / "ingot" / "a.py").write_text("2")
    assert one.startswith("files-")
    assert one != results.source_id()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_rows_in_miniature(tmp_path: Path) -> None:
    """Each by an interpreter of its own, as on a GPU."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny"]
    options = ["--minutes", "58", "--results", str(tmp_path / "gpu.jsonl")]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:]
    assert {line["row"] for line in read(tmp_path)} == {row.name for row in in_miniature()}
    assert {line["status"] for line in read(tmp_path)} == {"measured"}, ended.stdout[-6000:]


def read(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "gpu.jsonl").read_text().splitlines()]
    return [line for line in lines if "row" in line]
