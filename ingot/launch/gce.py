"""Virtual machines of Compute Engine made for one job, and always destroyed.

The handle is stored before the first machine is asked for; each carries the run in its labels,
deletes itself at its end, and is deleted by Compute Engine when its time is over, whatever became
of us. Every look at the job and every new start first remove what earlier starts left; but not what
runs of the same run started from another computer, which is refused a second start for as long.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from ingot.base.errors import EXIT_FAILED, Failed, IngotError, WrongInput
from ingot.base.lock import folder_lock, lock_holder
from ingot.base.progress import duration, say
from ingot.base.remote.bucket import open_bucket
from ingot.cloud import instances
from ingot.cloud.clients import Google
from ingot.cloud.instances import Found, NoRoom, NoSuch
from ingot.cloud.machines import NOT_ON_DEMAND, accelerators_of, check_machine, machine_type
from ingot.cloud.prices import time_limit_s
from ingot.config.recipe import Recipe
from ingot.launch.attempt import WELL
from ingot.launch.cloudlog import CloudLog
from ingot.launch.gce_cluster import BOOT, LEAST_S, NODE, START, Cluster, labels_of
from ingot.launch.handles import find, jobs_folder, store
from ingot.launch.job import OVER, Handle, Job, Log, State
from ingot.launch.meeting import EXIT, HERE, Meeting

KIND = "gce"
CANCELLED = "cancelled"
"""A note: that somebody has cancelled the job."""
LINGER_S = 120.0
"""How long other nodes may go on when one has failed: they notice within seconds, and may have
something to save.
"""
LONGEST_S = 120 * 86_400
"""Compute Engine gives no machine a longer time."""


class GceLauncher:
    """One job, one cluster of `launch.nodes` machines in one zone."""

    look_s = 10.0

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.google, self._root = recipe, Google(recipe.cloud), recipe.folder.root
        self._met: set[str] = set()
        self._last_words: dict[str, str] = {}

    def can(self, job: Job) -> list[str]:
        launch, cloud = self.recipe.launch, self.recipe.cloud
        reasons = check_machine(launch.machine)
        known = machine_type(launch.machine.type)
        if known is not None and known.is_tpu:
            reasons.append(
                f"machine type {known.name} is a TPU's; set launch.kind to vertex, or to tpu with"
                " launch.tpu.type"
            )
        accelerators = accelerators_of(launch.machine)[1]
        if accelerators and job.processes > accelerators:
            reasons.append(
                f"{job.processes} processes share {accelerators} accelerators on each machine;"
                " lower launch.processes, or take larger machines"
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
        if launch.code == "sync":
            reasons.append(
                "launch.code sync copies ingot to hosts that are there already; set it to image and"
                " build one with `ingot images build train`"
            )
        if job.secrets:
            reasons.append(
                f"launch.secrets {job.secrets[0]} cannot be given to a machine without writing it"
                " down; put it into Secret Manager and name it in cloud.secrets:"
                f" {{{job.secrets[0]}: secret:NAME}}"
            )
        if job.mirror is None or not (job.meet or "").startswith("gs://"):
            reasons.append("the machines share no disk and need a bucket; set cloud.bucket")
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
        if (cluster := Cluster(self.recipe, job)).leave_s < LEAST_S:
            reasons.append(
                f"{duration(cluster.limit_s)} leave no time before the"
                f" {duration(self.recipe.checkpoint.grace_s)} of checkpoint.grace_s; raise"
                " cloud.max_run and cloud.max_cost, or lower it"
            )
        looks: list[Callable[[], object]] = [
            lambda: self.google.project,
            lambda: cluster.image,
            lambda: time_limit_s(self.recipe, nodes=job.nodes),
        ]
        for look in looks:
            try:
                look()
            except WrongInput as error:
                reasons.append(str(error))
        return list(dict.fromkeys(reasons))

    def render(self, job: Job) -> str:
        cluster = Cluster(self.recipe, job)
        zone, *others = cluster.zones
        shown = []
        for node in range(job.nodes):
            machine = cluster.machine(node, zone)
            machine.metadata.items[0].value = "(the script below)"
            shown.append(
                "# POST"
                f" {self.google.address('compute.googleapis.com')}/compute/v1/projects/{self.google.project}/zones/{zone}/instances\n"
                f"{instances.as_json(machine)}\n"
            )
        elsewhere = f", or where it has no room in {', '.join(others)}" if others else ""
        note = f"# In {zone}{elsewhere}; all machines in one zone.\n"
        return note + "".join(shown) + f"# startup-script\n{cluster.script(zone)}"

    def busy(self, job: Job) -> str | None:
        """Why the job must not be started: machines of it run that this run folder has not made.
        Asks and changes nothing, for whoever has yet to send what a start would find.
        """
        return _elsewhere(
            find(self._root, job.name, KIND), self._machines(job.name, job.mirror or "")
        )

    def submit(self, job: Job) -> Handle:
        """A job of this name that runs already is not started twice: its handle comes back.

        Raises:
            NoRoom: no zone has the machines now.
            Failed: it runs, and was started elsewhere.
        """
        if reasons := self.can(job):
            raise WrongInput(f"{job.name} cannot run with launch.kind {KIND}: {'; '.join(reasons)}")
        cluster = Cluster(self.recipe, job, uuid.uuid4().hex[:8])
        with folder_lock(jobs_folder(self._root), _lock(job.name)):
            known, left = (
                find(self._root, job.name, KIND),
                self._machines(job.name, job.mirror or ""),
            )
            if (
                known is not None
                and known.id != cluster.id
                and self._judge(known, _of(known, left), making=False) in ("queued", "running")
            ):
                return known
            if reason := _elsewhere(known, left):
                raise Failed(reason)
            self._remove(left)
            place = open_bucket(job.meet or "")
            for blob in place.list():  # of a run that had this name and is gone
                place.delete(blob.name)
            about = {
                "nodes": str(job.nodes),
                "processes": str(job.processes),
                "start": cluster.start,
                "meet": job.meet or "",
                "mirror": job.mirror or "",
            }
            handle = store(
                self._root,
                Handle(job.name, KIND, cluster.id, job.argv, time.time(), "", about),
                self.recipe,
            )
            try:
                made = self._make(cluster)
            except BaseException:
                self._remove(_of_start(cluster.start, self._machines(job.name, job.mirror or "")))
                raise
            ids = json.dumps({one.labels[NODE]: one.id for one in made})
            return store(
                self._root,
                replace(handle, about={**about, "zone": made[0].zone, "machines": ids}),
                self.recipe,
            )

    def _make(self, cluster: Cluster) -> list[Found]:
        """All machines, in the first zone that has them."""
        refused: list[NoRoom] = []
        for zone in cluster.zones:
            try:
                instances.insert(
                    self.google,
                    zone,
                    [cluster.machine(node, zone) for node in range(cluster.job.nodes)],
                )
            except NoRoom as error:
                refused.append(error)
                self._remove(
                    _of_start(
                        cluster.start, self._machines(cluster.job.name, cluster.job.mirror or "")
                    )
                )
                continue
            made = _of_start(
                cluster.start, self._machines(cluster.job.name, cluster.job.mirror or "")
            )
            if len(made) == cluster.job.nodes:
                say(
                    f"{cluster.job.name}: {cluster.job.nodes} x {self.recipe.launch.machine.type}"
                    f" in {zone}"
                )
                return made
            refused.append(NoRoom(f"a machine was taken away in {zone} as soon as it was made"))
            self._remove(made)
        told = "; ".join(dict.fromkeys(map(str, refused)))
        wanted = f"{cluster.job.nodes} x {self.recipe.launch.machine.type}"
        if all(isinstance(error, NoSuch) for error in refused):
            raise WrongInput(
                f"{wanted} cannot be had in {', '.join(cluster.zones)}: {told}; set cloud.region,"
                " cloud.zone or launch.machine to what there is"
            )
        raise NoRoom(
            f"no room for {wanted} in {', '.join(cluster.zones)}: {told}; try later, or another"
            " cloud.region, cloud.zone or launch.machine"
        )

    def status(self, handle: Handle) -> State:
        """Machines of other starts in which nothing runs any more are removed, and those of this
        one when it is over.
        """
        machines = self._machines(handle.name, handle.about["mirror"])
        mine = _of_start(handle.about["start"], machines)
        self._remove([one for one in machines if one.is_gone and one not in mine])
        making = (
            "machines" not in handle.about
            and lock_holder(jobs_folder(self._root), _lock(handle.name)) is not None
        )
        state = self._judge(handle, {int(one.labels[NODE]): one for one in mine}, making=making)
        if state in OVER:
            self._listen(handle, mine)
            self._remove(mine)
        return state

    def _judge(self, handle: Handle, machines: Mapping[int, Found], *, making: bool) -> State:
        """By the machines that there are, and what the nodes have left behind. Notes are read after
        the machines: who leaves has said so before.
        """
        if making:
            return "queued"
        meeting, nodes = Meeting(handle.about["meet"]), range(int(handle.about["nodes"]))
        ends = meeting.notes(EXIT)
        failed = [note for note in ends.values() if int(note["code"]) not in WELL]
        if meeting.notes(CANCELLED):
            return "cancelled"
        if len(ends) == len(nodes):
            return "failed" if failed else "succeeded"
        if "machines" not in handle.about:
            return "failed"  # whoever made them died over it
        if any(
            node not in ends and (node not in machines or machines[node].is_gone) for node in nodes
        ):
            return "failed" if failed else "preempted"
        if failed and time.time() - min(float(note["t_wall"]) for note in failed) > LINGER_S:
            return "failed"
        if handle.id in self._met or len(meeting.notes(HERE)) == len(nodes):
            self._met.add(handle.id)
            return "running"
        return (
            "queued"
            if time.time() - handle.started < self.recipe.launch.start_s
            else self._never_came(handle, meeting)
        )

    def _never_came(self, handle: Handle, meeting: Meeting) -> State:
        """Leaves word for the nodes that have not met the others, for whoever asks how they
        ended.
        """
        here, boot = meeting.notes(HERE), meeting.notes(BOOT)
        for node in range(int(handle.about["nodes"])):
            if node not in here:
                last = (
                    f"the last that it did was {boot[node]['phase']}"
                    if node in boot
                    else "its start-up script said nothing"
                )
                how = (
                    f"node {node} of {handle.id} did not come up within"
                    f" {duration(self.recipe.launch.start_s)}: {last}; see its log, or raise"
                    " launch.start_s"
                )
                meeting.leave(
                    node,
                    EXIT,
                    rank=node * int(handle.about["processes"]),
                    code=EXIT_FAILED,
                    how=how,
                )
        return "failed"

    def log(self, handle: Handle) -> Log:
        found = find(self._root, handle.name, KIND)
        ids = json.loads((found or handle).about.get("machines", "{}"))
        by_node = {int(node): id for node, id in ids.items()}
        return CloudLog(
            self.google,
            by_node,
            lambda: self._on_serial_port(handle),
            lambda: self._last_words.get(handle.id, ""),
        )

    def _on_serial_port(self, handle: Handle) -> Collection[Found]:
        return _of(handle, self._machines(handle.name, handle.about["mirror"])).values()

    def _listen(self, handle: Handle, machines: Collection[Found]) -> None:
        """Keep the last that machines said which are about to go, if one is."""
        if handle.id in self._last_words:
            return
        said = []
        for one in machines:
            try:
                text, _ = instances.serial_port(self.google, one)
            except IngotError:
                continue
            said.append("".join(f"[{one.name}] {line}\n" for line in text.splitlines()[-20:]))
        self._last_words[handle.id] = "".join(said)

    def signal(self, handle: Handle, number: int) -> None:
        """By a note, which the nodes look for every few seconds: no signal reaches a machine."""
        Meeting(handle.about["meet"]).send(number)

    def cancel(self, handle: Handle) -> None:
        Meeting(handle.about["meet"]).leave(0, CANCELLED)
        self._remove(
            _of_start(handle.about["start"], self._machines(handle.name, handle.about["mirror"]))
        )
        if left := _of_start(
            handle.about["start"], self._machines(handle.name, handle.about["mirror"])
        ):
            raise Failed(
                f"{left[0].name} in {left[0].zone} is still there; cancel once more, or delete it"
                " in the console"
            )

    def _machines(self, verb: str, mirror: str) -> list[Found]:
        """All that there are of this run's verb, of every start."""
        return instances.labelled(self.google, labels_of(self.recipe, verb, mirror))

    def _remove(self, machines: Collection[Found]) -> None:
        if machines:
            instances.delete(self.google, machines)


def _lock(verb: str) -> str:
    return f"{verb}.{KIND}.lock"


def _of_start(start: str, machines: Collection[Found]) -> list[Found]:
    return [one for one in machines if one.labels.get(START) == start]


def _elsewhere(known: Handle | None, machines: Collection[Found]) -> str | None:
    """All that this folder starts is in its handle before the first machine is asked for, and gone
    before the next one is: what runs besides is not ours, and somebody may wait for it.
    """
    ours = known.about["start"] if known is not None else None
    foreign = next(
        (one for one in machines if not one.is_gone and one.labels.get(START) != ours), None
    )
    return (
        None
        if foreign is None
        else (
            f"{foreign.name} in {foreign.zone} works on this run and was started elsewhere; cancel"
            " it there, or delete it"
        )
    )


def _of(handle: Handle, machines: Collection[Found]) -> dict[int, Found]:
    """The machines of a start, by node."""
    return {int(one.labels[NODE]): one for one in _of_start(handle.about["start"], machines)}
