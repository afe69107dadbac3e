"""Answers per second over HTTP: `ingot serve` beside vLLM's server and transformers' `generate`, on
one model folder. `python -m benchmarks.serving FOLDER`.

Greedy, prompts of 141 tokens and answers of 128, at 1, 8 and 64 requests at once; the time to the
first token of 1,000 tokens alone, and of eight prompts that begin with the same 900. The servers
are loaded once and take turns; no prompt comes twice.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.comparison import machine
from benchmarks.data import texts
from benchmarks.health import tiny_folder
from benchmarks.servers import Answers, Contender, generate_program, ingot_server, vllm_server
from ingot.base.environment import usable_cores
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer

RESULTS = Path(__file__).parent / "results"
PROMPT, WRITTEN, LONG, SHARED, OWN = 141, 128, 1000, 900, 40
MANY = 64
FIRST, ALIKE, APART = "first of 1,000", "8 alike", "8 apart"


@dataclass(frozen=True)
class Load:
    """A kind of turn. `rounds`: how many of all rounds it is played in, None: each."""

    name: str
    requests: int
    unit: str
    rounds: int | None = None


LOADS = (
    Load("at 1", 1, "tokens/s"),
    Load("at 8", 8, "tokens/s"),
    Load("at 64", MANY, "tokens/s", 1),
    Load(FIRST, 1, "s"),
    Load(APART, 8, "s", 1),
    Load(ALIKE, 8, "s", 1),
)


@dataclass(frozen=True)
class Sizes:
    """Tokens of a prompt, of an answer, of the long prompt and of the one that is shared."""

    prompt: int = PROMPT
    written: int = WRITTEN
    long: int = LONG
    shared: int = SHARED


QUICK = Sizes(12, 4, 40, 30)


@dataclass
class Played:
    """What a contender did: of each load a value for each round, in the load's unit."""

    name: str
    values: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)
    equal_texts: int | None = None
    """None where nothing was compared."""
    peak_bytes: int = 0
    beyond_libraries_bytes: int = 0


