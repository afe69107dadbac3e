"""What can be known is told before the first step: all of it at once, each with its line."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from ingot.base.errors import WrongInput
from ingot.base.remote.service import EMULATOR
from ingot.base.reports import begin_record
from ingot.cli.check import sources as check_sources
from ingot.cli.check import training as check_training
from ingot.cli.check.recipe import ALL, check, findings
from ingot.cli.verbs import STAMPS
from ingot.config.load import read_with_origins
from ingot.config.models.presets import preset
from ingot.config.values import Findings
from ingot.pipeline.local import run
from ingot.tokenizers.bpe import train_bpe
from tests.cli.commands import ingot as command
from tests.data.sources.test_gs import Server
from tests.small import TINY_MODEL

GOOD: dict[str, Any] = {
    "name": "checked",
    "data": {"train": [{"source": "texts.jsonl"}], "seq_len": 64},
    "model": {"source": "preset:llama-3m"},
    "train": {"steps": 2, "global_batch": 4},
}
CHATS = "data.train=[{source: chats.jsonl}]"
CLOUD = (
    "registry.kind=vertex",
    "cloud={bucket: buck, project: p, repository: r}",
    "data.train=[{source: gs://buck/x.jsonl}]",
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for service in ("HF_ENDPOINT", EMULATOR):
        monkeypatch.setenv(service, "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(check_sources, "LOOK_S", 100.0)  # on a busy machine, too
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(GOOD, sort_keys=False))
    lines = [json.dumps({"text": f"text {number}"}) for number in range(5)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}))
    (tmp_path / "switch").mkdir()
    (tmp_path / "voxtral").mkdir()
    for name, kind in (("switch", "switch_transformers"), ("voxtral", "voxtral")):
        values = {"model_type": kind, "is_encoder_decoder": True}
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    return tmp_path


def found(*overrides: str, verbs: tuple[str, ...] | None = None, **how: Any) -> Findings:
    recipe, values = read_with_origins(["recipe.yaml", *overrides])
    return findings(recipe, values, *([verbs] if verbs else []), **how)


def test_nothing_is_wrong_with_what_works(place: Path) -> None:
    assert (found().wrong, found().unknown) == ([], [])
    assert found("tokenizer.vocab_size=4096").wrong == [], "a preset takes the vocabulary's size"


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "preset": (("model.source=preset:lama",), "model.source preset:lama is unknown; did you mean"),
    "bare preset": (("model.source=llama-6m",), "did you mean preset:llama-6m?"),
    "path": (("model.source=nosuch",), "model.source nosuch is neither a folder nor preset"),
    "hub name": (("model.source=a/b",), "write hf:a/b for a model of the hub"),
    "no model folder": (("model.source=.",), "is not a model folder (config.json is missing)"),
    "configuration": (("model.config={hiden_size: 3}",), "model.config: hiden_size is not in"),
    "type": (("model.source=voxtral", "objective.kind=seq2seq"), "it hears, and only text is"),
    "unproved": (
        ("model.source=switch", "objective.kind=seq2seq"),
        "model_type `switch_transformers` is not proved: transformers builds it",
    ),
    "decoder type": (("model.config={model_type: gpt9}",), "model_type `gpt9` is not supported"),
    "positions": (("data.seq_len=4096",), "data.seq_len 4096 exceeds the model's 1024 positions"),
    "weights": (("model.init=weights",), "model.init weights: preset:llama-3m is a preset"),
    "adapter": (("model.lora={}",), "model.lora trains an adapter of weights that are kept"),
    "own model": (("model.source=runs/checked",), "runs/checked is what this run exports; give"),
    "own teacher": (
        ("objective={kind: distill, teacher: ./runs/checked/model}",),
        "objective.teacher ./runs/checked/model is what this run exports; give the recipe another",
    ),
    "own adapter": (
        ("model={source: voxtral, lora: {adapter: runs/checked/adapter}}",),
        "model.lora.adapter runs/checked/adapter is what this run exports; give",
    ),
    "vocabulary": (
        ("model.config={vocab_size: 300}", "tokenizer.vocab_size=400"),
        "tokenizer.vocab_size has 400 ids, model.source preset:llama-3m only 300",
    ),
    "degrees": (("parallel.tensor=3", "launch.processes=4"), "parallel.tensor 3 takes 3 processes"),
    "heads": (("parallel.tensor=8", "launch.processes=8"), "does not divide the model's"),
    "stages": (("parallel.pipeline=4", "launch.processes=4"), "the model has only 3 layers"),
    "batch": (("train.global_batch=3", "launch.processes=2"), "train.global_batch 3 does not"),
    "micro-batch": (
        ("train.micro_batch=3", "parallel.pipeline=2", "launch.processes=2"),
        "train.micro_batch 3 does not divide the 4 rows",
    ),
    "source": (("data.train.0.source=no/*.jsonl",), "data.train.0.source no/*.jsonl: no such file"),
    "column": (("data.train.0.text=body",), "texts.jsonl:1 has no column `body`; it has text"),
    "kind of data": (("objective.kind=sft", "tokenizer.template=chatml"), "has no chat"),
    "template": (("tokenizer.template=chatml2",), "tokenizer.template chatml2 is neither"),
    "tokenizer": (("tokenizer.source=nosuch",), "tokenizer.source nosuch does not exist"),
    "teacher": (
        ("objective={kind: distill, teacher: nosuch}",),
        "objective.teacher nosuch is neither a folder",
    ),
    "start": (("train.start_from=nosuch",), "train.start_from nosuch does not exist"),
    "items": (
        ("evaluate.tasks=[{kind: choice, source: nosuch.jsonl}]",),
        "evaluate.tasks, choice.source nosuch.jsonl: no such file",
    ),
    "columns of items": (
        ("evaluate.tasks=[{kind: choice, source: texts.jsonl}]",),
        "has no column `question`; it has text: set evaluate.tasks, choice.columns",
    ),
    "task for the model": (
        ("evaluate.tasks=[{kind: classification}]",),
        "classification is for encoder models",
    ),
    "documents of another task": (
        ("objective={kind: classify, labels: [a, b]}", "evaluate.tasks=[{kind: preference}]"),
        "preference is measured on preference documents, and objective.kind classify has labelled",
    ),
    "references of plain texts": (
        ("evaluate.tasks=[{kind: rouge}]",),
        "has text documents; remove the task, or give it a `source`",
    ),
    "answers that nothing judges": (
        (CHATS, "objective.kind=sft", "evaluate.tasks=[{kind: reward}]"),
        "evaluate.tasks, reward: there is no reward; set its `rewards`",
    ),
    "beams of a decoder": (
        ("evaluate.tasks=[{kind: rouge, source: texts.jsonl, beams: 4}]",),
        "beams 4 is for seq2seq models, and objective.kind pretrain trains a decoder",
    ),
    "compressed ids": (
        (
            'data.train=[{source: texts.jsonl}, {source: "megatron:old"}]',
            "evaluate.tasks=[{kind: loss, baselines: [gzip, bigram]}]",
        ),
        "gzip compress held-out texts, and megatron:",
    ),
    "evaluated model": (("evaluate.model=nosuch",), "evaluate.model nosuch is neither"),
    "gate of another figure": (
        ("gate.metric=loss/bits_per_bite",),
        "gate.metric loss/bits_per_bite is not one of loss/loss, loss/perplexity,",
    ),
    "gate of other documents": (
        ("gate.metric=[loss/accuracy, loss/loss]",),
        "gate.metric loss/accuracy is not one of loss/loss, loss/perplexity, loss/bits_per_byte;",
    ),
    "gate of a task's name": (
        (
            "data.train=[{source: texts.jsonl}, {source: pairs.jsonl}]",
            "objective={kind: classify, labels: [a, b]}",
            "gate.metric=loss/accuracy",
        ),
        "gate.metric loss/accuracy is not one of loss/loss;",
    ),
    "gate of one source alone": (
        ("objective={kind: classify, labels: [a, b]}", "gate.metric=loss/texts.jsonl"),
        "gate.metric loss/texts.jsonl is not one of loss/loss;",
    ),
    "gate of a reward": (
        (
            CHATS,
            "objective={kind: grpo, rewards: [{kind: exact}]}",
            "train.global_batch=8",
            "gate.metric=reward/exact",
        ),
        "gate.metric reward/exact is not one of reward/mean, reward/finished, reward/failed;",
    ),
    "gate": (("gate.metric=rouge/rouge1",), "gate.metric rouge/rouge1 is measured by none of"),
    "no documents": (
        ("data.train=[]", "evaluate.tasks=[{kind: lm_eval, tasks: [a]}]"),
        "no source",
    ),
    "nothing held out": (("data.validation=null",), "evaluate.tasks is empty, and the loss needs"),
    "gate of nothing": (("data.validation=[]",), "gate.metric loss/bits_per_byte needs held-out"),
    "early stop on nothing": (
        ("data.validation.fraction=0", "train.evaluate_every=2", "train.early_stop={}"),
        "train.early_stop needs held-out documents",
    ),
    "best of nothing": (
        ("data.validation=[]", "train.evaluate_every=2", "checkpoint.best=loss"),
        "checkpoint.best needs held-out documents",
    ),
    "engine": (("serve={engine: vllm, python: nosuch}",), "serve.python nosuch cannot be run"),
    "nodes": (("launch.nodes=2",), "launch.nodes=2 and launch.kind=local"),
    "machine": (
        ("launch.kind=gce", "launch.machine.type=n1-standard-5", *CLOUD),
        "machine type n1-standard-5 is not known; the nearest is",
    ),
    "image": (("launch.kind=gce", "cloud={bucket: buck, project: p}"), "no container image for"),
    "bucket": (("launch.kind=gce",), "set cloud.bucket"),
    "hosts": (("launch.kind=ssh",), "launch.ssh.hosts"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_with_its_place(place: Path, what: str) -> None:
    overrides, message = WRONG[what]
    told = [line for line in found(*overrides).wrong if message in line]
    assert len(told) == 1, found(*overrides).wrong
    assert told[0].startswith(("recipe.yaml", "`")), "it begins with where that was set"


@pytest.mark.parametrize(
    "overrides",
    [
        ("evaluate.tasks=[{kind: lm_eval, tasks: [a]}]", "gate.metric=lm_eval/a.acc/x"),
        (
            "evaluate={model: other, tasks: [{kind: rouge, source: pairs.jsonl, beams: 4}]}",
            "gate.metric=rouge/rouge1",
        ),
        ("gate.metric=loss/bits_per_byte/texts.jsonl",),
        ("gate.metric=bits_per_byte/texts.jsonl",),
        (
            "data.train=[{source: texts.jsonl}, {source: pairs.jsonl}]",
            "objective={kind: classify, labels: [a, b]}",
            "gate.metric=loss/pairs.jsonl",
        ),
        ("evaluate.tasks=[{kind: lm_eval, tasks: [team/qa]}]", "gate.metric=team/qa.acc"),
        (
            "objective={kind: classify, labels: [and/or, b]}",
            "gate.metric=f1_and/or",
        ),
        ("gate.metric=accuracy",),
        ("evaluate.tasks=[{kind: reward}]", "gate.metric=loss/accuracy", "gate.override=deploy"),
    ],
    ids=[
        "of another package",
        "of another model",
        "of a source",
        "of a source, a tail",
        "of a source, a tail like a task",
        "of another package, a tail",
        "a tail of a class",
        "a tail",
        "overridden",
    ],
)
def test_a_gate_that_may_find_its_metric_is_not_refused(
    place: Path, overrides: tuple[str, ...]
) -> None:
    verbs = ("gate",) if "gate.override=deploy" in overrides else ("evaluate", "gate")
    told = found(*overrides, verbs=verbs).wrong
    refusals = ("is not one of", "is measured by none", "is for seq2seq models")
    assert not [line for line in told if any(words in line for words in refusals)], told


def test_a_task_is_one_for_the_model_that_is_evaluated(place: Path) -> None:
    """That its kind is another was told once the training before it was paid for."""
    write_model(place, "encoder", architectures=["BertForSequenceClassification"])
    write_model(place, "writer", is_encoder_decoder=True)
    write_model(place, "decoder")
    (place / "adapter").mkdir()
    (place / "adapter" / "adapter_config.json").write_text("{}")
    beams = "{kind: rouge, source: pairs.jsonl, beams: 2}"
    choice = "{kind: choice, source: items.jsonl}"
    refusal = "as it is set here, cannot be measured on evaluate.model"
    for model, tasks, count in (
        ("encoder", choice, 1),
        ("encoder", "{kind: loss}", 1),
        ("decoder", beams, 1),
        ("writer", beams, 0),
        ("decoder", choice, 0),
        ("adapter", choice, 0),
    ):
        wrong = found(f"evaluate={{model: {model}, tasks: [{tasks}]}}").wrong
        lines = [line for line in wrong if "evaluate.model" in line or "config.json" in line]
        assert [refusal in line for line in lines] == [True] * count, (model, tasks, wrong)
    wrong = found("evaluate={model: encoder, prompts: [a]}").wrong
    assert "evaluate.prompts are for models that write" in wrong[0], wrong


def test_a_task_that_is_watched_is_checked_before_training(place: Path) -> None:
    """On the model that is trained, whichever one is evaluated later."""
    other = (CHATS, "objective.kind=sft", "evaluate={model: other, tasks: [{kind: reward}]}")
    watched = (*other, "train={evaluate_every: 1, evaluate_tasks: [reward]}")
    for overrides, count in ((other, 0), (watched, 1)):
        told = found(*overrides, verbs=("train",)).wrong
        assert len([line for line in told if "there is no reward" in line]) == count, told


def test_all_is_told_at_once_by_line(place: Path) -> None:
    values = yaml.safe_load((place / "recipe.yaml").read_text())
    values["data"]["train"] += [{"source": "nosuch.jsonl"}]
    values["model"]["source"] = "preset:llama-3mm"
    values["gate"] = {"metric": "x/y"}
    (place / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    lines = (place / "recipe.yaml").read_text().splitlines()
    marks = ("nosuch.jsonl", "llama-3mm", "x/y")
    numbers = {mark: n for n, line in enumerate(lines, 1) for mark in marks if mark in line}
    done = command("run", "recipe.yaml", "train.global_batch=5", "launch.processes=2", cwd=place)
    assert done.returncode == 2
    for mark, number in numbers.items():
        assert any(
            f"recipe.yaml:{number}: " in line and mark in line for line in done.stderr.splitlines()
        ), done.stderr
    assert "`train.global_batch=5` on the command line: train.global_batch 5" in done.stderr
    assert not (place / "runs").exists(), "nothing was begun"


@pytest.mark.drawn("checks of a run", keep=2)
def test_a_machine_that_no_server_can_have_is_told_before_anything_is_sent(place: Path) -> None:
    submit = ("submit", "recipe.yaml", "--dry-run", *CLOUD)
    refused = command(*submit, "serve.machine.type=n1-standard-5", cwd=place)
    assert (refused.returncode, "machine type n1-standard-5 is not known" in refused.stderr) == (
        2,
        True,
    ), refused.stderr
    old = ("accelerator: nvidia-tesla-k80", "accelerators: 1", "type: n1-standard-4")
    refused = command(*submit, f"serve.machine={{{', '.join(old)}}}", cwd=place)
    assert "accelerator nvidia-tesla-k80 is not known" in refused.stderr


def test_what_cannot_be_asked_is_not_passed_in_silence(place: Path) -> None:
    given = found("model.source=hf:org/model", "data.train=[{source: 'hf:org/texts'}]")
    assert given.wrong == []
    assert any("hf:org/model cannot be fetched" in line for line in given.unknown)
    assert any("hf:org/texts cannot be reached" in line for line in given.unknown)
    task = "evaluate.tasks=[{kind: hellaswag}]"
    assert any("hf:Rowan/hellaswag cannot be reached" in line for line in found(task).unknown)


@pytest.mark.drawn("checks before a launch")
def test_the_first_records_in_a_bucket_are_looked_at(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server({"in/x.jsonl": (place / "texts.jsonl").read_bytes()})
    monkeypatch.setenv(EMULATOR, server.address)
    bucket = "gs://bucket/in"
    try:
        good, column, absent = (
            found(f"data.train=[{{source: {bucket}/{source}}}]", verbs=("ingest",))
            for source in ("x.jsonl", "x.jsonl, text: body", "no.jsonl")
        )
        tasks = f"evaluate.tasks=[{{kind: choice, source: {bucket}/x.jsonl}}]"
        items = found(tasks, verbs=("evaluate",))
    finally:
        server.server_close()
    assert (good.wrong, good.unknown) == ([], [])
    (told,) = column.wrong
    assert told.startswith("`data.train=")
    assert "/in/x.jsonl:1 has no column `body`; it has text" in told
    assert "no.jsonl: no such file" in absent.wrong[0]
    assert "has no column `question`; it has text" in items.wrong[0]
    nobody = found(f"data.train=[{{source: {bucket}/x.jsonl}}]", verbs=("ingest",))
    assert nobody.wrong == []
    assert "the service cannot be reached from here" in nobody.unknown[0]


def test_one_that_gives_no_answer_is_not_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_sources, "LOOK_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv(EMULATOR, f"http://127.0.0.1:{mute.getsockname()[1]}")
        (told,) = found("data.train=[{source: gs://buck/x.jsonl}]", verbs=("ingest",)).unknown
    assert "the records of gs://buck/x.jsonl: none came within 0.2 s" in told


def write_model(place: Path, name: str, **config: Any) -> str:
    (place / name).mkdir()
    (place / name / "config.json").write_text(json.dumps(config))
    return f"model.source={name}"


def test_positions_of_encoders_and_of_what_writes(place: Path) -> None:
    roberta = {"model_type": "roberta", "max_position_embeddings": 66, "pad_token_id": 1}
    bart = {"model_type": "bart", "is_encoder_decoder": True, "max_position_embeddings": 64}
    labelled = ("objective={kind: classify, labels: [a, b]}", "data.train=[]")
    pairs = ("objective.kind=seq2seq", "data.target_len=65")

    def positions(*overrides: str) -> list[str]:
        told = found(*overrides, verbs=("train",)).wrong
        return [line for line in told if "positions" in line]

    encoder, writer = write_model(place, "roberta", **roberta), write_model(place, "bart", **bart)
    assert positions(encoder, *labelled[:1]) == []
    (told,) = positions(encoder, labelled[0], "data.seq_len=65")
    assert "data.seq_len 65 exceeds the model's 64 positions" in told
    (told,) = positions(writer, *pairs)
    assert "data.target_len 65 exceeds the model's 64 positions" in told
    assert positions("model.source=preset:t5-mini", "objective.kind=seq2seq") == [], "T5 has none"


def test_positions_that_were_learned_cannot_become_more(place: Path) -> None:
    """Else it is told by `train`, after all data are prepared."""
    labelled = "objective={kind: classify, labels: [a, b]}"
    gpt2 = {"model_type": "gpt2", "n_positions": 64}
    llama = {"model_type": "llama", "max_position_embeddings": 64}
    deberta = {"model_type": "deberta-v2", "max_position_embeddings": 64}
    learned = write_model(place, "bert", model_type="bert", max_position_embeddings=64)

    def told(*overrides: str) -> list[str]:
        lines = found(*overrides, labelled, verbs=("train",)).wrong
        return [line for line in lines if "positions" in line]

    (line,) = told(learned, "data.seq_len=65")
    assert line.endswith("64 positions; lower data.seq_len"), "and no more than that"
    more = "model.config.max_position_embeddings=128"
    (line,) = told(learned, "data.seq_len=65", more)
    assert (
        "max_position_embeddings 128: the weights of bert have 64 positions and no others" in line
    )
    assert told(learned, "data.seq_len=65", more, "model.init=random") == []
    (line,) = told(learned, "data.seq_len=65", "model.init=random")
    assert line.endswith("or set model.config.max_position_embeddings")
    (line,) = told(write_model(place, "gpt2", **gpt2), "model.config.n_positions=128")
    assert "model.config.n_positions 128: the weights of gpt2 have 64" in line
    for name, values in (
        ("rotary", llama),
        ("relative", deberta | {"position_biased_input": False}),
    ):
        source = write_model(place, name, **values)
        (line,) = told(source, "data.seq_len=65")
        assert line.endswith("or set model.config.max_position_embeddings"), name
        assert told(source, "data.seq_len=65", more) == [], name
    distances = deberta | {"position_biased_input": False, "relative_attention": True}
    buckets = write_model(place, "buckets", **distances, position_buckets=8)
    assert told(buckets, "data.seq_len=65", more) == []
    for name, values in (
        ("distances", distances | {"position_buckets": -1}),
        ("stored", {"model_type": "roformer", "max_position_embeddings": 64}),
    ):
        (line,) = told(write_model(place, name, **values), more)
        assert f"the weights of {name} have 64 positions and no others" in line


def test_positions_are_called_as_the_model_calls_them(place: Path) -> None:
    """And are known before all data are prepared, whatever they are called."""
    read, written = "max_encoder_position_embeddings", "max_decoder_position_embeddings"

    def told(*overrides: str) -> list[str]:
        lines = found(*overrides, "model.init=random", verbs=("train",)).wrong
        return [line for line in lines if "positions" in line]

    labelled = "objective={kind: classify, labels: [a, b]}"
    gpt2 = write_model(place, "gpt2", model_type="gpt2", n_positions=64)
    (line,) = told(gpt2, labelled, "data.seq_len=65")
    assert line.endswith("64 positions; lower data.seq_len or set model.config.n_positions")
    pairs = (
        write_model(place, "led", model_type="led", **{read: 64, written: 32}),
        "objective.kind=seq2seq",
    )
    (line,) = told(*pairs, "data.seq_len=65", "data.target_len=32")
    assert line.endswith("64 positions; lower data.seq_len or set model.config." + read)
    (line,) = told(*pairs, "data.seq_len=64", "data.target_len=33")
    assert line.endswith("32 positions; lower data.target_len or set model.config." + written)
    assert told(*pairs, "data.seq_len=64", "data.target_len=32") == []
    t5 = write_model(place, "t5", model_type="t5", n_positions=8, is_encoder_decoder=True)
    assert told(t5, *pairs[1:], "data.seq_len=64", "data.target_len=32") == [], "relative ones"


def test_a_teacher_and_a_reference_must_fit(place: Path, prepared_root: Path) -> None:
    source = TINY_MODEL | {"model_type": "llama", "max_position_embeddings": 32}
    write_model(place, "teacher", vocab_size=320, **source)
    write_model(place, "student", vocab_size=300, **source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(prepared_root / "runs/small/data/tokenizer" / name, place / "teacher")
    distill = "objective={kind: distill, teacher: teacher}"
    told = found(distill, "model.source=student", verbs=("train",)).wrong
    assert any(
        "teacher has a vocabulary of 320 tokens, the student student one of 300" in line
        for line in told
    )
    assert any(
        "data.seq_len 64 exceeds the 32 positions of objective.teacher" in line for line in told
    )
    told = found(distill, "data.seq_len=32", "tokenizer.vocab_size=400", verbs=("train",)).wrong
    assert any("a tokenizer of 320 ids, and one of 400 would be trained" in line for line in told)
    fitting = ("data.seq_len=32", "tokenizer.source=teacher")
    assert found(distill, *fitting, verbs=("train",)).wrong == []
    shutil.copytree(place / "teacher", place / "other")
    own = json.loads((place / "other" / "tokenizer.json").read_text())
    ids = own["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (place / "other" / "tokenizer.json").write_text(json.dumps(own))
    (told,) = found(distill, "data.seq_len=32", "tokenizer.source=other", verbs=("train",)).wrong
    assert "is not the student's, so their distributions are over other tokens" in told
    prefer = ("objective={kind: dpo, reference: teacher}", "tokenizer.template=alpaca")
    told = found(*prefer, "tokenizer.source=other", verbs=("train",)).wrong
    assert any("objective.reference teacher reads the id" in line for line in told)
    told = found(*prefer, "tokenizer.source=teacher", verbs=("train",)).wrong
    assert not any("objective.reference" in line for line in told)


def test_float8_is_asked_of_the_machine_that_trains(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*overrides: str) -> list[str]:
        lines = found("precision.float8=rowwise", *overrides, verbs=("train",)).wrong
        return [line for line in lines if "float8" in line and "torchao" not in line]

    monkeypatch.setattr(check_training, "_best_capability", lambda: 0.0)
    assert "8.9 or more (Ada, Hopper and newer), and this machine has no GPU" in told()[0]
    monkeypatch.setattr(check_training, "_best_capability", lambda: 8.0)
    assert "this machine has one of 8.0" in told()[0]
    monkeypatch.setattr(check_training, "_best_capability", lambda: 9.0)
    assert told() == []
    assert "goes with precision.compute bf16, not fp32" in told("precision.compute=fp32")[0]
    assert "data.seq_len makes 63" in told("data.seq_len=63", "train.micro_batch=1")[0]
    gce = ("launch.kind=gce", *CLOUD)
    assert "have nvidia-tesla-a100" in told(*gce, "launch.machine.type=a2-highgpu-1g")[0]
    assert told(*gce, "launch.machine.type=a3-highgpu-8g") == []


@pytest.mark.parametrize(
    ("overrides", "weights"),
    [
        (("model.source=preset:llama-3m",), "4 M weights"),
        (("model.source=big", "model.lora={}"), "8,030 M weights take 17.6 GB"),
        (("model.source=big", "model.lora={}", "precision.export=fp32"), "take 33.6 GB"),
        (("model.source=big", "model.lora.targets=[q_proj]"), "8,030 M weights take 16.1 GB"),
        (("train.evaluate_every=1", "checkpoint.best=loss"), "3 + 1 checkpoints"),
        (("model.source=preset:t5-mini", "objective.kind=seq2seq"), "M weights"),
        (("model.source=preset:bert-mini", "objective={kind: classify, labels: [a, b]}"), "M weig"),
    ],
)
def test_room_on_the_disk_is_asked_for(
    place: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], weights: str
) -> None:
    write_model(place, "big", **preset("llama-8b"))
    usage = shutil.disk_usage(place)._replace(free=10**7)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    (line,) = [line for line in found(*overrides, verbs=("train",)).wrong if "free" in line]
    assert "output runs has 0.0 GB free, and " in line
    assert " + 1 checkpoints and the export of " in line
    assert weights in line


@pytest.mark.drawn("checks before a launch")
def test_what_does_not_validate_is_told_with_all_else(place: Path) -> None:
    wrong = ("train.steps=-1", "model.source=nosuch", "data.train.0.source=no.jsonl", "sead=3")
    done = command("run", "recipe.yaml", *wrong, "gate.metric=x/y", cwd=place)
    assert done.returncode == 2
    for told in (
        "`train.steps` is -1",
        "unknown knob `sead`",
        "model.source nosuch is neither",
        "data.train.0.source no.jsonl: no such file",
        "gate.metric x/y is measured by none",
    ):
        assert told in done.stderr
    wrong = ("model.sourse=nosuch", "data.train.0.text=b", "data.seq_len=2000")
    done = command("run", "recipe.yaml", *wrong, cwd=place)
    assert "unknown knob `model.sourse`" in done.stderr
    assert "has no column `b`" in done.stderr
    assert "positions" not in done.stderr, "nothing is told of a model that stands for another"


@pytest.mark.drawn("checks of a run", keep=2)
def test_a_source_that_is_gone_since_is_told_with_all_else(place: Path) -> None:
    assert command("ingest", "recipe.yaml", cwd=place).returncode == 0
    (place / "texts.jsonl").unlink()
    done = command("run", "recipe.yaml", "gate.metric=x/y", cwd=place)
    assert "texts.jsonl: no such file; what was read of it before is used" in done.stderr
    assert "gate.metric x/y is measured by none" in done.stderr
    assert found(verbs=("prepare",)).wrong == [], "what was ingested is a copy"


def test_a_verb_is_asked_for_what_concerns_it(place: Path) -> None:
    nothing = ("model.source=nosuch", "gate.metric=x/y")
    assert found(*nothing, verbs=("ingest",)).wrong == []
    assert len(found(*nothing, verbs=("train",)).wrong) == 1


def test_data_that_are_not_current_are_told_before_machines_are_got(place: Path) -> None:
    recipe, _ = read_with_origins(["recipe.yaml"])
    begin_record(recipe.folder.steps, "prepare")
    for verb in ("train", "evaluate"):
        (wrong,) = found(verbs=(verb,)).wrong
        assert "`prepare` was begun in" in wrong
        assert "run `ingot prepare` again" in wrong
    assert found(verbs=("prepare", "train")).wrong == [], "it is made anew first"


@pytest.mark.drawn("checks before a launch")
def test_launch_tells_the_same(place: Path) -> None:
    """All at once, though it be a dry run."""
    wrong = ("train", "recipe.yaml", "model.source=nosuch", "launch.processes=3")
    for more in ([], ["--dry-run"]):
        refused = command("launch", *wrong, *more, cwd=place)
        assert refused.returncode == 2
        assert "`model.source=nosuch` on the command line" in refused.stderr
        assert "train.global_batch 4 does not divide over 3 processes" in refused.stderr
        assert refused.stdout == ""
    assert not (place / "runs").exists()


@pytest.mark.drawn("checks of a run", keep=2)
def test_a_dry_run_only_notes_what_the_place_lacks(place: Path) -> None:
    slurm = ("launch", "train", "recipe.yaml", "launch.kind=slurm")
    noted = command(*slurm, "--dry-run", cwd=place, PATH="")
    assert noted.returncode == 0, noted.stderr
    assert "note: as things are it could not be started: " in noted.stderr
    assert "sbatch" in noted.stderr
    assert "#SBATCH" in noted.stdout
    refused = command(*slurm, cwd=place, PATH="")
    assert refused.returncode == 2
    assert "sbatch" in refused.stderr


@pytest.mark.drawn("checks of a run", keep=2)
def test_a_run_checks_once(place: Path) -> None:
    recipe, asked = read_with_origins(["recipe.yaml"])[0], list[list[str]]()

    def refuse(verbs: Sequence[str]) -> None:
        asked.append(list(verbs))
        raise WrongInput("refused")

    with pytest.raises(WrongInput, match="refused"):
        run(recipe, ["recipe.yaml"], STAMPS, before=refuse)
    assert not (place / "runs").exists(), "a refusal leaves nothing behind"
    assert command("ingest", "recipe.yaml", cwd=place).returncode == 0
    with pytest.raises(WrongInput, match="refused"):
        run(recipe, ["recipe.yaml"], STAMPS, before=refuse)
    assert asked == [list(ALL), list(ALL[1:])], "once each, for what is to be done"


@pytest.mark.drawn("checks of a run", keep=2)
def test_what_was_checked_is_not_checked_again(place: Path) -> None:
    """`ingot launch run` checks, and starts `ingot run --checked`."""
    wrong = ("run", "recipe.yaml", "data.train.0.source=missing.jsonl", "gate.metric=x/y")
    assert "gate.metric x/y is measured by none" in command(*wrong, cwd=place).stderr
    assert "gate.metric" not in command(*wrong, "--checked", cwd=place).stderr


def test_it_is_refused_in_words_of_all(place: Path) -> None:
    recipe, values = read_with_origins(["recipe.yaml", "model.source=a/b", "gate.metric=x/y"])
    with pytest.raises(WrongInput, match=r"(?s)model\.source a/b.*\n.*gate\.metric x/y"):
        check(recipe, values)


def test_it_imports_no_torch(place: Path) -> None:
    code = (
        "import sys; from ingot.config.load import read_with_origins;"
        " from ingot.cli.check.recipe import findings;"
        " recipe, values = read_with_origins(['recipe.yaml', 'registry.kind=vertex']);"
        " findings(recipe, values); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_masks_need_a_token_and_a_model_that_reads_both_sides(place: Path) -> None:
    train_bpe(["copper rings"] * 5, 300).save(place / "tokenizer")
    knobs = ("objective.kind=mlm", "model.source=preset:bert-mini", "model.config={}")
    assert found(*knobs).wrong == [], "a tokenizer that is trained gets one"
    refused = found(*knobs, "tokenizer={source: tokenizer}").wrong
    assert len(refused) == 1
    assert "has no mask token" in refused[0]
    (decoder,) = found("objective.kind=mlm").wrong
    assert "model_type `llama` is not supported as a masked language model" in decoder


def test_spans_need_sentinels_and_a_model_that_writes(place: Path) -> None:
    train_bpe(["copper rings"] * 5, 300).save(place / "tokenizer")
    knobs = ("objective.kind=span_corruption", "model.source=preset:t5-mini", "model.config={}")
    assert found(*knobs).wrong == [], "a tokenizer that is trained gets them"
    (refused,) = found(*knobs, "tokenizer={source: tokenizer}").wrong
    assert "has no sentinels (<extra_id_0>" in refused
    (decoder,) = found("objective.kind=span_corruption").wrong
    assert "model_type `llama` is not supported as a sequence-to-sequence model" in decoder


def test_a_classifier_that_is_read_at_the_end_of_a_text_needs_one(place: Path) -> None:
    """Else it is told by `train`, after all data are prepared."""
    train_bpe(["some text"], 280).save(place / "endless")
    train_bpe(["some text"], 280, ends=True).save(place / "ended")
    classify = "objective={kind: classify, labels: [a, b]}"
    for name, model, count in (
        ("endless", "t5-mini", 1),
        ("ended", "t5-mini", 0),
        ("endless", "bert-mini", 0),
    ):
        given = (classify, f"model.source=preset:{model}", f"tokenizer.source={name}")
        told = [line for line in found(*given, verbs=("prepare",)).wrong if "at its EOS" in line]
        assert len(told) == count, told
