"""The entry points of the images, run outside a container with the variables that their places
set.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from ingot.serve.http.listen import kept_port
from tests.cli.commands import clean_environment
from tests.images.instructions import IMAGES
from tests.patience import PATIENCE_S
from tests.serve.tiny import make_folder

PROJECT = IMAGES.parent


def started(
    script: str, *arguments: str, cwd: Path = PROJECT, **environment: str
) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = clean_environment(
        PYTHON=sys.executable,
        PYTHONPATH=paths,
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        **environment,
    )
    return subprocess.Popen(
        [str(IMAGES / script), *arguments],
        cwd=cwd,
        env=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def done(script: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
    process = started(script, *arguments, **environment)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def test_a_verb_is_run_by_ingot() -> None:
    code, out, _ = done("train.sh", "explain", "train.clip_norm")
    assert code == 0
    assert "train.clip_norm" in out
    assert done("train.sh", "--version")[1].strip()
    assert "Usage: ingot" in done("train.sh")[1]


def test_a_wrong_recipe_ends_with_2() -> None:
    code, out, err = done("train.sh", "train", "missing.yaml")
    assert (code, out) == (2, "")
    assert err == "error: recipe missing.yaml does not exist; check the path\n"


@pytest.mark.parametrize("code", [0, 3, 75])
def test_programs_are_run_as_they_are_and_their_codes_come_back(code: int) -> None:
    assert done("train.sh", "python", "-c", f"import sys; print('it'); sys.exit({code})") == (
        code,
        "it\n",
        "",
    )
    assert done("train.sh", "sh", "-c", f"exit {code}")[0] == code


def test_a_node_of_a_job_starts_with_the_variables_of_its_place() -> None:
    code, out, err = done(
        "train.sh",
        "-m",
        "ingot.launch.node",
        "--",
        "explain",
        "train.clip_norm",
        PET_NNODES="1",
        PET_NODE_RANK="0",
        PET_NPROC_PER_NODE="1",
        PET_MASTER_ADDR="127.0.0.1",
        PET_MASTER_PORT="29500",
    )
    assert code == 0, err
    assert "train.clip_norm" in out


def test_a_signal_reaches_the_program_and_no_shell_is_between() -> None:
    process = started(
        "train.sh",
        "python",
        "-c",
        "import os, time; print(os.getpid(), flush=True); time.sleep(60)",
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    process.stdout.close()


@pytest.mark.drawn
@pytest.mark.parametrize("where", ["the service's storage", "in the image"])
def test_the_server_answers_by_the_contract(tmp_path: Path, where: str) -> None:
    folder = make_folder(tmp_path / "model")
    port = kept_port("127.0.0.1")
    environment = {
        "AIP_HTTP_PORT": str(port),
        "AIP_HEALTH_ROUTE": "/v1/endpoints/1/deployedModels/2",
        "AIP_PREDICT_ROUTE": "/v1/endpoints/1/deployedModels/2:predict",
        **(
            {"AIP_STORAGE_URI": str(folder), "MODEL_FOLDER": str(tmp_path / "nothing")}
            if where != "in the image"
            else {"MODEL_FOLDER": str(folder)}
        ),
    }
    process = started("serve.sh", "serve.max_batch=2", cwd=tmp_path, **environment)
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE_S
        while True:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            try:
                if httpx.get(f"{url}/v1/endpoints/1/deployedModels/2").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        body = {
            "instances": ["the quick", {"prompt": "brown"}],
            "parameters": {"max_tokens": 3, "temperature": 0},
        }
        answer = httpx.post(
            f"{url}/v1/endpoints/1/deployedModels/2:predict", json=body, timeout=PATIENCE_S
        )
        assert answer.status_code == 200
        assert len(answer.json()["predictions"]) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
