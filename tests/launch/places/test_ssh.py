"""Nodes by ssh: real sshd on loopback and in network namespaces, real trainings, and what happens
when anything of it breaks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.processes import machine_id, start_ticks
from ingot.config.recipe import Recipe
from ingot.launch.handles import find_handle
from ingot.launch.job import Handle, Job
from ingot.launch.places import ssh_hosts
from ingot.launch.places.logs import HostsLog
from ingot.launch.places.ssh import SshLauncher
from ingot.launch.rendezvous import EXIT, Rendezvous
from ingot.serve.http.listen import kept_port
from tests import golden
from tests.launch.blocking import blocking_argv, start_script, wait_until, waiting_on
from tests.launch.nodes import (
    KNOBS,
    end_all,
    ended,
    events,
    ingot,
    only_ranks,
    ranks_of,
    recipe_for,
    reference,
    steps,
    wait_for,
    weights,
    written,
)
from tests.launch.sshd import Sshd, client_config, keygen, need
from tests.patience import PATIENCE_S
from tests.small import small_recipe

SECRET = "hush-9c1f"
APART: dict[str, Any] = {
    "launch__interface": "eth0",
    "launch__environment": {"OMP_NUM_THREADS": "1"},
}
"""Knobs of hosts that talk over a network of their own."""


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    end_all(tmp_path)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two daemons on loopback, `h1` and `h2`; the client's configuration file."""
    need("sshd", "ssh", "ssh-keygen")
    folder = tmp_path_factory.mktemp("ssh")
    daemons = [
        Sshd(folder, name, SetEnv=f"XDG_CACHE_HOME={folder / 'cache'}") for name in ("h1", "h2")
    ]
    yield client_config(folder, daemons)
    for daemon in daemons:
        daemon.stop()


