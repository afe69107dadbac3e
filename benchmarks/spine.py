"""The spine against the usual libraries on this machine: a training step, generation, tokenising. `make bench`.

Figures of one run belong together and are compared as ratios; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import ingot
from benchmarks.turns import Contender, Result, Turn, Work, ratio, take_turns
from ingot.config.load import load_recipe
from ingot.config.presets import preset
from ingot.config.recipe import Recipe
from ingot.config.work import AdamW
from ingot.data.documents import read_documents
from ingot.data.ingest import ingest
from ingot.data.loader import Batch
from ingot.data.prepare import prepare
from ingot.models.architecture import DecoderConfig
from ingot.models.decoder import Decoder
from ingot.models.device import computing_in, device_name, resolve_compute
from ingot.models.generate import Generator, Request
from ingot.models.initial import initialise
from ingot.objectives.pretrain import Pretrain
from ingot.parallel.mesh import running_mesh
from ingot.train.optim import make_optimizer
from ingot.train.step import train_step

TRANSFORMERS = ("transformers.models.llama.modeling_llama", "transformers.generation")
OPTIMIZER = ("torch._dynamo",)  # every optimizer of torch loads it when it is made
NAMES = ("train-3m", "train-56m", "generate", "prepare")
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Comparison:
    """A table of contenders and the ratios that are read off it; `unit` is what their rates count."""

    title: str
    unit: str
    contenders: list[Contender]
    ratios: list[tuple[str, str]]
    """Pairs of names: how many times the second one's rate is the first one's."""
    notes: list[str] = field(default_factory=list)


def random_model(name: str) -> Decoder:
    """The preset with random weights, the same in every process."""
    model = Decoder(DecoderConfig.from_hf(preset(name)))
    initialise(model, 0)
    return model


def random_rows(name: str, rows: int, seq_len: int, seed: int = 0) -> torch.Tensor:
    """Random tokens [rows, seq_len]."""
    return torch.randint(0, preset(name)["vocab_size"], (rows, seq_len), generator=torch.Generator().manual_seed(seed))


def train_ours(name: str, rows: int, seq_len: int) -> Work:
    """Our optimizer step, one micro-batch."""
    stack = running_mesh()
    mesh = stack.__enter__()  # lives as long as the process
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))  # as it was asked: the mesh takes all cores
    model = random_model(name).to(mesh.device).train()
    optimizer = make_optimizer(AdamW(), model)
    tokens = random_rows(name, rows, seq_len)
    labels = torch.cat((tokens[:, 1:], torch.full((rows, 1), -100)), dim=1)
    batch = Batch(tokens, labels, torch.arange(seq_len).expand(rows, seq_len).contiguous(), torch.ones_like(tokens))
    compute = resolve_compute("auto", mesh.device)

    def work() -> Turn:
        outcome = train_step(model, Pretrain(), [batch], optimizer, targets=rows * (seq_len - 1), clip_norm=1.0, compute=compute, mesh=mesh)
        return Turn(rows * seq_len, float(outcome.loss))  # waits for the device

    return work


def train_transformers(name: str, rows: int, seq_len: int) -> Work:
    """What transformers' Trainer does in a step: forward with labels, backward, clip, fused AdamW."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = preset(name)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{key: value for key, value in config.items() if key != "architectures"}))
    model.load_state_dict(random_model(name).state_dict(), strict=not config["tie_word_embeddings"])
    model.to(device).train()
    knobs = AdamW()
    optimizer = torch.optim.AdamW(model.parameters(), lr=knobs.lr, betas=knobs.betas, eps=knobs.eps, weight_decay=knobs.weight_decay, fused=True)
    tokens = random_rows(name, rows, seq_len).to(device)
    compute = resolve_compute("auto", device)

    def work() -> Turn:
        with computing_in(compute, device):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Turn(rows * seq_len, float(loss.detach()))

    return work


def generate_ours(name: str, together: int, prompt: int, tokens: int) -> Work:
    """Our continuous batching, greedy."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(name).to(device).eval()
    prompts = random_rows(name, together, prompt).tolist()

    def work() -> Turn:
        with computing_in(resolve_compute("auto", device), device):
            answers = Generator(model, max_rows=together).run([Request(ids, tokens) for ids in prompts])
        return Turn(sum(answer.generated for answer in answers))

    return work


def generate_transformers(name: str, together: int, prompt: int, tokens: int) -> Work:
    """transformers' `generate` on a batch of equally long prompts, greedy."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.for_model(**{key: value for key, value in preset(name).items() if key != "architectures"}, pad_token_id=0)
    config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config).to(device).eval()
    model.load_state_dict(random_model(name).state_dict(), strict=not config.tie_word_embeddings)
    prompts = random_rows(name, together, prompt).to(device)

    def work() -> Turn:
        with torch.no_grad(), computing_in(resolve_compute("auto", device), device):
            made = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=tokens)
        return Turn(made[:, prompt:].numel())

    return work


def documents(root: Path, tokenizer: str) -> Recipe:
    """The standard library's sources, ready to be prepared under `root`."""
    knobs = ["name=bench", f"output={root}", "data.train=[{source: 'builtin:stdlib'}]", f"tokenizer.source={tokenizer}"]
    return load_recipe((), knobs, environ={}, dotenv=None)


