"""How long a device takes for a kernel or a collective: guessed from `devices.yaml`, or measured on
it by `ingot bench --calibrate` and stored in the user's configuration folder. Imports no torch.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from ingot.base.environment import processor_name
from ingot.base.errors import WrongInput
from ingot.base.storage import write_atomic
from ingot.plan.devices.learned import folder, learned_factor
from ingot.plan.devices.types import DeviceType, network_bytes_s
from ingot.plan.ranges import Origin, Range, largest
from ingot.plan.tracing.records import DISPATCH, SPREAD, Operator

SCHEMA = 1
FAR = 1e18
"""Work beyond any kernel's: where the line of a guessed curve ends."""
STAND_INS = {
    "bfloat16": ("float16", "float32"),
    "float16": ("bfloat16", "float32"),
    "float32": ("tfloat32", "bfloat16"),
    "float8_e4m3fn": ("bfloat16", "float16", "float32"),
    "float8_e5m2": ("float8_e4m3fn", "bfloat16", "float16", "float32"),
}
"""The dtypes by whose rate products in a dtype are told where its own is not known."""


PRODUCTS = ("matmul", "attention")
WAITING = "waiting"
"""The curve of what a rank waits for others at a collective, beyond the collective itself, against
the seconds that it computed since the last one.
"""
NARROW = 128.0


def is_narrow(operator: Operator) -> bool:
    """Whether one side of a matrix product is so short that reading takes longer than computing:
    those of LoRA, of attention by products, of tiny models. Such products are timed by bytes.
    """
    if operator.kind != "matmul" or not operator.bytes:
        return False
    return operator.flops / operator.bytes * ITEM_BYTES.get(operator.dtype, 2) < NARROW


