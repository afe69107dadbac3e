"""Configurations in the manner of the seven projects, written for these tests; and a way to
adopt and load them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ingot.adopt.convert import Adopted, adopt
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe

CLOUD = """\
# resources
PROJECT_ID=forest-lab
PROJECT_NUMBER=4711
REGION=europe-north1
REPOSITORY=forest
SERVICE_ACCOUNT=trainer@${PROJECT_ID}.iam.gserviceaccount.com
SUBNETWORK=projects/forest-lab/regions/europe-north1/subnetworks/pines
HF_SECRET_NAME=projects/4711/secrets/hub/versions/3
TENSORBOARD=projects/4711/locations/europe-north1/tensorboards/99
BUCKET_NAME=forest-bucket
SPARK_RUNTIME_VERSION="2.2"   # quoted
CUDA_VERSION=12.4
CUDA_IMAGE=forest-cuda
"""
TORCHTUNE = """\
output_dir: gs://forest-bucket/models/spruce
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: base/original/tokenizer.model, max_seq_len: 2048}
dataset: {packed: true}
seed: 7
shuffle: false
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
batch_size: 4
epochs: 3
optimizer: {_component_: torch.optim.AdamW, lr: 3e-5, fused: true}
gradient_accumulation_steps: 16
max_steps_per_epoch: null
enable_activation_checkpointing: true
enable_activation_offloading: true
fsdp_cpu_offload: true
compile: false
dtype: bf16
metric_logger: {_component_: torchtune.training.metric_logging.WandBLogger, project: spruce, log_dir: "${output_dir}/logs"}
profiler: {enabled: true, wait_steps: 2, warmup_steps: 1, active_steps: 4}
log_every_n_steps: 5
"""
PIPELINE = """\
pretrained_hf_model: meta-llama/Llama-3.1-8B
source_query: |
  SELECT id, body AS text
  FROM `forest.archive.pages`  -- all
normal_form: NFKD
ngram_len: 4
minhash_perm: 64
sim_threshold: 0.15
train_config: spruce.yaml
"""
T5 = """\
{
\t"dataset": "org/news", "dataset_subset": "default", "document_column": "body", "summary_column": "headline",
\t"cluster_prefix": "larch", "zone": "europe-west4-b", "node_count": 1,
\t"model_checkpoint": "t5-small", "machine_type": "n1-standard-8", "gpu_type": "nvidia-tesla-t4", "gpu_count": 1,
\t"batch_size": 12, "epochs": 2, "model_display_name": "Headlines 1",
\t"deploy_machine_type": "n1-standard-4", "deploy_gpu_type": "NVIDIA_TESLA_T4", "deploy_gpu_count": 1
}
"""
T5_OPTIONS = (
    "python pipeline.py --project=forest-lab --pipeline_root gs://forest-bucket/t5 --enable_caching"
    " false --override_deploy --image_tag v1\n"
)
CLASSIFIER = """\
python train.py --job-dir /srv/jobs/reviews \\
  --train-data-file reviews.csv --batch_size 24 --num-classes 3 \\
  --model_name org/small-encoder --learning_rate 2e-5 --gpus 0,1,2 --accelerator dp --precision 32 --max-epochs 4
"""
LLAMA = """\
HF_PRETRAIN_DATASET=org/pages
HF_PRETRAIN_DATASET_NAME=sample-10BT
HF_PRETRAIN_TARGET_PATH=./shards
HF_INSTRUCT_DATASET=org/chats
PRETRAIN_SAVE_CHECKPOINTS_PATH=./out/pretrain
PRETRAIN_LOAD_CHECKPOINTS_PATH=./out/old.pt
NUMBER_OF_CPU_PROCESSES=6
HELLASWAG_PATH=./hellaswag.jsonl
SAVE_CHECKPOINTS=true
WNB_ENABLED=true
WNB_PROJECT_NAME="alder run"
HUGGINGFACE_TOKENIZER=org/tokenizer
TOTAL_BATCH_SIZE=524288
MAX_LR=6e-4
MIN_LR=6e-5
WARMUP_STEPS=100
WEIGHT_DECAY=0.1
MAX_STEPS=1200
EARLY_STOPPING_PATIENCE=4
IS_INSTRUCT_TRAINING=false
IS_DPO_TRAINING=false
LORA_ENABLED=false
LORA_RANK=32
VALIDATE_EVERY_X_STEPS=50
VAL_STEPS=10
HELLASWAG_EVERY_X_STEPS=250
HELLASWAG_NUMBER_OF_EXAMPLES=500
GENERATE_EVERY_X_STEPS=100
MAX_TEST_GEN_LEN=32
TEST_PRETRAIN_GENERATION_PROMPTS=["Once upon a time", "The forest"]
TEST_INSTRUCT_GENERATION_PROMPTS=["Who are you?"]
DIM=1024
N_LAYERS=12
N_HEADS=16
N_KV_HEADS=4
MULTIPLE_OF=256
NORM_EPS=1e-5
ROPE_THETA=500000.0
MAX_BATCH_SIZE=8
MAX_SEQ_LEN=1024
"""
LLAMAFACTORY = """\
### model
model_name_or_path: org/elm-1b-instruct
trust_remote_code: true
### method
stage: dpo
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
pref_beta: 0.2
pref_loss: simpo
simpo_gamma: 0.5
### dataset
dataset: elms, other
template: qwen
cutoff_len: 1024
val_size: 0.1
preprocessing_num_workers: 16
### output
output_dir: saves/elm-1b/lora/dpo
logging_steps: 5
save_steps: 50
report_to: none
### train
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 2.5
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
deepspeed: examples/deepspeed/ds_z3_config.json
unheard_of: 1
"""
AXOLOTL = """\
base_model: org/ash-1b
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: org/answers
    type: alpaca
    split: train
  - path: data/mine.jsonl
    type: alpaca
    field_instruction: question
