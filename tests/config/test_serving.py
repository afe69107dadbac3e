"""What engines and containers are started with: golden texts, counts of accelerators, each engine's
words for a question.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.cloud.machines import MACHINES
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.config.sections.deployment import Serve
from ingot.config.sections.launch import Machine
from ingot.config.serving import (
    answered,
    artifact_of,
    container_of,
    dtype_on,
    question,
    shell,
    triton_name,
    triton_repository,
    vllm_arguments,
)
from tests import golden


def recipe(*settings: str) -> Recipe:
    return load_recipe(
        (),
        ["name=python-docs", "model.source=preset:llama-6m", "data.train=[{source: x}]", *settings],
        environ={},
        dotenv=None,
    )


def text(value: Any) -> str:
    return json.dumps(dataclasses.asdict(value), indent=1) + "\n"


@pytest.mark.parametrize(
    ("knob", "told"),
    [
        ({"prefix_cache_mb": 0}, "--no-enable-prefix-caching"),
        ({"eager": True}, "--enforce-eager"),
        ({"tool_call_parser": "hermes"}, "--enable-auto-tool-choice"),
    ],
)
def test_what_vllm_has_a_word_for_it_is_told(knob: dict[str, Any], told: str) -> None:
    def arguments(**knobs: Any) -> tuple[str, ...]:
        return vllm_arguments("m", "n", Serve(**knobs), host="h", port=1, dtype="auto")

    assert told in arguments(**knob)
    assert told not in arguments()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "native",
            (
                "serve.max_batch=16",
                "serve.any_template=true",
                "serve.api_key=env:KEY",
                "serve.machine.type=n1-standard-4",
            ),
        ),
        (
            "transformers",
            ("serve.engine=transformers", "serve.image=europe-docker.pkg.dev/p/r/own:1"),
        ),
        (
            "vllm",
            ("serve.engine=vllm", "serve.machine.type=g2-standard-24", "serve.max_tokens=256"),
        ),
        (
            "triton",
            (
                "serve.engine=triton",
                "serve.machine.accelerator=nvidia-tesla-t4",
                "serve.machine.accelerators=1",
                "registry.name=docs",
            ),
        ),
    ],
)
def test_containers(name: str, settings: tuple[str, ...]) -> None:
    golden.check(f"serving/container-{name}.json", text(container_of(recipe(*settings))))


@pytest.mark.parametrize("backend", ["python", "vllm"])
def test_repositories(backend: Any) -> None:
    serve = Serve(machine=Machine(type="a2-highgpu-2g"))
    files = triton_repository("python@v2", serve, 'gs://bucket/a "quoted" folder', backend)
    golden.check(
        f"serving/repository-{backend}.txt",
        "".join(f"==> {path} <==\n{content}" for path, content in files.items()),
    )


def test_only_triton_wants_more_than_the_model() -> None:
    assert artifact_of(recipe("serve.engine=vllm"), "gs://b/m") == {}
    files = artifact_of(
        recipe("serve.engine=triton", "serve.machine.type=g2-standard-12"), "gs://b/m"
    )
    assert list(files) == ["python-docs/config.pbtxt", "python-docs/1/model.json"]
    assert json.loads(files["python-docs/1/model.json"])["model"] == "gs://b/m"


def test_triton_is_given_what_vllm_takes_and_the_rest_is_refused() -> None:
    machine = Machine(type="g2-standard-12")

    def engine(**knobs: Any) -> dict[str, Any]:
        files = triton_repository("x", Serve(machine=machine, **knobs), "gs://b/m", "vllm")
        made: dict[str, Any] = json.loads(files["x/1/model.json"])
        return made

    plain = engine()
    assert engine(prefix_cache_mb=0) == {**plain, "enable_prefix_caching": False}
    assert engine(eager=True) == {**plain, "enforce_eager": True}
    triton = ("serve.engine=triton", "serve.machine.type=g2-standard-12")
    container_of(recipe(*triton, "serve.max_tokens=1024"))
    for knob in ("max_tokens=5", "max_queue=1", "tool_call_parser=hermes"):
        with pytest.raises(WrongInput, match=rf"serve\.{knob.replace('=', ' ')} is not heeded by"):
            container_of(recipe(*triton, f"serve.{knob}"))


def test_a_local_folder_is_not_streamed_from_a_bucket() -> None:
    files = triton_repository(
        "x", Serve(machine=Machine(type="g2-standard-12")), "/models/x", "vllm"
    )
    assert "load_format" not in json.loads(files["x/1/model.json"])


@pytest.mark.parametrize("engine", ["vllm", "triton"])
def test_a_machine_without_an_accelerator_is_refused(engine: str) -> None:
    with pytest.raises(
        WrongInput,
        match=(
            f"serve.engine {engine} needs an accelerator on an endpoint, and serve.machine.type"
            " n1-standard-8 has none; set"
        ),
    ):
        container_of(recipe(f"serve.engine={engine}"))


@pytest.mark.parametrize(
    ("machine", "count"),
    [
        ("g2-standard-4", 1),
        ("g2-standard-24", 2),
        ("g2-standard-96", 8),
        ("a2-highgpu-1g", 1),
        ("a3-highgpu-8g", 8),
        ("a2-megagpu-16g", 16),
        ("a2-ultragpu-4g-nolssd", 4),
    ],
)
def test_machines_that_bring_their_accelerators(machine: str, count: int) -> None:
    args = container_of(recipe("serve.engine=vllm", f"serve.machine.type={machine}")).args
    assert args[args.index("--tensor-parallel-size") + 1] == str(count)


def test_every_machine_with_gpus_is_counted_as_the_table_of_machines_counts_it() -> None:
    with_gpus = {
        name: machine.accelerators
        for name, machine in MACHINES.items()
        if machine.accelerators and not machine.is_tpu
    }
    told = {}
    for name in with_gpus:
        serve = Serve(engine="triton", machine=Machine(type=name))
        engine = json.loads(triton_repository("x", serve, "gs://b/m", "vllm")["x/1/model.json"])
        told[name] = engine["tensor_parallel_size"]
    assert told == with_gpus


@pytest.mark.parametrize(
    ("accelerator", "dtype"),
    [
        ("nvidia-tesla-t4", "half"),
        ("NVIDIA_TESLA_V100", "half"),
        ("nvidia-l4", "bfloat16"),
        ("nvidia-h100-80gb", "bfloat16"),
        (None, "bfloat16"),
    ],
)
def test_old_accelerators_compute_in_half(accelerator: str | None, dtype: str) -> None:
    assert dtype_on(Serve(machine=Machine(accelerator=accelerator))) == dtype
    assert dtype_on(Serve(machine=Machine(accelerator=accelerator), compute="fp32")) == "float32"


def test_a_key_is_in_no_argument_and_no_variable() -> None:
    made = container_of(
        recipe("serve.engine=vllm", "serve.machine.type=g2-standard-12", "serve.api_key=env:KEY")
    )
    assert "KEY" not in text(made).replace("api_key", "")
    assert not [
        word
        for word in vllm_arguments(
            "m", "n", Serve(api_key="env:KEY"), host="h", port=1, dtype="auto"
        )
        if "key" in word.lower()
    ]


def test_names_that_can_be_folders() -> None:
    assert triton_name("python@v2") == "python-v2"
    assert triton_name("a/b c") == "a-b-c"


def test_one_question_in_each_engines_words() -> None:
    assert question("native", "n", "p", 5) == {
        "instances": ["p"],
        "parameters": {"max_tokens": 5, "temperature": 0},
    }
    assert question("vllm", "n", "p", 5) == {
        "model": "n",
        "prompt": "p",
        "max_tokens": 5,
        "temperature": 0,
    }
    asked = question("triton", "n", "p", 5)
    assert (
        asked["text_input"],
        json.loads(asked["sampling_parameters"]),
        asked["exclude_input_in_output"],
    ) == ("p", {"max_tokens": 5, "temperature": 0}, True)


@pytest.mark.parametrize(
    ("engine", "answer"),
    [
        ("native", {"predictions": ["said"]}),
        ("vllm", {"choices": [{"text": "said"}]}),
        ("triton", {"text_output": "said"}),
        ("triton", {"text_output": ["said"]}),
    ],
)
def test_answers_are_read(engine: str, answer: Any) -> None:
    assert answered(engine, answer) == "said"
    for wrong in ({}, [], {"predictions": []}, {"choices": [{}]}, "text"):
        with pytest.raises(Failed, match=f"what answered is no {engine} server"):
            answered(engine, wrong)


def test_a_command_as_it_would_be_typed() -> None:
    assert shell(["a b", "c"], {"X": "/d:$PATH"}) == "X=\"/d:$PATH\" 'a b' c"
