"""What a trainer has where a key is not given: a key that is given with its default changes
nothing of the training. The defaults are asked of the trainers' own classes.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from ingot.adopt import axolotl, llamafactory, masking, trl
from ingot.adopt.table import Project
from ingot.config.recipe import Recipe
from tests.adopt.stand_ins import recipe_of

MODELS = "trl.trainer.model_config:ModelConfig"
TRAINER = "transformers.training_args:TrainingArguments"
LEFT_OUT = ("dataset_text_field", "model_revision")
"""Keys of TRL: one whose presence says which command reads the file, and one whose default is the
branch that every model has.
"""
ROWS = {"model_name_or_path": "org/fir-1b", "dataset_name": "org/rows"}
COMMANDS: dict[str, dict[str, Any]] = {
    "sft": {"loss_type": "nll"},
    "dpo": {"loss_type": "sigmoid"},
    "kto": {"loss_type": "kto"},
    "reward": {"center_rewards_coefficient": 0.01},
    "grpo": {"reward_funcs": ["judge.right"]},
    "rloo": {"reward_funcs": ["judge.right"], "normalize_advantages": True},
}


def defaults(place: str) -> dict[str, Any]:
    """The defaults of a dataclass, but for those that are None or no plain values."""
    module, _, name = place.partition(":")
    pytest.importorskip(module.partition(".")[0], reason="needs the dev extra")
    kind = getattr(importlib.import_module(module), name)
    found = {
        field.name: field.default_factory()
        if field.default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING
        else field.default
        for field in dataclasses.fields(kind)
    }
    plain = {key: getattr(value, "value", value) for key, value in found.items()}
    return {
        key: value for key, value in plain.items() if isinstance(value, bool | int | float | str)
    }


def known(project: Project, given: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in given.items()
        if key not in LEFT_OUT and any(key in (row.key, *row.also) for row in project.rows)
    }


def trained(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe says how weights change."""
    found = recipe.model_dump(mode="json")
    parts = ("seed", "model", "objective", "train", "precision", "memory", "data")
    return {part: found[part] for part in parts}


def of(folder: Path, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """How a YAML with these keys is trained."""
    lines = (f"{key}: {json.dumps(value)}\n" for key, value in given.items())
    return trained(recipe_of(folder, **{name: "".join(lines)})[0])


@pytest.mark.parametrize("command", COMMANDS)
def test_what_trl_has_unless_given_is_adopted(tmp_path: Path, command: str) -> None:
    name = command if command == "reward" else command.upper()
    place = f"trl.trainer.{command}_config:{name.capitalize() if name == command else name}Config"
    given = known(trl.PROJECT, defaults(place) | defaults(MODELS))
    assert {"learning_rate", "lora_r", "lora_alpha", "adam_epsilon", "max_grad_norm"} <= {*given}
    least = ROWS | {"use_peft": True} | COMMANDS[command]
    assert of(tmp_path, "fir_yaml", least) == of(tmp_path, "fir_yaml", given | least)


@pytest.mark.parametrize("way", ["lora", "full"])
def test_what_the_trainer_has_unless_given_is_adopted_from_llamafactory(
    tmp_path: Path, way: str
) -> None:
    given = known(llamafactory.PROJECT, defaults(TRAINER))
    assert {"learning_rate", "num_train_epochs", "warmup_steps", "seed"} <= {*given}
    least = {"model_name_or_path": "org/elm-1b", "stage": "sft", "dataset": "elms"}
    least |= {"finetuning_type": way, "template": "llama3"}
    assert of(tmp_path, "elm_yaml", least) == of(tmp_path, "elm_yaml", given | least)


def test_what_the_trainer_has_unless_given_is_adopted_from_axolotl(tmp_path: Path) -> None:
    # axolotl has defaults of its own for the other keys.
    shared = ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed")
    given = known(axolotl.PROJECT, {key: defaults(TRAINER)[key] for key in shared})
    assert {*given} == {*shared}
    least = {"base_model": "org/ash-1b", "sequence_len": 64, "learning_rate": 1e-4}
    least |= {"datasets": [{"path": "org/rows", "type": "chat_template"}]}
    assert of(tmp_path, "ash_yaml", least) == of(tmp_path, "ash_yaml", given | least)


def test_what_the_trainer_has_unless_given_is_adopted_from_run_mlm(tmp_path: Path) -> None:
    given = known(masking.PROJECT, defaults(TRAINER))
    assert {"learning_rate", "num_train_epochs", "bf16", "seed"} <= {*given}
    least = "--model_name_or_path roberta-base --train_file oak.txt --max_seq_length 64"
    more = " ".join(f"--{key} {value}" for key, value in given.items())
    assert trained(recipe_of(tmp_path, oak_args=least)[0]) == trained(
        recipe_of(tmp_path, oak_args=f"{least} {more}")[0]
    )
