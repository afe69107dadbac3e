"""A run on the hub: by the real client, to a hub on the loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ingot.base.errors import Failed, WrongInput
from ingot.base.hub import HubCommit, push_files
from ingot.base.reports import (
    EvaluationReport,
    Metric,
    PipelineStepRecord,
    read_report,
    write_record,
    write_report,
)
from ingot.base.runfolder import RunFolder, folder_lock
from ingot.config.models.content import content_record
from ingot.config.sections.deployment import MetricGate
from ingot.models.hf.tensorfile import TensorSpec, write_tensors
from ingot.registry.card import shown_source
from ingot.registry.decision import GATE, decision_record
from ingot.registry.gate import GateDecision, Verdict
from ingot.registry.hub import PushOptions, PushPlan, plan_push, push
from tests.cli.commands import ingot
from tests.lazy import lazy
from tests.registry.hub_server import Hub, opened

torch = lazy("torch")
MODEL = "5f51d95764202b04"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with opened(monkeypatch) as found:
        yield found


def exported(folder: Path, about: dict[str, Any], config: str, value: float = 1.0) -> None:
    """A folder as training exports it, weights included."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"model_type": "llama", "base_model_name_or_path": "org/base"}
    (folder / config).write_text(json.dumps(settings))
    if config != "config.json":
        (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    weights = torch.full((64, 64), value)
    name = "model" if config == "config.json" else "adapter_model"
    spec = {"w": TensorSpec((64, 64), torch.float32)}
    digests = write_tensors(folder / f"{name}.safetensors", spec, iter([("w", weights)]))
    made = {**about, "content": content_record(folder, digests)}
    (folder / "ingot.json").write_text(json.dumps(made))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """What a LoRA training and its evaluation leave behind, as far as a push reads it."""
    run = RunFolder(tmp_path / "runs/words")
    about = {"run": "words", "step": 1200, "seed": 3, "objective": "sft", "data": "d0d0"}
    about |= {"base": {"source": "hf:org/base", "model_hash": "ba5e"}}
    whole = {"ingot": "0.1.0", "model_hash": MODEL, "parameters": 4096, "export_type": "bf16"}
    exported(run.model, {**about, **whole}, "config.json")
    exported(run.adapter, about, "adapter_config.json", 0.5)
    metric = Metric(0.625, 0.5813, 0.6671, "higher", 480, "5e75")
    report = EvaluationReport(MODEL, "t", {"qa/accuracy": metric}, base={"qa/accuracy": metric})
    write_report(run.reports / "evaluate.json", report)
    knobs = {
        "seed": 3,
        "train.optimizer": {"kind": "adamw", "lr": 2e-4},
        "objective": {"kind": "sft"},
    }
    record = PipelineStepRecord(
        "train", "i", MODEL, 60.0, "1,200 steps in 1m", "w", {"knobs": knobs}
    )
    write_record(run.steps, record)
    write_record(
        run.steps, PipelineStepRecord("prepare", "i", "all", 1.0, "r", "w", parts={"train": "d0d0"})
    )
    run.columns.mkdir(parents=True)
    source = {"documents": 70, "bytes": 2_500_000, "tokens": 600_000}
    sources = [
        {"source": "hf:org/chats:en", **source},
        {"source": "/home/me/private/mine.jsonl", **source},
    ]
    (run.columns / "manifest.json").write_text(json.dumps({"splits": {"train": sources}}))
    return run


def planned(run: RunFolder, **options: Any) -> PushPlan:
    return plan_push(run, "hf:org/words", PushOptions(**options))


def decide(run: RunFolder, decision: Verdict, model: str = MODEL) -> None:
    report = replace(read_report(run.reports / "evaluate.json"), model_hash=model)
    made = GateDecision(decision, "worse by 0.1", (), MetricGate())
    (run.reports / GATE).write_text(json.dumps(decision_record(made, report, None)))


def test_a_model_goes_there_once_and_is_private(run: RunFolder, hub: Hub) -> None:
    (run.model / "evaluate.json").write_text("{}")
    made = push(planned(run, license="apache-2.0"))
    assert hub.repositories["org/words"]["private"] is True
    assert made.url == f"{hub.address}/org/words"
    assert made.new
    there = hub.files("org/words")
    assert there.keys() == {
        "config.json",
        "ingot.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
    }
    assert there["model.safetensors"] == (run.model / "model.safetensors").read_bytes()
    again = push(planned(run, license="apache-2.0"))
    assert (again.commit, again.new) == (made.commit, False)
    assert len(hub.sent) == 1


def test_only_what_was_checked_is_sent(run: RunFolder, hub: Hub) -> None:
    """Another training may have exported since, in the time that it takes to confirm or to send."""
    plan, about = planned(run), json.loads((run.model / "ingot.json").read_text())
    exported(run.model, about, "config.json", 2.0)
    with pytest.raises(Failed, match=r"changed since it was checked, and nothing was sent; push"):
        push(plan)
    plan = planned(run)
    with folder_lock(run.root), pytest.raises(Failed, match="is in use by process"):
        push(plan)
    assert hub.sent == []


def test_nobody_exports_while_a_model_is_sent(
    run: RunFolder, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where the folder cannot be locked, what was exported meanwhile is told."""
    plan = planned(run)

    def training(*given: Any, **how: Any) -> HubCommit:
        made = push_files(*given, **how)
        with folder_lock(run.root):
            exported(run.model, json.loads((run.model / "ingot.json").read_text()), "config.json")
        return made

    monkeypatch.setattr("ingot.registry.hub.push_files", training)
    with pytest.raises(Failed, match="is in use by process"):
        push(plan)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(Failed, match=r"while it was sent, and \S+/org/words may hold parts"):
        push(plan)


def test_an_upload_that_broke_off_goes_on(run: RunFolder, hub: Hub) -> None:
    hub.down = True
    with pytest.raises(Failed, match="the same command goes on with what is missing"):
        push(planned(run))
    assert not hub.files("org/words")
    hub.down = False
    push(planned(run))
    assert len(hub.sent) == 1, "the weights were there already"


def test_nothing_is_sent_to_a_repository_of_the_other_visibility(run: RunFolder, hub: Hub) -> None:
    hub.born_public = True
    with pytest.raises(WrongInput, match="hf:org/words is public; add --public"):
        push(planned(run))
    assert not hub.sent
    push(planned(run, public=True))
    hub.repositories["org/words"]["private"] = True
    with pytest.raises(WrongInput, match="is private; push without --public"):
        push(planned(run, public=True))


def test_files_of_an_earlier_push_that_a_loader_would_read_go(run: RunFolder, hub: Hub) -> None:
    push(planned(run, adapter=True))
    hub.files("org/words")["picture.png"] = b"somebody's"
    made = push(planned(run))
    assert made.removed == ["adapter_config.json", "adapter_model.safetensors"]
    assert "adapter_config.json" not in hub.files("org/words")
    assert hub.files("org/words")["picture.png"] == b"somebody's"


@pytest.mark.parametrize("token", [None, "hf_of_somebody_else"])
def test_without_a_token_that_may_write(
    run: RunFolder, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str | None
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(WrongInput, match="HF_TOKEN" if token is None else "may not write there"):
        push(planned(run))
    assert not hub.sent


def test_the_card_tells_what_the_run_recorded(run: RunFolder) -> None:
    decide(run, "deploy")
    mine = {"/home/me/private/mine.jsonl": "cc-by-4.0"}
    card = planned(run, license="My own terms", data_licenses=mine).card
    header = yaml.safe_load(card.split("---")[1])
    assert header == {
        "license": "other",
        "license_name": "My own terms",
        "base_model": "org/base",
        "base_model_relation": "finetune",
        "datasets": ["org/chats"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["ingot", "sft"],
    }
    for said in (
        "| `qa/accuracy` | higher | 0.6250 | 0.5813 to 0.6671 | 480 | 0.6250 |",
        "The gate decided to deploy it: worse by 0.1.",
        "| `hf:org/chats:en` | train | 70 | 2.5 | 600,000 | not stated |",
        "| `mine.jsonl` | train | 70 | 2.5 | 600,000 | cc-by-4.0 |",
        "lr: 0.0002",
        f"| model | `{MODEL}` |",
        "| base's weights | `ba5e` |",
        "trained from org/base",
        "1,200 steps in 1m",
    ):
        assert said in card
    assert "/home/me" not in card


def test_the_card_has_no_secret_and_no_folder_of_this_machine(run: RunFolder) -> None:
    reward = {"kind": "http", "url": "https://me:hunter2@rewards.org/score", "api_key": "a,sk-1234"}
    asked = {"kind": "http", "url": "https://rewards.org/score?n=2&api_key=sk-5678&v=1"}
    code = {"kind": "python", "function": "../me/secret/rew.py:score", "arguments": {"w": "./me/w"}}
    judge = {"kind": "model", "model": "../me/runs/rm"}
    text = {"kind": "regex", "pattern": "/think/yes", "name": "slash"}
    knobs = {
        "objective": {
            **{"kind": "distill", "teacher": "/home/me/teacher", "reference": "me/runs/dpo"},
            "rewards": [reward, asked, code, judge, text],
        },
        "model": {"source": "hf:org/base", "lora": {"adapter": "/home/me/adapter", "rank": 8}},
        "train.start_from": "/home/me/runs/earlier",
        "data.judge": {"file": "/home/me/schema.json"},
    }
    record = PipelineStepRecord("train", "i", MODEL, 60.0, "1,200 steps", "w", {"knobs": knobs})
    write_record(run.steps, record)
    made = json.loads((run.model / "ingot.json").read_bytes())
    made |= {"teacher": {"source": "/home/me/teacher", "model_hash": "7eac"}}
    made |= {
        "start_from": {
            "checkpoint": "/home/me/runs/earlier/checkpoints/step-00001000",
            "step": 1000,
        }
    }
    (run.model / "ingot.json").write_text(json.dumps(made))
    card = planned(run).card
    for hidden in ("hunter2", "sk-1234", "sk-5678", "/home/me", "me/"):
        assert hidden not in card
    method = yaml.safe_load(card.split("```")[1].removeprefix("yaml"))
    assert method["objective"]["rewards"][0]["url"].endswith("@rewards.org/score")
    assert method["objective"]["rewards"][1]["url"].endswith("?n=2&api_key=(hidden)&v=1")
    assert method["objective"]["rewards"][2]["function"] == "rew.py:score"
    assert method["objective"]["rewards"][3]["model"] == "rm"
    assert method["objective"]["rewards"][4] == text, "a pattern is no path"
    assert method["objective"]["teacher"] == "teacher"
    assert shown_source("file:///home/me/data.jsonl") == "data.jsonl"
    signed = "https://me:p@ss@data.org/a.jsonl?part=1&X-Amz-Signature=5ecret"
    assert shown_source(signed) == "https://data.org/a.jsonl?part=1&X-Amz-Signature=(hidden)"
    assert method["model"] == {"source": "hf:org/base", "lora": {"adapter": "adapter", "rank": 8}}
    assert method["train"] == {"start_from": "earlier"}
    for lineage in ("7eac", "step-00001000", "trained on from earlier at step 1,000"):
        assert lineage in card


def test_an_adapters_card_names_its_base(run: RunFolder) -> None:
    plan = planned(run, adapter=True)
    header = yaml.safe_load(plan.card.split("---")[1])
    assert (header["library_name"], header["base_model_relation"]) == ("peft", "adapter")
    assert "adapter_model.safetensors" in plan.files
    settings = {"model_type": "llama", "base_model_name_or_path": "/models/base"}
    (run.adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(WrongInput, match="which nobody else has; push the merged"):
        planned(run, adapter=True)


def refuse_gate(run: RunFolder) -> None:
    decide(run, "keep")


def damage(run: RunFolder) -> None:
    config = run.model / "config.json"
    config.write_text('{"model_type": "llama", "vocab_size": 1}')


def train_anew(run: RunFolder) -> None:
    write_record(run.steps, PipelineStepRecord("train", "i", "another", 1.0, "r", "w"))


def evaluate_another(run: RunFolder) -> None:
    write_report(run.reports / "evaluate.json", EvaluationReport("another", "t", {}))


def evaluate_anew(run: RunFolder) -> None:
    decide(run, "deploy")
    report = read_report(run.reports / "evaluate.json")
    worse = replace(report.metrics["qa/accuracy"], value=0.6)
    write_report(run.reports / "evaluate.json", replace(report, metrics={"qa/accuracy": worse}))


def forget_record(run: RunFolder) -> None:
    (run.model / "ingot.json").write_text(json.dumps({"model_hash": MODEL}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (refuse_gate, "the gate says keep .worse by 0.1.; --despite-gate"),
        (damage, "does not hold what was exported there: config.json"),
        (train_anew, "is not the record of the model"),
        (evaluate_another, "is about model another, 5f51d95764202b04 would be pushed"),
        (evaluate_anew, "gate.json is about an earlier evaluation of this model"),
        (forget_record, "has no record of an export"),
    ],
)
def test_what_the_run_cannot_vouch_for_is_refused(run: RunFolder, change: Any, says: str) -> None:
    change(run)
    with pytest.raises(WrongInput, match=says):
        planned(run)


def test_a_refused_model_goes_when_asked_and_another_decision_is_not_its_own(
    run: RunFolder,
) -> None:
    decide(run, "keep")
    assert "The gate decided to keep it" in planned(run, despite_gate=True).card
    evaluate_anew(run)
    assert "The gate decided" not in planned(run, despite_gate=True).card, "not about these numbers"
    decide(run, "keep", "another")
    assert "The gate decided" not in planned(run).card


@pytest.mark.parametrize("says", [{"step": 1100}, {"merged": "the hash of another model"}])
def test_an_adapter_of_another_training_is_refused(says: dict[str, Any], run: RunFolder) -> None:
    made = json.loads((run.adapter / "ingot.json").read_bytes())
    (run.adapter / "ingot.json").write_text(json.dumps({**made, **says}))
    with pytest.raises(WrongInput, match="they are of two trainings"):
        planned(run, adapter=True)


def test_data_prepared_anew_is_not_told_as_the_trainings(run: RunFolder) -> None:
    write_record(
        run.steps, PipelineStepRecord("prepare", "i", "all", 1.0, "r", "w", parts={"train": "0"})
    )
    assert "The data was prepared anew since this training" in planned(run).card


def test_as_a_person_types_it(run: RunFolder) -> None:
    where = str(run.root)
    done = ingot(
        "push", where, "hf:org/words", "--dry-run", "--data-license", "hf:org/chats:en=mit"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("would push to hf:org/words (private):\n")
    assert "model.safetensors" in done.stdout
    assert "| `hf:org/chats:en` | train | 70 | 2.5 | 600,000 | mit |" in done.stdout


def test_names_and_sources_that_are_none(run: RunFolder) -> None:
    for target in ("words", "hf:words", "hf:a/b/c", "org/words"):
        with pytest.raises(WrongInput, match="write it as hf:ORG/NAME"):
            plan_push(run, target, PushOptions())
    with pytest.raises(WrongInput, match="--data-license none: no such source in"):
        planned(run, data_licenses={"none": "mit"})
