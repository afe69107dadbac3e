"""Faults in what is started elsewhere, watched, paid for."""

from __future__ import annotations

from tests.faults.fault import Fault

SUPERVISE, GCE, SLURM = (f"ingot/launch/{name}.py" for name in ("supervise", "gce", "slurm"))
PRICES, SPENDING = "ingot/cloud/prices.py", "ingot/launch/supervisor/budget.py"
FAULTS = [
    Fault(
        "restart-for-ever",
        SUPERVISE,
        "if self.restarts >= self.recipe.launch.restarts:",
        "if False:",
        "a training that fails is restarted for ever",
    ),
    Fault(
        "same-crash-again",
        SUPERVISE,
        "if self.barren_of_itself > 1 and not failure.by_us:",
        "if self.barren_of_itself > 1000 and not failure.by_us:",
        "a training that fails at the same step is restarted to the last restart",
    ),
    Fault(
        "fresh-at-each-restart",
        SUPERVISE,
        "argv=tuple(argument for argument in self.job.argv if argument != FRESH)",
        "argv=self.job.argv",
        "a restart after --fresh begins from the first step again",
    ),
    Fault(
        "stop-is-failure",
        SUPERVISE,
        "Ended(EXIT_STOPPED if checkpoints else 128 + self.stops.first, self.stops.first)",
        "Ended(0, self.stops.first)",
        "a training that was stopped ends with 0, as if it were done",
    ),
    Fault(
        "part-of-a-fleet-kept",
        GCE,
        "refused.append(error)\n                self._remove(",
        "refused.append(error)\n                list(",
        "machines of a zone without room for all stay up, and cost, while the next one is tried",
        "tests/launch/test_gce.py",
    ),
    Fault(
        "job-kept-at-its-end",
        GCE,
        "self._listen(handle, mine)\n            self._remove(mine)",
        "self._listen(handle, mine)",
        "machines of a job that has ended are not deleted",
        "tests/launch/test_gce.py",
    ),
    Fault(
        "preempted-is-failure",
        GCE,
        'return "failed" if failed else "preempted"',
        'return "failed"',
        "a machine that was taken away counts as a failure of the training",
        "tests/launch/test_gce.py",
    ),
    Fault(
        "slurm-longer-limit",
        SLURM,
        "return min(limits) if limits else None",
        "return max(limits) if limits else None",
        "of two time limits the longer is asked for",
        "tests/launch/test_slurm_script.py",
    ),
    Fault(
        "slurm-secrets-exported",
        SLURM,
        "without = {*job.secrets, *map(cluster.variable, ours)}",
        "without = {*map(cluster.variable, ours)}",
        "secrets reach sbatch's exported environment, which Slurm keeps on disk",
        "tests/launch/test_slurm_script.py",
    ),
    Fault(
        "slurm-signal-late",
        SLURM,
        'f"B:USR1@{knobs.signal_s}"',
        '"B:USR1@1"',
        "a job hears of its time limit a second before it",
        "tests/launch/test_slurm_script.py",
    ),
    Fault(
        "money-of-one-node",
        PRICES,
        "return None if each is None else (whole + each * count) * nodes",
        "return None if each is None else whole + each * count",
        "the money limit reckons with one machine of several",
    ),
    Fault(
        "money-used-before",
        PRICES,
        "(cloud.max_cost - used[1]) / each * 3600",
        "cloud.max_cost / each * 3600",
        "each start of a training may spend the whole limit again",
    ),
    Fault(
        "spot-price-of-demand",
        PRICES,
        "return None if prices is None else float(prices[spot])",
        "return None if prices is None else float(prices[True])",
        "machines on demand are reckoned at the price of spot ones",
    ),
    Fault(
        "spent-beyond-the-limit",
        SPENDING,
        "seconds = min(max(0.0, at - spent.since), spent.limit_s)",
        "seconds = max(0.0, at - spent.since)",
        "time after a job's own limit counts as spent",
    ),
    Fault(
        "spent-nothing",
        SPENDING,
        "spent.dollars + seconds / 3600 * spent.dollars_an_hour",
        "spent.dollars",
        "what earlier starts cost is forgotten",
    ),
]
