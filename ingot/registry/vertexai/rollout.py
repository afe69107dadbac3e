"""A new version behind an endpoint without an outage: beside the old one, a share of the traffic,
all of it, and only then the old one goes.

At each moment either the old or the new version serves. One command at a time: a lease in the
bucket. What a command left that died is found in
the endpoint itself, by the next one: traffic goes back to the version that is live, and what gets
none is taken away or gone on with.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.progress import say
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.lease import Lease, lease
from ingot.cloud.clients import GoogleClients
from ingot.cloud.vertex import endpoints
from ingot.cloud.vertex.endpoints import VertexEndpoint
from ingot.cloud.vertex.jobs import http_status_of
from ingot.registry.vertexai.endpoint import Plan, create_request, deploy_request, find
from ingot.registry.vertexai.probe import probe

LEASE_S = 60.0
"""How long a command that died keeps the next one waiting, where it ran on another machine."""
TRIES, PAUSE_S = 5, 2.0
"""How often a change of the endpoint is tried that did not come off, and how long is waited between
two tries.
"""
_OURS = ("ingot-verb", "deploy")
"""The label of an endpoint that was made here, and that may be deleted here again."""
_AT_IT = "other operation"
"""What a refusal says that is due to what somebody else does to the endpoint at that moment."""


def roll_out(
    google: GoogleClients,
    plan: Plan,
    live: Callable[[], int | None],
    allow: Callable[[int | None], None],
    commit: Callable[[], None],
) -> None:
    """Make `plan` serve all of the traffic; `live` says which version should until then, `commit`
    makes it the live one once it does.

    `allow` raises where that is not wanted any more: it is told what is live while nobody else can
    change it, before anything is touched.

    Raises:
        WrongInput: there are two endpoints of the name, it serves what is not ours, or the service
            refuses machine, image or rights.
        Failed: another command deploys this name, or the new version does not come up or does not
            answer as it should. The old one then serves.
    """
    bucket = open_bucket(f"{google.bucket}/ingot/endpoints/{plan.name}")
    with lease(bucket, f"ingot deploy {plan.name}", life_s=LEASE_S, wait=True) as held:
        before = live()
        allow(before)
        _RollOut(google, plan, before, held).run(live, commit)


class _RollOut:
    """One run of `roll_out`, while it holds the lease. `stable` serves until the new one does."""

    def __init__(self, google: GoogleClients, plan: Plan, live: int | None, held: Lease) -> None:
        self._google, self._plan, self._live, self._held = google, plan, live, held
        self._name, self._created = "", False
        self._stable: str | None = None
        self._is_right = False  # whether `_put_right` knows what is to serve
        self._operation: str | None = None

    def run(self, live: Callable[[], int | None], commit: Callable[[], None]) -> None:
        there, has_begun = find(self._google, self._plan.name), False
        finish = (
            f"`ingot deploy {self._plan.name} --version {self._plan.version.number}` finishes it"
        )
        try:
            self._created = there is None
            self._name = (
                there.name
                if there
                else endpoints.create(self._google, create_request(self._google, self._plan))
            )
            new = self._put_right()
            if new is None:
                new = self._deploy()
            self._move_traffic(new)
            self._held.check()
            has_begun = True
            commit()
        except BaseException as error:
            if has_begun and self._is_live(
                live
            ):  # back again would leave an endpoint that serves another version than the live one
                if isinstance(error, IngotError):
                    raise Failed(
                        f"{self._plan.called} serves all of the traffic, but {error}; {finish}"
                    ) from error
                raise
            self._undo(error)
            if isinstance(error, Failed | WrongInput) and self._name:
                undone = (
                    "nothing is deployed"
                    if self._is_right or self._created
                    else "nothing was changed"
                )
                state = "the version before serves on" if self._stable else undone
                raise type(error)(
                    f"{self._plan.called} is not deployed, {state}: {error}"
                ) from error
            raise
        try:
            self._keep_only(new)
        except IngotError as error:
            raise Failed(
                f"{self._plan.called} is live, but the one before could not be taken away: {error};"
                f" {finish}"
            ) from error

    def _is_live(self, live: Callable[[], int | None]) -> bool:
        """Whether the pointer moved before `commit` broke off; where nobody can say, too: what
        serves now may stay so.
        """
        try:
            return live() == self._plan.version.number
        except IngotError:
            return True

    def _put_right(self) -> str | None:
        """Undo or keep what a command left that died: one version serves all of the traffic
        afterwards, and beside it is at most the new one.

        Returns the id of the new one where it is deployed already.
        """
        there = self._settled()
        serving = [
            deployed
            for deployed in there.deployed
            if there.traffic.get(deployed.id) or deployed.number == self._live
        ]
        # The live version goes first, then whichever serves most; the new one of a name of which
        # nothing is live yet has proved nothing.
        proved = [
            deployed
            for deployed in serving
            if self._live is not None or not self._plan.runs(deployed)
        ]
        best = max(
            proved,
            key=lambda deployed: (
                deployed.number == self._live,
                there.traffic.get(deployed.id, 0),
                deployed.id,
            ),
            default=None,
        )
        self._stable, self._is_right = best.id if best else None, True
        if self._stable is not None:
            self._set_traffic({self._stable: 100})
        new = next(
            (
                deployed.id
                for deployed in sorted(there.deployed, key=lambda one: one.id != self._stable)
                if self._plan.runs(deployed)
            ),
            None,
        )
        for deployed in there.deployed:
            if deployed.id not in (self._stable, new):
                self._undeploy(deployed.id)
        return new

    def _deploy(self) -> str:
        """Put the new version behind the endpoint, without traffic; its id is ours, so that a lost
        answer is found out about.
        """
        own_id = str(random.SystemRandom().randrange(10**8, 10**9))
        request = deploy_request(self._google, self._plan, self._name, own_id)
        self._held.check()
        say(f"deploying {self._plan.called} beside what serves; this takes minutes")
        try:
            self._operation = endpoints.begin_deploy(self._google, request)
            endpoints.await_deploy(self._google, request, self._operation)
        except Failed:
            if own_id not in {deployed.id for deployed in self._settled().deployed}:
                raise
        self._operation = None
        return own_id

    def _move_traffic(self, new: str) -> None:
        """A share, an answer, all of it. Where nothing serves yet, nobody asks but us: it gets all
        at once.
        """
        share, check = self._plan.share, self._plan.check
        if new == self._stable:
            share = 100
        elif self._stable is None or share is None or share >= 100:
            share = 100
            self._set_traffic({new: 100})
        else:
            self._set_traffic({self._stable: 100 - share, new: share})
        if check is not None:
            say(f"{self._plan.called} has {share} % of the traffic; asking it")
            probe(self._google, self._name, new, share, check)
        self._set_traffic({new: 100})

    def _undo(self, error: BaseException) -> None:
        """The traffic back to what served before, nothing else left, and no endpoint of our making
        that never served.
        """
        if not self._name:
            return
        try:
            if self._operation is not None and not isinstance(
                error, Exception
            ):  # stopped by a signal: do not wait for what nobody wants
                endpoints.give_up(self._google, self._operation)
            if self._stable is not None:
                self._keep_only(self._stable)
                return
            if self._is_right:
                for deployed in self._settled().deployed:
                    self._undeploy(deployed.id)
            elif not self._created:
                return  # it was not looked at, and nothing was done to it
            there = endpoints.get(self._google, self._name)
            if (
                (self._created or self._live is None)
                and _OURS in there.labels.items()
                and not there.deployed
            ):
                endpoints.delete(self._google, self._name)
        except IngotError as wrong:
            say(
                f"warning: {self._name} could not be put back ({wrong}); the next `ingot deploy"
                f" {self._plan.name}` does it"
            )

    def _keep_only(self, one: str) -> None:
        self._set_traffic({one: 100})
        for deployed in self._settled().deployed:
            if deployed.id != one:
                self._undeploy(deployed.id)

    def _settled(self) -> VertexEndpoint:
        """The endpoint, when nothing is being done to it any more."""
        endpoints.settle(self._google, self._name)
        return self._seen()

    def _seen(self) -> VertexEndpoint:
        """The endpoint, if all that it serves is ours: looked at before each change, since others
        may use it.
        """
        there = endpoints.get(self._google, self._name)
        self._plan.check_ours(there)
        return there

    def _set_traffic(self, traffic: dict[str, int]) -> None:
        def act() -> bool:
            there = self._seen()
            if {key: share for key, share in there.traffic.items() if share} == traffic:
                return True
            self._held.check()
            endpoints.set_traffic(self._google, there, traffic)
            return True

        _insist(act)

    def _undeploy(self, deployed: str) -> None:
        def act() -> bool:
            if deployed not in {one.id for one in self._settled().deployed}:
                return True
            self._held.check()
            endpoints.undeploy(self._google, self._name, deployed)
            return True

        _insist(act)


def _insist(act: Callable[[], bool]) -> None:
    """Again where an answer was lost or the endpoint changed meanwhile: `act` looks first whether
    anything is to do.
    """
    for left in reversed(range(TRIES)):
        try:
            act()
            return
        except (Failed, WrongInput) as error:
            passes = (
                isinstance(error, Failed)
                or http_status_of(error) in (409, 412)
                or _AT_IT in str(error)
            )
            if not (left and passes):
                raise
        time.sleep(PAUSE_S)
