"""`ingot plan`: one real plan of a tiny recipe, and how plans are told."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.plan_memory import measured
from ingot.base.errors import Failed, WrongInput
from ingot.cli.plan import _planned, _show, ask_cloud
from ingot.cli.views import plan_table
from ingot.cli.views.plan_table import short_plan, show_plan
from ingot.cloud.doctor import context
from ingot.cloud.doctor.finding import DoctorFinding
from ingot.config.recipe import Recipe
from ingot.config.sections.data import SourceSettings
from ingot.config.sections.grpo import GRPOSettings
from ingot.config.values import Findings
from ingot.plan import assemble
from ingot.plan.as_json import plan_json
from ingot.plan.assemble import ModelKnown, RunPlan, make_plan
from ingot.plan.place import place_of
from ingot.plan.ranges import Range
from ingot.plan.tracing.memory import RankMemory
from ingot.plan.tracing.records import MemoryUse, Operator, RankTrace
from ingot.plan.unknown import Unknown
from tests import golden
from tests.cli.commands import ingot
from tests.small import TINY_MODEL, small_recipe, write_documents

GIB = 2**30
CONFIG = {
    "model_type": "llama",
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    **TINY_MODEL,
}
RECIPE = f"""
name: tiny
output: runs
model: {{source: "preset:llama-3m", config: {json.dumps(TINY_MODEL)}}}
tokenizer: {{vocab_size: 320}}
data: {{train: [{{source: text}}], validation: {{fraction: 0.1}}, seq_len: 32}}
train: {{steps: 6, global_batch: 4, micro_batch: 2, optimizer: {{lr: 0.01}}}}
"""


def trace(rank: int = 0, gib: int = 10) -> RankTrace:
    use = MemoryUse(
        {
            "weights": gib * GIB,
            "masters": 0,
            "optimizer": 2 * gib * GIB,
            "gradients": gib * GIB,
            "gathered": 0,
            "activations": gib * GIB,
            "temporary": GIB,
        }
    )
    product = Operator("matmul", "bfloat16", 1e12, 10**9)
    return RankTrace(rank, (use,), use, use, {product: 10.0}, {}, 2, 4)


def made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int = 10, **knobs: Any
) -> RunPlan:
    """A plan with a trace of our own, in place of one that takes seconds."""
    memory = [RankMemory("every rank", 0, trace(gib=gib), Range(1.0, 2.0, 6.0, "guessed") * GIB)]
    monkeypatch.setattr(assemble, "plan_memory", lambda *_: memory)
    write_documents(tmp_path / "text", 20)
    knobs = {"launch__kind": "gce", "launch__machine": {"type": "a3-highgpu-8g"}} | knobs
    recipe = small_recipe(tmp_path, launch__processes=2, **knobs)
    return make_plan(recipe, place_of(recipe), ModelKnown(CONFIG, random=True))


def schema(value: Any, path: str = "") -> list[str]:
    """One line for each leaf: its path and type; numbers with a range are one leaf."""
    if isinstance(value, dict):
        if set(value) == {"low", "likely", "high", "origin"} or set(value) == {"unknown"}:
            return [f"{path}: number with a range, or what would tell it"]
        if path.endswith((".columns", ".knobs")) or path == "knobs":
            return [f"{path}: mapping"]
        return [line for key in value for line in schema(value[key], f"{path}.{key}".strip("."))]
    if isinstance(value, list):
        return schema(value[0], f"{path}[]") if value else [f"{path}: list"]
    kinds = {bool: "true or false", int: "number", float: "number", str: "text"}
    return [f"{path}: {kinds.get(type(value), 'null')}"]


def test_the_json_keeps_its_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = plan_json(made_up(tmp_path, monkeypatch))
    json.dumps(content, allow_nan=False)
    golden.check("plan-schema.txt", "\n".join(schema(content)) + "\n")


def test_every_number_has_a_range_and_says_how_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = plan_json(made_up(tmp_path, monkeypatch))["run"]
    assert run["step_s"]["origin"] == "guessed", "nobody has calibrated this machine"
    assert run["steps"] == {"low": 6.0, "likely": 6.0, "high": 6.0, "origin": "measured"}
    for number in (run["total_s"], run["money"]["on demand"], run["energy_kwh"]):
        assert number["low"] < number["likely"] < number["high"]


@pytest.mark.parametrize(
    ("pack", "kind", "low"), [("cut", "gce", 0.1), ("none", "gce", 1.0), ("cut", "local", 1.0)]
)
def test_a_gpu_computes_attention_within_documents_only(
    tmp_path: Path, pack: str, kind: str, low: float
) -> None:
    write_documents(tmp_path / "text", 20)
    knobs = {"launch__machine": {"type": "a3-highgpu-8g"}} if kind == "gce" else {}
    recipe = small_recipe(
        tmp_path,
        launch__kind=kind,
        data__pack=pack,
        data__seq_len=1024,
        launch__processes=1,
        **knobs,
    )
    sample = assemble.data_sample(recipe, quick=True)
    found = assemble._attended(recipe, place_of(recipe), sample)
    assert low <= found.low <= (1.0 if low == 1.0 else 0.7)
    assert (found == Range.exactly(1.0, "measured")) == (low == 1.0)


@pytest.mark.parametrize(("gib", "fit"), [(10, "fits"), (15, "may not fit"), (40, "does not fit")])
def test_the_table_tells_whether_it_fits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gib: int,
    fit: str,
) -> None:
    plan = made_up(tmp_path, monkeypatch, gib)
    assert plan_json(plan)["memory"][0]["fit"] == fit
    show_plan(plan)
    out = " ".join(capsys.readouterr().out.split())
    assert "every rank" in out
    assert "compared with one H200, not yet with this" in out
    assert "prices of 2026-11-01" in out
    assert "guessed" in out
    assert "steps │ 6 │ │ the recipe" in out
    assert "tokens │ 768 │ │ modelled" in out
    assert (f"a step {fit} into" in out) == (fit != "fits")


@pytest.mark.parametrize(
    ("device", "ranks", "compared"), [("h200", 1, True), ("h200", 8, False), ("h100", 1, False)]
)
def test_a_plan_says_whether_one_like_it_was_held_against_a_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: str,
    ranks: int,
    compared: bool,
) -> None:
    plan = made_up(tmp_path, monkeypatch, launch__kind="local", launch__machine=None)
    recipe = small_recipe(tmp_path, launch__processes=ranks, train__global_batch=8)
    plan = replace(plan, place=place_of(recipe, device))
    assert plan_json(plan)["compared_with_gpu"] == compared
    show_plan(plan)
    assert ("not yet with this" in capsys.readouterr().out) == (not compared)


@pytest.mark.parametrize("offload", [0.0, 0.5])
def test_a_plan_names_what_offloading_takes_as_not_told(
    offload: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = made_up(tmp_path, monkeypatch, memory__offload={"optimizer": offload})
    told = [one.about for one in plan.findings if one.kind == "not checked"]
    assert ("memory.offload.optimizer" in told) == (offload > 0)


def test_every_line_fits_into_a_terminal_of_80(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = made_up(tmp_path, monkeypatch)
    kinds = ("first stage", "stages between", "last stage")
    memory = tuple(
        replace(one, ranks=kind)
        for kind in kinds
        for one in plan.memory  # type: ignore[union-attr]
    )
    out = Console(width=80, force_terminal=True, no_color=True, file=io.StringIO())
    monkeypatch.setattr(plan_table, "console", lambda: out)
    show_plan(replace(plan, memory=memory))
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.file.getvalue())  # type: ignore[attr-defined]
    tables = [line for line in text.splitlines() if line[:1] in "│┃┡└┏├" and line]
    assert max(map(len, tables)) <= 80
    assert "…" not in text
    whole = " ".join(text.split())
    for name in (*kinds, "activations", "the whole training", "US dollars spot"):
        assert name in whole


def test_unknown_places_leave_memory_and_say_what_would_tell_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    knobs = {"launch__kind": "ssh", "launch__machine": None, "launch__ssh__hosts": ["a"]}
    plan = made_up(tmp_path, monkeypatch, **knobs)
    assert not isinstance(plan.memory, Unknown)
    assert isinstance(plan.cost.total_s, Unknown)
    show_plan(plan)
    out = " ".join(capsys.readouterr().out.split())
    assert "52.0 to 57.0" in out, "GiB of tensors, and what a device needs beside them"
    assert "--device NAME" in out
    assert "not checked memory" in out


def test_a_model_that_cannot_be_traced_is_told_by_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise Failed("this training cannot be traced (DataDependentOutputException)")

    monkeypatch.setattr(assemble, "plan_memory", fail)
    write_documents(tmp_path / "text", 20)
    recipe = small_recipe(tmp_path)
    plan = make_plan(recipe, place_of(recipe), ModelKnown(CONFIG, random=True))
    assert isinstance(plan.memory, Unknown)
    assert isinstance(plan.formula, Range)
    assert plan.formula.low < plan.formula.high
    show_plan(plan)
    out = " ".join(capsys.readouterr().out.split())
    assert "DataDependentOutputException" in out
    assert "by formula its tensors take" in out
    assert "not checked memory" in out


LONGFORMER = {
    "model_type": "longformer",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 200,
    "attention_window": [16, 16],
    "pad_token_id": 1,
}


@pytest.mark.drawn("plans on the command line")
def test_a_model_whose_computation_depends_on_its_input_is_told_by_formula(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers' Longformer asks with `.item()` which tokens attend to all others."""
    write_documents(tmp_path / "text", 20)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LONGFORMER), encoding="utf-8")
    recipe = small_recipe(
        tmp_path,
        model__source=str(tmp_path / "model"),
        model__init="random",
        model__config=None,
        objective={"kind": "classify", "labels": ["a", "b"]},
    )
    plan = make_plan(recipe, place_of(recipe), ModelKnown(LONGFORMER, random=True))
    assert isinstance(plan.memory, Unknown)
    assert isinstance(plan.formula, Range)
    show_plan(plan)
    out = " ".join(capsys.readouterr().out.split())
    assert plan.formula.low < measured(recipe)["peak"] < plan.formula.high
    assert "this training cannot be traced (DataDependentOutputException" in out
    assert "by formula its tensors take" in out
    assert "not checked memory: whether it fits: needs a trace" in out


