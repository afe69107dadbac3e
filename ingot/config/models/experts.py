"""Mixtures of experts of the native decoder: how families differ, and what a `config.json` of one
says about its experts and routers. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ingot.base.errors import WrongInput

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
"""Our stacked parameters of a sparse layer: `[N, 2 F, D]` and `[N, D, F]`."""
CORRECTION = "e_score_correction_bias"
"""In the name of the bias that counts in the choice of experts alone, float32 in every file."""


@dataclass(frozen=True)
class ExpertNames:
    """What a family's files call a sparse layer's parts; the module itself is `mlp` here."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class ExpertKeys:
    """The keys of `config.json` that describe the experts of a family, and what it fixes."""

    usual_count: int
    """The number of experts of a configuration that does not say it."""
    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    width: str = "moe_intermediate_size"
    dense_until: str | None = None
    """The number of dense layers at the beginning; None: `mlp_only_layers` and
    `decoder_sparse_step` say which layers are dense, where the family has them."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool | None = None
    """Whether the weights of a token's experts are divided by their sum; None: as
    `norm_topk_prob` says."""
    corrected: bool = False
    """A bias of each expert is added to the scores that choose, not to the weights."""
    grouped: bool = False
    """The configuration may have groups of experts, and a scale of the weights."""
    biased: bool = False
    """Routers and experts have biases, gates are clamped (`swiglu_alpha`, `swiglu_limit`), and the
    files hold all experts of a layer in one tensor."""
    shared: str | None = None
    """The number of shared experts, each as wide as a chosen one; None: there are none."""
    names: ExpertNames = ExpertNames()

    @property
    def reads(self) -> frozenset[str]:
        """The keys of `config.json` that are read for the experts."""
        optional = {self.dense_until, self.shared} - {None}
        if self.dense_until is None and self.width != "intermediate_size":
            optional |= {"mlp_only_layers", "decoder_sparse_step"}
        if self.normalised is None:
            optional |= {"norm_topk_prob"}
        if self.biased:
            optional |= {"swiglu_alpha", "swiglu_limit"}
        if self.grouped:
            optional |= {"n_group", "topk_group", "routed_scaling_factor"}
        return frozenset({*self.count, self.width, "num_experts_per_tok", *filter(None, optional)})


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a sparse layer: `count` N of `width` F, of which each token takes `chosen` k.

    `score` turns router logits into scores. Weights are the chosen scores, divided by their sum if
    `normalised`, times `scale`. Of `groups` of experts only the `groups_chosen` best are looked
    at. `shared`: the width of the expert that every token takes; 0: none. `swiglu` (a, l): routers
    and experts have biases, gate g and up u, whose rows alternate, become min(g, l) sigmoid(a
    min(g, l)) (1 + u), u between -l and l, and files hold all experts of a layer in one tensor;
    None: nothing of that.
    """

    count: int
    chosen: int
    width: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_chosen: int = 1
    corrected: bool = False
    shared: int = 0
    names: ExpertNames = ExpertNames()
    swiglu: tuple[float, float] | None = None

    def _check(self, where: str) -> None:
        for name in ("count", "chosen", "width", "groups", "groups_chosen"):
            if getattr(self, name) < 1:
                raise WrongInput(
                    f"{where}: {name} of the experts is {getattr(self, name)}; it must be at"
                    " least 1"
                )
        if self.chosen > self.count // self.groups * self.groups_chosen:
            raise WrongInput(
                f"{where}: num_experts_per_tok {self.chosen} is more than the experts that a token"
                f" may choose from ({self.count} in {self.groups} groups, {self.groups_chosen}"
                " of them taken); lower it"
            )
        if self.count % self.groups or (self.groups > 1 and self.count // self.groups < 2):
            raise WrongInput(
                f"{where}: {self.count} experts do not make {self.groups} equal groups of at least"
                " two; change n_group"
            )


def read_experts(values: Mapping[str, Any], keys: ExpertKeys, where: str) -> ExpertsConfig:
    """The experts of a configuration with its defaults.

    Raises:
        KeyError, TypeError, ValueError: a size is missing or not a number.
        WrongInput: sizes that contradict each other.
    """
    given = {key: int(values[key]) for key in keys.count if values.get(key) is not None}
    if len(set(given.values())) > 1:
        raise WrongInput(
            f"{where}: {' and '.join(f'{key} {value}' for key, value in given.items())} contradict"
            " each other; give one of them"
        )
    width = int(values[keys.width])
    normalised = values.get("norm_topk_prob") if keys.normalised is None else keys.normalised
    grouped = keys.grouped
    made = ExpertsConfig(
        count=next(iter(given.values()), keys.usual_count),
        chosen=int(values["num_experts_per_tok"]),
        width=width,
        score=keys.score,
        normalised=bool(normalised),
        scale=float(values.get("routed_scaling_factor") or 1.0) if grouped else 1.0,
        groups=int(values.get("n_group") or 1) if grouped else 1,
        groups_chosen=int(values.get("topk_group") or 1) if grouped else 1,
        corrected=keys.corrected,
        shared=0 if keys.shared is None else width * int(values.get(keys.shared) or 0),
        names=keys.names,
        swiglu=(float(values["swiglu_alpha"]), float(values["swiglu_limit"]))
        if keys.biased
        else None,
    )
    made._check(where)
    return made


def sparse_layers(values: Mapping[str, Any], keys: ExpertKeys, where: str) -> tuple[bool, ...]:
    """Which layers have experts, of a configuration with its defaults."""
    layers = int(values["num_hidden_layers"])
    if keys.dense_until is not None:
        return tuple(layer >= int(values[keys.dense_until]) for layer in range(layers))
    dense = set(values.get("mlp_only_layers") or ())
    step = values.get("decoder_sparse_step", 1)
    if not isinstance(step, int) or step < 1:
        raise WrongInput(
            f"{where}: decoder_sparse_step is {step!r}; it must be a whole number from 1 on, as"
            " every so many layers have experts"
        )
    if unknown := sorted(layer for layer in dense if not 0 <= layer < layers):
        raise WrongInput(
            f"{where}: mlp_only_layers names {unknown}, num_hidden_layers is {layers}; give both in"
            " model.config"
        )
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
