"""Faults in what is started elsewhere, watched, paid for."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = [
    Fault(
        "restart-for-ever",
        "ingot/launch/supervisor/supervise.py",
        "if self._restarts >= self._recipe.launch.restarts:",
        "if False:",
        "a training that fails is restarted for ever",
    ),
    Fault(
        "same-crash-again",
        "ingot/launch/supervisor/supervise.py",
        "if self._own_failures_without_progress > 1 and",
        "if self._own_failures_without_progress > 1000 and",
        "a training that fails at the same step is restarted to the last restart",
    ),
    Fault(
        "fresh-at-each-restart",
        "ingot/launch/supervisor/supervise.py",
        "tuple(argument for argument in self._job.argv if argument != FRESH)",
        "self._job.argv",
        "a restart after --fresh begins from the first step again",
    ),
    Fault(
        "stop-is-failure",
        "ingot/launch/supervisor/supervise.py",
        "JobExit(EXIT_STOPPED if checkpoints else 128 + self._stops.first, self._stops.first)",
        "JobExit(0, self._stops.first)",
        "a training that was stopped ends with 0, as if it were done",
    ),
    Fault(
        "part-of-a-fleet-kept",
        "ingot/launch/places/gce.py",
        "self._delete(self._machines_of_start(cluster))\n                continue",
        "continue",
        "machines of a zone without room for all stay up, and cost, while the next one is tried",
        "tests/launch/test_gce.py",
    ),
    Fault(
        "job-kept-at-its-end",
        "ingot/launch/places/gce.py",
        "self._delete(own)",
        "pass",
        "machines of a job that has ended are not deleted",
        "tests/launch/test_gce.py",
    ),
    Fault(
        "preempted-is-failure",
        "ingot/launch/places/gce.py",
        'return "failed" if failed else "preempted"',
        'return "failed"',
        "a machine that was taken away counts as a failure of the training",
        "tests/launch/test_gce.py",
    ),
    Fault(
        "slurm-longer-limit",
        "ingot/launch/places/slurm.py",
        "return min(limits) if limits else None",
        "return max(limits) if limits else None",
        "of two time limits the longer is asked for",
        "tests/launch/test_slurm_script.py",
    ),
    Fault(
        "slurm-secrets-exported",
        "ingot/launch/places/slurm.py",
        "left_out = {*job.secrets, *map(",
        "left_out = {*map(",
        "secrets reach sbatch's exported environment, which Slurm keeps on disk",
        "tests/launch/test_slurm_script.py",
    ),
    Fault(
        "slurm-signal-late",
        "ingot/launch/places/slurm.py",
        'f"B:USR1@{knobs.signal_s}"',
        '"B:USR1@1"',
        "a job hears of its time limit a second before it",
        "tests/launch/test_slurm_script.py",
    ),
    Fault(
        "money-of-one-node",
        "ingot/cloud/prices.py",
        "return None if each is None else (whole + each * count) * nodes",
        "return None if each is None else whole + each * count",
        "the money limit reckons with one machine of several",
    ),
    Fault(
        "money-used-before",
        "ingot/cloud/prices.py",
        "(cloud.max_cost - used[1]) / each * 3600",
        "cloud.max_cost / each * 3600",
        "each start of a training may spend the whole limit again",
    ),
    Fault(
        "spot-price-of-demand",
        "ingot/cloud/prices.py",
        "return None if prices is None else float(prices[spot])",
        "return None if prices is None else float(prices[True])",
        "machines on demand are reckoned at the price of spot ones",
    ),
    Fault(
        "spent-beyond-the-limit",
        "ingot/launch/supervisor/budget.py",
        "seconds = min(max(0.0, at - spending.since), spending.limit_s)",
        "seconds = max(0.0, at - spending.since)",
        "time after a job's own limit counts as spent",
    ),
    Fault(
        "spent-nothing",
        "ingot/launch/supervisor/budget.py",
        "spending.dollars + dollars",
        "spending.dollars",
        "what earlier starts cost is forgotten",
    ),
]
