"""What Slurm is given, without a Slurm: the script, and the environment that sbatch is called in."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed
from ingot.config.recipe import Recipe
from ingot.launch.job import Job
from ingot.launch.places import slurm
from ingot.launch.places import slurm_cluster as cluster
from ingot.launch.places.slurm import SlurmLauncher
from ingot.launch.places.slurm_cluster import NoAnswer
from tests.launch.nodes import recipe_for

SECRET = "hush-77aa"


def slurm_recipe(root: Path, **knobs: object) -> Recipe:
    return recipe_for(root, **{"launch__kind": "slurm", **knobs})


def job_of(recipe: Recipe, **about: object) -> Job:
    job = Job("train", ("train", "r.yaml"), rendezvous=str(recipe.folder.root / "meet"))
    return replace(job, **about)  # type: ignore[arg-type]


def option(script: str, name: str) -> str | None:
    found = re.search(rf"^#SBATCH --{name}=(.*)$", script, re.MULTILINE)
    return found[1] if found else None


@pytest.mark.parametrize(
    ("knob", "job", "asked"),
    [("4h", 3600.0, "1:00:00"), ("30m", 86_400.0, ":30:00"), ("30m", None, ":30:00")],
)
def test_of_two_time_limits_the_shorter_is_asked_for(
    knob: str, job: float | None, asked: str, tmp_path: Path
) -> None:
    recipe = slurm_recipe(tmp_path, launch__slurm__time=knob)
    script = SlurmLauncher(recipe).render(job_of(recipe, time_limit_s=job))
    assert (option(script, "time") or "").lstrip("0-") == asked


def test_it_is_told_of_its_time_limit_as_long_before_it_as_the_recipe_says(tmp_path: Path) -> None:
    recipe = slurm_recipe(tmp_path, launch__slurm__time="4h", launch__slurm__signal_s=321)
    assert option(SlurmLauncher(recipe).render(job_of(recipe)), "signal") == "B:USR1@321"


def test_a_percent_sign_in_a_path_is_no_pattern_of_slurm(tmp_path: Path) -> None:
    recipe = slurm_recipe(tmp_path / "100%j")
    log = option(SlurmLauncher(recipe).render(job_of(recipe)), "output") or ""
    assert "/100%%j/" in log
    assert log.endswith("/slurm-train-%j.log")


def shares(script: str) -> dict[str, str]:
    """What a script asks of each node."""
    lines = re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE)
    asked = ("exclusive", "cpus-per-task", "mem", "mem-per-cpu", "gpus-per-node", "mincpus")
    return {name: value for name, value in lines if name in asked}


@pytest.mark.parametrize(
    ("nodes", "knobs", "asked"),
    [
        (1, {"gpus": 8}, {"gpus-per-node": "8", "cpus-per-task": "64", "mem": "512G"}),
        (1, {"gpus": 1}, {"gpus-per-node": "1", "cpus-per-task": "8", "mem": "64G"}),
        (2, {"gpus": 8}, {"gpus-per-node": "8", "exclusive": "", "mem": "0"}),
        (1, {}, {"exclusive": "", "mem": "0"}),
        (1, {"gpus": 0}, {"gpus-per-node": "0", "exclusive": "", "mem": "0"}),
        (1, {"cpus": 12}, {"cpus-per-task": "12", "mem": "96G"}),
        (2, {"gpus": 4, "cpus": 48}, {"gpus-per-node": "4", "cpus-per-task": "48", "mem": "384G"}),
        (
            1,
            {"gpus": 8, "memory": "900G"},
            {"gpus-per-node": "8", "cpus-per-task": "64", "mem": "900G"},
        ),
        (
            1,
            {"gpus": 8, "options": {"exclusive": ""}},
            {"gpus-per-node": "8", "exclusive": "", "mem": "0"},
        ),
        (
            1,
            {"cpus": 4, "options": {"mem-per-cpu": "2G"}},
            {"cpus-per-task": "4", "mem-per-cpu": "2G"},
        ),
        (1, {"options": {"mincpus": "4"}}, {"mincpus": "4"}),
    ],
)
def test_each_node_is_asked_for_cores_and_memory(
    nodes: int, knobs: dict[str, Any], asked: dict[str, str], tmp_path: Path
) -> None:
    recipe = slurm_recipe(
        tmp_path, **{f"launch__slurm__{knob}": value for knob, value in knobs.items()}
    )
    assert shares(SlurmLauncher(recipe).render(job_of(recipe, nodes=nodes))) == asked


def test_what_is_said_twice_or_leaves_a_rank_without_a_core_is_refused(tmp_path: Path) -> None:
    recipe = slurm_recipe(
        tmp_path,
        launch__slurm__cpus=4,
        launch__slurm__memory="8G",
        launch__slurm__options={"cpus-per-gpu": "2", "mem": "4G"},
    )
    assert SlurmLauncher(recipe).can(job_of(recipe, processes=8))[:3] == [
        "launch.slurm.cpus 4 and launch.slurm.options.cpus-per-gpu say the same thing; remove one",
        "launch.slurm.memory 8G and launch.slurm.options.mem say the same thing; remove one",
        "launch.slurm.cpus 4 is fewer than the 8 processes of a node; raise it",
    ]


def test_secrets_are_in_neither_the_script_nor_the_environment_of_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORD", SECRET)
    monkeypatch.setenv("PLAIN", "shown")
    monkeypatch.setenv("INGOT_DATA__TEXT_KEY", "a knob")
    monkeypatch.setenv("WANDB_API_KEY", f"{SECRET}-unasked")
    monkeypatch.setenv("SBATCH_MEM_PER_CPU", "1")  # Slurm refuses it beside --mem
    monkeypatch.setenv("JUDGE", f"{SECRET}-of-a-judge")
    monkeypatch.setenv("DOOR", f"{SECRET}-of-a-server")
    monkeypatch.setenv("https_proxy", "http://me:word@proxy:3128")
    judge = {"kind": "http", "url": "https://judge.org", "key_variable": "JUDGE"}
    recipe = slurm_recipe(
        tmp_path,
        objective={"kind": "grpo", "group": 2, "rewards": [judge]},
        serve__api_key="env:DOOR",
    )
    job, launcher = job_of(recipe, secrets=("WORD",)), SlurmLauncher(recipe)
    meet = Path(job.rendezvous or "")
    meet.mkdir(parents=True)
    monkeypatch.setattr(launcher, "_reasons", lambda job: [])
    calls: list[tuple[tuple[str, ...], Mapping[str, str]]] = []

    def ask(*command: str, environ: Mapping[str, str]) -> str:
        calls.append((command, environ))
        return "77\n"

    monkeypatch.setattr(cluster, "run_command", ask)
    assert launcher.submit(job).id == "77"
    ((command, environ),) = calls
    assert command[0] == "sbatch"
    assert environ["PLAIN"] == "shown"
    assert not {"WORD", "WANDB_API_KEY", "SBATCH_MEM_PER_CPU", "JUDGE", "DOOR"} & set(environ)
    told = capsys.readouterr().err
    assert "note: WANDB_API_KEY stays here" in told
    assert "INGOT_DATA__TEXT_KEY" not in {*environ, *told.split()}, "it is in the resolved recipe"
    assert "note: https_proxy has a login or a key in an address" in told
    assert SECRET not in repr(environ) + Path(command[-2]).read_text()
    handed_on = json.loads((meet / "secrets-0.json").read_bytes())
    assert sorted(handed_on) == ["DOOR", "JUDGE", "WORD"]


def test_a_job_submitted_from_within_another_inherits_nothing_of_it_but_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun in the new job refuses the memory per core of the old one beside the script's --mem."""
    outer = {"SLURM_MEM_PER_CPU": "512", "SLURM_JOB_ID": "41", "SRUN_CPUS_PER_TASK": "1"}
    outer["SLURM_JWT"] = SECRET  # which sbatch would store with the job
    assert all(map(cluster.is_of_this_job, outer))
    for name, value in {**outer, "SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "big"}.items():
        monkeypatch.setenv(name, value)
    recipe = slurm_recipe(tmp_path)
    environ = SlurmLauncher(recipe)._sbatch_environment(job_of(recipe))
    assert {
        name: value for name, value in environ.items() if name.startswith(("SLURM", "SRUN"))
    } == {
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_CLUSTERS": "big",
    }


@pytest.mark.parametrize("second", ["answered", "refused", "without an answer"])
def test_a_request_that_is_carried_out_after_it_was_given_up_does_not_work_beside_its_successor(
    second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy controller carries requests out long after sbatch gave them up; two jobs would meet at
    one place, and the second would end the first.
    """
    monkeypatch.setattr(slurm, "RETRY_S", 0.0)
    recipe = slurm_recipe(tmp_path)
    job, launcher = job_of(recipe), SlurmLauncher(recipe)
    job = replace(job, rendezvous=str(recipe.folder.root / "jobs" / "train-1"))
    monkeypatch.setattr(launcher, "_reasons", lambda job: [])
    requests: list[tuple[str, ...]] = []

    def ask(*command: str, environ: Mapping[str, str] | None = None) -> str:
        if command[0] == "squeue":
            return ""
        requests.append(command)
        if second == "answered" and len(requests) == 2:
            return "77\n"
        if second == "refused" and len(requests) == 2:
            raise Failed("sbatch: error: Job violates accounting/QOS policy (job submit limit)")
        raise NoAnswer("sbatch: Socket timed out on send/recv operation")

    monkeypatch.setattr(cluster, "run_command", ask)
    (tmp_path / "srun").write_text(f"#!/bin/bash\necho works >> {tmp_path}/works\n")
    (tmp_path / "srun").chmod(0o755)

    def works() -> list[bool]:
        """Whether the job of each request does."""
        found = []
        for *_, script, token in requests:
            subprocess.run(
                ["bash", script, token], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True
            )
            found.append((tmp_path / "works").exists())
            (tmp_path / "works").unlink(missing_ok=True)
        return found

    if second == "answered":
        assert launcher.submit(job).id == "77"
        assert works() == [False, True]
    elif second == "refused":
        with pytest.raises(Failed, match="submit limit"):
            launcher.submit(job)
        assert works() == [False, False]
    else:
        with pytest.raises(NoAnswer, match="is unknown"):
            launcher.submit(job)
        assert works() == [False] * (slurm.SUBMIT_TRIES - 1) + [True]
        launcher._settle_submissions(job)  # the next command asks, and starts anew
        assert not any(works())
