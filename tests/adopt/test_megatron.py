"""Megatron-style flags in both of their spellings: layout, memory, data, Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from tests.adopt.stand_ins import CONVERSION, MEGATRON, PREPROCESSING, recipe_of

LEAST = "--hf-model-id org/base --dataset-dir d"


def test_everything_at_once(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, b_args=MEGATRON)
    parallel, train = recipe.parallel, recipe.train
    assert (recipe.name, recipe.model.source, recipe.model.init) == (
        "birch",
        "hf:meta-llama/Llama-3.1-8B",
        "weights",
    )
    assert (
        parallel.tensor,
        parallel.pipeline,
        parallel.virtual,
        parallel.context,
        parallel.sequence,
    ) == (4, 2, 2, 1, True)
    assert (
        train.global_batch,
        train.micro_batch,
        train.epochs,
        train.steps,
        recipe.data.seq_len,
    ) == (512, 2, 1, None, 4096)
    assert train.optimizer.kind == "adamw"
    assert (train.optimizer.lr, train.optimizer.betas, train.optimizer.weight_decay) == (
        1e-4,
        (0.9, 0.95),
        0.1,
    )
    assert (
        train.schedule.kind,
        train.schedule.warmup,
        train.schedule.min_ratio,
        train.clip_norm,
    ) == ("cosine", 20, 0.1, None)
    slurm = recipe.launch.slurm
    assert (
        recipe.launch.kind,
        recipe.launch.nodes,
        recipe.launch.processes,
        recipe.launch.code,
    ) == ("slurm", 4, 8, "image")
    assert (slurm.account, slurm.partition, slurm.image, slurm.gpus) == (
        "forest",
        "long",
        "registry.example/nemo:25",
        8,
    )
    assert (recipe.memory.recompute.kind, recipe.memory.offload.optimizer) == ("selective", 0.5)
    assert (recipe.precision.float8, recipe.precision.compute) == ("tensorwise", "bf16")
    assert recipe.data.train[0].source == "megatron:corpora/wiki/wiki_text_document"
    assert recipe.track.wandb is not None
    assert recipe.track.wandb.project == "birch"
    for told in (
        "launch.slurm.image: that image holds NeMo",
        "--constant-steps: the cosine ends",
        "-M: not needed",
        "--nemo-model: weights come from",
    ):
        assert told in notes
    assert "Contradictions" not in notes


def test_its_defaults_are_explicit(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, b_args=LEAST)
    assert (recipe.name, recipe.launch.kind, recipe.launch.nodes, recipe.launch.processes) == (
        "pretraining",
        "local",
        1,
        8,
    )
    assert (
        recipe.train.global_batch,
        recipe.train.micro_batch,
        recipe.data.seq_len,
        recipe.train.epochs,
    ) == (2048, 1, 8192, 1)
    assert (
        recipe.train.optimizer.lr,
        recipe.train.optimizer.weight_decay,
        recipe.train.clip_norm,
    ) == (5e-6, 0.0, 1.0)
    assert recipe.train.optimizer.kind == "adamw"
    assert recipe.train.optimizer.betas == (0.9, 0.999)
    assert (
        recipe.train.schedule.min_ratio,
        recipe.train.schedule.warmup,
        recipe.parallel.sequence,
    ) == (0.2, 50, False)
    assert (recipe.model.init, recipe.precision.float8, recipe.track.wandb) == (
        "random",
        "none",
        None,
    )
    assert recipe.data.train[0].source == "megatron:d/*"
    assert "without --nemo-model weights were random" in notes


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 4 --micro-batch-size 2 --dataset-dir other",
        "--tensor_model_parallel_size 4 --micro_batch_size 2 --dataset_path other",
        "-TP 4 -mbs 2 --dataset_dir=other",
        "-TP=4 --micro-batch-size=2 --dataset-path other",
    ],
)
def test_both_spellings_mean_the_same(flags: str, tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, b_args=f"--hf_model_id org/base {flags}")
    assert (recipe.parallel.tensor, recipe.train.micro_batch, recipe.data.train[0].source) == (
        4,
        2,
        "megatron:other/*",
    )
    assert "Unknown" not in notes


def test_two_spellings_that_contradict_each_other_are_told(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, b_args=f"{LEAST} -TP 2 --tensor_model_parallel_size 4")
    assert recipe.parallel.tensor == 4
    assert (
        "--tensor_model_parallel_size: b.args says '2', b.args says '4'; the last one is taken"
        in notes
    )


def test_preprocessing_alone_reads_the_texts(tmp_path: Path) -> None:
    recipe, notes = recipe_of(
        tmp_path, p_args=PREPROCESSING.replace("--hf-tokenizer", "--ht-tokenizer")
    )
    assert recipe.data.train[0].source == "dumps/wiki/*.jsonl"
    assert recipe.tokenizer.source == "hf:meta-llama/Llama-3.1-8B"
    assert "`ingot prepare` writes the same .bin and .idx" in notes


def test_preprocessing_beside_training_names_the_columns(tmp_path: Path) -> None:
    recipe, notes = recipe_of(
        tmp_path, p_args=PREPROCESSING, b_args="--hf-model-id org/base --dataset-dir corpora/wiki"
    )
    assert recipe.data.train[0].source == "megatron:corpora/wiki/wiki_text_document"
    assert "--input-dir: the .bin and .idx of --dataset-dir are used" in notes
    assert "Contradictions" not in notes
    notes = recipe_of(
        tmp_path, p_args=PREPROCESSING, b_args="--hf-model-id org/base --dataset-dir elsewhere"
    )[1]
    assert "corpora/wiki is written there and elsewhere is read" in notes


def test_conversion_is_a_verb(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, c_args=CONVERSION)
    assert recipe.model.source == "hf:meta-llama/Llama-3.1-8B"
    assert "ingot import SRC DST --overwrite" in notes


@pytest.mark.parametrize(
    ("flags", "recompute", "activations", "told"),
    [
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            ("full", "block", 3),
            False,
            "",
        ),
        ("--recompute-granularity full", ("full", "uniform", 1), False, "full needed its method"),
        (
            "--recompute-granularity selective --recompute-num-layers 3",
            ("selective", "uniform", 1),
            False,
            "are for --recompute-granularity full",
        ),
        ("--cpu-offloading --cpu-offloading-activations", ("none", "uniform", 1), True, ""),
        (
            "--cpu-offloading --cpu-offloading-weights",
            ("none", "uniform", 1),
            False,
            "weights are offloaded by sharding",
        ),
        (
            "--cpu-offloading-activations",
            ("none", "uniform", 1),
            False,
            "did nothing without --cpu-offloading",
        ),
        (
            "--cpu-offloading",
            ("none", "uniform", 1),
            False,
            "names neither activations nor weights",
        ),
        (
            "--recompute-granularity selective --cpu-offloading --cpu-offloading-activations",
            ("selective", "uniform", 1),
            False,
            "exclude each other",
        ),
    ],
)
def test_memory(
    flags: str, recompute: tuple[str, str, int], activations: bool, told: str, tmp_path: Path
) -> None:
    recipe, notes = recipe_of(tmp_path, b_args=f"{LEAST} {flags}")
    found = recipe.memory.recompute
    assert (found.kind, found.method, found.layers) == recompute
    assert recipe.memory.offload.activations is activations
    assert told in notes


def test_the_whole_optimizer_is_offloaded_unless_a_share_is_given(tmp_path: Path) -> None:
    assert (
        recipe_of(tmp_path, b_args=f"{LEAST} --optim-cpu-offloading")[0].memory.offload.optimizer
        == 1.0
    )
    assert recipe_of(tmp_path, b_args=LEAST)[0].memory.offload.optimizer == 0.0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("-gbs 100 -mbs 3", "100 is no multiple of 3 x 8"),
        ("-gbs 12", "12 is no multiple of 1 x 8"),
        ("-TP 3", "8 GPUs do not divide by tensor x pipeline x context = 3"),
        ("-VPP 2", "means nothing"),
        ("--min-lr 1", "the learning rate would rise"),
        ("--optimizer muon", "muon is not offered"),
        ("-A x", "-A: is for --executor slurm"),
        ("--wandb-project x", "Weights & Biases is off without --wandb"),
        ("--wandb-name y", "Weights & Biases is off without --wandb"),
    ],
)
def test_what_does_not_go_together_is_told(flags: str, says: str, tmp_path: Path) -> None:
    assert says in recipe_of(tmp_path, b_args=f"{LEAST} {flags}")[1]
    assert says not in recipe_of(tmp_path, b_args=LEAST)[1]


def test_stochastic_gradient_descent(tmp_path: Path) -> None:
    assert (
        recipe_of(tmp_path, b_args=f"{LEAST} --optimizer sgd --lr 0.1 --weight-decay 0.01")[
            0
        ].train.optimizer.kind
        == "sgd"
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--executor kubernetes", "--executor is 'kubernetes'; it should be local or slurm"),
        ("-TP 0", "-TP is '0'; it should be a number from 1"),
        ("--recompute-granularity half", "it should be full or selective"),
        ("--lr high", "it should be a number"),
        (
            "--optim-cpu-offloading --optim-cpu-offloading-frac 2",
            "`memory.offload.optimizer` is 2.0; it should be less than or equal to 1",
        ),
    ],
)
def test_values_that_cannot_be_are_refused(flags: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(WrongInput) as refused:
        recipe_of(tmp_path, b_args=f"{LEAST} {flags}")
    assert says in str(refused.value)


def test_a_model_without_its_owner_gets_one_and_a_note(tmp_path: Path) -> None:
    recipe, notes = recipe_of(
        tmp_path, b_args="--hf-model-id Llama-3.1-8B-Instruct --dataset-dir d"
    )
    assert recipe.model.source == "hf:meta-llama/Llama-3.1-8B-Instruct"
    assert "Llama-3.1-8B-Instruct is called meta-llama/Llama-3.1-8B-Instruct on the hub" in notes


MIXTURE = (
    f"{LEAST} --num-experts 64 --moe-router-topk 8 --moe-grouped-gemm -TP 2 -EP 4"
    " --moe-router-load-balancing-type {} --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"
)


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    flags = " --moe-router-enable-expert-bias --moe-expert-capacity-factor 1.25"
    recipe, notes = recipe_of(tmp_path, b_args=MIXTURE.format("seq_aux_loss") + flags)
    assert (recipe.parallel.tensor, recipe.parallel.expert) == (2, 8)
    routers = recipe.train.experts
    assert (routers.aux_loss, routers.z_loss, routers.bias_rate) == (1e-2, 1e-3, 1e-3)
    for told in (
        "--num-experts: not needed",
        "--moe-router-topk: not needed",
        "--moe-grouped-gemm: is what happens",
        "--moe-expert-capacity-factor: no token is dropped",
        "--expert-model-parallel-size: 8 ranks share whole experts",
    ):
        assert told in notes
    assert "over a batch" not in notes


@pytest.mark.parametrize(
    ("flags", "aux_loss", "says"),
    [
        (MIXTURE.format("aux_loss"), 1e-2, "aux_loss is over a batch"),
        (MIXTURE.format("global_aux_loss"), 1e-2, "global_aux_loss is over a batch"),
        (MIXTURE.format("sinkhorn"), 0.0, "sinkhorn is not offered"),
        (MIXTURE.format("none"), 0.0, "does nothing with --moe-router-load-balancing-type none"),
        (f"{LEAST} --moe-router-bias-update-rate 0.1", 0.0, "does nothing without --moe-router"),
    ],
)
def test_what_balances_the_experts(flags: str, aux_loss: float, says: str, tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, b_args=flags)
    assert recipe.train.experts.aux_loss == aux_loss
    assert recipe.train.experts.bias_rate == 0
    assert says in notes


@pytest.mark.parametrize(
    ("flags", "expert"),
    [("-EP 4", 4), ("-TP 4 -EP 2 -ETP 1", 4), ("-TP 2 --num-experts 8", 2), ("-EP 2 -ETP 2", 4)],
)
def test_experts_are_shared_by_whole_groups(flags: str, expert: int, tmp_path: Path) -> None:
    recipe, _ = recipe_of(tmp_path, b_args=f"{LEAST} {flags}")
    assert recipe.parallel.expert == expert
