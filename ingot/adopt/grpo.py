"""TRL's GRPO, by itself or inside axolotl: rewards, groups and the loss, with what of it means
something else here.
"""

from __future__ import annotations

from typing import Any

from ingot.adopt.read import Given
from ingot.adopt.table import (
    Draft,
    GivenKeys,
    KeyRow,
    hub_source,
    number,
    single,
    text,
    texts,
    truth,
    whole,
)
from ingot.base.errors import WrongInput

NORMALISED = {
    "grpo": "answers",
    "dr_grpo": "fixed",
    "dapo": "tokens",
    "bnpo": "tokens",
}
"""TRL's `loss_type` -> objective.normalise."""
THINKS = r"\A<think>(?!.*<think>)(.*?)</think>"
"""What TRL's `think_format_reward` looks for."""
WHOLE = "answers are drawn from the whole distribution, which is the one that is trained"
FIXED = "the reference is one model and stays it: objective.reference"


def numbers(given: Given) -> list[float]:
    return [number(each) for each in texts(given)]


def grpo_rows(at: str, most: str | None = None) -> tuple[KeyRow, ...]:
    """The keys, which begin with `at`; `most`: the tokens of an answer where they are not given."""
    read = {
        "reward_funcs": texts,
        "reward_weights": numbers,
        "temperature": number,
        "beta": number,
        "epsilon": number,
        "epsilon_high": number,
        "num_iterations": whole,
        "scale_rewards": text,
        "mask_truncated_completions": truth,
    }
    lost = {
        "top_p": (WHOLE, ("1", "1.0")),
        "top_k": (WHOLE, ("0", "-1")),
        "min_p": (WHOLE, ("0", "0.0")),
        "repetition_penalty": (WHOLE, ("1", "1.0")),
        "sync_ref_model": (FIXED, ("false",)),
        "ref_model_mixup_alpha": (FIXED, ()),
        "ref_model_sync_steps": (FIXED, ()),
        "use_vllm": (
            "ingot's own decoder samples; objective.sampler names a vLLM server",
            ("false",),
        ),
        "log_completions": (
            "not needed: `ingot show samples` shows answers and rewards",
            ("false",),
        ),
    }
    return (
        KeyRow(f"{at}num_generations", read=whole, default="8"),
        KeyRow(f"{at}max_completion_length", read=whole, default=most),
        KeyRow(f"{at}loss_type", read=single),
        *(KeyRow(f"{at}{key}", read=how) for key, how in read.items()),
        *(KeyRow(f"{at}{key}", lost=why, idle=idle) for key, (why, idle) in lost.items()),
    )


def begin_grpo(sheet: GivenKeys, draft: Draft, at: str, beta: str = "") -> int:
    """Set the objective; returns the answers of a group, of which a step takes a multiple. `beta`:
    the key of the KL's weight where it is another one than `beta`.
    """
    beta = beta or f"{at}beta"
    draft.put("objective.kind", "grpo", f"{at}num_generations and the like")
    for key, knob in (
        (f"{at}num_generations", "group"),
        (f"{at}max_completion_length", "max_answer_tokens"),
        (f"{at}temperature", "temperature"),
        (beta, "kl"),
        (f"{at}epsilon", "clip"),
        (f"{at}epsilon_high", "clip_high"),
        (f"{at}num_iterations", "updates"),
    ):
        if sheet.get(key) is not None:
            draft.put_from(sheet, key, f"objective.{knob}")
    if sheet.get(f"{at}max_completion_length") is None:
        about = "is not given: TRL's default, 256 or 512, goes by its version; here it is 256"
        draft.note("fill", f"{at}max_completion_length", about)
    if sheet.get(beta):
        draft.put("objective.kl_estimator", "k3", "as TRL estimates it")
    if sheet.get(f"{at}mask_truncated_completions"):
        draft.put("objective.overlong", "mask", f"{at}mask_truncated_completions")
    scale = (sheet.get(f"{at}scale_rewards") or "group").lower()
    draft.put(
        "objective.scale", "none" if scale in ("none", "false") else "deviation", "scale_rewards"
    )
    if scale == "batch":
        draft.note("changed", "scale_rewards", "batch: the deviation is that of each group here")
    loss = sheet.get(f"{at}loss_type") or "dapo"
    draft.put("objective.normalise", NORMALISED.get(loss, "tokens"), "loss_type, dapo unless given")
    if loss not in NORMALISED:
        draft.note("changed", "loss_type", f"{loss} is not offered; the loss of dapo stands for it")
    draft.put("objective.rewards", _rewards(sheet, draft, at), f"{at}reward_funcs")
    return int(sheet.get(f"{at}num_generations"))


def _rewards(sheet: GivenKeys, draft: Draft, at: str) -> list[dict[str, Any]]:
    names = sheet.get(f"{at}reward_funcs") or []
    if not names:
        raise WrongInput(
            f"{sheet.files[0].path} names no {at}reward_funcs; add what judges answers"
        )
    weights = sheet.get(f"{at}reward_weights") or [1.0] * len(names)
    if len(weights) != len(names):
        raise WrongInput(
            f"{sheet.where(f'{at}reward_weights')}: {len(weights)} reward_weights for"
            f" {len(names)} reward_funcs; give one for each"
        )
    found = [
        {**reward, **({} if weight == 1.0 else {"weight": weight})}
        for name, weight in zip(names, weights, strict=True)
        if (reward := _reward(name, draft))
    ]
    if not found:
        raise WrongInput(f"{sheet.where(f'{at}reward_funcs')}: none of the rewards can be carried")
    return found


def _reward(name: str, draft: Draft) -> dict[str, Any] | None:
    """A reward, or None for one that has no like here."""
    if name in ("accuracy_reward", "reasoning_accuracy_reward"):
        draft.note(
            "changed",
            name,
            "compares LaTeX there; here the last number of an answer with the reference's, which"
            " another reward may do better (docs/guides/rewards.md)",
        )
        return {"kind": "numeric", "extract": "flexible"}
    if name == "think_format_reward":
        return {"kind": "regex", "pattern": THINKS, "name": name}
    if name == "get_soft_overlong_punishment":
        draft.note("lost", name, "the reward `length` and objective.overlong are its like")
        return None
    if "/" in name:
        draft.note(
            "fill", name, f"`ingot import {hub_source(name).source} FOLDER` gives the folder"
        )
        return {"kind": "classifier", "model": name}
    module, _, function = name.rpartition(".")
    draft.note(
        "fill",
        name,
        "took lists and gave a list; here it is called with one Sample (prompt, answer, reference,"
        " finished) and gives a number: wrap it so",
    )
    return {"kind": "python", "function": f"{module or 'rewards'}:{function}", "name": function}