@pytest.fixture
def expected(prepared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return reference(prepared_root, tmp_path_factory.getbasetemp())


def on_hosts(root: Path, config: Path, **knobs: Any) -> Recipe:
    """The small training on h1 and h2."""
    return recipe_for(
        root,
        **{
            "launch__kind": "ssh",
            "launch__nodes": 2,
            "launch__ssh__hosts": ["h1", "h2"],
            "launch__ssh__config": str(config),
            **knobs,
        },
    )


def secret_in(root: Path) -> list[str]:
    return [
        str(path)
        for path in root.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


def gone(root: Path, seconds: float = PATIENCE_S) -> None:
    """Nothing of a training is left after a while."""
    wait_until(lambda: not ranks_of(root), seconds)


def test_what_is_started_is_shown_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("ssh")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    config = tmp_path / "config"
    config.write_text("Host node-a\n HostName 10.0.0.7\n")
    recipe = small_recipe(
        tmp_path,
        launch__kind="ssh",
        launch__nodes=2,
        launch__processes=8,
        launch__ssh__hosts=["node-a", "me@node-b"],
        launch__ssh__config="config",
        launch__folder="/shared/my work",
        launch__python="/opt/py/bin/python",
        launch__secrets=["WANDB_API_KEY"],
    )
    job = Job(
        "train",
        ("train", "my recipe.yaml"),
        8,
        2,
        {"A": "b c", "GLOO_SOCKET_IFNAME": "eth0"},
        ("WANDB_API_KEY",),
        rendezvous=str(recipe.folder.root / "jobs" / "train-1"),
    )
    launcher = SshLauncher(recipe)
    assert launcher.can(job) == []
    text = launcher.render(job)
    assert SECRET not in text
    golden.check("ssh.txt", text)
    for line in text.splitlines()[1:]:
        subprocess.run(["sh", "-n"], input=line, text=True, check=True)


def test_what_ssh_cannot_do_is_refused_with_the_knob(tmp_path: Path) -> None:
    def reasons(job: Job, **knobs: Any) -> list[str]:
        return SshLauncher(small_recipe(tmp_path, launch__kind="ssh", **knobs)).can(job)

    assert reasons(Job("train", ("train",), nodes=2), launch__ssh__hosts=["a"]) == [
        "launch.nodes=2 and launch.ssh.hosts names 1; name as many hosts as nodes"
    ]
    assert reasons(Job("train", ("train",), nodes=1), launch__ssh__hosts=["a", "b"]) == []
    (reason,) = reasons(Job("train", ("train",)), launch__ssh__hosts=["-oProxyCommand=touch x"])
    assert "is no host" in reason
    (reason,) = reasons(Job("train", ("train",)), launch__ssh__hosts=["a"], launch__code="image")
    assert "launch.code" in reason
    (reason,) = reasons(
        Job("train", ("train",), secrets=("NOT_SET_ANYWHERE",)), launch__ssh__hosts=["a"]
    )
    assert "NOT_SET_ANYWHERE" in reason
    (reason,) = reasons(
        Job("train", ("train",)), launch__ssh__hosts=["a"], launch__folder="relative"
    )
    assert "launch.folder" in reason


@pytest.fixture
def namespaces(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Two network namespaces joined by a bridge, an sshd in each; the client's configuration, and
    the link of the second.
    """
    need("sshd", "ssh", "ip")
    tag, net = f"{os.getpid() % 10_000}", f"10.{77 + os.getpid() % 100}.{os.getpid() % 250}"
    bridge, names = f"igb{tag}", [f"ign{tag}-{number}" for number in (1, 2)]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=PATIENCE_S)

    daemons: list[Sshd] = []
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{net}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number, name in enumerate(names, start=1):
            ip("netns", "add", name)
            ip(
                "link",
                "add",
                f"igv{tag}-{number}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            ip("link", "set", f"igv{tag}-{number}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{net}.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
            cache = f"XDG_CACHE_HOME={tmp_path / 'cache'}"
            daemons.append(
                Sshd(
                    tmp_path / "ssh",
                    f"h{number}",
                    address=f"{net}.{number}",
                    port=2222,
                    namespace=name,
                    SetEnv=cache,
                )
            )
        yield client_config(tmp_path / "ssh", daemons), f"igv{tag}-2"
    finally:
        for daemon in daemons:
            daemon.stop()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


@pytest.mark.drawn("training on several machines")
def test_two_hosts_come_to_what_two_processes_come_to_whatever_happens_on_the_way(
    root: Path, namespaces: tuple[Path, str], expected: dict[str, str]
) -> None:
    """A rank is killed, then the launcher is asked to stop, then the same command goes on. Also:
    the secret reaches ranks and nothing else, each line says which host it is of, and the job is
    found from elsewhere.
    """
    recipe = on_hosts(
        root, namespaces[0], launch__secrets=["TOKEN_OF_MINE"], launch__code="sync", **APART
    )
    file, run = written(root, recipe), root / "runs" / "small"
    training = ingot("launch", "train", file, cwd=root, TOKEN_OF_MINE=SECRET)
    wait_for(training, lambda: 5 in steps(recipe))
    only_ranks(root)[1].kill()
    wait_for(training, lambda: bool(events(recipe, "restart")) and len(only_ranks(root)) == 2)
    ranks = only_ranks(root).values()
    for rank in ranks:
        rank.suspend()  # else it may be done before all is looked at
        environment = rank.environ()
        assert environment["TOKEN_OF_MINE"] == SECRET
        assert "/cache/ingot/code/" in environment["PYTHONPATH"], "launch.code=sync"
    said = [
        part
        for process in psutil.process_iter(["cmdline"])
        for part in process.info["cmdline"] or []
        if SECRET in part
    ]
    assert not said, "a secret on a command line"
    status = ended(ingot("launch", "status", run, cwd=root.parent))[1]
    assert [line.split()[:4] for line in status.splitlines()] == [
        ["train", "running", "process", f"{training.pid},"],
        ["train", "running", "ssh", "train-2,"],
    ]
    for rank in ranks:
        rank.resume()
    wait_for(training, lambda: len(events(recipe, "start")) == 2)
    saved = max(steps(recipe))
    training.send_signal(signal.SIGTERM)
    code, _, err = ended(training)
    assert code in (75, 0), err
    assert "rank 1 was ended by SIGKILL" in err
    gone(root)
    if code:
        assert max(steps(recipe)) >= saved
        code, _, err = ended(ingot("launch", "train", file, cwd=root, TOKEN_OF_MINE=SECRET))
        assert code == 0, err
    assert weights(root) == expected
    assert "h1: train: 30 steps" in err
    assert secret_in(root) == []
    status = ended(ingot("launch", "status", run, cwd=root.parent))[1]
    assert [line.split()[1] for line in status.splitlines()] == ["succeeded", "succeeded"]
    assert "h1: train: 30 steps" in ended(ingot("launch", "logs", run, cwd=root.parent))[1]
    gone(root)


SUBMIT = """
import os, sys, time
from pathlib import Path
from ingot.config.load import load_recipe
from ingot.launch.job import Job
from ingot.launch.places.ssh import SshLauncher
recipe = load_recipe([sys.argv[1]])
launcher = SshLauncher(recipe)
handle = launcher.submit(Job("show", tuple(sys.argv[3:]), 1, 2, rendezvous=sys.argv[2]))
while (state := launcher.status(handle)) == "running":
    time.sleep(0.1)
sys.stderr.write(launcher.log(handle).read().decode())
print(state)
"""


class Waiting:
    """A launcher in a process of its own, whose two nodes run a verb that waits for ever."""

    def __init__(self, root: Path, config: Path) -> None:
        self.recipe = on_hosts(root, config)
        self.argv = blocking_argv(root)
        self.launcher = SshLauncher(self.recipe)
        self.start()

    def start(self) -> None:
        meet = (
            self.recipe.folder.root
            / "jobs"
            / f"show-{len(list((self.recipe.folder.root / 'jobs').glob('show-*'))) + 1}"
        )
        meet.mkdir(parents=True)
        self.process = start_script(
            SUBMIT,
            str(written(self.recipe.folder.root.parent.parent, self.recipe)),
            str(meet),
            *self.argv,
        )
        wait_until(lambda: len(waiting_on(self.argv)) == 2)

    @property
    def handle(self) -> Handle:
        handle = find_handle(self.recipe.folder.root, "show", "ssh")
        assert handle is not None
        return handle


@pytest.mark.drawn("a launcher of ssh that goes")
def test_the_nodes_end_with_their_launcher_and_are_found_again(
    root: Path, hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    waiting = Waiting(root, hosts)
    launcher, process = waiting.launcher, waiting.process
    assert launcher.status(waiting.handle) == "running"
    # A second launcher does not start what runs already.
    with pytest.raises(Failed, match="runs already"):
        launcher.submit(Job("show", waiting.argv, 1, 2, rendezvous=waiting.handle.about["meet"]))
    # A signal from another process reaches the ranks.
    launcher.signal(waiting.handle, signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (out, "stopped by SIGTERM" in err) == ("cancelled\n", True)
    gone(root)
    # Killed, it leaves nothing.
    waiting.start()
    waiting.process.kill()
    waiting.process.communicate()
    gone(root)
    wait_until(lambda: launcher.status(waiting.handle) == "failed")
    # Nodes that do not see that it is gone are found, and ended.
    waiting.start()
    deaf = [each for each in ranks_of(root) if "ingot.launch.node" in each.cmdline()]
    assert len(deaf) == 2
    for each in deaf:
        each.suspend()
    waiting.process.kill()
    waiting.process.communicate()
    assert launcher.status(waiting.handle) == "running"
    assert len(waiting_on(waiting.argv)) == 2
    monkeypatch.setattr("ingot.launch.places.ssh_hosts.END_TIMEOUT_S", 0.5)
    launcher.cancel(waiting.handle)
    gone(root)
    assert launcher.status(waiting.handle) == "failed"


@pytest.mark.drawn("a launcher of ssh that goes")
def test_from_another_machine_the_ranks_are_asked_and_nothing_is_killed(
    root: Path, hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the second login node of a cluster, where no process of the first can be seen."""
    monkeypatch.chdir(root)
    waiting = Waiting(root, hosts)
    launcher, handle = SshLauncher(waiting.recipe), waiting.handle
    with monkeypatch.context() as patch:
        patch.setattr("ingot.launch.places.ssh.machine_id", lambda: "another")
        assert launcher.status(handle) == "running"
        with pytest.raises(
            Failed,
            match=f"show runs already and was started on {socket.gethostname()}; cancel it there",
        ):
            launcher.submit(Job("show", waiting.argv, 1, 2, rendezvous=handle.about["meet"]))
        launcher.cancel(handle)
        assert launcher.status(handle) == "cancelled"
    out, err = waiting.process.communicate(timeout=PATIENCE_S)
    assert (waiting.process.returncode, out, err.count("stopped by SIGTERM")) == (
        0,
        "cancelled\n",
        2,
    )
    gone(root)


@pytest.mark.drawn("a launcher of ssh that goes")
def test_a_launcher_lives_whatever_the_clock_says(
    root: Path, hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    waiting = Waiting(root, hosts)
    monkeypatch.setattr(
        psutil.Process, "create_time", lambda self: 1.0
    )  # counted from a time of boot that moves when the clock is set
    with pytest.raises(Failed, match="runs already, started by process"):
        SshLauncher(waiting.recipe).submit(
            Job("show", waiting.argv, 1, 2, rendezvous=waiting.handle.about["meet"])
        )
    assert len(waiting_on(waiting.argv)) == 2
    waiting.process.kill()
    waiting.process.communicate()
    gone(root)


def test_a_job_whose_nodes_have_all_said_how_they_ended_is_over(tmp_path: Path) -> None:
    """Though the process that launched it lives, which goes on to something else."""
    recipe = small_recipe(tmp_path, launch__kind="ssh", launch__ssh__hosts=["a", "b"])
    about = {
        "meet": str(tmp_path),
        "hosts": '["a", "b"]',
        "process": str(os.getpid()),
        "started": str(start_ticks(os.getpid())),
        "machine": str(machine_id()),
    }
    handle = Handle("train", "ssh", "train-1", ("train",), 1.0, "", about)
    launcher, meeting = SshLauncher(recipe), Rendezvous(str(tmp_path))
    meeting.leave(0, EXIT, rank=0, code=0)
    assert launcher.status(handle) == "running"
    meeting.leave(1, EXIT, rank=1, code=0)
    assert launcher.status(handle) == "succeeded"


@pytest.mark.drawn("a launcher of ssh that goes")
def test_a_host_that_does_not_run_linux_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Mac, on which a node that still runs would be called gone, and its ranks go on."""
    (tmp_path / "uname").write_text("#!/bin/sh\necho Darwin\n")
    (tmp_path / "uname").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(ssh_hosts, "ssh_command", lambda config, host, script: ["sh", "-c", script])
    told = r"host mac does not run Linux, .*; take it out of launch\.ssh\.hosts"
    with pytest.raises(WrongInput, match=told):
        ssh_hosts.copy_code(None, "mac", "code", b"")
    here = str(tmp_path)
    with pytest.raises(WrongInput, match=told):
        ssh_hosts.check_host(None, "mac", folder=here, python="python3", rendezvous=here, path="")


def test_a_copied_ingot_comes_before_what_the_recipe_puts_on_the_path(
    root: Path, hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    recipe = on_hosts(root, hosts, launch__code="sync")
    meet = recipe.folder.root / "jobs" / "show-1"
    meet.mkdir(parents=True)
    launcher, argv = SshLauncher(recipe), blocking_argv(root)
    handle = launcher.submit(
        Job("show", argv, environment={"PYTHONPATH": "/opt/my libraries"}, rendezvous=str(meet))
    )
    wait_until(lambda: len(waiting_on(argv)) == 1)
    code, theirs = waiting_on(argv)[0].environ()["PYTHONPATH"].split(":")
    assert code.startswith(f"{hosts.parent}/cache/ingot/code/")
    assert theirs == "/opt/my libraries"
    launcher.cancel(handle)
    gone(root)


def test_a_last_line_without_an_end_is_shown_when_nobody_will_end_it(tmp_path: Path) -> None:
    one, two, over = tmp_path / "one", tmp_path / "two", list[bool]()
    one.write_text("first\nsec")
    two.write_text("killed in the mid")
    log = HostsLog([("h1", one, 0), ("h2", two, 0)], lambda: bool(over))
    assert (log.read(), log.read()) == (b"h1: first\n", b"")
    with one.open("a") as stream:
        stream.write("ond\n")
    over.append(True)
    assert log.read() == b"h1: second\nh2: killed in the mid\n"
    assert log.read() == b""


def test_of_a_progress_bar_its_state_is_shown_and_no_line_is_kept_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "one"
    file.write_text("\r1%\r2%\r3")
    log = HostsLog([("h1", file, 0)], lambda: False)
    assert (log.read(), log.read()) == (b"h1: 2%\n", b"")
    with file.open("a") as stream:
        stream.write("%\r100%\nnext\r\n")
    assert log.read() == b"h1: 100%\nh1: next\n"
    with file.open("a") as stream:
        stream.write("." * 100_000)
    assert len(log.read()) == 100_005
    assert log._unfinished == [b""]


def test_an_error_before_two_returns_is_shown_and_a_long_line_is_cut_between_characters(
    tmp_path: Path,
) -> None:
    """Each terminal on the way of a line adds a return."""
    file = tmp_path / "one"
    file.write_bytes(b"RuntimeError: the reason\r\r\n")
    log = HostsLog([("h1", file, 0)], lambda: False)
    assert log.read() == b"h1: RuntimeError: the reason\n"
    text = "\u65e5" * 30_000
    with file.open("ab") as stream:
        stream.write(text.encode()[:-1])
    first = log.read().decode()
    with file.open("ab") as stream:
        stream.write(text.encode()[-1:] + b"\n")
    assert (first + log.read().decode()).replace("h1: ", "").replace("\n", "") == text


@pytest.mark.drawn(keep=3)
@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [
        (
            "down",
            Failed,
            (
                "host h3 cannot be reached (ssh: connect to host 127.0.0.1 port {port}: Connection"
                " refused)"
            ),
        ),
        ("unknown", Failed, "host nowhere.invalid is unknown"),
        ("key", Failed, "refuses the login"),
        ("host key", Failed, "host h2: its host key is unknown, or has changed"),
        ("folder", WrongInput, "host h1 has no folder /no/such/folder; set launch.folder"),
        ("python", WrongInput, "host h1 has no interpreter /no/python; set launch.python"),
        (
            "ingot",
            WrongInput,
            "cannot run ingot (ModuleNotFoundError: No module named 'ingot'); install it there",
        ),
        ("disk", WrongInput, "does not see"),
    ],
)
def test_what_is_wrong_with_a_host_is_one_line_and_nothing_is_started(
    fault: str,
    kind: type[IngotError],
    told: str,
    hosts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    knobs: dict[str, Any] = {}
    port = kept_port("127.0.0.1")
    if fault == "down":
        hosts = _other_config(hosts, tmp_path, f"Host h3\n HostName 127.0.0.1\n Port {port}\n")
        knobs = {"launch__ssh__hosts": ["h1", "h3"]}
    elif fault == "unknown":
        knobs = {"launch__ssh__hosts": ["h1", "nowhere.invalid"]}
    elif fault == "key":
        keygen(tmp_path / "wrong")
        hosts = _other_config(
            hosts,
            tmp_path,
            f"Host h2\n IdentityFile {tmp_path / 'wrong'}\n IdentitiesOnly yes\n",
            without=str(hosts.parent / "key"),
        )
    elif fault == "host key":
        (tmp_path / "nobody").touch()
        hosts = _other_config(
            hosts, tmp_path, f"Host h2\n UserKnownHostsFile {tmp_path / 'nobody'}\n"
        )
    elif fault == "folder":
        knobs = {"launch__folder": "/no/such/folder"}
    elif fault == "python":
        knobs = {"launch__python": "/no/python"}
    elif fault == "ingot":
        venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
        knobs = {"launch__python": str(tmp_path / "bare" / "bin" / "python")}
    elif fault == "disk":
        (tmp_path / "elsewhere").mkdir()
        knobs = {"launch__folder": str(tmp_path / "elsewhere")}
    launcher = SshLauncher(on_hosts(tmp_path, hosts, **knobs))
    meet = tmp_path / "runs" / "small" / "jobs" / "train-1"
    meet.mkdir(parents=True)
    with pytest.raises(kind) as caught:
        launcher.submit(Job("train", ("train", "r.yaml"), 1, 2, rendezvous=str(meet)))
    assert told.format(port=port) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not ranks_of(tmp_path)
    assert list(meet.iterdir()) == []


@pytest.mark.drawn("a launcher of ssh that goes")
def test_a_key_that_the_recipe_names_comes_to_the_ranks(
    tmp_path: Path, hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over standard input, as those of `launch.secrets` do: a judge is asked with it. A file of
    their working folder takes the place of no library.
    """
    monkeypatch.setenv("JUDGE", SECRET)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text("raise SystemExit('a file of mine')")
    judge = {"kind": "http", "url": "http://127.0.0.1:9/", "key_variable": "JUDGE", "retries": 0}
    recipe = on_hosts(
        tmp_path,
        hosts,
        launch__nodes=1,
        launch__folder=str(tmp_path),
        objective={"kind": "grpo", "group": 2, "rewards": [judge]},
    )
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"prompt": "a", "answer": "b", "reference": "c"}\n')
    argv = ("show", "rewards", str(written(tmp_path, recipe)), "--samples", str(samples))
    meet = recipe.folder.root / "jobs" / "train-1"
    meet.mkdir(parents=True)
    job = Job("train", argv, 1, 1, recipe.launch.variables, rendezvous=str(meet))
    launcher = SshLauncher(recipe)
    assert "over standard input: JUDGE" in launcher.render(job)
    handle = launcher.submit(job)
    deadline = time.monotonic() + PATIENCE_S
    while launcher.status(handle) in ("queued", "running") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "http failed on 1 of 1" in Path(handle.log).read_text()
    assert secret_in(tmp_path) == []


def test_a_port_that_is_taken_is_named_and_the_other_host_is_ended(root: Path, hosts: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        recipe = on_hosts(root, hosts, launch__port=listener.getsockname()[1])
        code, out, err = ended(
            ingot("launch", "train", written(root, recipe), "launch.restarts=0", cwd=root)
        )
    assert (code, out) == (1, "")
    assert f"h1: error: port {recipe.launch.port} of node 0" in err
    assert "h2: error: node 0 ended before all nodes had come" in err
    assert err.splitlines()[-1].startswith(f"port {recipe.launch.port} of node 0")
    gone(root)


def _other_config(config: Path, tmp_path: Path, first: str, without: str = "") -> Path:
    path = tmp_path / "other"
    lines = [line for line in config.read_text().splitlines() if not (without and without in line)]
    path.write_text(first + "\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_two_machines_whose_network_breaks_go_on_when_it_is_back(
    root: Path, namespaces: tuple[Path, str], expected: dict[str, str]
) -> None:
    config, link = namespaces
    recipe = on_hosts(root, config, **APART)
    training = ingot("launch", "train", written(root, recipe), cwd=root)
    wait_for(training, lambda: 5 in steps(recipe))
    subprocess.run(["ip", "link", "set", link, "down"], check=True)
    before = steps(recipe)
    # The near host is told by us, the far one hears nothing any more: both end their ranks.
    wait_for(training, lambda: not ranks_of(root), 120)
    assert training.poll() is None
    assert max(steps(recipe)) < KNOBS["train__steps"], before
    time.sleep(3)
    assert not ranks_of(root), "nothing is started as long as a host cannot be reached"
    subprocess.run(["ip", "link", "set", link, "up"], check=True)
    code, _, err = ended(training)
    assert code == 0, err
    # Whoever notices first: the connection that hears nothing, or the ranks that wait for each
    # other.
    assert "the connection to h2 broke" in err or "hang in step" in err, err
    assert "starting again from checkpoint" in err
    assert weights(root) == expected
    gone(root)