ITEM_BYTES = {"float64": 8, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class Curve:
    """Seconds of a kind of kernel against its work in FLOPs or bytes, linear between points.

    points: work and seconds (low, likely, high), in order of work.
    """

    points: tuple[tuple[float, tuple[float, float, float]], ...]
    origin: Origin

    @classmethod
    def line(cls, latency: Range, rate: Range) -> Curve:
        """A constant rate after a latency."""
        at_end = latency + FAR / rate
        return cls(
            (
                (0.0, (latency.low, latency.likely, latency.high)),
                (FAR, (at_end.low, at_end.likely, at_end.high)),
            ),
            at_end.origin,
        )

    @classmethod
    def flat(cls, each: Range) -> Curve:
        """The same time for any work."""
        seconds = (each.low, each.likely, each.high)
        return cls(((0.0, seconds), (1.0, seconds)), each.origin)

    def seconds(self, work: float) -> Range:
        """Beyond the last point the time grows as it did before it."""
        works = [at for at, _ in self.points]
        right = min(max(bisect.bisect_left(works, work), 1), len(works) - 1)
        (x0, below), (x1, above) = self.points[right - 1], self.points[right]
        share = max(0.0, (work - x0) / (x1 - x0))
        low, likely, high = (a + (b - a) * share for a, b in zip(below, above, strict=True))
        return Range(low, max(low, likely), max(low, likely, high), self.origin)


UNTIMED = {
    DISPATCH.kind: Curve.flat(Range(5e-6, 15e-6, 50e-6, "guessed")),
    SPREAD.kind: Curve.flat(Range(15e-6, 60e-6, 200e-6, "guessed")),
}
"""Of a processor that was calibrated before these were: what Python takes for an operator."""
AHEAD = {
    DISPATCH.kind: Curve.flat(Range(0, 0, 50e-6, "guessed")),
    SPREAD.kind: Curve.flat(Range(0, 0, 200e-6, "guessed")),
}
"""The same beside an accelerator, which the host calls ahead of time unless kernels are tiny."""


@dataclass(frozen=True)
class Coefficients:
    """What a device needs for its work.

    name: of the device, as its file is called; title: for people.
    curves: by kind and dtype (`matmul bfloat16`, `attention bfloat16`, `memory float32`), against
        FLOPs, or bytes read and written; `narrow` products are known by bytes, and measured
        attention by `attending`, seconds for each byte against FLOPs for each; `within` and
        `between` nodes collectives (`within reduce`, `gather`, `send`), against bytes that a rank
        sends; `loading` of texts, chats and samples one row, against its tokens; `dispatch` what
        Python takes for one operator; `waiting` for others at a collective, against the seconds
        since the last one.
    hop_s: seconds for each further rank of a ring.
    exposed: share of sharding's communication that computing does not hide.
    compiled: share of the bytes of memory-bound kernels that a compiled step has left.
    origin: the worst of the curves for computing. date, torch, threads, ranks: of the measurement.
    basis: names the figures before any correction. learned: the correction that is in the curves.
    """

    name: str
    title: str
    curves: Mapping[str, Curve]
    hop_s: Range
    exposed: Range
    compiled: Range
    origin: Origin
    date: str = ""
    torch: str = ""
    threads: int = 0
    ranks: int = 1
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    basis: str = field(default="", compare=False)
    learned: Range | None = None

    def seconds(self, kind: str, dtype: str, work: float) -> Range:
        """Of one kernel, or of one collective, which has no dtype.

        Raises:
            WrongInput: nothing is known of such kernels.
        """
        return self._curve(kind, dtype).seconds(work)

    def kernel_seconds(self, operator: Operator) -> Range:
        """Of one kernel: of a product, the time of computing or that of reading, whichever is
        longer.
        """
        kind, dtype = operator.kind, operator.dtype
        if kind not in PRODUCTS:
            return self.seconds(kind if self._knows(kind) else "memory", dtype, operator.bytes)
        if kind == "attention" and self._knows("attending") and operator.bytes:
            # Longer sequences are computed faster, more heads or rows are not.
            each = self.seconds("attending", dtype, operator.flops / operator.bytes)
            return each * operator.bytes + self.seconds("memory", dtype, 0)
        computing = self.seconds(kind, dtype, operator.flops)
        narrow = is_narrow(operator) and self._knows("narrow")
        reading = self.seconds("narrow" if narrow else "memory", dtype, operator.bytes)
        return largest(computing, reading) if reading.likely > computing.likely else computing

    def _knows(self, kind: str) -> bool:
        return any(name.partition(" ")[0] == kind for name in self.curves)

    def peak(self, dtype: str) -> float | None:
        """The vendor's FLOP/s, or the best that was measured."""
        known = (one for one in (dtype, *STAND_INS.get(dtype, ())) if one in self.peak_flops)
        return next((self.peak_flops[one] for one in known), None)

    def _curve(self, kind: str, dtype: str) -> Curve:
        names = [f"{kind} {one}" for one in (dtype, *STAND_INS.get(dtype, ()), "float32")]
        for name in (*names, kind, kind.partition(" ")[0] if kind not in UNTIMED else kind):
            if name in self.curves:
                return self.curves[name]
        if kind in UNTIMED:
            return UNTIMED[kind]
        raise WrongInput(
            f"the coefficients of {self.name} have no {kind} in {dtype}; measure them with"
            " `ingot bench --calibrate`"
        )


def guessed(device: DeviceType, machine_type: str | None = None, per_node: int = 8) -> Coefficients:
    """The shipped coefficients of a device, of which a machine has `per_node`."""
    guess, bandwidth = device.guesses, device.bandwidth * device.guesses["memory"]
    kernel, curves = guess["kernel_s"], {}
    for dtype, peak in device.peak_flops.items():
        for kind in ("matmul", "attention"):
            curves[f"{kind} {dtype}"] = Curve.line(kernel, peak * guess[kind])
    curves |= {"memory": Curve.line(kernel, bandwidth), **AHEAD}
    network = network_bytes_s(device, machine_type, per_node)
    if device.kind == "tpu":  # chips of a slice are linked with each other across hosts
        network = Range.exactly(device.link)
    curves["within"] = Curve.line(guess["within_s"], device.link * guess["within"])
    curves["between"] = Curve.line(guess["between_s"], network * guess["between"])
    return Coefficients(
        device.name,
        device.title,
        curves,
        guess["hop_s"],
        guess["exposed"],
        guess["compiled"],
        "guessed",
        peak_flops=device.peak_flops,
    )


OTHER_RECIPES = Range(0.8, 1.0, 1.25, "guessed")
"""How far a correction that one recipe gave may be off for another."""


class Unmeasured(TypedDict):
    hop_s: Range
    exposed: Range
    compiled: Range


UNMEASURED: Unmeasured = {
    "hop_s": Range.exactly(0, "guessed"),
    "exposed": Range(0.5, 1, 1, "guessed"),
    "compiled": Range(0.4, 0.8, 1, "guessed"),
}
"""Of a CPU, which communicates with the same cores with which it computes."""


def file_name(title: str) -> str:
    """The name under which the coefficients of a device are stored."""
    return "-".join(re.findall(r"[a-z0-9]+", title.lower()))


def save(found: Coefficients) -> Path:
    """Write measured coefficients, in place of earlier ones of the same device."""
    curves = {
        name: [[work, *seconds] for work, seconds in curve.points]
        for name, curve in found.curves.items()
        if curve.origin == "measured"
    }
    content = {
        "schema": SCHEMA,
        "name": found.name,
        "title": found.title,
        "date": found.date,
        "torch": found.torch,
        "threads": found.threads,
        "ranks": found.ranks,
        "peak_flops": dict(found.peak_flops),
        "curves": curves,
    }
    path = folder() / f"{found.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(content, indent=1) + "\n")
    return path


def measured(name: str) -> Coefficients | None:
    """What was measured on the device of this name; None if nothing was.

    Raises:
        WrongInput: the file is not one of coefficients.
    """
    path = folder() / f"{name}.json"
    try:
        content = json.loads(path.read_bytes())
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}")
        return Coefficients(
            content["name"],
            content["title"],
            {what: _measured_curve(rows) for what, rows in content["curves"].items()},
            **UNMEASURED,
            origin="measured",
            date=content["date"],
            torch=content["torch"],
            threads=content["threads"],
            ranks=content["ranks"],
            peak_flops=content["peak_flops"],
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise WrongInput(
            f"{path} holds no coefficients of a device ({error}); remove it, or write it anew with"
            " `ingot bench --calibrate`"
        ) from None


def _measured_curve(rows: Iterable[Any]) -> Curve:
    points = tuple((float(work), (float(a), float(b), float(c))) for work, a, b, c in rows)
    works = [work for work, _ in points]
    if len(points) < 2 or works != sorted(set(works)):
        raise ValueError("a curve needs two points or more, in order")
    for _, seconds in points:
        Range.of(seconds, "measured")
    return Curve(points, "measured")


def coefficients_of(
    device: DeviceType, machine_type: str | None = None, per_node: int = 8
) -> Coefficients:
    """What was measured of this type of device, completed by what is guessed; all guessed where
    nothing was measured.
    """
    shipped, own = guessed(device, machine_type, per_node), measured(device.name)
    if own is None:
        return _corrected(shipped, _basis(device))
    both = replace(
        own,
        curves={**shipped.curves, **own.curves},
        hop_s=shipped.hop_s,
        exposed=shipped.exposed,
        compiled=shipped.compiled,
        peak_flops=shipped.peak_flops,
    )
    return _corrected(both, _basis(own.curves))


def _basis(of: object) -> str:
    """Names what a correction is relative to: corrections of other figures say nothing."""
    return hashlib.sha256(repr(of).encode()).hexdigest()[:12]


def _corrected(found: Coefficients, basis: str) -> Coefficients:
    """With what was learned from trainings: everything takes `factor` times as long, and about as
    surely as it is known for the recipes that were trained.
    """
    factor = learned_factor(found.name, basis)
    if factor is None:
        return replace(found, basis=basis)

    def narrowed(low: float, likely: float, high: float) -> tuple[float, float, float]:
        return (
            factor.low * max(low, likely * OTHER_RECIPES.low),
            factor.likely * likely,
            factor.high * min(high, likely * OTHER_RECIPES.high),
        )

    curves = {
        name: curve
        if name.startswith("loading")  # beside the steps that it was learned from
        else Curve(tuple((work, narrowed(*took)) for work, took in curve.points), "learned")
        for name, curve in found.curves.items()
    }
    return replace(
        found,
        curves=curves,
        hop_s=found.hop_s * factor,
        origin="learned",
        basis=basis,
        learned=factor,
    )


def cpu_name(threads: int, ranks: int = 1, processor: str | None = None) -> tuple[str, str]:
    """The name and the title of a processor, by default this machine's, where `ranks` processes of
    so many threads run on it at the same time, which slows each.
    """
    title = f"{processor_name() if processor is None else processor}, {ranks} x {threads} threads"
    return file_name(title), title


def cpu_coefficients(
    threads: int, ranks: int = 1, processor: str | None = None
) -> Coefficients | None:
    """What was measured on a processor, by default this machine's; None if nothing was."""
    found = measured(cpu_name(threads, ranks, processor)[0])
    return None if found is None else _corrected(found, _basis(found.curves))
