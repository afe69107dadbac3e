"""`ingot train` as a whole: it learns, resumes bit for bit, stops on signals, refuses what changed,
and writes what it promises.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingot.base.environment import processor_name
from ingot.base.errors import WrongInput
from ingot.base.runlog import read_lines
from ingot.checkpoints.store import committed, newest_valid
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.data.batches.rows import open_rows
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.report.headline import trained_tokens
from ingot.report.run_view import read_run
from ingot.train import step as step_module
from ingot.train.earlier import set_aside
from ingot.train.trainer import train
from tests import forks
from tests.patience import PATIENCE_S
from tests.ranks import run_ranks
from tests.small import small_recipe, write_documents

CLOCKS = {
    "t_wall",
    "train/tokens_per_s",
    "train/tokens_per_step",
    "train/examples_per_s",
    "train/mfu",
    "validation/seconds",
    "memory/rank0_gb",
    "memory/rank1_gb",
}


def metrics(recipe: Recipe) -> list[dict[str, Any]]:
    """What was logged, without clocks and memory."""
    return [
        {key: value for key, value in line.items() if key not in CLOCKS}
        for line in read_lines(recipe.folder.metrics)
    ]


def last_state(recipe: Recipe) -> dict[str, bytes]:
    """Every byte of the newest checkpoint's files."""
    found = newest_valid(recipe.folder.checkpoints)
    assert found is not None
    return {
        entry["path"]: (found.folder / entry["path"]).read_bytes()
        for entry in found.commit["files"]
        if entry["path"] != ".metadata"
    }


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(recipe.folder.model / "model.safetensors")


def losses(recipe: Recipe) -> list[float]:
    return [line["train/loss"] for line in metrics(recipe) if "train/loss" in line]


def test_it_learns_and_writes_what_it_promises(root: Path) -> None:
    recipe = small_recipe(
        root, train__steps=30, train__evaluate_every=10, checkpoint__every=12, checkpoint__keep=2
    )
    outcome = train(recipe)
    assert losses(recipe)[-1] < losses(recipe)[0] - 1
    assert "30 steps" in outcome.result
    assert [found.step for found in committed(recipe.folder.checkpoints)] == [30, 24]
    lines = metrics(recipe)
    assert [line["step"] for line in lines if "validation/loss" in line] == [10, 20, 30]
    assert {"train/loss", "train/lr", "train/grad_norm", "train/skipped_steps"} <= lines[0].keys()
    assert {"train/tokens_per_s", "train/examples_per_s", "train/mfu", "memory/rank0_gb"} <= next(
        read_lines(recipe.folder.metrics)
    ).keys()
    events = list(read_lines(recipe.folder.events))
    assert [event["kind"] for event in events] == ["start", "save", "save", "save", "finish"]
    threads = torch.get_num_threads()
    own = {"type": "cpu", "name": processor_name(), "threads": threads, "world": 1, "per_node": 1}
    assert events[0]["devices"] == own, "so that its plan is held against the same devices"
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "ingot.json",
    } <= {p.name for p in recipe.folder.model.iterdir()}
    sizes = {Path(path).name: size for path, size in outcome.files.items()}
    assert sizes.keys() == {p.name for p in recipe.folder.model.iterdir()}
    kept = ["ingot.json", "model.safetensors"]
    assert [name for name, size in sizes.items() if size is not None] == kept, "others are edited"
    assert all((recipe.folder.model / name).stat().st_size == sizes[name] for name in kept)


