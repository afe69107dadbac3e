"""Sources in a bucket, by the real client against a server of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from ingot.base.storage import open_read
from ingot.config.load import dump_recipe
from tests.data.small import recipe, sentences
from tests.lazy import lazy, require
from tests.loopback import Loopback

require("gcsfs", reason="gcsfs is not installed")
fsspec, credentials = lazy("fsspec"), lazy("gcsfs.credentials")

# The client reads its environment when it is imported, so it runs in another process.
SCRIPT = """
import json, sys
from ingot.config.load import load_recipe
from ingot.data.ingest import ingest
from ingot.data.raw.store import open_raw, read_table
from ingot.data.sources.find import source_files

if __name__ == "__main__":
    recipe = load_recipe([sys.argv[1]], environ={}, dotenv=None)
    print(json.dumps([[file.stamp["bytes"], file.stamp["tag"]] for files in source_files(recipe)["train"] for file in files]))
    ingest(recipe)
    raw = open_raw(recipe)
    parts = [part for source in raw.splits["train"] for part in source.parts]
    print(json.dumps([[row["doc_id"], row["text"]] for part in parts for row in read_table(raw.folder / part.path, 0).to_pylist()]))
"""


class Server(Loopback):
    """One bucket with `files`. `told`: those of which one by one was asked what they are."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(_Handler)
        self.files, self.broken = files, ""
        self.told: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        address, files = urlsplit(self.path), self.server.files
        name = unquote(address.path.partition("/b/bucket/o/")[2])
        if address.path.endswith("/b/bucket/o"):
            prefix = parse_qs(address.query).get("prefix", [""])[0]
            if prefix.rstrip("/") in files:
                # The client asks at once whether it is a file and whether it is a folder. It does
                # not wait for the second answer, but would ask again if that came first.
                time.sleep(2)
            self._send(
                200,
                json.dumps(
                    {"items": [self._about(found) for found in files if found.startswith(prefix)]}
                ).encode(),
            )
        elif name == self.server.broken and "alt=media" in address.query:
            self._send(403, b'{"error": {"code": 403, "message": "no longer yours"}}')
        elif name not in files:
            self._send(404, b'{"error": {"code": 404, "message": "no such object"}}')
        elif "alt=media" in address.query:
            first, _, last = (
                self.headers.get("Range", "bytes=0-999999999").removeprefix("bytes=").partition("-")
            )
            self._send(206, files[name][int(first) : int(last) + 1])
        else:
            self.server.told.append(name)
            self._send(200, json.dumps(self._about(name)).encode())

    def _about(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "bucket": "bucket",
            "size": str(len(self.server.files[name])),
            "etag": "v1",
            "generation": "1",
        }

    def _send(self, code: int, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture
def bucket() -> Iterator[Server]:
    server = Server(
        {
            "set/a.jsonl": b'{"text": "x"}\n{"text": null}\n',
            "set/deep/b.txt": "\n".join(sentences(3)).encode(),
            "other/c.txt": b"other",
        }
    )
    yield server
    server.server_close()


def run(root: Path, bucket: Server, *sources: Any) -> subprocess.CompletedProcess[str]:
    (root / "recipe.yaml").write_text(dump_recipe(recipe(root, *sources)))
    (root / "script.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{bucket.server_address[1]}",
        "FSSPEC_GS": '{"token": "anon"}',
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "PYTHONPATH": str(Path.cwd()),
    }
    command = [sys.executable, str(root / "script.py"), str(root / "recipe.yaml")]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=120
    )


def test_a_bucket(tmp_path: Path, bucket: Server) -> None:
    done = run(
        tmp_path, bucket, "gs://bucket/set", {"source": "gs://bucket/other/*.txt", "weight": 2.0}
    )
    assert done.returncode == 0, done.stderr
    stamps, documents = (json.loads(line) for line in done.stdout.splitlines())
    assert stamps == [
        [len(bucket.files[name]), "v1"] for name in ("set/a.jsonl", "set/deep/b.txt", "other/c.txt")
    ]
    assert documents == [
        ["a.jsonl:1", "x"],
        ["deep/b.txt:1", "\n".join(sentences(3))],
        ["c.txt:1", "other"],
    ]


def test_a_listed_file_is_asked_for_once_more_whether_it_changed(
    tmp_path: Path, bucket: Server
) -> None:
    bucket.files = {f"set/{each}.txt": b"text" for each in range(4)}
    assert run(tmp_path, bucket, "gs://bucket/set").returncode == 0
    assert sorted(bucket.told) == list(bucket.files)


def test_a_file_that_breaks_off_is_not_taken_for_its_beginning(
    tmp_path: Path, bucket: Server
) -> None:
    bucket.broken = "set/a.jsonl"
    done = run(tmp_path, bucket, "gs://bucket/set")
    assert done.returncode
    assert "ingot.base.errors.Failed: gs://bucket/set/a.jsonl broke off (" in done.stderr


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_the_proxy_of_the_network_is_asked(
    tmp_path: Path, bucket: Server, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """With the token of the bucket, whatever login for all hosts lies in ~/.netrc."""
    (tmp_path / "netrc").write_text("default login a password b\n", encoding="utf-8")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", f"{scheme}127.0.0.1:{bucket.server_address[1]}")
    monkeypatch.setenv("no_proxy", "")
    storage = {"token": "anon", "endpoint_url": "http://storage.example.test"}
    monkeypatch.setitem(fsspec.config.conf, "gs", storage)
    monkeypatch.setattr(credentials.GoogleCredentials, "apply", _with_token)
    with open_read("gs://bucket/other/c.txt") as stream:
        assert stream.read() == b"other"


def _with_token(_: Any, headers: dict[str, str]) -> None:
    headers["Authorization"] = "Bearer token"
