"""Training on rewards beside TRL's GRPOTrainer: the recipe `grpo_digits` (which of two digits is
the larger), from the same initial weights, with as many prompts and answers a step, the same
optimizer, loss and learning rate. What is told is the mean reward by step and by second.

`python -m benchmarks.grpo [--steps 160] [--threads 1] [--keep FOLDER] [--set KNOB=VALUE,...]`. One
after the other, each in a process of its own; each draws its own answers, so compare curves, not
steps. With `--set` ingot is beside itself with other knobs, once for each `--set`, such as
`objective.staleness=4,objective.old_logprobs=recomputed`. Needs `ingot[dev]` for TRL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ingot.base.runlog import read_lines
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.config.sections.grpo import GRPOSettings
from ingot.config.sections.training import AdamW
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.data.sources import local_files
from ingot.train.trainer import train

RECIPE = Path(__file__).parents[1] / "recipes" / "grpo_digits.yaml"
CONTENDERS = ("ingot", "trl")
SHOWN = 20
"""Steps between two lines of the table; a figure is the mean over as many steps before it."""


def recipe_of(folder: Path, *more: str, source: Path | None = None) -> Recipe:
    """The shipped recipe without what is measured beside training; `source`: a model to begin
    with.
    """
    values = yaml.safe_load(RECIPE.read_text())
    if source is not None:
        values |= {"model": {"source": str(source)}, "tokenizer": {"source": str(source)}}
    file = folder / f"{'shipped' if source is None else 'begun'}.yaml"
    file.write_text(yaml.safe_dump(values))
    given = [
        f"output={folder / 'runs'}",
        "data.validation.fraction=0",
        "train.evaluate_every=null",
        "train.evaluate_tasks=[]",
        "precision.export=fp32",
        "track.every=1",
        "track.tensorboard=false",
    ]
    return load_recipe([file], [*given, *more])


def make_initial(folder: Path) -> Path:
    """Random weights with their tokenizer as a Hugging Face folder: a training of one step that
    moves nothing.
    """
    recipe = recipe_of(folder, "name=initial", "train.steps=1", "train.optimizer.lr=1.0e-30")
    for step in (ingest, prepare, train):
        step(recipe)
    return recipe.folder.model


def run_ingot(folder: Path, initial: Path, steps: int, *knobs: str) -> list[dict[str, float]]:
    name = "-".join(["grpo", *(one.split("=")[-1] for one in knobs)])
    recipe = recipe_of(folder, f"train.steps={steps}", f"name={name}", *knobs, source=initial)
    ingest(recipe)
    prepare(recipe)
    train(recipe)
    return [
        {"step": line["step"], "reward": line["reward/mean"], "at": line["t_wall"]}
        for line in read_lines(recipe.folder.metrics)
        if "reward/mean" in line
    ]


def run_trl(folder: Path, initial: Path, steps: int) -> list[dict[str, float]]:
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    recipe = recipe_of(folder)
    objective, knobs = recipe.objective, recipe.train
    assert isinstance(objective, GRPOSettings)
    assert isinstance(knobs.optimizer, AdamW)
    lines = (Path(local_files.__file__).with_name("digits.jsonl")).read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    rows = [{"prompt": chat[:-1], "reference": chat[-1]["content"]} for chat in chats]
    found: list[dict[str, float]] = []

    def exact(completions: Any, reference: Sequence[str], **more: Any) -> list[float]:
        answers = [one[0]["content"].strip() for one in completions]
        return [float(one == other) for one, other in zip(answers, reference, strict=True)]

    class Noted(TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, float], **more: Any
        ) -> None:
            if "reward" in logs:
                line = {"step": state.global_step, "reward": logs["reward"], "at": time.time()}
                found.append(line)

    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=knobs.global_batch,
        max_steps=steps,
        num_generations=objective.group,
        max_completion_length=objective.max_answer_tokens,
        temperature=objective.temperature,
        beta=objective.kl,
        epsilon=objective.clip,
        loss_type="dr_grpo",  # the sum over tokens, divided by a constant
        scale_rewards="none",
        learning_rate=knobs.optimizer.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        adam_beta1=knobs.optimizer.betas[0],
        adam_beta2=knobs.optimizer.betas[1],
        adam_epsilon=knobs.optimizer.eps,
        weight_decay=knobs.optimizer.weight_decay,
        max_grad_norm=knobs.clip_norm or 0.0,
        seed=recipe.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(initial, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(initial),
        reward_funcs=exact,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[Noted()],
    ).train()
    return found


def contend(name: str, folder: Path, initial: Path, steps: int, threads: int) -> dict[str, Any]:
    """One contender in a process of its own: its rewards, and CPU seconds, start-up included."""
    command = [sys.executable, "-m", "benchmarks.grpo", f"--steps={steps}", f"--run={name}"]
    before = os.times()
    subprocess.run(
        [*command, f"--keep={folder}", f"--initial={initial}"],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    after = os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])
    return {"cpu_s": cpu, "steps": json.loads((folder / f"{name}.json").read_text())}


def table(found: dict[str, dict[str, Any]], steps: int) -> str:
    """Rewards by step, with the seconds since the end of each contender's first step."""
    shown = ["+".join(part.split("=")[-1] for part in name.split(",")) for name in found]
    lines = ["step   " + "".join(f"{name + ' reward':>16}{'s':>8}" for name in shown)]
    for last in [1, *range(SHOWN, steps + 1, SHOWN)]:
        cells = []
        for one in found.values():
            some = [line for line in one["steps"] if max(0, last - SHOWN) < line["step"] <= last]
            mean = sum(line["reward"] for line in some) / len(some)
            cells.append(f"{mean:16.3f}{some[-1]['at'] - one['steps'][0]['at']:8.1f}")
        lines.append(f"{last:<7}" + "".join(cells))
    lines.append("CPU s  " + "".join(f"{one['cpu_s']:16.1f}{'':8}" for one in found.values()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grpo", description=__doc__)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder to keep everything in")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", metavar="KNOB=VALUE,...")
    parser.add_argument("--initial", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        given = asked.keep, asked.initial, asked.steps
        rewards = (
            run_trl(*given)
            if asked.run == "trl"
            else run_ingot(*given, *filter(None, asked.run.removeprefix("ingot").split(",")))
        )
        (asked.keep / f"{asked.run}.json").write_text(json.dumps(rewards))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = asked.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        initial = make_initial(folder)
        found = {
            name: contend(name, folder, initial, asked.steps, asked.threads)
            for name in (("ingot", *asked.set) if asked.set else CONTENDERS)
        }
    print(table(found, asked.steps))


if __name__ == "__main__":
    main()
