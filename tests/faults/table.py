"""All planted faults."""

from __future__ import annotations

from tests.faults import data, launching, models, parallel, places, training
from tests.faults.fault import Fault

FAULTS: list[Fault] = [
    fault for room in (training, parallel, data, models, places, launching) for fault in room.FAULTS
]
