"""The knobs of an adapter, and what it cannot be combined with."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ingot.config.section import Positive, Section
from ingot.config.sections.loop import RouterSettings


class Lora(Section):
    """Low-rank adaptation (Hu et al. 2021): the weights stay, a small product of two matrices is
    learnt beside each of some.
    """

    kind: Literal["lora", "rslora", "dora"] = "lora"
    """`lora`: products scaled by alpha / rank. `rslora`: by alpha / sqrt(rank), which keeps their
    size at large ranks (Kalajdzievski 2023). `dora`: as `lora`, and the norm of each row of the
    adapted weight is trained too (Liu et al. 2024): nearer to training all weights at small ranks,
    slower by the norms that each step computes.
    """
    rank: Positive = 16
    """Inner size of the products."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The products are scaled by alpha / rank; with `kind: rslora` by alpha / sqrt(rank)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the inputs of the products that is dropped while training."""
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Which linear layers: `all-linear` for every one but the head, or names such as `[q_proj,
    v_proj]`; Meta's names (`wq`, `w1`) are understood. Of a mixture of experts those of attention:
    PEFT and vLLM read different adapters of experts.
    """
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How the first matrix begins, as PEFT's `init_lora_weights`: `kaiming` (its default) with
    variance 1 / (3 * inputs), `gaussian` with standard deviation 1 / rank. The second one begins
    with 0. PEFT's ways that change the weights of the base (`pissa`, `olora`, `loftq`) are refused.
    """
    plus_ratio: Annotated[float, Field(gt=0)] | None = None
    """LoRA+ (Hayou et al. 2024): the learning rate of the second matrices, which begin with 0, as a
    multiple of that of the first ones, `train.optimizer.lr`; a factor of `train.optimizer.groups`
    multiplies both. As with PEFT it is that of all trained vectors too: DoRA's magnitudes, the bias
    of a head. The paper takes 16, with a lower `lr`. Null for one rate.
    """
    adapter: str | None = None
    """Folder of an adapter in PEFT's layout to go on from; rank, alpha and targets must be its own.
    Empty: a new one, which changes nothing yet.
    """

    @field_validator("init", mode="before")
    @classmethod
    def _leaves_the_base(cls, value: object) -> object:
        if value is True:
            return "kaiming"
        if value in ("pissa", "olora", "loftq", "corda", "lora_ga"):
            raise ValueError(
                f"{value} begins with other weights of the base, so the adapter would not fit the"
                " base that others have; take kaiming or gaussian"
            )
        return value

    def check_recipe(self, recipe: Any) -> None:
        """Raises ValueError for what does not fit the rest of the recipe, an
        `ingot.config.recipe.Recipe`.
        """
        parallel, train = recipe.parallel, recipe.train
        if self.dropout and (parallel.tensor > 1 or parallel.context > 1):
            raise ValueError(
                f"model.lora.dropout {self.dropout} is not possible with parallel.tensor or"
                " parallel.context; set it to 0"
            )
        if train.experts != RouterSettings():
            raise ValueError(
                "train.experts is about routers, which are a part of the frozen base under"
                " model.lora; remove train.experts"
            )
        if train.optimizer.kind == "muon":
            raise ValueError(
                "train.optimizer.kind muon makes the updates of whole matrices orthogonal, and"
                " model.lora trains two thin factors of each; set kind to adamw"
            )