def test_the_traced_recipe_computes_as_the_place_will(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` on the CPU that traces would be float32."""
    seen: list[Recipe] = []

    def plan(recipe: Recipe, world: int, kind: str) -> list[RankMemory]:
        seen.append(recipe)
        return [RankMemory("every rank", 0, trace(), Range.exactly(0.0))]

    for machine in ({"type": "a3-highgpu-8g"}, {"type": "n1-standard-8"}):
        made_up(tmp_path / machine["type"], monkeypatch)
        monkeypatch.setattr(assemble, "plan_memory", plan)
        recipe = small_recipe(
            tmp_path / machine["type"], launch__kind="gce", launch__machine=machine
        )
        make_plan(recipe, place_of(recipe), ModelKnown(CONFIG, random=True))
    assert [recipe.precision.compute for recipe in seen] == ["bf16", "fp32"]
    assert {recipe.model.config["vocab_size"] for recipe in seen} == {320}


def test_a_dry_run_tells_what_needs_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(made_up(tmp_path, monkeypatch), memory=Unknown("a trace"))
    lines = list(short_plan(plan))
    assert "6 steps" in lines[0]
    assert "2 + 1 checkpoints" in lines[0]
    assert lines[-1] == "memory, time and money: `ingot plan` with the same recipe"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_documents(tmp_path / "text", 30)
    (tmp_path / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
    return tmp_path


@pytest.mark.drawn("plans on the command line")
def test_a_real_plan_is_kept_beside_the_run(place: Path) -> None:
    done = ingot("plan", "tiny.yaml", "--json", "--keep", "train.global_batch=8", cwd=place)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["wrong"] == []
    [rank] = content["memory"]
    assert rank["fit"] == "fits"
    weights = content["weights"]["weights"]
    assert rank["bytes"]["weights"] == 4 * weights
    # The state of a step's end: weights and two moments, a checkpoint's 12 bytes each.
    state = rank["bytes"]["weights"] + rank["bytes"]["optimizer"]
    assert content["run"]["checkpoint_bytes"]["likely"] == pytest.approx(state, rel=0.01)
    assert content["run"]["tokens"]["likely"] == 6 * 8 * 32
    kept = json.loads((place / "runs/tiny/reports/plan.json").read_text(encoding="utf-8"))
    assert kept == content
    assert "kept as runs/tiny/reports/plan.json" in done.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_no_key_of_an_address_or_reward_is_kept_or_printed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
) -> None:
    plan = made_up(tmp_path, monkeypatch)
    address = "https://host/a.jsonl?X-Amz-Signature="
    data = plan.recipe.data.model_copy(
        update={"train": [SourceSettings(source=f"{address}s3cr3t")]}
    )
    judge = {"kind": "python", "function": "a:b", "arguments": {"api_key": "s3cr3t"}}
    objective = GRPOSettings.model_validate({"kind": "grpo", "group": 4, "rewards": [judge]})
    found = Findings({})
    found.unknown.append(f"{address}s3cr3t does not answer")
    recipe = plan.recipe.model_copy(update={"data": data, "objective": objective})
    _show(recipe, plan, found, as_json=as_json, keep=True)
    kept = plan.recipe.folder.plan.read_text(encoding="utf-8")
    assert f"{address}(hidden:" in kept
    printed = capsys.readouterr()
    assert "s3cr3t" not in kept + printed.out + printed.err


def test_what_the_trace_alone_finds_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise WrongInput("these layers do not divide")

    monkeypatch.setattr(assemble, "make_plan", refuse)
    write_documents(tmp_path / "text", 20)
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE, encoding="utf-8")
    _, found, made = _planned(["tiny.yaml"], None, cloud=False)
    assert made is None
    assert found.wrong == ["tiny.yaml: these layers do not divide"]


@pytest.mark.drawn("plans on the command line")
def test_what_training_refuses_a_plan_refuses(place: Path) -> None:
    done = ingot("plan", "tiny.yaml", "data.seq_len=4096", "train.global_batch=5", cwd=place)
    assert done.returncode == 2
    assert "data.seq_len 4096 exceeds" in done.stderr
    done = ingot("plan", "tiny.yaml", "--device", "h9000", cwd=place)
    assert done.returncode == 2
    assert "h9000" in done.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--search", "--budget", "-5"), "--budget -5: give US dollars, more than 0"),
        (("--search", "--budget", "nan"), "--budget nan: give US dollars, more than 0"),
        (("--search", "--deadline", "0h"), "--deadline 0h: give a time, more than 0"),
        (("--budget", "0"), "--devices, --budget and --deadline are for --search"),
    ],
)
def test_a_limit_that_no_layout_can_keep_is_refused_as_a_number(
    given: tuple[str, ...], words: str, place: Path
) -> None:
    done = ingot("plan", "tiny.yaml", *given, cwd=place)
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("tiny.yaml", "--search", "--keep"), "--keep and --cloud are for a plan"),
        (("tiny.yaml", "--search", "--cloud"), "--keep and --cloud are for a plan"),
        (("--forget", "h100", "--json"), "are given alone"),
        (("--forget", "h100", "--device", "h100"), "are given alone"),
        (("--forget", "h100", "--learn", "run"), "are given alone"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(given: tuple[str, ...], words: str) -> None:
    done = ingot("plan", *given)
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.drawn("plans on the command line")
def test_a_dry_run_ends_with_the_plan_and_imports_no_torch(place: Path) -> None:
    done = ingot("launch", "train", "tiny.yaml", "--dry-run", cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/sh"), "the script alone is on stdout"
    told = [line for line in done.stderr.splitlines() if line.startswith("plan: ")]
    assert "6 steps" in told[0]
    assert "ingot plan" in told[-1]
    code = (
        "import sys\n"
        "from ingot.cli.app import app\n"
        "app(['launch', 'train', 'tiny.yaml', '--dry-run'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    plain = subprocess.run(
        [sys.executable, "-c", code], cwd=place, capture_output=True, check=False
    )
    assert plain.returncode == 0, plain.stderr.decode()


def test_quota_is_asked_only_if_wanted_and_never_passed_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(tmp_path, launch__kind="gce", launch__machine={"type": "a3-highgpu-8g"})
    place = place_of(recipe)
    [unasked] = ask_cloud(recipe, place, ask=False)
    assert (unasked.kind, "--cloud asks" in unasked.message) == ("not checked", True)

    def no_credentials(_: Recipe) -> None:
        raise WrongInput("no credentials of Google Cloud; gcloud auth application-default login")

    monkeypatch.setattr(context, "check_context", no_credentials)
    [asked] = ask_cloud(recipe, place, ask=True)
    assert (asked.kind, "no credentials" in asked.message) == ("not checked", True)
    answers = [
        DoctorFinding("machine type a3-highgpu-8g", True, "in us-central1-a"),
        DoctorFinding("quota NVIDIA_H100_GPUS", False, "8 needed, 0 of 0 free", needed=True),
        DoctorFinding("quota of Vertex AI", None, "not asked"),
    ]
    monkeypatch.setattr(context, "check_context", lambda _: None)
    monkeypatch.setattr(context, "run_checks", lambda *_: answers)
    found = [one.kind for one in ask_cloud(recipe, place, ask=True)]
    assert found == ["known", "warning", "not checked"]
    local = small_recipe(tmp_path)
    assert ask_cloud(local, place_of(local), ask=True) == []
