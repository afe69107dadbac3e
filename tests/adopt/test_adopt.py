"""`adopt` as a whole: the project is recognised by content, what is wrong is said in words, no
secret comes through.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.adopt.convert import PROJECTS, adopt
from ingot.base.errors import WrongInput
from tests import golden
from tests.adopt.stand_ins import (
    AXOLOTL,
    CLASSIFIER,
    CLOUD,
    LLAMA,
    LLAMAFACTORY,
    MASKING,
    MEGATRON,
    SETS,
    SPANS,
    T5,
    TORCHTUNE,
    adopt_texts,
    examples,
    load,
    recipe_of,
)

TOKEN = "hf_" + "aB3dE6gH9jK2mN5p" * 2


@pytest.mark.parametrize("name", SETS)
def test_the_recipe_of_each_project_is_as_it_was(name: str, tmp_path: Path) -> None:
    adopted = adopt_texts(tmp_path, SETS[name])
    load(tmp_path, adopted)
    golden.check(f"adopt/{name}.yaml", adopted.text)


@pytest.mark.parametrize(
    "names",
    [
        ["torchtune_cpt.yaml", "gcp.env"],
        ["t5_pipeline.json"],
        ["roberta.args"],
        ["llama_ddp.env"],
        ["nemo_pretrain.args"],
    ],
)
def test_every_example_file_becomes_a_recipe_that_loads_and_none_of_its_keys_is_unknown(
    names: list[str], tmp_path: Path
) -> None:
    folder = examples()
    adopted = adopt([folder / name for name in names])
    load(tmp_path, adopted)
    assert "Unknown keys:" not in adopted.notes


def test_what_the_example_files_mean(tmp_path: Path) -> None:
    """The figures of the task, on the real example files."""
    folder = examples()
    t5 = load(tmp_path, adopt([folder / "t5_pipeline.json"]))
    assert (
        t5.train.global_batch,
        t5.train.micro_batch,
        t5.launch.nodes,
        t5.launch.processes,
        t5.parallel.shard,
    ) == (304, 19, 2, 8, 16)
    llama = load(tmp_path, adopt([folder / "llama_ddp.env"]))
    assert (
        llama.train.global_batch,
        llama.train.epochs,
        llama.model.config["intermediate_size"],
    ) == (64, 1, 8192)
    assert llama.model.lora is not None
    assert llama.model.lora.targets == [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
    ]
    nemo = load(tmp_path, adopt([folder / "nemo_pretrain.args"]))
    assert (
        nemo.parallel.tensor,
        nemo.launch.slurm.account,
        nemo.launch.nodes,
        nemo.train.steps,
    ) == (4, "research", 2, 100)
    assert nemo.data.train[0].source == "megatron:data/preprocessed/*"
    both = adopt([folder / "torchtune_cpt.yaml", folder / "gcp.env"])
    assert any(
        "names the bucket bucket" in note and "the bucket my-bucket" in note for note in both.notes
    )


@pytest.mark.parametrize(
    ("text", "title"),
    [
        (TORCHTUNE, "continued pretraining on Google Cloud"),
        (CLOUD, "continued pretraining on Google Cloud"),
        (T5, "a T5 pipeline on Google Cloud"),
        (CLASSIFIER, "a RoBERTa classifier"),
        (LLAMA, "Llama with DDP"),
        (MEGATRON, "Megatron-style pretraining"),
        (MASKING, "transformers' run_mlm.py or run_t5_mlm_flax.py"),
        (SPANS, "transformers' run_mlm.py or run_t5_mlm_flax.py"),
        (LLAMAFACTORY, "LLaMA-Factory"),
        (AXOLOTL, "axolotl"),
    ],
    ids=[
        *("torchtune", "cloud", "t5", "classifier", "llama", "megatron", "masking", "spans"),
        *("llamafactory", "axolotl"),
    ],
)
def test_the_name_of_a_file_says_nothing(text: str, title: str, tmp_path: Path) -> None:
    assert adopt_texts(tmp_path, {"some.txt": text}).project == title


def test_files_of_one_project_come_in_any_order(tmp_path: Path) -> None:
    forwards, _ = recipe_of(tmp_path, spruce_yaml=TORCHTUNE, cloud_env=CLOUD)
    backwards, _ = recipe_of(tmp_path, cloud_env=CLOUD, spruce_yaml=TORCHTUNE)
    assert forwards == backwards


def test_files_of_two_projects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        WrongInput,
        match=(
            r"files are of different projects \(news.json of a T5 pipeline.*, \.env of Llama with"
            r" DDP\); adopt each by itself"
        ),
    ):
        adopt_texts(tmp_path, {"news.json": T5, ".env": LLAMA})


@pytest.mark.parametrize(
    "text",
    [
        "FOO=1\nBAR=2\nBAZ=3\n",
        '{"foo": 1, "bar": 2}',
        "foo: 1\nbar: {baz: 2}\n",
        "--foo 1 --bar 2",
        "batch_size: 8\nepochs: 3\n" + "".join(f"other_{n}: {n}\n" for n in range(9)),
        "ls -l --color",
    ],
)
def test_what_is_none_of_them_is_refused_naming_what_was_looked_for(
    text: str, tmp_path: Path
) -> None:
    with pytest.raises(
        WrongInput, match=r"some.txt is the configuration of none of the projects"
    ) as refused:
        adopt_texts(tmp_path, {"some.txt": text})
    assert all(project.looks in str(refused.value) for project in PROJECTS)


def test_too_few_keys_to_tell_two_projects_apart(tmp_path: Path) -> None:
    with pytest.raises(
        WrongInput,
        match=(
            r"could be of continued pretraining on Google Cloud or a T5 pipeline.*; give more of"
            r" its configuration"
        ),
    ):
        adopt_texts(tmp_path, {"some.yaml": "epochs: 1\nbatch_size: 2\n"})
    recipe, _ = recipe_of(
        tmp_path, some_yaml="epochs: 1\nbatch_size: 2\n", cloud_env=CLOUD
    )  # the other file tells
    assert recipe.train.micro_batch == 2


def test_a_recipe_of_ingot_needs_no_adoption(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"r.yaml is a recipe of ingot already"):
        adopt_texts(
            tmp_path,
            {
                "r.yaml": (
                    "name: a\ndata: {train: [{source: x}], seq_len: 8}\nmodel: {source:"
                    " y}\nseed: 1\n"
                )
            },
        )


def test_no_file_at_all() -> None:
    with pytest.raises(WrongInput, match="no file is given"):
        adopt([])


def test_an_unknown_key_is_named_with_the_nearest_and_does_not_stop(tmp_path: Path) -> None:
    recipe, notes = recipe_of(
        tmp_path, env_env=LLAMA + "WARMUP_STEP=5\n", flags_args="--rest-optimizer --start_step 3"
    )
    assert "WARMUP_STEP: is not known; the nearest key is WARMUP_STEPS" in notes
    assert "--rest-optimizer: is not known; the nearest key is --reset-optimizer" in notes
    assert recipe.train.schedule.warmup == 100
    assert "--start_step: counts from PRETRAIN_LOAD_CHECKPOINTS_PATH" in notes


def test_the_value_of_an_unknown_key_is_not_repeated(tmp_path: Path) -> None:
    adopted = adopt_texts(tmp_path, {".env": LLAMA + "MY_PASSPHRASE=correct-horse\n"})
    assert "MY_PASSPHRASE" in adopted.text
    assert "correct-horse" not in adopted.text + "".join(adopted.notes)


def test_two_files_that_contradict_each_other_are_told(tmp_path: Path) -> None:
    recipe, notes = recipe_of(
        tmp_path, cloud_env=CLOUD, other_env="REGION=us-east1\nPROJECT_ID=forest-lab\n"
    )
    assert (
        "REGION: cloud.env:4 says 'europe-north1', other.env:1 says 'us-east1'; the last one is"
        " taken" in notes
    )
    assert "PROJECT_ID: " not in notes  # says the same twice
    assert recipe.cloud.region == "us-east1"


@pytest.mark.parametrize(
    "line",
    [
        f"HF_TOKEN={TOKEN}",
        "WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567",
        f"HUGGING_FACE_HUB_TOKEN='{TOKEN}'",
    ],
)
def test_a_secret_in_a_file_is_left_out_and_told_by_its_name_alone(
    line: str, tmp_path: Path
) -> None:
    name, _, value = line.partition("=")
    adopted = adopt_texts(tmp_path, {".env": f"{LLAMA}{line}\n"})
    assert f"{name}: a secret stays out of recipes" in "\n".join(adopted.notes)
    assert value.strip("'") not in adopted.text + "".join(adopted.notes)


def test_a_file_with_secrets_alone_may_stand_beside_others(tmp_path: Path) -> None:
    adopted = adopt_texts(tmp_path, {"t5.json": T5, ".env": f"HF_TOKEN={TOKEN}\n"})
    assert adopted.project == "a T5 pipeline on Google Cloud"
    assert TOKEN not in adopted.text


@pytest.mark.parametrize(
    "flag",
    [f"--hf-token {TOKEN}", f"--hf_token={TOKEN}", "--wandb-token abc", "--hf-token $HF_TOKEN"],
)
def test_a_secret_on_a_command_line_is_refused_without_being_shown(
    flag: str, tmp_path: Path
) -> None:
    with pytest.raises(
        WrongInput, match=r"puts a secret on a command line.*export HF_TOKEN"
    ) as refused:
        adopt_texts(tmp_path, {"birch.args": f"{MEGATRON.strip()} {flag}"})
    assert TOKEN not in str(refused.value)
    assert "abc" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".env", f"{LLAMA}NOTE={TOKEN}\n"),
        ("t5.json", T5.replace("org/news", TOKEN)),
        ("c.args", f"{CLASSIFIER.strip()} --tag x,{TOKEN}"),
        ("t.yaml", f"{TORCHTUNE}extra: [1, {TOKEN}]\n"),
        ("k.yaml", f"{TORCHTUNE}{TOKEN}: 1\n"),
    ],
)
def test_what_looks_like_a_token_under_any_name_is_refused_without_being_shown(
    name: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(WrongInput, match="looks like an access token") as refused:
        adopt_texts(tmp_path, {name: text})
    assert TOKEN not in str(refused.value)


def test_a_value_of_the_wrong_type_says_where_it_stands(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"\.env:18: MAX_STEPS is 'many'; it should be a number"):
        adopt_texts(tmp_path, {".env": LLAMA.replace("MAX_STEPS=1200", "MAX_STEPS=many")})


def test_a_value_that_no_recipe_takes_says_where_it_stands_and_which_knob(tmp_path: Path) -> None:
    with pytest.raises(
        WrongInput,
        match=r"spruce.yaml:9: `train.optimizer.lr` is -1.0; it should be greater than 0",
    ):
        adopt_texts(tmp_path, {"spruce.yaml": TORCHTUNE.replace("lr: 3e-5", "lr: -1")})
