"""A training step beside the trainers that others use, each in an environment of its own. `python
-m benchmarks.peers`.

One call makes the environments, and for each case prepares the data, lets all contenders take
turns, and prints and keeps a table. `--profile` shows what our own step consists of.
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

from rich.console import Console
from rich.table import Table

from benchmarks.comparison import machine
from benchmarks.environments import PEERS, make_environment
from benchmarks.peer_cases import CASES, QUICK, Contender, Sizes
from benchmarks.peer_tasks import task_of
from ingot.base.environment import usable_cores

RESULTS, ROOT = Path(__file__).parent / "results", Path(__file__).parents[1]
PEAK, SAME = "peak", 0.02
PROFILED, LEAST_SHARE = 3, 0.003
"""Steps that are profiled, and what is too little to be shown."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")
FORMULA = (
    "share of peak = tokens/s x flops per token / peak; flops per token = 6 x weights of matrices"
    " (head included, embedding not) + 12 x layers x heads x head size x seq_len / 2; peak = 2 n^3"
    " / seconds of the fastest product of two n x n matrices in the dtype of computing, n 1024 or"
    " 2048, in the turns of the same run"
)


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
            # In this environment, with what it was given beside its own packages.
            "PYTHONPATH": os.pathsep.join(
                [
                    str(ROOT),
                    *([os.environ.get("PYTHONPATH", "")] if python == sys.executable else []),
                ]
            ),
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
    tokens = task["steps"] * task["tokens_per_step"]
    flops = task["flops_per_token"]
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
            "share_of_peak": None if flops is None else rate * flops / peak,
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
            "" if flops is None else f"{row['share_of_peak']:.0%}",
            f"{one.memory_bytes / 1e9:.2f}",
            f"{one.losses[0]:.3f}",
            f"{one.losses[-1]:.3f}",
        )
    console.print(table)
    if flops is not None:
        console.print(
            f"peak {peak / 1e9:,.0f} GFLOP/s; {flops / 1e6:,.0f} MFLOP a token. {FORMULA}",
            style="dim",
        )
    return rows


def main() -> None:
    asked = _arguments()
    console = Console(highlight=False, width=150)
    about = machine(asked.threads)
    console.print(", ".join(f"{key} {value}" for key, value in about.items()))
    if asked.profile:
        _profile(asked, console)
        return
    kept: dict[str, Any] = {
        "machine": about,
        "command": " ".join(sys.argv[1:]),
        "formula": FORMULA,
        "cases": {},
    }
    for name in asked.cases:
        case = CASES[name]
        contenders = [one for one in case.contenders if not asked.only or one.name in asked.only]
        if not contenders:
            continue
        pythons = _pythons(contenders, asked.environments)
        console.print(f"{name}: {case.title}")
        with tempfile.TemporaryDirectory() as root:
            sizes = QUICK if asked.quick else Sizes()
            task = task_of(Path(root), case, sizes, asked.steps, asked.rounds)
            played, peak = compare(
                contenders, pythons, task, Path(root), asked.rounds, asked.threads
            )
        kept["cases"][name] = {"peak_flops": peak, "rows": show(played, peak, task, console)}
        check_losses(played)
    if asked.write:
        path = RESULTS / f"{asked.write}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=list(CASES),
        default=list(CASES),
        help="what is trained; all of it, one after the other, if none is named",
    )
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
        choices=sorted({one.name for case in CASES.values() for one in case.contenders}),
        help="some of the contenders",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of each contender; medians are shown"
    )
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn")
    parser.add_argument(
        "--threads", type=int, default=usable_cores(), help="threads of each contender"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="instead of comparing: what our step's time goes into, on one thread",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tiny model: shows that everything runs, measures nothing",
    )
    parser.add_argument("--write", metavar="NAME", help="keep the figures as results/NAME.json")
    asked: argparse.Namespace = parser.parse_args()
    return asked


def _pythons(contenders: Sequence[Contender], environments: Path) -> list[str]:
    """The interpreter of each contender, whose environment is made if need be."""
    made = {
        name: str(make_environment(environments.absolute(), name))
        for name in PEERS
        if name in {one.environment for one in contenders}
    }
    return [made.get(contender.environment or "", sys.executable) for contender in contenders]


def _profile(asked: argparse.Namespace, console: Console) -> None:
    """A table for each case."""
    for name in asked.cases:
        with tempfile.TemporaryDirectory() as root:
            sizes = QUICK if asked.quick else Sizes()
            task = task_of(Path(root), CASES[name], sizes, steps=1, rounds=PROFILED)
            (ours, *_) = CASES[name].contenders
            task = {**_task_for(ours, task, Path(root) / "0"), "profile": PROFILED}
            player = Player(ours, sys.executable, task, Path(root) / "0", threads=1)
            try:
                found = player.turn()["found"]
            finally:
                player.close()
        show_profile(name, found, console)


def show_profile(name: str, found: Sequence[tuple[str, str, float, int]], console: Console) -> None:
    """What `benchmarks.contenders.profiled` found: part, operator, seconds a step, calls."""
    total = sum(seconds for _, _, seconds, _ in found)
    table = Table("part", "operator", "s a step", "share", "calls", title=name)
    for part, operator, seconds, calls in found:
        if seconds > LEAST_SHARE * total:
            table.add_row(part, operator, f"{seconds:.3f}", f"{seconds / total:.1%}", str(calls))
    products = sum(seconds for _, operator, seconds, _ in found if operator in PRODUCTS)
    table.caption = f"{total:.2f} s a step, {products / total:.1%} of it matrix products"
    console.print(table)


if __name__ == "__main__":
    main()
