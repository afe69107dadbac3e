"""Virtual machines of Compute Engine made for one job, and always deleted.

The handle is stored before the first machine is requested. Each machine is labelled with the run,
deletes itself at its end, and is deleted by Compute Engine when its time is over, even if this
process has died. Each query of the job and each new start first remove what earlier starts left,
except machines of the same run that another computer started: they prevent a second start.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import replace

from ingot.base.errors import EXIT_FAILED, Failed, IngotError, WrongInput
from ingot.base.progress import duration, say
from ingot.base.runfolder import folder_lock, lock_holder
from ingot.cloud import instances
from ingot.cloud.clients import GoogleClients
from ingot.cloud.instances import Instance, NoCapacity, NoSuchMachine
from ingot.cloud.machines import NOT_ON_DEMAND, machine_type
from ingot.cloud.prices import time_limit_s
from ingot.config.recipe import Recipe
from ingot.launch.attempt import NON_FAILURE_CODES
from ingot.launch.handles import find_handle, jobs_folder, store_handle
from ingot.launch.job import FINAL_STATES, Handle, Job, JobLog, JobState
from ingot.launch.places.gce_machines import LEAST_S, ComputeCluster
from ingot.launch.places.logs import ComputeLog
from ingot.launch.places.node_commands import (
    NODE,
    START,
    errors_of,
    job_labels,
    machine_reasons,
    not_come_up,
)
from ingot.launch.rendezvous import (
    ARRIVED,
    BOOT,
    CANCELLED,
    EXIT,
    Rendezvous,
    SignalsByNote,
    clear_rendezvous,
    state_by_notes,
    taken_away,
)

KIND = "gce"
LINGER_S = 120.0
"""How long other nodes may go on when one has failed: they notice within seconds, and may have
something to save.
"""
LONGEST_S = 120 * 86_400
"""The longest time limit that Compute Engine accepts for a machine."""
LAST_LINES = 20


class GceLauncher(SignalsByNote):
    """One job, one cluster of `launch.nodes` machines in one zone."""

    poll_s = 10.0
    shares_disk, paid_by_use = False, False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self._root = recipe, recipe.folder.root
        self.google = GoogleClients(recipe.cloud)
        self._started: set[str] = set()
        """Ids of clusters whose nodes have all arrived."""
        self._last_words: dict[str, str] = {}

    def can(self, job: Job) -> list[str]:
        """See `Launcher`."""
        launch, cloud = self.recipe.launch, self.recipe.cloud
        reasons = machine_reasons(self.recipe, job)
        known = machine_type(launch.machine.type)
        if known is not None and known.is_tpu:
            reasons.append(
                f"machine type {known.name} is a TPU's; set launch.kind to vertex, or to tpu with"
                " launch.tpu.type"
            )
        if launch.machine.flex_start:
            reasons.append(
                "launch.machine.flex_start is known to Vertex AI alone; set launch.kind to vertex,"
                " or launch.machine.spot"
            )
        if launch.machine.type in NOT_ON_DEMAND and not launch.machine.spot:
            reasons.append(
                f"machine type {launch.machine.type} is given neither on demand nor by a plain"
                " reservation; set launch.machine.spot, or launch.kind to vertex"
            )
        if cloud.zone is not None and not cloud.zone.startswith(f"{cloud.region}-"):
            reasons.append(
                f"cloud.zone {cloud.zone} does not lie in cloud.region {cloud.region}; set one of"
                " them right"
            )
        if cloud.max_run > LONGEST_S:
            reasons.append(
                f"cloud.max_run {duration(cloud.max_run)} is longer than the 120 days that a"
                " machine may be given; lower it"
            )
        if (cluster := ComputeCluster(self.recipe, job)).leave_s < LEAST_S:
            reasons.append(
                f"{duration(cluster.limit_s)} leave no time before the"
                f" {duration(self.recipe.checkpoint.grace_s)} of checkpoint.grace_s; raise"
                " cloud.max_run and cloud.max_cost, or lower it"
            )
        reasons += errors_of(
            lambda: self.google.project,
            lambda: cluster.image,
            lambda: time_limit_s(self.recipe, nodes=job.nodes),
        )
        return list(dict.fromkeys(reasons))

    def render(self, job: Job) -> str:
        """See `Launcher`: the requests as JSON, and the start-up script."""
        cluster = ComputeCluster(self.recipe, job)
        zone, *others = cluster.zones
        address = self.google.address("compute.googleapis.com")
        path = f"/compute/v1/projects/{self.google.project}/zones/{zone}/instances"
        requests = []
        for node in range(job.nodes):
            machine = cluster.machine(node, zone)
            machine.metadata.items[0].value = "(the script below)"
            requests.append(f"# POST {address}{path}\n{instances.as_json(machine)}\n")
        elsewhere = f", or where it has no room in {', '.join(others)}" if others else ""
        note = f"# In {zone}{elsewhere}; all machines in one zone.\n"
        return note + "".join(requests) + f"# startup-script\n{cluster.script(zone)}"

    def busy(self, job: Job) -> str | None:
        """Why the job must not be started: it has running machines that this run folder did not
        create. No side effects, so that it can be called before anything is sent to the bucket.
        """
        known = find_handle(self._root, job.name, KIND)
        return _started_elsewhere(known, self._machines_of_job(job))

    def submit(self, job: Job) -> Handle:
        """If a job of this name is already running, its handle is returned.

        Raises:
            NoCapacity: no zone has the machines now.
            Failed: it is running, and was started elsewhere.
        """
        if reasons := self.can(job):
            raise WrongInput(f"{job.name} cannot run with launch.kind {KIND}: {'; '.join(reasons)}")
        cluster = ComputeCluster(self.recipe, job, uuid.uuid4().hex[:8])
        with folder_lock(jobs_folder(self._root), _lock(job.name)):
            known, left = find_handle(self._root, job.name, KIND), self._machines_of_job(job)
            if known is not None and known.id != cluster.id:
                state = self._judge(known, _by_node(known, left), being_made=False)
                if state in ("queued", "running"):
                    return known
            if reason := _started_elsewhere(known, left):
                raise Failed(reason)
            self._delete(left)
            clear_rendezvous(job.rendezvous)
            about = {
                "nodes": str(job.nodes),
                "processes": str(job.processes),
                "start": cluster.start,
                "meet": job.rendezvous,
                "mirror": job.run_folder_url,
            }
            handle = Handle(job.name, KIND, cluster.id, job.argv, time.time(), "", about)
            store_handle(self._root, handle, self.recipe)
            try:
                made = self._make_machines(cluster)
            except BaseException:
                try:
                    self._delete(self._machines_of_start(cluster))
                except IngotError as error:  # why there is no job is told by the first error
                    say(
                        f"warning: {error}; machines of {cluster.id} may be left, and end by"
                        f" themselves after {duration(cluster.limit_s)}; `ingot launch cancel"
                        f" {self._root}` deletes them, as the same command does"
                    )
                raise
            ids = json.dumps({machine.labels[NODE]: machine.id for machine in made})
            return store_handle(
                self._root,
                replace(handle, about={**about, "zone": made[0].zone, "machines": ids}),
                self.recipe,
            )

    def _make_machines(self, cluster: ComputeCluster) -> list[Instance]:
        """Create all machines, in the first zone that has capacity."""
        errors: list[NoCapacity] = []
        machines = f"{cluster.job.nodes} x {self.recipe.launch.machine.type}"
        for zone in cluster.zones:
            try:
                instances.insert(
                    self.google,
                    zone,
                    [cluster.machine(node, zone) for node in range(cluster.job.nodes)],
                )
            except NoCapacity as error:
                errors.append(error)
                self._delete(self._machines_of_start(cluster))
                continue
            made = self._machines_of_start(cluster)
            if len(made) == cluster.job.nodes:
                say(f"{cluster.job.name}: {machines} in {zone}")
                return made
            errors.append(NoCapacity(f"a machine was taken away in {zone} as soon as it was made"))
            self._delete(made)
        described, zones = "; ".join(dict.fromkeys(map(str, errors))), ", ".join(cluster.zones)
        if all(isinstance(error, NoSuchMachine) for error in errors):
            raise WrongInput(
                f"{machines} cannot be had in {zones}: {described}; set cloud.region,"
                " cloud.zone or launch.machine to what there is"
            )
        raise NoCapacity(
            f"no room for {machines} in {zones}: {described}; try later, or another"
            " cloud.region, cloud.zone or launch.machine"
        )

    def status(self, handle: Handle) -> JobState:
        """See `Launcher`. Stopped machines of other starts are deleted, and those of this one when
        it is over.
        """
        machines = self._machines(handle.name, handle.about["mirror"])
        own = _of_start(handle.about["start"], machines)
        self._delete([one for one in machines if one.is_stopped and one not in own])
        being_made = (
            "machines" not in handle.about
            and lock_holder(jobs_folder(self._root), _lock(handle.name)) is not None
        )
        state = self._judge(handle, _by_node(handle, own), being_made=being_made)
        if state in FINAL_STATES:
            self._keep_last_words(handle, own)
            self._delete(own)
        return state

    def _judge(
        self, handle: Handle, machines: Mapping[int, Instance], *, being_made: bool
    ) -> JobState:
        """The state derived from the existing machines and the nodes' notes. Notes are read after
        the machines are listed, since a node leaves its note before its machine disappears.
        """
        if being_made:
            return "queued"
        rendezvous, nodes = Rendezvous.of(handle), range(int(handle.about["nodes"]))
        exits = rendezvous.notes(EXIT)
        failed = [note for note in exits.values() if int(note["code"]) not in NON_FAILURE_CODES]
        if rendezvous.notes(CANCELLED):
            return "cancelled"
        lost: JobState = "failed" if failed and not taken_away(rendezvous, exits) else "preempted"
        if len(exits) == len(nodes):
            if failed and lost == "preempted":
                return lost
            return state_by_notes(rendezvous, len(nodes))
        if "machines" not in handle.about:
            return "failed"  # the process that created them died meanwhile
        gone = [
            node
            for node in nodes
            if node not in exits and (node not in machines or machines[node].is_stopped)
        ]
        if gone:
            return lost
        if failed and time.time() - min(float(note["t_wall"]) for note in failed) > LINGER_S:
            return lost
        if handle.id in self._started or len(rendezvous.notes(ARRIVED)) == len(nodes):
            self._started.add(handle.id)
            return "running"
        if time.time() - handle.started < self.recipe.launch.start_s:
            return "queued"
        self._leave_exit_notes(handle, rendezvous)
        return "failed"

    def _leave_exit_notes(self, handle: Handle, rendezvous: Rendezvous) -> None:
        """Leave exit notes for the nodes that did not arrive in time, with the reason that the
        supervisor reports.
        """
        arrived, boot = rendezvous.notes(ARRIVED), rendezvous.notes(BOOT)
        for node in range(int(handle.about["nodes"])):
            if node in arrived:
                continue
            rendezvous.leave(
                node,
                EXIT,
                rank=node * int(handle.about["processes"]),
                code=EXIT_FAILED,
                how=not_come_up(self.recipe, handle.id, node, boot.get(node)),
            )

    def log(self, handle: Handle) -> JobLog:
        """See `Launcher`."""
        stored = find_handle(self._root, handle.name, KIND)
        ids = json.loads((stored or handle).about.get("machines", "{}"))
        return ComputeLog(
            self.google,
            {int(node): id for node, id in ids.items()},
            lambda: _of_start(
                handle.about["start"], self._machines(handle.name, handle.about["mirror"])
            ),
            lambda: self._last_words.get(handle.id, ""),
        )

    def _keep_last_words(self, handle: Handle, machines: Collection[Instance]) -> None:
        """Keep the last log lines of machines that are about to be deleted."""
        if handle.id in self._last_words:
            return
        lines = []
        for machine in machines:
            with contextlib.suppress(IngotError):
                text, _ = instances.serial_port(self.google, machine)
                lines += [f"[{machine.name}] {line}\n" for line in text.splitlines()[-LAST_LINES:]]
        self._last_words[handle.id] = "".join(lines)

    def cancel(self, handle: Handle) -> None:
        """See `Launcher`."""
        Rendezvous.of(handle).leave(0, CANCELLED)
        start, url = handle.about["start"], handle.about["mirror"]
        self._delete(_of_start(start, self._machines(handle.name, url)))
        if left := _of_start(start, self._machines(handle.name, url)):
            raise Failed(
                f"{left[0].name} in {left[0].zone} is still there; cancel once more, or delete it"
                " in the console"
            )

    def _machines(self, verb: str, run_folder_url: str) -> list[Instance]:
        """All existing machines of this run's verb, of every start."""
        return instances.labelled(self.google, job_labels(self.recipe, verb, run_folder_url))

    def _machines_of_job(self, job: Job) -> list[Instance]:
        return self._machines(job.name, job.run_folder_url)

    def _machines_of_start(self, cluster: ComputeCluster) -> list[Instance]:
        return _of_start(cluster.start, self._machines_of_job(cluster.job))

    def _delete(self, machines: Collection[Instance]) -> None:
        if machines:
            instances.delete(self.google, machines)


def _lock(verb: str) -> str:
    return f"{verb}.{KIND}.lock"


def _of_start(start: str, machines: Collection[Instance]) -> list[Instance]:
    return [machine for machine in machines if machine.labels.get(START) == start]


def _started_elsewhere(known: Handle | None, machines: Collection[Instance]) -> str | None:
    """Why machines that another computer started prevent a start. Everything that this folder
    starts is in its handle before the first machine is requested, and deleted before the next
    start: any other machine is not ours, and somebody may be waiting for it.
    """
    own = known.about["start"] if known is not None else None
    for machine in machines:
        if not machine.is_stopped and machine.labels.get(START) != own:
            return (
                f"{machine.name} in {machine.zone} works on this run and was started elsewhere;"
                " cancel it there, or delete it"
            )
    return None


def _by_node(handle: Handle, machines: Collection[Instance]) -> dict[int, Instance]:
    """The machines of a start by node."""
    own = _of_start(handle.about["start"], machines)
    return {int(machine.labels[NODE]): machine for machine in own}
