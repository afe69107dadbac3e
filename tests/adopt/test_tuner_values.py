"""Values of tuners that mean something else here, or that are not given and have defaults there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.adopt.stand_ins import ASH, FIR, LLAMAFACTORY, recipe_of

OAK = "--model_name_or_path roberta-base --train_file oak.txt --max_seq_length 64"


@pytest.mark.parametrize(("mark", "lost"), [("train", False), ("keep", True)])
def test_a_mark_of_untrained_answers_with_another_name_is_told(
    tmp_path: Path, mark: str, lost: bool
) -> None:
    text = f"{ASH}    message_field_training: {mark}\n"
    notes = recipe_of(tmp_path, ash_yaml=text)[1]
    assert ("datasets[].message_field_training: an answer is left out by" in notes) == lost


@pytest.mark.parametrize(("norm", "clip"), [("0", None), ("0.0", None), ("0.3", 0.3)])
def test_no_clipping_is_carried(tmp_path: Path, norm: str, clip: float | None) -> None:
    for project in ({"ash_yaml": ASH}, {"elm_yaml": LLAMAFACTORY}, {"fir_yaml": FIR}):
        given = {name: f"{text}max_grad_norm: {norm}\n" for name, text in project.items()}
        assert recipe_of(tmp_path, **given)[0].train.clip_norm == clip
    assert recipe_of(tmp_path, fir_yaml=FIR)[0].train.clip_norm == 1.0


@pytest.mark.parametrize(
    ("given", "clip"),
    [
        (" --mean_noise_span_length 3", None),
        (" --mean_noise_span_length 3 --adafactor", 1.0),
        ("", 1.0),
    ],
    ids=["T5", "Adafactor, which clips its updates", "run_mlm.py"],
)
def test_a_script_that_does_not_clip_is_adopted_without_clipping(
    tmp_path: Path, given: str, clip: float | None
) -> None:
    assert recipe_of(tmp_path, oak_args=OAK + given)[0].train.clip_norm == clip


def test_texts_of_trl_are_pretrained_on(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, fir_yaml=f"{FIR}dataset_text_field: body\n")
    assert (recipe.objective.kind, recipe.data.train[0].text) == ("pretrain", "body")
    assert (recipe.data.pack, recipe.train.optimizer.lr) == ("none", 2e-5)
    assert "dataset_text_field: SFT of plain texts is objective.kind=pretrain" in notes
    text = f"{FIR}dataset_text_field: body\nloss_type: ipo\n"
    recipe, notes = recipe_of(tmp_path, fir_yaml=text)
    assert recipe.objective.kind == "ipo"
    assert "dataset_text_field: ipo does not train on plain texts" in notes


@pytest.mark.parametrize(
    ("project", "given", "warmup", "says"),
    [
        ("ash_yaml", "", 0.03, "warmup_steps: is not given: 0.03 of all steps, of which 100"),
        ("ash_yaml", "warmup_steps: 0\n", 0, ""),
        ("ash_yaml", "warmup_ratio: 0.2\n", 0.2, ""),
        ("ash_yaml", "lr_scheduler: constant\n", 0, ""),
        ("ash_yaml", "lr_scheduler: constant\nwarmup_steps: 9\n", 0, "warmup_steps: not needed"),
        ("ash_yaml", "lr_scheduler: constant_with_warmup\nwarmup_steps: 9\n", 9, ""),
        ("fir_yaml", "", 0, ""),
        ("fir_yaml", "lr_scheduler_type: constant\nwarmup_ratio: 0.1\n", 0, "warmup_ratio: not"),
        ("fir_yaml", "warmup_steps: 0\nwarmup_ratio: 0.1\n", 0.1, ""),
    ],
)
def test_what_warms_up_is_what_warmed_up_there(
    tmp_path: Path, project: str, given: str, warmup: float, says: str
) -> None:
    text = {"ash_yaml": ASH, "fir_yaml": FIR}[project]
    recipe, notes = recipe_of(tmp_path, **{project: text + given})
    assert recipe.train.schedule.warmup == warmup
    assert says in notes
    assert bool(says) == ("warmup_" in notes)


@pytest.mark.parametrize(
    ("project", "schedule", "given", "lowest"),
    [
        ("ash_yaml", "cosine", "cosine_min_lr_ratio: 0.2\n", 0.2),
        ("ash_yaml", "cosine_with_min_lr", "learning_rate: 2e-4\n", 0.0),
        ("ash_yaml", "cosine_with_min_lr", "lr_scheduler_kwargs: {min_lr_rate: 0.3}\n", 0.3),
        ("fir_yaml", "cosine_with_min_lr", "lr_scheduler_kwargs: {min_lr_rate: 0.1}\n", 0.1),
        (
            "fir_yaml",
            "cosine_with_min_lr",
            "lr_scheduler_kwargs: {min_lr: 3e-6}\nlearning_rate: 2e-5\n",
            0.15,
        ),
        ("fir_yaml", "cosine_with_min_lr", "lr_scheduler_kwargs: {min_lr: 2e-6}\n", 0.1),
    ],
)
def test_the_lowest_rate_of_a_schedule_is_carried(
    tmp_path: Path, project: str, schedule: str, given: str, lowest: float
) -> None:
    key = "lr_scheduler" if project == "ash_yaml" else "lr_scheduler_type"
    text = {"ash_yaml": ASH, "fir_yaml": FIR}[project]
    recipe, notes = recipe_of(tmp_path, **{project: f"{text}{key}: {schedule}\n{given}"})
    assert recipe.train.schedule.min_ratio == lowest
    assert "is not known" not in notes
    assert "does not read it there" not in notes
    assert ("set train.schedule.min_ratio to its minimum" in notes) == (lowest == 0)


@pytest.mark.parametrize(
    ("schedule", "given"),
    [
        ("linear", "cosine_min_lr_ratio: 0.2"),
        ("cosine_with_min_lr", "cosine_min_lr_ratio: 0.2"),
        ("cosine", "lr_scheduler_kwargs: {min_lr_rate: 0.2}"),
        ("linear", "lr_scheduler_kwargs: {min_lr: 1e-6}\nlearning_rate: 2e-5"),
    ],
)
def test_a_lowest_rate_that_the_schedule_does_not_read_is_none(
    tmp_path: Path, schedule: str, given: str
) -> None:
    text = f"{ASH}lr_scheduler: {schedule}\n{given}\n"
    recipe, notes = recipe_of(tmp_path, ash_yaml=text)
    assert recipe.train.schedule.min_ratio == 0.0
    assert f"not needed: the schedule {schedule} does not read it there" in notes


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "assistant_only_loss: is not true: all of a row that is not of prompt and completion"),
        ("assistant_only_loss: false\n", "assistant_only_loss: is not true: all of a row"),
        ("completion_only_loss: false\n", "completion_only_loss: is not true: all of every row"),
        ("assistant_only_loss: true\n", ""),
        ("completion_only_loss: true\n", ""),
        ("loss_type: ipo\n", ""),
    ],
)
def test_questions_that_trl_trains_and_that_are_not_trained_here_are_told(
    tmp_path: Path, given: str, says: str
) -> None:
    notes = recipe_of(tmp_path, fir_yaml=FIR + given)[1]
    assert says in notes
    assert bool(says) == ("_only_loss" in notes)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("max_length: null\n", "max_length: has no value (no limit there); 1024, its default"),
        ("lr_scheduler_type:\n", "lr_scheduler_type: has no value; linear, its default there"),
        ("max_grad_norm: null\n", "max_grad_norm: has no value, with which transformers does not"),
        ("run_name:\nmax_length: 64\n", ""),
    ],
)
def test_a_key_without_a_value_is_not_taken_for_its_default_in_silence(
    tmp_path: Path, given: str, says: str
) -> None:
    text = "model_name_or_path: org/fir-1b\ndataset_name: org/rows\n"
    notes = recipe_of(tmp_path, fir_yaml=text + given)[1]
    assert says in notes
    assert bool(says) == ("has no value" in notes)


@pytest.mark.parametrize(
    ("project", "given", "says"),
    [
        ("ash_yaml", "bf16: auto\n", ""),
        ("ash_yaml", "bf16: full\n", "bf16: the weights had this format there too"),
        ("elm_yaml", "pure_bf16: true\n", "pure_bf16: the weights had this format there too"),
        ("elm_yaml", "pure_bf16: false\n", ""),
    ],
)
def test_weights_of_fewer_bits_are_told(
    tmp_path: Path, project: str, given: str, says: str
) -> None:
    text = {"ash_yaml": ASH, "elm_yaml": LLAMAFACTORY.replace("bf16: true\n", "")}[project]
    recipe, notes = recipe_of(tmp_path, **{project: text + given})
    assert (recipe.precision.compute == "bf16") or "false" in given
    assert says in notes
    assert bool(says) == ("had this format" in notes)


def test_activations_that_axolotl_offloads_are_computed_again(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, ash_yaml=f"{ASH}gradient_checkpointing: offload\n")
    assert recipe.memory.recompute.kind == "full"
    assert "gradient_checkpointing: offload: activations are computed again here" in notes
    recipe, notes = recipe_of(tmp_path, ash_yaml=f"{ASH}gradient_checkpointing: true\n")
    assert (recipe.memory.recompute.kind, "activations" in notes) == ("full", False)


@pytest.mark.parametrize(
    ("project", "given", "compute"),
    [
        ("ash_yaml", "", "auto"),
        ("ash_yaml", "bf16: false\nfp16: false\n", "fp32"),
        ("ash_yaml", "bf16: false\nfp16: true\n", "bf16"),
        ("fir_yaml", "fp16: false\n", "auto"),
        ("fir_yaml", "bf16: false\n", "fp32"),
        ("elm_yaml", "", "auto"),
        ("elm_yaml", "bf16: false\n", "auto"),
        ("elm_yaml", "bf16: true\n", "bf16"),
        ("elm_yaml", "finetuning_type: full\n", "fp32"),
        ("elm_yaml", "finetuning_type: full\nbf16: false\n", "fp32"),
        ("elm_yaml", "finetuning_type: full\nfp16: true\n", "bf16"),
        ("oak_args", "", "fp32"),
        ("oak_args", " --bf16", "bf16"),
        ("oak_args", " --dtype bfloat16", "bf16"),
        ("oak_args", " --bf16 False", "fp32"),
    ],
)
def test_products_are_as_exact_as_there(
    tmp_path: Path, project: str, given: str, compute: str
) -> None:
    text = {
        "ash_yaml": ASH,
        "fir_yaml": FIR,
        "elm_yaml": LLAMAFACTORY.replace("bf16: true\n", ""),
        "oak_args": OAK,
    }[project]
    recipe, notes = recipe_of(tmp_path, **{project: text + given})
    assert recipe.precision.compute == compute
    slow = compute == "fp32" and "bf16" not in given
    assert ("bf16: is not given, nor fp16, and products are those of fp32" in notes) == slow


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("stage: sft", False),
        ("stage: sft\npacking: true", True),
        ("stage: sft\npacking: true\nneat_packing: true", False),
        ("stage: pt", True),
        ("stage: pt\npacking: false", False),
    ],
)
def test_packed_rows_of_llamafactory_see_each_other_there(
    tmp_path: Path, given: str, told: bool
) -> None:
    text = LLAMAFACTORY.replace("stage: dpo", given)
    _, notes = recipe_of(tmp_path, elm_yaml=text)
    assert ("packing: documents in one row see each other there" in notes) == told


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        ("adamw_torch_fused", ""),
        ("paged_adamw_32bit", "optimizer: paged_adamw_32bit: its state is float32 here"),
        ("ao_adamw_fp8", "optimizer: ao_adamw_fp8: its state is float32 here"),
        ("galore_adamw", "optimizer: galore_adamw is not offered; AdamW"),
        ("schedule_free_adamw", "optimizer: schedule_free_adamw is not offered; AdamW"),
        ("muon", "optimizer: muon is not offered; AdamW"),
    ],
)
def test_an_optimizer_that_is_not_adamw_is_told(tmp_path: Path, optimizer: str, says: str) -> None:
    _, notes = recipe_of(tmp_path, ash_yaml=f"{ASH}optimizer: {optimizer}\n")
    assert says in notes
    assert bool(says) == ("optimizer:" in notes)


def test_keys_of_trackers_layouts_and_rows_have_their_knobs(tmp_path: Path) -> None:
    given = """