def prepare_ours(root: str, tokenizer: str) -> Work:
    """The verb `prepare`: Parquet in, checked and flushed columns out, one process a core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    recipe = documents(Path(root), tokenizer)
    size = text_bytes(recipe)

    def work() -> Turn:
        shutil.rmtree(recipe.folder.columns, ignore_errors=True)
        prepare(recipe)
        return Turn(size / 1e6)

    return work


def prepare_tokenizers(root: str, tokenizer: str) -> Work:
    """The library alone: `encode_batch_fast` of texts that are in memory already, on all cores, ids thrown away."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer

    recipe = documents(Path(root), tokenizer)
    texts = [document.text for split in ("train", "validation") for document in read_documents(recipe, split)]
    reference = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    size = sum(len(text.encode()) for text in texts)

    def work() -> Turn:
        for first in range(0, len(texts), 256):
            sum(len(encoding) for encoding in reference.encode_batch_fast(texts[first : first + 256], add_special_tokens=False))
        return Turn(size / 1e6)

    return work


def text_bytes(recipe: Recipe) -> int:
    return sum(len(document.text.encode()) for split in ("train", "validation") for document in read_documents(recipe, split))


def training(name: str, rows: int, seq_len: int) -> Comparison:
    arguments = (name, rows, seq_len)
    contenders = [Contender("ingot", train_ours, arguments, OPTIMIZER), Contender("transformers", train_transformers, arguments, (*TRANSFORMERS, *OPTIMIZER))]
    return Comparison(f"training step, {name}, {rows} x {seq_len} tokens", "tokens", contenders, [("ingot", "transformers")])


def generating(name: str, prompt: int, tokens: int) -> Comparison:
    sizes = (1, 8)
    contenders = [Contender(f"ingot, {n} together", generate_ours, (name, n, prompt, tokens)) for n in sizes]
    contenders += [Contender(f"transformers, {n} together", generate_transformers, (name, n, prompt, tokens), TRANSFORMERS) for n in sizes]
    ratios = [("ingot, 8 together", "ingot, 1 together"), ("ingot, 1 together", "transformers, 1 together"), ("ingot, 8 together", "transformers, 8 together")]
    notes = ["eight together take 8 / (the first ratio) times as long as one alone"]
    return Comparison(f"generation, {name}, {prompt} + {tokens} tokens, greedy", "tokens", contenders, ratios, notes)


def preparing(root: Path) -> Comparison:
    recipe = documents(root, "train")
    ingest(recipe)
    prepare(recipe)
    tokenizer = shutil.copytree(recipe.folder.tokenizer, root / "tokenizer")
    arguments = (str(root), str(tokenizer))
    contenders = [Contender("ingot prepare", prepare_ours, arguments), Contender("tokenizers", prepare_tokenizers, arguments)]
    notes = ["memory is that of the leading process; prepare's workers are not in it"]
    return Comparison(f"tokenising {text_bytes(recipe) / 1e6:.0f} MB of Python", "MB", contenders, [("ingot prepare", "tokenizers")], notes)


def comparisons(names: Sequence[str], quick: bool, root: Path) -> list[Callable[[], Comparison]]:
    """Those asked for; `quick` only shows that everything runs."""
    known: dict[str, Callable[[], Comparison]] = {
        "train-3m": lambda: training("llama-3m", 2 if quick else 8, 32 if quick else 256),
        "train-56m": lambda: training("llama-56m", 1 if quick else 2, 32 if quick else 512),
        "generate": lambda: generating("llama-3m" if quick else "llama-56m", 4 if quick else 64, 3 if quick else 64),
        "prepare": lambda: preparing(root),
    }
    return [known[name] for name in names or known]


def show(comparison: Comparison, results: Sequence[Result], console: Console) -> list[dict[str, Any]]:
    """Print one comparison; answer its ratios."""
    table = Table("", f"{comparison.unit}/s", "CPU-seconds a turn", "memory, MB", title=comparison.title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        cpu = sorted(result.cpu_seconds)[len(result.cpu_seconds) // 2]
        table.add_row(result.name, f"{result.rate:,.1f}", f"{cpu:.2f}", f"{result.memory_bytes / 1e6:,.0f}")
    console.print(table)
    by_name = {result.name: result for result in results}
    found = []
    for one, other in comparison.ratios:
        middle, least, most = ratio(by_name[one], by_name[other])
        found.append({"of": one, "over": other, "median": middle, "least": least, "most": most})
        console.print(f"{one} / {other}: {middle:.2f} ({least:.2f} to {most:.2f})")
    for note in comparison.notes:
        console.print(note, style="dim")
    return found


def machine(threads: int) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "ingot": ingot.__version__, "torch": torch.__version__, "python": platform.python_version(), "device": device_name(device),
        "cores": os.cpu_count(), "threads": threads, "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spine", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)}; all by default")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender; medians are shown")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads of each contender")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything runs, measures nothing")
    parser.add_argument("--write", metavar="NAME", help="keep the figures as results/NAME.json")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(NAMES):
        parser.error(f"{', '.join(sorted(unknown))} is not one of {', '.join(NAMES)}")
    console = Console(highlight=False, width=110)
    about = machine(asked.threads)
    console.print(", ".join(f"{key} {value}" for key, value in about.items()))
    kept: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        for make in comparisons(asked.names, asked.quick, Path(root)):
            comparison = make()
            results = take_turns(comparison.contenders, asked.rounds, asked.threads)
            ratios = show(comparison, results, console)
            kept.append({"title": comparison.title, "unit": comparison.unit, "results": [asdict(result) for result in results], "ratios": ratios})
    if asked.write:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{asked.write}.json"
        path.write_text(json.dumps({"machine": about, "comparisons": kept}, indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {path}")


if __name__ == "__main__":
    main()
