"""A reward behind a real server on the loopback, which fails and hangs in every way."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.config.sections.rewards import HttpReward
from ingot.rewards import build
from ingot.rewards.build import build_rewards
from ingot.rewards.protocol import RewardScores, Sample
from tests.loopback import Loopback

ASKED: Counter[str] = Counter()
KEYS: set[str | None] = set()


class Scores(BaseHTTPRequestHandler):
    """What it does is in the answer that it is to score."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        sample = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = sample["answer"]
        ASKED[answer] += 1
        KEYS.add(self.headers["Authorization"])
        if answer == "hangs":
            time.sleep(30)
        if answer == "drips":
            self._drip()
        elif answer == "hangs up" or (answer == "hangs up once" and ASKED[answer] == 1):
            self.close_connection = True
        elif answer == "busy once" and ASKED[answer] == 1:
            self._reply(429, "{}")
        elif answer.isdigit() and len(answer) == 3:
            self._reply(int(answer), "{}")
        elif answer == "endless":
            self._reply(200, "1" * (1 << 21))
        else:
            value = {"number": "0.5", "bare": "0.25", "text": '{"reward": "1"}', "none": "null"}
            default = json.dumps({"reward": len(sample["prompt"]), "quality": 7, **sample})
            self._reply(200, value.get(answer, default))

    def _reply(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def _drip(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for number in range(300):
            self.wfile.write(f"X-{number}: 1\r\n".encode())
            time.sleep(0.1)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Loopback]:
    ASKED.clear()
    KEYS.clear()
    server = Loopback(Scores)
    yield server
    server.server_close()


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FIRST_WAIT_S", 0.01)


def score(server: Loopback, *answers: str, **knobs: Any) -> RewardScores:
    settings = HttpReward(kind="http", url=server.address, **knobs)
    with build_rewards([settings]) as rewards:
        return rewards([Sample("abc", answer, "r", finished=False) for answer in answers])


def test_a_number_or_an_object_is_its_answer(server: Loopback) -> None:
    assert score(server, "number", "bare", "x").total == [0.5, 0.25, 3.0]
    assert score(server, "x", field="quality").total == [7.0]
    assert score(server, "x", field="finished").total == [0.0]
    assert {None} == KEYS


def test_no_proxy_is_asked_for_a_server_of_this_machine(
    server: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    assert score(server, "number", retries=0).total == [0.5]


def test_it_fails_and_hangs_and_the_others_are_scored(server: Loopback) -> None:
    answers = ("hangs", "x", "drips", "hangs up", "500", "text", "none", "endless", "400", "y")
    began = time.monotonic()
    scores = score(server, *answers, timeout=2.0, retries=1)
    assert time.monotonic() - began < 20
    assert scores.each == {"http": [None, 3.0, *[None] * 7, 3.0]}
    assert scores.failures == {"http": 8}
    assert scores.reasons["http"].endswith("gives no answer in 2 s")
    again = ("hangs", "drips", "hangs up", "500")
    assert all(ASKED[answer] == 2 for answer in again)
    assert all(ASKED[answer] == 1 for answer in set(answers) - set(again))


def test_what_passes_is_tried_again(server: Loopback) -> None:
    assert score(server, "hangs up once", "busy once", retries=1).total == [3.0, 3.0]


def test_a_server_that_is_not_there_fails_and_ends_nothing(server: Loopback) -> None:
    server.server_close()
    threads = threading.active_count()
    scores = score(server, "x", retries=0)
    assert "does not answer" in scores.reasons["http"]
    assert threading.active_count() <= threads


def test_a_key_comes_from_the_environment(
    server: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REWARD_KEY", raising=False)
    with pytest.raises(WrongInput, match="key_variable REWARD_KEY is not set"):
        score(server, "x", key_variable="REWARD_KEY")
    monkeypatch.setenv("REWARD_KEY", "secret")
    assert score(server, "x", key_variable="REWARD_KEY").total == [3.0]
    assert {"Bearer secret"} == KEYS