expert_parallel_size: 2
dp_shard_size: 4
dp_replicate_size: 2
sequence_parallel_degree: 2
fsdp: [full_shard]
use_tensorboard: false
mlflow_tracking_uri: http://mlflow:5000
mlflow_experiment_name: ash
use_trackio: true
trackio_space_id: org/space
"""
    recipe, notes = recipe_of(tmp_path, ash_yaml=ASH + given)
    layout, track = recipe.parallel, recipe.track
    assert (layout.expert, layout.shard, layout.replicate, layout.context) == (2, 4, 2, 2)
    assert track.mlflow is not None
    assert (track.mlflow.uri, track.mlflow.experiment) == ("http://mlflow:5000", "ash")
    assert track.trackio is not None
    assert (track.trackio.space, track.tensorboard) == ("org/space", False)
    assert not any(line.partition(":")[0] in notes for line in given.split("\n") if line)
    more = "report_to: [mlflow, trackio]\nrun_name: third\ntruncation_mode: keep_end\n"
    recipe, notes = recipe_of(tmp_path, fir_yaml=FIR + more)
    assert recipe.track.mlflow is not None
    assert recipe.track.trackio is not None
    assert (recipe.track.mlflow.name, recipe.track.trackio.name) == ("third", "third")
    assert recipe.data.truncate == "left"
    assert "truncation_mode" not in notes
    texts = f"{FIR}dataset_text_field: text\ntruncation_mode: keep_end\n"
    recipe, notes = recipe_of(tmp_path, fir_yaml=texts)
    assert recipe.data.truncate == "right"
    assert "truncation_mode: not needed: texts that are too long go on in the next row" in notes


@pytest.mark.parametrize(
    ("given", "mlflow"),
    [
        ("mlflow_tracking_uri: http://mlflow:5000\n", True),
        ("mlflow_tracking_uri: http://mlflow:5000\nuse_mlflow: false\n", False),
        ("mlflow_experiment_name: ash\nuse_mlflow: false\n", True),
        ("use_mlflow: false\n", False),
    ],
)
def test_a_tracker_is_on_where_axolotl_turns_it_on(
    tmp_path: Path, given: str, mlflow: bool
) -> None:
    track = recipe_of(tmp_path, ash_yaml=f"{ASH}{given}")[0].track
    assert (track.mlflow is not None, track.trackio) == (mlflow, None)


@pytest.mark.parametrize("double", [None, True, False])
def test_scales_of_frozen_weights_are_kept_as_there(tmp_path: Path, double: bool | None) -> None:
    """In eight bits unless told otherwise, but for TRL, which is to be told."""

    def kept(key: str, **text: str) -> bool:
        given = "" if double is None else f"{key}: {str(double).lower()}\n"
        ((name, lines),) = text.items()
        quantize = recipe_of(tmp_path, **{name: lines + given})[0].model.quantize
        assert quantize is not None
        return quantize.double

    usual = double is not False
    nested = "bnb_config_kwargs:\n  bnb_4bit_use_double_quant"
    four = "load_in_4bit: true\n"
    assert kept(nested, ash_yaml=f"{ASH}{four}adapter: qlora\n") == usual
    lines = f"{LLAMAFACTORY}quantization_bit: 4\n"
    assert kept("double_quantization", elm_yaml=lines) == usual
    assert kept("use_bnb_nested_quant", fir_yaml=f"{FIR}{four}use_peft: true\n") == bool(double)


def test_patience_of_llamafactory_is_carried_where_it_says_when_to_evaluate(
    tmp_path: Path,
) -> None:
    given = "early_stopping_steps: 5\n"
    text = re.sub("eval_.*", "", LLAMAFACTORY)
    assert "train.early_stop.patience=5" in recipe_of(tmp_path, elm_yaml=text + given)[1]
    text += "eval_strategy: steps\neval_steps: 10\n"
    stop = recipe_of(tmp_path, elm_yaml=text + given)[0].train.early_stop
    assert stop is not None
    assert stop.patience == 5
