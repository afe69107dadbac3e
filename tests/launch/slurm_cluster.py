"""A real Slurm of two nodes on this machine, in a folder of its own and on free ports; daemons
listen on loopback only.

`python -m tests.launch.slurm_cluster FOLDER` starts one for a person, and ends it with Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ingot.serve.http.listen import kept_port
from tests.patience import PATIENCE_S

CONFIGURATION = """
ClusterName=ingot
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=1
KillWait=10
InactiveLimit=0
MinJobAge=600
SlurmctldTimeout=30
SlurmdTimeout=60
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP
PartitionName=one Nodes=n1 MaxTime=5 State=UP
"""


class Cluster:
    """Starts when it is made; commands find it by `$SLURM_CONF`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._processes = folder.absolute(), list[subprocess.Popen[bytes]]()
        host = socket.gethostname().partition(".")[0]
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir(parents=True)
        values = {
            "host": host,
            "folder": self.folder,
            "port": kept_port("127.0.0.1"),
            "first": kept_port("127.0.0.1"),
            "second": kept_port("127.0.0.1"),
        }
        self.conf = self.folder / "slurm.conf"
        self.conf.write_text(CONFIGURATION.format(**values))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.folder.chmod(0o755)  # munged refuses a folder that others could write to
        self.environ = {**os.environ, "SLURM_CONF": str(self.conf)}
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={self.folder}/munge.key",
            f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munged.seed",
        )
        self._wait(lambda: (self.folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D", "-f", str(self.conf))
        self._daemon("slurmd", "-D", "-N", "n1", "-f", str(self.conf))
        self._daemon("slurmd", "-D", "-N", "n2", "-f", str(self.conf))
        self._wait(
            lambda: (
                self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle", "idle"]
            )
        )

    def _daemon(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._processes.append(
                subprocess.Popen(
                    [f"/usr/sbin/{name}", *arguments],
                    env=self.environ,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            dead = [process.args for process in self._processes if process.poll() is not None]
            assert not dead, f"{dead} ended; see {self.folder}"
            assert time.monotonic() < deadline, f"the cluster did not come up; see {self.folder}"
            time.sleep(0.1)

    def ask(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=False, timeout=60
        ).stdout

    def jobs(self) -> list[str]:
        """The jobs that are queued or run."""
        return self.ask("squeue", "-h", "-o", "%A").split()

    def stop(self) -> None:
        """Ends jobs and daemons, the daemons in the reverse order."""
        if len(self._processes) == 4:
            for job in self.jobs():
                self.ask("scancel", job)
            deadline = time.monotonic() + PATIENCE_S
            while self.jobs() and time.monotonic() < deadline:
                time.sleep(0.2)
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


if __name__ == "__main__":
    cluster = Cluster(Path(sys.argv[1]))
    print(f"export SLURM_CONF={cluster.conf}", flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        cluster.stop()
