"""All planted faults."""

from __future__ import annotations

from tests.faults import data, launching, models, parallel, places, planning, training
from tests.faults.fault import Fault

FAULTS: list[Fault] = [
    fault
    for room in (training, parallel, data, models, places, launching, planning)
    for fault in room.FAULTS
]
