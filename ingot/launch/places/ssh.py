"""A list of hosts reached by ssh, one node each. The nodes end when this process does: it sends
them heartbeats over the connections.

The hosts share our disk, which holds the run folder, notes and checkpoints. Signals are sent as
notes, secrets over standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.base.errors import EXIT_FAILED, Failed, WrongInput
from ingot.base.processes import machine_id, preexec_die_with_parent, start_ticks
from ingot.base.progress import say
from ingot.config.recipe import Recipe
from ingot.launch.handles import find_handle, store_handle
from ingot.launch.job import FINAL_STATES, Handle, Job, JobLog, JobState, status_or_unknown
from ingot.launch.node.watch import HEARTBEAT_INTERVAL_S, LEASE_S
from ingot.launch.places import ssh_hosts
from ingot.launch.places.logs import HostsLog
from ingot.launch.places.node_commands import (
    interpreter,
    node_variables,
    path_on_nodes,
    secret_values,
    shared_disk_command,
    shared_disk_reasons,
    with_named_secrets,
    working_folder,
)
from ingot.launch.rendezvous import EXIT, Rendezvous, SignalsByNote, state_by_notes

KIND = "ssh"
EXIT_NOTE_TIMEOUT_S = 3.0
"""How long a node's exit note may take to become visible after its connection has ended."""
CANCEL_MARGIN_S = 60.0
"""How much longer than `checkpoint.grace_s`, which its ranks have, a job may take to end."""


@dataclass
class _Client:
    """The ssh process of one node."""

    host: str
    process: subprocess.Popen[bytes]
    ended_at: float | None = None


