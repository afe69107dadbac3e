"""The results as tables: what holds and what does not, speed, and plan beside truth. Imports no
torch.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.results import Results
from benchmarks.gpu.rows import CORRECT, ROWS, SPEED

SHOWN_FAULTS = 20
FORMULA = (
    "share of peak = tokens/s x flops per token / peak; flops per token = 6 (with LoRA 4, as kept"
    " weights have no gradients, and 6 x weights of adapters) x weights of matrices (head included,"
    " embedding not; of a mixture those that a token meets) + 12 x layers x heads x head size x"
    " seq_len / 2; peak = the bf16 product of two 8,192 x 8,192 matrices of random numbers in the"
    " row `ceilings`, of float8 rows too"
)


def show(results: Results, console: Console) -> int:
    """Print all rows that count; answer the number of faults."""
    console.print(", ".join(f"{name} {value}" for name, value in results.head.items()))
    known = {row.name: line for row in ROWS if (line := results.of(row)) is not None}
    faults = show_checks(known, console)
    show_speed(known, console)
    show_plans(known, console)
    return faults


def show_checks(known: dict[str, dict[str, Any]], console: Console) -> int:
    table = Table("what is right", "checks", "hold", "not run", "", title_justify="left")
    faults = []
    for name, line in known.items():
        if line["kind"] != CORRECT and not line["checks"]:
            continue
        checks = line["checks"]
        ran = [check for check in checks if check["holds"] is not None]
        wrong = [check for check in ran if not check["holds"]]
        faults += [f"{name}: {told(check)}" for check in wrong]
        if line["status"] == "failed":
            faults.append(f"{name}: {line['reason']}")
        table.add_row(
            name,
            str(len(ran)),
            str(len(ran) - len(wrong)),
            str(len(checks) - len(ran)),
            "" if line["status"] == "measured" else f"{line['status']}: {line['reason']}"[:60],
        )
    console.print(table)
    for fault in faults[:SHOWN_FAULTS]:
        console.print(f"  {fault}", markup=False)
    if len(faults) > SHOWN_FAULTS:
        console.print(f"  and {len(faults) - SHOWN_FAULTS} more")
    failed = [line for line in known.values() if line["status"] == "failed"]
    return len(faults) + sum(line["kind"] != CORRECT and not line["checks"] for line in failed)


def told(check: dict[str, Any]) -> str:
    if "value" in check:
        return f"{check['check']} {check['value']:.3g} > {check['bound']:.3g}"
    return f"{check['check']} {check['detail']}"


def show_speed(known: dict[str, dict[str, Any]], console: Console) -> None:
    peak = known.get("ceilings", {}).get("figures", {}).get("bf16_flops")
    table = Table("how fast", "tokens/s", "share of peak", "memory, GB", "", title_justify="left")
    for name, line in known.items():
        if line["kind"] != SPEED:
            continue
        figures = line["figures"]
        if line["status"] != "measured" or "tokens_per_s" not in figures:
            table.add_row(name, "", "", "", note(line)[:90])
            continue
        flops = figures.get("flops_per_token")
        share = f"{figures['tokens_per_s'] * flops / peak:.1%}" if flops and peak else "unknown"
        memory = figures.get("allocated_bytes")
        table.add_row(
            name,
            f"{figures['tokens_per_s']:,.0f}",
            share,
            f"{memory / 1e9:.1f}" if memory else "",
            "",
        )
    console.print(table)
    console.print(FORMULA, style="dim")


def note(line: dict[str, Any]) -> str:
    if line["status"] != "measured":
        return f"{line['status']}: {line['reason']}"
    return ", ".join(
        f"{name} {value:,.3g}"
        for name, value in line["figures"].items()
        if isinstance(value, float | int)
    )


def show_plans(known: dict[str, dict[str, Any]], console: Console) -> None:
    """Memory that tensors take and time of a step: planned, measured, off by."""
    table = Table(
        "plan beside truth",
        "GB planned",
        "measured",
        "off by",
        "s a step planned",
        "measured",
        "off by",
        title_justify="left",
    )
    for name, line in known.items():
        truth = known.get(name.removeprefix("plan: "))
        if not name.startswith("plan: ") or line["status"] != "measured":
            continue
        planned = line["figures"]
        measured = truth["figures"] if truth is not None and truth["status"] == "measured" else {}
        table.add_row(
            name.removeprefix("plan: "),
            *compared(planned["allocated_bytes"], measured.get("allocated_bytes"), 1e9),
            *compared(planned["step_s"].get("likely"), measured.get("step_s"), 1.0),
        )
    console.print(table)


def compared(planned: float | None, measured: float | None, unit: float) -> tuple[str, str, str]:
    shown = ["" if value is None else f"{value / unit:.3g}" for value in (planned, measured)]
    off = "" if not planned or not measured else f"{planned / measured - 1:+.0%}"
    return shown[0] or "unknown", shown[1], off
