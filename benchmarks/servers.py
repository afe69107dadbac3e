"""Servers that take turns on one machine: each is a process with its children, stopped while others
run, and asked over HTTP.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ingot.serve.http.listen import LOOPBACK, free_port

ROOT = Path(__file__).parents[1]
LOAD_S, ANSWER_S = 300.0, 600.0
LIBRARIES = {
    "ingot": "import ingot.serve.server",
    "vllm": "import vllm.entrypoints.openai.api_server, vllm.v1.engine.core",
    "transformers": "import torch, transformers; transformers.AutoModelForCausalLM.from_pretrained",
}
"""What each contender imports before it knows a model."""
SMALL_BYTES = 100_000_000
"""A child process of less memory, such as a resource tracker, has not imported the libraries."""


@dataclass
class Answers:
    """What one turn gave: the texts or ids by prompt, seconds until each came (of the first token
    where it was streamed), and CPU seconds of the contender.
    """

    texts: list[Any]
    each_s: list[float]
    seconds: float
    cpu_seconds: float


@dataclass
class Contender:
    """A running process with its children. `library`: the key of what it imports."""

    name: str
    library: str
    process: subprocess.Popen[str]
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)

    def family(self) -> list[psutil.Process]:
        """The process and its children."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def stop(self) -> None:
        """Let it wait while others run."""
        for process in self.family():
            process.suspend()

    def go_on(self) -> None:
        """Let it run again."""
        for process in self.family():
            process.resume()

    def cpu_seconds(self) -> float:
        """What it and its living children have used."""
        times = [process.cpu_times() for process in self.family()]
        return sum(each.user + each.system for each in times)

    def peak_bytes(self) -> tuple[int, int]:
        """The most that its processes have held, libraries included and beyond them."""
        peaks = [_peak(process.pid) for process in self.family()]
        many = sum(peak > SMALL_BYTES for peak in peaks)
        return sum(peaks), sum(peaks) - many * self._library_bytes()

    def _library_bytes(self) -> int:
        """What a process holds that has imported the libraries and nothing else."""
        show = "; print(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')))"
        done = subprocess.run(
            [self.python, "-c", LIBRARIES[self.library] + show],
            env={**os.environ, **self.environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout.split()[-2]) * 1024

    def complete(self, prompts: Sequence[list[int]], tokens: int) -> Answers:
        """Greedy continuations of exactly `tokens` tokens, all prompts asked for at once."""
        raise NotImplementedError

    def first_tokens(self, prompts: Sequence[list[int]], salts: Sequence[str] = ()) -> Answers:
        """The time to the first token of prompts that are sent at once. Answers to prompts with
        different `salts` share no computation.
        """
        raise NotImplementedError


class Server(Contender):
    """A server of OpenAI's completions."""

    port: int = 0
    model: str = ""

    def complete(self, prompts: Sequence[list[int]], tokens: int) -> Answers:
        bodies = [{"prompt": prompt, "max_tokens": tokens} for prompt in prompts]
        return self._all(bodies, stream=False)

    def first_tokens(self, prompts: Sequence[list[int]], salts: Sequence[str] = ()) -> Answers:
        bodies = [{"prompt": prompt, "max_tokens": 4} for prompt in prompts]
        for body, salt in zip(bodies, salts, strict=False):
            body["cache_salt"] = salt
        return self._all(bodies, stream=True)

    def _all(self, bodies: Sequence[dict[str, Any]], *, stream: bool) -> Answers:
        cpu, began = self.cpu_seconds(), time.perf_counter()
        with ThreadPoolExecutor(len(bodies)) as pool:
            found = list(pool.map(lambda body: self._ask(body, stream=stream), bodies))
        seconds = time.perf_counter() - began
        return Answers(
            [text for text, _ in found],
            [each for _, each in found],
            seconds,
            self.cpu_seconds() - cpu,
        )

    def _ask(self, body: dict[str, Any], *, stream: bool) -> tuple[str, float]:
        """The text, or the first part of it, and the seconds until it came."""
        plain = {"model": self.model, "temperature": 0, "ignore_eos": True, "stream": stream}
        began = time.perf_counter()
        link = http.client.HTTPConnection(LOOPBACK, self.port, timeout=ANSWER_S)
        with contextlib.closing(link):
            content = json.dumps({**plain, **body})
            link.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
            answer = link.getresponse()
            if answer.status != 200:
                raise SystemExit(f"{self.name} answered {answer.status}: {answer.read()[:500]!r}")
            if not stream:
                text = json.loads(answer.read())["choices"][0]["text"]
                return text, time.perf_counter() - began
            first = answer.readline()
            seconds = time.perf_counter() - began
            answer.read()
            return first.decode(), seconds


class Program(Contender):
    """`benchmarks.contenders.generate`, which gets its prompts as one batch."""

    def complete(self, prompts: Sequence[list[int]], tokens: int) -> Answers:
        cpu = self.cpu_seconds()
        assert self.process.stdin
        assert self.process.stdout
        asked = {"prompts": list(prompts), "tokens": tokens}
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        told = json.loads(self.process.stdout.readline())
        seconds = told["seconds"]
        each = [seconds] * len(prompts)
        return Answers(told["ids"], each, seconds, self.cpu_seconds() - cpu)

    def first_tokens(self, prompts: Sequence[list[int]], salts: Sequence[str] = ()) -> Answers:
        return self.complete(prompts, 1)


@contextlib.contextmanager
def ingot_server(folder: Path, knobs: Sequence[str] = ()) -> Iterator[Contender]:
    """`ingot serve` on a model folder, with its default knobs but for `knobs`."""
    command = [sys.executable, "-m", "ingot", "serve", str(folder), "serve.port=0", *knobs]
    with _running(command, ["stderr"]) as process:
        server = Server("ingot serve", "ingot", process)
        assert process.stderr
        for line in process.stderr:
            if found := re.search(r"serving (\S+) at http://[^:]+:(\d+)", line):
                server.model, server.port = found[1], int(found[2])
                break
        else:
            raise SystemExit("ingot serve did not start; run it by hand to see why")
        yield server


@contextlib.contextmanager
def vllm_server(python: str, folder: Path, dtype: str = "auto") -> Iterator[Contender]:
    """vLLM's own server with its defaults, eager, and a cache of a GiB in place of nine tenths of
    the memory. `dtype`: the folder's (`auto`), or `float32`, which processors without instructions
    for bf16 are faster in.
    """
    port = free_port(LOOPBACK, 0)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "m", "--host", LOOPBACK, "--port", str(port)]
    command += ["--dtype", dtype, "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 30)]
    command += ["--generation-config", "vllm", "--disable-uvicorn-access-log"]
    quiet = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    with _running(command, more=quiet) as process:
        server = Server("vLLM", "vllm", process, python, quiet)
        server.model, server.port = "m", port
        until = time.monotonic() + LOAD_S
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"vLLM did not start; see why: {' '.join(command)}")
            time.sleep(0.2)
        yield server


@contextlib.contextmanager
def generate_program(folder: Path, dtype: str = "auto") -> Iterator[Contender]:
    """transformers' `generate` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.contenders.generate", str(folder), dtype]
    with _running(command, ["stdin", "stdout"]) as process:
        assert process.stdout
        if not process.stdout.readline():
            raise SystemExit(f"transformers did not open the model; see why: {' '.join(command)}")
        yield Program("transformers generate", "transformers", process)


@contextlib.contextmanager
def _running(
    command: Sequence[str], read: Sequence[str] = (), more: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **(more or {})}
    pipes = {
        name: subprocess.PIPE if name in read else subprocess.DEVNULL
        for name in ("stdin", "stdout", "stderr")
    }
    process = subprocess.Popen(command, env=environment, cwd=ROOT, text=True, **pipes)
    try:
        yield process
    finally:
        family = [process.pid, *_children(process.pid)]
        for pid in family:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).resume()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for pid in family:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
        process.wait()


def _children(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def _healthy(port: int) -> bool:
    link = http.client.HTTPConnection(LOOPBACK, port, timeout=5)
    with contextlib.closing(link), contextlib.suppress(OSError):
        link.request("GET", "/health")
        return link.getresponse().status == 200
    return False


def _peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")
    )
