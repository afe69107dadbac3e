"""One wrong thing in each documented recipe is told before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.cli.check.recipe import findings, read_checked
from ingot.config.models.presets import preset

RECIPES = Path(__file__).parents[2] / "recipes"
LLAMA = "model.source=llama"
"""A folder with the configuration of a Llama of 8 B, in the place of one on the hub."""
CLOUD = "cloud={bucket: buck, project: p, repository: r}"
WRONG: list[tuple[str, tuple[str, ...], str]] = [
    ("quickstart", ("model.source=preset:llama-30m",), "preset:llama-30m is unknown"),
    ("quickstart", ("data.seq_len=4096",), "exceeds the model's 1024 positions"),
    ("quickstart", ("gate.metric=rouge/rougeL",), "is measured by none of evaluate.tasks"),
    ("quickstart", ("data.validation.fraction=0",), "needs held-out documents"),
    ("adapt_smollm2", (LLAMA, "parallel.tensor=3", "launch.processes=3"), "parallel.tensor"),
    ("bart_large", ("model.source=preset:bert-mini",), "model_type `bert`"),
    ("chat_smollm2", ("data.train.0.source=texts.jsonl", LLAMA), "texts.jsonl:1"),
    ("continue_llama", ("data.seq_len=200000", LLAMA), "seq_len 200000 exceeds the model's 131072"),
    ("continue_qwen3_moe", ("parallel.expert=3",), "parallel.expert 3 does not divide the 8 ranks"),
    ("distill_llama", (LLAMA, "objective.teacher=small"), "has a vocabulary of 512 tokens"),
    ("distill_llama", ("objective.teacher=nosuch",), "objective.teacher nosuch is neither"),
    ("dpo_llama", ("model.source=preset:llama-3m",), "model.lora trains an adapter of weights"),
    ("kto_llama", (LLAMA, "data.train=[{source: texts.jsonl}]"), "has no rated (layout auto)"),
    ("grpo_digits", ("objective.group=24",), "objective.group 24; set it to a multiple"),
    ("grpo_digits", ("objective.importance_cap=4",), "set old_logprobs to recomputed"),
    (
        "grpo_digits",
        ("objective.staleness=1", "objective.sample_again=1"),
        "with objective.staleness sampling is on its own",
    ),
    ("grpo_smollm2", ("model.lora.dropout=0.1",), "answers are sampled without it"),
    ("keeper_smollm2", ("data.train.0.source=builtin:keper", LLAMA), "is not built in"),
    ("lora_glm45_air", ("parallel.expert=3",), "parallel.expert 3 does not divide the 8 ranks"),
    (
        "lora_gpt_oss",
        ("model.source=moe", "parallel.expert=8"),
        "parallel.expert 8 does not divide",
    ),
    ("lora_llama", ("model.lora.adapter=nosuch",), "model.lora.adapter nosuch has no"),
    ("lora_phi4", (LLAMA, "model.lora.adapter=nosuch"), "model.lora.adapter nosuch has no"),
    ("lora_qwen3_moe", ("model.source=moe",), "does not divide the model's 60 experts"),
    ("qlora_llama", ("model.lora=null",), "model.quantize keeps frozen weights in few bits"),
    ("orpo_llama", (LLAMA, "objective.kind=orp"), "did you mean 'orpo'"),
    ("pretrain_llama", ("data.train=[{source: texts.jsonl, text: body}]",), "no column `body`"),
    ("pretrain_llama_muon", ("train.schedule.decay=0",), "train.schedule.decay"),
    ("pretrain_llama_8b", ("launch.processes=7", "launch.kind=local"), "processes"),
    (
        "reward_llama",
        (LLAMA, "parallel.tensor=2", "launch.processes=2"),
        "shared by replicate and shard only",
    ),
    (
        "adapt_roberta",
        ("objective.mask_replace_prob=0.95",),
        "are 1.05 together; lower one",
    ),
    (
        "adapt_t5",
        ("data.target_len=64",),
        "targets are up to 114 tokens long; remove it",
    ),
    (
        "roberta_large",
        ("evaluate.tasks=[{}, {kind: classification}, {kind: hellaswag}]",),
        "is for decoder",
    ),
    ("sft_gemma3_4b", (LLAMA, "parallel.shard=3"), "parallel.shard 3 takes 3"),
    ("sft_llama", ("tokenizer.template=chatml2",), "tokenizer.template chatml2 is neither"),
    ("sft_llama_8b", ("train.start_from=nosuch",), "train.start_from nosuch does not exist"),
    ("sft_qwen3_moe", ("parallel.expert=6",), "parallel.expert 6 does not divide the 16 ranks"),
    ("simpo_llama", (LLAMA, "parallel.pipeline=2", "launch.processes=2"), "all of a row at once"),
    ("t5_small", ("evaluate.tasks=[{kind: rouge, source: no.jsonl}]",), "no.jsonl: no such file"),
    ("t5_xxl", ("precision.float8=rowwise",), "precision.float8 is for decoders"),
    ("places/gce_1x1", ("launch.machine.type=n1-standard-5", CLOUD), "n1-standard-5 is not known"),
    (
        "places/vertex",
        ("pipeline.steps.evaluate.machine.accelerator=k80", CLOUD),
        "accelerator k80 is not known",
    ),
    ("places/slurm", ("launch.slurm.cpus=1", "launch.processes=8"), "launch.slurm.cpus 1 is fewer"),
    ("places/ssh", ("launch.ssh.hosts=[]",), "launch.ssh.hosts"),
    ("places/tpu", ("launch.tpu.type=v5litepod", CLOUD), "launch.tpu.type v5litepod is none"),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "a text"}))
    mixture = {
        **preset("llama-8b"),
        "model_type": "qwen3_moe",
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
    }
    models = {"llama": preset("llama-8b"), "small": preset("llama-3m"), "moe": mixture}
    for name, values in models.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    return tmp_path


def told(name: str, *overrides: str) -> list[str]:
    files = [str(RECIPES / f"{name}.yaml")]
    if name.startswith("places/"):
        files.insert(0, str(RECIPES / "quickstart.yaml"))
    try:
        return findings(*read_checked([*files, *overrides], "run")).wrong
    except WrongInput as error:
        return str(error).split("\n")


def test_every_documented_recipe_has_its_wrong_thing() -> None:
    recipes = {path.stem for path in RECIPES.glob("*.yaml")}
    assert recipes == {name for name, *_ in WRONG if "/" not in name}


@pytest.mark.parametrize(("name", "overrides", "message"), WRONG, ids=str)
def test_it_is_told_before_the_first_step(
    place: Path, name: str, overrides: tuple[str, ...], message: str
) -> None:
    before: Any = told(name, *[each for each in overrides if each == LLAMA])
    lines = [line for line in told(name, *overrides) if message in line]
    assert lines, told(name, *overrides)
    assert lines[0] not in before