class Prompts:
    """Token ids of real text, cut into prompts of any length, none of which comes twice."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = itertools.chain.from_iterable(map(tokenizer.encode, texts()))

    def next(self, count: int, length: int) -> list[list[int]]:
        return [list(itertools.islice(self._ids, length)) for _ in range(count)]


def play(contender: Contender, load: Load, prompts: Sequence[list[int]], sizes: Sizes) -> Answers:
    """One turn of a contender, which waits again afterwards."""
    contender.go_on()
    try:
        if load.unit == "tokens/s":
            return contender.complete(prompts, sizes.written)
        # A salt of its own keeps a prompt from meeting what was computed for others.
        salts = [f"{number}" for number in range(load.requests)] if load.name == APART else ()
        return contender.first_tokens(prompts, salts)
    finally:
        contender.stop()


def prompts_of(load: Load, source: Prompts, sizes: Sizes) -> list[list[int]]:
    """The prompts of one round, the same for all contenders."""
    if load.name in (ALIKE, APART):
        (shared,) = source.next(1, sizes.shared)
        return [shared + own for own in source.next(load.requests, OWN)]
    return source.next(load.requests, sizes.long if load.name == FIRST else sizes.prompt)


def compare(
    contenders: Sequence[Contender],
    reference: Contender,
    tokenizer: Tokenizer,
    sizes: Sizes,
    rounds: int,
    loads: Sequence[Load],
) -> list[Played]:
    """All rounds, in an order of contenders that is turned by one for each load and round. The
    texts of the first round at 8 are compared with those of `reference`.
    """
    played = [Played(contender.name) for contender in contenders]
    source, turn = Prompts(tokenizer), 0
    warm = source.next(2, sizes.prompt)
    for contender in [*contenders, reference]:
        contender.complete(warm, 2)
        contender.stop()
    kept: tuple[list[list[int]], dict[int, Answers]] | None = None
    for number in range(rounds):
        for load in loads:
            if load.rounds is not None and number >= load.rounds:
                continue
            prompts, turn, found = prompts_of(load, source, sizes), turn + 1, dict[int, Answers]()
            for shift in range(len(contenders)):
                who = (turn + shift) % len(contenders)
                found[who] = play(contenders[who], load, prompts, sizes)
                _keep(played[who], load, found[who], sizes)
            if load.name == "at 8" and kept is None:
                kept = prompts, found
    for contender, its in zip(contenders, played, strict=True):
        contender.go_on()
        its.peak_bytes, its.beyond_libraries_bytes = contender.peak_bytes()
        contender.stop()
    if kept is not None:
        reference.go_on()
        exact = _texts(reference.complete(kept[0], sizes.written), tokenizer)
        for who, answers in kept[1].items():
            same = zip(_texts(answers, tokenizer), exact, strict=True)
            played[who].equal_texts = sum(one == other for one, other in same)
    return played


def _texts(answers: Answers, tokenizer: Tokenizer) -> list[str]:
    """The texts; half a character at the end is told or left out."""
    whole = (text if isinstance(text, str) else tokenizer.decode(text) for text in answers.texts)
    return [text.rstrip("\ufffd") for text in whole]


def _keep(played: Played, load: Load, answers: Answers, sizes: Sizes) -> None:
    value = (
        load.requests * sizes.written / answers.seconds
        if load.unit == "tokens/s"
        else statistics.mean(answers.each_s)
    )
    played.values.setdefault(load.name, []).append(value)
    played.cpu_seconds.setdefault(load.name, []).append(answers.cpu_seconds)
    shown = f"{played.name:<22}{load.name:<16}{value:8.2f} {load.unit:<9}"
    print(f"{shown}{answers.cpu_seconds:8.2f} CPU s", file=sys.stderr, flush=True)


def show(played: Sequence[Played], loads: Sequence[Load], console: Console) -> list[dict[str, Any]]:
    """Print the table; answer the ratios of the first contender to each other one, larger is
    better for the first.
    """
    table = Table(
        "", *(f"{load.name}, {load.unit}" for load in loads), "equal texts", "memory, MB", "beyond"
    )
    for one in played:
        middles = [statistics.median(one.values[load.name]) for load in loads]
        table.add_row(
            one.name,
            *(f"{value:.1f}" if value >= 10 else f"{value:.2f}" for value in middles),
            "-" if one.equal_texts is None else f"{one.equal_texts} of 8",
            f"{one.peak_bytes / 1e6:,.0f}",
            f"{one.beyond_libraries_bytes / 1e6:,.0f}",
        )
    console.print(table)
    found = []
    for other, load in itertools.product(played[1:], loads):
        both = (played[0].values[load.name], other.values[load.name])
        cpu = (other.cpu_seconds[load.name], played[0].cpu_seconds[load.name])
        if load.unit == "s":
            both = both[::-1]
        row: dict[str, Any] = {"load": load.name, "of": played[0].name, "over": other.name}
        for kind, (ours, theirs) in {"time": both, "cpu": cpu}.items():
            each = sorted(a / max(b, 1e-9) for a, b in zip(ours, theirs, strict=True))
            row[kind] = {"median": statistics.median(each), "least": each[0], "most": each[-1]}
        found.append(row)
        told = " ".join(
            f"{kind} {part['median']:.2f} ({part['least']:.2f} to {part['most']:.2f})"
            for kind, part in row.items()
            if isinstance(part, dict)
        )
        console.print(f"{row['of']} is better than {row['over']} {load.name}: {told}")
    console.print(NOTE, style="dim")
    return found


NOTE = (
    "times: wall-clock and CPU seconds, the others' over the first one's, median (least to most)"
    " over the rounds. Seconds are those to the first token, the mean of the requests. Equal texts:"
    " to transformers' in float32. Memory: peaks of all processes, and beyond what they import."
    " apart and alike: eight prompts of 940 tokens with the same first 900, with cache_salt and"
    " without."
)


@contextlib.contextmanager
def started(
    folder: Path, vllm: str | None, vllm_dtype: str, only: Sequence[str]
) -> Iterator[list[Contender]]:
    """The contenders, loaded one after the other; each waits while the next one loads."""
    made = {"ingot": lambda: ingot_server(folder), "generate": lambda: generate_program(folder)}
    if vllm is not None:
        made["vllm"] = lambda: vllm_server(vllm, folder, vllm_dtype)
    with contextlib.ExitStack() as stack:
        contenders = []
        for name in ("ingot", "vllm", "generate"):
            if name in made and name in only:
                contenders.append(stack.enter_context(made[name]()))
        yield contenders


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="model folder; a tiny one if --quick")
    parser.add_argument("--vllm", metavar="PYTHON", help="of the environment that vLLM lives in")
    parser.add_argument("--vllm-dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument(
        "--only",
        nargs="+",
        default=["ingot", "vllm", "generate"],
        choices=["ingot", "vllm", "generate"],
    )
    names = [load.name for load in LOADS]
    parser.add_argument("--loads", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of each server")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: measures nothing")
    parser.add_argument("--write", metavar="NAME", help="keep the figures as results/NAME.json")
    asked = parser.parse_args()
    if asked.folder is None and not asked.quick:
        parser.error("which model folder? A tiny one is made with --quick")
    console = Console(highlight=False, width=140)
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)  # the contenders inherit it
    about, began = machine(asked.threads), time.perf_counter()
    console.print(", ".join(f"{key} {value}" for key, value in about.items()))
    loads = [load for load in LOADS if load.name in asked.loads]
    sizes, rounds = (QUICK, 1) if asked.quick else (Sizes(), asked.rounds)
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.folder or tiny_folder(Path(scratch))
        tokenizer = load_tokenizer(folder)
        with (
            started(folder.absolute(), asked.vllm, asked.vllm_dtype, asked.only) as contenders,
            generate_program(folder.absolute(), "float32") as reference,
        ):
            played = compare(contenders, reference, tokenizer, sizes, rounds, loads)
    ratios = show(played, loads, console)
    console.print(f"{time.perf_counter() - began:.0f} s", style="dim")
    if asked.write:
        path = RESULTS / f"{asked.write}.json"
        path.parent.mkdir(exist_ok=True)
        kept = {
            "machine": about,
            "command": " ".join(sys.argv[1:]),
            "contenders": [asdict(one) for one in played],
            "ratios": ratios,
        }
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {path}")


if __name__ == "__main__":
    main()