val_set_size: 0.05
sequence_len: 2048
sample_packing: true
output_dir: ./outputs/ash
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: constant_with_warmup
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
warmup_steps: 10
evals_per_epoch: 1
saves_per_epoch: 4
wandb_project: trees
fsdp_config:
  fsdp_state_dict_type: FULL_STATE_DICT
special_tokens:
  pad_token: "<|end_of_text|>"
"""
TRL = """\
model_name_or_path: org/fir-1b
model_revision: v2
torch_dtype: bfloat16
dataset_name: org/sums
dataset_config: main
dataset_prompt_column: question
system_prompt: Think first.
bf16: true
max_prompt_length: 200
max_completion_length: 300
num_generations: 4
beta: 0.01
reward_funcs:
  - accuracy_reward
  - my.rewards.tidy
reward_weights: [1.0, 0.5]
use_vllm: true
use_peft: true
lora_r: 32
lora_alpha: 64
lora_dropout: 0.1
learning_rate: 2.0e-06
per_device_train_batch_size: 6
gradient_accumulation_steps: 1
max_steps: 200
warmup_ratio: 0.1
gradient_checkpointing: true
output_dir: data/fir-grpo
save_strategy: steps
save_steps: 50
push_to_hub: true
report_to: [wandb]
run_name: firs
"""
ASH = """\
base_model: org/ash-1b
sequence_len: 64
datasets:
  - path: org/rows
    type: chat_template
"""
"""The least of axolotl, to which tests add."""
FIR = "model_name_or_path: org/fir-1b\ndataset_name: org/rows\nmax_length: 64\n"
"""The least of TRL."""
MEGATRON = """\
--executor slurm -E birch -A forest -P long -I registry.example/nemo:25 -N 4 -G 8 -M llama31_8b
--hf-model-id meta-llama/Llama-3.1-8B --nemo-model /models/nemo -gbs 512 -mbs 2 --seq-length 4096 --fp8
-TP 4 -PP 2 -VPP 2 -CP 1 -SP --dataset-dir corpora/wiki/ --data-prefix wiki --wandb --wandb-project birch
--recompute-granularity selective --optim-cpu-offloading --optim-cpu-offloading-frac 0.5 --lr 1e-4 --min-lr 1e-5
--warmup-steps 20 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 0 --constant-steps 10
"""
PREPROCESSING = (
    "--hf-tokenizer meta-llama/Llama-3.1-8B --data-prefix wiki --input-dir dumps/wiki --output-dir"
    " corpora/wiki\n"
)
CONVERSION = (
    "--source meta-llama/Llama-3.1-8B --output-path /models/nemo --model-name llama31"
    " --model-config-name Llama31Config8B --overwrite\n"
)
MASKING = """\
python run_mlm.py --model_name_or_path roberta-base --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 \\
  --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --do_train --do_eval --max_seq_length 128 \\
  --mlm_probability 0.2 --line_by_line --learning_rate 1e-4 --warmup_steps 100 --output_dir oak-mlm --fp16
"""
SPANS = """\
./run_t5_mlm_flax.py --output_dir=./elder-t5 --model_type t5 --config_name google/t5-v1_1-small
--tokenizer_name org/norwegian-t5 --train_file texts.jsonl --validation_file held.jsonl --max_seq_length 512
--per_device_train_batch_size 32 --adafactor --learning_rate 0.005 --weight_decay 0.001 --warmup_steps 2000
--mean_noise_span_length 3.5 --push_to_hub
"""

SETS: dict[str, dict[str, str]] = {
    "llamafactory": {"elm.yaml": LLAMAFACTORY},
    "axolotl": {"ash.yaml": AXOLOTL},
    "trl": {"fir.yaml": TRL},
    "torchtune": {"spruce.yaml": TORCHTUNE, "cloud.env": CLOUD, "pipeline.yaml": PIPELINE},
    "t5_pipeline": {"news.json": T5, "options.args": T5_OPTIONS},
    "classifier": {"reviews.args": CLASSIFIER},
    "llama_env": {".env": LLAMA},
    "megatron": {"birch.args": MEGATRON},
    "masking": {"oak.args": MASKING},
    "spans": {"elder.args": SPANS},
}


def adopt_texts(folder: Path, files: dict[str, str]) -> Adopted:
    """What the files, written to `folder`, amount to; named in notes by their names alone."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    before = os.getcwd()
    os.chdir(folder)
    try:
        return adopt([Path(name) for name in files])
    finally:
        os.chdir(before)


def load(folder: Path, adopted: Adopted) -> Recipe:
    path = folder / "adopted-recipe.yaml"
    path.write_text(adopted.text, encoding="utf-8")
    return load_recipe([path], environ={}, dotenv=None)


def recipe_of(folder: Path, **files: str) -> tuple[Recipe, str]:
    """The loaded recipe and all notes as one text. A file is given by its name, `_` for the dot
    before its ending.
    """
    adopted = adopt_texts(
        folder, {".".join(name.rsplit("_", 1)): text for name, text in files.items()}
    )
    return load(folder, adopted), "\n".join(adopted.notes)


def examples() -> Path:
    """The folder of example files that does not belong to the project."""
    folder = Path(os.environ.get("TEST_ADOPT", "../shared/adopt"))
    if not folder.is_dir():
        pytest.skip(f"no example configurations at {folder}; set TEST_ADOPT to their folder")
    return folder.resolve()
