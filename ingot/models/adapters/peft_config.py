"""`adapter_config.json` of a PEFT adapter, read and checked. A setting that would silently change
the mathematics is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.models.adapters.layer import LoraKind

CONFIG = "adapter_config.json"

_READ = {
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "revision",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "init_lora_weights",
    "bias",
}

# Settings that record how an adapter was made, or configure libraries that are not used here.
_WITHOUT_EFFECT = {
    "auto_mapping",
    "peft_version",
    "inference_mode",
    "megatron_config",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "runtime_config",
    "qalora_group_size",
    "ensure_weight_tying",
}

_FIRST_MATRICES = (
    True,
    False,
    None,
    "gaussian",
    "eva",
    "orthogonal",
)  # the others change the weights of the base as well

INSTEAD = "merge it into its base with PEFT (merge_and_unload), and give that model"


@dataclass(frozen=True)
class AdapterConfig:
    """`adapter_config.json`, checked; defaults are PEFT's."""

    base: str
    revision: str | None
    """The revision of a base on the hub."""
    task: str | None
    rank: int
    alpha: float
    dropout: float
    root: bool
    """Products are scaled by alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023)."""
    dora: bool
    """Each row of the adapted weight has a trained norm (Liu et al. 2024)."""
    targets: str | tuple[str, ...]
    """Names of layers or suffixes of them; a string is `all-linear`, or one regular expression for
    whole names.
    """
    heads: tuple[str, ...]
    ranks: Mapping[str, int]
    """Ranks of some layers, by regular expressions for a suffix of their names; likewise
    `alphas`.
    """
    alphas: Mapping[str, float]

    @property
    def kind(self) -> LoraKind:
        """With both of PEFT's switches `dora`: the scale is that of each layer anyway."""
        return "dora" if self.dora else "rslora" if self.root else "lora"


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def base_of(folder: Path) -> str:
    """The model that an adapter belongs to: a folder, or a name on the hub. Raises WrongInput if
    the adapter does not name it.
    """
    base = read_adapter_config(folder).base
    if not base:
        raise WrongInput(
            f"{folder / CONFIG} does not name its base; set base_model_name_or_path to the folder"
            " of the model that it was trained on"
        )
    return base


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read an adapter's configuration. Raises WrongInput if the folder has no adapter, or one that
    is more than low-rank products beside linear layers, and DoRA's norms.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise WrongInput(
            f"{folder} is not an adapter ({CONFIG} is missing); give a folder that PEFT or ingot"
            " wrote"
        ) from None
    except ValueError as error:
        raise WrongInput(f"{path} is not JSON ({error}); fetch the adapter again") from None
    if not isinstance(config, dict):
        raise WrongInput(f"{path} is not a mapping; fetch the adapter again")
    _refuse_others(config, path)
    targets = config["target_modules"]
    try:
        return AdapterConfig(
            base=str(config.get("base_model_name_or_path") or ""),
            revision=config.get("revision"),
            task=config.get("task_type"),
            rank=int(config.get("r", 8)),
            alpha=float(config.get("lora_alpha", 8)),
            dropout=float(config.get("lora_dropout", 0.0)),
            root=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
            targets=targets if isinstance(targets, str) else tuple(targets),
            heads=tuple(config.get("modules_to_save") or ()),
            ranks={
                str(key): int(value) for key, value in (config.get("rank_pattern") or {}).items()
            },
            alphas={
                str(key): float(value) for key, value in (config.get("alpha_pattern") or {}).items()
            },
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise WrongInput(
            f"{path}: a value is of another type than PEFT's ({error}); fetch the adapter again"
        ) from None


def _refuse_others(config: Mapping[str, Any], path: Path) -> None:
    """Refuse what this adapter has beyond LoRA, rsLoRA and DoRA, by name; also settings of later
    PEFT versions if they are switched on.
    """
    if config.get("peft_type") != "LORA":
        raise WrongInput(
            f"{path}: peft_type {config.get('peft_type')} is not supported, only LORA; {INSTEAD}"
        )
    if not config.get("target_modules"):
        raise WrongInput(f"{path}: target_modules is missing; {INSTEAD}")
    wrong = {
        key: value for key, value in config.items() if value and key not in _READ | _WITHOUT_EFFECT
    }
    if config.get("bias", "none") != "none":
        wrong["bias"] = config["bias"]
    if config.get("init_lora_weights", True) not in _FIRST_MATRICES:
        wrong["init_lora_weights"] = config["init_lora_weights"]
    for key, value in wrong.items():
        raise WrongInput(f"{path}: {key} {value!r} is not supported; {INSTEAD}")
