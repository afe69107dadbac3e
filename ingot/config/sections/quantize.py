"""The knobs of a frozen base in few bits, and what it cannot be combined with."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from ingot.config.section import Section


class Quantize(Section):
    """The frozen matrices of the layers, and of a mixture's experts, in few bits under `model.lora`
    (QLoRA, Dettmers et al. 2023): what is trained, and the types of everything else, do not change.
    """

    kind: Literal["nf4", "int8"] = "nf4"
    """`nf4`: four bits with a scale for each 64 weights, as bitsandbytes has them; `int8`: eight
    bits with a scale for each row. They are multiplied in `precision.compute`.
    """
    double: bool = False
    """Keep the scales of `nf4` in eight bits too, with a scale for each 256 of them: 4.13 bits a
    weight in place of 4.5.
    """
    merge_into: Literal["quantized", "original"] = "quantized"
    """What the adapter is merged into for `model/`. `quantized`: the matrices as training saw
    them, so that the exported model is the trained one. `original`: the source's own, which the
    adapter was not trained beside. `ingot verify export` tells how far apart the two are.
    `adapter/` is the same with both.
    """

    @model_validator(mode="before")
    @classmethod
    def _by_kind(cls, given: Any) -> Any:
        """`quantize: nf4` for `quantize: {kind: nf4}`."""
        return {"kind": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _scales_of_blocks(self) -> Quantize:
        if self.double and self.kind != "nf4":
            raise ValueError(
                f"model.quantize.double is about the scales of nf4, and kind is {self.kind}; set"
                " one of the two"
            )
        return self

    def check_recipe(self, recipe: Any) -> None:
        """Raises ValueError for what has not been shown to give the same numbers; `recipe` is an
        `ingot.config.recipe.Recipe`.
        """
        beside = f"beside model.quantize {self.kind}"
        if recipe.parallel.tensor > 1:
            raise ValueError(
                f"parallel.tensor {recipe.parallel.tensor} cuts matrices, {beside} across their"
                " blocks; set it to 1, and parallel.shard instead"
            )
        if recipe.parallel.expert > 1:
            raise ValueError(
                f"parallel.expert {recipe.parallel.expert} is not offered {beside}; set it to 1,"
                " and parallel.shard instead"
            )
        if recipe.precision.master == "stochastic":
            raise ValueError(
                f"precision.master stochastic is not offered {beside}; set it to fp32: only the"
                " adapter has masters"
            )
        if recipe.train.compile:
            raise ValueError(
                f"train.compile is not offered {beside}: set it to false, or model.quantize to null"
            )
        if recipe.memory.offload.weights:
            raise ValueError(
                f"memory.offload.weights is not offered {beside}; set it to false, or"
                " model.quantize to null"
            )
