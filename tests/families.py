"""`python -m tests.families`: run the tests that hold every family of decoders against transformers,
PEFT and one process, all their cases, and write the largest differences that they measured into
docs/families.md. With names of files it runs these alone; what was measured before stays.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable
from typing import Any

import pytest

from tests import measured
from tests.graph import PROJECT
from tests.models.tiny import FAMILY
from tests.parallel.proving import EVERY

PAGE, BUILD = PROJECT / "docs" / "families.md", PROJECT / "build" / "families"
FILES = {
    "tests/models/native/test_family.py": (
        "logits_equal or gradients_equal or export_opens or added_tokens or greedy or packed"
    ),
    "tests/models/adapters/test_families.py": "both_ways or attention",
    "tests/parallel/test_families.py": "",
    "tests/parallel/test_expert_layouts.py": "shared_experts or balances",
    "tests/parallel/test_experts.py": "bits",
    "tests/verify/test_export_families.py": "",
}
"""File -> which of its tests."""
COLUMNS = {
    "logits": "test_logits_equal_transformers",
    "gradients": "test_gradients_equal_transformers",
    "there and back": "test_export_opens_in_transformers_and_here",
    "added tokens": "test_added_tokens_survive_the_way_in_and_out",
    "packed": "test_packed_documents_give_what_they_give_alone",
}
EQUAL = {
    "generation": "test_greedy_with_the_cache_is_what_transformers_generates",
    "`verify export`": "test_the_export_is_the_trained_model",
}
"""Columns whose tests ask for equality."""
HEAD = """# Every family, measured

`python -m tests.families` runs the tests that hold each family of decoders against transformers,
PEFT and one process, all their cases, and writes down the largest difference that they saw; each has
its bound in `tests/tolerances.py`. Models are small and random, float32, on a CPU.

## Against transformers

Logits (their standard deviation is 0.3 or more), also after the way into a folder and back, with
tokens added to it, and of documents packed into one row beside those of each alone: largest absolute
difference. Gradients: of a parameter's, relative, in norm. Generation: 30 tokens after each of five
prompts of unequal length, beyond window and cache, are transformers' to the last. `verify export`: the
exported model and its adapter, by its own checks.

"""
ADAPTERS = """
## Adapters

Logits of one of ours opened in PEFT, of PEFT's opened here (largest absolute difference), and of an
adapter folded into the weights beside the open one (relative, in norm). Adapters of a mixture are for
attention: those of experts, dense layers and shared experts are refused, since PEFT takes `up_proj` for
an expert's.

"""
SPREAD = """
## Over ranks

The largest difference of three steps to one process in any layout: the loss in nats; the gradient's
norm and all weights, relative. Layouts: {ways}. Experts are shared by the ranks of `tensor` there.

"""
EXPERTS = """
## Experts shared by ranks

A training of a Qwen 3 MoE with auxiliary loss and z-loss, and of a GLM-4.5 MoE with the bias that
balances, which counts as a weight; the larger difference of both to one process, after three steps.
Each rank holds its share of the experts only. The exchange of rows itself, with {cases} cases of four
ranks in float32 and bf16: outputs, gradients of rows, of the weights of choices and of experts are
{bits} to one process that has the rows of all ranks.

"""


class Measuring:
    """A plugin of pytest that keeps what each test measured."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Function) -> Generator[None, Any, Any]:
        measured.KEPT = {}
        passed = False
        try:
            result = yield
            passed = True
            return result
        finally:
            spec = getattr(item, "callspec", None)
            params = {key: str(value) for key, value in (spec.params if spec else {}).items()}
            self.rows.append(
                {
                    "test": item.originalname,
                    "params": params,
                    "passed": passed,
                    "measured": measured.KEPT,
                }
            )
            measured.KEPT = None


def main(files: Iterable[str]) -> int:
    BUILD.mkdir(parents=True, exist_ok=True)
    for file in files:
        plugin = Measuring()
        which = ["-k", FILES[file]] if FILES[file] else []
        pytest.main(["-q", "-p", "no:cacheprovider", str(PROJECT / file), *which], [plugin])
        (BUILD / (file.replace("/", ".") + ".json")).write_text(json.dumps(plugin.rows))
    rows = [row for file in BUILD.glob("*.json") for row in json.loads(file.read_text())]
    PAGE.write_text(page(rows), encoding="utf-8")
    failed = [f"{row['test']} {row['params']}" for row in rows if not row["passed"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} hold", *failed, sep="\n")
    return 1 if failed else 0


def page(rows: list[dict[str, Any]]) -> str:
    by: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        params = row["params"]
        case = params.get("folder") or params.get("case") or params.get("family") or ""
        family = (
            FAMILY[case]["kind"] if case in FAMILY else EVERY.get(case, {}).get("model_type", "")
        )
        by[row["test"], family].append(row)

    def cell(test: str, family: str, kind: str = "") -> str:
        found = by[test, family]
        if not found:
            return ""
        if not all(row["passed"] for row in found):
            return "**fails**"
        return figure(max(row["measured"][kind] for row in found))

    def equal(test: str, family: str) -> str:
        found = by[test, family]
        return "" if not found else "equal" if all(row["passed"] for row in found) else "**fails**"

    families = [config["model_type"] for config in EVERY.values()]
    text = HEAD + table(
        ["`model_type`", *COLUMNS, *EQUAL],
        (
            [
                f"`{one}`",
                *(cell(test, one) for test in COLUMNS.values()),
                *(equal(test, one) for test in EQUAL.values()),
            ]
            for one in families
        ),
    )
    lora = dict.fromkeys(families, "test_both_ways")
    lora |= {
        one: "test_attention_of_a_mixture" for one in families if not by["test_both_ways", one]
    }
    text += ADAPTERS + table(
        ["`model_type`", "ours in PEFT", "PEFT's here", "merged"],
        (
            [
                f"`{one}`",
                cell(lora[one], one, "out"),
                cell(lora[one], one, "in"),
                cell(lora[one], one, "merged"),
            ]
            for one in families
        ),
    )
    spread = "test_a_family_over_ranks_equals_one_process"
    kinds = ("loss", "norm", "weights")
    ways = sorted({row["params"]["way"] for row in rows if row["test"] == spread})
    text += SPREAD.format(ways=", ".join(f"`{way}`" for way in ways)) + table(
        ["`model_type`", "layouts", *kinds],
        (
            [f"`{one}`", str(len(by[spread, one])), *(cell(spread, one, kind) for kind in kinds)]
            for one in families
        ),
    )
    return text + experts(rows)


def experts(rows: list[dict[str, Any]]) -> str:
    tests = (
        "test_shared_experts_equal_one_process",
        "test_a_bias_that_balances_is_that_of_one_process",
    )
    modes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["test"] in tests:
            modes[row["params"]["mode"]].append(row)
    bits = [
        row for row in rows if row["test"] == "test_experts_on_ranks_have_the_bits_of_one_process"
    ]
    equal = "bit-equal" if bits and all(row["passed"] for row in bits) else "**not bit-equal**"
    return EXPERTS.format(cases=len(bits), bits=equal) + table(
        ["layout", "loss", "norm", "weights"],
        (
            [
                mode,
                *(
                    figure(
                        max(
                            row["measured"][kind] if row["passed"] else float("inf")
                            for row in found
                        )
                    )
                    for kind in ("loss", "norm", "weights")
                ),
            ]
            for mode, found in modes.items()
        ),
    )


def figure(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or FILES))
