"""`ingot deploy` behind an endpoint, as a person types it: the Google of the tests on loopback, and
a real `ingot serve` as what is deployed.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingot.serve.http.listen import kept_port
from tests.cli.commands import clean_environment, command, ingot
from tests.patience import PATIENCE_S
from tests.registry.vertex_place import IMAGE, Place, opened


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with opened(tmp_path, monkeypatch) as found:
        found.state.polls = 0
        yield found


def _write_run(place: Place, model_folder: Path) -> None:
    cloud = {
        "project": "proj",
        "bucket": "bucket",
        "endpoint": place.google.address,
        "images": {"serve": IMAGE},
    }
    recipe = {
        "name": "mine",
        "output": str(place.root / "runs"),
        "data": {"train": [{"source": "a"}]},
        "registry": {"kind": "vertex"},
        "cloud": cloud,
        "evaluate": {"model": str(model_folder)},
        "serve": {"prompt": "the bright"},
    }
    (place.root / "r.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    reports = place.root / "runs/mine/reports"
    reports.mkdir(parents=True)
    made = json.loads((model_folder / "ingot.json").read_bytes())
    metric = {
        "value": 1.0,
        "ci_low": 0.9,
        "ci_high": 1.1,
        "direction": "lower",
        "n": 3,
        "set_fingerprint": "set",
    }
    report = {
        "schema": 1,
        "model_hash": made["model_hash"],
        "tokenizer_hash": made["tokenizer"],
        "metrics": {"loss/bits_per_byte": metric},
    }
    (reports / "evaluate.json").write_text(json.dumps(report), encoding="utf-8")


@contextlib.contextmanager
def _container(place: Place, name: str) -> Iterator[Any]:
    """What the service does with a model: its files from the bucket, its arguments, and the
    variables of the contract; a prediction goes to it.
    """
    (version,) = place.state.models[name].values()
    folder, spec = place.root / "container", version.container_spec
    prefix = version.artifact_uri.removeprefix("gs://bucket/") + "/"
    for key, stored in place.storage.objects.items():
        if key.startswith(prefix):
            (folder / key.removeprefix(prefix)).parent.mkdir(parents=True, exist_ok=True)
            (folder / key.removeprefix(prefix)).write_bytes(stored.data)
    port = kept_port("127.0.0.1")
    variables = {
        "AIP_HTTP_PORT": str(port),
        "AIP_HEALTH_ROUTE": spec.health_route,
        "AIP_PREDICT_ROUTE": spec.predict_route,
        "AIP_STORAGE_URI": str(folder),
    }
    server = subprocess.Popen(
        command("serve", "/ingot/model", *spec.args),
        env=clean_environment(**variables),
        stderr=subprocess.PIPE,
    )
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE_S
    try:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(address + spec.health_route).status_code == 200:
                    break
            assert server.poll() is None, server.stderr.read() if server.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield lambda deployed, instances, parameters: httpx.post(
            address + spec.predict_route,
            json={"instances": instances, "parameters": parameters},
            timeout=PATIENCE_S,
        ).json()["predictions"]
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.drawn("a server of the command")
def test_a_model_is_registered_deployed_and_verified_against_a_real_server(
    place: Place, model_folder: Path
) -> None:
    _write_run(place, model_folder)
    assert ingot("gate", "r.yaml", cwd=place.root).returncode == 0
    done = ingot("register", "r.yaml", cwd=place.root)
    assert done.returncode == 0, done.stderr
    assert "mine v1, nothing is live until `ingot deploy`" in done.stdout
    shown = ingot("deploy", "r.yaml", "--dry-run", cwd=place.root)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("CreateEndpoint\n")
    assert not place.state.endpoints
    with _container(place, "ingot-mine") as answer:
        place.state.answer = lambda *_: ["something else"]
        refused = ingot("deploy", "r.yaml", "serve.verify=true", cwd=place.root)
        assert refused.returncode == 1
        assert "the new version answers 'something else', its folder here '" in refused.stderr
        assert not place.state.endpoints
        place.state.answer = answer
        done = ingot("deploy", "r.yaml", "--verify", cwd=place.root)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout
        == "mine@v1 is live; see projects/proj/locations/us-central1/endpoints/ingot-mine\n"
    )
    assert place.state.versions_serving() == {1: 100}


def test_what_is_wrong_is_one_line(place: Place) -> None:
    cloud = [
        "registry.kind=vertex",
        "cloud.project=proj",
        "cloud.bucket=bucket",
        f"cloud.endpoint={place.google.address}",
    ]
    for arguments, code, says in (
        (
            ["words", *cloud],
            2,
            (
                "nothing is registered as words in the Model Registry of"
                " projects/proj/locations/us-central1"
            ),
        ),
        (["words", "serve.verify=true", "serve.canary=10"], 2, "nothing is registered as words"),
        (["words", *cloud, "serve.canary=100"], 2, "serve.canary"),
        (["words", "--canary", "10"], 2, "--canary and --verify are for an endpoint"),
        (["words", *cloud, "--rollback", "--version", "1"], 2, "exclude each other"),
        (
            ["words", *cloud[:3], "cloud.project=wrong", cloud[3]],
            2,
            "Permission denied on resource project wrong",
        ),
    ):
        done = ingot("deploy", *arguments, cwd=place.root)
        assert done.returncode == code, done.stderr
        assert says in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not place.state.endpoints
