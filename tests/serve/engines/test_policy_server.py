"""A training on rewards whose answers a real vLLM samples: it has the weights that are trained, at
every step, and what is wrong with it is noticed. `make engines` makes its environment and runs this.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed
from ingot.config.recipe import Recipe
from ingot.train.rollout import server
from ingot.train.rollout.server import PolicyServer
from ingot.train.trainer import train
from tests import tolerances
from tests.ranks import free_port
from tests.serve.engines.test_real_engines import interpreter
from tests.train.rollout.digits import apart, made_ready, odd_known
from tests.train.rollout.test_rollout import logged

pytestmark = [pytest.mark.slow, pytest.mark.engines, pytest.mark.timeout(600)]
EXACT = tolerances.SERVER_RATIO


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    interpreter("vllm")
    with odd_known():
        return made_ready(tmp_path_factory.mktemp("digits") / "root")


class Started:
    """vLLM, started once with the command that a training tells."""

    def __init__(self, url: str, log: Path, *left_out: str) -> None:
        self.url, self._log, self._left_out = url, log, left_out
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: str) -> None:
        if self._process is not None:
            return
        for one in self._left_out:
            assert one in command
            command = command.replace(one, "")
        variable, _, *arguments = shlex.split(command)
        name, value = variable.split("=")
        self._process = subprocess.Popen(
            [interpreter("vllm"), *arguments],
            env={**os.environ, name: value, "VLLM_NO_USAGE_STATS": "1"},
            stdout=self._log.open("wb"),
            stderr=subprocess.STDOUT,
        )

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)


@contextlib.contextmanager
def starting(log: Path, *left_out: str) -> Iterator[str]:
    """The address of a server that is started when a training first waits for it."""
    started = Started(f"http://127.0.0.1:{free_port()}", log, *left_out)
    waiting = PolicyServer._wait
    lock = threading.Lock()

    def begun(self: PolicyServer, *given: Any) -> bool:
        with lock:
            started.start(self.command)
        return waiting(self, *given)

    with pytest.MonkeyPatch.context() as patch, odd_known():
        patch.setattr(PolicyServer, "_wait", begun)
        try:
            yield started.url
        finally:
            started.stop()


def recipe_at(url: str, ready: Path, root: Path, **objective: Any) -> Recipe:
    """A tied head, and heads as wide as vLLM's attention on a CPU wants them."""
    return apart(
        ready,
        root,
        {
            "sampler": {"url": url},
            "old_logprobs": "recomputed",
            "temperature": 0.7,
            **objective,
        },
        model__config="{hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2,"
        " num_attention_heads: 2, num_key_value_heads: 2, tie_word_embeddings: true}",
        train__optimizer="{lr: 0.01}",
        train__steps=4,
    )


def test_it_samples_from_the_weights_in_training(
    ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step the trainer gives its answers the log-probabilities that it gave, at their
    temperature; with answers sampled ahead they are as far apart as the policy has moved. What it
    holds of other weights is noticed, and so is another training that gives it some.
    """
    with starting(tmp_path / "vllm.log") as url:
        recipe = recipe_at(url, ready, tmp_path / "one")
        train(recipe)
        assert max(logged(recipe, "sampler/ratio_error_max")) < EXACT
        assert len(logged(recipe, "sampler/kl")) == 4
        ahead = recipe_at(url, ready, tmp_path / "ahead", staleness=1)
        train(ahead)
        errors = logged(ahead, "sampler/ratio_error")
        assert errors[0] < EXACT < min(errors[1:])
        assert logged(ahead, "rollout/behind") == [0, 1, 1, 1]

        post = PolicyServer._post

        def deaf(self: PolicyServer, path: str, body: dict[str, Any]) -> Any:
            return {} if path == "/collective_rpc" else post(self, path, body)

        with monkeypatch.context() as patch:
            patch.setattr(PolicyServer, "_post", deaf)
            with pytest.raises(Failed, match="does not hold the weights that it was given"):
                train(recipe_at(url, ready, tmp_path / "deaf"))
            # The norms are all that is compared of a CPU's matrices: here they are the same.
            patch.setattr(server, "unlike", lambda *given: None)
            with pytest.raises(Failed, match="away from those of the weights"):
                train(recipe_at(url, ready, tmp_path / "unheard"))

        ask = PolicyServer._ask

        def disturbed(self: PolicyServer, *given: Any) -> Any:
            post(self, "/update_weight_version", {"new_version": "of another training"})
            return ask(self, *given)

        monkeypatch.setattr(PolicyServer, "_ask", disturbed)
        with pytest.raises(Failed, match="let it serve one training"):
            train(recipe_at(url, ready, tmp_path / "disturbed"))


def test_log_probabilities_of_another_temperature_are_refused(ready: Path, tmp_path: Path) -> None:
    """Without its flag vLLM tells those of temperature 1, whatever it draws at."""
    with (
        starting(tmp_path / "vllm.log", "--logprobs-mode processed_logprobs") as url,
        pytest.raises(Failed, match="--logprobs-mode processed_logprobs"),
    ):
        train(recipe_at(url, ready, tmp_path / "run"))
