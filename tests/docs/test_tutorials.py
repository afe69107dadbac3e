"""Every command of the tutorials, as it is written there, in one shell and an empty folder: on tiny
models, with folders in the place of downloads, a real Slurm and a real kill.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.tiny_model import write_model
from tests.docs import shell
from tests.docs.typed import PROJECT, SMALLEST, TUNED, blocks, page
from tests.launch.slurm_cluster import Cluster
from tests.launch.sshd import need
from tests.ranks import free_port
from tests.small import write_documents

TUTORIAL = pytest.mark.drawn("a tutorial")
SPECIAL = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The empty folder in which somebody types."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def follow(name: str, here: Path, **environment: str) -> str:
    """All that is typed in a tutorial, on a port that is free."""
    port = str(free_port())
    typed = blocks(page(f"docs/tutorials/{name}.md").replace("8080", port), "bash")
    return shell.run(typed, here, 200, **environment)


def test_each_tutorial_is_followed_by_a_test() -> None:
    followed = {"pretrain", "adapt", "chat", "slurm", "cloud"}
    assert {path.stem for path in (PROJECT / "docs/tutorials").glob("*.md")} == followed


@TUTORIAL
def test_pretrain_from_nothing(here: Path) -> None:
    write_documents(here / "text")
    said = follow("pretrain", here, **SMALLEST)
    run = here / "runs/quickstart"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    kinds = [event["kind"] for event in events]
    assert kinds.count("finish") == 2, "the changed knob trains again"
    assert "quickstart v1" in said
    assert "goodput" in said


@TUTORIAL
def test_adapt_a_model_to_your_texts(here: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    small = {**TUNED, "INGOT_DATA__FRACTION": "0.1", "INGOT_MODEL__SOURCE": str(model)}
    follow("adapt", here, **small)
    report = json.loads((here / "runs/adapt-smollm2/reports/evaluate.json").read_text())
    assert "base" in json.dumps(report), "the model before stands beside the one after"
    assert (here / "exported/my-model/model.safetensors").is_file()


@TUTORIAL
def test_chat_tuning_to_a_served_answer(here: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", SPECIAL)
    small = {**TUNED, "INGOT_MODEL__SOURCE": str(model)}
    said = follow("chat", here, **small)
    answer = next(line for line in said.splitlines() if '"chat.completion"' in line)
    found = json.loads(answer[answer.index('{"id') :])
    assert found["choices"][0]["message"]["role"] == "assistant"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    need("slurmctld", "slurmd", "munged", "sbatch")
    cluster = Cluster(tmp_path / "slurm")
    yield cluster
    cluster.stop()


@TUTORIAL
def test_slurm_with_a_crash_in_the_middle(here: Path, cluster: Cluster) -> None:
    write_documents(here / "text")
    small = {
        **SMALLEST,
        "SLURM_CONF": str(cluster.conf),
        "INGOT_LAUNCH__PROCESSES": "1",
        "INGOT_LAUNCH__ENVIRONMENT": '{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}',
        "INGOT_LAUNCH__PORT": str(free_port()),
        "INGOT_LAUNCH__SLURM": "{partition: main, time: 20m}",
        "INGOT_TRAIN__STEPS": "200",
        "INGOT_CHECKPOINT__EVERY": "5",
    }
    follow("slurm", here, **small)
    run = here / "runs/quickstart"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    starts = [event["step"] for event in events if event["kind"] == "start"]
    assert starts[0] == 0
    assert starts[-1] > 0, "the second job went on from a checkpoint of the first"
    assert cluster.jobs() == []


@TUTORIAL
def test_from_laptop_to_google_cloud(here: Path) -> None:
    said = follow("cloud", here, OMP_NUM_THREADS="1")
    assert "compute.googleapis.com" in said
    assert "US dollars" in said
    assert "deploymentSpec" in (here / "pipeline.yaml").read_text()
    assert not shutil.which("gcloud") or "my-project" in said
