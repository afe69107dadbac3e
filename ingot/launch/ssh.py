"""A list of hosts reached by ssh, one node each. The nodes end when this process does: signs of
life go to them over the connections.

They share our disk: run folder, notes and checkpoints lie there. Signals go as notes, secrets over
standard input.
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
from ingot.launch import hosts
from ingot.launch.handles import find, store
from ingot.launch.hostlog import HostsLog
from ingot.launch.job import OVER, Handle, Job, Log, State
from ingot.launch.meeting import EXIT, HERE, Meeting
from ingot.launch.remote import ask_or_unknown
from ingot.launch.shared import (
    folder,
    interpreter,
    node_argv,
    refused,
    secrets,
    seen,
    told_by_nodes,
    variables,
)
from ingot.launch.tie import SIGN_S, SILENT_S

KIND = "ssh"
LAST_WORD_S = 3.0
"""How long a node's last note may take to be seen when its connection has ended."""
GONE_S = 10.0
"""How long nodes whose connections were closed may take to end their ranks; then they are killed
over a new connection.
"""


@dataclass
class _Client:
    """The ssh process of one node."""

    host: str
    process: subprocess.Popen[bytes]
    ended: float | None = None


class SshLauncher:
    """Hosts of `launch.ssh`, the first of them node 0."""

    look_s = 0.5

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self._config = recipe, recipe.launch.ssh.config
        self._clients: list[_Client] = []
        self._cancelled = False

    def can(self, job: Job) -> list[str]:
        names, code, reasons = (
            self.recipe.launch.ssh.hosts,
            self.recipe.launch.code,
            refused(self.recipe, job),
        )
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
        handed = f"; over standard input: {', '.join(job.secrets)}" if job.secrets else ""
        lines = [f"# {job.name} on {job.nodes} host{'s' * (job.nodes > 1)}{handed}"]
        code = hosts.packed()[0] if self.recipe.launch.code == "sync" else None
        lines += [shlex.join(command) for command in self._commands(job, code)]
        return "\n".join(lines) + "\n"

    def submit(self, job: Job) -> Handle:
        """Start a node on each host, after a look at all of them; nothing runs anywhere when one
        cannot.

        Raises:
            WrongInput: a host lacks something.
            Failed: a host cannot be reached, or nodes of an earlier start cannot be ended.
        """
        if reasons := self.can(job):
            raise WrongInput(f"{job.name} cannot run by ssh: {'; '.join(reasons)}")
        root, names = self.recipe.folder.root, self._hosts(job)
        if (old := find(root, job.name, KIND)) is not None:
            self._end_earlier(old)
        code, content = hosts.packed() if self.recipe.launch.code == "sync" else (None, b"")
        if code is not None:
            hosts.each(names, lambda host: hosts.sync(self._config, host, code, content))
        python, meet, path = (
            interpreter(self.recipe),
            seen(job.meet or ""),
            hosts.python_path(code, job.environment.get("PYTHONPATH", "")),
        )
        hosts.each(
            names,
            lambda host: hosts.check(
                self._config, host, folder=folder(self.recipe), python=python, meet=meet, path=path
            ),
        )
        handle = self._handle(job, names)
        self._start(job, handle, self._commands(job, code))
        return handle

    def _end_earlier(self, old: Handle) -> None:
        """Raises Failed where an earlier start runs under somebody else."""
        lives = self._launcher_lives(old)
        if lives and old.about["process"] != str(os.getpid()):
            raise Failed(
                f"{old.name} runs already, started by process {old.about['process']}; cancel it, or"
                " wait for it"
            )
        if lives is None and self.status(old) == "running":
            raise Failed(
                f"{old.name} runs already and was started on {_host(old)}; cancel it there (if that"
                f" machine is gone, the nodes end by themselves within {SILENT_S:g} s)"
            )
        self._end_rest(old)

    def _handle(self, job: Job, names: Sequence[str]) -> Handle:
        logs = [
            self.recipe.folder.logs.absolute() / f"ssh-{job.name}-{number}.log"
            for number in range(job.nodes)
        ]
        logs[0].parent.mkdir(parents=True, exist_ok=True)
        about = {
            "meet": job.meet or "",
            "hosts": json.dumps(names),
            "process": str(os.getpid()),
            "started": start_ticks(os.getpid()) or "",
            "machine": machine_id() or "",
            "host": socket.gethostname(),
            "logs": json.dumps(
                [[str(path), path.stat().st_size if path.exists() else 0] for path in logs]
            ),
        }
        handle = Handle(
            job.name,
            KIND,
            Path(job.meet or job.name).name,
            job.argv,
            time.time(),
            str(logs[0]),
            about,
        )
        return store(self.recipe.folder.root, handle, self.recipe)

    def _commands(self, job: Job, code: str | None) -> list[list[str]]:
        names = self._hosts(job)
        master = {"PET_MASTER_ADDR": hosts.address(self._config, names[0])} if job.nodes > 1 else {}
        argv = node_argv(self.recipe, job, interpreter(self.recipe), "--tied")
        commands = []
        for number, name in enumerate(names):
            values = {**variables(self.recipe, job), **master, "PET_NODE_RANK": str(number)}
            path = hosts.python_path(code, values.pop("PYTHONPATH", ""))
            exports = [
                *(f"{key}={shlex.quote(value)}" for key, value in values.items()),
                *([f"PYTHONPATH={path}"] if path else []),
            ]
            commands.append(
                hosts.ssh(
                    self._config,
                    name,
                    f"cd {shlex.quote(folder(self.recipe))} && export {' '.join(exports)} && exec"
                    f" {shlex.join(argv)}",
                )
            )
        return commands

    def _hosts(self, job: Job) -> list[str]:
        return self.recipe.launch.ssh.hosts[: job.nodes]

    def _start(self, job: Job, handle: Handle, commands: Sequence[list[str]]) -> None:
        self._clients, self._cancelled = [], False
        first = json.dumps(secrets(job)).encode() + b"\n"
        for host, command, (log, _) in zip(
            self._hosts(job), commands, json.loads(handle.about["logs"]), strict=True
        ):
            with Path(log).open("ab") as output:
                # A session of its own, so that Ctrl-C does not cut the connection over which we ask
                # for a checkpoint.
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
            _say_to(process, first)
        threading.Thread(
            target=_give_signs, args=([client.process for client in self._clients],), daemon=True
        ).start()

    def status(self, handle: Handle) -> State:
        meeting = Meeting(handle.about["meet"])
        if not self._started(handle):
            if len(_ended(meeting)) == len(json.loads(handle.about["hosts"])):
                return self._over(handle)
            alive = self._launcher_lives(handle) or any(
                self._lives(handle, number, process) for number, process in self._rest(meeting)
            )
            return "running" if alive else self._over(handle)
        notes = meeting.notes(EXIT)
        if not all(
            self._has_ended(node, client, meeting, node in notes)
            for node, client in enumerate(self._clients)
        ):
            return "running"
        return "cancelled" if self._cancelled else self._over(handle)

    def _started(self, handle: Handle) -> bool:
        """Whether it was this very object that started it."""
        return (
            bool(self._clients)
            and handle.about["process"] == str(os.getpid())
            and bool(self._launcher_lives(handle))
        )

    def _has_ended(self, node: int, client: _Client, meeting: Meeting, has_note: bool) -> bool:
        """Whether a node's connection has ended. Where the node could not say how, we do: the
        others see it then, and end their ranks.
        """
        if (code := client.process.poll()) is None:
            return False
        client.ended = client.ended or time.monotonic()
        if not has_note:
            if time.monotonic() < client.ended + LAST_WORD_S:
                return False
            lost = (
                f"the connection to {client.host} broke, or its node was killed"
                if code == hosts.NO_CONNECTION
                else f"{client.host}: exit {code}"
            )
            meeting.leave(
                node,
                EXIT,
                rank=node * self._processes,
                code=EXIT_FAILED if code in (hosts.NO_CONNECTION, 0) else code,
                how=lost,
                by=KIND,
            )
        return True

    @property
    def _processes(self) -> int:
        return self.recipe.launch.processes

    @staticmethod
    def _over(handle: Handle) -> State:
        return told_by_nodes(handle.about["meet"], len(json.loads(handle.about["hosts"])))

    def log(self, handle: Handle) -> Log:
        names = json.loads(handle.about["hosts"])
        files = [
            (name if len(names) > 1 else "", Path(path), at)
            for name, (path, at) in zip(names, json.loads(handle.about["logs"]), strict=True)
        ]
        return HostsLog(files, lambda: ask_or_unknown(lambda: self.status(handle)) in OVER)

    def signal(self, handle: Handle, number: int) -> None:
        Meeting(handle.about["meet"]).send(number)

    def cancel(self, handle: Handle) -> None:
        """Close the connections, wait until the nodes have ended their ranks, and kill what has
        not.
        """
        if self._started(handle):
            self._cancelled = True
            for client in self._clients:
                client.process.kill()
            for client in self._clients:
                client.process.wait()
        elif (lives := self._launcher_lives(handle)) is None:
            self._ask_from_afar(handle)
            return
        elif lives:
            # Whoever launched it asks for a checkpoint; one that does not listen is killed, and its
            # connections with it.
            os.kill(int(handle.about["process"]), signal.SIGTERM)
            until = time.monotonic() + 60.0 + self.recipe.checkpoint.grace_s
            while self._launcher_lives(handle) and time.monotonic() < until:
                time.sleep(0.1)
            if self._launcher_lives(handle):
                os.kill(int(handle.about["process"]), signal.SIGKILL)
        try:
            self._end_rest(handle)
        except Failed as error:
            if not self._started(handle):
                raise
            # The next start does not begin before that is settled.
            say(
                f"warning: {error}; what runs there ends by itself when it hears nothing from here"
                f" for {SILENT_S:g} s"
            )

    def _ask_from_afar(self, handle: Handle) -> None:
        """Nobody can say from here whether the launcher lives, which would start again what is
        killed: the ranks are asked, and waited for.
        """
        meeting, until = (
            Meeting(handle.about["meet"]),
            time.monotonic() + 60.0 + self.recipe.checkpoint.grace_s,
        )
        meeting.send(signal.SIGTERM)
        while self._rest(meeting) and time.monotonic() < until:
            time.sleep(self.look_s)
        if self.status(handle) == "running":
            raise Failed(
                f"{handle.name} was started on {_host(handle)} and has not ended though its ranks"
                " were asked; cancel it there"
            )

    @staticmethod
    def _launcher_lives(handle: Handle) -> bool | None:
        """None on another machine than its own, where nobody can say."""
        if handle.about.get("machine") != (machine_id() or ""):
            return None
        return start_ticks(int(handle.about["process"])) == handle.about["started"]

    @staticmethod
    def _rest(meeting: Meeting) -> list[tuple[int, int]]:
        """Nodes that have come and not said how they ended, each with its process there."""
        ended = _ended(meeting)
        return [
            (number, int(note["process"]))
            for number, note in sorted(meeting.notes(HERE).items())
            if number not in ended
        ]

    def _end_rest(self, handle: Handle) -> None:
        """Wait for the nodes of a start to be gone, and see to it. Raises Failed for a host that
        cannot be asked: its ranks may run still.
        """
        meeting, until = Meeting(handle.about["meet"]), time.monotonic() + GONE_S
        while (rest := self._rest(meeting)) and time.monotonic() < until:
            time.sleep(0.2)
        names = json.loads(handle.about["hosts"])
        for number, process in rest:
            # The kernel ends the ranks with it.
            script = (
                f"for i in 1 2 3 4 5 6 7 8 9; do {_is_ours(handle, process)} || exit 0; kill -9"
                f" {process}; sleep 1; done; exit 1"
            )
            if hosts.run(self._config, names[number], script).returncode:
                raise Failed(
                    f"host {names[number]}: process {process} of an earlier start cannot be ended;"
                    " see to that, then run the same command again"
                )
            meeting.leave(
                number,
                EXIT,
                rank=number * self._processes,
                code=-int(signal.SIGKILL),
                how=f"the node on {names[number]} was ended",
            )
        if rest:
            say(
                f"{handle.name}: what was left of {handle.id} on"
                f" {', '.join(names[number] for number, _ in rest)} is gone"
            )

    def _lives(self, handle: Handle, number: int, process: int) -> bool:
        """Whether a node's process is there still. Raises Failed when its host cannot be asked."""
        return (
            hosts.run(
                self._config, json.loads(handle.about["hosts"])[number], _is_ours(handle, process)
            ).returncode
            == 0
        )


def _ended(meeting: Meeting) -> set[int]:
    """Nodes that have said themselves how they ended."""
    return {number for number, note in meeting.notes(EXIT).items() if "by" not in note}


def _host(handle: Handle) -> str:
    return handle.about.get("host", "another machine")


def _is_ours(handle: Handle, process: int) -> str:
    """A shell command that says whether a process of a host is a node of this start: its command
    line names the place where they meet.
    """
    place = "/".join(Path(handle.about["meet"]).parts[-3:])
    return f"tr '\\0' ' ' </proc/{process}/cmdline 2>/dev/null | grep -qF {shlex.quote(place)}"


def _say_to(process: subprocess.Popen[bytes], words: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(words)


def _give_signs(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    while any(process.poll() is None for process in processes):
        for process in processes:
            _say_to(process, b"\n")
        time.sleep(SIGN_S)
