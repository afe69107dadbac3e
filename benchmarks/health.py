"""How long `/health` takes while somebody sends bodies that are small and cost much, beside what it
takes when nobody sends anything.

`python -m benchmarks.health`. Asked: the 99th percentile under each body is at most five times that
of the idle server in the same run. Client and sender are processes of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from ingot.models.hf.tensorfile import save_weights
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.tokenizers.bpe import train_bpe

SIZE = 1_400_000
WORDS = "the quick brown fox jumps over the lazy dog, naturally; "
POST = "POST {path} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"


def bodies() -> dict[str, bytes]:
    """Requests by name, as they go over the wire."""
    long, many = WORDS * (SIZE // len(WORDS)), SIZE // 4
    chat = {"role": "user", "content": "a"}
    made = {
        "instances, not texts": ("/predict", {"instances": [1] * many}),
        "instances, too many": ("/predict", {"instances": ["a"] * (many // 2)}),
        "unknown fields": ("/predict", {f"f{number}": 1 for number in range(100_000)}),
        "bad messages": ("/v1/chat/completions", {"messages": [1] * many}),
        "many messages": ("/v1/chat/completions", {"messages": [chat] * (many // 8)}),
        "lists": ("/v1/completions", {"prompt": [[]] * many}),
        "token ids": ("/v1/completions", {"prompt": [7] * many}),
        "long prompt": ("/v1/completions", {"prompt": long}),
        "long chat": ("/v1/chat/completions", {"messages": [{**chat, "content": long}]}),
        "long model name": ("/v1/completions", {"prompt": "a", "model": long}),
        "log-probabilities": (
            "/v1/completions",
            {"prompt": "a", "logprobs": 20, "max_tokens": 1000},
        ),
    }
    requests = {}
    for name, (path, body) in made.items():
        content = json.dumps(body, separators=(",", ":")).encode()
        head = f"{POST.format(path=path)}Content-Length: {len(content)}\r\n\r\n".encode()
        requests[name] = head + content
    head = f"{POST.format(path='/predict')}Transfer-Encoding: chunked\r\n\r\n".encode()
    requests["chunks of a byte"] = head + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n"
    requests["many headers"] = b"GET / HTTP/1.1\r\nHost: here\r\n" + b"a:b\r\n" * 3000 + b"\r\n"
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.health", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each body and round")
    parser.add_argument("--only", nargs="*", help="names of bodies")
    asked = parser.parse_args()
    requests = bodies()
    requests = {name: requests[name] for name in asked.only or requests}
    found: dict[str, list[float]] = {name: [] for name in ("idle", *requests)}
    sent: dict[str, list[float]] = {name: [] for name in found}
    with tempfile.TemporaryDirectory() as scratch, _served(tiny_folder(Path(scratch))) as address:
        for _ in range(asked.rounds):
            for name in found:
                with _sending(address, requests.get(name)) as count:
                    found[name].append(_p99_ms(address, asked.seconds))
                    sent[name].append(count.value / asked.seconds)
    print(f"{'body':<24}{'sent a second':>14}{'p99 in ms':>12}{'times idle':>12}")
    for name, figures in found.items():
        ratio = statistics.median(
            ours / idle for ours, idle in zip(figures, found["idle"], strict=True)
        )
        rate, p99 = statistics.median(sent[name]), statistics.median(figures)
        print(f"{name:<24}{rate:>14.1f}{p99:>12.2f}{ratio:>12.2f}")


def tiny_folder(folder: Path) -> Path:
    """A random Llama of 4 layers with a tokenizer of its own."""
    tokenizer = train_bpe([WORDS * 20], 320)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    model = Decoder(DecoderConfig.from_hf(config))
    init_weights(model, 5)
    save_weights({name: parameter.detach() for name, parameter in model.named_parameters()}, folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer.save(folder)
    return folder


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[tuple[str, int]]:
    command = (sys.executable, "-m", "ingot", "serve", str(folder), "serve.port=0")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            for line in process.stderr:
                if found := re.search(r"at (http://\S+)$", line):
                    where = urlsplit(found[1])
                    yield str(where.hostname), int(where.port or 0)
                    return
            raise SystemExit("the server did not start")
        finally:
            process.terminate()


@contextlib.contextmanager
def _sending(address: tuple[str, int], request: bytes | None) -> Iterator[object]:
    """A process that sends the request again and again; the value counts its answers."""
    spawn = multiprocessing.get_context("spawn")
    count = spawn.Value("i", 0)
    process = spawn.Process(target=_send, args=(address, request, count), daemon=True)
    if request is not None:
        process.start()
        while not count.value:
            time.sleep(0.01)
        count.value = 0
    try:
        yield count
    finally:
        if request is not None:
            process.kill()
            process.join()


def _send(address: tuple[str, int], request: bytes, count: object) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(address) as connection:
            connection.sendall(request)
            connection.recv(1 << 16)
        count.value += 1  # type: ignore[attr-defined]


def _p99_ms(address: tuple[str, int], seconds: float) -> float:
    """The 99th percentile of the time of an answer of `/health`, over one connection."""
    times, until = [], time.monotonic() + seconds
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (began := time.monotonic()) < until:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
            answer = connection.recv(1 << 16)
            while not answer.endswith(b"}"):
                answer += connection.recv(1 << 16)
            times.append(time.monotonic() - began)
            time.sleep(0.002)
    return statistics.quantiles(times, n=100)[98] * 1000


if __name__ == "__main__":
    main()
