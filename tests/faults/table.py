"""All planted faults."""

from __future__ import annotations

from tests.faults import (
    balance,
    data,
    entrances,
    families,
    grpo,
    launching,
    masked,
    models,
    named,
    optimizers,
    parallel,
    places,
    planning,
    quantized,
    rewards,
    serving,
    training,
)
from tests.faults.fault import Fault

FAULTS: list[Fault] = [
    fault
    for room in (
        training,
        optimizers,
        parallel,
        balance,
        data,
        models,
        families,
        grpo,
        named,
        places,
        launching,
        masked,
        planning,
        quantized,
        rewards,
        serving,
        entrances,
    )
    for fault in room.FAULTS
]