class SshLauncher(SignalsByNote):
    """Hosts of `launch.ssh`, the first of them node 0."""

    poll_s = 0.5
    shares_disk, paid_by_use = True, False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self._config = recipe, recipe.launch.ssh.config
        self._clients: list[_Client] = []
        self._cancelled = False

    def can(self, job: Job) -> list[str]:
        """See `Launcher`."""
        names, code = self.recipe.launch.ssh.hosts, self.recipe.launch.code
        reasons = shared_disk_reasons(self.recipe, job)
        if job.nodes > len(names):
            reasons.append(
                f"launch.nodes={job.nodes} and launch.ssh.hosts names {len(names)}; name as many"
                " hosts as nodes"
            )
        reasons += [
            f"launch.ssh.hosts: `{name}` is no host"
            for name in names
            if name.startswith("-") or not name.strip()
        ]
        if code == "image":
            reasons.append(
                "launch.code=image: ssh starts no containers; set it to installed or sync"
            )
        return reasons

    def render(self, job: Job) -> str:
        """See `Launcher`: the ssh command lines."""
        job = with_named_secrets(self.recipe, job)
        secrets = f"; over standard input: {', '.join(job.secrets)}" if job.secrets else ""
        lines = [f"# {job.name} on {job.nodes} host{'s' * (job.nodes > 1)}{secrets}"]
        code = ssh_hosts.packed_code()[0] if self.recipe.launch.code == "sync" else None
        lines += [shlex.join(command) for command in self._commands(job, code)]
        return "\n".join(lines) + "\n"

    def submit(self, job: Job) -> Handle:
        """Check all hosts, then start a node on each; nothing is started if a host cannot run it.

        Raises:
            WrongInput: a host lacks something.
            Failed: a host cannot be reached, or nodes of an earlier start cannot be ended.
        """
        if reasons := self.can(job):
            raise WrongInput(f"{job.name} cannot run by ssh: {'; '.join(reasons)}")
        job = with_named_secrets(self.recipe, job)
        root, names = self.recipe.folder.root, self._hosts(job)
        if (earlier := find_handle(root, job.name, KIND)) is not None:
            self._end_earlier(earlier)
        code, content = (
            ssh_hosts.packed_code() if self.recipe.launch.code == "sync" else (None, b"")
        )
        if code is not None:
            ssh_hosts.on_each_host(
                names, lambda host: ssh_hosts.copy_code(self._config, host, code, content)
            )
        path = ssh_hosts.python_path(code, job.environment.get("PYTHONPATH", ""))
        ssh_hosts.on_each_host(
            names,
            lambda host: ssh_hosts.check_host(
                self._config,
                host,
                folder=working_folder(self.recipe),
                python=interpreter(self.recipe),
                rendezvous=path_on_nodes(job.rendezvous),
                path=path,
            ),
        )
        handle = self._store_handle(job, names)
        self._start_nodes(job, handle, self._commands(job, code))
        return handle

    def _end_earlier(self, earlier: Handle) -> None:
        """Raises Failed if an earlier start runs under another launcher."""
        alive = self._is_launcher_alive(earlier)
        if alive and earlier.about["process"] != str(os.getpid()):
            raise Failed(
                f"{earlier.name} runs already, started by process {earlier.about['process']};"
                " cancel it, or wait for it"
            )
        if alive is None and self.status(earlier) == "running":
            raise Failed(
                f"{earlier.name} runs already and was started on {_launching_host(earlier)}; cancel"
                " it there (if that machine is gone, the nodes end by themselves within"
                f" {LEASE_S:g} s)"
            )
        self._end_nodes(earlier)

    def _store_handle(self, job: Job, names: Sequence[str]) -> Handle:
        logs = [
            self.recipe.folder.logs.absolute() / f"ssh-{job.name}-{node}.log"
            for node in range(job.nodes)
        ]
        logs[0].parent.mkdir(parents=True, exist_ok=True)
        about = {
            "meet": job.rendezvous,
            "hosts": json.dumps(names),
            "process": str(os.getpid()),
            "started": start_ticks(os.getpid()) or "",
            "machine": machine_id() or "",
            "host": socket.gethostname(),
            "logs": json.dumps(
                [[str(path), path.stat().st_size if path.exists() else 0] for path in logs]
            ),
        }
        id = Path(job.rendezvous or job.name).name
        handle = Handle(job.name, KIND, id, job.argv, time.time(), str(logs[0]), about)
        return store_handle(self.recipe.folder.root, handle, self.recipe)

    def _commands(self, job: Job, code: str | None) -> list[list[str]]:
        names, folder = self._hosts(job), shlex.quote(working_folder(self.recipe))
        master = (
            {"PET_MASTER_ADDR": ssh_hosts.address_of(self._config, names[0])}
            if job.nodes > 1
            else {}
        )
        argv = shared_disk_command(
            self.recipe, job, interpreter(self.recipe), "--launcher-on-stdin"
        )
        commands = []
        for node, name in enumerate(names):
            values = {**node_variables(self.recipe, job), **master, "PET_NODE_RANK": str(node)}
            path = ssh_hosts.python_path(code, values.pop("PYTHONPATH", ""))
            exports = [
                *(f"{key}={shlex.quote(value)}" for key, value in values.items()),
                *([f"PYTHONPATH={path}"] if path else []),
            ]
            script = f"cd {folder} && export {' '.join(exports)} && exec {shlex.join(argv)}"
            commands.append(ssh_hosts.ssh_command(self._config, name, script))
        return commands

    def _hosts(self, job: Job) -> list[str]:
        return self.recipe.launch.ssh.hosts[: job.nodes]

    def _start_nodes(self, job: Job, handle: Handle, commands: Sequence[list[str]]) -> None:
        self._clients, self._cancelled = [], False
        environment = json.dumps(secret_values(job)).encode() + b"\n"
        for host, command, (log, _) in zip(
            self._hosts(job), commands, json.loads(handle.about["logs"]), strict=True
        ):
            with Path(log).open("ab") as output:
                # A session of its own, so that Ctrl-C does not close the connection over which we
                # request a checkpoint.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=preexec_die_with_parent(),
                    bufsize=0,
                )
            self._clients.append(_Client(host, process))
            _write_stdin(process, environment)
        processes = [client.process for client in self._clients]
        threading.Thread(target=_send_heartbeats, args=(processes,), daemon=True).start()

    def status(self, handle: Handle) -> JobState:
        """See `Launcher`; for nodes that another process started, from their notes and
        processes.
        """
        rendezvous = Rendezvous.of(handle)
        if not self._started_here(handle):
            if len(ssh_hosts.nodes_with_exit_note(rendezvous)) == len(ssh_hosts.hosts_of(handle)):
                return _final_state(handle)
            alive = self._is_launcher_alive(handle) or any(
                ssh_hosts.is_node_alive(self._config, handle, node, process)
                for node, process in ssh_hosts.running_nodes(rendezvous)
            )
            return "running" if alive else _final_state(handle)
        notes = rendezvous.notes(EXIT)
        if not all(
            self._has_ended(node, client, rendezvous, node in notes)
            for node, client in enumerate(self._clients)
        ):
            return "running"
        return "cancelled" if self._cancelled else _final_state(handle)

    def _started_here(self, handle: Handle) -> bool:
        """Whether this very object started the job."""
        return (
            bool(self._clients)
            and handle.about["process"] == str(os.getpid())
            and bool(self._is_launcher_alive(handle))
        )

    def _has_ended(
        self, node: int, client: _Client, rendezvous: Rendezvous, has_note: bool
    ) -> bool:
        """Whether a node's connection has ended. If the node left no exit note, we leave one, so
        that the other nodes see it and end their ranks.
        """
        if (code := client.process.poll()) is None:
            return False
        client.ended_at = client.ended_at or time.monotonic()
        if not has_note:
            if time.monotonic() < client.ended_at + EXIT_NOTE_TIMEOUT_S:
                return False
            reason = (
                f"the connection to {client.host} broke, or its node was killed"
                if code == ssh_hosts.NO_CONNECTION
                else f"{client.host}: exit {code}"
            )
            if code in (ssh_hosts.NO_CONNECTION, 0):
                code = EXIT_FAILED
            rank = node * self.recipe.launch.processes
            rendezvous.leave(node, EXIT, rank=rank, code=code, how=reason, by=KIND)
        return True

    def log(self, handle: Handle) -> JobLog:
        """See `Launcher`."""
        names = ssh_hosts.hosts_of(handle)
        files = [
            (name if len(names) > 1 else "", Path(path), offset)
            for name, (path, offset) in zip(names, json.loads(handle.about["logs"]), strict=True)
        ]
        return HostsLog(files, lambda: status_or_unknown(self, handle) in FINAL_STATES)

    def cancel(self, handle: Handle) -> None:
        """Close the connections, wait until the nodes have ended their ranks, and kill the
        others.
        """
        if self._started_here(handle):
            self._cancelled = True
            for client in self._clients:
                client.process.kill()
            for client in self._clients:
                client.process.wait()
        elif (alive := self._is_launcher_alive(handle)) is None:
            self._cancel_from_other_machine(handle)
            return
        elif alive:
            # The launcher requests a checkpoint; if it does not answer, it is killed, and its
            # connections close.
            os.kill(int(handle.about["process"]), signal.SIGTERM)
            deadline = time.monotonic() + CANCEL_MARGIN_S + self.recipe.checkpoint.grace_s
            while self._is_launcher_alive(handle) and time.monotonic() < deadline:
                time.sleep(0.1)
            if self._is_launcher_alive(handle):
                os.kill(int(handle.about["process"]), signal.SIGKILL)
        try:
            self._end_nodes(handle)
        except Failed as error:
            if not self._started_here(handle):
                raise
            # The next start waits until these nodes are gone.
            say(
                f"warning: {error}; what runs there ends by itself when it hears nothing from here"
                f" for {LEASE_S:g} s"
            )

    def _cancel_from_other_machine(self, handle: Handle) -> None:
        """The launcher may be alive on its own machine and would restart killed nodes: ask the
        ranks to stop, and wait.
        """
        rendezvous = Rendezvous.of(handle)
        deadline = time.monotonic() + CANCEL_MARGIN_S + self.recipe.checkpoint.grace_s
        rendezvous.send(signal.SIGTERM)
        while ssh_hosts.running_nodes(rendezvous) and time.monotonic() < deadline:
            time.sleep(self.poll_s)
        if self.status(handle) == "running":
            raise Failed(
                f"{handle.name} was started on {_launching_host(handle)} and has not ended though"
                " its ranks were asked; cancel it there"
            )

    def _end_nodes(self, handle: Handle) -> None:
        ssh_hosts.end_nodes(self._config, handle, self.recipe.launch.processes)

    @staticmethod
    def _is_launcher_alive(handle: Handle) -> bool | None:
        """None on another machine than the launcher's, where this is unknown."""
        if handle.about.get("machine") != (machine_id() or ""):
            return None
        return start_ticks(int(handle.about["process"])) == handle.about["started"]


def _final_state(handle: Handle) -> JobState:
    return state_by_notes(Rendezvous.of(handle), len(ssh_hosts.hosts_of(handle)))


def _launching_host(handle: Handle) -> str:
    return handle.about.get("host", "another machine")


def _write_stdin(process: subprocess.Popen[bytes], content: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(content)


def _send_heartbeats(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    while any(process.poll() is None for process in processes):
        for process in processes:
            _write_stdin(process, b"\n")
        time.sleep(HEARTBEAT_INTERVAL_S)
