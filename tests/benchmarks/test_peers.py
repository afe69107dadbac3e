"""The comparison with other trainers: all get the same rows in the same order, and take turns;
those that differ end the program.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import environments, peers
from benchmarks.contenders.profiled import least
from benchmarks.contenders.turnstile import Turnstile
from benchmarks.peer_cases import CASES, QUICK, Contender, Sizes
from benchmarks.peer_tasks import task_of
from benchmarks.peers import Played
from ingot.config.load import load_recipe
from ingot.config.shape import BatchPlan
from ingot.data.batches.loader import Loader
from ingot.data.batches.order import SampleOrder
from ingot.data.batches.rows import open_rows

TINY = Sizes("llama-3m", 32, 2, 400, 0.2)


def test_all_get_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    task = task_of(tmp_path, CASES["pretrain"], TINY, steps=2, rounds=1)
    recipe = load_recipe((), task["knobs"], environ={}, dotenv=None)
    rows = open_rows(recipe.folder.columns, "train", 32, pad_last=False)
    loader = Loader(rows, SampleOrder(rows.sizes, recipe.seed, rows.weights), peers_plan(task), 0)
    ours = np.concatenate(
        [batch.tokens.numpy() for step in range(4) for batch in loader.step(step)]
    )
    loader.close()
    assert (np.load(task["rows"]) == ours).all()
    assert task["betas"] == recipe.train.optimizer.model_dump()["betas"]


def peers_plan(task: dict[str, int]) -> BatchPlan:
    return BatchPlan(task["batch"], task["batch"], 1)


@pytest.mark.slow
def test_turns_over_pipes(tmp_path: Path) -> None:
    task = {"steps": 1, "compute": "fp32"}
    player = peers.Player(
        Contender("peak", "peak", None), sys.executable, task, tmp_path / "one", threads=1
    )
    try:
        answers = [player.turn() for _ in range(2)]
    finally:
        player.close()
    for answer in answers:
        assert answer["flops"] > 1e8
        assert answer["seconds"] > 0.5
        assert answer["memory_bytes"] > 50e6


def test_who_ends_early_ends_the_program(tmp_path: Path) -> None:
    player = peers.Player(
        Contender("gone", "no_such_program", None), sys.executable, {}, tmp_path / "one", threads=1
    )
    with pytest.raises(SystemExit, match=r"gone ended without an answer:\n.*no_such_program"):
        player.turn()
    player.close()


def test_a_turn_is_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    turnstile, answers = Turnstile.__new__(Turnstile), io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO("go\ngo\ngo\n"))
    turnstile._steps, turnstile._done, turnstile._losses, turnstile._answers = 2, 0, [], answers
    turnstile.wait()
    for loss in (4.0, 3.0, 2.0, 1.0):
        turnstile.step(loss)
    assert [json.loads(line)["losses"] for line in answers.getvalue().splitlines()] == [
        [4.0, 3.0],
        [2.0, 1.0],
    ]


def test_other_losses_end_the_program() -> None:
    one, same, other = (
        Played(name, {}, losses=losses)
        for name, losses in (("one", [9.0] * 4), ("same", [9.1] * 4), ("other", [9.3] * 4))
    )
    peers.check_losses([one, same])
    with pytest.raises(SystemExit, match=r"one 9\.0000, other 9\.3000"):
        peers.check_losses([one, other])


def test_the_table_says_what_the_formula_says() -> None:
    one, other = (
        Played(name, {"torch": "2"}, [seconds] * 3, [4.0] * 3, [9.0], int(2e9))
        for name, seconds in (("one", 2.0), ("other", 4.0))
    )
    task = {"steps": 2, "tokens_per_step": 4096, "flops_per_token": 1e8}
    rows = peers.show([one, other], 1e12, task, Console(file=io.StringIO()))
    assert [row["tokens_per_s"] for row in rows] == [4096, 2048]
    assert [row["share_of_peak"] for row in rows] == [pytest.approx(0.4096), pytest.approx(0.2048)]
    assert [row["first_over_this"][0] for row in rows] == [1.0, 2.0]
    assert rows[0]["cpu_seconds_per_step"] == 2.0


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        environments.venv, "create", lambda folder, **more: pytest.fail("made again")
    )
    (tmp_path / "litgpt").mkdir()
    (tmp_path / "litgpt" / environments.MARKER).write_text(
        json.dumps([environments.TORCH, *environments.PEERS["litgpt"]])
    )
    assert environments.make_environment(tmp_path, "litgpt").is_relative_to(tmp_path / "litgpt")


def test_a_profile_takes_the_least_of_each_call_and_names_what_is_no_product() -> None:
    steps = [
        {("head", "mm"): [4.0, 3.0], ("other", "copy_"): [1.0], ("other", "add"): [0.5, 0.5]},
        {("head", "mm"): [3.0, 5.0], ("other", "copy_"): [2.0], ("other", "add"): [0.25]},
    ]
    found = least(steps)
    assert found == [
        ("head", "mm", 6.0, 2),
        ("other", "copy_", 1.0, 1),
        ("other", "add", 0.25, 1),
    ]
    said = io.StringIO()
    peers.show_profile("one", found, Console(file=said, width=150))
    assert "7.25 s a step, 82.8% of it matrix products" in said.getvalue()


@pytest.mark.drawn("peers")
@pytest.mark.parametrize("name", list(CASES))
def test_ours_and_the_peer_do_the_same_work(name: str, tmp_path: Path) -> None:
    """In one environment here; the program makes others, from the package index."""
    if name in ("lora", "sft", "dpo"):
        pytest.importorskip("trl" if name != "lora" else "peft", reason="needs the dev extra")
    contenders = [one for one in CASES[name].contenders if not one.compiled]
    assert len(contenders) == 2
    task = task_of(tmp_path, CASES[name], QUICK, steps=2, rounds=1)
    played, peak = peers.compare(contenders, [sys.executable] * 2, task, tmp_path, 1, 1)
    assert [len(one.losses) for one in played] == [4, 4]
    assert peak > 1e8
    peers.check_losses(played)
