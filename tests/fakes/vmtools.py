"""`python -m tests.fakes.vmtools TOOL ARGUMENTS...`: what a start-up script calls on a machine of
`tests/fakes/vm.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.service import Conflict

FOLDER = Path(os.environ["VM_FOLDER"])
OPENED = ["iptables", "--wait", "--append", "INPUT", "--protocol", "tcp", "--jump", "ACCEPT"]
"""What opens the system's own firewall, which lets in SSH alone: also to a container with
`--network host`.
"""


def main(tool: str, *arguments: str) -> int:
    with (FOLDER / "calls.jsonl").open("a") as stream:
        stream.write(json.dumps([tool, *arguments]) + "\n")
    if tool == "curl":
        return curl(arguments)
    if tool == "docker":
        return docker(arguments)
    # Pauses take no time; what keeps the machine's time limit waits for it.
    if tool == "timeout" or (tool == "sleep" and float(arguments[0]) > 60):
        real = shutil.which(tool, path=os.environ["PATH"].partition(":")[2])
        assert real
        os.execv(real, [tool, *arguments])
    return 0


def curl(arguments: tuple[str, ...]) -> int:
    parser = argparse.ArgumentParser()
    for flag in ("--silent", "--fail", "--show-error"):
        parser.add_argument(flag, action="store_true")
    for option in ("--retry", "--header", "--config", "--request", "--data"):
        parser.add_argument(option)
    parser.add_argument("url")
    asked = parser.parse_args(arguments)
    about = json.loads((FOLDER / "about.json").read_text())
    parts = urlsplit(asked.url)
    if parts.hostname == "metadata.google.internal":
        return metadata(
            parts.path.removeprefix("/computeMetadata/v1/instance/"), asked.header, about
        )
    if f'header = "Authorization: Bearer {about["token"]}"' not in Path(asked.config).read_text():
        print("curl: (22) The requested URL returned error: 401", file=sys.stderr)
        return 22
    if parts.hostname == "storage.googleapis.com":
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        assert (asked.request, query["uploadType"], parts.path) == (
            "POST",
            "media",
            "/upload/storage/v1/b/bucket/o",
        )
        try:
            open_bucket("gs://bucket").put(
                query["name"],
                json.dumps(json.loads(asked.data)).encode(),
                generation=0 if "ifGenerationMatch" in query else None,
            )
        except Conflict:
            return 22
        return 0
    try:
        with urllib.request.urlopen(
            urllib.request.Request(asked.url, method=asked.request)
        ) as answer:
            print(answer.read().decode())
    except urllib.error.HTTPError as error:
        print(f"curl: (22) The requested URL returned error: {error.code}", file=sys.stderr)
        return 22
    return 0


def metadata(path: str, header: str, about: dict[str, object]) -> int:
    assert header == "Metadata-Flavor: Google"
    attributes = about["attributes"]
    assert isinstance(attributes, dict)
    known = {
        "name": about["name"],
        "service-accounts/default/token": json.dumps(
            {"access_token": about["token"], "expires_in": 3599}
        ),
        **{f"attributes/{key}": value for key, value in attributes.items()},
    }
    if path not in known:
        return 22
    print(known[path])
    return 0


def docker(arguments: tuple[str, ...]) -> int:
    if arguments[0] == "pull":
        if (FOLDER / "no-image").exists():
            print('Error response from daemon: manifest for "it" not found', file=sys.stderr)
            return 1
        if (FOLDER / "pull-takes").exists():
            time.sleep(float((FOLDER / "pull-takes").read_text()))
        return 0
    if arguments[0] == "login":
        assert arguments[1:4] == ("--username", "oauth2accesstoken", "--password-stdin")
        return 0 if sys.stdin.read().strip() else 1
    assert arguments[0] == "run"
    if (FOLDER / "no-run").exists():
        print("docker: Error response from daemon: failed to create the container", file=sys.stderr)
        return 125
    parser = argparse.ArgumentParser()
    for flag in ("--rm", "--init", "--privileged"):
        parser.add_argument(flag, action="store_true")
    for option in ("--name", "--network", "--ipc", "--stop-timeout"):
        parser.add_argument(option)
    for option in ("--ulimit", "--env", "--volume", "--device"):
        parser.add_argument(option, action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args(arguments[1:])
    added = dict(variable.split("=", 1) for variable in asked.env)
    if int(added["PET_NNODES"]) > 1 and OPENED not in [
        json.loads(line) for line in (FOLDER / "calls.jsonl").read_text().splitlines()
    ]:
        print(
            "the other nodes cannot be reached: this machine drops what comes in", file=sys.stderr
        )
        return 125
    # Names of machines mean nothing here; all of them are this one.
    added["PET_MASTER_ADDR"] = "127.0.0.1"
    kept = {
        key: value
        for key, value in os.environ.items()
        if key
        in (
            "PATH",
            "PYTHONPATH",
            "STORAGE_EMULATOR_HOST",
            "OMP_NUM_THREADS",
            "HF_HUB_OFFLINE",
        )
    }
    if asked.command[0] != "python":
        return 127
    os.chdir(FOLDER / "work")
    return os.execve(
        sys.executable,
        [sys.executable, *asked.command[1:]],
        {**kept, "HOME": str(FOLDER / "home"), **added},
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
