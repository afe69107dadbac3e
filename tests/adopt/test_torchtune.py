"""Continued pretraining on Google Cloud: three levels, in files of their own."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.config.sections.training import AdamW
from tests.adopt.stand_ins import CLOUD, PIPELINE, TORCHTUNE, recipe_of


def test_the_cloud_level(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, cloud_env=CLOUD)
    cloud = recipe.cloud
    assert (cloud.project, cloud.region, cloud.repository, cloud.bucket) == (
        "forest-lab",
        "europe-north1",
        "forest",
        "forest-bucket",
    )
    assert (cloud.subnetwork, cloud.tensorboard, cloud.secrets) == (
        "pines",
        "99",
        {"HF_TOKEN": "secret:hub/3"},
    )
    assert cloud.service_account == "trainer@forest-lab.iam.gserviceaccount.com"
    assert recipe.pipeline.spark.version == "2.2"
    assert (recipe.launch.kind, recipe.pipeline.steps["prepare"].launch) == ("vertex", "dataproc")
    for key in ("PROJECT_NUMBER", "CUDA_VERSION", "CUDA_IMAGE"):
        assert f"{key}: " in notes


def test_the_pipeline_level_turns_a_distance_into_a_similarity_and_says_so(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, pipeline_yaml=PIPELINE)
    assert recipe.model.source == "hf:meta-llama/Llama-3.1-8B"
    assert (
        recipe.data.train[0].source
        == "bigquery:SELECT id, body AS text\nFROM `forest.archive.pages`  -- all"
    )
    clean = recipe.data.clean
    assert clean.fuzzy is not None
    assert (clean.fuzzy.similarity, clean.fuzzy.ngram, clean.fuzzy.permutations) == (0.85, 4, 64)
    assert (clean.normalize, clean.exact) == ("nfkc", True)
    assert "sim_threshold: was a distance there" in notes
    assert "normal_form: the decomposed forms are not offered" in notes
    assert "train_config: names spruce.yaml; give that file too" in notes


def test_the_pipeline_level_as_json_means_the_same(tmp_path: Path) -> None:
    text = (
        '{"pretrained_hf_model": "a/b", "source_query": "SELECT 1", "sim_threshold": 0.5,'
        ' "minhash_perm": 2}'
    )
    recipe, notes = recipe_of(tmp_path, pipeline_json=text)
    assert recipe.data.clean.fuzzy is not None
    assert (recipe.data.clean.fuzzy.similarity, recipe.data.clean.fuzzy.permutations) == (0.5, 128)
    assert "minhash_perm: 2 is not within 16 to 1024" in notes


def test_its_defaults_are_explicit(tmp_path: Path) -> None:
    recipe, _ = recipe_of(tmp_path, cloud_env=CLOUD)
    assert recipe.data.clean.fuzzy is not None
    assert (recipe.data.clean.fuzzy.similarity, recipe.data.clean.fuzzy.ngram) == (0.8, 5)
    assert (
        recipe.train.micro_batch,
        recipe.train.global_batch,
        recipe.train.epochs,
        recipe.data.seq_len,
    ) == (8, 64, 2, 4096)
    assert (
        recipe.train.optimizer.lr,
        recipe.train.optimizer.weight_decay,
        recipe.precision.compute,
    ) == (2e-5, 0.01, "bf16")


def test_the_training_level(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, spruce_yaml=TORCHTUNE)
    train = recipe.train
    assert (recipe.name, recipe.seed, recipe.model.source, recipe.checkpoint.upload) == (
        "spruce",
        7,
        "hf:meta-llama/Llama-3.1-8B",
        "gs://forest-bucket/models/spruce",
    )
    assert (train.micro_batch, train.global_batch, train.epochs, train.steps) == (4, 64, 3, None)
    assert train.optimizer.kind == "adamw"
    assert (train.optimizer.lr, train.optimizer.betas, train.optimizer.weight_decay) == (
        3e-5,
        (0.9, 0.999),
        0.01,
    )
    assert (train.schedule.kind, train.schedule.warmup, train.clip_norm, train.compile) == (
        "constant",
        0,
        None,
        False,
    )
    assert (recipe.data.seq_len, recipe.data.pack, recipe.parallel.shard, recipe.track.every) == (
        2048,
        "best_fit",
        "auto",
        5,
    )
    assert recipe.track.wandb is not None
    assert recipe.track.wandb.project == "spruce"
    assert train.profile is not None
    assert (train.profile.begin, train.profile.end) == (4, 7)
    assert (
        recipe.memory.recompute.kind,
        recipe.memory.offload.activations,
        recipe.memory.offload.weights,
    ) == ("full", False, True)
    assert (
        "enable_activation_offloading: activations are either computed again or offloaded here"
        in notes
    )
    assert "On N devices set it to 64 x N" in notes
    assert "shuffle: ingot always shuffles" in notes
    assert recipe.launch.kind == "local"


def test_steps_of_an_epoch_bound_the_training(tmp_path: Path) -> None:
    recipe, notes = recipe_of(
        tmp_path,
        spruce_yaml=TORCHTUNE.replace("max_steps_per_epoch: null", "max_steps_per_epoch: 50"),
    )
    assert (recipe.train.steps, recipe.train.epochs) == (150, None)
    assert "max_steps_per_epoch: steps are counted over the whole training" in notes


def test_a_schedule_clipping_and_betas_are_carried_where_there_are_some(tmp_path: Path) -> None:
    text = (
        TORCHTUNE.replace("fused: true}", "betas: [0.8, 0.9]}") + "lr_scheduler: {_component_:"
        " torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps:"
        " 30}\nclip_grad_norm: 0.5\n"
    )
    train = recipe_of(tmp_path, spruce_yaml=text)[0].train
    assert (
        train.schedule.kind,
        train.schedule.warmup,
        train.schedule.min_ratio,
        train.clip_norm,
    ) == ("cosine", 30, 0.0, 0.5)
    assert train.optimizer.kind == "adamw"
    assert train.optimizer.betas == (0.8, 0.9)


def test_an_optimizer_without_a_learning_rate_has_that_of_torch(tmp_path: Path) -> None:
    usual = inspect.signature(torch.optim.AdamW).parameters
    text = TORCHTUNE.replace("lr: 3e-5, ", "")
    optimizer = recipe_of(tmp_path, spruce_yaml=text)[0].train.optimizer
    assert isinstance(optimizer, AdamW)
    for knob in ("lr", "betas", "eps", "weight_decay"):
        assert getattr(optimizer, knob) == usual[knob].default


def test_a_model_that_contradicts_its_builder_is_told(tmp_path: Path) -> None:
    recipe, notes = recipe_of(
        tmp_path,
        spruce_yaml=TORCHTUNE,
        pipeline_yaml="pretrained_hf_model: meta-llama/Llama-3.2-1B\nngram_len: 5\n",
    )
    assert recipe.model.source == "hf:meta-llama/Llama-3.2-1B"
    assert "the builder llama3_1_8b is that of meta-llama/Llama-3.1-8B" in notes


def test_two_buckets_are_told_and_one_is_not(tmp_path: Path) -> None:
    assert "names the bucket" not in recipe_of(tmp_path, spruce_yaml=TORCHTUNE, cloud_env=CLOUD)[1]
    other = CLOUD.replace("BUCKET_NAME=forest-bucket", "BUCKET_NAME=gs://other/")
    recipe, notes = recipe_of(tmp_path, spruce_yaml=TORCHTUNE, cloud_env=other)
    assert "spruce.yaml:1 names the bucket forest-bucket, cloud.env:10 the bucket other" in notes
    assert recipe.cloud.bucket == "other"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            "_component_: torch.optim.AdamW",
            "_component_: bitsandbytes.optim.PagedAdamW8bit",
            "PagedAdamW8bit is not offered",
        ),
        (
            "llama3_1.llama3_1_8b",
            "llama3_1.lora_llama3_1_8b",
            "model.lora_attn_modules: is not given; every linear layer gets an adapter",
        ),
        ("dtype: bf16", "dtype: fp16", "dtype: there the weights had this format too"),
        (
            "compile: false",
            "optimizer_in_bwd: true",
            "optimizer_in_bwd: the step follows the whole backward pass",
        ),
        ("compile: false", "resume_from_checkpoint: true", "resume_from_checkpoint: not needed"),
    ],
)
def test_what_is_not_the_same_is_told(before: str, after: str, says: str, tmp_path: Path) -> None:
    assert says not in recipe_of(tmp_path, spruce_yaml=TORCHTUNE)[1] or "dtype" in before
    assert says in recipe_of(tmp_path, spruce_yaml=TORCHTUNE.replace(before, after))[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "sim_threshold: 1.5\nngram_len: 5\n",
            "p.yaml:1: sim_threshold is '1.5'; it should be a distance from 0 to below 1",
        ),
        ("normal_form: NFX\nngram_len: 5\n", "it should be NFC, NFD, NFKC or NFKD"),
        ("ngram_len: 2.5\nminhash_perm: 2\n", "it should be a whole number"),
        ("dtype: int8\nseed: 1\n", "it should be bf16 or fp32"),
        ("compile: perhaps\nseed: 1\n", "it should be true or false"),
        ("seed: [1, 2]\ndtype: bf16\n", "is a list; it should be a number"),
    ],
)
def test_values_that_cannot_be_are_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(WrongInput) as refused:
        recipe_of(tmp_path, p_yaml=text)
    assert says in str(refused.value)


OWN = TORCHTUNE.replace("{packed: true}", "{_component_: torchtune.datasets.READS}").replace(
    "path: base/original", "path: weights/Llama-3.2-1B-Instruct/original"
)
"""A file of torchtune itself, of which READS is the builder of its data set."""


@pytest.mark.parametrize(
    ("reads", "kind", "source", "layout"),
    [
        ("alpaca_dataset", "sft", "hf:tatsu-lab/alpaca", "alpaca"),
        ("alpaca_cleaned_dataset", "sft", "hf:yahma/alpaca-cleaned", "alpaca"),
        ("chat_dataset, source: org/chats, name: main", "sft", "hf:org/chats:main", "auto"),
        ("instruct_dataset, source: json, data_files: a.json", "sft", "a.json", "auto"),
        ("preference_dataset, source: org/pairs", "dpo", "hf:org/pairs", "auto"),
        ("stack_exchange_paired_dataset", "dpo", "data/my.jsonl", "auto"),
        ("text_completion_dataset, source: org/texts", "pretrain", "hf:org/texts", "auto"),
        ("my_own_dataset", "pretrain", "data/my.jsonl", "auto"),
    ],
)
def test_what_a_builder_of_data_sets_reads_is_what_is_trained(
    tmp_path: Path, reads: str, kind: str, source: str, layout: str
) -> None:
    recipe, notes = recipe_of(tmp_path, oak_yaml=OWN.replace("READS", reads))
    (first,) = recipe.data.train
    assert (recipe.objective.kind, first.source, first.layout) == (kind, source, layout)
    name = reads.partition(",")[0]
    assert f"dataset._component_: {name}: what it read, and how it wrote rows" in notes
    assert (f"objective.kind: what {name} reads is not known" in notes) == (
        name == "my_own_dataset"
    )
    assert ("dataset.train_on_input: is true" in notes) == name.startswith("alpaca")
    assert recipe.data.pack == "none"


def sets(*items: str) -> str:
    """A file of torchtune with a list of data sets."""
    listed = "".join(f"\n  - {{_component_: torchtune.datasets.{item}}}" for item in items)
    return OWN.replace("dataset: {_component_: torchtune.datasets.READS}", f"dataset:{listed}")


def test_all_data_sets_of_a_list_are_trained(tmp_path: Path) -> None:
    text = sets(
        "alpaca_dataset, train_on_input: false",
        "chat_dataset, source: json, data_files: [a.json, b.json], split: 'train[:10%]'",
        "chat_dataset, source: org/chats, packed: true, odd: 1",
    )
    recipe, notes = recipe_of(tmp_path, oak_yaml=text)
    assert recipe.objective.kind == "sft"
    assert [(one.source, one.layout, one.fraction) for one in recipe.data.train] == [
        ("hf:tatsu-lab/alpaca", "alpaca", 1.0),
        ("a.json", "auto", 0.1),
        ("b.json", "auto", 0.1),
        ("hf:org/chats", "auto", 1.0),
    ]
    assert recipe.data.pack == "none"
    assert "dataset.2.odd: is not read" in notes
    for unwanted in ("Unknown keys", "different kinds", "train_on_input", "source_query"):
        assert unwanted not in notes
    packed = sets("chat_dataset, source: a, packed: true", "chat_dataset, source: b, packed: true")
    assert recipe_of(tmp_path, oak_yaml=packed)[0].data.pack == "best_fit"


def test_data_sets_of_different_kinds_are_told(tmp_path: Path) -> None:
    both = sets("alpaca_dataset", "text_completion_dataset, source: org/texts")
    recipe, notes = recipe_of(tmp_path, oak_yaml=both)
    assert recipe.objective.kind == "sft"
    assert "alpaca_dataset and text_completion_dataset read rows of different kinds" in notes
    with pytest.raises(WrongInput, match=r"dataset\.0\.packed is 'perhaps'; it should be true or"):
        recipe_of(tmp_path, oak_yaml=sets("alpaca_dataset, packed: perhaps"))


def test_a_query_is_asked_for_only_where_there_is_a_pipeline(tmp_path: Path) -> None:
    text = OWN.replace("READS", "stack_exchange_paired_dataset")
    says = "data.train: no file names all that is read; data/my.jsonl stands for it"
    assert says in recipe_of(tmp_path, oak_yaml=text)[1]
    notes = recipe_of(tmp_path, oak_yaml=text, cloud_env=CLOUD)[1]
    assert "data.train: no file has source_query, the SQL that gives id and text" in notes


def test_torchtune_alone_removes_no_duplicates(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, oak_yaml=OWN.replace("READS", "alpaca_dataset"))
    assert (recipe.data.clean.fuzzy, recipe.data.clean.exact) == (None, False)
    assert "sim_threshold" not in notes
    recipe, _ = recipe_of(tmp_path, oak_yaml=OWN, cloud_env=CLOUD)
    assert recipe.data.clean.fuzzy is not None


def test_preferences_of_torchtune_are_no_texts(tmp_path: Path) -> None:
    loss = "loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.3}\n"
    recipe, _ = recipe_of(tmp_path, oak_yaml=OWN + loss)
    found = recipe.objective.model_dump()
    assert (found["kind"], found["beta"]) == ("dpo", 0.3)
    for given, expected in (
        ("IPOLoss", {"kind": "ipo", "beta": 0.1, "normalize_length": False}),
        ("IPOLoss, tau: 0.4", {"kind": "ipo", "beta": 0.4}),
        ("SimPOLoss", {"kind": "simpo", "beta": 2.0, "margin": 0.5}),
        ("SimPOLoss, gamma: 0, beta: 3", {"beta": 3.0, "margin": 0.0}),
        ("DPOLoss, label_smoothing: 0.2", {"beta": 0.1, "label_smoothing": 0.2}),
    ):
        loss = f"loss: {{_component_: torchtune.rlhf.loss.{given}}}\n"
        recipe, notes = recipe_of(tmp_path, oak_yaml=OWN + loss)
        found = recipe.objective.model_dump()
        assert {knob: found[knob] for knob in expected} == expected
        assert "loss." not in notes
    for loss in (
        "{_component_: torch.nn.CrossEntropyLoss}",
        "torchtune.loss.CEWithChunkedOutputLoss",
    ):
        recipe, _ = recipe_of(tmp_path, oak_yaml=f"{OWN}loss: {loss}\n")
        assert recipe.objective.kind == "pretrain"
    with pytest.raises(WrongInput, match=r"oak\.yaml:20: loss RSOLoss is not offered"):
        recipe_of(tmp_path, oak_yaml=f"{OWN}loss: {{_component_: torchtune.rlhf.loss.RSOLoss}}\n")


def test_an_adapter_of_torchtune_is_carried(tmp_path: Path) -> None:
    given = (
        "llama3_2.qlora_llama3_2_3b, lora_attn_modules: [q_proj, output_proj], lora_rank: 4,"
        " apply_lora_to_mlp: true, apply_lora_to_output: true"
    )
    text = OWN.replace("llama3_1.llama3_1_8b", given).replace("Llama-3.2-1B-Instruct", "base")
    text = text.replace("fsdp_cpu_offload: true\n", "")
    recipe, notes = recipe_of(tmp_path, oak_yaml=text)
    lora, quantize = recipe.model.lora, recipe.model.quantize
    assert lora is not None
    assert quantize is not None
    assert recipe.model.source == "hf:meta-llama/Llama-3.2-3B"
    assert (lora.rank, lora.alpha, lora.dropout, lora.kind) == (4, 16, 0, "lora")
    assert lora.targets == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert quantize.kind == "nf4"
    text = text.replace("qlora_", "lora_").replace("lora_rank: 4", "use_dora: true")
    model = recipe_of(tmp_path, oak_yaml=text)[0].model
    assert model.lora is not None
    assert (model.lora.kind, model.lora.rank, model.quantize) == ("dora", 8, None)
    assert "model.apply_lora_to_output: the head gets no adapter" in notes
    assert "Unknown keys" not in notes


@pytest.mark.parametrize(
    ("more", "source", "told"),
    [
        ("", "hf:meta-llama/Llama-3.2-1B-Instruct", False),
        ("checkpoint_dir: weights/Qwen2.5-7B-Instruct", "hf:Qwen/Qwen2.5-7B-Instruct", False),
        ("checkpoint_dir: weights/mine", "hf:meta-llama/Llama-3.1-8B", True),
    ],
)
def test_weights_of_torchtune_are_those_of_their_folder(
    tmp_path: Path, more: str, source: str, told: bool
) -> None:
    recipe, notes = recipe_of(tmp_path, oak_yaml=f"{OWN}checkpointer: {{{more}}}\n")
    assert recipe.model.source == source
    assert ("checkpointer.checkpoint_dir: held the weights" in notes) == told


@pytest.mark.parametrize(
    ("length", "says"),
    [
        ("max_seq_len: 2048", ""),
        ("max_seq_len: null", "tokenizer.max_seq_len: has no value (no limit there); 4096"),
        ("prompt_template: null", "data.seq_len: no row is cut there"),
    ],
)
def test_rows_of_any_length_are_told(tmp_path: Path, length: str, says: str) -> None:
    _, notes = recipe_of(tmp_path, oak_yaml=OWN.replace("max_seq_len: 2048", length))
    assert says in notes
    assert bool(says) == ("4096" in notes)
