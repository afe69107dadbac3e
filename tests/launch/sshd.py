"""A real sshd on this machine, with keys and configuration of its own; in a network namespace where
one is given.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from ingot.serve.http.listen import kept_port
from tests.patience import PATIENCE_S

SFTP = "internal-sftp"


def need(*programs: str) -> None:
    """What a test cannot do without: it skips where that is missing, and fails in CI."""
    missing = [
        program
        for program in programs
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
    ]
    reasons = [f"{', '.join(missing)} not installed"] * bool(missing) + ["not root"] * (
        os.geteuid() != 0
    )
    if reasons:
        assert not os.environ.get("CI"), f"needed in CI: {'; '.join(reasons)}"
        pytest.skip("; ".join(reasons))


class Sshd:
    """One daemon, under the name `name` in the client's configuration file `config`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        address: str = "127.0.0.1",
        port: int | None = None,
        namespace: str | None = None,
        **settings: str,
    ) -> None:
        self.folder, self.name, self.address, self.port = (
            folder / name,
            name,
            address,
            port or kept_port("127.0.0.1"),
        )
        self._in = ["ip", "netns", "exec", namespace] if namespace else []
        self.folder.mkdir(parents=True)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd wants it
        key = folder / "key"
        if not key.exists():
            keygen(key)
        keygen(self.folder / "host_key")
        shutil.copy(key.with_suffix(".pub"), self.folder / "authorized_keys")
        lines = {
            "Port": str(self.port),
            "ListenAddress": address,
            "HostKey": str(self.folder / "host_key"),
            "PidFile": str(self.folder / "pid"),
            "AuthorizedKeysFile": str(self.folder / "authorized_keys"),
            "UsePAM": "no",
            "StrictModes": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "Subsystem": f"sftp {SFTP}",
            "MaxStartups": "100",
            **settings,
        }
        (self.folder / "sshd_config").write_text(
            "".join(f"{key} {value}\n" for key, value in lines.items())
        )
        self.start()

    def start(self) -> None:
        command = [*self._in, "/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + PATIENCE_S
        while "Server listening" not in (self.folder / "log").read_text():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)

    def known(self) -> str:
        kind, key, *_ = (self.folder / "host_key.pub").read_text().split()
        return f"[{self.address}]:{self.port} {kind} {key}\n"

    def stanza(self, folder: Path) -> str:
        lines = {
            "HostName": self.address,
            "Port": self.port,
            "User": getpass.getuser(),
            "IdentityFile": folder / "key",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": folder / "known_hosts",
            "GlobalKnownHostsFile": "/dev/null",
        }
        return f"Host {self.name}\n" + "".join(f" {key} {value}\n" for key, value in lines.items())


def client_config(folder: Path, daemons: list[Sshd]) -> Path:
    """A configuration file by which ssh reaches the daemons, and knows them."""
    (folder / "known_hosts").write_text("".join(daemon.known() for daemon in daemons))
    config = folder / "ssh_config"
    config.write_text("".join(daemon.stanza(folder) for daemon in daemons))
    return config


def keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
