"""The T5 pipeline's JSON and options: batches per GPU, machines, what was fixed inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from tests.adopt.stand_ins import T5, T5_OPTIONS, recipe_of


def with_keys(**changes: Any) -> str:
    return json.dumps({**json.loads(T5), **changes})


def test_one_machine_with_one_gpu(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, news_json=T5)
    assert (recipe.name, recipe.registry.name, recipe.registry.kind) == (
        "Headlines-1",
        "Headlines-1",
        "vertex",
    )
    assert recipe.model.source == "hf:google-t5/t5-small"
    assert "t5-small is called google-t5/t5-small on the hub now" in notes
    source = recipe.data.train[0]
    assert (source.source, source.columns) == (
        "hf:org/news",
        {"source": "body", "target": "headline"},
    )
    assert isinstance(recipe.data.validation, list)
    assert recipe.data.validation[0].split == "validation"
    assert (recipe.train.micro_batch, recipe.train.global_batch, recipe.train.epochs) == (12, 12, 2)
    assert (recipe.launch.kind, recipe.launch.nodes, recipe.launch.processes) == ("gce", 1, 1)
    assert (
        recipe.launch.machine.type,
        recipe.launch.machine.accelerator,
        recipe.launch.machine.accelerators,
    ) == ("n1-standard-8", "nvidia-tesla-t4", 1)
    assert (
        recipe.serve.machine.type,
        recipe.serve.machine.accelerator,
        recipe.serve.machine.accelerators,
    ) == ("n1-standard-4", "NVIDIA_TESLA_T4", 1)
    assert (recipe.cloud.zone, recipe.cloud.region) == ("europe-west4-b", "europe-west4")
    assert (
        recipe.parallel.shard,
        recipe.memory.offload.weights,
        recipe.memory.offload.optimizer,
    ) == (1, False, 1.0)
    assert "cloud.project, cloud.bucket: stood on that project's command line" in notes
    assert "cluster_prefix: machines are named after the run" in notes


def test_a_cluster_shares_the_weights_and_the_batch(tmp_path: Path) -> None:
    text = with_keys(
        node_count=2,
        gpu_count=8,
        batch_size=19,
        machine_type="a2-ultragpu-8g",
        gpu_type="nvidia-a100-80gb",
        dataset_subset="3.0.0",
    )
    recipe, notes = recipe_of(tmp_path, news_json=text)
    assert (recipe.train.micro_batch, recipe.train.global_batch) == (19, 304)
    assert (
        recipe.launch.nodes,
        recipe.launch.processes,
        recipe.parallel.shard,
        recipe.memory.offload.weights,
    ) == (2, 8, 16, True)
    assert (
        recipe.launch.machine.type,
        recipe.launch.machine.accelerator,
        recipe.launch.machine.accelerators,
    ) == ("a2-ultragpu-8g", None, 0)
    assert "a2-ultragpu-8g brings its accelerators" in notes
    assert recipe.data.train[0].source == "hf:org/news:3.0.0"


def test_what_was_fixed_inside_is_explicit(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, news_json=T5)
    assert (
        recipe.data.seq_len,
        recipe.data.target_len,
        recipe.checkpoint.keep,
        recipe.precision.compute,
    ) == (256, 30, 10, "bf16")
    optimizer, schedule = recipe.train.optimizer, recipe.train.schedule
    assert optimizer.kind == "adamw"
    assert (optimizer.lr, optimizer.weight_decay, optimizer.betas) == (5.6e-5, 0.01, (0.9, 0.999))
    assert (schedule.kind, schedule.warmup, schedule.min_ratio) == ("linear", 0, 0.0)
    assert recipe.objective.kind == "seq2seq"
    assert recipe.objective.prefix == ""
    assert recipe.gate.metric == ["rouge/rouge1", "rouge/rouge2", "rouge/rougeL"]
    rouge = recipe.tasks[1]
    assert rouge.kind == "rouge"
    assert (rouge.limit, rouge.max_tokens) == (None, 30)
    assert recipe.train.evaluate_every == "epoch"
    assert "ROUGE: was times 100" in notes


def test_the_options_of_its_command_line(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, news_json=T5, options_args=T5_OPTIONS)
    assert (recipe.cloud.project, recipe.pipeline.root, recipe.cloud.bucket) == (
        "forest-lab",
        "gs://forest-bucket/t5",
        "forest-bucket",
    )
    assert (recipe.pipeline.cache, recipe.gate.override) == (False, "deploy")
    assert "--image_tag: is of that project's images" in notes
    assert "stood on that project's command line" not in notes


def test_a_data_set_in_a_bucket_and_names_of_before(tmp_path: Path) -> None:
    assert (
        recipe_of(tmp_path, news_json=with_keys(dataset="gs://b/saved"))[0].data.train[0].source
        == "gs://b/saved"
    )
    recipe, notes = recipe_of(
        tmp_path, news_json=with_keys(dataset="cnn_dailymail", dataset_subset="3.0.0")
    )
    assert recipe.data.train[0].source == "hf:abisee/cnn_dailymail:3.0.0"
    assert "cnn_dailymail is called abisee/cnn_dailymail on the hub now" in notes


def test_a_machine_type_that_contradicts_the_number_of_gpus_is_told(tmp_path: Path) -> None:
    _, notes = recipe_of(tmp_path, news_json=with_keys(machine_type="a2-highgpu-8g", gpu_count=4))
    assert "a2-highgpu-8g has 8 accelerators, gpu_count says 4" in notes
    assert (
        "a2-highgpu-8g has"
        not in recipe_of(tmp_path, news_json=with_keys(machine_type="a2-highgpu-8g", gpu_count=8))[
            1
        ]
    )


def test_serving_without_a_gpu(tmp_path: Path) -> None:
    recipe, _ = recipe_of(tmp_path, news_json=with_keys(deploy_gpu_type=None, deploy_gpu_count=0))
    assert (recipe.serve.machine.accelerator, recipe.serve.machine.accelerators) == (None, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"zone": "mars"}, "zone is 'mars'; it should be a zone, such as us-central1-c"),
        ({"epochs": -1}, "it should be a number from 1 to 100,000"),
        ({"gpu_count": "x"}, "it should be a number"),
        ({"batch_size": [1]}, "is a list; it should be a number"),
    ],
)
def test_values_that_cannot_be_are_refused(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(WrongInput) as refused:
        recipe_of(tmp_path, news_json=with_keys(**changes))
    assert says in str(refused.value)