def test_the_exported_model_opens_in_transformers_with_the_trained_logits(root: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ingot.models.hf.folder import load_model
    from tests import tolerances

    recipe = small_recipe(root, precision__export="fp32")
    train(recipe)
    reference = AutoModelForCausalLM.from_pretrained(recipe.folder.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(recipe.folder.model)
    tokens = torch.tensor([tokenizer("the bright ingot rings true")["input_ids"]])
    assert tokens[0, 0] == tokenizer.bos_token_id
    assert (tokens[0] == tokenizer.bos_token_id).sum() == 1
    ours = load_model(recipe.folder.model, device=torch.device("cpu"))
    with torch.no_grad():
        mine = ours.logits(ours.hidden(tokens, torch.arange(tokens.shape[1])[None]))
        torch.testing.assert_close(
            mine, reference(tokens).logits, atol=tolerances.LOGITS_FP32, rtol=0
        )


def stop_after(recipe: Recipe, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die without any farewell when `steps` steps are done and logged, as by kill -9."""
    original = step_module.accumulate_gradients

    class Killed(BaseException):
        pass

    def step_or_die(context: Any, number: int, batches: Any) -> Any:
        if number >= steps:
            raise Killed
        return original(context, number, batches)

    with monkeypatch.context() as patch:
        patch.setattr(step_module, "accumulate_gradients", step_or_die)
        with pytest.raises(Killed):
            train(recipe)


@pytest.mark.drawn("a training of two ranks, killed")
@pytest.mark.parametrize("kills", [[5], [3, 8], [7, 7]])
def test_resumed_equals_undisturbed_bit_for_bit(
    kills: list[int], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across an epoch's border too: the rows are fewer than the samples of ten steps."""
    knobs = {
        "train__steps": 10,
        "train__global_batch": 64,
        "train__micro_batch": 24,
        "checkpoint__every": 2,
        "train__evaluate_every": 4,
    }
    straight = small_recipe(root, **knobs)
    train(straight)
    expected = metrics(straight), last_state(straight), weights(straight)
    for path in ("metrics.jsonl", "checkpoints", "model"):
        (root / "runs/small" / path).rename(root / f"straight-{path}")
    broken = small_recipe(root, **knobs)
    for step in kills:
        stop_after(broken, step, monkeypatch)
    train(broken)
    assert metrics(broken) == expected[0]
    assert last_state(broken) == expected[1]
    for name, tensor in weights(broken).items():
        assert torch.equal(tensor, expected[2][name]), name


def test_training_twice_does_nothing_the_second_time(root: Path) -> None:
    recipe = small_recipe(root)
    first = train(recipe)
    logged = metrics(recipe)
    second = train(recipe)
    assert second.outputs == first.outputs
    assert metrics(recipe) == logged


def test_another_split_of_the_batch_resumes_and_gives_the_same_losses(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import tolerances

    straight = small_recipe(root, checkpoint__every=2)
    stop_after(straight, 4, monkeypatch)
    resumed = small_recipe(root, checkpoint__every=3, train__micro_batch=4, track__every=2)
    train(resumed)
    assert len(losses(resumed)) >= 5
    reference = small_recipe(root, name="reference")
    (root / "runs/reference").mkdir()
    (root / "runs/small/data").rename(root / "runs/reference/data")
    train(reference)
    by_step = {line["step"]: line["train/loss"] for line in metrics(reference)}
    for line in metrics(resumed):
        assert line["train/loss"] == pytest.approx(by_step[line["step"]], abs=tolerances.SPLIT_LOSS)


def killed_on_ranks(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(small_recipe(root, train__micro_batch=1, checkpoint__every=2), 5, patch)


@pytest.mark.drawn("a training of two ranks, killed")
def test_one_process_goes_on_where_two_were_killed_and_the_other_way_round(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import tolerances
    from tests.small import copy_of

    straight, fewer, more = (
        root,
        copy_of(root, tmp_path / "fewer"),
        copy_of(root, tmp_path / "more"),
    )
    train(small_recipe(straight))
    run_ranks(2, killed_on_ranks, fewer)
    train(small_recipe(fewer))
    stop_after(small_recipe(more, checkpoint__every=2), 5, monkeypatch)
    run_ranks(2, train_on_ranks, more)
    for place in (fewer, more):
        assert losses(small_recipe(place)) == pytest.approx(
            losses(small_recipe(straight)), abs=tolerances.SPLIT_LOSS
        )
        assert [line["step"] for line in metrics(small_recipe(place))] == list(range(1, 7))


def train_on_ranks(root: Path) -> list[float]:
    recipe = small_recipe(root, train__micro_batch=1)
    train(recipe)
    return losses(recipe)


@pytest.mark.drawn("a training of two ranks, killed")
def test_two_ranks_train_as_one(root: Path, tmp_path: Path) -> None:
    from tests import tolerances
    from tests.small import copy_of

    other = copy_of(root, tmp_path / "two")
    run_ranks(2, train_on_ranks, other)
    one, two = small_recipe(root), small_recipe(other)
    train(one)
    assert losses(two) == pytest.approx(losses(one), abs=tolerances.SPLIT_LOSS)
    assert [event["kind"] for event in read_lines(two.folder.events)].count("start") == 1


def test_early_stopping_stops_and_a_resumed_run_stops_at_the_same_step(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = {
        "train__steps": 60,
        "train__evaluate_every": 2,
        "train__early_stop": "{patience: 2, min_delta: 0.5}",
        "checkpoint__every": 3,
    }
    recipe = small_recipe(root, **knobs)
    train(recipe)
    stopped = metrics(recipe)[-1]["step"]
    assert 4 < stopped < 60
    found = newest_valid(recipe.folder.checkpoints)
    assert found is not None
    assert found.step == stopped
    assert found.commit["finished"]
    logged = metrics(recipe)
    train(recipe)
    assert metrics(recipe) == logged
    (root / "runs/small/checkpoints").rename(root / "old")
    stop_after(recipe, stopped - 1, monkeypatch)
    train(recipe)
    assert metrics(recipe) == logged


def test_the_steps_before_an_early_end_are_logged(root: Path) -> None:
    """Tokens and the loss that are told of a training come from what is logged."""
    recipe = small_recipe(
        root,
        train__steps=60,
        train__evaluate_every=2,
        train__early_stop="{patience: 1, min_delta: 1e9}",
        track__every=100,
    )
    outcome = train(recipe)
    lines = [line for line in read_lines(recipe.folder.metrics) if "train/loss" in line]
    assert [line["step"] for line in lines] == [1, 4], "the last one once"
    assert outcome.result.startswith("4 steps")
    assert f"loss {lines[-1]['train/loss']:.3f}" in outcome.result
    assert trained_tokens(read_run(recipe.folder)) == 4 * 4 * 32


def test_an_unfinished_training_of_another_recipe_is_refused_by_name(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(root, checkpoint__every=2)
    stop_after(recipe, 3, monkeypatch)
    changed = small_recipe(root, train__optimizer__lr=0.02)
    with pytest.raises(WrongInput, match=r"train\.optimizer\.lr 0\.01 -> 0\.02.*--fresh"):
        train(changed)
    train(changed, fresh=True)
    assert metrics(changed)[0]["step"] == 1
    assert list((root / "runs/small/earlier").glob("*/checkpoints/step-00000002/COMMIT.json"))


def test_a_finished_training_is_set_aside_and_brought_back(root: Path) -> None:
    recipe = small_recipe(root)
    train(recipe)
    first = weights(recipe), metrics(recipe)
    other = small_recipe(root, seed=5)
    train(other)
    assert any(not torch.equal(weights(other)[name], first[0][name]) for name in first[0])
    starts = [event["kind"] for event in read_lines(recipe.folder.events)].count("save")
    train(recipe)
    assert [event["kind"] for event in read_lines(recipe.folder.events)].count("save") == starts, (
        "nothing was trained again"
    )
    assert metrics(recipe) == first[1]
    assert all(torch.equal(weights(recipe)[name], first[0][name]) for name in first[0])


def test_logs_of_a_training_without_a_checkpoint_are_in_nobodys_way(root: Path) -> None:
    """Set aside by --fresh, whose training died early; the same recipe brings it back."""
    recipe = small_recipe(root)
    train(recipe)
    first = metrics(recipe)
    run = recipe.folder
    found = newest_valid(run.checkpoints)
    assert found is not None
    set_aside(run, found.commit["identity"])
    run.metrics.write_text('{"step": 1}\n')
    (run.root / "tensorboard").mkdir()
    (run.root / "tensorboard" / "of the one that died").touch()
    train(recipe)
    assert metrics(recipe) == first
    assert not (run.root / "tensorboard" / "of the one that died").exists()
    assert list((run.root / "earlier").glob("*/tensorboard/of the one that died"))


def start_training(recipe: Recipe, root: Path) -> forks.Process:
    file = root / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    return forks.start(
        ("train", str(file)),
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_step(recipe: Recipe, step: int, process: forks.Process) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not any(line["step"] >= step for line in read_lines(recipe.folder.metrics)):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_commits_a_checkpoint_and_the_same_command_goes_on(
    signum: signal.Signals, root: Path
) -> None:
    recipe = small_recipe(root, train__steps=100_000, checkpoint__every=50_000)
    process = start_training(recipe, root)
    wait_for_step(recipe, 3, process)
    process.send_signal(signum)
    _, messages = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, messages
    assert "goes on from there" in messages
    assert "Traceback" not in messages
    found = newest_valid(recipe.folder.checkpoints)
    assert found is not None
    assert found.step >= 3
    assert not found.commit["finished"]
    assert metrics(recipe)[-1]["step"] == found.step
    process = start_training(recipe, root)
    wait_for_step(recipe, found.step + 1, process)
    process.kill()
    assert (
        process.communicate(timeout=PATIENCE_S)[1].count(f"going on after step {found.step:,}") == 1
    )


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"data__seq_len": 2048}, "data.seq_len 2048 exceeds the model's 1024 positions"),
        (
            {"model__config": "{vocab_size: 300}"},
            "the tokenizer has 320 ids, the model preset:llama-3m only 300",
        ),
        ({"model__config": "{hiden_size: 3}"}, "the nearest names there are hidden_size, "),
        ({"model__source": "preset:lama-3m"}, "did you mean preset:llama-3m"),
        ({"model__source": "nowhere"}, "neither a folder nor preset"),
        ({"model__init": "weights"}, "is a preset and has none"),
        (
            {"train__global_batch": 512},
            "training rows of data.seq_len=32, less than train.global_batch=512",
        ),
        ({"parallel__replicate": 2}, "parallel.replicate 2 needs 2 processes, 1 is running"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_trained(
    overrides: dict[str, Any], named: str, root: Path
) -> None:
    recipe = small_recipe(root, **overrides)
    with pytest.raises(WrongInput) as error:
        train(recipe)
    assert named in str(error.value)
    assert not recipe.folder.checkpoints.exists()


def test_a_batch_that_does_not_divide_is_refused_with_the_numbers(root: Path) -> None:
    from ingot.config.shape import batch_plan

    with pytest.raises(
        WrongInput, match=r"global_batch 4 does not divide over 3 processes; 2 would fit"
    ):
        batch_plan(small_recipe(root).train, small_recipe(root).parallel, 3)


def test_a_failing_sink_warns_once_and_training_goes_on(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipe(root, track__tensorboard=True)
    recipe.folder.tensorboard.write_text("a file where a folder should be")
    train(recipe)
    assert capsys.readouterr().err.count("TensorBoard failed") == 1
    assert len(losses(recipe)) == 6


@pytest.mark.drawn("wandb itself")
def test_wandb_and_tensorboard_see_the_same_numbers(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    recipe = small_recipe(root, track__tensorboard=True, track__wandb="{project: test}")
    train(recipe)
    accumulator = EventAccumulator(str(recipe.folder.tensorboard))
    accumulator.Reload()
    assert [item.value for item in accumulator.Scalars("train/loss")] == pytest.approx(
        losses(recipe), rel=1e-6
    )
    assert list((recipe.folder.root / "wandb").glob("offline-run-*/*.wandb"))


def test_lineage_names_where_the_model_came_from(root: Path) -> None:
    recipe = small_recipe(root)
    train(recipe)
    lineage = json.loads((recipe.folder.model / "ingot.json").read_text())
    assert lineage["run"] == "small"
    assert lineage["step"] == 6
    assert lineage["base"] is None
    assert lineage["export_type"] == "bf16"


def test_how_often_each_weighted_source_is_seen_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in (("few", 20), ("many", 60)):
        write_documents(tmp_path / name, count)
    sources = [{"source": str(tmp_path / name)} for name in ("few", "many")]
    weighted = [{**sources[0], "weight": 3}, sources[1]]
    told = []
    for mixture in (sources, weighted):
        recipe = small_recipe(tmp_path, data__train=mixture, train__steps=50)
        ingest(recipe)
        prepare(recipe)
        stop_after(recipe, 0, monkeypatch)
        told.append(capsys.readouterr().err)
    few, many = re.findall(r"(\S+) (\d+\.\d)% \(([\d.]+) passes\)", told[1])
    assert few[:2] == (str(tmp_path / "few"), "75.0")
    assert many[:2] == (str(tmp_path / "many"), "25.0")
    rows = open_rows(recipe.folder.columns, "train", 32, pad_last=False).sizes
    for (_, share, passes), size in zip((few, many), rows, strict=True):
        assert abs(float(passes) * size - 200 * float(share) / 100) < 8, "samples of the source"
    assert "by weight" not in told[0]
