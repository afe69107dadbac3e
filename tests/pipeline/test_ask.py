"""The server that `ingot run` starts at its end: by the run's resolved recipe, in whatever order
the words of the command were typed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ingot.base.storage import write_atomic
from ingot.cli.model import find_target
from ingot.config.load import dump_recipe, read_recipe
from ingot.config.recipe import Recipe
from ingot.evaluate.generation import encode_sample
from ingot.pipeline import local as ask
from ingot.tokenizers.bpe import train_bpe
from ingot.tokenizers.tokenizer import Tokenizer
from tests.registry.models import a_model


class Server:
    """Stands for the server; notes the command that it was started by and what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.command: list[str] = []
        self.asked: dict[str, Any] = {}
        monkeypatch.setattr(ask, "running_server", self.run)
        monkeypatch.setattr(ask, "ask", self.answer)

    @contextlib.contextmanager
    def run(self, command: Sequence[str]) -> Iterator[str]:
        self.command = list(command)
        yield "http://server"

    def answer(
        self, url: str, route: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Any:
        self.asked = dict(body)
        return {"choices": [{"text": "lazy dog"}]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(
        "name: r\ndata: {train: [{source: a.jsonl}]}\nserve: {max_batch: 2}\n"
    )
    return Server(monkeypatch)


def written(arguments: Sequence[str]) -> Recipe:
    """The recipe of a run, in its folder as `perform` puts it there, with a model."""
    recipe = read_recipe(arguments)
    write_atomic(recipe.folder.recipe, dump_recipe(recipe))
    a_model(recipe.folder.model, "a")
    return recipe


@pytest.mark.parametrize(
    "arguments",
    [
        ["r.yaml", "serve.max_queue=3", "train.steps=1"],
        ["train.steps=1", "serve.max_queue=3", "r.yaml"],
        ["serve.max_queue=3", "r.yaml", "train.steps=1", "--debug"],
    ],
)
def test_overrides_may_come_first(server: Server, arguments: list[str]) -> None:
    recipe = written([argument for argument in arguments if argument != "--debug"])
    ask.serve_and_query(recipe, arguments)
    options = ["--debug"] if "--debug" in arguments else []
    assert server.command[-3 - len(options) :] == [
        "serve",
        "runs/r/recipe.yaml",
        "serve.port=0",
        *options,
    ]
    found = find_target(server.command[-2 - len(options)], ["serve.port=0"])
    assert (found.name, found.folder) == ("r", Path("runs/r/model"))
    assert found.recipe.serve == recipe.serve.model_copy(update={"port": 0})
    assert (found.recipe.serve.max_queue, found.recipe.serve.max_batch) == (3, 2)


def test_the_model_that_was_measured_and_registered_is_asked(server: Server) -> None:
    a_model(Path("runs/other/model"), "b")
    for given in ("runs/other", "runs/other/model"):
        recipe = written(["r.yaml", f"evaluate.model={given}", "serve.max_queue=3"])
        ask.serve_and_query(recipe, ["r.yaml"])
        target, *settings = server.command[server.command.index("serve") + 1 :]
        found = find_target(target, settings)
        assert (found.name, found.folder) == ("model", Path("runs/other/model"))
        assert found.recipe.serve == recipe.serve.model_copy(update={"port": 0})
        assert server.asked["model"] == found.name


def test_no_more_is_asked_for_than_the_server_gives(server: Server) -> None:
    ask.serve_and_query(written(["r.yaml", "serve.max_tokens=8"]), ["r.yaml", "serve.max_tokens=8"])
    assert server.asked["max_tokens"] == 8
    ask.serve_and_query(written(["r.yaml"]), ["r.yaml"])
    assert server.asked["max_tokens"] == 64


def test_a_model_of_chats_is_asked_as_in_a_chat(server: Server) -> None:
    """The last answer through the server, and the samples before it."""
    recipe = written(["r.yaml", "objective.kind=sft"])
    route, body = ask._serving_request(recipe, recipe.name)
    assert route == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "What can you do?"}]
    tokenizer = train_bpe(["the quick brown fox"] * 20, 300)
    assert encode_sample(tokenizer, "fox", recipe) == tokenizer.encode_prompt("fox"), "no template"
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
    chats = Tokenizer({**tokenizer.files, "chat_template.jinja": template})
    assert chats.decode(encode_sample(chats, "fox", recipe)) == "user: fox"
    assert encode_sample(chats, "fox", written(["r.yaml"])) == chats.encode_prompt("fox")


@pytest.mark.parametrize(
    ("scores", "told"),
    [({"bad": 0.25, "good": 0.75}, "good"), ({"good": -1.5}, "-1.5000")],
)
def test_a_classifiers_answer_is_its_label_and_a_reward_models_its_score(
    scores: dict[str, float], told: str
) -> None:
    answer = {"predictions": [{"label": "good", "scores": scores}]}
    assert ask._parse_answer(answer) == (told, {"scores": scores})


@pytest.mark.parametrize(("kind", "between"), [("pretrain", ""), ("sft", "\n")])
def test_a_chats_answer_stands_below_its_prompt(server: Server, kind: str, between: str) -> None:
    recipe = written(["r.yaml", f"objective.kind={kind}"])
    ask.serve_and_query(recipe, ["r.yaml"])
    assert str(ask._answer_panel(recipe).renderable) == f"{recipe.first_prompt}{between}lazy dog"
