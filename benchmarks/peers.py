"""A training step beside the trainers that others use, each in an environment of its own. `python
-m benchmarks.peers`.

One call makes the environments, prepares the data, lets all of them take turns, and prints and
keeps one table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.comparison import machine
from benchmarks.data import texts, write_tokenizer
from benchmarks.environments import PEERS, make_environment
from benchmarks.spine import random_model
from ingot.config.load import load_recipe
from ingot.config.models.presets import preset
from ingot.config.sections.training import AdamW
from ingot.config.shape import flops_per_token
from ingot.data.batches.order import SampleOrder
from ingot.data.batches.rows import Rows, open_rows
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare

RESULTS, ROOT = Path(__file__).parent / "results", Path(__file__).parents[1]
OURS, PEAK, SAME = "ours", "peak", 0.02
FORMULA = (
    "share of peak = tokens/s x flops per token / peak; flops per token = 6 x weights of matrices"
    " (head included, embedding not) + 12 x layers x heads x head size x seq_len / 2; peak = 2 n^3"
    " / seconds of the fastest bf16 product of two n x n matrices, n 1024 or 2048, in the turns of"
    " the same run"
)


@dataclass(frozen=True)
class Contender:
    """A program of `benchmarks.contenders`, and in which environment it runs; None for this one."""

    name: str
    program: str
    environment: str | None
    compiled: bool = False
    micro_batch: int | None = None
    """On our side: rows that are computed at once; the step stays the same."""


CONTENDERS = (
    Contender("ingot", OURS, None),
    Contender("ingot compiled", OURS, None, compiled=True),
    Contender("ingot compiled, micro-batch 2", OURS, None, compiled=True, micro_batch=2),
    Contender("transformers Trainer", "trainer", "transformers"),
    Contender("transformers Trainer compiled", "trainer", "transformers", compiled=True),
    Contender("Lightning compiled", "lightning_compiled", "lightning", compiled=True),
    Contender("litgpt compiled", "litgpt_compiled", "litgpt", compiled=True),
)


@dataclass(frozen=True)
class Sizes:
    """What is trained."""

    preset: str = "llama-56m"
    seq_len: int = 512
    batch: int = 8
    vocab_size: int = 32_000
    corpus_mb: float = 8
    """Text in all; a document is a fourth of it, so that hardly a row meets the end of one and all
    sides mask alike.
    """


QUICK = Sizes("llama-3m", 32, 2, 512, 0.4)


@dataclass
class Played:
    """What one contender did, a number for each turn but the first."""

    name: str
    versions: dict[str, str]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    memory_bytes: int = 0


class Player:
    """A contender's process."""

    def __init__(
        self, contender: Contender, python: str, task: dict[str, Any], folder: Path, threads: int
    ) -> None:
        self.contender = contender
        folder.mkdir()
        path = folder / "task.json"
        path.write_text(
            json.dumps(
                {**task, "folder": str(folder), "compiled": contender.compiled, "threads": threads}
            ),
            encoding="utf-8",
        )
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(ROOT),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._said = (folder / "said.txt").open("w+", encoding="utf-8")
        command = [python, "-m", f"benchmarks.contenders.{contender.program}", str(path)]
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )

    def turn(self) -> dict[str, Any]:
        """One turn's answer. Ends the program when there is none."""
        asked, answers = self._pipes()
        try:
            asked.write("go\n")
            asked.flush()
        except BrokenPipeError:
            pass
        if not (line := answers.readline()):
            self._said.seek(0)
            raise SystemExit(
                f"{self.contender.name} ended without an answer:\n{self._said.read()[-3000:]}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (*self._pipes(), self._said):
            stream.close()


def task_of(root: Path, sizes: Sizes, steps: int, rounds: int) -> dict[str, Any]:
    """Prepare the same weights and rows for all: a Hugging Face folder, prepared columns for us,
    and their rows in our order for the others.
    """
    optimizer, most = AdamW(lr=1e-3), steps * (rounds + 1)
    model, rows = root / "model", root / "rows.npy"
    model.mkdir()
    config = preset(sizes.preset)
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(
        dict(random_model(sizes.preset).state_dict()),
        model / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_tokenizer(root / "tokenizer", sizes.corpus_mb / 2, sizes.vocab_size)
    _write_documents(root / "corpus.jsonl", sizes.corpus_mb)
    (root / "held-out.jsonl").write_text(
        json.dumps({"text": "nobody asks for it " * sizes.seq_len}) + "\n", encoding="utf-8"
    )
    given = {
        "name": "peers",
        "output": str(root / "runs"),
        "model.source": f"preset:{sizes.preset}",
        "model.config.vocab_size": config["vocab_size"],
        "seed": 0,
        "tokenizer.source": str(root / "tokenizer"),
        "data.train": [{"source": str(root / "corpus.jsonl")}],
        "data.validation": [{"source": str(root / "held-out.jsonl")}],
        "data.seq_len": sizes.seq_len,
        "precision.compute": "bf16",
        "train.steps": most + 1,
        "train.global_batch": sizes.batch,
        "train.optimizer.lr": optimizer.lr,
        "train.schedule.kind": "constant",
        "train.schedule.warmup": 0,
        "track.every": 1,
        "track.tensorboard": False,
        "checkpoint.every": most + 2,
    }
    knobs = [f"{name}={json.dumps(value)}" for name, value in given.items()]
    recipe = load_recipe((), knobs, environ={}, dotenv=None)
    ingest(recipe)
    prepare(recipe)
    opened = open_rows(recipe.folder.columns, "train", sizes.seq_len, pad_last=False)
    assert isinstance(opened, Rows)
    order = SampleOrder(opened.sizes, recipe.seed, opened.weights).rows(0, most * sizes.batch)
    np.save(rows, opened.batch(order.tolist()).tokens.astype(np.int32))
    return {
        "knobs": knobs,
        "model": str(model),
        "rows": str(rows),
        "seq_len": sizes.seq_len,
        "batch": sizes.batch,
        "steps": steps,
        "most": most + 1,
        "device": "cpu",
        "clip": recipe.train.clip_norm,
        "flops_per_token": flops_per_token(config, sizes.seq_len),
        **optimizer.model_dump(exclude={"kind"}),
    }


def _write_documents(path: Path, megabytes: float) -> None:
    """A few long documents."""
    source, size = texts(), int(megabytes * 1e6 / 4)
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(4):
            parts: list[str] = []
            while sum(map(len, parts)) < size:
                parts.append(next(source))
            stream.write(json.dumps({"text": "\n".join(parts)}) + "\n")


def compare(
    contenders: Sequence[Contender],
    pythons: Sequence[str],
    task: dict[str, Any],
    root: Path,
    rounds: int,
    threads: int,
) -> tuple[list[Played], float]:
    """One turn to warm up, then `rounds` turns of each, in an order that is turned by one each
    time; and the peak, FLOP/s.
    """
    everyone = [Contender("peak", PEAK, None), *contenders]
    players: list[Player] = []
    played = [
        Played(contender.name, _versions(python, contender.environment))
        for contender, python in zip(contenders, pythons, strict=True)
    ]
    best = 0.0
    try:
        for number, (contender, python) in enumerate(
            zip(everyone, [sys.executable, *pythons], strict=True)
        ):
            players.append(
                Player(
                    contender,
                    python,
                    _task_for(contender, task, root / f"{number}"),
                    root / f"{number}",
                    threads,
                )
            )
            answer = players[-1].turn()
            best = max(best, answer.get("flops", 0.0))
            if number:
                played[number - 1].losses += answer["losses"]
        for number in range(rounds):
            for shift in range(len(players)):
                who = (number + shift) % len(players)
                answer = players[who].turn()
                best = max(best, answer.get("flops", 0.0))
                if who:
                    _note(played[who - 1], answer)
    finally:
        for player in players:
            player.close()
    return played, best


def _task_for(contender: Contender, task: dict[str, Any], folder: Path) -> dict[str, Any]:
    own = [
        f"output={json.dumps(str(folder.parent / 'runs'))}",
        f"train.compile={json.dumps(contender.compiled)}",
    ]
    return {
        **task,
        "knobs": [
            *task["knobs"],
            *own,
            f"train.micro_batch={contender.micro_batch or task['batch']}",
        ],
    }


def _note(played: Played, answer: dict[str, Any]) -> None:
    played.seconds.append(answer["seconds"])
    played.cpu_seconds.append(answer["cpu_seconds"])
    played.losses += answer["losses"]
    played.memory_bytes = answer["memory_bytes"]


def _versions(python: str, environment: str | None) -> dict[str, str]:
    names = ["torch", *([environment] if environment else ["ingot"])]
    code = (
        "import importlib.metadata, json; print(json.dumps({name:"
        f" importlib.metadata.version(name) for name in {names}}}))"
    )
    read: dict[str, str] = json.loads(
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    )
    return read


def check_losses(played: Sequence[Played]) -> None:
    """Raises SystemExit when the losses of the last turn say that the contenders do not do the same
    work.
    """
    ends = {one.name: statistics.mean(one.losses[-4:]) for one in played}
    if max(ends.values()) - min(ends.values()) > SAME * max(ends.values()):
        raise SystemExit(
            "the contenders do not do the same work; losses at the end:"
            f" {', '.join(f'{name} {loss:.4f}' for name, loss in ends.items())}"
        )


def show(
    played: Sequence[Played], peak: float, task: dict[str, Any], console: Console
) -> list[dict[str, Any]]:
    """Print the table; answer its rows."""
    tokens = task["steps"] * task["batch"] * task["seq_len"]
    table = Table(
        "",
        "tokens/s",
        "first / it, each round",
        "CPU s a step",
        "share of peak",
        "memory, GB",
        "first loss",
        "last loss",
        title_justify="left",
    )
    rows = []
    for one in played:
        rate = statistics.median(tokens / seconds for seconds in one.seconds)
        times = sorted(
            theirs / ours for ours, theirs in zip(played[0].seconds, one.seconds, strict=True)
        )
        row = {
            "name": one.name,
            "versions": one.versions,
            "tokens_per_s": rate,
            "first_over_this": [statistics.median(times), times[0], times[-1]],
            "cpu_seconds_per_step": statistics.median(one.cpu_seconds) / task["steps"],
            "share_of_peak": rate * task["flops_per_token"] / peak,
            "memory_bytes": one.memory_bytes,
            "turns": asdict(one),
        }
        rows.append(row)
        table.add_row(
            f"{one.name}"
            f" ({', '.join(f'{name} {number}' for name, number in one.versions.items())})",
            f"{rate:,.0f}",
            f"{row['first_over_this'][0]:.2f} ({times[0]:.2f} to {times[-1]:.2f})",
            f"{row['cpu_seconds_per_step']:.2f}",
            f"{row['share_of_peak']:.0%}",
            f"{one.memory_bytes / 1e9:.2f}",
            f"{one.losses[0]:.3f}",
            f"{one.losses[-1]:.3f}",
        )
    console.print(table)
    console.print(
        f"peak {peak / 1e9:,.0f} GFLOP/s; {task['flops_per_token'] / 1e6:,.0f} MFLOP a token."
        f" {FORMULA}",
        style="dim",
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument(
        "--environments",
        type=Path,
        default=Path(".venv-peers"),
        help="folder for the peers' environments; made if need be",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=[contender.name for contender in CONTENDERS],
        help="some of the contenders",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of each contender; medians are shown"
    )
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="threads of each contender"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tiny model: shows that everything runs, measures nothing",
    )
    parser.add_argument("--write", metavar="NAME", help="keep the figures as results/NAME.json")
    asked = parser.parse_args()
    contenders = [
        contender for contender in CONTENDERS if not asked.only or contender.name in asked.only
    ]
    made = {
        name: str(make_environment(asked.environments.absolute(), name))
        for name in PEERS
        if name in {one.environment for one in contenders}
    }
    pythons = [made.get(contender.environment or "", sys.executable) for contender in contenders]
    console = Console(highlight=False, width=150)
    about = machine(asked.threads)
    console.print(", ".join(f"{key} {value}" for key, value in about.items()))
    with tempfile.TemporaryDirectory() as root:
        task = task_of(Path(root), QUICK if asked.quick else Sizes(), asked.steps, asked.rounds)
        played, peak = compare(contenders, pythons, task, Path(root), asked.rounds, asked.threads)
    rows = show(played, peak, task, console)
    check_losses(played)
    if asked.write:
        path = RESULTS / f"{asked.write}.json"
        path.parent.mkdir(exist_ok=True)
        kept = {
            "machine": about,
            "command": " ".join(sys.argv[1:]),
            "formula": FORMULA,
            "peak_flops": peak,
            "rows": rows,
        }
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {path}")


if __name__ == "__main__":
    main()
