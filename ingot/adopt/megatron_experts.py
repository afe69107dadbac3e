"""The flags of a Megatron-style pretraining that are about a mixture of experts."""

from __future__ import annotations

import math

from ingot.adopt.read import Given
from ingot.adopt.table import (
    Draft,
    GivenKeys,
    KeyRow,
    canonical,
    number,
    text,
    truth,
    whole,
)

_SIZES = "not needed: experts and routers are those of model.source"
_ALWAYS = "is what happens here anyway"
_SPEED = "is not offered; it changes no number"
_BALANCING = "--moe-router-load-balancing-type"
_ROUTED = (
    "--moe-router-topk",
    "--moe-ffn-hidden-size",
    "--moe-layer-freq",
    "--moe-shared-expert-intermediate-size",
    "--moe-router-score-function",
    "--moe-router-pre-softmax",
    "--moe-router-num-groups",
    "--moe-router-group-topk",
    "--moe-router-topk-scaling-factor",
)


def degree(given: Given) -> int:
    """How many there are of something."""
    if not 1 <= (found := whole(given)) <= 1_000_000:
        raise ValueError("a number from 1 to 1,000,000")
    return found


def _balancing(given: Given) -> str:
    known = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
    if (found := text(given).lower()) not in known:
        raise ValueError(" or ".join(known))
    return found


def _lost(flags: tuple[str, ...], why: str) -> tuple[KeyRow, ...]:
    return tuple(KeyRow(flag, lost=why, idle=("false",)) for flag in flags)


EXPERT_ROWS = (
    KeyRow("--num-experts", lost=_SIZES, also=("--num-moe-experts",)),
    *_lost(_ROUTED, _SIZES),
    KeyRow("--expert-model-parallel-size", read=degree, also=("-EP",)),
    KeyRow("--expert-tensor-parallel-size", read=degree, also=("-ETP",)),
    KeyRow(_BALANCING, read=_balancing),
    KeyRow("--moe-aux-loss-coeff", read=number, default="0"),
    KeyRow("--moe-z-loss-coeff", "train.experts.z_loss", number),
    KeyRow("--moe-router-enable-expert-bias", read=truth),
    KeyRow("--moe-router-bias-update-rate", read=number, default="1e-3"),
    *_lost(("--moe-grouped-gemm",), _ALWAYS),
    KeyRow("--moe-router-dtype", lost="routers compute in float32 here", idle=("fp32",)),
    KeyRow(
        "--moe-token-dispatcher-type",
        lost="rows go to their experts by all-to-all here",
        idle=("alltoall",),
    ),
    KeyRow(
        "--moe-expert-capacity-factor",
        lost="no token is dropped here: each reaches all its experts, whatever their load",
    ),
    *_lost(
        ("--moe-token-drop-policy", "--moe-pad-expert-input-to-capacity"),
        "there is no capacity here, so that no token is dropped",
    ),
    KeyRow(
        "--moe-input-jitter-eps",
        lost="noise on what routers see is not offered",
        idle=("0", "0.0"),
    ),
    KeyRow(
        "--moe-router-force-load-balancing",
        lost="is for benchmarks alone; rows go where routers send them here",
        idle=("false",),
    ),
    *_lost(
        ("--moe-layer-recompute",),
        "is not offered of a mixture alone; set memory.recompute.kind",
    ),
    *_lost(("--moe-per-layer-logging",), "the load of each layer is logged here anyway"),
    *_lost(
        (
            "--moe-permute-fusion",
            "--moe-router-fusion",
            "--moe-shared-expert-overlap",
            "--moe-enable-deepep",
            "--overlap-moe-expert-parallel-comm",
            "--delay-wgrad-compute",
        ),
        _SPEED,
    ),
)
_GIVEN = tuple(row.key for row in EXPERT_ROWS)


def build_experts(sheet: GivenKeys, draft: Draft) -> None:
    """What several of the flags say together."""
    if not sheet.has(*_GIVEN):
        return
    _share(sheet, draft)
    kind, factor = _kind(sheet), sheet.get("--moe-aux-loss-coeff")
    if factor and kind.endswith("aux_loss"):
        draft.put_from(sheet, "--moe-aux-loss-coeff", "train.experts.aux_loss")
        if kind != "seq_aux_loss":
            draft.note(
                "changed",
                _BALANCING,
                f"{kind} is over a batch, and another loss for each micro-batch; the one here is"
                " over sequences",
            )
    elif factor:
        draft.note("lost", "--moe-aux-loss-coeff", f"does nothing with {_BALANCING} {kind}")
    if kind == "sinkhorn":
        draft.note("lost", _BALANCING, "sinkhorn is not offered; set train.experts.aux_loss")
    rate = "--moe-router-bias-update-rate"
    if sheet.get("--moe-router-enable-expert-bias"):
        draft.put_from(sheet, rate, "train.experts.bias_rate")
    elif sheet.has(rate):
        draft.note("lost", rate, "does nothing without --moe-router-enable-expert-bias")


def _kind(sheet: GivenKeys) -> str:
    """How the load is balanced; `none` is a word there, and nothing elsewhere."""
    words = (
        str(entry.value).lower()
        for file in sheet.files
        for entry in file.entries
        if canonical(entry.key) == _BALANCING
    )
    return sheet.get(_BALANCING) or ("none" if "none" in words else "aux_loss")


def _share(sheet: GivenKeys, draft: Draft) -> None:
    """Experts over the same ranks as there, in whole groups of those that share matrices."""
    tensor = sheet.get("--tensor-model-parallel-size")
    size, within = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
    cut = sheet.get(within) or tensor  # its default there
    ranks = math.lcm((sheet.get(size) or 1) * cut, tensor)
    if ranks == 1:
        return
    draft.put("parallel.expert", ranks, f"{size} and {within}", sheet.where(size, within))
    if tensor > 1 or cut > 1:
        draft.note(
            "changed",
            size,
            f"{ranks} ranks share whole experts here, which must be a multiple of parallel.tensor;"
            " the matrices of an expert are not split",
        )
